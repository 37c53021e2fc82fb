"""Attention inside documents on a GPU: varlen, flex and blocks give what the CPU gives in float64, and hand back so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from documents_alone import gradients, one_by_one, starts_of
from torch import Tensor

from paceline.models.document_attention import attend_documents, choose_way
from paceline.models.gpt import GPT, gpt_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = {
    "even": [[128, 384, 512], [1024], [256] * 4],
    "odd": [[300, 1, 1, 127, 128, 129, 14], [700], [2, 698]],
    "short": [[3, 1, 9, 7], [20], [1] * 20],
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # float32: TF32


def draw(rows: Sequence[Sequence[int]], dtype: torch.dtype, kv_heads: int, width: int = 64) -> list[Tensor]:
    """Returns values that the dtype has, on the device."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(len(rows), heads, sum(rows[0]), width) for heads in (4, kv_heads, kv_heads)]
    drawn = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    return [each.requires_grad_() for each in drawn]


def check_same(found: Tensor, inputs: Sequence[Tensor], rows: Sequence[Sequence[int]], is_causal: bool) -> None:
    wide = [each.detach().cpu().double().requires_grad_() for each in inputs]
    expected = one_by_one(wide, rows, is_causal=is_causal)
    error = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=error, atol=error)
    for ours, theirs in zip(gradients(found, inputs), gradients(expected, wide), strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=2 * error, atol=2 * error)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_gpu_gives_what_documents_give_alone(
    rows: list[list[int]], dtype: torch.dtype, kv_heads: int, is_causal: bool
) -> None:
    inputs, documents = draw(rows, dtype, kv_heads), starts_of(rows).cuda()
    is_half = dtype in (torch.bfloat16, torch.float16)
    is_short = documents.shape[1] <= 512
    assert choose_way(inputs[0], documents, 0.0) == ("varlen" if is_half else "mask" if is_short else "blocks")
    check_same(attend_documents(*inputs, documents, is_causal), inputs, rows, is_causal)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kv_heads", "is_causal"), [(4, False), (2, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [ROWS["even"], ROWS["odd"]], ids=["even", "odd"])
def test_a_compiled_model_gives_what_documents_give_alone(
    rows: list[list[int]], dtype: torch.dtype, kv_heads: int, is_causal: bool
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend_documents, fullgraph=True)
    inputs = draw(rows, dtype, kv_heads)
    check_same(compiled(*inputs, starts_of(rows).cuda(), is_causal), inputs, rows, is_causal)


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_neither_waits_for_the_host_nor_compiles_anew() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend_documents, backend=counter, fullgraph=True)

    def call(rows: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
        inputs, documents = draw(rows, torch.bfloat16, 2), starts_of(rows).cuda()
        for each in (*inputs, documents):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        torch.cuda.set_sync_debug_mode("error" if counter.frame_count else "default")
        try:
            return compiled(*inputs, documents, is_causal=True), inputs
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for rows in (ROWS["odd"], ROWS["odd"][::-1], ROWS["odd"][:2]):
        found, inputs = call(rows)
        check_same(found, inputs, rows, is_causal=True)
    assert counter.frame_count == 1


def test_the_places_of_documents_are_waited_for_once() -> None:
    inputs, documents = draw(ROWS["odd"], torch.bfloat16, 2), starts_of(ROWS["odd"]).cuda()
    first = attend_documents(*inputs, documents, is_causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = attend_documents(*inputs, documents, is_causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


def test_a_captured_step_takes_the_mask() -> None:
    rows = ROWS["short"]
    inputs, documents = [each.detach() for each in draw(rows, torch.bfloat16, 2)], starts_of(rows).cuda()
    attend_documents(*inputs, documents, is_causal=True)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend_documents(*inputs, documents, is_causal=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = attend_documents(*inputs, documents, is_causal=True)
    documents.copy_(starts_of(rows[::-1]))
    graph.replay()
    torch.cuda.synchronize()
    wide = [each.cpu().double() for each in inputs]
    expected = one_by_one(wide, rows[::-1], is_causal=True)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dropout_stays_inside_documents(dtype: torch.dtype) -> None:
    rows = ROWS["odd"]
    inputs, documents = draw(rows, dtype, 2), starts_of(rows).cuda()
    found = attend_documents(*inputs, documents, is_causal=True, dropout=0.5)
    (gradient,) = torch.autograd.grad(found[0, :, :300].sum(), inputs[2])
    assert gradient[0, :, :300].any()
    assert not gradient[0, :, 300:].any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_model_of_documents_compiles_to_what_it_is(positions: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 256, "context": 640, "vocab_size": 50, "dropout": 0.0}
    model = GPT(gpt_config(None, positions=positions, **sizes), end_token=0).to("cuda", torch.bfloat16)
    tokens = torch.randint(50, (3, 640), device="cuda")
    targets = torch.randint(50, (3, 640), device="cuda")

    def gradients_of(run: Any) -> tuple[float, list[Tensor]]:
        model.zero_grad()
        loss = run(tokens, targets)
        loss.backward()
        return loss.item() / tokens.numel(), [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain, compiled = gradients_of(model), gradients_of(torch.compile(model))
    assert compiled[0] == pytest.approx(plain[0], rel=1e-2)
    for ours, theirs in zip(compiled[1], plain[1], strict=True):
        error = (ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-6)
        assert error < 0.05
