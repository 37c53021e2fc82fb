"""Runs whose model is spread over ranks: the trainer's losses, evaluations, samples and checkpoints are the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from kept_records import Kept
from saved_runs import save_now

from paceline.checkpoint import Checkpoint, open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.records.records import EvalRecord, EventRecord, Record, StepRecord
from paceline.train.assemble import build_trainer
from paceline.train.trainer import EvaluateHook, Every

STEPS = 2


def make_config(*, dropout: float = 0.0, **parallel: Any) -> Config:
    return config_from_dict(
        {
            "model": {
                "kind": "gpt", "layers": 2, "heads": 2, "width": 16, "context": 8, "tied": True, "dropout": dropout,
            },
            "data": {"kind": "synthetic_tokens", "samples": 25, "vocab_size": 24, "context": 8, "eval_fraction": 0.2},
            "train": {"steps": STEPS, "global_batch": 12, "accumulate": 3, "dtype": "float64", "eval_every": 1},
            "optim": {"lr": 0.01, "clip_norm": 0.5, "schedule": {"kind": "cosine", "warmup": 1}},
            "parallel": parallel,
        }
    )  # fmt: skip


def train(
    config: Config, ranks: int, *, until: int = STEPS, state: Checkpoint | None = None, save: Path | None = None
) -> list[list[Record]]:
    """Trains up to a step; returns the records of each rank."""

    def work(comm: Communicator) -> list[Record]:
        sink = Kept()
        trainer = build_trainer(config, comm, hooks=[Every(1, EvaluateHook())], sink=sink)
        if state is not None:
            trainer.load_state(state)
        for result in trainer.steps():
            for hook in trainer.hooks:
                hook(trainer, result)
            if result.step == until:
                break
        trainer.flush(wait=True)
        if save is not None:
            save_now(trainer, save)
        return sink.records

    return run_virtual(work, ranks)


@functools.cache
def alone_on_one_rank() -> list[Record]:
    """Trains the usual config on one rank; many tests compare with it."""
    return train(make_config(), 1)[0]


def losses(records: list[Record]) -> list[float]:
    return [record.loss for record in records if isinstance(record, StepRecord) and record.loss is not None]


def evaluations(records: list[Record]) -> list[tuple[float, float | None, int]]:
    return [(r.loss, r.accuracy, r.samples) for r in records if isinstance(r, EvalRecord)]


MESHES: list[tuple[int, dict[str, Any]]] = [
    (2, {"pipeline": 2, "schedule": "zb-h1"}),
    (4, {"pipeline": 2, "strategy": "zero2"}),
    (2, {"tensor": 2}),
    (8, {"pipeline": 2, "tensor": 2, "data": 2, "strategy": "zero1"}),
]
SHARED: list[tuple[int, dict[str, Any]]] = [
    (4, {"context": 2, "strategy": "fsdp"}),
    (3, {"context": 3, "context_method": "gather"}),
    (4, {"context": 2, "tensor": 2}),
    (4, {"context": 2, "pipeline": 2}),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("ranks", "parallel"), [*MESHES, *SHARED], ids=str)
def test_a_spread_run_is_the_run_of_one_rank(ranks: int, parallel: dict[str, Any]) -> None:
    alone = alone_on_one_rank()
    everyone = train(make_config(ranks=ranks, **parallel), ranks)
    steps = [[record for record in records if isinstance(record, StepRecord)] for records in everyone]
    for number, expected in enumerate(record for record in alone if isinstance(record, StepRecord)):
        counted = [records[number] for records in steps]
        assert sum(record.samples for record in counted) == expected.samples
        # Each share of the batch has its own loss, known to all ranks that have this share.
        shares = {round(record.loss_sum, 9): record for record in counted}
        total = sum(record.loss_sum for record in shares.values()) / sum(r.count for r in shares.values())
        assert total == pytest.approx(expected.loss, abs=1e-9)
        assert [record.grad_norm for record in counted] == pytest.approx([expected.grad_norm] * ranks, abs=1e-9)
    for records in everyone:
        for found, expected_row in zip(evaluations(records), evaluations(alone), strict=True):
            assert found == pytest.approx(expected_row, abs=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MESHES[1], MESHES[2]),
        (SHARED[0], SHARED[1]),
        pytest.param(SHARED[3], SHARED[2], marks=pytest.mark.exhaustive),
        pytest.param(SHARED[2], None, marks=pytest.mark.exhaustive),
        pytest.param(None, MESHES[3], marks=pytest.mark.exhaustive),
        pytest.param(MESHES[3], MESHES[0], marks=pytest.mark.exhaustive),
        pytest.param(MESHES[1], None, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_with_another_mesh(before: Any, after: Any, tmp_path: Path) -> None:
    alone = alone_on_one_rank()
    ranks, parallel = before or (1, {})
    train(make_config(ranks=ranks, **parallel), ranks, until=1, save=tmp_path)
    state = open_checkpoint(tmp_path / "step-00000001")
    ranks, parallel = after or (1, {})
    everyone = train(make_config(ranks=ranks, **parallel), ranks, state=state)
    for records in everyone:
        assert evaluations(records) == [pytest.approx(evaluations(alone)[-1], abs=1e-9)]


def test_random_numbers_go_on_with_another_number_of_context_ranks(tmp_path: Path) -> None:
    def run(ranks: int, **options: Any) -> list[list[Record]]:
        return train(make_config(ranks=ranks, context=ranks, dropout=0.3), ranks, **options)

    whole = run(2)
    run(3, until=1, save=tmp_path)
    for records in run(2, state=open_checkpoint(tmp_path / "step-00000001")):
        assert evaluations(records) == [pytest.approx(evaluations(whole[0])[-1], abs=1e-9)]


def test_dropout_is_the_same_on_the_ranks_of_a_layer_and_differs_between_stages() -> None:
    config = make_config(ranks=4, tensor=2, pipeline=2, dropout=0.3)
    everyone = train(config, 4)
    # Ranks of a layer that dropped other features would each go on with weights of their own, and disagree.
    assert evaluations(everyone[0]) == evaluations(everyone[1]) == evaluations(everyone[3])
    streams = run_virtual(lambda comm: build_trainer(config, comm).parts.engine.random_stream, 4)
    assert streams == [0, 0, 1, 1]
    assert not any(isinstance(record, EventRecord) for records in everyone for record in records)
