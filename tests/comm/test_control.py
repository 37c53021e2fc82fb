"""The control store: it answers those who have the secret, and parses nothing of anybody else."""

from __future__ import annotations

import contextlib
import pickle
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gloo_pool import GlooPool

from paceline.comm import meeting
from paceline.comm.base import Communicator
from paceline.comm.control import wire
from paceline.comm.control.server import Hosts, private_server
from paceline.comm.control.store import ControlClient, ControlStore
from paceline.comm.control.wire import HEAD, LONGEST_MESSAGE, NONCE_BYTES, WRONG_PROOF, Address, RefusedError, WireLink
from paceline.comm.meeting import disconnect
from paceline.comm.torch_dist import connect
from paceline.errors import CommunicationError

Connect = Callable[..., ControlClient]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Address, Path]]:
    folder = tmp_path / "control"
    folder.mkdir(mode=0o700)
    with private_server(folder) as found:
        yield found


@pytest.fixture
def client(server: tuple[Address, Path]) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def make(secret: bytes | None = None) -> ControlClient:
            made = ControlClient(server[0], lambda: secret or wire.read_secret(server[1]))
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the server has parsed so far."""
    seen: list[bytes] = []
    real = wire.from_text

    def parse(text: bytes) -> list[Any]:
        seen.append(text)
        return real(text)

    monkeypatch.setattr("paceline.comm.control.server.from_text", parse)
    return seen


def raw(address: Address) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(30)
    link.connect(address.host)
    return link


def is_closed(link: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while link.recv(4096):
            pass
    return True


def test_a_store_does_what_torchs_do(client: Connect) -> None:
    ours = ControlStore(client())
    for store in (ours, dist.PrefixStore("group", ours)):
        reference = dist.HashStore()
        for each in (store, reference):
            each.set_timeout(timedelta(seconds=0.01))

        def same(act: Callable[[Any], Any], store: Any = store, reference: Any = reference) -> None:
            assert act(store) == act(reference)

        same(lambda each: each.set("text", "words"))
        same(lambda each: each.set("bytes", b"\x00\xff\n"))
        same(lambda each: (each.get("text"), each.get("bytes")))
        same(lambda each: (each.add("n", 3), each.add("n", -5), each.get("n")))
        same(lambda each: (each.check(["n", "text"]), each.check(["n", "none"])))
        same(lambda each: each.compare_set("cas", "", "first"))
        same(lambda each: each.compare_set("cas", "other", "second"))
        same(lambda each: (each.compare_set("cas", "first", "second"), each.get("cas")))
        same(lambda each: (each.append("list", "a"), each.append("list", "b"), each.get("list")))
        same(lambda each: (each.multi_set(["x", "y"], ["1", "2"]), each.multi_get(["y", "x"])))
        same(lambda each: (each.delete_key("x"), each.delete_key("x"), each.check(["x"])))
        same(lambda each: each.wait(["n"]))
        for each in (store, reference):
            with pytest.raises(RuntimeError, match=r"(?i)timeout"):
                each.get("never")
    assert ours.num_keys() > 0


def test_a_thread_that_waits_keeps_no_other_waiting(client: Connect) -> None:
    store, found = ControlStore(client()), []
    thread = threading.Thread(target=lambda: found.append(store.get("late")))
    thread.start()
    assert store.add("meanwhile", 1) == 1
    store.set("late", "here")
    thread.join()
    assert found == [b"here"]


def join_through_control(comm: Communicator, address: str, secret: str, is_file: bool) -> tuple[float, list[int]]:
    """Leaves the pool's group, and meets the other rank again at a control server; ``is_file``: as NCCL's ranks."""
    import os

    import torch

    comm.barrier()
    disconnect()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT="7", PACELINE_SECRET_FILE=secret)
    initialize = dist.init_process_group
    try:
        if is_file:
            store = meeting._store_for_nccl(meeting.join_store(60.0), comm.rank, comm.size)
            dist.init_process_group = lambda backend, **named: initialize(backend, **named | {"store": store})
        again = connect("gloo", device="cpu", timeout_s=60)
        again.all_reduce(total := torch.ones(1)).wait()
        again.split([1, 0]).all_reduce(total).wait()
        return total.item(), list(again.ranks)
    finally:
        dist.init_process_group = initialize
        del os.environ["PACELINE_SECRET_FILE"]


@pytest.mark.parametrize("is_file", [False, True])
def test_ranks_meet_and_split_through_it(server: tuple[Address, Path], gloo_pool: GlooPool, is_file: bool) -> None:
    args = str(server[0]), str(server[1]), is_file
    assert gloo_pool.run(join_through_control, *args, ranks=2) == [(4.0, [0, 1])] * 2


def test_a_stranger_is_sent_away_unread(server: tuple[Address, Path], parsed: list[bytes]) -> None:
    for words in (b"GET / HTTP/1.1\r\n\r\n".ljust(64), pickle.dumps([0] * 100), b"\xff" * 4096):
        with raw(server[0]) as link:
            assert len(link.recv(NONCE_BYTES)) == NONCE_BYTES
            link.sendall(words)
            with link.makefile("rb") as answer:
                assert answer.read() == WRONG_PROOF
    assert parsed == []


def test_a_stranger_that_says_nothing_is_sent_away(
    server: tuple[Address, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.comm.control.server._HANDSHAKE_S", 0.01)
    with raw(server[0]) as link:
        assert is_closed(link)


def test_many_strangers_are_not_kept(server: tuple[Address, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_MOST_STRANGERS", "_OF_HOST"):
        monkeypatch.setattr(f"paceline.comm.control.server.{limit}", 1)
    with raw(server[0]) as first, raw(server[0]) as second:
        assert len(first.recv(NONCE_BYTES)) == NONCE_BYTES
        assert second.recv(NONCE_BYTES) == b""


def test_a_wrong_secret_is_told_as_such(client: Connect, parsed: list[bytes]) -> None:
    with pytest.raises(RefusedError, match="the secrets differ"):
        client(b"x" * 32).ask("count")
    assert parsed == []
    assert client().ask("count") == 0


@pytest.mark.parametrize("greeting", [b"", bytes(NONCE_BYTES)], ids=["before its greeting", "after it"])
def test_a_server_that_ends_while_a_client_comes_is_gone_and_has_no_other_secret(
    tmp_path: Path, greeting: bytes
) -> None:
    address = Address(str(tmp_path / "ending"))

    def end(listener: socket.socket) -> None:
        link, _ = listener.accept()
        with link:
            link.sendall(greeting)
            link.recv(len(greeting) and 64)

    with wire.listen(address) as listener:
        thread = threading.Thread(target=end, args=(listener,))
        thread.start()
        with pytest.raises(CommunicationError, match="cannot be reached"):
            ControlClient(address, lambda: b"s" * 32).ask("count")
        thread.join()


def test_a_server_without_the_secret_is_not_believed(tmp_path: Path) -> None:
    address = Address(str(tmp_path / "fake"))

    def pretend(listener: socket.socket) -> None:
        link, _ = listener.accept()
        with link:
            link.sendall(bytes(NONCE_BYTES))
            link.recv(4096)
            link.sendall(HEAD.pack(10, bytes(32)) + b'["answer",1]')
            is_closed(link)

    with wire.listen(address) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        link = WireLink(address, b"s" * 32, 30)
        with pytest.raises(RefusedError, match="wrong seal"):
            link.ask("count", timeout_s=30)
        link.close()
        thread.join()


class Forger(WireLink):
    """A client with the secret that sends what it likes."""

    def send(self, text: bytes, length: int | None = None) -> None:
        message = self._requests.close(text)
        self._socket.sendall(message if length is None else HEAD.pack(length, bytes(32)))

    def hear(self) -> list[Any]:
        length, mark = wire.read_length(self._receive(HEAD.size))
        return wire.from_text(self._replies.check(mark, self._receive(length)))


@pytest.fixture
def forger(server: tuple[Address, Path]) -> Iterator[Forger]:
    made = Forger(server[0], wire.read_secret(server[1]), 30)
    yield made
    made.close()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 50 + b"1" + b"}" * 50,
        b'["set",' + b"[" * 8,
        b"no json",
        b'{"set": 1}',
        b"\xff\xfe",
        b"9" * 9999,
    ],
)
def test_deep_and_broken_messages_are_refused(forger: Forger, text: bytes) -> None:
    forger.send(text)
    assert forger.hear()[0] == "refused"
    assert is_closed(forger._socket)


def test_a_long_message_is_refused_before_it_is_read(forger: Forger) -> None:
    forger.send(b"", length=LONGEST_MESSAGE + 1)
    assert forger.hear()[0] == "refused"


def test_a_message_that_was_changed_or_sent_twice_is_refused(server: tuple[Address, Path]) -> None:
    for again in (lambda sealed: sealed, lambda sealed: sealed[:-1] + b"]"):
        forger = Forger(server[0], wire.read_secret(server[1]), 30)
        sealed = forger._requests.close(b'["count"]')
        forger._socket.sendall(sealed)
        assert forger.hear() == ["answer", 0]
        forger._socket.sendall(again(sealed))
        assert forger.hear() == ["refused", "a control message has a wrong seal"]
        forger.close()


@pytest.mark.parametrize(
    "request_",
    [
        ["nothing"],
        ["_join"],
        [],
        [1],
        ["set"],
        ["set", 1, ""],
        ["set", "a", "?"],
        ["get", "a"],
        ["add", "a", "b"],
        ["meet"],
    ],
)
def test_requests_that_are_none_are_refused_and_the_server_goes_on(client: Connect, request_: list[Any]) -> None:
    asking = client()
    with pytest.raises((RefusedError, TimeoutError)):
        asking.ask(*request_) if request_ else asking.ask("")
    assert client().ask("count") == 0


def test_a_planted_pickle_is_bytes_and_stays_bytes(client: Connect, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    store, planted = ControlStore(client()), pickle.dumps(Bomb())
    for key in ("torch.rendezvous.paceline-1", "agents/1/torchelastic/role_info/0", "ranks/1/default_pg/0"):
        store.set(key, planted)
        assert store.get(key) == planted
    assert not (tmp_path / "ran").exists()


def test_the_secret_is_its_owners_alone(server: tuple[Address, Path], tmp_path: Path) -> None:
    assert stat.S_IMODE(server[1].stat().st_mode) == 0o600
    assert len(wire.read_secret(server[1])) == 64
    server[1].chmod(0o640)
    with pytest.raises(CommunicationError, match="mode 0640: others can read it"):
        wire.read_secret(server[1])
    (tmp_path / "short").write_text("secret")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(CommunicationError, match="has 6 characters"):
        wire.read_secret(tmp_path / "short")
    assert wire.secret_of({"PACELINE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    with pytest.raises(CommunicationError, match="no secret"):
        wire.secret_of({})


def test_a_path_too_long_for_a_socket_means_the_loopback(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with private_server(folder) as (address, secret):
        made = ControlClient(address, lambda: wire.read_secret(secret))
        assert (address.host, made.ask("count")) == ("127.0.0.1", 0)
        made.close()


def test_what_is_no_address_of_ours_is_left_to_torch() -> None:
    for text in ("unix:/tmp/control", "tcp:10.0.0.1:29400", "tcp:::1:80"):
        assert str(Address.parse(text)) == text
    for text in ("127.0.0.1", "localhost", "::1", "unix:relative", "tcp:host", "tcp::80", "http://host:80", ""):
        assert Address.parse(text) is None


# Which hosts take part.


def test_a_round_begins_when_all_are_there_or_the_last_call_is_over() -> None:
    hosts = Hosts(least=1, most=2, last_call_s=3.0)
    hosts.join("a", 0.0)
    hosts.update(0.0)
    hosts.hear("a", 2.9)
    hosts.update(2.9)
    assert hosts.round == 0
    hosts.update(3.0)
    assert (hosts.round, hosts.members) == (1, ("a",))
    hosts.join("b", 4.0)
    assert hosts.newcomers == ["b"]
    hosts.hear("a", 4.0)
    hosts.update(4.0)
    assert hosts.round == 1  # until a has left its round
    hosts.join("a", 5.0)
    hosts.update(5.0)
    assert (hosts.round, hosts.members, hosts.newcomers) == (2, ("a", "b"), [])


def test_a_host_that_is_not_heard_of_is_gone() -> None:
    hosts = Hosts(least=1, most=2, last_call_s=0.0, silence_s=3.0)
    for name in "ab":
        hosts.join(name, 0.0)
    hosts.update(0.0)
    hosts.join("a", 3.0)
    hosts.update(3.0)
    assert (hosts.round, hosts.gone) == (1, [])
    hosts.hear("a", 4.0)
    hosts.forgive(1.0)  # nobody listened
    hosts.update(4.0)
    assert hosts.present == {"a", "b"}
    hosts.update(5.0)
    assert (hosts.round, hosts.members, hosts.present) == (2, ("a",), {"a"})


def test_more_hosts_than_there_is_room_for_wait() -> None:
    hosts = Hosts(least=2, most=2)
    for name in "abc":
        hosts.join(name, 0.0)
    hosts.update(0.0)
    assert (hosts.members, hosts.newcomers, hosts.gone) == (("a", "b"), [], [])
    hosts.leave("b", "its launcher has ended")
    assert (hosts.newcomers, hosts.gone) == (["c"], ["b (its launcher has ended)"])
