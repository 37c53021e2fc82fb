"""Launchers of several hosts: they meet at the address that was named, if they have one secret."""

from __future__ import annotations

import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from free_ports import free_port
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from paceline.comm.control.server import Hosts
from paceline.comm.control.wire import Address
from paceline.errors import UsageError
from paceline.run.agreement import HostFacts
from paceline.run.rendezvous import CHANGED, HostsChangedError, LeftOutError, Rendezvous, rendezvous
from paceline.run.whereami import Surroundings, host_name


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    monkeypatch.setenv("PACELINE_SECRET", "s" * 32)
    monkeypatch.setattr("paceline.run.rendezvous._BEAT_S", 0.01)
    return Surroundings(launcher="test", kind="host", least=1, count=2, address="127.0.0.1", port=free_port())


def test_two_launchers_meet_and_one_that_comes_later_is_seen(nodes: Surroundings, tmp_path: Path) -> None:
    both = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=nodes.port)
    with (
        ThreadPoolExecutor(2) as pool,
        rendezvous(tmp_path, "run", both) as first,
        rendezvous(tmp_path, "run", both) as second,
    ):
        infos = list(pool.map(Rendezvous.next_rendezvous, (first, second)))
        assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
        assert {info.bootstrap_store_info.master_addr for info in infos} == {f"tcp:127.0.0.1:{nodes.port}"}  # type: ignore[union-attr]
        infos[0].store.set("said", "by one")
        assert infos[1].store.get("said") == b"by one"
        assert first.variables == {}  # the ranks have the environment's secret
        first.has_joined = False  # as for a new agent
        again = pool.submit(first.next_rendezvous)
        while second.num_nodes_waiting() == 0:
            pass
        with pytest.raises(HostsChangedError):
            second.next_rendezvous()
        assert second.is_told()
        told = second.agree_on_end("rank 1 was killed", is_sure=True)
        assert told == [f"{CHANGED}{host_name()} has come"]  # nobody is to blame
        second.has_joined = False
        assert second.next_rendezvous().world_size == again.result().world_size == 2
        second.set_closed()
        first.has_joined = False
        with pytest.raises(RendezvousClosedError, match="ended on another host"):
            first.next_rendezvous()


def test_a_launcher_that_was_missed_while_it_waits_is_taken_in(
    nodes: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.rendezvous._WAIT_S", 0.05)
    both = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=nodes.port)
    with (
        ThreadPoolExecutor(1) as pool,
        rendezvous(tmp_path, "run", both) as first,
        rendezvous(tmp_path, "run", both) as second,
    ):
        for link in second._client._idle:  # the network was down for seconds: some connections have ended
            link._socket.shutdown(socket.SHUT_RDWR)
        waits = pool.submit(second.next_rendezvous)
        while not first.hosts._waiting:
            pass
        first.hosts.leave(second._name, "nothing was heard of it for 5 s")
        assert first.next_rendezvous().world_size == waits.result().world_size == 2


def test_the_account_of_the_host_that_knows_the_cause_counts_on_all(nodes: Surroundings, tmp_path: Path) -> None:
    both = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=nodes.port)
    with (
        ThreadPoolExecutor(2) as pool,
        rendezvous(tmp_path, "run", both) as first,
        rendezvous(tmp_path, "run", both) as second,
    ):
        list(pool.map(Rendezvous.next_rendezvous, (first, second)))
        unsure = pool.submit(first.agree_on_end, "rank 0 lost another", is_sure=False)
        assert second.agree_on_end("rank 1 was killed", is_sure=True) == ["rank 1 was killed"] == unsure.result()
        assert first.agree_on_end("rank 0 failed, too", is_sure=True) == ["rank 1 was killed"]
        while first.num_nodes_waiting() == 0:  # ranks of hosts that do not know it yet are ended, too
            pass
        first.has_joined = second.has_joined = False
        list(pool.map(Rendezvous.next_rendezvous, (first, second)))
        unsure = pool.submit(first.agree_on_end, "rank 0 lost another", is_sure=False)
        second.__exit__()  # the host is gone, which is no failure of a rank
        assert unsure.result() == ["rank 1 was killed", f"{CHANGED}{host_name()} (its launcher has ended) is gone"]


def test_a_launcher_that_leaves_while_it_says_that_it_lives_has_left(
    nodes: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=nodes.port)
    hear, is_asked, has_left = Hosts.hear, threading.Event(), threading.Event()
    with (
        ThreadPoolExecutor(2) as pool,
        rendezvous(tmp_path, "run", both) as first,
        rendezvous(tmp_path, "run", both) as second,
    ):
        list(pool.map(Rendezvous.next_rendezvous, (first, second)))

        def hear_late(hosts: Hosts, host: str, now: float) -> None:
            hear(hosts, host, now)
            if host == second._name:
                is_asked.set()
                has_left.wait(30)

        monkeypatch.setattr(Hosts, "hear", hear_late)
        assert is_asked.wait(30)
        second.__exit__()
        has_left.set()
        while not first._news().gone:
            pass
        assert first._news().gone == [f"{host_name()} (its launcher has ended)"]


