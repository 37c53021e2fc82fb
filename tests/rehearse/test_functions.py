"""What a dry run keeps where a device would keep something else than torch does on meta tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.rehearse.dryrun.recorder import MetaFunctions


@pytest.mark.parametrize(("in_bytes", "kept"), [(True, [torch.int8]), (False, [torch.float32, torch.int64])])
def test_pooling_keeps_a_byte_a_number_where_it_is_compiled_for_a_gpu(in_bytes: bool, kept: list[torch.dtype]) -> None:
    seen: list[torch.Tensor] = []
    x = torch.empty(2, 3, 9, 8, device="meta", requires_grad=True)
    functions = MetaFunctions(lambda *_, **__: None, pools_in_bytes=in_bytes)
    with functions, torch.autograd.graph.saved_tensors_hooks(lambda each: seen.append(each) or each, lambda each: each):
        pooled = F.max_pool2d(x, 3, 2, 1)
    assert pooled.shape == (2, 3, 5, 4)
    assert [each.dtype for each in seen] == kept
    pooled.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
