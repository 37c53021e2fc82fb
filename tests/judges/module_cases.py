"""torch's catalogue of modules, as cases: built, called, trained a step and evaluated, alone and on ranks.

Each rank has inputs of its own. The oracle is plain autograd in one process: the gradient is the mean over the ranks'
inputs, and the parameters are those after a step of SGD with it. Batch norm sees the batch of all ranks, where it goes
by the batch. A rank takes the numbers of cases, not cases: these cannot be sent to another process.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Alone, Numbers, State
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.comm.base import Communicator
from paceline.engines.apply import parallelize
from paceline.errors import UsageError

MODULE = "torch.testing._internal.common_modules"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hybrid")
REFUSAL = r"(?s)have no shape yet\n  a lazy module .* before that\n  run the model once when it is built"
BATCH_NORMS = ("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d")


@functools.cache
def catalogued_names() -> list[str]:
    """The names of the catalogue's entries, from its source: to load it takes seconds, which only its cases need."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    (table,) = (node for node in body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "module_db")
    calls = (node for node in ast.walk(table) if isinstance(node, ast.Call))
    entries = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ModuleInfo"]
    return sorted({ast.unparse(entry.args[0]).removeprefix("torch.") for entry in entries})


@functools.cache
def catalogue() -> dict[str, Any]:
    modules = pytest.importorskip(MODULE, reason="torch's catalogue needs expecttest")
    found = {info.name: info for info in modules.module_db}
    assert sorted(found) == catalogued_names()
    return found


@functools.cache
def cases_of(name: str, numbers: Numbers, *, training: bool) -> list[Any]:
    """The ways in which the catalogue builds and calls a module, of those that leave it with parameters."""
    info = catalogue()[name]
    torch.manual_seed(5)
    given = {"device": numbers.device, "dtype": numbers.dtype, "requires_grad": False, "training": training}
    cases = info.module_inputs_func(info, **given)
    return [case for case in cases if any(True for _ in build(name, case, numbers).parameters())]


def build(name: str, case: Any, numbers: Numbers) -> nn.Module:
    """Builds a module whose parameters have shapes: one that learns them from a batch gets one."""
    made = build_as_it_is(name, case, numbers)
    if is_lazy(made):
        with torch.no_grad():
            call(made, case, 0)
    return made


def is_lazy(module: nn.Module) -> bool:
    return any(nn.parameter.is_lazy(each) for each in module.parameters())


def build_as_it_is(name: str, case: Any, numbers: Numbers) -> nn.Module:
    torch.manual_seed(11)
    kind = catalogue()[name].module_cls
    takes = {"device": numbers.device, "dtype": numbers.dtype}
    known = inspect.signature(kind.__init__).parameters
    chosen = {key: value for key, value in takes.items() if key in known} | case.constructor_input.kwargs
    made: nn.Module = kind(*case.constructor_input.args, **chosen)
    return made.to(numbers.device, numbers.dtype)


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


def loss_of(outputs: list[torch.Tensor], numbers: Numbers, parts: int = 1) -> torch.Tensor:
    """Weighs every number of the outputs by its place in its part of the batch."""
    given = {"dtype": numbers.dtype, "device": numbers.device}
    total = torch.zeros((), **given)
    for out in (out for out in outputs if out.requires_grad):
        weights = torch.linspace(0.5, 1.5, out.numel() // parts, **given).repeat(parts)
        total = total + (out.flatten() * weights).sum()
    return total


def trained_alone(name: str, case: Any, ranks: int, numbers: Numbers) -> Alone:
    alone = Alone(build(name, case, numbers).train(), numbers)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    if name in BATCH_NORMS:
        alone.backward(loss_of(call(alone, case, *range(ranks)), numbers, ranks) / ranks)
    else:
        for rank in range(ranks):
            alone.backward(loss_of(call(alone, case, rank), numbers) / ranks)
    alone.update(optimizer)
    return alone


@torch.no_grad()
def evaluated_alone(name: str, case: Any, rank: int, numbers: Numbers) -> list[torch.Tensor]:
    alone = Alone(build(name, case, numbers).eval(), numbers)
    if name in BATCH_NORMS:
        return [out.chunk(2)[rank] for out in call(alone, case, 0, 1)]
    return call(alone, case, rank)


def trained_on_a_rank(
    comm: Communicator, name: str, chosen: Sequence[int], strategy: str, numbers: Numbers
) -> list[State]:
    """Trains the chosen cases of a module, one after another; returns the parameters of each."""
    found = []
    for number in chosen:
        case = cases_of(name, numbers, training=True)[number]
        check_refused(comm, build_as_it_is(name, case, numbers), strategy)
        engine = engine_of(comm, build(name, case, numbers).train(), strategy, numbers)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        loss_of(call(engine, case, comm.rank), numbers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(dict(engine.full_state_dict()))
    return found


def evaluated_on_a_rank(
    comm: Communicator, name: str, chosen: Sequence[int], strategy: str, numbers: Numbers
) -> list[list[torch.Tensor]]:
    """Evaluates the chosen cases of a module, one after another; returns the outputs of each."""
    found = []
    for number in chosen:
        case = cases_of(name, numbers, training=False)[number]
        check_refused(comm, build_as_it_is(name, case, numbers), strategy)
        engine = engine_of(comm, build(name, case, numbers).eval(), strategy, numbers)
        with torch.no_grad():
            found.append(call(engine, case, comm.rank))
    return found


def engine_of(comm: Communicator, module: nn.Module, strategy: str, numbers: Numbers) -> Any:
    sharding = {"shard_ranks": comm.size} if strategy == "hybrid" else {}
    return parallelize(module, comm, strategy, **sharding, **numbers.options)


def check_refused(comm: Communicator, module: nn.Module, strategy: str) -> None:
    """A lazy module, as it comes, must be refused with the rule and the fix."""
    if is_lazy(module):
        with pytest.raises(UsageError, match=REFUSAL):
            engine_of(comm, module, strategy, Numbers())
