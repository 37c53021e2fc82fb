"""The loss that never holds the logits: the same numbers and gradients as the plain one."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.models.head_loss import OutputLayer, head_loss
from paceline.models.hugging_face import is_causal, with_head_loss
from paceline.models.registry import loss_vocabulary
from paceline.plan.layout import LOSS_CHUNK_BYTES, loss_rows

ROWS, WIDTH, VOCABULARY = 13, 6, 11
TOLERANCE = 1e-10
DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (rows,), generator=draw)
    targets[1::4] = -100
    return hidden, weight, targets


def gradients(total: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [total.detach(), *torch.autograd.grad(total * 0.37, leaves)]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum", **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 4, 5, 13, 64, None])
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_sum_and_gradients_are_those_of_the_plain_loss(rows: int, chunk: int | None, smoothing: float) -> None:
    hidden, weight, targets = inputs(rows)
    found = gradients(head_loss(hidden, weight, targets, rows=chunk, smoothing=smoothing), hidden, weight)
    expected = gradients(plain(hidden, weight, targets, label_smoothing=smoothing), hidden, weight)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_a_batch_in_which_everything_is_ignored_has_no_loss_and_no_gradient() -> None:
    hidden, weight, targets = inputs()
    for each in gradients(head_loss(hidden, weight, torch.full_like(targets, -100), rows=4), hidden, weight):
        assert not each.any()


def test_no_rows_at_all_have_no_loss() -> None:
    hidden, weight, targets = inputs()
    for each in gradients(head_loss(hidden[:0], weight, targets[:0]), weight):
        assert not each.any()


def test_another_value_may_mark_what_is_ignored() -> None:
    hidden, weight, targets = inputs()
    targets[targets < 0] = 3
    found = gradients(head_loss(hidden, weight, targets, ignored=3, rows=4), hidden, weight)
    expected = gradients(plain(hidden, weight, targets, ignore_index=3), hidden, weight)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    hidden, weight, targets = inputs()
    leaves = [hidden, weight]
    leaves[frozen].requires_grad_(False)
    head_loss(hidden, weight, targets, rows=4).backward()
    (expected,) = torch.autograd.grad(plain(hidden, weight, targets), leaves[1 - frozen])
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[1 - frozen].grad, expected, rtol=0, atol=TOLERANCE)


def test_without_gradients_none_are_made() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        total = head_loss(hidden, weight, targets, rows=4)
    assert not total.requires_grad
    torch.testing.assert_close(total, plain(hidden, weight, targets).detach(), rtol=0, atol=TOLERANCE)


def test_right_answers_are_counted_without_those_that_are_ignored() -> None:
    hidden, weight, targets = inputs()
    logits = F.linear(hidden, weight)
    targets[:3] = logits[:3].argmax(-1)
    total, correct = head_loss(hidden, weight, targets, rows=5, counts=True)
    assert int(correct) == int((logits.argmax(-1) == targets).sum()) >= 3
    torch.testing.assert_close(total, plain(hidden, weight, targets), rtol=0, atol=TOLERANCE)


def test_any_leading_shape() -> None:
    hidden, weight, targets = inputs(12)
    total = head_loss(hidden.reshape(3, 4, WIDTH), weight, targets.reshape(3, 4), rows=5)
    torch.testing.assert_close(total, plain(hidden, weight, targets), rtol=0, atol=TOLERANCE)


def test_a_second_backward_is_refused() -> None:
    hidden, weight, targets = inputs()
    total = head_loss(hidden, weight, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("chunk", [4, None])
def test_halves_are_summed_in_float32(chunk: int | None) -> None:
    """The logits are rounded as those of a layer in bf16 are; nothing behind them is, but for the gradients."""
    hidden, weight, targets = inputs(dtype=torch.bfloat16)
    found = gradients(head_loss(hidden, weight, targets, rows=chunk), hidden, weight)
    assert [each.dtype for each in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    logits = F.linear(hidden, weight).float()
    expected = gradients(F.cross_entropy(logits, targets, reduction="sum"), hidden, weight)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)


def test_under_autocast_the_weight_gets_a_gradient_of_its_own_dtype() -> None:
    hidden, weight, targets = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(head_loss(hidden, weight, targets, rows=4), hidden, weight)
        logits = F.linear(hidden, weight)
    expected = gradients(plain(hidden, weight, targets), hidden, weight)
    assert logits.dtype == torch.bfloat16
    assert [each.dtype for each in found] == [torch.float32] * 3
    rounded = F.cross_entropy(logits.float(), targets, reduction="sum")
    torch.testing.assert_close(found[0], rounded.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_a_chunk_keeps_to_its_bytes() -> None:
    assert loss_rows(50304, 2) == 8192
    assert loss_rows(32000, 2) == 16384
    assert loss_rows(50304, 4) * 50304 * 4 <= LOSS_CHUNK_BYTES
    assert loss_rows(10**9, 4) == 128


def test_the_logits_of_all_rows_are_never_there() -> None:
    largest = 0

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor):
                largest = max(largest, found.numel())
            return found

    hidden = torch.empty(4096, 8, device="meta", requires_grad=True)
    weight = torch.empty(1024, 8, device="meta", requires_grad=True)
    with Sizes():
        total = head_loss(hidden, weight, torch.empty(4096, dtype=torch.int64, device="meta"), rows=64)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)
    assert largest == 64 * 1024


def test_torch_gives_the_same_where_it_has_such_a_loss() -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    hidden, weight, targets = inputs()
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
    total = F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)
    found = gradients(head_loss(hidden, weight, targets, rows=4), hidden, weight)
    for ours, theirs in zip(found, gradients(total, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_bad_shapes_and_targets_are_told() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(UsageError, match=r"targets of shape \[12\] for hidden states of shape \[13, 6\]"):
        head_loss(hidden, weight, targets[1:])
    with pytest.raises(UsageError, match=r"an output layer of shape \[6, 11\]"):
        head_loss(hidden, weight.t(), targets)
    targets[5] = VOCABULARY
    with pytest.raises(UsageError, match="a target is 11, but the vocabulary has 11 tokens"):
        head_loss(hidden, weight, targets)


def test_an_output_layer_with_a_bias_makes_logits_only() -> None:
    hidden, _, targets = inputs()
    layer = OutputLayer(WIDTH, VOCABULARY).to(torch.float64)
    assert layer(hidden).shape == (ROWS, VOCABULARY)
    with pytest.raises(UsageError, match="the loss of an output layer with a bias"):
        layer(hidden, targets)


# A model.


def make_gpt(*, tied: bool) -> GPT:
    torch.manual_seed(0)
    config = gpt_config(layers=1, heads=2, width=8, context=6, vocab_size=VOCABULARY, tied=tied)
    return GPT(config).to(torch.float64)


def tokens_of(samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(samples * 6).reshape(samples, 6) % VOCABULARY
    targets = (tokens * 3 + 1) % VOCABULARY
    targets[0, 2:4] = -100
    return tokens, targets


def gpt_gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_computes_the_loss_of_its_logits(tied: bool) -> None:
    model, (tokens, targets) = make_gpt(tied=tied), tokens_of(3)
    assert loss_vocabulary(model) == VOCABULARY
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    total, correct = model(tokens, targets=targets, counts=True)
    assert int(correct) == int((logits.argmax(-1) == targets).sum())
    torch.testing.assert_close(total, expected, rtol=0, atol=TOLERANCE)
    theirs, ours = gpt_gradients(model, expected), gpt_gradients(model, model(tokens, targets=targets))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@DYNAMO_WARNS
@pytest.mark.some(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.exhaustive
def test_a_compiled_model_has_one_graph_for_ragged_batches(tied: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model, whole = make_gpt(tied=tied), make_gpt(tied=tied)
    whole.forward = torch.compile(whole.forward, backend=counter)  # type: ignore[method-assign]
    for samples in (4, 3, 2, 5):
        tokens, targets = tokens_of(samples)
        for each in (tokens, targets):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        totals = [each(tokens, targets=targets) for each in (model, whole)]
        torch.testing.assert_close(*(total.detach() for total in totals), rtol=0, atol=TOLERANCE)
        theirs, ours = (gpt_gradients(each, total) for each, total in zip((model, whole), totals, strict=True))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert counter.frame_count == 1
    with torch.no_grad():
        for samples in (3, 2):
            tokens, targets = tokens_of(samples)
            for part in (tokens, targets):
                torch._dynamo.maybe_mark_dynamic(part, 0)
            found = [each(tokens, targets=targets, counts=True) for each in (model, whole)]
            torch.testing.assert_close(*found, rtol=0, atol=TOLERANCE)
    assert counter.frame_count == 2
    torch._dynamo.reset()


# Models as Hugging Face builds them.


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, use_cache: bool = True, return_dict: bool = False) -> Any:
        assert not use_cache
        assert return_dict
        return SimpleNamespace(last_hidden_state=torch.tanh(self.layer(self.embed_tokens(input_ids))))


class Causal(nn.Module):
    """What transformers' causal models have in common."""

    cap: float | None = None

    def __init__(self, *, tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.model = Base()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids, use_cache=False, return_dict=True).last_hidden_state
        logits = self.lm_head(hidden)
        return SimpleNamespace(logits=logits if self.cap is None else self.cap * torch.tanh(logits / self.cap))


