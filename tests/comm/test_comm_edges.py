"""Edges of groups, stores and shared memory that only few runs come to: each part by itself, in this process."""

from __future__ import annotations

import gc
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.comm.algorithms.lanes import MessageLane
from paceline.comm.algorithms.rounds import Round
from paceline.comm.base import Communicator
from paceline.comm.control import wire
from paceline.comm.control.server import ControlServer, Hosts
from paceline.comm.control.store import ControlClient
from paceline.comm.control.wire import Address
from paceline.comm.shared import segment
from paceline.comm.shared.progress import CELLS, Fence, Ring
from paceline.comm.shared.segment import SharedSegment
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CommunicationError
from paceline_classic.single_tensors import GradientOwners, connect_groups

SECRET = b"s" * 32


# Averages over two groups


def averages(hosts: list[list[int]], leads: list[int]) -> list[float]:
    """Averages the number of each rank over hosts, of which the ranks ``leads`` have a group across."""

    def work(comm: Communicator) -> float:
        inside = comm.split(next(ranks for ranks in hosts if comm.rank in ranks))
        across = comm.split(leads) if comm.rank in leads else None
        tensor = torch.tensor([float(comm.rank), 1.0, 2.0])
        for _ in connect_groups(inside, across)(tensor):
            pass
        assert tensor[1:].tolist() == pytest.approx([1.0, 2.0])
        return float(tensor[0])

    return run_virtual(work, sum(map(len, hosts)))


@pytest.mark.parametrize(
    ("hosts", "leads"),
    [([[0, 1], [2]], [0, 2]), ([[0, 1, 2], [3]], [2, 3]), ([[0, 1], [2, 3]], [0, 3]), ([[0], [1]], [0, 1])],
)
def test_hosts_count_by_their_ranks(hosts: list[list[int]], leads: list[int]) -> None:
    ranks = sum(map(len, hosts))
    assert averages(hosts, leads) == pytest.approx([(ranks - 1) / 2] * ranks)


# Owners of gradients


def test_the_search_for_owners_is_made_seldomer_with_every_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls, looks = gc.get_objects, [0], []
    parameter, owners = torch.nn.Parameter(torch.zeros(3)), GradientOwners()

    def objects() -> list[object]:
        looks.append(calls[0])
        return [*real(), parameter]

    monkeypatch.setattr(gc, "get_objects", objects)

    def find(gradient: torch.Tensor) -> torch.Tensor | None:
        calls[0] += 1
        return owners.find(gradient)

    assert [find(torch.zeros(3)) for _ in range(19)] == [None] * 19
    assert looks == [1, 2, 4, 8, 16]
    parameter.grad = torch.ones(3)
    assert find(parameter.grad) is parameter  # which it knows since it looked at all objects
    parameter.grad = torch.ones(3)  # another memory, which the parameter holds now
    assert find(parameter.grad) is parameter
    later = torch.nn.Parameter(torch.zeros(3))
    later.grad = torch.ones(3)
    assert [find(later.grad) for _ in range(12)] == [None] * 12
    assert find(later.grad) is later
    assert looks[-1] == calls[0] == 34  # the thirty-second miss
    assert find(torch.zeros(3)) is None
    assert looks[-1] == calls[0]  # those before do not count any more


# The control server


def test_a_host_is_there_as_long_as_its_newest_connection() -> None:
    listener = wire.listen(Address("127.0.0.1", 0))
    hosts = Hosts(least=1, most=2)
    with ControlServer([listener], lambda: SECRET, hosts):
        address = Address("127.0.0.1", listener.getsockname()[1])
        first, second, other = (ControlClient(address, lambda: SECRET) for _ in range(3))
        other.ask("count")  # a connection that stands for no host
        for client in (first, second):
            client.ask("attend", "host", "ended/0")
        assert "host" in hosts.present
        first.close()
        other.close()
        for _ in range(20):
            second.ask("count")
        assert "host" in hosts.present  # it has come again, by another connection
        assert hosts._why_gone == {}
        second.close()
        while "host" in hosts.present:
            time.sleep(0.001)
        assert hosts._why_gone == {"host": "its launcher has ended"}


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone has it")
def test_a_connection_that_is_cut_is_noticed_by_the_system() -> None:
    with (
        wire.listen(Address("127.0.0.1", 0)) as listener,
        wire._connect(Address("127.0.0.1", listener.getsockname()[1]), 7.0) as link,
    ):
        assert link.gettimeout() == 7.0
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == int(1000 * wire.CUT_S)


