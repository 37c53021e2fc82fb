"""One rank of many with emulated links: what it finds in its tensors, and when an operation ends."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.comm.emulated.communicator import EmulatedCommunicator, EmulatedWorld, Fabric
from paceline.comm.objects import gather_objects

CPU = torch.device("cpu")


def make(
    seconds: float = 0.0, ranks: int = 4, node_ranks: int = 2, **options: float
) -> tuple[EmulatedCommunicator, Fabric]:
    fabric = Fabric(lambda *_: seconds, CPU, node_ranks=node_ranks, **options)  # type: ignore[arg-type]
    return EmulatedWorld(ranks, fabric).rank(0), fabric


def test_numbers_that_a_host_reads_are_those_of_equal_ranks() -> None:
    comm, _ = make()
    assert (comm.rank, comm.size, comm.device, comm.backend, comm.takes_real_time) == (0, 4, CPU, "emulated", True)
    number = torch.tensor([3.0])
    comm.all_reduce(number).wait()
    assert number.item() == 12.0
    assert gather_objects(comm.split([0, 2]), {"rank": "alike"}) == [{"rank": "alike"}] * 2
    comm.barrier()


def test_what_arrives_is_finite_whatever_was_there() -> None:
    comm, _ = make()
    large = torch.full((3, 4096), float("nan"))
    comm.recv(large, 1).wait()
    assert large.isfinite().all()
    gathered = torch.full((4 * 5000,), float("nan"))
    comm.all_gather(gathered, torch.ones(5000)).wait()
    assert torch.equal(gathered, torch.ones(20000))
    rows = torch.full((9, 1000), float("nan"))  # more than this rank sends to itself
    comm.all_to_all(rows, torch.ones(6, 1000), [3, 2, 2, 2], [1, 2, 2, 1]).wait()
    assert torch.equal(rows, torch.ones(9, 1000))


def test_a_wait_ends_when_the_operation_does_and_a_wire_takes_one_after_the_other() -> None:
    comm, fabric = make(seconds=0.05)
    tensor = torch.ones(8)
    inside = comm.split([0, 1])
    begin = time.perf_counter()
    first, second = inside.all_reduce(tensor), inside.all_reduce(tensor)
    across = comm.all_reduce(tensor)  # on the network, which is another wire
    across.wait()
    assert time.perf_counter() - begin >= 0.05
    second.wait()
    assert time.perf_counter() - begin >= 0.1
    first.wait()
    first.wait()
    found = fabric.take_traffic()["all_reduce"]
    assert (found.calls, found.num_bytes, found.seconds) == (3, 96, pytest.approx(0.15))
    assert 0 < found.exposed <= time.perf_counter() - begin
    assert fabric.take_traffic() == {}


def test_links_may_be_free_and_the_last_rank_late() -> None:
    comm, fabric = make(seconds=3600.0)
    fabric.is_free = True
    comm.all_reduce(torch.ones(8)).wait()
    fabric.keeps = False
    comm.all_reduce(torch.ones(8)).wait()
    assert fabric.take_traffic()["all_reduce"].seconds == 0.0
    late, fabric = make(seconds=1.0, lateness_s=0.5)
    for _ in range(200):
        late.all_reduce(torch.ones(8))
    late.send(torch.ones(8), 1)  # nobody is late for a message: its sender issues it
    found = fabric.take_traffic()
    assert found["send"].seconds == 1.0
    assert found["all_reduce"].seconds / 200 == pytest.approx(1.5, rel=0.15)


def test_operations_are_priced_by_kind_bytes_and_ranks() -> None:
    asked = []

    def price(kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
        asked.append((kind, num_bytes, ranks))
        return 0.0

    comm = EmulatedWorld(4, Fabric(price, CPU, node_ranks=2)).rank(2)
    comm.all_gather(torch.empty(16), torch.empty(4))
    comm.split([2, 3]).reduce_scatter(torch.empty(4), torch.empty(8))
    comm.send(torch.empty(4), 3)
    comm.recv(torch.empty(4), 1)
    everyone = (0, 1, 2, 3)
    assert asked == [
        ("all_gather", 64, everyone),
        ("reduce_scatter", 32, (2, 3)),
        ("send", 16, (2, 3)),
        ("recv", 16, (1, 2)),
    ]