def make_causal(**options: Any) -> Causal:
    torch.manual_seed(0)
    return Causal(**options).to(torch.float64)


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_model_of_others_computes_its_loss(tied: bool) -> None:
    model, (tokens, targets) = make_causal(tied=tied), tokens_of(3)
    logits = model(tokens).logits
    names = [name for name, _ in model.named_parameters()]
    adapted = with_head_loss(model)
    assert adapted is model
    assert isinstance(adapted, Causal)
    assert [name for name, _ in model.named_parameters()] == names
    assert loss_vocabulary(model) == VOCABULARY
    assert torch.equal(model(tokens), logits)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    theirs = gpt_gradients(model, expected)
    for each in (model, copy.deepcopy(model)):
        total = each(tokens, targets=targets)
        torch.testing.assert_close(total, expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(gpt_gradients(each, total), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("change", ["cap", "bias"])
def test_logits_that_are_more_than_products_are_not_fused(change: str) -> None:
    model = make_causal(bias=change == "bias")
    model.cap = 0.5 if change == "cap" else None
    with pytest.raises(UsageError, match="the logits of Causal are not the products"):
        with_head_loss(model)
    assert type(model) is Causal


def test_a_causal_model_without_values_is_judged_by_its_config() -> None:
    with torch.device("meta"):
        plain, capped = Causal(), Causal()
    capped.config.final_logit_softcapping = 30.0
    assert loss_vocabulary(with_head_loss(plain)) == VOCABULARY
    with pytest.raises(UsageError, match="the logits of Causal are not the products"):
        with_head_loss(capped)


def test_parts_that_are_called_otherwise_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_causal()
    monkeypatch.setattr(Causal, "forward", lambda self, tokens: self.lm_head(self.model.embed_tokens(tokens)))
    with pytest.raises(UsageError, match="the logits of Causal are not the products"):
        with_head_loss(model)


def test_a_model_without_the_parts_is_refused() -> None:
    assert not is_causal(nn.Linear(2, 2))
    assert not is_causal(make_gpt(tied=True))
    with pytest.raises(UsageError, match="Linear has no output layer that can be found"):
        with_head_loss(nn.Linear(2, 2))
