"""The audit of consumed samples finds each fault that is planted, and lets pass what has a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.tensors import encode
from paceline.checkpoint.tools.audit import check_samples
from paceline.data.order import ConsumedIds, DataOrder

ORDER = DataOrder(length=40, global_batch=8, seed=3)


class Run:
    """A run that consumes what it is told to, right or wrong, and saves what the audit reads."""

    def __init__(self, order: DataOrder = ORDER) -> None:
        self.order = order
        self.ids = ConsumedIds(order)
        self.position = 0
        self.step = 0

    def steps(self, number: int) -> Run:
        for _ in range(number):
            batch = self.order.batch_at(self.position)
            self.ids.note(batch.position, batch.next_position, batch.indices)
            self.position, self.step = batch.next_position, self.step + 1
        return self

    def resumed(self, **changes: Any) -> Run:
        """Goes on with another order."""
        other = Run(replace(self.order, **changes))
        other.ids.load_state_dict(self.ids.state_dict())
        other.position, other.step = self.position, self.step
        return other

    def saved(self, **config: Any) -> Manifest:
        order = self.order
        data = {"seed": None, "shuffle": order.shuffle, "last_batch": "drop" if order.drop_last else "keep"}
        return Manifest(
            step=self.step,
            position=self.position,
            world=1,
            tensors={},
            files={},
            values={
                "consumed": encode(self.ids.state_dict()),
                "data": encode({"length": config.get("length", order.length), "global_batch": order.global_batch}),
            },
            about={
                "config": {
                    "data": {**data, **config.get("data", {})},
                    "train": {"seed": order.seed, "global_batch": order.global_batch, **config.get("train", {})},
                }
            },
        )


def problems_of(manifest: Manifest) -> str:
    return "\n".join(check_samples(manifest).problems)


@pytest.mark.parametrize("order", [ORDER, replace(ORDER, length=37), replace(ORDER, length=37, drop_last=True)])
@pytest.mark.parametrize("steps", [0, 1, 5, 13])
def test_a_run_in_order_is_good(order: DataOrder, steps: int) -> None:
    found = check_samples(Run(order).steps(steps).saved())
    assert found.is_good, found.problems
    assert "each once an epoch" in found.finding


def test_another_batch_from_some_step_on_is_good() -> None:
    found = check_samples(Run().steps(3).resumed(global_batch=16).steps(4).saved())
    assert found.is_good, found.problems
    assert "0 to 24 of 40 samples, seed 3, batch 8; then 24 to 80 of 40 samples, seed 3, batch 16" in found.finding


def test_samples_that_a_roll_back_left_out_are_told_and_no_fault() -> None:
    run = Run().steps(2)
    run.ids.skip(16, 32)
    run.ids.skip(32, 48)
    run.position = 48
    for found in (check_samples(run.saved()), check_samples(run.steps(3).saved())):
        assert found.is_good, found.problems
        assert "positions 16 to 48 were left out by a roll-back, as it noted" in found.finding
        assert "each at most once an epoch" in found.finding


def test_the_end_of_an_epoch_that_is_dropped_is_told_and_no_fault() -> None:
    run = Run(replace(ORDER, drop_last=True)).steps(4).resumed(global_batch=20).steps(1)
    found = check_samples(run.saved())
    assert found.is_good, found.problems
    assert "positions 32 to 40 are the end of an epoch" in found.finding


def test_a_gap_without_a_reason_is_a_fault() -> None:
    run = Run().steps(2)
    run.position = 24
    assert "goes on at 24: positions 16 to 24 would never be consumed" in problems_of(run.saved())
    told = problems_of(run.steps(1).saved())
    assert told == "positions 16 to 24 were never consumed, and nothing noted says why"


def test_a_beginning_that_is_not_the_first_sample_is_a_fault() -> None:
    run = Run()
    run.position = 8
    assert "positions 0 to 8 were never consumed" in problems_of(run.steps(1).saved())


def test_what_is_noted_as_left_out_and_was_consumed_is_a_fault() -> None:
    run = Run().steps(4)
    run.ids.skip(8, 16)
    assert problems_of(run.saved()) == "positions 8 to 16 are noted as left out, and are no gap in what was consumed"


def test_an_overlap_is_a_fault_with_its_positions_and_ids() -> None:
    run = Run().steps(3)
    run.position = 16
    assert "positions 16 to 24 would be consumed twice" in problems_of(run.saved())
    told = problems_of(run.steps(2).saved())
    assert "positions 16 to 24 were consumed twice: a segment begins before the one before it has ended" in told
    ids = ", ".join(map(str, ORDER.batch_at(16).indices[:3]))
    assert f"epoch 0: 8 ids come a second time, from position 16 on: {ids}, ..." in told


def test_another_order_within_an_epoch_that_repeats_ids_is_a_fault() -> None:
    told = problems_of(Run().steps(4).resumed(seed=4).steps(1).saved())
    assert told.startswith("epoch 0: ")
    assert "ids come a second time, from position 3" in told
    assert not problems_of(Run().steps(5).resumed(seed=4).steps(5).saved())  # from an epoch's beginning on


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"train": {"seed": 4}}, "the order had seed = 3, and the saved config says 4"),
        ({"data": {"seed": 5}}, "the order had seed = 3, and the saved config says 5"),
        ({"data": {"shuffle": False}}, "the order had shuffle = True, and the saved config says False"),
        ({"data": {"last_batch": "drop"}}, "the order had drop_last = False, and the saved config says True"),
        ({"train": {"global_batch": 16}}, "the order had global_batch = 8, and the saved config says 16"),
        ({"length": 41}, "the order had length = 40, and the saved config says 41"),
    ],
)
def test_an_order_that_is_not_the_configs_is_a_fault(config: dict[str, Any], told: str) -> None:
    assert problems_of(Run().steps(3).saved(**config)) == told


def test_batches_that_do_not_make_the_step_are_a_fault() -> None:
    run = Run().steps(3)
    run.step = 4
    assert problems_of(run.saved()) == "3 batches were consumed, and the checkpoint is of step 4"


def test_a_segment_that_ends_within_a_batch_is_a_fault() -> None:
    run = Run().steps(2)
    batch = ORDER.batch_at(16)
    run.ids.note(16, 20, batch.indices[:4])
    run.position, run.step = 20, 3
    told = problems_of(run.saved())
    assert told == "a segment ends at position 20, and the batch of 8 there goes from 16 to 24"


@pytest.mark.parametrize("fault", ["lost", "twice", "swapped"])
def test_ids_that_are_not_those_of_the_order_are_a_fault(fault: str) -> None:
    run = Run().steps(1)
    ids = run.order.batch_at(8).indices.copy()
    if fault == "lost":
        ids = ids[:-1]
    elif fault == "twice":
        ids[0] = ids[1]
    else:
        ids = np.roll(ids, 1)
    run.ids.note(8, 16, ids)
    run.position, run.step = 16, 2
    wanted = "15 samples were consumed, and the order of the data has 16" if fault == "lost" else "in another order"
    assert wanted in problems_of(run.saved())
