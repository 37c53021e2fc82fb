"""Virtual ranks behave as if each had a process to itself: random streams of its own, the same bits on every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.errors import RankFailedError


def draw() -> list[float]:
    """One number of each generator that a process has."""
    return [torch.rand(1).item(), torch.randn(1).item(), float(np.random.rand()), random.random()]


def lone_process(seed: int, count: int) -> list[list[float]]:
    """What a process of its own draws after it was seeded; the states of this one are put back."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    drawn = [draw() for _ in range(count)]
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])
    return drawn


def states() -> list[bytes]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return [
        torch.get_rng_state().numpy().tobytes(),
        repr((name, keys.tolist(), rest)).encode(),
        repr(random.getstate()).encode(),
    ]


def test_every_rank_draws_what_a_lone_process_draws() -> None:
    """However often the baton passes in between, and whatever the others draw."""

    def work(comm: VirtualCommunicator) -> list[list[float]]:
        drawn, pair = [], comm.split([0, 2]) if comm.rank != 1 else None
        for _ in range(5):
            drawn.append(draw())
            if pair is not None:
                pair.barrier()
            comm.barrier()
        return drawn

    assert run_virtual(work, 3, seed=11) == [lone_process(11, 5)] * 3


def test_a_rank_may_seed_itself() -> None:
    def work(comm: VirtualCommunicator) -> list[list[float]]:
        torch.manual_seed(comm.rank)
        np.random.seed(comm.rank)
        random.seed(comm.rank)
        comm.barrier()
        first = draw()
        comm.barrier()
        return [first, draw()]

    assert run_virtual(work, 3) == [lone_process(rank, 2) for rank in range(3)]


def test_models_built_from_one_seed_are_the_same_on_every_rank() -> None:
    def work(comm: VirtualCommunicator) -> list[torch.Tensor]:
        torch.manual_seed(3)
        first = nn.Linear(4, 4)
        comm.barrier()
        return [*first.parameters(), *nn.Linear(4, 4).parameters()]

    zero, *others = run_virtual(work, 4)
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(zero, other, strict=True))


def train(comm: VirtualCommunicator) -> torch.Tensor:
    """Steps with dropout, noise and a rank's own data; the gradients travel."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        inputs = torch.randn(8, 6) + comm.rank + float(np.random.rand()) + random.random()
        model(inputs).square().mean().backward()
        for handle in [comm.all_reduce(p.grad, "avg") for p in model.parameters() if p.grad is not None]:
            handle.wait()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_two_runs_give_the_same_bits() -> None:
    first, second = run_virtual(train, 4, seed=5), run_virtual(train, 4, seed=5)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert all(torch.equal(first[0], other) for other in first)
    assert not torch.equal(first[0], run_virtual(train, 4, seed=6)[0])


def finish(comm: VirtualCommunicator) -> None:
    draw()
    comm.barrier()
    torch.manual_seed(9)


def fail(comm: VirtualCommunicator) -> None:
    draw()
    comm.barrier()
    raise ValueError("on purpose")


@pytest.mark.parametrize(("work", "error"), [(finish, None), (fail, RankFailedError)])
def test_the_callers_random_states_are_left_as_they_were(
    work: Callable[[VirtualCommunicator], Any], error: type[Exception] | None
) -> None:
    draw()
    before = states()
    if error is None:
        run_virtual(work, 3, seed=1)
    else:
        with pytest.raises(error):
            run_virtual(work, 3, seed=1)
    assert states() == before


def test_a_run_may_stand_inside_another() -> None:
    def inner(comm: VirtualCommunicator) -> list[float]:
        comm.barrier()
        return draw()

    def outer(comm: VirtualCommunicator) -> tuple[list[list[float]], list[float]]:
        comm.barrier()
        inside = run_virtual(inner, 2, seed=4)
        comm.barrier()
        return inside, draw()

    assert run_virtual(outer, 2, seed=8) == [(lone_process(4, 1) * 2, lone_process(8, 1)[0])] * 2


def test_normal_numbers_that_numpy_keeps_for_the_next_call_belong_to_the_rank() -> None:
    def draw(comm: VirtualCommunicator) -> list[float]:
        np.random.seed(comm.rank)
        drawn = []
        for _ in range(6):
            drawn.append(float(np.random.standard_normal()))  # numpy makes two at a time
            comm.barrier()
        return drawn

    for rank, drawn in enumerate(run_virtual(draw, 3)):
        assert drawn == np.random.RandomState(rank).standard_normal(6).tolist()


def test_the_second_number_of_a_pair_stays_with_its_rank() -> None:
    """Normal numbers are made in pairs, and the second is kept beside the generator's own memory."""

    def work(comm: VirtualCommunicator) -> list[float]:
        drawn = []
        for place in range(3):
            if (comm.rank + place) % 2:
                drawn += [random.gauss(0.0, 1.0), float(np.random.standard_normal())]
            comm.barrier()
        return drawn

    def alone(count: int) -> list[float]:
        python, numpy = random.Random(5), np.random.RandomState(5)
        return [number for _ in range(count) for number in (python.gauss(0.0, 1.0), float(numpy.standard_normal()))]

    assert run_virtual(work, 2, seed=5) == [alone(1), alone(2)]


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_one_rank_is_none_of_another_and_of_none_afterwards() -> None:
    """torch 2.10 compiles nothing while it believes that a mode is on; ranks enter and leave theirs in turns."""

    def work(comm: VirtualCommunicator) -> tuple[bool, bool]:
        if comm.rank == 2:
            comm.barrier()
            during = is_in_torch_dispatch_mode()
            comm.barrier()
        else:
            with Nothing():
                comm.barrier()
                during = is_in_torch_dispatch_mode()
                comm.barrier()
        return during, is_in_torch_dispatch_mode()

    assert run_virtual(work, 3) == [(True, False), (True, False), (False, False)]
    assert not is_in_torch_dispatch_mode()
