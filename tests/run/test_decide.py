"""What is decided before ranks start, and told whole where it cannot be."""

from __future__ import annotations

import pytest

from paceline.config import load_config
from paceline.engines import precision
from paceline.errors import ConfigError, Problem
from paceline.run.decide import resolve_config


def test_a_precision_that_does_not_work_is_told_however_short_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "precision_problem", lambda *_: Problem(what="no product"))
    config = load_config(None, ["model.kind=mlp", "data.kind=digits", "train.global_batch=8", "parallel.device=cpu"])
    with pytest.raises(ConfigError, match=r"train\.precision = fp32: no product"):
        resolve_config(config)
