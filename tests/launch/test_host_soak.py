"""Hosts that are lost and come back, at random: the short version of ``scripts/soak.py --hosts``."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_soak import KINDS, is_right, run_soak, soaking

from slow_links.network import NoNetworkError

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1800)]


def test_a_run_survives_losses_and_returns_and_tells_what_happened(tmp_path: Path) -> None:
    try:
        with soaking(tmp_path, seed=1) as soak:
            found = run_soak(soak, len(KINDS), num_steps=300)
            log = soak.log
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert is_right(found["summary"]), (found, log)
