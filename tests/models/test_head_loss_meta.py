"""The fused loss on tensors without values: which operators a rehearsal counts, in forward and in backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import UsageError
from paceline.models.head_loss import check_targets, head_loss

ROWS, WIDTH, VOCABULARY = 10, 8, 32


class Calls(TorchDispatchMode):
    """Counts operators by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rows", "chunks"), [(4, 3), (5, 2), (10, 1), (64, 1)])
@pytest.mark.parametrize(("for_hidden", "for_weight"), [(True, True), (True, False), (False, True), (False, False)])
def test_each_chunk_is_a_product_and_a_pass_over_its_logits(
    rows: int, chunks: int, for_hidden: bool, for_weight: bool
) -> None:
    hidden = torch.empty(2, ROWS // 2, WIDTH, device="meta", requires_grad=for_hidden)
    weight = torch.empty(VOCABULARY, WIDTH, device="meta", requires_grad=for_weight)
    targets = torch.empty(2, ROWS // 2, device="meta", dtype=torch.int64)
    with Calls() as forward:
        loss = head_loss(hidden, weight, targets, rows=rows)
    assert forward.found["aten._softmax.out"] == chunks
    assert forward.found["aten.mm.out"] == chunks
    if not (for_hidden or for_weight):
        assert not loss.requires_grad
        return
    with Calls() as backward:
        loss.backward()
    assert backward.found["aten.mm.out"] == chunks * (for_hidden + for_weight)
    for tensor, is_needed in ((hidden, for_hidden), (weight, for_weight)):
        assert (tensor.grad is not None) == is_needed
        assert tensor.grad is None or tensor.grad.shape == tensor.shape


def test_targets_out_of_range_are_told_with_the_vocabulary() -> None:
    check_targets(torch.tensor([0, 3, -100]), 4, -100)
    for wrong in (4, -1):
        with pytest.raises(UsageError) as told:
            check_targets(torch.tensor([0, wrong]), 4, -100)
        assert str(told.value).startswith(f"a target is {wrong}, but the vocabulary has 4 tokens\n  targets are 0 to 3")
