"""Steps that are replayed from a CUDA graph: the same run as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_records import Kept

from paceline.comm.solo import SoloCommunicator
from paceline.config import config_from_dict
from paceline.errors import TrainingError
from paceline.records.records import EventRecord
from paceline.train.assemble import build_trainer

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


EXPERTS = {"experts": 4, "active": 2, "router": {"balance": "bias", "balance_weight": 0.01}}


def values(optim: str = "adamw", model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    momentum = {"momentum": 0.9, "nesterov": True} if optim == "sgd" else {}
    return {
        "model": {"kind": "gpt", "size": "gpt-nano", "context": 64, "dropout": 0.1, **(model or {})},
        "data": {"kind": "synthetic_tokens", "samples": 150, "vocab_size": 64, "context": 64},
        "train": {"steps": 25, "global_batch": 16, "seed": 3, **train},  # 150 samples: every tenth batch is ragged
        "optim": {"kind": optim, **momentum, "lr": 1e-3, "clip_norm": 0.5, "schedule": {"kind": "cosine", "warmup": 5}},
    }


def run(device: str, **train: Any) -> tuple[list[float], list[EventRecord], dict[str, torch.Tensor]]:
    sink = Kept()
    trainer = build_trainer(config_from_dict(values(**train)), SoloCommunicator(torch.device(device)), sink=sink)
    trainer.run()
    events = [record for record in sink.records if isinstance(record, EventRecord)]
    return [record.loss_sum for record in sink.steps], events, trainer.parts.engine.full_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
@pytest.mark.parametrize("accumulate", [1, 2])
class TestOnGpu:
    pytestmark = on_gpu

    def test_a_run_with_graphs_is_the_same_to_the_bit(self, precision: str, accumulate: int) -> None:
        self.compare({"precision": precision, "accumulate": accumulate})

    def test_so_is_one_of_sgd(self, precision: str, accumulate: int) -> None:
        if precision != "bf16_master":
            self.compare({"optim": "sgd", "precision": precision, "accumulate": accumulate})

    def test_so_is_one_whose_ranks_add_up_loads_of_experts(self, precision: str, accumulate: int) -> None:
        if precision == "bf16_master":
            self.compare({"model": EXPERTS, "precision": precision, "accumulate": accumulate})

    @staticmethod
    def compare(options: dict[str, Any]) -> None:
        plain, _, state = run("cuda", cuda_graphs=False, **options)
        graphed, events, graphed_state = run("cuda", cuda_graphs=True, **options)
        decided = [event.detail["used"] for event in events if event.name == "cuda_graphs"]
        assert decided == [True]
        assert graphed == plain
        assert all(torch.equal(value, graphed_state[name]) for name, value in state.items())


def test_graphs_are_refused_with_the_reason_where_there_is_no_gpu() -> None:
    with pytest.raises(TrainingError, match="the device is cpu"):
        run("cpu", cuda_graphs=True)


def test_auto_takes_none_on_a_cpu() -> None:
    losses, events, _ = run("cpu", steps=6, global_batch=4)
    assert len(losses) == 6
    assert not [event for event in events if event.name == "cuda_graphs"]