def test_hosts_wait_for_all_or_for_the_last_call() -> None:
    hosts = Hosts(least=2, most=3, last_call_s=3.0, silence_s=5.0)
    hosts.join("b", 0.0)
    assert not hosts.update(1.0)
    hosts.join("a", 2.0)
    assert not hosts.update(2.0)
    assert not hosts.update(4.9)
    assert hosts.update(5.0)
    assert (hosts.round, hosts.members) == (1, ("b", "a"))
    hosts.join("c", 5.0)
    assert hosts.newcomers == ["c"]
    assert not hosts.update(6.0)  # the round goes on
    hosts.hear("a", 6.0)
    hosts.hear("c", 6.0)
    hosts.hear("b", 6.0)
    hosts.leave("b", "its launcher has ended")
    hosts.join("a", 6.0)
    hosts.join("b", 6.0)
    assert hosts.update(6.0)  # all are there
    assert (hosts.round, hosts.members) == (2, ("a", "c", "b"))
    assert not hosts.update(11.0)
    assert len(hosts.present) == 3
    assert not hosts.update(11.1)
    assert len(hosts.present) == 0
    assert set(hosts._why_gone.values()) == {"nothing was heard of it for 5 s"}


# Shared memory


def test_memory_that_there_is_not_is_told_before_it_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=2**20))
    with pytest.raises(CommunicationError) as refused:
        SharedSegment.create(3 * 2**20 + 1)
    assert str(refused.value) == (
        f"shared memory needs 3.0 MiB, and {tmp_path} has 3.0 MiB free\n"
        "  a group of ranks on one host keeps its buffers there\n"
        f"  make {tmp_path} larger (a container: --shm-size), end what fills it, or use plain Gloo"
    )
    assert list(tmp_path.iterdir()) == []
    made = SharedSegment.create(3 * 2**20)
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    assert (tmp_path / made.name).stat().st_size == 3 * 2**20


def ring(cell_bytes: int = 4) -> Ring:
    words = [memoryview(bytearray(16)).cast("Q") for _ in range(CELLS)]
    cells = [torch.zeros(cell_bytes, dtype=torch.uint8) for _ in range(CELLS)]
    return Ring(counters=memoryview(bytearray(256)).cast("Q"), headers=words, cells=cells, fence=Fence())


def test_messages_go_through_cells_with_a_fence_on_either_side() -> None:
    made = ring()
    message = torch.arange(4 * CELLS + 2, dtype=torch.uint8)
    put = made.put(message, to=3, tag=9)
    assert next(put) == (3,)  # all cells are taken
    assert made.fence.crossings == 2 * CELLS
    assert (made.headers[0][0], made.headers[0][1]) == (9, message.numel())
    assert next(put) == (3,)
    got = b""
    for number in range(CELLS + 1):
        place = made.full()
        assert place == number % CELLS
        got += bytes(made.cells[place].tolist())
        made.pop()
        if number == 0:
            assert next(put, None) is None
    assert made.full() is None
    assert got[: message.numel()] == bytes(message.tolist())
    assert made.fence.crossings == 2 * (CELLS + 1) + 2 * (CELLS + 1)
    assert list(made.put(torch.empty(0, dtype=torch.uint8), to=3, tag=7)) == []
    assert made.full() == 1 % CELLS
    assert (made.headers[1 % CELLS][0], made.headers[1 % CELLS][1]) == (7, 0)


# Lanes


class Sent:
    """A message that was waited for."""

    is_waited = False

    def wait(self) -> None:
        self.is_waited = True


def test_a_lane_that_is_closed_holds_no_tensor() -> None:
    lane = MessageLane(SoloCommunicator(torch.device("cpu")), torch.zeros(4), [Round()], "sum", 0)
    sent = Sent()
    lane._sends.append(sent)
    lane.close()
    assert sent.is_waited
    assert (lane._sends, lane._scratch, lane._flat.numel()) == ([], [], 0)
