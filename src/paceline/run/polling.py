"""A thread that looks at something again and again, while a block runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from paceline.run.signals import start_thread


@contextlib.contextmanager
def polling(
    look: Callable[[threading.Event], bool], *, every_s: float, name: str, patience_s: float | None = None
) -> Iterator[None]:
    """Calls ``look`` in a thread every ``every_s`` seconds, until it returns True or the block is left.

    The event that ``look`` gets is set when the block is left. A call that is under way then is waited for, at most
    ``patience_s`` seconds; None: until it is done.
    """
    is_left = threading.Event()

    def follow() -> None:
        while not is_left.wait(every_s):
            if look(is_left):
                return

    thread = threading.Thread(target=follow, name=name, daemon=True)
    try:
        start_thread(thread)
        yield
    finally:
        is_left.set()
        thread.join(timeout=patience_s)
