"""What cannot be verified is refused with values, rule and fix, all at once, and before anything starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.verify import case as module
from paceline.verify import certificate as certificates
from paceline.verify.case import Settings, check_settings, complete


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    del step
    return torch.ones(4, 5), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("backend", ["virtual", "gloo", "shared_memory"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks = 0\n  there is at least one\n  give ranks = 1 or more"),
        ({"steps": 0}, "steps = 0"),
        ({"accumulate": -1}, "accumulate = -1"),
        ({"clip": 0.0}, "clip = 0.0\n  a largest norm is above 0\n  give a number above 0, or none"),
        ({"clip": math.nan}, "clip = nan"),
        ({"tolerance": 0.0}, "tolerance = 0.0"),
        ({"tolerance": math.inf}, "tolerance = inf"),
        ({"strategy": "dpp"}, "strategy = 'dpp' is unknown\n  it is one of ddp, zero1"),
        ({"strategy": "zero4"}, "did you mean zero3?"),
        ({"strategy": "auto"}, "strategy = 'auto'\n  a run decides by its memory"),
        ({"precision": "bf61"}, "precision = 'bf61' is unknown\n  it is one of fp32, bf16"),
        ({"checkpoint_activations": "ful"}, "did you mean full?"),
        ({"pipeline": 2, "schedule": "1f1bb"}, "there is no schedule '1f1bb'"),
        ({"schedule": "1f1bb"}, "did you mean 1f1b?"),
        ({"shard_ranks": 2}, "shard_ranks = 2 has no effect with strategy = ddp"),
        (
            {"strategy": "fsdp", "shard_ranks": 2},
            "shard_ranks = 2 has no effect with strategy = fsdp\n  it belongs to hybrid",
        ),
        ({"strategy": "hybrid", "shard_ranks": 3}, "shard_ranks = 3 does not divide ranks = 4"),
        ({"strategy": "hybrid", "shard_ranks": -2}, "shard_ranks = -2"),
        ({"strategy": "hybrid", "ranks": 5}, "strategy = hybrid on 5 ranks of one host, without shard_ranks"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(
    options: dict[str, Any], message: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_processes", "run_virtual", "run_reference"):
        monkeypatch.setattr(certificates, name, None)  # nothing is started
    with pytest.raises(UsageError) as refusal:
        paceline.verify(lambda: nn.Linear(5, 3), make_batch, F.cross_entropy, backend=backend, **options)
    assert message in str(refusal.value)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="backend = 'mpi' is unknown\n  it is one of virtual, gloo, shared_memory"):
        paceline.verify(nn.Linear, make_batch, F.cross_entropy, backend="mpi")


def test_everything_is_told_at_once() -> None:
    settings = Settings.of(strategy="fsdb", ranks=0, clip=-1.0, precision="fp9", shard_ranks=2)
    settings = replace(settings, backend="mpi", tolerance=-1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as refusal:
        check_settings(settings, batch=0)
    for part in ("fsdb", "ranks = 0", "clip = -1.0", "fp9", "shard_ranks = 2", "mpi", "tolerance = -1", "batch = 0"):
        assert part in str(refusal.value)


def test_a_precision_that_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: Any) -> None:
        raise UsageError("float16 does not work there")

    monkeypatch.setattr(module, "check_precision", check)
    with pytest.raises(UsageError, match="float16 does not work there"):
        paceline.verify(lambda: nn.Linear(5, 3), make_batch, F.cross_entropy, precision="fp16")


def test_only_hybrid_without_a_size_is_completed() -> None:
    assert complete(Settings.of(strategy="hybrid", ranks=4)).layout.shard_ranks == 2
    chosen = Settings.of(strategy="hybrid", ranks=4, shard_ranks=4, prefetch=2)
    for settings in (chosen, Settings.of(strategy="hybrid", ranks=3), Settings.of(strategy="fsdp")):
        assert complete(settings) == settings
