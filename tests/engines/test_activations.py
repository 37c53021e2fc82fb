"""Inputs of blocks on the host: the same bits, what the device still holds, and memory that is used again."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from block_cases import (
    ACTIVE,
    BATCH,
    LAYERS,
    WIDTH,
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

import paceline
from paceline.comm.base import Communicator, Work
from paceline.engines import activations
from paceline.engines.activations import HostActivations
from paceline.engines.blocks import checkpoint_blocks
from paceline.errors import UsageError
from paceline.models.registry import model_blocks
from paceline.plan.layout import Layout, Offload

STREAM = 4 * BATCH * WIDTH  # bytes of a block's input
CPU = torch.device("cpu")


def offloaded(factory: Callable[[], nn.Module], policy: str = "full") -> tuple[nn.Module, HostActivations]:
    torch.manual_seed(4)
    model, host = factory(), HostActivations(CPU)
    host.take_inputs(checkpoint_blocks(model_blocks(model), policy))
    return model, host


def free_bytes(host: HostActivations) -> int:
    return sum(size * len(pieces) for size, pieces in host._free.items())


# The same results.


@covering(factory=[Stack, gpt, resnet, ConvStack], policy=ACTIVE)
def test_gradients_are_the_same_to_the_bit(factory: Callable[[], nn.Module], policy: str) -> None:
    x = inputs_of(factory)
    model, host = offloaded(factory, policy)
    check_bits(train(model, x, autocast=factory is Stack), train(make(factory, policy), x, autocast=factory is Stack))
    assert host.host_bytes == free_bytes(host)
    assert host.host_bytes or policy.startswith("every")  # the first block reads the batch, which is a leaf


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), ConvStack()).to(memory_format=torch.channels_last)


def test_inputs_come_in_pieces_and_in_any_order_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "PIECE_BYTES", 128)
    x = inputs_of(ConvStack).to(memory_format=torch.channels_last)
    model, host = offloaded(convolutions)
    check_bits(train(model, x), train(make(convolutions, "full"), x))
    assert {size: len(pieces) for size, pieces in host._free.items()} == {128: 2 * 7, 64: 2}  # of 960 bytes each


SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero2": (2, {"strategy": "zero2"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "1f1b": (2, {"pipeline": 2}),
    "gpipe over fsdp": (4, {"pipeline": 2, "schedule": "gpipe", "strategy": "fsdp"}),
    "zb-v": (2, {"pipeline": 2, "schedule": "zb-v", "chunks": 2}),
    "tensor": (2, {"tensor": 2, "gathers_logits": True}),
    "bf16_master": (2, {"precision": "bf16_master", "strategy": "fsdp"}),
}


def state_of(ranks: int, **options: Any) -> dict[str, torch.Tensor]:
    """Returns what two steps of four microbatches on virtual ranks leave."""

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        torch.manual_seed(4)
        engine = paceline.parallelize(gpt(dropout=0.0), comm, layout=Layout(accumulate=4, **options))
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(9 + engine.batch_comm.rank)
        for _ in range(2):
            batches = [torch.randint(0, 11, (2, 8), generator=generator) for _ in range(4)]
            engine.run_microbatches(batches, lambda model, x: (model(x).pow(2).sum(), 1.0), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    return paceline.run_virtual(work, ranks=ranks)[0]


@pytest.mark.some(3)
@pytest.mark.parametrize("name", SPREAD)
def test_every_engine_trains_to_the_same_bits(name: str) -> None:
    ranks, options = SPREAD[name]
    options = options | {"checkpoint_activations": "full"}
    check_bits(state_of(ranks, **options, offload=Offload(activations=True)), state_of(ranks, **options))


@pytest.mark.exhaustive
@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("policy", ["full", "matmuls"])
def test_compiled_blocks_leave_their_inputs_alone(policy: str) -> None:
    def compiled(*, is_offloaded: bool) -> tuple[nn.Module, HostActivations]:
        torch._dynamo.reset()
        torch.manual_seed(4)
        model, host = Stack(), HostActivations(CPU)
        for block in checkpoint_blocks(model_blocks(model), policy):
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        host.take_inputs(model_blocks(model) if is_offloaded else [])
        return model, host

    model, host = compiled(is_offloaded=True)
    found = train(model, inputs_of(Stack))
    assert host.host_bytes == (LAYERS - 1) * 256  # the first reads the batch, which is a leaf
    check_bits(found, train(compiled(is_offloaded=False)[0], inputs_of(Stack)))


# What the device holds, and the host.


def test_the_device_holds_one_input_between_forward_and_backward() -> None:
    def held(layers: int) -> int:
        model, host = offloaded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack(layers)))
        with LiveBytes(model) as live:
            output = model(inputs_of(Stack))
        assert host.host_bytes == layers * 256  # of 192 bytes each
        del output
        return live.alive - host.host_bytes

    assert held(6) == held(3)


def test_backward_has_the_next_input_beside_its_own() -> None:
    """One more block adds no input: there are the one that runs again, the one before it, and gradients."""

    def most(layers: int) -> int:
        model, _ = offloaded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack(layers)))
        output = model(inputs_of(Stack)).sum()
        with LiveBytes(model) as live:
            output.backward()
        return live.largest[STREAM]

    assert most(8) == most(4)


def test_memory_of_the_host_is_made_once() -> None:
    model, host = offloaded(gpt)
    sizes = []
    for _ in range(3):
        model(inputs_of(gpt)).sum().backward()
        sizes.append((host.host_bytes, free_bytes(host)))
    assert len(set(sizes)) == 1
    first, second = model(inputs_of(gpt)), model(inputs_of(gpt))  # in flight at the same time, as in a pipeline
    assert host.host_bytes == 2 * sizes[0][0]
    (first.sum() + second.sum()).backward()
    assert free_bytes(host) == host.host_bytes


def test_without_a_backward_nothing_is_left() -> None:
    model, host = offloaded(gpt)
    with torch.no_grad():
        model(inputs_of(gpt))
    assert host.host_bytes == 0
    inputs = []
    model.layers[1].register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    model(inputs_of(gpt))  # its graph is gone at once
    model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs_of(gpt))
    assert [each() for each in inputs] == [None, None]
    assert free_bytes(host) == host.host_bytes


def test_a_graph_may_be_walked_twice_and_differentiated_twice() -> None:
    def walk(model: nn.Module) -> list[torch.Tensor]:
        x = inputs_of(Stack).requires_grad_()
        loss = model(x * 1.0).pow(3).sum()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.pow(2).sum().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    model, host = offloaded(Stack)
    for found, expected in zip(walk(model), walk(make(Stack, "full")), strict=True):
        assert torch.equal(found, expected)
    assert free_bytes(host) == host.host_bytes


def test_a_copy_of_the_model_runs_its_own_blocks() -> None:
    model, _ = offloaded(Stack)
    twin = copy.deepcopy(model)
    check_bits(train(twin, inputs_of(Stack)), train(make(Stack, "full"), inputs_of(Stack)))
    assert all(parameter.grad is None for parameter in model.parameters())


# Copies beside what the device computes: here each runs as late as it may.


class LateBus:
    """A stream whose copies run when somebody waits for them; what was freed before its copy ran is lost."""

    def __init__(self) -> None:
        self._issued: deque[Callable[[], None]] = deque()

    def issue(self, work: partial[Work]) -> Work:
        pieces, tensor = work.args
        if not work.keywords["to_host"]:
            tensor.fill_(torch.nan)
        run = partial(_run_late, partial(work.func, pieces, **work.keywords), weakref.ref(tensor))
        self._issued.append(run)
        return LateWork(self._issued, run)


def _run_late(copy: partial[Work], tensor: weakref.ref[torch.Tensor]) -> None:
    if (found := tensor()) is not None:
        copy.func(*copy.args, found, **copy.keywords)
    else:
        for piece in copy.args[0]:
            piece.fill_(255)  # not a number


class LateWork:
    def __init__(self, issued: deque[Callable[[], None]], run: Callable[[], None]) -> None:
        self._issued, self._run = issued, run

    def wait(self) -> None:
        while self._run in self._issued:
            self._issued.popleft()()


def train_late(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(activations, "SideStream", lambda _: LateBus())
    model, _ = offloaded(gpt)
    return train(model, inputs_of(gpt), passes=3)


def test_copies_may_run_as_late_as_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    check_bits(train_late(monkeypatch), train(make(gpt), inputs_of(gpt), passes=3))


def freed_too_early(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def leave(away: Any) -> None:
        away._tensor = None
        original(away)

    return leave


def read_too_early(original: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def come_back(away: Any) -> torch.Tensor:
        away.start_back()
        return away._tensor

    del original
    return come_back


@pytest.mark.parametrize(("name", "bug"), [("leave", freed_too_early), ("come_back", read_too_early)])
def test_a_copy_that_nobody_waits_for_is_seen(
    name: str, bug: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations._Away, name, bug(getattr(activations._Away, name)))
    found, expected = train_late(monkeypatch), train(make(gpt), inputs_of(gpt), passes=3)
    assert not torch.equal(found["layers.0.mlp.up.weight.grad"], expected["layers.0.mlp.up.weight.grad"])


# Bad input.


def test_an_input_that_changes_is_told() -> None:
    class Adds(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            for layer in self.layers:
                x += layer(x)
            return x

    model, _ = offloaded(Adds)
    with pytest.raises(UsageError, match=r"(?s)input of a block, \(6, 8\), was changed in place.*x = x \+ y"):
        model(inputs_of(Stack))


def test_a_host_without_room_is_told_what_waits_there(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([2**40, 2**40, 2**20])
    monkeypatch.setattr(activations, "free_host_bytes", lambda: next(left))
    model, _ = offloaded(gpt)
    with pytest.raises(UsageError, match=r"(?s)0\.0 GiB of this rank's wait on the host, and 0\.0 GiB are left"):
        model(inputs_of(gpt))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
