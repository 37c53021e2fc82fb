"""The entry of ``paceline``, and how Ctrl-C ends it: with exit code 130 and one line, at any moment.

[Note: Ctrl-C] Before the verbs are loaded and after they are done, there is nothing to clear up: it leaves at once. So
it does while a module is imported. Else the first Ctrl-C unwinds the verb, so that ranks end and files are cleared; a
thread ends this process if that takes longer than ``_PATIENCE_S``, and at the second Ctrl-C. The thread hears of
signals by a pipe that the interpreter writes to, whoever handles them (torch's agent has handlers of its own), also
while the main thread is in a library. Whoever leaves removes the temporary folders of this process first. Of the
standard library only what is there in a moment is loaded before Ctrl-C is taken care of.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType
    from typing import NoReturn

    Writer = Callable[[int, bytes], int]
    Leaver = Callable[[int], NoReturn]

INTERRUPTED = 130
# Of the ranks of another launcher, which all get the signal, one tells it.
_LINE = b"paceline: ended by SIGINT (Ctrl-C)\n" if os.environ.get("RANK", "0") == "0" else b""
_LINES = iter((_LINE,))
_PATIENCE_S = 1.4
_IMPORTING = "<frozen importlib._bootstrap>"


class Interrupted(SystemExit):
    """Unwinds a command that Ctrl-C ends."""


def main(*, holds_interrupts: bool = False) -> None:
    """Runs the command line, with which this process ends. ``holds_interrupts``: SIGINT was blocked until now."""
    try:
        import signal

        is_heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # as with nohup
        if is_heard:
            signal.signal(signal.SIGINT, _leave)
        if holds_interrupts:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    except KeyboardInterrupt:
        _leave()
    # Where ranks leave, torch's store warns with a trace of C++; what it means is told in words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # Open MPI gives ranks a terminal, also where their output goes to a file
        os.environ["TERM"] = "dumb"
    if "_PACELINE_COMPLETE" in os.environ:  # of the shell; a search of all packages for plugins takes a tenth of it
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if sys.argv[1:2] == ["train"]:
        from paceline.run.signals import leave_early

        leave_early()  # the rest takes a second or more to load
    from paceline.cli.app import run_command

    if not is_heard:
        run_command()
        return
    presses = _Presses()
    try:
        signal.signal(signal.SIGINT, _unwind)
        try:
            run_command()
        finally:
            signal.signal(signal.SIGINT, _leave)
            _flush()
    except Interrupted:
        _leave()
    except SystemExit as end:
        if presses.count and isinstance(end.code, int):
            _remove_folders()
            os._exit(end.code)  # a library that was interrupted may not survive its own end
        raise


class _Presses:
    """How often Ctrl-C was pressed; ends this process where [Note: Ctrl-C] says so."""

    def __init__(self) -> None:
        import signal
        import threading

        self.count = 0
        self._number = int(signal.SIGINT)
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # else it would be counted here too
        threading.Thread(target=self._follow, name="Ctrl-C", daemon=True).start()

    def _follow(self) -> None:
        from threading import Timer

        while True:
            self.count += os.read(self._reader, 64).count(self._number)
            if self.count > 1:
                _leave()
            elif self.count == 1:
                patience = Timer(_PATIENCE_S, _leave)
                patience.daemon = True
                patience.start()


def _unwind(_: int, frame: FrameType | None) -> NoReturn:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:  # torch aborts where its import is interrupted
            _flush()
            _leave()
        frame = frame.f_back
    raise Interrupted(INTERRUPTED)


def _remove_folders(modules: dict[str, ModuleType] = sys.modules) -> None:
    """Removes the temporary folders that a verb holds, where it is left before it could do so."""
    scratch = modules.get("paceline.run.signals")
    if scratch is not None and hasattr(scratch, "remove_held"):  # else it is not loaded, or being loaded
        try:
            scratch.remove_held()
        except Exception:  # modules are being cleared: the next start removes them
            return


def _leave(
    number: int = 0,
    frame: FrameType | None = None,
    *,
    write: Writer = os.write,
    leave: Leaver = os._exit,
    lines: Iterator[bytes] = _LINES,
    remove_folders: Callable[[], None] = _remove_folders,
    pause: Callable[[float], None] = time.sleep,
) -> NoReturn:
    """Leaves at once. All that it needs is bound here: it may be called when modules are being cleared.

    Two threads may leave at the same moment: the first one writes the line, and the other lets it.
    """
    del number, frame
    for line in lines:
        write(2, line)
        remove_folders()
        leave(INTERRUPTED)
    pause(0.1)
    leave(INTERRUPTED)


def _flush() -> None:
    import contextlib

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # nobody reads it, or it is being written
            stream.flush()
