"""Sharded optimizer state against that of one process with whole parameters: gathered, loaded, and refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from covering import covering
from gloo_pool import GlooPool
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.flat.optimizer_state import gather_optimizer_state, load_optimizer_state
from paceline.engines.groups import ParameterGroups, make_groups
from paceline.engines.precision import PRECISIONS
from paceline.errors import RankFailedError, UsageError
from paceline.plan.layout import Layout, Offload

RANKS = [1, 2, 3, 4]
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5),
}


def slices(comm: Communicator) -> ParameterGroups:
    """Every rank of ``comm`` has a slice."""
    return make_groups(comm, Layout(strategy="fsdp")).of(nn.Parameter(torch.empty(0)))


class Model(nn.Module):
    """Odd shapes, channels-last strides, a scalar, no elements at all, and a parameter that no group holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 11)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.last = nn.Linear(11, 2)
        self.plain = nn.Parameter(torch.ones(3, 2))
        self.to(torch.float64)


def make_model() -> Model:
    torch.manual_seed(2)
    return Model()


UNITS = (("first.weight", "conv.weight", "scale"), ("first.bias", "conv.bias", "none", "last.weight", "last.bias"))
# In another order than the groups', in two parameter groups, and conv.bias is not updated at all.
UPDATED = (("last.weight", "scale", "plain", "conv.weight"), ("first.bias", "first.weight", "none", "last.bias"))


def gradient(name: str, shape: Iterable[int], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash_of(name) + step)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def hash_of(name: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name))


class Whole:
    """One process with whole parameters."""

    def __init__(self, make: Make) -> None:
        self.parameters = dict(make_model().named_parameters())
        self.optimizer = make(parameter_groups(self.parameters))

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for name, parameter in self.parameters.items():
                # With the parameter's strides, as autograd makes them.
                parameter.grad = torch.empty_like(parameter).copy_(gradient(name, parameter.shape, step))
            self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


class Sharded:
    """A rank with pieces of the same parameters."""

    def __init__(self, comm: Communicator, make: Make) -> None:
        self.comm = comm
        parameters = dict(make_model().named_parameters())
        self.groups = [
            FlatGroup([(name, parameters[name]) for name in names], slices(comm), PRECISIONS["fp32"], Offload())
            for names in UNITS
        ]
        self.updated: dict[str, nn.Parameter] = {"plain": parameters["plain"]}
        for group in self.groups:
            group.keep_slice()
            self.updated.update(zip(group.layout.names, group.pieces, strict=True))
        self.optimizer = make(parameter_groups(self.updated))

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.updated["plain"].grad = gradient("plain", (3, 2), step)
            for group in self.groups:
                for place, piece in enumerate(group.pieces):
                    whole = gradient(group.layout.names[place], group.layout.slots[place].shape, step)
                    piece.grad = group.layout.cut_piece(place, whole).clone()
            self.optimizer.step()

    def gather(self, *, rank0_only: bool = False) -> dict[str, Any]:
        return gather_optimizer_state(self.optimizer, self.groups, comm=self.comm, rank0_only=rank0_only)

    def load(self, state: dict[str, Any]) -> None:
        load_optimizer_state(self.optimizer, self.groups, state)

    def values(self) -> dict[str, torch.Tensor]:
        found = {"plain": self.updated["plain"].detach().clone()}
        for group in self.groups:
            whole = group.gather_whole(group.pieces)
            found.update((name, tensor.clone()) for name, tensor in zip(group.layout.names, whole, strict=True))
        return found


def parameter_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    first, second = UPDATED
    return [{"params": [parameters[n] for n in first]}, {"params": [parameters[n] for n in second], "lr": 0.05}]


