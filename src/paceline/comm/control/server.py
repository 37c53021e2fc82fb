"""The store of a run, in a thread of the launcher: keys and values, and which hosts take part.

    with ControlServer(listener, secret, Hosts(most=2)):
        ...

Every connection proves the job's secret before anything of it is parsed (``wire.py``); connections that have not
done so are few and end soon. A request is a list: an operation and its details. Nothing that is sent here is ever run
or unpickled: keys are texts, values are bytes in base64.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

from paceline.comm.control.hosts import Hosts
from paceline.comm.control.wire import (
    HEAD,
    LONGEST_MESSAGE,
    NONCE_BYTES,
    PROOF_BYTES,
    Address,
    RefusedError,
    Seal,
    Secret,
    derive,
    from_text,
    listen_privately,
    read_length,
    read_secret,
    to_text,
    write_secret,
)
from paceline.errors import CommunicationError

_HANDSHAKE_S = 10.0
_MOST_STRANGERS = 256  # connections that have not proven the secret yet
_MOST_BYTES = 2**28  # of all values
_LOOK_S = 0.02
_PATIENCE_S = 2.0  # for other hosts to leave, once this one is done

Answer = Awaitable[Any]


class ControlServer:
    """Serves the processes of one job from a thread, until it is closed."""

    def __init__(self, listener: socket.socket, secret: Secret, hosts: Hosts | None = None, own: str = "") -> None:
        """``own`` is the host that this server is on: it waits for the others a little when it is closed."""
        self._listener = listener
        self._secret = secret
        self._hosts = hosts or Hosts()
        self._own = own
        self._store = _Values()
        self._strangers = 0
        self._links: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = asyncio.Event()
        self._is_serving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="control", daemon=True)
        self._operations: dict[str, Callable[..., Answer]] = {
            "set": self._store.set,
            "get": self._store.get,
            "add": self._store.add,
            "compare_set": self._store.compare_set,
            "append": self._store.append,
            "wait": self._store.wait,
            "check": self._store.check,
            "delete": self._store.delete,
            "count": self._store.count,
            "join": self._join,
            "attend": self._attend,
            "leave": self._leave,
            "close": self._close_rounds,
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and all connections, once other hosts have left or a moment is over. Safe to call twice."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._hosts.present - {self._own} and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(_LOOK_S)
        if self._thread.is_alive():
            self._is_serving.wait()
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join()
        self._listener.close()

    async def _serve(self) -> None:
        start = asyncio.start_unix_server if self._listener.family == socket.AF_UNIX else asyncio.start_server
        self._loop = asyncio.get_running_loop()
        self._is_serving.set()
        server = await start(self._welcome, sock=self._listener, limit=2**16)
        await self._done.wait()
        server.close()
        for link in self._links:
            link.transport.abort()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends, or breaks the rules."""
        host: list[str] = []
        self._links.add(writer)
        try:
            requests, replies = await self._prove(reader, writer)
            while True:
                try:
                    length, mark = read_length(await reader.readexactly(HEAD.size))
                    request = from_text(requests.check(mark, await reader.readexactly(length)))
                except RefusedError as error:
                    writer.write(replies.close(to_text(["refused", str(error)])))
                    raise
                if request[:1] == ["attend"]:
                    host = request[1:2]
                writer.write(replies.close(to_text(await self._answer(request))))
                await writer.drain()
        except (OSError, EOFError, RefusedError, asyncio.CancelledError):
            pass  # the last: this server is closed
        finally:
            if host:
                self._hosts.leave(host[0])  # the connection of a launcher ends with it
            self._links.discard(writer)
            writer.close()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Seal, Seal]:
        """Returns the seals of a connection whose client has the secret."""
        if self._strangers >= _MOST_STRANGERS:
            raise RefusedError("too many connections that prove nothing")
        self._strangers += 1
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                nonce = secrets.token_bytes(NONCE_BYTES)
                writer.write(nonce)
                told = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
            proof, requests, replies = derive(self._secret(), nonce, told[:NONCE_BYTES])
            if not hmac.compare_digest(proof, told[NONCE_BYTES:]):
                raise RefusedError("a connection without the secret")
            return requests, replies
        except CommunicationError as error:  # also where the secret itself cannot be read
            raise RefusedError(str(error)) from error
        finally:
            self._strangers -= 1

    async def _answer(self, request: list[Any]) -> list[Any]:
        match request:
            case [str() as name, *details] if name in self._operations:
                try:
                    return ["told", await self._operations[name](*details)]
                except TimeoutError:
                    return ["timeout"]
                except (TypeError, ValueError, KeyError, AttributeError, CommunicationError) as error:
                    return ["refused", f"{name}: {error}"]
        return ["refused", "no such operation"]

    async def _join(self, host: str, timeout_s: float) -> list[Any]:
        """Waits until a round has begun that this host is in; returns the round, its place in it, and the hosts."""
        before, deadline = self._hosts.round, time.monotonic() + float(timeout_s)
        self._hosts.join(_name(host), time.monotonic())
        while True:
            if self._hosts.is_closed:
                return []
            self._hosts.update(now := time.monotonic())
            members = self._hosts.members
            if self._hosts.round > before and host in members:
                return [self._hosts.round, members.index(host), len(members)]
            if now > deadline:
                raise TimeoutError
            await asyncio.sleep(_LOOK_S)

    async def _attend(self, host: str) -> list[int]:
        """Notes that a launcher lives; returns the round, and how many hosts wait to be taken in after it."""
        self._hosts.hear(_name(host), time.monotonic())
        return [self._hosts.round, self._hosts.num_waiting]

    async def _leave(self, host: str) -> None:
        self._hosts.leave(_name(host))

    async def _close_rounds(self) -> None:
        self._hosts.is_closed = True


