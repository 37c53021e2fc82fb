"""Signals that come at an inconvenient moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from paceline.run.signals import PREEMPTING, launcher_signals, leave_early, polling, start_thread


class EndedError(Exception):
    """What the handler raises."""


def end(number: int, _: Any) -> None:
    raise EndedError(number)


def test_a_signal_inside_of_the_start_of_a_thread_is_handled_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_start_new_thread" if sys.version_info < (3, 13) else "_start_joinable_thread"
    begin: Any = vars(threading)[name]

    def begin_and_signal(*args: Any, **more: Any) -> Any:
        found = begin(*args, **more)
        os.kill(os.getpid(), signal.SIGINT)  # its handler runs before the next line of this thread
        return found

    ran = threading.Event()
    thread = threading.Thread(target=ran.set, daemon=True)
    before = signal.signal(signal.SIGINT, end)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading, name, begin_and_signal)
            with pytest.raises(EndedError, match=str(int(signal.SIGINT))):
                start_thread(thread)
        assert signal.getsignal(signal.SIGINT) is end
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.wait(10)
    thread.join(10)
    assert not thread.is_alive()


def test_a_signal_before_the_start_of_a_thread_is_what_ends_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise EndedError(signal.SIGINT)

    monkeypatch.setattr("paceline.run.signals.start_thread", interrupted)
    with pytest.raises(EndedError), polling(lambda: True, every_s=1.0, name="nothing"):
        pass


@pytest.mark.parametrize("number", PREEMPTING)
def test_a_request_for_room_while_the_launcher_loads_is_a_preemption(number: signal.Signals) -> None:
    code = f"import os; from paceline.run.signals import leave_early; leave_early(); os.kill(os.getpid(), {number:d})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "paceline: preempted: no step was trained yet\n")


def test_a_run_that_has_ended_is_not_preempted() -> None:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in PREEMPTING}
    try:
        signal.signal(signal.SIGUSR2, end)
        leave_early()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        with launcher_signals(list, end):
            pass
        assert [signal.getsignal(number) for number in PREEMPTING] == [signal.SIG_DFL, signal.SIG_DFL, end]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
