"""Signals that come at an inconvenient moment."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from paceline.run.signals import start_thread


class EndedError(Exception):
    """What the handler raises."""


def end(number: int, _: Any) -> None:
    raise EndedError(number)


def test_a_signal_inside_of_the_start_of_a_thread_is_handled_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Any = vars(threading)["_start_new_thread"]

    def begin_and_signal(*args: Any) -> Any:
        found = begin(*args)
        os.kill(os.getpid(), signal.SIGINT)  # its handler runs before the next line of this thread
        return found

    ran = threading.Event()
    thread = threading.Thread(target=ran.set, daemon=True)
    before = signal.signal(signal.SIGINT, end)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading, "_start_new_thread", begin_and_signal)
            with pytest.raises(EndedError, match=str(int(signal.SIGINT))):
                start_thread(thread)
        assert signal.getsignal(signal.SIGINT) is end
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.wait(10)
    thread.join(10)
    assert not thread.is_alive()
