"""The store of a run, in a thread of the launcher: keys and values, and which hosts take part.

Every connection proves the job's secret before anything of it is parsed (``wire.py``); connections that have not
done so are few and end soon. A request is a list: an operation and its details. Nothing that is sent here is ever run
or unpickled: keys are texts, values are bytes in base64. Waiting for a key costs nothing until it comes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from paceline.comm.control import wire
from paceline.comm.control.wire import encode, from_text
from paceline.errors import CommunicationError

_HANDSHAKE_S = 10.0
_ACCEPTS = 10  # turns of the loop from a connection to its link: it takes four
_MOST_STRANGERS, _OF_HOST = 256, 16  # connections that have not proven the secret yet; of each host, with its ranks
_LOOK_S = 0.02
_SLOW_S = 1.0  # a server that looked so late was not running, and has heard nobody
_PATIENCE_S = 2.0  # for other hosts to leave, once this one is done
_Seals = tuple[wire.Seal, wire.Seal]


class ControlServer:
    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: wire.Secret,
        hosts: Hosts | None = None,
        own: str = "",
        operations: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """``own`` is the host that this server is on: it waits for the others a little when it is closed.

        It serves at its ``listeners``, which are of one kind, and closes them.
        """
        self.secret = secret
        self.hosts = hosts or Hosts()
        self._num_strangers = 0
        self._links: set[asyncio.StreamWriter] = set()
        self._listeners = listeners
        self._own = own
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = asyncio.Event()
        self._turn = asyncio.Event()  # set when a round begins, and made anew
        self._attending: dict[str, asyncio.StreamWriter] = {}  # the newest connection of each launcher
        self._is_serving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="control", daemon=True)
        values = Values().operations()
        self._has: Callable[[list[str]], bool] = values["check"]
        self._operations: dict[str, Callable[..., Any]]
        self._operations = {**values, "join": self._join, "attend": self._attend, "close": self._close}
        self._operations |= operations or {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread and all connections, once other hosts have left or a moment is over. Safe to call twice."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and self._thread.is_alive():
            if self.hosts.most == 1 or not self.hosts.present - {self._own}:
                break
            time.sleep(_LOOK_S)
        if self._thread.is_alive():
            self._is_serving.wait()
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join()
        for listener in self._listeners:
            listener.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_serving.set()
        is_path = self._listeners[0].family == socket.AF_UNIX
        start: Any = asyncio.start_unix_server if is_path else asyncio.start_server
        servers = [await start(self._attend_to, sock=each, limit=wire.LONGEST_MESSAGE) for each in self._listeners]
        looks = asyncio.create_task(self._look_often()) if self.hosts.most > 1 else None
        await self._done.wait()
        if looks is not None:
            looks.cancel()
        for server in servers:
            server.close()
        for _ in range(_ACCEPTS):  # a connection that was accepted just now becomes a link, or nobody would close it
            await asyncio.sleep(0)
        for writer in list(self._links):
            writer.transport.abort()  # at once, also in the middle of a request

    async def _attend_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(writer)
        host: list[str] = []
        try:
            seals = await self._greet(reader, writer)
            while seals is not None:
                try:
                    length, mark = wire.read_length(await reader.readexactly(wire.HEAD.size))
                    request = from_text(seals[0].check(mark, await reader.readexactly(length)))
                    if request[:1] == ["attend"]:
                        host = request[1:2]
                        self._attending[str(host[0])] = writer
                    writer.write(seals[1].close(wire.to_text(await self._answer(request))))
                except wire.RefusedError as error:
                    writer.write(seals[1].close(wire.to_text(["refused", str(error)])))
                    break
        except (OSError, EOFError, asyncio.CancelledError):  # the client is gone, or the server is closed
            writer.transport.abort()
        finally:
            self._links.discard(writer)
            writer.close()
            if host and self._attending.get(host[0]) is writer:  # it ends with its launcher, or that has a new one
                del self._attending[host[0]]
                self.hosts.leave(host[0], "its launcher has ended")
                self._look()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Seals | None:
        """Returns the seals of requests and replies, once the client has proven the secret; None where it has not."""
        self._num_strangers += 1
        try:
            if self._num_strangers <= max(_MOST_STRANGERS, _OF_HOST * self.hosts.most):
                nonce = secrets.token_bytes(wire.NONCE_BYTES)
                writer.write(nonce)
                async with asyncio.timeout(_HANDSHAKE_S):
                    theirs = await reader.readexactly(wire.NONCE_BYTES)
                    claimed = await reader.readexactly(wire.PROOF_BYTES)
                    with contextlib.suppress(CommunicationError):  # there is no secret
                        proof, requests, replies = wire.derive(self.secret(), nonce, theirs)
                        if hmac.compare_digest(proof, claimed):
                            return requests, replies
                    writer.write(wire.WRONG_PROOF)
                    writer.write_eof()
                    # To close a connection that has unread bytes may take the answer away from who sent them.
                    while await reader.read(2**16):
                        pass
        finally:
            self._num_strangers -= 1
        return None

    async def _answer(self, request: list[Any]) -> list[Any]:
        try:
            match request:
                case [str() as name, *details] if name in self._operations:
                    answer = self._operations[name](*details)
                    return ["answer", await answer if asyncio.iscoroutine(answer) else answer]
            raise ValueError("no such operation")
        except TimeoutError:
            return ["timeout"]
        except Exception as error:
            return ["refused", f"{type(error).__name__}: {error}"]

    async def _join(self, host: str, timeout_s: float, last: int) -> list[Any]:
        """Waits until a round after its ``last`` has begun that this host is in; returns it, its place, and the hosts.

        Safe to call again: a launcher does, since a host that was missed for a while waits no longer.
        """

        def found() -> list[Any]:
            members = self.hosts.members
            is_in = self.hosts.round > int(last) and host in members
            return [self.hosts.round, members.index(host), len(members)] if is_in else []

        if not found():
            self.hosts.join(check_name(host), time.monotonic())
            self._look()
        async with asyncio.timeout(float(timeout_s)):
            while not (self.hosts.is_closed or found()):
                await self._turn.wait()
        return [] if self.hosts.is_closed else found()

    def _attend(self, host: str, ended: str) -> Attendance:
        """Notes that a launcher lives; returns what it must know. The key ``ended`` is set once its round is over."""
        self.hosts.hear(check_name(host), time.monotonic())
        news = self.hosts.newcomers, self.hosts.gone
        return Attendance(self.hosts.round, *news, self._has([ended]), self.hosts.is_closed)

    def _close(self) -> None:
        self.hosts.is_closed = True
        self._take_turn()

    async def _look_often(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            late_s, before = time.monotonic() - before, time.monotonic()
            if late_s > _SLOW_S:
                self.hosts.forgive(late_s)
            self._look()

    def _look(self) -> None:
        if self.hosts.update(time.monotonic()):
            self._take_turn()

    def _take_turn(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()


class Attendance(NamedTuple):
    """What a launcher is told when it says that it lives: hosts that wait for the next round, and that have left."""

    round: int = 0
    newcomers: Sequence[str] = ()
    gone: Sequence[str] = ()  # each with why
    is_told: bool = False  # how the round ended
    is_closed: bool = False  # the run has ended


@contextlib.contextmanager
def private_server(folder: Path) -> Iterator[tuple[wire.Address, Path]]:
    """Serves the processes of this host from ``folder``, of mode 0700; on the loopback where its path is too long."""
    secret = folder / "secret"
    wire.write_secret(secret)
    address = wire.Address(str(folder / "control"))
    if len(os.fsencode(address.host)) > wire.LONGEST_UNIX_PATH:
        address = wire.Address("127.0.0.1")
    listener = wire.listen(address)
    if not address.is_path:
        address = wire.Address(address.host, listener.getsockname()[1])
    with ControlServer([listener], lambda: wire.read_secret(secret)):
        yield address, secret


_MOST_BYTES = 2**28  # of all values


class Values:
    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        self._num_bytes = 0

    def operations(self) -> dict[str, Callable[..., Any]]:
        return {
            "set": lambda key, value: self._put(key, _bytes(value)),
            "get": self._get,
            "add": self._add,
            "compare_set": self._compare_set,
            "append": lambda key, value: self._put(key, self._values.get(check_name(key), b"") + _bytes(value)),
            "meet": self._meet,
            "check": lambda keys: all(check_name(key) in self._values for key in keys),
            "delete": self._delete,
            "count": lambda: len(self._values),
        }

    async def _get(self, keys: list[str], timeout_s: float) -> list[str]:
        async with asyncio.timeout(float(timeout_s)):
            for key in map(check_name, keys):
                while key not in self._values:
                    future = self._awaited.setdefault(key, asyncio.get_running_loop().create_future())
                    await asyncio.shield(future)
        return [encode(self._values[key]) for key in keys]

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(check_name(key), b"0")) + int(amount)
        self._put(key, str(total).encode())
        return total

    async def _meet(self, key: str, member: int, size: int, timeout_s: float) -> None:
        """Returns when ``size`` members have called it, as often as they meet; notes which have come."""
        self._put(f"{check_name(key)} {int(member)}", b"")
        count, size = self._add(key, 1), max(1, int(size))
        number = (count - 1) // size
        if count == (number + 1) * size:
            self._put(f"{key} all {number}", b"")
        await self._get([f"{key} all {number}"], timeout_s)

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a value if it is still the expected one, or if none is and none was expected; returns what is there."""
        wanted, found = _bytes(expected), self._values.get(check_name(key))
        if found == wanted or (found is None and not wanted):
            self._put(key, _bytes(desired))
        return encode(self._values.get(key, wanted))

    def _delete(self, key: str) -> bool:
        gone = self._values.pop(check_name(key), None)
        self._num_bytes -= len(gone or b"")
        return gone is not None

    def _put(self, key: str, value: bytes) -> None:
        more = len(value) - len(self._values.get(check_name(key), b""))
        if self._num_bytes + more > _MOST_BYTES or len(value) > wire.LONGEST_MESSAGE // 2:
            raise ValueError("the control server is full")
        self._num_bytes += more
        self._values[key] = value
        future = self._awaited.pop(key, None)
        if future is not None and not future.done():
            future.set_result(None)


