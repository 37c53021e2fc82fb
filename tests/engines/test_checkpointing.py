"""Activation checkpointing: the same gradients to the bit, from as little as each policy says."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from block_cases import (
    ACTIVE,
    BATCH,
    HIDDEN,
    LAYERS,
    WIDTH,
    Block,
    ConvStack,
    LiveBytes,
    Stack,
    check_bits,
    gpt,
    inputs_of,
    make,
    resnet,
    train,
)
from covering import covering
from torch import nn

from paceline.engines.blocks import checkpoint_blocks
from paceline.errors import UsageError
from paceline.models.registry import model_blocks
from paceline.plan.layout import CHECKPOINTS

# The same results.


@covering(factory=[Stack, gpt, resnet, ConvStack], policy=ACTIVE)
def test_gradients_and_statistics_are_the_same_to_the_bit(factory: Callable[[], nn.Module], policy: str) -> None:
    x = inputs_of(factory)
    check_bits(train(make(factory, policy), x), train(make(factory), x))


@pytest.mark.parametrize("policy", ACTIVE)
def test_dropout_and_autocast_come_back_in_the_second_run(policy: str) -> None:
    def factory() -> nn.Module:
        return Stack(dropout=0.5)

    x = inputs_of(Stack)
    plain = train(make(factory), x, autocast=True)
    check_bits(train(make(factory, policy), x, autocast=True), plain)
    assert not torch.equal(plain["loss"], train(make(factory), x)["loss"]), "autocast must matter for this test"


@pytest.mark.parametrize("policy", ["full", "every_2"])
def test_a_graph_may_be_walked_twice(policy: str) -> None:
    def walk(model: nn.Module) -> dict[str, torch.Tensor]:
        loss = model(inputs_of(ConvStack)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return {**{n: p.grad for n, p in model.named_parameters()}, **dict(model.named_buffers())}

    check_bits(walk(make(ConvStack, policy)), walk(make(ConvStack)))


@pytest.mark.parametrize("policy", ACTIVE)
def test_frozen_and_evaluated_layers(policy: str) -> None:
    def factory() -> nn.Module:
        model = ConvStack()
        model.layers[0].requires_grad_(False)
        model.layers[1].norm.eval()
        return model

    x = inputs_of(ConvStack)
    check_bits(train(make(factory, policy), x), train(make(factory), x))


# What is stored.


def saved_outside(model: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Returns the shapes of what autograd keeps memory for, without parameters and what a checkpoint packs away."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in parameters:
            shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return shapes


def test_autograd_saves_only_the_inputs_of_checkpointed_blocks() -> None:
    x = inputs_of(Stack)
    one_block = saved_outside(make(lambda: Stack(1)), x)
    assert len(one_block) > 4
    expected = {"none": LAYERS, "full": 0, "matmuls": 0, "every_2": 2, "every_3": 2, "every_4": 3}
    for policy, plain_blocks in expected.items():
        shapes = saved_outside(make(Stack, policy), x)
        inputs = [(BATCH, WIDTH)] * (LAYERS - plain_blocks)
        assert sorted(shapes) == sorted(plain_blocks * one_block + inputs), policy


def held_after_forward(policy: str, layers: int) -> int:
    model = make(lambda: Stack(layers), policy)
    x = inputs_of(Stack)
    with LiveBytes(model) as live:
        output = model(x)
    held = live.alive
    del output
    return held


def test_bytes_held_for_backward_are_those_of_the_table() -> None:
    """The difference that one more block makes, counted by storage."""
    stream, hidden = 4 * BATCH * WIDTH, 4 * BATCH * HIDDEN
    per_block = {policy: held_after_forward(policy, 3) - held_after_forward(policy, 2) for policy in CHECKPOINTS}
    assert per_block["full"] == stream  # its output: the next one's input
    assert per_block["matmuls"] == stream + (hidden + stream)  # the outputs of its two products besides
    assert per_block["none"] > per_block["matmuls"]
    plain = held_after_forward("none", 4)
    assert held_after_forward("every_2", 4) == plain - 2 * (per_block["none"] - stream)
    assert held_after_forward("every_3", 4) == plain - 2 * (per_block["none"] - stream)
    assert held_after_forward("every_4", 4) == plain - (per_block["none"] - stream)


@pytest.mark.parametrize(
    ("policy", "products", "others"),
    [("none", 0, 0), ("full", 2 * LAYERS, LAYERS), ("matmuls", 0, LAYERS), ("every_2", LAYERS, LAYERS // 2)],
)
def test_what_runs_again_in_backward(policy: str, products: int, others: int) -> None:
    model = make(Stack, policy)
    loss = model(inputs_of(Stack)).sum()
    with LiveBytes() as live:
        loss.backward()
    again = live.calls["addmm"]
    # The last product of a block is not needed again: its gradients come from its inputs, and the second run stops.
    assert again == products - (products // 2)
    assert live.calls["gelu"] == others


def test_attention_is_kept_with_the_products() -> None:
    def calls(policy: str) -> Counter[str]:
        loss = make(lambda: gpt(dropout=0.0), policy)(inputs_of(gpt)).sum()
        with LiveBytes() as live:
            loss.backward()
        return live.calls

    def attention(counts: Counter[str]) -> int:
        return sum(n for name, n in counts.items() if "attention" in name and "backward" not in name)

    assert attention(calls("full")) == 4
    assert attention(calls("matmuls")) == 0
    assert calls("matmuls")["mm"] == calls("none")["mm"] < calls("full")["mm"]


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_without_gradients_nothing_is_added(policy: str) -> None:
    def operators(model: nn.Module) -> Counter[str]:
        with torch.no_grad(), LiveBytes() as live:
            model(inputs_of(gpt))
        return live.calls

    assert operators(make(gpt, policy).eval()) == operators(make(gpt).eval())


# How it fits in.


@pytest.mark.parametrize("policy", ACTIVE)
def test_names_and_state_stay_as_they_are(policy: str) -> None:
    plain, checkpointed = make(resnet), make(resnet, policy)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in checkpointed.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(module) for module in checkpointed.modules()] == [type(module) for module in plain.modules()]


def test_hooks_on_a_block_run_outside_once_a_forward() -> None:
    model = make(Stack, "full")
    seen: list[str] = []
    for block in model_blocks(model):
        block.register_forward_pre_hook(lambda *_: seen.append("before"))
        block.register_forward_hook(lambda *_: seen.append("after"))
    model(inputs_of(Stack)).sum().backward()
    assert seen == ["before", "after"] * LAYERS


def test_a_copy_runs_its_own_blocks() -> None:
    model = make(Stack, "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = inputs_of(Stack)
    assert torch.equal(twin(x), x)
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


@pytest.mark.exhaustive
@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize(("factory", "policy"), [(Stack, "matmuls"), (ConvStack, "full")])
def test_blocks_are_compiled_on_top(factory: Callable[[], nn.Module], policy: str) -> None:
    def held(policy: str) -> tuple[dict[str, torch.Tensor], int]:
        torch._dynamo.reset()
        model = make(factory, policy)
        for block in model_blocks(model):
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        num_saved = sum(map(_numel, saved_outside(model, inputs_of(factory))))
        return train(model, inputs_of(factory)), num_saved

    expected, num_plain = held("none")
    found, num_saved = held(policy)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    if "layers.0.norm.num_batches_tracked" in expected:
        assert found["layers.0.norm.num_batches_tracked"] == 3  # one pass to count, two to train
    assert num_saved < num_plain


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def test_a_block_used_twice_is_wrapped_once() -> None:
    block = Block()
    checkpoint_blocks([block, block], "full")
    x = inputs_of(Stack).requires_grad_()
    block(block(x)).sum().backward()
    plain = copy.deepcopy(block)
    plain.forward = Block.forward.__get__(plain)  # type: ignore[method-assign]
    other = x.detach().clone().requires_grad_()
    plain.zero_grad()
    plain(plain(other)).sum().backward()
    assert torch.equal(x.grad, other.grad)


# Bad input.


def test_bad_input_is_explained() -> None:
    with pytest.raises(UsageError, match=r"'most' is unknown.*\n.*every_4"):
        checkpoint_blocks([Block()], "most")
    with pytest.raises(UsageError, match=r"(?s)no blocks.*method blocks\(\)"):
        checkpoint_blocks(model_blocks(nn.Linear(3, 3)), "full")
    checkpoint_blocks([], "none")
    model = make(Stack, "every_2")
    with pytest.raises(UsageError, match="already"):
        checkpoint_blocks([model], "full")
    x = inputs_of(Stack)
    check_bits(train(model, x), train(make(Stack), x))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
