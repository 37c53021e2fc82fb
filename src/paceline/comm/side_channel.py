"""Short texts between hosts, beside the collectives: it works while those are stuck.

It is a connection of its own to the store at which the ranks met (``MASTER_ADDR:MASTER_PORT``): the store serves it
whatever its owner's Python does, and one that another thread waits on would make this one wait too.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from paceline.errors import CommunicationError

_C10D: Any = dist  # its stores are not annotated
_TIMEOUT = datetime.timedelta(seconds=10)


class SideChannel:
    """A place where hosts leave texts for one another, under names."""

    def __init__(self, address: str, port: int, name: str) -> None:
        """Joins the store at an address; ``name`` keeps runs apart. Raises CommunicationError where there is none."""
        try:
            store = _C10D.TCPStore(address, port, None, False, _TIMEOUT, wait_for_workers=False)
            self._store = _C10D.PrefixStore(f"paceline-health/{name}", store)
        except RuntimeError as error:
            raise CommunicationError(f"no store at {address}:{port}: {str(error).partition(chr(10))[0]}") from error

    def publish(self, key: str, text: str) -> None:
        """Leaves a text, in the place of an older one. Raises CommunicationError when the store is gone."""
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise CommunicationError(f"the store is gone: {str(error).partition(chr(10))[0]}") from error

    def wait_for(self, key: str) -> str:
        """Returns what was left there, as soon as something is. Raises CommunicationError after ten seconds."""
        try:
            return str(self._store.get(key).decode())
        except RuntimeError as error:
            raise CommunicationError(f"nobody left {key}: {str(error).partition(chr(10))[0]}") from error

    def read(self, key: str) -> str:
        """Returns what was left there last; empty if nothing was. Does not wait."""
        try:
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""
        except RuntimeError as error:
            raise CommunicationError(f"the store is gone: {str(error).partition(chr(10))[0]}") from error