@contextlib.contextmanager
def private_server(folder: Path) -> Iterator[tuple[Address, Path]]:
    """Serves the processes of this host from ``folder``, of mode 0700; yields the address and the secret's file."""
    secret = folder / "secret"
    write_secret(secret)
    listener, address = listen_privately(folder)
    with ControlServer(listener, lambda: read_secret(secret)):
        yield address, secret


class _Values:
    """Bytes by key, with the semantics of torch's stores. Waiting for a key costs nothing until it comes."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        self._num_bytes = 0

    async def set(self, key: str, value: str) -> None:
        self._put(key, _bytes(value))

    async def get(self, keys: list[str], timeout_s: float) -> list[str]:
        """Returns the values of keys, as soon as there are any."""
        await self.wait(keys, timeout_s)
        return [base64.b64encode(self._values[key]).decode() for key in keys]

    async def add(self, key: str, amount: int) -> int:
        """Adds to a number, which is 0 at first; returns the sum."""
        total = int(self._values.get(_name(key), b"0")) + int(amount)
        self._put(key, str(total).encode())
        return total

    async def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a value if it is still the expected one, or if none is and none was expected; returns what is there."""
        wanted, found = _bytes(expected), self._values.get(_name(key))
        if found == wanted or (found is None and not wanted):
            self._put(key, _bytes(desired))
        return base64.b64encode(self._values.get(key, wanted)).decode()

    async def append(self, key: str, value: str) -> None:
        self._put(key, self._values.get(_name(key), b"") + _bytes(value))

    async def wait(self, keys: list[str], timeout_s: float) -> None:
        """Returns when all keys are there. Raises TimeoutError."""
        async with asyncio.timeout(float(timeout_s)):
            for key in map(_name, keys):
                while key not in self._values:
                    future = self._awaited.setdefault(key, asyncio.get_running_loop().create_future())
                    await asyncio.shield(future)

    async def check(self, keys: list[str]) -> bool:
        return all(_name(key) in self._values for key in keys)

    async def delete(self, key: str) -> bool:
        gone = self._values.pop(_name(key), None)
        self._num_bytes -= len(gone or b"")
        return gone is not None

    async def count(self) -> int:
        return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        more = len(value) - len(self._values.get(_name(key), b""))
        if self._num_bytes + more > _MOST_BYTES or len(value) > LONGEST_MESSAGE:
            raise ValueError("the control server is full")
        self._num_bytes += more
        self._values[key] = value
        future = self._awaited.pop(key, None)
        if future is not None and not future.done():
            future.set_result(None)


def _name(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError("a name is a text")
    return text


def _bytes(text: object) -> bytes:
    return base64.b64decode(_name(text), validate=True)
