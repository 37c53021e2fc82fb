"""``comm.bucket_mb: auto`` in a run on real ranks: it trains to the same, and says once what it has chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from kept_records import Kept

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.records.records import EventRecord
from paceline.train.assemble import build_trainer

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 1, "heads": 2, "width": 16, "context": 8},
    "data": {"kind": "synthetic_tokens", "samples": 64, "context": 8, "vocab_size": 16},
    "optim": {"lr": 0.01, "clip_norm": 0.5},
    "train": {"steps": 12, "global_batch": 8, "accumulate": 2, "dtype": "float64"},
}


def train(comm: Communicator, strategy: str, bucket_mb: Any) -> tuple[dict[str, torch.Tensor], list[EventRecord]]:
    asked = {"bucket_mb": bucket_mb, "first_bucket_mb": 0.01}
    sink = Kept()
    config = config_from_dict({**GPT, "parallel": {"strategy": strategy}, "comm": asked})
    trainer = build_trainer(config, comm, sink=sink)
    trainer.run()
    return trainer.parts.engine.full_state_dict(), sink.events


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_run_trains_to_the_same_and_records_its_choice_once(gloo_pool: GlooPool, strategy: str) -> None:
    expected, nothing = run_virtual(lambda comm: train(comm, strategy, 25.0), 2)[0]
    assert nothing == []
    found = gloo_pool.run(train, strategy, "auto", ranks=2, group_timeout_s=60.0, timeout_s=120.0)
    for state, events in found:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
        (event,) = events
        assert event.name == "buckets"
        assert event.step == (9 if strategy == "ddp" else 1)
        assert event.detail == found[0][1][0].detail  # all ranks have agreed
        assert event.detail["bucket_mb"] > 0
        assert event.detail["bandwidth_gb_s"] > 0


def test_virtual_ranks_have_nothing_to_tell() -> None:
    assert [events for _, events in run_virtual(lambda comm: train(comm, "ddp", "auto"), 2)] == [[], []]
