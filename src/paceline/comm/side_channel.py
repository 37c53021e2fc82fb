"""Short texts between hosts, beside the collectives: it works while those are stuck.

It is a connection of its own to the store at which the ranks met: the store serves it whatever the ranks' Python does,
and one that another thread waits on would make this one wait too.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

from paceline.errors import CommunicationError

TIMEOUT_S = 10.0


class SideChannel:
    """Texts that hosts leave for one another, under names. Raises CommunicationError when the store is gone."""

    def __init__(self, store: Any, name: str) -> None:
        """``store`` is a connection that nobody else uses; ``name`` keeps runs apart."""
        self._store = store
        self._prefix = f"paceline-health/{name}/"
        store.set_timeout(datetime.timedelta(seconds=TIMEOUT_S))

    def publish(self, key: str, text: str) -> None:
        """Leaves a text, in the place of an older one."""
        with _explained("the store is gone"):
            self._store.set(self._prefix + key, text)

    def wait_for(self, key: str) -> str:
        """Returns what was left there, as soon as something is. Raises CommunicationError after ten seconds."""
        with _explained(f"nobody left {key}"):
            return str(self._store.get(self._prefix + key).decode())

    def read(self, key: str) -> str:
        """Returns what was left there last; empty if nothing was. Does not wait."""
        with _explained("the store is gone"):
            is_there = self._store.check([self._prefix + key])
            return str(self._store.get(self._prefix + key).decode()) if is_there else ""


@contextlib.contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Turns an error of torch into one that says what it means."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        raise CommunicationError(f"{problem}: {str(error).partition(chr(10))[0]}") from error
