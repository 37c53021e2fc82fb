"""A world of one: every verb is done when it is issued, and refuses what a larger world would refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import RankFailedError, UsageError

CPU = torch.device("cpu")
OPS = ("sum", "avg", "min", "max", "product")


def every_verb(comm: Communicator) -> list[torch.Tensor]:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for op in OPS if dtype.is_floating_point else ("sum", "min", "max", "product"):
            reduced, piece = (torch.arange(4) % 3).to(dtype), torch.empty(2, 2, dtype=dtype)
            comm.all_reduce(reduced, op).wait()  # type: ignore[arg-type]
            comm.reduce_scatter(piece, reduced, op).wait()  # type: ignore[arg-type]
            found += [reduced, piece]
        gathered, exchanged = torch.empty(4, dtype=dtype), torch.empty(2, 2, dtype=dtype)
        comm.all_gather(gathered, found[-1]).wait()
        comm.all_to_all(exchanged, found[-1], [2], [2]).wait()
        comm.broadcast(found[-1]).wait()
        found += [gathered, exchanged]
    comm.barrier()
    return found


def test_it_is_a_communicator_of_rank_0() -> None:
    comm = SoloCommunicator(CPU, world_rank=3)
    assert isinstance(comm, Communicator)
    assert (comm.rank, comm.size, comm.ranks, comm.device) == (0, 1, (3,), CPU)


def test_every_verb_gives_what_one_virtual_rank_gives() -> None:
    (virtual,) = run_virtual(every_verb, 1)
    for ours, theirs in zip(every_verb(SoloCommunicator(CPU)), virtual, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("numel", [0, 1, 5])
def test_results_may_be_the_same_memory(numel: int) -> None:
    comm, tensor = SoloCommunicator(CPU), torch.arange(float(numel))
    comm.all_gather(tensor, tensor).wait()
    comm.reduce_scatter(tensor, tensor).wait()
    assert tensor.tolist() == list(range(numel))


def test_copies_leave_autograd_alone() -> None:
    comm, output = SoloCommunicator(CPU), torch.zeros(2)
    comm.all_gather(output, torch.nn.Parameter(torch.ones(2))).wait()
    assert output.tolist() == [1.0, 1.0]
    assert not output.requires_grad


def test_its_only_subgroup_is_itself() -> None:
    comm = SoloCommunicator(CPU, world_rank=2)
    assert comm.split([0]).ranks == (2,)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_gather(torch.ones(4), torch.ones(1)),
        lambda comm: comm.reduce_scatter(torch.ones(4), torch.ones(1)),
        lambda comm: comm.all_gather(torch.ones(1).double(), torch.ones(1)),
        lambda comm: comm.all_to_all(torch.ones(2), torch.ones(2), [1], [2]),
        lambda comm: comm.broadcast(torch.ones(1), source=1),
        lambda comm: comm.send(torch.ones(1), to=1),
        lambda comm: comm.recv(torch.ones(1), source=1),
        lambda comm: comm.split([]),
        lambda comm: comm.split([1]),
    ],
)
def test_it_refuses_what_one_virtual_rank_refuses(call: Callable[[Communicator], Any]) -> None:
    with pytest.raises(UsageError):
        call(SoloCommunicator(CPU))
    with pytest.raises(RankFailedError) as caught:
        run_virtual(call, 1)
    assert isinstance(caught.value.__cause__, UsageError)


def test_there_is_nobody_to_talk_to() -> None:
    with pytest.raises(UsageError, match="no other rank"):
        SoloCommunicator(CPU).send(torch.ones(1), to=0)
    with pytest.raises(UsageError, match="no other rank"):
        SoloCommunicator(CPU).recv(torch.ones(1), source=0)
