"""Bytes by key, with the semantics of torch's stores. Waiting for a key costs nothing until it comes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

from paceline.comm.control.wire import LONGEST_MESSAGE

_MOST_BYTES = 2**28  # of all values


class Values:
    """What the processes of a job have sent one another. An operation returns a coroutine where it has to wait."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        self._num_bytes = 0

    def operations(self) -> dict[str, Callable[..., Any]]:
        """Returns what clients may ask for, by name."""
        return {
            "set": self._set,
            "get": self._get,
            "add": self._add,
            "compare_set": self._compare_set,
            "append": self._append,
            "meet": self._meet,
            "check": lambda keys: all(check_name(key) in self._values for key in keys),
            "delete": self._delete,
            "count": lambda: len(self._values),
        }

    def _set(self, key: str, value: str) -> None:
        self._put(key, _bytes(value))

    def _get(self, keys: list[str], timeout_s: float) -> Any:
        """Returns the values of keys, as soon as there are any."""
        return self._when_there(keys, timeout_s, lambda: [_text(self._values[key]) for key in keys])

    def _wait(self, keys: list[str], timeout_s: float) -> Any:
        """Returns when all keys are there. Raises TimeoutError."""
        return self._when_there(keys, timeout_s, lambda: None)

    def _add(self, key: str, amount: int) -> int:
        """Adds to a number, which is 0 at first; returns the sum."""
        total = int(self._values.get(check_name(key), b"0")) + int(amount)
        self._put(key, str(total).encode())
        return total

    def _meet(self, key: str, member: int, size: int, timeout_s: float) -> Any:
        """Returns when ``size`` members have called it, as often as they meet; notes which have come."""
        self._put(f"{check_name(key)} {int(member)}", b"")
        count, size = self._add(key, 1), max(1, int(size))
        number = (count - 1) // size
        if count == (number + 1) * size:
            self._put(f"{key} all {number}", b"")
        return self._wait([f"{key} all {number}"], timeout_s)

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a value if it is still the expected one, or if none is and none was expected; returns what is there."""
        wanted, found = _bytes(expected), self._values.get(check_name(key))
        if found == wanted or (found is None and not wanted):
            self._put(key, _bytes(desired))
        return _text(self._values.get(key, wanted))

    def _append(self, key: str, value: str) -> None:
        self._put(key, self._values.get(check_name(key), b"") + _bytes(value))

    def _delete(self, key: str) -> bool:
        gone = self._values.pop(check_name(key), None)
        self._num_bytes -= len(gone or b"")
        return gone is not None

    def _put(self, key: str, value: bytes) -> None:
        more = len(value) - len(self._values.get(check_name(key), b""))
        if self._num_bytes + more > _MOST_BYTES or len(value) > LONGEST_MESSAGE // 2:
            raise ValueError("the control server is full")
        self._num_bytes += more
        self._values[key] = value
        future = self._awaited.pop(key, None)
        if future is not None and not future.done():
            future.set_result(None)

    def _when_there(self, keys: list[str], timeout_s: float, act: Callable[[], Any]) -> Any:
        """Acts now if all keys are there; else returns a coroutine that does when they are."""
        missing = [key for key in map(check_name, keys) if key not in self._values]
        return self._await(missing, float(timeout_s), act) if missing else act()

    async def _await(self, keys: list[str], timeout_s: float, act: Callable[[], Any]) -> Any:
        async with asyncio.timeout(timeout_s):
            for key in keys:
                while key not in self._values:
                    future = self._awaited.setdefault(key, asyncio.get_running_loop().create_future())
                    await asyncio.shield(future)
        return act()


def check_name(text: object) -> str:
    """Returns a text that is one. Raises TypeError."""
    if not isinstance(text, str):
        raise TypeError("a name is a text")
    return text


def _bytes(text: object) -> bytes:
    return base64.b64decode(check_name(text), validate=True)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
