"""Messages and collectives on real ranks: every verb, our own algorithms, and groups that share members."""

from __future__ import annotations

import pytest
import torch
from gloo_pool import GlooPool
from nccl_cases import GLOO, GLOO_TOO, NCCL, to_host
from nccl_pool import NcclPool

from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.base import Communicator
from paceline.comm.objects import gather_objects

Results = dict[str, torch.Tensor]


def every_verb(comm: Communicator) -> Results:
    """Calls every verb with whole numbers, of which no order of summation rounds the sum."""
    device = comm.device
    whole = torch.arange(4.0 * comm.size, device=device) * (comm.rank + 1)
    found: Results = {"all_reduce": whole.clone(), "broadcast": whole.clone()}
    comm.all_reduce(found["all_reduce"]).wait()
    comm.broadcast(found["broadcast"], source=comm.size - 1).wait()
    found["reduce_scatter"] = torch.empty(4, device=device)
    comm.reduce_scatter(found["reduce_scatter"], whole, "avg").wait()
    found["all_gather"] = torch.empty(4 * comm.size, device=device)
    comm.all_gather(found["all_gather"], whole[:4].clone()).wait()
    found["all_to_all"] = torch.empty_like(whole)
    comm.all_to_all(found["all_to_all"], whole).wait()
    comm.barrier()
    assert gather_objects(comm, f"rank {comm.rank}") == [f"rank {rank}" for rank in range(comm.size)]
    return to_host(found)  # type: ignore[no-any-return]


def expected_verbs(rank: int, size: int) -> Results:
    base = torch.arange(4.0 * size)
    total = size * (size + 1) / 2
    return {
        "all_reduce": base * total,
        "broadcast": base * size,
        "reduce_scatter": (base * total / size)[4 * rank : 4 * rank + 4],
        "all_gather": torch.cat([base[:4] * (other + 1) for other in range(size)]),
        "all_to_all": torch.cat([base[4 * rank : 4 * rank + 4] * (other + 1) for other in range(size)]),
    }


def send_around(comm: Communicator) -> list[torch.Tensor]:
    """Sends to the next rank and receives from the one before, some rounds, while a collective is under way."""
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found = []
    for number in range(3):
        sent = torch.full((1000,), float(10 * number + comm.rank), device=comm.device)
        got, total = torch.empty_like(sent), torch.ones(1000, device=comm.device)
        works = [comm.all_reduce(total)]
        # The lower rank of a pair sends first: NCCL carries out what two ranks post one after another.
        works += [comm.send(sent, following)] if following > comm.rank else []
        works.append(comm.recv(got, before))
        works += [comm.send(sent, following)] if following < comm.rank else []
        for work in works:
            work.wait()
        assert float(total.sum()) == 1000 * comm.size
        found.append(got.cpu())
    return found


def talk_in_groups(comm: Communicator) -> list[float]:
    """Messages in two groups of the same ranks, then a third group of them, and sums in the first and the third."""
    first = comm.split([0, 1])
    other = 1 - comm.rank
    message, got = torch.ones(1, device=comm.device) + comm.rank, torch.zeros(1, device=comm.device)
    for group in (first, comm):
        works = [group.send(message, other)] if comm.rank == 0 else []
        works.append(group.recv(got, other))
        works += [group.send(message, other)] if comm.rank == 1 else []
        for work in works:
            work.wait()
    second = comm.split([0, 1])
    sums = torch.ones(1, device=comm.device), torch.ones(1, device=comm.device)
    for group, total in zip((first, second), sums, strict=True):
        group.all_reduce(total).wait()
    return [got.item(), *(total.item() for total in sums)]


def algorithm_sums(comm: Communicator, algorithm: str) -> torch.Tensor:
    ours = AlgorithmCommunicator(comm, algorithm, chunk_bytes=4096)  # type: ignore[arg-type]
    tensors = [torch.arange(5000.0, device=comm.device) + comm.rank + number for number in range(3)]
    for work in [ours.all_reduce(tensor) for tensor in tensors]:
        work.wait()
    return torch.stack(tensors).cpu()


def quiet(pool: GlooPool) -> bool:
    """Whether torch had nothing to say about messages; it does so once in a process."""
    return not isinstance(pool, NcclPool) or "unbatched P2P" not in pool.printed()


@pytest.mark.parametrize("pool", [GLOO_TOO, NCCL], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_verb(pool: GlooPool, ranks: int) -> None:
    for rank, found in enumerate(pool.run(every_verb, ranks=ranks)):
        for name, value in expected_verbs(rank, ranks).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("pool", [GLOO_TOO, NCCL], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_around_a_ring_beside_a_collective(pool: GlooPool, ranks: int) -> None:
    for rank, found in enumerate(pool.run(send_around, ranks=ranks)):
        for number, got in enumerate(found):
            assert torch.equal(got, torch.full((1000,), float(10 * number + (rank - 1) % ranks)))
    assert quiet(pool)


@pytest.mark.parametrize("pool", [GLOO, NCCL], indirect=True)
def test_groups_of_the_same_ranks_do_not_mix(pool: GlooPool) -> None:
    assert pool.run(talk_in_groups, ranks=2) == [[2.0, 2.0, 2.0], [1.0, 2.0, 2.0]]
    assert quiet(pool)


@pytest.mark.parametrize("pool", [GLOO_TOO, NCCL], indirect=True)
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree"])
def test_algorithms_made_of_messages(pool: GlooPool, algorithm: str) -> None:
    for found in pool.run(algorithm_sums, algorithm, ranks=4):
        expected = torch.stack([4 * torch.arange(5000.0) + 6 + 4 * number for number in range(3)])
        assert torch.equal(found, expected)
    assert quiet(pool)
