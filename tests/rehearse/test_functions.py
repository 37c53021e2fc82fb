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


def test_dropout_on_a_gpu_keeps_a_byte_a_number() -> None:
    seen: list[torch.Tensor] = []
    x = torch.empty(4, 6, device="meta", requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: seen.append(each) or each, lambda each: each)
    with MetaFunctions(lambda *_, **__: None, on_gpu=True), hooks:
        F.dropout(x, 0.25, training=True)
    assert [each.dtype for each in seen] == [torch.bool]


def test_multi_head_attention_has_a_fused_kernel() -> None:
    seen: list[bool] = []
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, device="meta")
    x = torch.empty(3, 5, 8, device="meta")
    with MetaFunctions(lambda *_, is_back, **__: seen.append(is_back), on_gpu=True) as functions:
        out, _ = attention(x, x, x, need_weights=False)
        out.sum().backward()
        assert functions.back_on() is not functions
    assert out.shape == x.shape
    assert seen == [True]


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_bias_whose_rows_are_no_neighbours_has_no_fused_kernel(is_turned: bool) -> None:
    calls: list[bool] = []
    query = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.empty(16, 16, 4, device="meta").permute(2, 0, 1) if is_turned else query.new_empty(4, 16, 16)
    scores: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: scores.append(each) or each, lambda each: each)
    with MetaFunctions(lambda *_, is_back, **__: calls.append(is_back), on_gpu=True):
        with hooks:
            out = F.scaled_dot_product_attention(query, query, query, attn_mask=bias, dropout_p=0.1)
        out.sum().backward()
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    kept = {each.dtype for each in scores if each.shape[-2:] == (16, 16)}
    assert kept == ({torch.float32, torch.bool} if is_turned else set())
    assert calls == ([] if is_turned else [True])