def check_same(found: Any, expected: Any, path: str = "state", *, is_exact: bool = True) -> None:
    """Compares in full: types, keys, shapes, strides, dtypes, devices and values."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            check_same(found[key], expected[key], f"{path}[{key!r}]", is_exact=is_exact)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_same(one, other, f"{path}[{place}]", is_exact=is_exact)
    elif isinstance(expected, torch.Tensor):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype), path
        assert found.device.type == "cpu", path
        close = torch.equal(found, expected) if is_exact else torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
        assert close, f"{path}: {found} is not {expected}"
    else:
        assert found == expected, path


@covering(name=list(OPTIMIZERS), ranks=RANKS)
def test_gathered_state_is_that_of_one_process(name: str, ranks: int) -> None:
    whole = Whole(OPTIMIZERS[name])
    whole.train(range(3))

    def work(comm: Communicator) -> dict[str, Any]:
        sharded = Sharded(comm, OPTIMIZERS[name])
        sharded.train(range(3))
        return sharded.gather()

    for found in run_virtual(work, ranks):
        # Vector instructions treat the last elements of a piece differently, in the last bit.
        check_same(found, whole.optimizer.state_dict(), is_exact=False)


@covering(name=list(OPTIMIZERS), ranks=RANKS)
def test_a_loaded_state_comes_back_to_the_bit_and_trains_on(name: str, ranks: int) -> None:
    whole = Whole(OPTIMIZERS[name])
    start = whole.values()
    whole.train(range(2))
    state = copy.deepcopy(whole.optimizer.state_dict())
    with torch.no_grad():
        for parameter, value in zip(whole.parameters.values(), start.values(), strict=True):
            parameter.copy_(value)
    whole.train(range(2, 4))

    def work(comm: Communicator) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        sharded = Sharded(comm, OPTIMIZERS[name])
        sharded.load(state)
        found = sharded.gather()
        sharded.train(range(2, 4))
        return found, sharded.values()

    kept = copy.deepcopy(state)
    for found, values in run_virtual(work, ranks):
        check_same(found, kept)
        check_same({name: values[name] for name in start}, whole.values(), is_exact=False)
    check_same(state, kept, "what was loaded from")


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (4, 1), (1, 3)])
def test_state_moves_to_another_number_of_ranks(before: int, after: int) -> None:
    make = OPTIMIZERS["adamw"]

    def save(comm: Communicator) -> dict[str, Any]:
        sharded = Sharded(comm, make)
        sharded.train(range(2))
        return sharded.gather(rank0_only=True)

    saved, *others = run_virtual(save, before)
    assert all(other == {} for other in others)

    def resume(comm: Communicator) -> dict[str, Any]:
        sharded = Sharded(comm, make)
        sharded.load(saved)
        return sharded.gather()

    for found in run_virtual(resume, after):
        check_same(found, saved)
    plain = Whole(make)
    plain.optimizer.load_state_dict(saved)
    check_same(plain.optimizer.state_dict(), saved)


def test_nothing_to_gather_before_the_first_step() -> None:
    expected = Whole(OPTIMIZERS["adamw"]).optimizer.state_dict()
    for found in run_virtual(lambda comm: Sharded(comm, OPTIMIZERS["adamw"]).gather(), 3):
        check_same(found, expected)


def test_one_gather_for_each_group_and_state() -> None:
    def work(comm: VirtualCommunicator) -> tuple[int, int]:
        trace = Trace(comm.device, keep=True)
        sharded = Sharded(TracedCommunicator(comm, trace), OPTIMIZERS["adamw"])
        sharded.train(range(1))
        sharded.gather()
        largest = max(op.num_bytes for op in trace.operations if op.kind == "all_gather")
        return trace.num_operations["all_gather"], largest

    for count, largest in run_virtual(work, 2):
        assert count == 2 + 2 * 2  # the exchange of objects takes two; then exp_avg and exp_avg_sq of two groups
        assert largest >= 8 * (9 * 11 + 4 * 27 + 1)


def test_results_share_no_memory_with_the_optimizer() -> None:
    sharded = Sharded(SoloCommunicator(torch.device("cpu")), OPTIMIZERS["adamw"])
    sharded.train(range(1))
    state = sharded.gather()
    kept = copy.deepcopy(state)
    sharded.train(range(1, 2))
    check_same(state, kept)
    sharded.load(state)
    sharded.train(range(1, 2))
    check_same(state, kept)


# State that not every rank has.


class SkipsEmpty(torch.optim.SGD):
    """Keeps no state for pieces without elements."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in list(self.state):
            if parameter.numel() == 0:
                del self.state[parameter]
            else:
                self.state[parameter]["count"] = 7
        return result


def test_state_of_ranks_that_hold_elements_is_enough() -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return SkipsEmpty(groups, lr=0.1, momentum=0.9)

    whole = Whole(make)
    whole.train(range(2))

    def work(comm: Communicator) -> dict[str, Any]:
        sharded = Sharded(comm, make)
        sharded.train(range(2))
        return sharded.gather()

    for found in run_virtual(work, 4):
        check_same(found, whole.optimizer.state_dict(), is_exact=False)


def test_state_that_a_rank_with_elements_lacks_is_refused_on_all_ranks() -> None:
    def work(comm: Communicator) -> str:
        sharded = Sharded(comm, OPTIMIZERS["momentum"])
        sharded.train(range(1))
        if comm.rank == 1:
            del sharded.optimizer.state[sharded.updated["conv.weight"]]
        with pytest.raises(UsageError, match=r"momentum_buffer of conv.weight exists on rank 0, but not on rank 1"):
            sharded.gather()
        return "refused"

    assert run_virtual(work, 2) == ["refused"] * 2


