"""Looks again and again, in a thread, while a block runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def looking(
    look: Callable[[threading.Event], bool], *, every_s: float, name: str, patience_s: float | None = None
) -> Iterator[None]:
    """Calls ``look`` until it says that it has seen enough, or the block is left, which sets the event.

    A look that is under way then is waited for, so long at most; None: until it is done.
    """
    is_left = threading.Event()

    def follow() -> None:
        while not is_left.wait(every_s):
            if look(is_left):
                return

    thread = threading.Thread(target=follow, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join(timeout=patience_s)
