"""The calls whose time is taken: cold operands, launches in a row, and what a small step is made of."""

from __future__ import annotations

import torch

from paceline.calibrate.kernels import _by_turns, _eager_chain, make_call
from paceline.calibrate.timing import recorded
from paceline.cluster.kernels import MEMORY_FAMILIES

CPU = torch.device("cpu")


def test_a_processor_multiplies_with_another_copy_each_time() -> None:
    left, right = torch.ones(2, 3), torch.ones(3, 4).t().contiguous().t()
    call = _by_turns(left, right)
    right.zero_()  # which no copy sees
    found = [call() for _ in range(3)]
    assert all(bool((each == 3).all()) for each in found)  # type: ignore[attr-defined]


def test_a_chain_launches_forward_and_backward() -> None:
    names = [each.name for each in recorded(_eager_chain(CPU))]
    assert names.count("mul") == 200


def test_calls_of_a_family_go_through_the_bytes_that_are_asked_for() -> None:
    for family in MEMORY_FAMILIES:
        small, large = (recorded(make_call(family, CPU, size)) for size in (8192, 32768))
        assert {each.family for each in small} >= {family}, family
        assert [each.name for each in small] == [each.name for each in large]
        counted = [sum(each.num_bytes for each in kernels) for kernels in (small, large)]
        if family not in ("embedding_backward",):  # which clears its table
            assert 3.5 < counted[1] / counted[0] < 4.1, family
