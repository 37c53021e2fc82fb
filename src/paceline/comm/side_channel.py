"""Short texts between hosts, beside the collectives: it works while those are stuck.

It is a connection of its own to the store at which the ranks met (``MASTER_ADDR:MASTER_PORT``): the store serves it
whatever its owner's Python does, and one that another thread waits on would make this one wait too.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from paceline.errors import CommunicationError

_C10D: Any = dist  # its stores are not annotated
_TIMEOUT = datetime.timedelta(seconds=10)


class SideChannel:
    """Texts that hosts leave for one another, under names. Raises CommunicationError when the store is gone."""

    def __init__(self, address: str, port: int, name: str) -> None:
        """Joins the store at an address; ``name`` keeps runs apart."""
        with _explained(f"no store at {address}:{port}"):
            store = _C10D.TCPStore(address, port, None, False, _TIMEOUT, wait_for_workers=False)
            self._store = _C10D.PrefixStore(f"paceline-health/{name}", store)

    def publish(self, key: str, text: str) -> None:
        """Leaves a text, in the place of an older one."""
        with _explained("the store is gone"):
            self._store.set(key, text)

    def wait_for(self, key: str) -> str:
        """Returns what was left there, as soon as something is. Raises CommunicationError after ten seconds."""
        with _explained(f"nobody left {key}"):
            return str(self._store.get(key).decode())

    def read(self, key: str) -> str:
        """Returns what was left there last; empty if nothing was. Does not wait."""
        with _explained("the store is gone"):
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""


@contextlib.contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Turns an error of torch into one that says what it means."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{problem}: {str(error).partition(chr(10))[0]}") from error
