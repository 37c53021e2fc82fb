"""Turns and ratios, on a clock that the arms move by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline_bench import timing as module
from paceline_bench.timing import Turns, interleave

CPU = torch.device("cpu")


class Clock:
    """Time that passes only when an arm says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def arm(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        def step() -> None:
            self.calls.append(name)
            self.now += seconds(self.calls.count(name))

        return step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "perf_counter", lambda: made.now)
    return made


def test_every_arm_is_compared_with_its_own_peer(clock: Clock) -> None:
    arms = {name: clock.arm(name, lambda _, s=s: s) for name, s in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 1.5))}
    peers = {"a": "a", "b": "a", "c": "d", "d": "d"}
    found = interleave(arms, Turns(rounds=3, steps_per_turn=2, warm_up=1), baseline=peers, device=CPU)
    assert {t.arm: (t.peer, t.ratio) for t in found} == {
        "a": ("a", 1.0),
        "b": ("a", 2.0),
        "c": ("d", 2.0),
        "d": ("d", 1.0),
    }
    assert [t.num_steps for t in found] == [6] * 4
    assert [t.median_ms for t in found] == [1000.0, 2000.0, 3000.0, 1500.0]


def test_one_baseline_is_the_peer_of_all(clock: Clock) -> None:
    arms = {"ours": clock.arm("ours", lambda _: 1.0), "theirs": clock.arm("theirs", lambda _: 4.0)}
    found = interleave(arms, Turns(rounds=2, steps_per_turn=1, warm_up=0), baseline="theirs", device=CPU)
    assert [(t.peer, t.ratio) for t in found] == [("theirs", 0.25), ("theirs", 1.0)]


def test_ratios_are_taken_within_a_round(clock: Clock) -> None:
    # The machine becomes ten times slower: absolute times say nothing, the ratio stands.
    arms = {name: clock.arm(name, lambda call, s=s: s * 10 ** (call - 1)) for name, s in (("a", 1.0), ("b", 1.2))}
    slow = interleave(arms, Turns(rounds=4, steps_per_turn=1, warm_up=0), baseline="a", device=CPU)[1]
    assert (slow.ratio, slow.ratio_low, slow.ratio_high) == pytest.approx((1.2, 1.2, 1.2))


def test_turns_rotate_after_the_warm_up_and_ranks_meet_before_each(clock: Clock) -> None:
    arms = {name: clock.arm(name, lambda _: 1.0) for name in "abc"}
    meetings: list[int] = []
    meet = lambda: meetings.append(len(clock.calls))  # noqa: E731
    interleave(arms, Turns(rounds=2, steps_per_turn=2, warm_up=1), baseline="a", device=CPU, meet=meet)
    assert "".join(clock.calls) == "abc" + "aabbcc" + "bbccaa"
    assert meetings == [3, 5, 7, 9, 11, 13]