def check_name(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError("a name is a text")
    return text


def _bytes(text: object) -> bytes:
    return base64.b64decode(check_name(text), validate=True)


@dataclass(slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, by names that their launchers chose, in the order in which they came first.

    A round begins when nobody is left of the one before, at least ``least`` hosts wait, and either all ``most`` are
    there or ``last_call_s`` have passed since there were enough. A host that joins again has left its round. One that
    has not been heard of for ``silence_s`` is gone.
    """

    least: int = 1
    most: int = 1
    last_call_s: float = 3.0
    silence_s: float = 5.0
    round: int = 0
    members: tuple[str, ...] = ()  # of the round, as it began
    is_closed: bool = False
    _staying: set[str] = field(default_factory=set)  # of the members
    _waiting: set[str] = field(default_factory=set)
    _heard: dict[str, float] = field(default_factory=dict)
    _why_gone: dict[str, str] = field(default_factory=dict)
    _enough_since: float | None = None

    def join(self, host: str, now: float) -> None:
        """Has a host wait for the next round; it leaves the one that it is in."""
        self._staying.discard(host)
        self._waiting.add(host)
        self.hear(host, now)

    def hear(self, host: str, now: float) -> None:
        self._heard[host] = now

    def leave(self, host: str, why: str) -> None:
        self._staying.discard(host)
        self._waiting.discard(host)
        self._heard.pop(host, None)
        self._why_gone[host] = why

    def forgive(self, late_s: float) -> None:
        """Takes it that hosts lived for so long, in which nobody listened."""
        self._heard = {host: heard + late_s for host, heard in self._heard.items()}

    def update(self, now: float) -> bool:
        """Misses hosts that are silent, and begins a round where it is time to; says whether it has."""
        for host in [host for host, heard in self._heard.items() if now - heard > self.silence_s]:
            self.leave(host, f"nothing was heard of it for {self.silence_s:g} s")
        if self._staying or len(self._waiting) < self.least:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        if len(self._waiting) >= self.most or now - self._enough_since >= self.last_call_s:
            self.members = tuple(host for host in self._heard if host in self._waiting)[: self.most]
            self._waiting.difference_update(self.members)
            self._staying = set(self.members)
            self.round += 1
            self._enough_since = None
            self._why_gone = {}
            return True
        return False

    @property
    def newcomers(self) -> list[str]:
        """The hosts that wait, and that the next round has room for, by their plain names."""
        return [_plain(host) for host in sorted(self._waiting)[: self.most - len(self._staying)]]

    @property
    def gone(self) -> list[str]:
        """The hosts of the round that have left or are not heard of any more, with the reason."""
        left = [host for host in self._why_gone if host not in self._heard and host in self.members]
        return [f"{_plain(host)} ({self._why_gone[host]})" for host in left]

    @property
    def present(self) -> set[str]:
        return set(self._heard)


def _plain(host: str) -> str:
    return host.partition("/")[0]
