"""The models of torch's tests of FSDP and of DTensor, as cases: three steps of Adam, alone and on ranks.

Ranks have inputs of their own. Tensor parallelism splits the layers that torch's ``parallelize`` of the model splits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from oracle import Alone, Numbers, State
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.base import Communicator
from paceline.engines.apply import parallelize
from paceline.engines.tensor.apply import SplitRule, TensorPlan, apply_tensor_parallel

pytest.importorskip("expecttest", reason="torch's own tests need expecttest")
STEPS = 3
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hybrid")


def of_fsdp(name: str, *args: Any, **options: Any) -> nn.Module:
    """A model of torch's tests of FSDP; those that are built by ``init`` are not wrapped."""
    from torch.testing._internal import common_fsdp

    kind = getattr(common_fsdp, name)
    if not issubclass(kind, common_fsdp.FSDPTestModel):
        return kind(*args, **options)  # type: ignore[no-any-return]
    modes = (common_fsdp.FSDPInitMode.NO_FSDP, common_fsdp.DEVICEInitMode.DEVICE_NEVER)
    group = common_fsdp.DummyProcessGroup(rank=0, size=1)
    return kind.init(group, *modes, deterministic=True, **options)  # type: ignore[no-any-return]


def of_dtensor(name: str, *args: Any, **options: Any) -> nn.Module:
    from torch.testing._internal.distributed._tensor import common_dtensor

    if name == "Transformer":
        known = {each.name for each in dataclasses.fields(common_dtensor.ModelArgs)}
        if missing := options.keys() - known:
            pytest.skip(f"this torch's model has no {', '.join(missing)}")
        args = (common_dtensor.ModelArgs(dropout_p=0.0, **options),)
        options = {}
    return getattr(common_dtensor, name)(*args, **options)  # type: ignore[no-any-return]


def numbers(*shape: int) -> Callable[[torch.Generator], tuple[Any, ...]]:
    return lambda generator: (torch.randn(*shape, generator=generator, dtype=torch.float64),)


def tokens(*shapes: tuple[int, ...], vocabulary: int) -> Callable[[torch.Generator], tuple[Any, ...]]:
    return lambda generator: tuple(torch.randint(0, vocabulary, each, generator=generator) for each in shapes)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Any, ...]]]] = {
    "nested": (functools.partial(of_fsdp, "NestedWrappedModule"), numbers(4, 8)),
    "always nested": (functools.partial(of_fsdp, "AlwaysWrapNestedWrappedModule"), numbers(4, 8)),
    "partly frozen": (functools.partial(of_fsdp, "NonUniformReqGradNWM"), numbers(4, 8)),
    "shared parameters": (
        functools.partial(of_fsdp, "TransformerWithSharedParams", add_bn=False),
        tokens((6, 2), (4, 2), vocabulary=23),
    ),
    "mlp": (functools.partial(of_fsdp, "MLP", 7), numbers(3, 7)),
    "mlp with a buffer": (functools.partial(of_fsdp, "MLP", 8, with_buffer=True), numbers(3, 8)),
    "mlp without biases": (functools.partial(of_fsdp, "MLP", 8, bias=False), numbers(3, 8)),
    "mlp stack": (functools.partial(of_fsdp, "MLPStack", 5), numbers(3, 5)),
    "two outputs": (functools.partial(of_fsdp, "DoubleLinear", 6), numbers(3, 6)),
    "an unused layer": (functools.partial(of_fsdp, "DoubleLinear", 6, use_second_linear=False), numbers(3, 6)),
    "skipped module": (functools.partial(of_fsdp, "SkipModel", double_nest=True), numbers(3, 10)),
    "dtensor mlp": (functools.partial(of_dtensor, "MLPModule", "cpu"), numbers(3, 10)),
    "dtensor mlp stack": (functools.partial(of_dtensor, "MLPStacked", "cpu"), numbers(3, 10)),
    "transformer": (functools.partial(of_dtensor, "Transformer", weight_tying=False), tokens((2, 8), vocabulary=8)),
    "transformer, tied": (functools.partial(of_dtensor, "Transformer"), tokens((2, 8), vocabulary=8)),
    "transformer, checkpointed": (
        functools.partial(of_dtensor, "Transformer", checkpoint_activations=True),
        tokens((2, 8), vocabulary=8),
    ),
    "transformer of experts": (
        functools.partial(of_dtensor, "Transformer", num_experts=4),
        tokens((2, 8), vocabulary=8),
    ),
}