def test_state_in_lists_is_refused_on_all_ranks() -> None:
    def work(comm: Communicator) -> str:
        sharded = Sharded(comm, OPTIMIZERS["sgd"])
        if comm.rank == 0:
            piece = sharded.updated["first.weight"]
            sharded.optimizer.state[piece]["history"] = [torch.zeros_like(piece)]
        with pytest.raises(UsageError, match=r"first.weight has history \(a list of tensors\)"):
            sharded.gather()
        return "refused"

    assert run_virtual(work, 2) == ["refused"] * 2


def test_counts_of_one_element_are_not_taken_for_pieces() -> None:
    """A scalar parameter's state and its count of steps have the same shape; other parameters tell them apart."""

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for parameter in self.state:
                self.state[parameter].setdefault("updates", torch.zeros((), dtype=torch.float64)).add_(1.0)
            return result

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Counts(groups, lr=0.1, momentum=0.9)

    whole = Whole(make)
    whole.train(range(2))
    state = copy.deepcopy(whole.optimizer.state_dict())

    def work(comm: Communicator) -> dict[str, Any]:
        sharded = Sharded(comm, make)
        sharded.load(state)
        scale = sharded.optimizer.state[sharded.updated["scale"]]
        assert scale["updates"].shape == ()
        assert scale["momentum_buffer"].shape == sharded.updated["scale"].shape
        sharded.train(range(2, 3))
        return sharded.gather()

    whole.train(range(2, 3))
    for found in run_virtual(work, 3):
        check_same(found, whole.optimizer.state_dict(), is_exact=False)


def test_a_model_of_one_scalar() -> None:
    """No other parameter tells a piece from a count: torch's own name for the count does."""

    def work(comm: Communicator) -> dict[str, Any]:
        states: list[dict[str, Any]] = []
        for _ in range(2):
            group = FlatGroup([("scale", nn.Parameter(torch.tensor(2.0)))], slices(comm), PRECISIONS["fp32"], Offload())
            group.keep_slice()
            optimizer = torch.optim.AdamW(group.pieces, lr=0.1)
            if states:
                load_optimizer_state(optimizer, [group], states[0])
            for _ in range(2 - len(states)):
                group.pieces[0].grad = torch.ones_like(group.pieces[0])
                optimizer.step()
            states.append(gather_optimizer_state(optimizer, [group], comm=comm))
        return states[1]

    parameter = nn.Parameter(torch.tensor(2.0))
    alone = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = torch.ones(())
        alone.step()
    for found in run_virtual(work, 2):
        check_same(found, alone.state_dict())


# What does not fit.


def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    whole = Whole(OPTIMIZERS["adamw"])
    whole.train(range(1))
    state = copy.deepcopy(whole.optimizer.state_dict())
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["param_groups"].pop(), "different number of parameter groups"),
        (lambda s: s["param_groups"][0]["params"].pop(), "doesn't match the size"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.zeros(3, 3)),
            r"exp_avg of last.weight is \[3, 3\], but the parameter \[2, 11\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    state = broken(change)

    def work(comm: Communicator) -> None:
        sharded = Sharded(comm, OPTIMIZERS["adamw"])
        sharded.train(range(1))
        before = sharded.gather()
        with pytest.raises(ValueError, match=message):
            sharded.load(state)
        check_same(sharded.gather(), before)

    run_virtual(work, 2)


def test_ranks_with_other_optimizers_get_a_verdict() -> None:
    def work(comm: Communicator) -> None:
        sharded = Sharded(comm, OPTIMIZERS["momentum" if comm.rank else "adamw"])
        sharded.train(range(1))
        sharded.gather()

    with pytest.raises(RankFailedError, match="but not on rank 1"):
        run_virtual(work, 2)


# Real ranks.


def train_gather_load(comm: Communicator) -> dict[str, Any]:
    sharded = Sharded(comm, OPTIMIZERS["adamw_fused"])
    sharded.train(range(2))
    state = sharded.gather()
    again = Sharded(comm, OPTIMIZERS["adamw_fused"])
    again.load(state)
    check_same(again.gather(), state)
    assert again.gather(rank0_only=True).keys() == (state.keys() if comm.rank == 0 else set())
    return state


@pytest.mark.exhaustive
def test_the_same_on_gloo_ranks(gloo_pool: GlooPool) -> None:
    whole = Whole(OPTIMIZERS["adamw_fused"])
    whole.train(range(2))
    for found in gloo_pool.run(train_gather_load, ranks=2, timeout_s=90.0):
        check_same(found, whole.optimizer.state_dict(), is_exact=False)
