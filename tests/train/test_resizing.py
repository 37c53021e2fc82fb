"""Runs that end at any step and go on at any number of ranks: the samples are those of the run that never ended."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recomputed import recompute

from paceline.checkpoint import find_checkpoint, list_checkpoints, open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, config_from_dict
from paceline.train.assemble import build_trainer
from paceline.train.survive.hooks import Saver

BATCH, EVERY = 12, 3
STRATEGIES = ("ddp", "zero2", "fsdp")


@dataclass(frozen=True)
class Length:
    """How long a run is, and how many samples there are."""

    steps: int
    samples: int


SHORT, LONG = Length(15, 25), Length(30, 50)


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def attempt(comm: Communicator, folder: Path, strategy: str, end: int, length: Length) -> list[tuple[int, list[int]]]:
    """Trains from the newest checkpoint to ``end``, where it is left without a word; returns the ids of each step."""
    config = config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 8},
            "data": {"kind": "synthetic_classification", "samples": length.samples, "features": 4, "classes": 2},
            "train": {"steps": length.steps, "global_batch": BATCH},
            "parallel": {"ranks": comm.size, "strategy": strategy},
        }
    )
    saver = Saver(folder, CheckpointConfig(every_steps=EVERY, keep=99, asynchronous=False))
    trainer = build_trainer(config, comm, hooks=[])
    if list_checkpoints(folder):
        trainer.load_state(open_checkpoint(find_checkpoint("auto", folder)))
    seen: list[tuple[int, list[int]]] = []
    note = trainer.consumed.note

    def remember(position: int, next_position: int, indices: Any) -> None:
        seen.append((trainer.step, [int(each) for each in indices]))
        note(position, next_position, indices)

    trainer.consumed.note = remember  # type: ignore[method-assign]
    for result in trainer.steps():
        if result.step == end and end < length.steps:
            return seen  # before it is saved
        saver(trainer, result)
    return seen


def check(folder: Path, seed: int, run: Length) -> None:
    draw, ids, ends = random.Random(seed), dict[int, list[int]](), 0
    while run.steps not in ids:
        start = int(list_checkpoints(folder)[-1].name[-8:]) if list_checkpoints(folder) else 0
        end, ranks, strategy = draw.randrange(start + 1, run.steps + 9), draw.randrange(1, 5), draw.choice(STRATEGIES)
        found = run_virtual(lambda comm, end=end, how=strategy: attempt(comm, folder, how, end, run), ranks)
        assert all(each == found[0] for each in found)
        ids |= dict(found[0])  # a step that is done again has the last word
        ends += 1
        assert ends < 40
    straight = [index for step in sorted(ids) for index in ids[step]]
    state = open_checkpoint(find_checkpoint("auto", folder)).values["consumed"]
    length = state["segments"][0]["length"]
    assert len(straight) > 5 * length
    for epoch in range(len(straight) // length):
        assert sorted(straight[epoch * length : (epoch + 1) * length]) == list(range(length))
    twin = dict(run_virtual(lambda comm: attempt(comm, folder / "twin", "ddp", run.steps, run), 1)[0])
    assert ids == twin
    assert recompute(state) == {"hash": state["hash"], "count": state["count"]}
    assert (state["count"], len(state["segments"])) == (len(straight), 1)


def test_ids_are_exact_whatever_ends_and_resizes_the_run(tmp_path: Path) -> None:
    check(tmp_path, 8, SHORT)  # ends five times, on 1 to 3 ranks under all strategies


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 30))
def test_ids_are_exact_after_many_random_ends(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, LONG)