def plan_of(name: str, *, heads: str = "", attention: str = "", **roles: str) -> TensorPlan:
    """A plan of patterns by roles; ``heads`` are column layers, split between the heads that ``attention`` counts."""
    pairs = [(role, pattern) for role, patterns in roles.items() for pattern in patterns.split()]
    rules = [SplitRule(pattern=pattern, role=role) for role, pattern in pairs]  # type: ignore[arg-type]
    rules += [SplitRule(pattern=each, role="column", heads="head_dim") for each in heads.split()]
    rules += [SplitRule(pattern=each, role="input", resized=("n_heads",)) for each in attention.split()]
    return TensorPlan(name=name, rules=tuple(rules))


BLOCKS = plan_of(
    "torch's transformer",
    heads="attention.wq attention.wk attention.wv",
    attention="layers.*.attention",
    input="layers.*.feed_forward",
    column="feed_forward.w1",
    row="attention.wo feed_forward.w2",
    between="attention_norm ffn_norm norm",
)
PLANS = {
    "mlp": plan_of("MLP", input="in_proj", column="in_proj", row="out_proj"),
    "dtensor mlp": plan_of("MLPModule", input="net1", column="net1", row="net2"),
    "dtensor mlp stack": plan_of("MLPStacked", input="layers.*", column="layers.*.net1", row="layers.*.net2"),
    "transformer": BLOCKS,
    "transformer, tied": BLOCKS,
}


def build(name: str, numbers: Numbers) -> Any:
    torch.manual_seed(2)
    return MODELS[name][0]().to(numbers.device, numbers.dtype).train()


def loss_on(model: Any, name: str, rank: int, step: int, numbers: Numbers) -> torch.Tensor:
    """The mean square of what a model returns for a rank's inputs."""
    torch.manual_seed(step)  # dropout drops the same on one process, which has one rank after the other
    inputs = numbers.put(MODELS[name][1](torch.Generator().manual_seed(100 * step + rank)))
    outputs = [out for out in tree_leaves(model(*inputs)) if isinstance(out, torch.Tensor)]
    squares = [out.double().square().mean() for out in outputs]
    return torch.stack(squares).sum()


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for each in parameters if each.requires_grad], lr=0.01, eps=1e-3)


def train_alone(name: str, ranks: int, numbers: Numbers) -> Alone:
    alone = Alone(build(name, numbers), numbers)
    optimizer = adam(alone.parameters())
    for step in range(STEPS):
        for rank in range(ranks):
            alone.backward(loss_on(alone, name, rank, step, numbers) / ranks)
        alone.update(optimizer)
    return alone


def train_on_a_rank(comm: Communicator, name: str, strategy: str, numbers: Numbers) -> State:
    options = {"shard_ranks": 2} if strategy == "hybrid" else {}
    engine = parallelize(build(name, numbers), comm, strategy, **options, **numbers.options)
    optimizer = adam(engine.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_on(engine, name, comm.rank, step, numbers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return dict(engine.full_state_dict())


def train_a_part(comm: Communicator, name: str, numbers: Numbers) -> State:
    """Trains under tensor parallelism."""
    model = build(name, numbers)
    layout = apply_tensor_parallel(model, comm, PLANS[name])
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_on(model, name, 0, step, numbers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {key: layout.full(key, value, comm) for key, value in model.state_dict().items()}


# These compute in float32 inside, whatever dtype they have.
FLOAT32_INSIDE = tuple(name for name in MODELS if name.startswith("transformer"))


def assert_trained(name: str, found: State, alone: Alone) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name in FLOAT32_INSIDE else {"rtol": 1e-9, "atol": 1e-11}
    alone.numbers.assert_trained(found, alone, **tolerance)
