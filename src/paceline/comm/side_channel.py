"""Short texts between hosts, beside the collectives: it works while those are stuck.

It is a connection of its own to the store at which the ranks met: the store serves it whatever the ranks' Python does,
and one that another thread waits on would make this one wait too.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from paceline.errors import CommunicationError

TIMEOUT_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02  # between two questions for the same text


class SideChannel:
    """Texts that hosts leave for one another, under names. Raises CommunicationError when the store is gone.

    A thread of its own asks, since a connection to a host that cannot be reached any more may block for minutes: an
    operation raises after ``patience_s``. Nobody waits for a text any more once there is one under ``farewell``.
    """

    def __init__(self, store: Any, name: str, *, patience_s: float = 1.5, farewell: str = "") -> None:
        """``store`` is a connection that nobody else uses; ``name`` keeps runs apart."""
        self._store = store
        self._prefix = f"paceline-health/{name}/"
        store.set_timeout(datetime.timedelta(seconds=TIMEOUT_S))
        self._patience_s, self._farewell = patience_s, farewell
        self._questions: SimpleQueue[Callable[[], str] | None] = SimpleQueue()
        self._answers: SimpleQueue[str | CommunicationError] = SimpleQueue()
        self._is_answered, self._is_closed, self._is_gone = True, False, False
        self._lock = threading.Lock()  # the watch asks, and the rank itself when it leaves
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. One that is inside torch when the interpreter ends would end the process with SIGABRT."""
        self._is_closed = True
        self._questions.put(None)
        self._thread.join(timeout=self._patience_s)

    def publish(self, key: str, text: str) -> None:
        """Leaves a text, in the place of an older one."""
        self._ask(lambda: self._store.set(self._prefix + key, text) or "")

    def read(self, key: str) -> str:
        """Returns what was left there last; empty if nothing was. Does not wait."""
        name = self._prefix + key
        return self._ask(lambda: str(self._store.get(name).decode()) if self._store.check([name]) else "")

    def wait_for(self, key: str) -> str:
        """Returns what was left there, as soon as something is. Raises CommunicationError after ten seconds.

        Asks again and again, so that the thread can end.
        """
        deadline, pause_s = time.monotonic() + TIMEOUT_S, _SHORTEST_PAUSE_S
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
            if not self._is_answered:
                self._take(0.0)  # the answer to an earlier question
            self._questions.put(question)
            answer = self._take(self._patience_s)
        if isinstance(answer, CommunicationError):
            # Torch never connects again; it would write a line of its own to standard error with every question.
            self._is_gone = isinstance(answer.__cause__, dist.DistNetworkError)
            raise answer
        return answer

    def _take(self, patience_s: float) -> str | CommunicationError:
        try:
            answer = self._answers.get(timeout=patience_s)
        except Empty:
            self._is_answered = False
            raise CommunicationError("the store does not answer") from None
        self._is_answered = True
        return answer

    def _serve(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                answer: str | CommunicationError = question()
            except (RuntimeError, TimeoutError) as error:
                answer = CommunicationError(f"the store is gone: {str(error).partition(chr(10))[0]}")
                answer.__cause__ = error
            except CommunicationError as error:
                answer = error
            self._answers.put(answer)
