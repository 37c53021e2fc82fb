"""The control store as torch's process groups use it, and as launchers and watches do: they send short texts."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from paceline.comm.control import wire
from paceline.errors import CommunicationError

_REPLY_S = 30.0  # for what the server answers at once
_RETRY_S = 0.05
_LOOK_S = 1.0  # of waiting for a key that may not come any more
_FRESH_S = 0.1
_SECRET_S = 5.0  # a launcher may just be making the job's secret
_CONNECT_S = 4.0  # for one attempt to reach a server that may not be there yet
_SILENT_S = 15.0  # a launcher on a busy host may greet late
_C10D: Any = dist  # whose stores torch does not declare


class ControlClient:
    """Requests of one process to the control server of its job, over connections that are idle or new. Thread-safe."""

    def __init__(self, address: wire.Address, secret: wire.Secret) -> None:
        self.address = address
        self._secret = secret
        self._idle: list[wire.WireLink] = []
        self._owner = os.getpid()
        self.why_unreached = ""  # the last time that somebody waited for the server

    def ask(self, operation: str, *details: Any, within_s: float = 0.0) -> Any:
        """Returns the server's answer, within so long and a little more. Raises TimeoutError or CommunicationError."""
        link = self._take()
        try:
            answer = link.ask(operation, *details, timeout_s=within_s + _REPLY_S)
        except wire.NothingYetError:
            self._idle.append(link)
            raise
        except BaseException as error:
            link.close()
            self.close()  # the idle ones have waited as long
            if isinstance(error, OSError) and (error.errno or not isinstance(error, TimeoutError)):
                raise self._unreachable(error) from error
            raise
        self._idle.append(link)
        return answer

    def wait_for_server(self, within_s: float) -> None:
        """Returns when the server is there and takes this job's secret. Raises CommunicationError when it does not."""
        start, attempt_s = time.monotonic(), _CONNECT_S
        while True:
            try:
                self._idle.append(self._connect(min(within_s, attempt_s)))
                self.ask("count")
                self.why_unreached = ""
                return
            except (CommunicationError, TimeoutError) as error:
                patience_s = within_s
                if isinstance(error, wire.SilentServerError):
                    patience_s, attempt_s = _SILENT_S, 2 * attempt_s  # more attempts are more work for a busy server
                patience_s = _SECRET_S if isinstance(error, wire.RefusedError) else patience_s
                if time.monotonic() - start > min(within_s, patience_s):
                    raise
            time.sleep(_RETRY_S)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> wire.WireLink:
        if self._owner != os.getpid():  # forked: its connections are its parent's
            self._idle, self._owner = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect(_REPLY_S)

    def _connect(self, within_s: float) -> wire.WireLink:
        try:
            return wire.WireLink(self.address, self._secret(), within_s)
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: OSError) -> CommunicationError:
        self.why_unreached = why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return CommunicationError(f"the control server at {self.address} cannot be reached: {why}")


