"""Ranks of one host that compare their steps: which updates they note, and how soon a fault is found."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from paceline.comm.ledger.file import LedgerReader
from paceline.comm.ledger.ledger import Ledger, UpdateNotes
from paceline.health.verdict import HangLimits, HangVerdict
from paceline.run.own_loop import StepPairing
from paceline.run.watch import Watch, WatchPolicy

STEPS, A_STEP = 150, 5  # collectives of a step
SOON = 2 * 16


class TwoLedgers(Watch):
    """A watch of ledgers in memory."""

    others: list[LedgerReader]

    def readers(self) -> list[LedgerReader]:
        return self.others


class Rank:
    """A rank whose collectives are counted, and not made."""

    def __init__(self, folder: Path, rank: int, others: list[LedgerReader]) -> None:
        self._ledger = Ledger(rank=rank, world=2, is_own_loop=True)
        self._ledger.add_group((0, 1))
        watch = TwoLedgers(folder, {"a": [0, 1]}, WatchPolicy(limits=HangLimits()), host="a", ledger=self._ledger)
        watch.others = others
        self._pairing = StepPairing(self._ledger, watch)

    def reader(self) -> LedgerReader:
        return self._ledger.reader()

    def make_step(self, step: int, leaves_out: str) -> HangVerdict | None:
        """Makes a step, as the code of a user does: ``step`` is a variable of this function."""
        self.last_step = step
        if leaves_out == "step":
            return None
        if leaves_out != "backward":
            self._ledger.counts[0] += A_STEP
        return None if leaves_out == "update" else self._pairing.note(sys._getframe())

    def finish(self) -> HangVerdict | None:
        return self._pairing.finish()


class Ranks:
    """Two ranks that make their steps in turns, each as far as its collectives let it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paceline.run.own_loop._SELDOM_S", 1e9)  # not by the clock
        readers: list[list[LedgerReader]] = [[], []]
        self.both = [Rank(folder, rank, readers[1 - rank]) for rank in range(2)]
        for own, rank in zip(readers, self.both, strict=True):
            own.append(rank.reader())

    def train(self, fault: str, bad_step: int, steps: int = STEPS) -> tuple[int, HangVerdict] | None:
        """Trains; rank 1 leaves something out in one step. Returns the step in which that is found, and the verdict."""
        for step in range(steps + (fault == "step")):
            for place, rank in enumerate(self.both):
                leaves_out = fault if place == 1 and step == bad_step else ""
                own_step = step if fault != "step" or place == 1 or step < bad_step else step - 1
                if fault == "step" and place == 0 and step == bad_step:
                    continue  # it waits for rank 1 in the collectives of this step
                found = rank.make_step(own_step, leaves_out)
                if found is not None:
                    return step, found
        found = next((each for rank in self.both if (each := rank.finish()) is not None), None)
        return None if found is None else (steps, found)


@pytest.mark.parametrize("bad_step", [12, 40, 71, 100])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("step", "rank 1 left out a step of its loop"),
        ("backward", "rank 1 made an update without a backward pass"),
        ("update", "rank 1 left out an update"),
    ],
)
def test_a_fault_is_found_soon_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, told: str, bad_step: int
) -> None:
    found = Ranks(tmp_path, monkeypatch).train(fault, bad_step)
    assert found is not None
    step, verdict = found
    assert verdict.ranks == (1,)
    assert verdict.sentence.startswith(told)
    assert step <= bad_step + (1 if bad_step < 30 else SOON)


def test_an_update_left_out_near_the_end_is_found_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad_step in range(STEPS - 8, STEPS - 1):
        found = Ranks(tmp_path, monkeypatch).train("update", bad_step)
        assert found is not None
        assert found[1].sentence.startswith("rank 1 left out an update")


def test_ranks_that_do_the_same_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (1, 33, STEPS):
        assert Ranks(tmp_path, monkeypatch).train("", -1, steps) is None


@pytest.mark.parametrize("largest", [1, 7, 300])
def test_ranks_note_the_same_updates_and_few_of_them(largest: int) -> None:
    now = 0.0
    ranks = [UpdateNotes(seldom_s=1.0, now=lambda: now) for _ in range(2)]
    source, collectives, noted = random.Random(largest), 0, 0
    for _ in range(2000):
        collectives += source.randint(largest // 2 + 1, largest)
        due = [rank.count(collectives) for rank in ranks]
        assert due[0] == due[1]
        if due[0]:
            noted += 1
            assert {rank.note(0, None).updates for rank in ranks} == {ranks[0].note(0, None).updates}
    assert 2000 / 20 < noted < 2000 / 6


def test_every_update_of_a_slow_loop_is_noted() -> None:
    now = 0.0
    notes = UpdateNotes(seldom_s=1.0, now=lambda: now)
    for number in range(1, 100):
        now += 1.1
        assert notes.count(3 * number)
        assert notes.note(0, None).updates == number
    assert not notes.count(3 * 99)  # nothing was reduced for it
    now += 0.1
    assert not notes.count(3 * 100)
    assert not notes.is_noted
