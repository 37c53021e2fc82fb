"""Attention inside documents of a row: each way gives, and hands back, what SDPA gives for the documents one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from documents_alone import gradients, one_by_one, starts_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import paceline
from paceline.errors import UsageError
from paceline.models import document_attention
from paceline.models.document_attention import attend_documents, choose_way, document_blocks, document_mask

SHORT = [[3, 1, 9, 7], [20], [1] * 20]
LONG = [[300, 1, 1, 127, 128, 129, 14], [700], [2, 698]]


def draw(rows: Sequence[Sequence[int]], *, heads: int = 4, kv_heads: int = 2, width: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(len(rows), number, sum(rows[0]), width) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def check_same(found: Tensor, expected: Tensor, inputs: Sequence[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rows", "way"), [(SHORT, "mask"), (LONG, "blocks")], ids=["short", "long"])
@pytest.mark.parametrize(("is_causal", "scale", "kv_heads"), [(True, None, 2), (False, 0.3, 4), (True, 0.7, 1)])
def test_documents_give_what_they_give_alone(
    rows: list[list[int]], way: str, is_causal: bool, scale: float | None, kv_heads: int
) -> None:
    inputs, documents = draw(rows, kv_heads=kv_heads), starts_of(rows)
    assert choose_way(inputs[0], documents, 0.0) == way
    found = attend_documents(*inputs, documents, is_causal, scale=scale)
    check_same(found, one_by_one(inputs, rows, is_causal=is_causal, scale=scale), inputs)


@pytest.mark.parametrize("rows", [SHORT, LONG], ids=["short", "long"])
def test_attention_that_crosses_a_boundary_is_caught(rows: list[list[int]]) -> None:
    inputs, documents = draw(rows), starts_of(rows)
    documents[0, documents[0] == rows[0][0]] = 0  # the second document of the first row goes on with the first
    with pytest.raises(AssertionError):
        check_same(
            attend_documents(*inputs, documents, is_causal=True), one_by_one(inputs, rows, is_causal=True), inputs
        )


@pytest.mark.parametrize("rows", [SHORT, LONG], ids=["short", "long"])
def test_dropout_stays_inside_documents(rows: list[list[int]]) -> None:
    inputs, documents = draw(rows), starts_of(rows)
    torch.manual_seed(1)
    found = attend_documents(*inputs, documents, is_causal=True, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(found, attend_documents(*inputs, documents, is_causal=True, dropout=0.5))
    assert not torch.allclose(found, attend_documents(*inputs, documents, is_causal=True))
    first = rows[0][0]
    (gradient,) = torch.autograd.grad(found[0, :, :first].sum(), inputs[2])
    assert gradient[0, :, :first].any()
    assert not gradient[0, :, first:].any()


def test_a_tensor_of_documents_that_changes_is_looked_at_again() -> None:
    inputs, documents = draw(LONG), starts_of(LONG)
    attend_documents(*inputs, documents, is_causal=True)
    documents.copy_(starts_of(LONG[::-1]))
    check_same(
        attend_documents(*inputs, documents, is_causal=True), one_by_one(inputs, LONG[::-1], is_causal=True), inputs
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.some(2)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "rows",
    [[[128, 128, 128, 128], [512], [1, 511]], LONG, [[300, 100], [129, 271], [40] * 10]],
    ids=["even", "odd", "few"],
)
def test_the_blocks_of_flex_attention_are_those_of_the_mask(rows: list[list[int]], is_causal: bool) -> None:
    documents = starts_of(rows)
    ours = document_blocks(documents, is_causal)
    length = documents.shape[1]
    expected = create_block_mask(ours.mask_mod, len(rows), None, length, length, device="cpu")
    assert torch.equal(ours.to_dense(), expected.to_dense())
    assert ours.full_kv_num_blocks is not None
    assert expected.full_kv_num_blocks is not None
    assert torch.equal(ours.full_kv_num_blocks, expected.full_kv_num_blocks)
    inputs = [each.detach() for each in draw(rows)]
    found = flex_attention(*inputs, block_mask=ours, enable_gqa=True)  # as it is: looks at the mask alone
    torch.testing.assert_close(found, one_by_one(inputs, rows, is_causal=is_causal), rtol=1e-12, atol=1e-12)


def test_what_is_compiled_is_one_graph_where_rows_are_short() -> None:
    compiled = torch.compile(attend_documents, backend="aot_eager", fullgraph=True)
    inputs, documents = draw(SHORT), starts_of(SHORT)
    check_same(compiled(*inputs, documents, is_causal=True), one_by_one(inputs, SHORT, is_causal=True), inputs)


@pytest.mark.exhaustive
def test_flex_attention_and_its_blocks_are_one_graph_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_attention, "choose_way", lambda *_: "flex")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend_documents, backend=counter, fullgraph=True)
    for rows in (LONG, LONG[:2], LONG[::-1]):
        inputs, documents = [each.detach() for each in draw(rows)], starts_of(rows)
        for each in (*inputs, documents):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        expected = one_by_one(inputs, rows, is_causal=True)
        torch.testing.assert_close(compiled(*inputs, documents, is_causal=True), expected, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_what_is_compiled_leaves_the_graph_once_where_rows_are_long() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def block(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        return attend_documents(2 * query, key, value, documents, is_causal=True) + 1

    compiled = torch.compile(block, backend=counter)
    for rows in (LONG, LONG[::-1]):  # other documents of the same sizes compile nothing anew
        query, key, value = inputs = draw(rows)
        expected = one_by_one((2 * query, key, value), rows, is_causal=True) + 1
        check_same(compiled(*inputs, starts_of(rows)), expected, inputs)
    assert counter.frame_count == 2  # before and behind the call


def test_tensors_without_values_are_one_document() -> None:
    inputs, documents = draw(LONG), starts_of(LONG)
    found = attend_documents(*(each.to("meta") for each in inputs), documents.to("meta"))
    assert found.shape == inputs[0].shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = [mode.from_tensor(each) for each in (*inputs, documents)]
        assert attend_documents(*faked).shape == inputs[0].shape


def test_the_ways_are_chosen_by_device_dtype_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 2, 8, 16)
    assert choose_way(query, starts_of([[8]]), 0.0) == "mask"
    assert choose_way(query, starts_of([[513]]), 0.0) == "blocks"
    monkeypatch.setattr(document_attention, "_SHORT", 4)
    assert choose_way(query, starts_of([[8]]), 0.0) == "blocks"
    assert document_mask(starts_of([[2, 1]]))[0, 0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.zeros(6, dtype=torch.int64), r"documents \(6,\), and queries \(2, 4, 6, 8\)"),
        (torch.zeros(1, 6, dtype=torch.int64), r"documents \(1, 6\)"),
        (torch.zeros(2, 5, dtype=torch.int64), r"documents \(2, 5\)"),
        ([[0] * 6] * 2, r"documents \('list',\)"),
    ],
)
def test_documents_of_another_shape_are_refused(given: Any, told: str) -> None:
    query = torch.zeros(2, 4, 6, 8)
    with pytest.raises(UsageError, match=told + r"(.|\n)*give documents \(2, 6\)"):
        paceline.attention(query, query, query, is_causal=True, documents=given)
