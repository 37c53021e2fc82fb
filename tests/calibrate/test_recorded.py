"""Kernels of what really runs, named as a dry run names them."""

from __future__ import annotations

import torch
from torch.nn import functional

from paceline.calibrate.timing import recorded


def test_drawn_numbers_are_a_family_of_their_own() -> None:
    values = torch.ones(4, 8)
    dropped = recorded(lambda: functional.dropout(values, 0.5))
    assert "random" in {each.family for each in dropped}
    assert [each.family for each in recorded(lambda: values.normal_())] == ["random"]
    assert [each.family for each in recorded(lambda: values.norm(dim=-1))] == ["reduction"]


def test_products_have_their_sizes_and_views_are_nothing() -> None:
    left, right = torch.ones(4, 8), torch.ones(3, 8)
    (product,) = recorded(lambda: left @ right.t())
    assert (product.family, product.sizes, product.layout) == ("matmul", (4, 8, 3), "nt")
