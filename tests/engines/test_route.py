"""Routes: the same collectives in the same order on every rank, whatever each of them needs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.flat.gathering import Leg, Route, complete, issue_plan
from paceline.errors import RankFailedError

UNITS = 5


def gather(unit: int) -> Leg:
    return Leg(unit, "gather")


def reduce(unit: int) -> Leg:
    return Leg(unit, "reduce")


NAMES = [f"number {unit}" for unit in range(UNITS)]
FORWARD = [gather(unit) for unit in range(UNITS)]
BACKWARD = [leg for unit in reversed(range(UNITS)) for leg in (gather(unit), reduce(unit))]


def walk(
    comm: Communicator, order: list[Leg], passes: list[list[Leg]], prefetch: int = 1
) -> list[list[tuple[str, Leg]]]:
    """Reaches the legs of each pass; returns what was issued and released in it."""
    done: list[tuple[str, Leg]] = []
    issue, release = (lambda leg: done.append(("issued", leg))), (lambda leg: done.append(("released", leg)))
    route = Route(comm, order, NAMES, issue, release, prefetch)
    history = []
    for legs in passes:
        done.clear()
        route.begin()
        for leg in legs:
            route.reach(leg)
        route.finish()
        history.append(list(done))
    return history


def collectives(history: list[list[tuple[str, Leg]]]) -> list[list[Leg]]:
    return [[leg for what, leg in done if what == "issued"] for done in history]


subsets = st.lists(st.booleans(), min_size=UNITS, max_size=UNITS)


@given(needs=st.lists(st.lists(subsets, min_size=3, max_size=3), min_size=1, max_size=3), prefetch=st.integers(0, 3))
def test_ranks_that_skip_different_units_issue_the_same(needs: list[list[list[bool]]], prefetch: int) -> None:
    """Three passes; in each, every rank skips units of its own. Whoever needs a leg gets it."""
    ranks = len(needs)
    passes = [
        [[leg for leg, is_needed in zip(FORWARD, row, strict=True) if is_needed] for row in rank] for rank in needs
    ]
    found = run_virtual(lambda comm: walk(comm, FORWARD, passes[comm.rank], prefetch), ranks=ranks)
    assert all(collectives(history) == collectives(found[0]) for history in found)
    for mine, history in zip(passes, found, strict=True):
        for legs, issued in zip(mine, collectives(history), strict=True):
            assert set(legs) <= set(issued)
    later = collectives(found[0])[1:]
    assert all(sorted(legs) == FORWARD for legs in later), "after the first pass, every unit once"


def test_a_gather_that_is_passed_by_is_released() -> None:
    passes = [FORWARD, [FORWARD[0], FORWARD[3]]]
    _, second = run_virtual(lambda comm: walk(comm, FORWARD, passes, prefetch=0), ranks=2)[0]
    assert [leg for what, leg in second if what == "released"] == [FORWARD[1], FORWARD[2], FORWARD[4]]


def test_a_unit_that_nobody_has_needed_yet_has_its_place() -> None:
    a, b, c, d = FORWARD[:4]
    assert complete([a, c, d], [a, b, c, d]) == [a, b, c, d]
    assert complete([], [a, b]) == [a, b]
    assert complete([d, c, c, a], [a, b, c, d]) == [b, d, c, a]


@given(legs=st.permutations(BACKWARD), prefetch=st.integers(0, 4))
def test_every_leg_is_issued_once_and_gathers_at_most_so_far_ahead(legs: list[Leg], prefetch: int) -> None:
    first, *plan = issue_plan(legs, prefetch)
    assert sorted(itertools.chain(first, *plan)) == sorted(legs)
    gathers = [leg for leg in legs if leg.is_gather]
    seen: list[Leg] = list(first)
    assert seen == gathers[:prefetch]
    for leg, now in zip(legs, plan, strict=True):
        seen += now
        assert leg in seen
        if leg.is_gather:
            assert [each for each in seen if each.is_gather] == gathers[: gathers.index(leg) + 1 + prefetch]


def test_reductions_wait_for_those_before_them() -> None:
    def work(comm: Communicator) -> tuple[list[Leg], list[Leg]]:
        issued: list[Leg] = []
        route = Route(comm, BACKWARD, NAMES, issued.append, lambda _leg: None, 0)
        route.begin()
        route.finish()
        route.begin()
        issued.clear()
        ready = {reduce(3)}
        route.reach(gather(4))
        route.reach_ready(ready.__contains__)  # unit 4 comes first
        before = list(issued)
        ready.add(reduce(4))
        route.reach_ready(ready.__contains__)
        return before, issued[len(before) :]

    assert run_virtual(work, ranks=1)[0] == ([gather(4)], [reduce(4)])


def test_a_leg_that_was_passed_is_an_error_with_a_name() -> None:
    def work(comm: Communicator) -> None:
        walk(comm, FORWARD, [FORWARD, [FORWARD[2], FORWARD[1]]])

    with pytest.raises(RankFailedError, match="needs unit number 1 again"):
        run_virtual(work, ranks=1)


def test_what_a_first_pass_repeats_is_known_afterwards() -> None:
    def work(comm: Communicator) -> tuple[set[Leg], list[Leg] | None]:
        route = Route(comm, FORWARD, NAMES, lambda _leg: None, lambda _leg: None, 1)
        route.begin()
        for leg in (gather(0), gather(1), gather(1), gather(2)):
            route.reach(leg)
        route.finish(drop=lambda leg: leg == gather(2))
        return route.repeated, route.legs

    assert run_virtual(work, ranks=2) == [({gather(1)}, [gather(0), gather(1), gather(3), gather(4)])] * 2