class ControlStore(dist.Store):  # type: ignore[name-defined, misc]
    """A store for process groups, whose keys begin with ``prefix``. Keep it: torch's groups hold no reference to it.

    Who waits for a key calls ``look`` every now and then, which raises where it will not come.
    """

    def __init__(self, client: ControlClient, prefix: str = "", look: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._client, self._prefix, self._look = client, prefix, look
        self._fetched: tuple[float, list[str], list[bytes]] = (0.0, [], [])  # by the last wait

    def close(self) -> None:
        self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._client.ask("set", self._prefix + key, wire.encode(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        (since, known, values), self._fetched = self._fetched, (0.0, [], [])
        if known == list(keys) and time.monotonic() - since < _FRESH_S:
            return values
        return self._get(list(keys), self.timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._client.ask("add", self._prefix + key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._client.ask("append", self._prefix + key, wire.encode(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return base64.b64decode(
            self._client.ask("compare_set", self._prefix + key, wire.encode(expected), wire.encode(desired))
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits, and fetches the values on the way: torch's groups wait for a key and get it at once."""
        values = self._get(list(keys), timeout or self.timeout)
        self._fetched = (time.monotonic(), list(keys), values)

    def meet(self, key: str, member: int, size: int, timeout: timedelta) -> None:
        """Returns when ``size`` members have called it; one message. ``<key> <member>`` says who has."""
        self._ask_in_time("meet", self._prefix + key, member, size, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._client.ask("check", [self._prefix + key for key in keys]))

    def delete_key(self, key: str) -> bool:
        return bool(self._client.ask("delete", self._prefix + key))

    def num_keys(self) -> int:
        return int(self._client.ask("count"))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> ControlStore:
        return self  # it opens connections as it needs them

    # The names by which torch's own code calls two of them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _get(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        found = self._ask_in_time("get", [self._prefix + key for key in keys], timeout=timeout)
        return [base64.b64decode(each) for each in found]

    def _ask_in_time(self, operation: str, *details: Any, timeout: timedelta) -> Any:
        within_s = seconds = timeout.total_seconds()
        deadline, look = time.monotonic() + seconds, self._look if operation == "get" else None  # others are counted
        while True:
            if look is not None:
                look()
                within_s = min(_LOOK_S, max(0.0, deadline - time.monotonic()))
            try:
                return self._client.ask(operation, *details, within_s, within_s=within_s)
            except TimeoutError:
                if look is None or time.monotonic() >= deadline:
                    raise _C10D.DistStoreError(f"wait timeout after {seconds:g} s: {operation} {details[0]}") from None


TIMEOUT_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02  # between two questions for the same text


class SideChannel:
    """Short texts that hosts leave for one another, under names, beside the collectives: also while those are stuck.

    A thread asks, since a connection to a host that cannot be reached any more may block for minutes: an operation
    raises CommunicationError after ``patience_s``, and when the store is gone. Nobody waits once there is a text
    ``farewell``.
    """

    def __init__(self, store: Any, name: str, *, patience_s: float = 1.5, farewell: str = "") -> None:
        """``store`` is a connection that nobody else uses; ``name`` keeps runs apart."""
        self._store = store
        self._prefix = f"paceline-health/{name}/"
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._patience_s, self._farewell = patience_s, farewell
        self._questions: SimpleQueue[tuple[Callable[[], str], Future[str]] | None] = SimpleQueue()
        self._answer: Future[str] = Future()
        self._answer.set_result("")
        self._is_closed = self._is_gone = False
        self._lock = threading.Lock()  # the watch asks, and the rank itself when it leaves
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. One that is inside torch when the interpreter ends would end the process with SIGABRT."""
        self._is_closed = True
        self._questions.put(None)
        self._thread.join(timeout=self._patience_s)

    def publish(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(self._prefix + key, text) or "")

    def read(self, key: str) -> str:
        """Returns what was left there last; empty if nothing was. Does not wait."""
        name = self._prefix + key
        return self._ask(lambda: str(self._store.get(name).decode()) if self._store.check([name]) else "")

    def wait_for(self, key: str) -> str:
        """Returns what was left there, as soon as something is. Raises CommunicationError after ten seconds."""
        deadline, pause_s = time.monotonic() + TIMEOUT_S, _SHORTEST_PAUSE_S  # asks again and again: so a thread can end
        while not (text := self.read(key)):
            if time.monotonic() > deadline or (self._farewell and self.read(self._farewell)):
                raise CommunicationError(f"nobody left {key}")
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
        return text

    def _ask(self, question: Callable[[], str]) -> str:
        with self._lock:
            if self._is_closed or self._is_gone:
                raise CommunicationError("the store is gone")
            try:
                self._answer.exception(timeout=0.0)  # an earlier question is answered
                self._answer = Future()
                self._questions.put((question, self._answer))
                return self._answer.result(timeout=self._patience_s)
            except TimeoutError:
                raise CommunicationError("the store does not answer") from None

    def _serve(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            try:
                answer.set_result(question())
            except CommunicationError as error:
                answer.set_exception(error)
            except (RuntimeError, TimeoutError) as error:
                # Torch never connects again; it would write a line of its own to standard error with every question.
                self._is_gone = isinstance(error, dist.DistNetworkError)
                gone = CommunicationError(f"the store is gone: {str(error).partition(chr(10))[0]}")
                gone.__cause__ = error
                answer.set_exception(gone)
