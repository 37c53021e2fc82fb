"""torch's own catalogue of modules: each entry that has parameters, trained a step on virtual ranks, and evaluated.

Each rank has inputs of its own. The oracle is plain autograd in one process: the gradient is the mean over the ranks'
inputs, and the parameters are those after a step of SGD with it. Batch norm sees the batch of all ranks, where it goes
by the batch. Evaluation gives the outputs of the plain module. A lazy module is refused, with the way out; taken, which
is one call, it is trained as all others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from judging import outcome_of
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.errors import UsageError

common_modules = pytest.importorskip(
    "torch.testing._internal.common_modules", reason="torch's catalogue needs expecttest"
)
pytestmark = [pytest.mark.judge, pytest.mark.filterwarnings("ignore")]

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hybrid")
DTYPE = torch.float64
CATALOGUE: dict[str, Any] = {info.name: info for info in common_modules.module_db}
Choose = Callable[[Sequence[Any]], Sequence[Any]]
REFUSAL = r"(?s)have no shape yet\n  a lazy module .* before that\n  run the model once when it is built"
BATCH_NORMS = ("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d")


@functools.cache
def cases_of(name: str, *, training: bool) -> list[Any]:
    """The ways in which the catalogue builds and calls a module, of those that leave it with parameters."""
    info = CATALOGUE[name]
    torch.manual_seed(5)
    cases = info.module_inputs_func(info, device="cpu", dtype=DTYPE, requires_grad=False, training=training)
    found = [case for case in cases if any(True for _ in build(name, case).parameters())]
    if not found:
        pytest.skip("the module has no parameters")
    return found


def build_as_it_is(name: str, case: Any) -> nn.Module:
    torch.manual_seed(11)
    kind = CATALOGUE[name].module_cls
    takes = {"device": "cpu", "dtype": DTYPE}
    known = inspect.signature(kind.__init__).parameters
    chosen = {key: value for key, value in takes.items() if key in known} | case.constructor_input.kwargs
    made: nn.Module = kind(*case.constructor_input.args, **chosen)
    return made.to(DTYPE)


def build(name: str, case: Any) -> nn.Module:
    """A module whose parameters have shapes: one that learns them from a batch gets one."""
    made = build_as_it_is(name, case)
    if is_lazy(made):
        with torch.no_grad():
            call(made, case, 0)
    return made


def is_lazy(module: nn.Module) -> bool:
    return any(nn.parameter.is_lazy(each) for each in module.parameters())


def spread(module: nn.Module, comm: Communicator, name: str, case: Any, strategy: str) -> Any:
    """The engine of a module; as it comes, a lazy one must be refused with the rule and the fix."""
    options = {"shard_ranks": comm.size} if strategy == "hybrid" else {}
    if is_lazy(lazy := build_as_it_is(name, case)):
        with pytest.raises(UsageError, match=REFUSAL):
            parallelize(lazy, comm, strategy, **options)
    return parallelize(module, comm, strategy, **options)


def of_rank(value: Any, rank: int) -> Any:
    """The inputs of a rank: those of the catalogue, with other numbers where they are floating-point."""
    return value * (1.0 + 0.25 * rank) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def call(module: Any, case: Any, *ranks: int) -> list[torch.Tensor]:
    """Calls a module on the inputs of some ranks, one behind the other."""
    torch.manual_seed(100 + ranks[0])  # what it draws is the rank's
    given = (case.forward_input.args, case.forward_input.kwargs)
    each = [tree_map(functools.partial(of_rank, rank=rank), given) for rank in ranks]
    args, kwargs = each[0] if len(ranks) == 1 else tree_map(lambda *values: torch.cat(values), *each)
    return [out for out in tree_leaves(module(*args, **kwargs)) if isinstance(out, torch.Tensor)]


def loss_of(outputs: list[torch.Tensor], parts: int = 1) -> torch.Tensor:
    """Weighs every number of the outputs by its place in its part of the batch."""
    total = torch.zeros((), dtype=DTYPE)
    for out in (out for out in outputs if out.requires_grad):
        weights = torch.linspace(0.5, 1.5, out.numel() // parts, dtype=DTYPE).repeat(parts)
        total = total + (out.flatten() * weights).sum()
    return total


def trained_alone(name: str, case: Any, ranks: int) -> dict[str, torch.Tensor]:
    module = build(name, case).train()
    if name in BATCH_NORMS:
        (loss_of(call(module, case, *range(ranks)), ranks) / ranks).backward()
    else:
        for rank in range(ranks):
            (loss_of(call(module, case, rank)) / ranks).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return {key: value.detach() for key, value in module.named_parameters()}


@torch.no_grad()
def evaluated_alone(name: str, case: Any, rank: int) -> list[torch.Tensor]:
    module = build(name, case).eval()
    if name in BATCH_NORMS:
        return [out.chunk(2)[rank] for out in call(module, case, 0, 1)]
    return call(module, case, rank)


def trained_on_a_rank(comm: Communicator, name: str, case: Any, strategy: str) -> dict[str, torch.Tensor]:
    engine = spread(build(name, case).train(), comm, name, case, strategy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    loss_of(call(engine, case, comm.rank)).backward()
    optimizer.step()
    return dict(engine.state_dict())


def evaluated_on_a_rank(comm: Communicator, name: str, case: Any, strategy: str) -> list[torch.Tensor]:
    engine = spread(build(name, case).eval(), comm, name, case, strategy)
    with torch.no_grad():
        return call(engine, case, comm.rank)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_module_trains_as_in_one_process(name: str, strategy: str, ranks: int, of_turn: Choose) -> None:
    for case in of_turn(cases_of(name, training=True)):
        work = functools.partial(trained_on_a_rank, name=name, case=case, strategy=strategy)
        found = outcome_of(lambda work=work: run_virtual(work, ranks))
        expected = trained_alone(name, case, ranks)
        for state in found:
            torch.testing.assert_close({key: state[key] for key in expected}, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_module_evaluates_as_in_one_process(name: str, strategy: str, of_turn: Choose) -> None:
    for case in of_turn(cases_of(name, training=False)):
        work = functools.partial(evaluated_on_a_rank, name=name, case=case, strategy=strategy)
        found = outcome_of(lambda work=work: run_virtual(work, 2))
        for rank, outputs in enumerate(found):
            torch.testing.assert_close(outputs, evaluated_alone(name, case, rank), rtol=1e-14, atol=1e-15)
