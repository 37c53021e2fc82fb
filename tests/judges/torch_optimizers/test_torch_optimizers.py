"""torch's own catalogue of optimizers: every configuration, three steps under zero and fsdp, against one process.

``optimizer_cases.py`` says how. An optimizer whose update of one number depends on numbers that lie on other ranks is
refused with the reason.
"""

from __future__ import annotations

import functools

import pytest
import torch
from judging import outcome_of
from optimizer_cases import alone, configurations, on_a_rank

from paceline.comm.virtual.communicator import run_virtual

pytestmark = [pytest.mark.judge, pytest.mark.filterwarnings("ignore")]

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
CONFIGURATIONS = configurations("cpu")


@pytest.mark.parametrize("is_built_first", [False, True], ids=["of-the-engine", "of-the-model"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_optimizer_updates_as_in_one_process(name: str, strategy: str, is_built_first: bool) -> None:
    kind, settings = CONFIGURATIONS[name]
    if kind is torch.optim.Muon and strategy != "ddp" and not is_built_first:
        pytest.skip("torch's Muon refuses flat pieces itself, in its constructor; optim.kind = muon is ours, sharded")
    given = {"kind": kind, "settings": settings, "strategy": strategy, "is_built_first": is_built_first}
    work = functools.partial(on_a_rank, **given)
    found = outcome_of(lambda: run_virtual(work, 2))
    expected = alone(kind, settings, 2)
    for state in found:
        torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)