@pytest.mark.parametrize("is_told", [False, True])
def test_who_waits_for_an_agent_that_has_left_the_round_is_not_kept(
    nodes: Surroundings, tmp_path: Path, is_told: bool
) -> None:
    both = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=nodes.port)
    with (
        ThreadPoolExecutor(2) as pool,
        rendezvous(tmp_path, "run", both) as first,
        rendezvous(tmp_path, "run", both) as second,
    ):
        infos = list(pool.map(Rendezvous.next_rendezvous, (first, second)))
        waits = pool.submit(infos[0].store.get, "of the second")
        assert infos[1].store.check(["anything"]) is False
        if is_told:  # a connection of the second host ended, and it tries again
            second.agree_on_end(f"{CHANGED}on h1, the control server cannot be reached", is_sure=True)
        else:
            second.__exit__()
        with pytest.raises(HostsChangedError, match="^$" if is_told else "its launcher has ended"):
            waits.result()


def test_what_ranks_refuse_ends_the_run_on_all_hosts(nodes: Surroundings, tmp_path: Path) -> None:
    both = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=nodes.port)
    facts = HostFacts(host="a", paceline="1", torch="2", ranks=1, config={}, folders=(), mark="m")
    with (
        ThreadPoolExecutor(2) as pool,
        rendezvous(tmp_path, "run", both, facts) as first,
        rendezvous(tmp_path, "run", both, facts) as second,
    ):
        list(pool.map(Rendezvous.next_rendezvous, (first, second)))
        refused = pool.submit(second.agree_on_end, "rank 1 lost another", is_sure=False)
        ended = pool.submit(first.end, refusal="optim.lr = -1")
        with pytest.raises(UsageError, match=r"^optim\.lr = -1$"):
            refused.result()
        second.__exit__()
        ended.result()


def test_another_secret_is_told(nodes: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.control.store._SECRET_S", 0.0)
    stranger = Rendezvous(Address(nodes.address, nodes.port), lambda: b"x" * 32, "run")
    with (
        rendezvous(tmp_path, "run", nodes),
        pytest.raises(RendezvousConnectionError, match="the secrets differ"),
        stranger,
    ):
        pass


def test_a_launcher_whose_server_is_gone_says_so_and_comes_back_when_it_can(
    nodes: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rendezvous(tmp_path, "run", nodes):
        guest = Rendezvous(Address(nodes.address, nodes.port), lambda: b"s" * 32, "run", attends_as="guest")
        guest.__enter__()
        assert guest.num_nodes_waiting() == 0
    assert guest._thread is not None
    guest._thread.join()  # it ends when it cannot tell anybody that it lives
    with pytest.raises(RendezvousConnectionError, match="cannot be reached"):
        guest.num_nodes_waiting()
    monkeypatch.setattr("paceline.run.rendezvous._RETURN_S", 0.01)
    with pytest.raises(LeftOutError, match=r"has left the run: the control server at .* cannot be reached"):
        guest.agree_on_end("rank 1 lost another", is_sure=False)
    monkeypatch.setattr("paceline.run.rendezvous._RETURN_S", 30.0)
    with rendezvous(tmp_path, "run", nodes):  # its host was started again
        assert guest.is_cut_off
        assert guest.agree_on_end(f"{CHANGED}others are gone", is_sure=True) == [f"{CHANGED}others are gone"]
        assert not guest.is_cut_off
        guest.__exit__()


def test_a_program_that_has_the_port_is_told_with_it(
    nodes: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CONNECT_S", "_SILENT_S"):
        monkeypatch.setattr(f"paceline.comm.control.store.{name}", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        taken = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=port)
        told = f"who listens at tcp:127.0.0.1:{port} sent nothing within .* it is no launcher of this job"
        with pytest.raises(RendezvousConnectionError, match=told), rendezvous(tmp_path, "run", taken):
            pass


def test_a_launcher_that_waits_for_others_says_so(
    nodes: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr("paceline.run.rendezvous._QUIET_S", 0.0)
    monkeypatch.setattr("paceline.run.rendezvous.say", said.put)
    both = Surroundings(launcher="test", kind="host", least=2, count=2, address=nodes.address, port=nodes.port)
    where = f"waiting at tcp:{nodes.address}:{nodes.port}"
    with ThreadPoolExecutor(2) as pool, rendezvous(tmp_path, "run", both) as first:
        joined = pool.submit(first.next_rendezvous)
        while said.get(timeout=30) != f"{where} for other hosts: at least 2 are needed":
            pass
        with rendezvous(tmp_path, "run", both) as second:
            assert second.next_rendezvous().world_size == joined.result().world_size == 2
