"""Histograms of weights and gradients: exact over ranks, in the records and in TensorBoard."""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_records import Kept
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.engines.apply import parallelize
from paceline.records.records import EventRecord, Record, StepRecord, parse_line, to_line
from paceline.records.sinks import TensorBoardSink
from paceline.train.assemble import build_trainer
from paceline.train.evaluate import measure_histograms

trainer_module = importlib.import_module("paceline.train.trainer")

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 8, "context": 4, "tied": True},
    "data": {"kind": "synthetic_tokens", "samples": 64, "vocab_size": 11, "context": 4},
    "optim": {"clip_norm": 0.01, "groups": {"*norm*": {"frozen": True}}},
    "train": {"steps": 4, "global_batch": 8, "dtype": "float64"},
    "monitor": {"histograms": 2},
}


def train(comm: Communicator, values: dict[str, Any]) -> tuple[list[Record], dict[str, torch.Tensor]]:
    """Returns the records of a rank, and the parameters at the end."""
    sink = Kept()
    trainer = build_trainer(config_from_dict(values), comm, sink=sink)
    trainer.run()
    return sink.records, trainer.parts.engine.full_state_dict()


def histograms(records: list[Record]) -> dict[tuple[int, str], dict[str, Any]]:
    found = [each for each in records if isinstance(each, EventRecord) and each.name == "histogram"]
    return {(each.step, each.detail["parameter"]): each.detail for each in found}


@functools.cache
def of_one_process() -> tuple[list[Record], dict[str, torch.Tensor]]:
    return run_virtual(functools.partial(train, values=GPT), ranks=1)[0]


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "fsdp"},
        {"strategy": "ddp"},
        pytest.param({"strategy": "zero2"}, marks=pytest.mark.exhaustive),
        pytest.param({"strategy": "hybrid", "shard_ranks": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"strategy": "fsdp", "tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"strategy": "zero1", "pipeline": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda parallel: "-".join(map(str, parallel.values())),
)
def test_ranks_together_have_the_histograms_of_one_process(parallel: dict[str, Any]) -> None:
    ranks = 4 if len(parallel) > 1 else 2
    accumulate = {"microbatch": 1} if "pipeline" in parallel else {}
    values = {**GPT, "parallel": parallel, "train": {**GPT["train"], **accumulate}}
    found = run_virtual(functools.partial(train, values=values), ranks=ranks)
    alone, ours = histograms(of_one_process()[0]), histograms(found[0][0])
    assert ours.keys() == alone.keys()
    assert not any(histograms(records) for records, _ in found[1:])  # rank 0 writes
    for key, expected in alone.items():
        for kind in ("weights", "gradients"):
            if expected[kind] is None:
                assert ours[key][kind] is None
                continue
            assert ours[key][kind]["counts"] == expected[kind]["counts"], key
            assert ours[key][kind]["edges"] == pytest.approx(expected[kind]["edges"], rel=1e-10)
            for name in ("norm", "min", "max", "mean"):
                assert ours[key][kind][name] == pytest.approx(expected[kind][name], rel=1e-9, abs=1e-15)


def test_a_histogram_counts_every_element() -> None:
    records, state = of_one_process()
    found = histograms(records)
    assert {step for step, _ in found} == {2, 4}
    names = {name for _, name in found}
    assert names <= state.keys()
    for (step, name), detail in found.items():
        weights = detail["weights"]
        assert weights["count"] == sum(weights["counts"]) == state[name].numel()
        assert len(weights["edges"]) == len(weights["counts"]) + 1
        assert weights["edges"] == sorted(weights["edges"])
        assert weights["edges"][0] <= weights["min"] <= weights["max"] <= weights["edges"][-1]
        assert (detail["gradients"] is None) == ("norm" in name)  # frozen
        assert step in (2, 4)
    steps = {each.step: each for each in records if isinstance(each, StepRecord)}
    for step in (2, 4):  # before they are clipped
        squares = sum(
            each["gradients"]["norm"] ** 2 for (at, _), each in found.items() if at == step and each["gradients"]
        )
        assert squares**0.5 == pytest.approx(steps[step].grad_norm)


def test_what_is_far_out_or_not_finite_is_counted_too() -> None:
    engine = parallelize(nn.Linear(8, 1, bias=False), SoloCommunicator(torch.device("cpu")))
    values = torch.tensor([[-1e6, -1e6, 0.0, 1e-30, 1.0, 1.2, math.inf, math.nan]])
    with torch.no_grad():
        next(engine.parameters()).copy_(values)
    (found,) = measure_histograms(engine)
    assert (found["parameter"], found["gradients"]) == ("weight", None)
    weights = found["weights"]
    assert (weights["count"], weights["not_finite"]) == (6, 2)
    assert weights["counts"] == [2, 0, 1, 1, 0, 1, 1]
    smallest, half = 2.0**-40, 2.0**0.5
    assert weights["edges"] == pytest.approx([-1e6, -(2.0**16), -smallest, 0.0, smallest, 1 / half, 1.0, half])
    assert (weights["min"], weights["max"]) == pytest.approx((-1e6, 1.2))
    next(engine.parameters()).grad = torch.full_like(values, 3.0)
    (found,) = measure_histograms(engine, torch.tensor(0.5))  # a factor that the gradients lack
    assert (found["gradients"]["max"], found["gradients"]["counts"]) == (1.5, [8])


def test_gradients_of_masters_are_measured_before_an_optimizer_asks_for_them() -> None:
    """An optimizer that writes the copies in bf16 too leaves the gradients at those, where they arrive."""
    engine = parallelize(nn.Linear(2, 1, bias=False), SoloCommunicator(torch.device("cpu")), precision="bf16_master")
    engine.fuse_cast()
    engine(torch.tensor([[2.0, -4.0]])).sum().backward()
    (found,) = measure_histograms(engine)
    assert (found["gradients"]["min"], found["gradients"]["max"]) == (-4.0, 2.0)


def test_readers_of_records_take_it_for_an_event() -> None:
    records, _ = of_one_process()
    event = next(each for each in records if isinstance(each, EventRecord) and each.name == "histogram")
    assert parse_line(to_line(event)) == event


def test_none_are_made_where_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "measure_histograms", lambda *_: pytest.fail("measured"))
    for asked in (0, None):
        run_virtual(functools.partial(train, values={**GPT, "monitor": {"histograms": asked}}), ranks=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's reader, which only tests use
def test_tensorboard_gets_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records, _ = of_one_process()
    sink = TensorBoardSink(tmp_path)
    sink.write(*records)
    sink.close()
    reader = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    reader.Reload()
    for (_, name), detail in histograms(records).items():
        shown = reader.Histograms(f"weights/{name}")
        assert [each.step for each in shown] == [2, 4]
        assert sum(shown[0].histogram_value.bucket) == detail["weights"]["count"]
        assert (f"gradients/{name}" in reader.Tags()["histograms"]) == (detail["gradients"] is not None)
