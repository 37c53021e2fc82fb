"""The search for the largest model: without torch, against memory that follows a rule."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from measures.memory import Budget, Usage, find_largest

Attempt = Callable[[int], Usage | None]


def on_a_line(*, base: int, layer: int, host_layer: int = 0, limit: int, lost: int = 0) -> Attempt:
    """Memory that grows by ``layer``; ``lost`` bytes between blocks are not reported, but count towards the limit."""

    def attempt(layers: int) -> Usage | None:
        device = base + layer * layers
        fits = device + lost <= limit
        return Usage(device_bytes=device, host_bytes=host_layer * layers) if fits else None

    return attempt


@given(base=st.integers(0, 500), layer=st.integers(1, 60), limit=st.integers(1, 2000))
def test_a_line_is_found_exactly(base: int, layer: int, limit: int) -> None:
    budget = Budget(device_bytes=limit, host_bytes=10**9)
    found = find_largest(on_a_line(base=base, layer=layer, limit=limit), budget)
    expected = max((limit - base) // layer, 0)
    if expected >= budget.max_layers:
        assert (found.layers, found.limit) == (budget.max_layers, "search")
    else:
        assert (found.layers, found.too_many, found.limit) == (expected, expected + 1, "device")
    assert len(found.tried) <= 5


@given(layer=st.integers(10, 60), lost=st.integers(0, 180), limit=st.integers(300, 2000))
def test_what_is_claimed_to_fit_was_tried(layer: int, lost: int, limit: int) -> None:
    attempt = on_a_line(base=50, layer=layer, limit=limit, lost=lost)
    found = find_largest(attempt, Budget(device_bytes=limit, host_bytes=10**9))
    assert found.layers == 0 or (found.layers in found.tried and attempt(found.layers) is not None)
    assert found.too_many is None or attempt(found.too_many) is None
    assert len(found.tried) <= 5
    if found.limit == "device":
        assert attempt(found.layers + 1) is None


def test_a_little_that_is_lost_between_blocks_costs_one_more_trial() -> None:
    budget = Budget(device_bytes=1000, host_bytes=10**9)
    found = find_largest(on_a_line(base=100, layer=30, limit=1000, lost=15), budget)
    assert (found.layers, found.too_many, found.limit, found.tried) == (29, 30, "device", (1, 3, 30, 29))


def test_a_size_that_the_host_cannot_hold_is_never_tried() -> None:
    budget = Budget(device_bytes=10**6, host_bytes=700)
    found = find_largest(on_a_line(base=0, layer=1, host_layer=18, limit=10**6), budget)
    assert (found.layers, found.too_many, found.limit) == (38, None, "host")
    assert found.tried == (1, 3, 38)


def test_a_device_that_holds_no_layer_gives_none() -> None:
    found = find_largest(lambda _: None, Budget(device_bytes=1, host_bytes=1))
    assert (found.layers, found.too_many, found.limit, found.tried) == (0, 1, "device", (1,))


def test_the_search_ends_with_the_trials() -> None:
    attempt = on_a_line(base=0, layer=1, limit=900, lost=600)
    found = find_largest(attempt, Budget(device_bytes=900, host_bytes=10**9), max_trials=5)
    assert (found.layers, found.limit) == (3, "trials")
    assert found.tried == (1, 3, 900, 899, 897)
