"""Follows runs for the live page: one thread looks at files, and who waits hears of what is new.

A run is read when somebody has chosen it. Of the others only the list is kept. Looks are 0.25 s apart while a chosen
run goes on and somebody watches, else 2 s; a run that is over is looked at every 2 s, as it may be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from paceline.untrusted import file_inside, open_regular, parse_json_object
from paceline.view.runs import ShownRun, find_runs, names_of

_LOOK_S, _IDLE_LOOK_S, _FIND_S = 0.25, 2.0, 1.0
_FIRST_S, _BUDGET_S = 0.02, 0.05  # of reading at a stretch, with the lock held
_WORDS_EVERY_S = 20.0
_SILENT_S = 30.0  # a run that nobody has chosen, and that wrote nothing for so long, does not run


class Follower:
    """The runs in some folders, read as they grow. ``lock`` guards everything that is read of a run."""

    def __init__(self, paths: Sequence[Path], notice: Callable[[str], None] = lambda _: None) -> None:
        self.lock = Lock()
        self.runs: list[ShownRun] = []
        self._paths = list(paths)
        self._notice = notice
        self._told: set[str] = set()
        self._wanted: set[str] = set()
        self._behind: set[str] = set()
        self._looked: dict[str, float] = {}
        self.is_stopped, self._wake = Event(), Event()
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.news: asyncio.Event | None = None
        self._watchers = 0
        self._words: dict[str, tuple[float, str, dict[str, Any]]] = {}
        self._asking: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self.find()

    def start(self) -> None:
        """Begins to follow; call it inside the event loop that answers requests."""
        self._loop, self.news = asyncio.get_running_loop(), asyncio.Event()
        self._thread = Thread(target=self._follow, name="follow runs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.is_stopped.set()
        self._wake.set()
        for process in list(self._processes):
            process.terminate()
        if self.news is not None:
            self.news.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def find_run(self, run_id: str) -> ShownRun | None:
        return next((run for run in self.runs if run.id == run_id), None)

    def want(self, run: ShownRun) -> None:
        """Has a run read from now on; the first of it at once."""
        if run.id not in self._wanted:
            self._wanted.add(run.id)
            if run.look(_FIRST_S):
                self._behind.add(run.id)
            self._wake.set()

    def states(self) -> list[dict[str, Any]]:
        """Returns the list of runs; the state of those that nobody has chosen is a glance at their files."""
        return [
            {"id": run.id, "name": run.name, "version": run.version, "read": round(run.share_read, 3)}
            | (asdict(run.state()) if run.id in self._wanted else glance(run))
            | {"verdict": run.verdict() if run.id in self._wanted else ""}
            for run in self.runs
        ]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Looks more often while somebody watches."""
        self._watchers += 1
        self._wake.set()
        try:
            yield
        finally:
            self._watchers -= 1

    async def words_of(self, run: ShownRun) -> dict[str, Any]:
        """Returns the words of a run, at most some seconds old; a process of its own reads the records."""
        made, status, words = self._words.get(run.id, (0.0, "", {}))
        with self.lock:
            now = run.state().status
        if status == now and (now != "running" or time.monotonic() - made < _WORDS_EVERY_S):
            return words
        if run.id not in self._asking:
            self._asking[run.id] = asyncio.ensure_future(asyncio.to_thread(_ask_words, run.folder, self._processes))
        try:
            words = await asyncio.shield(self._asking[run.id])
        finally:
            self._asking.pop(run.id, None)
        self._words[run.id] = (time.monotonic(), now, words)
        return words

    def find(self) -> None:
        folders, problems = find_runs(self._paths)
        for problem in problems:
            if problem not in self._told:
                self._told.add(problem)
                self._notice(problem)
        known = {run.folder: run for run in self.runs}
        if list(known) != folders:
            self.runs = [known.get(folder) or ShownRun(folder) for folder in folders]
            for run, name in zip(self.runs, names_of(folders), strict=True):
                run.name = name

    def _follow(self) -> None:
        found_at = time.monotonic()
        while not self.is_stopped.is_set():
            before = [(run.id, run.version) for run in self.runs]
            with self.lock:
                if time.monotonic() - found_at > _FIND_S:
                    found_at = time.monotonic()
                    self.find()
                states = [(run, run.state().status) for run in self.runs if run.id in self._wanted]
                now = time.monotonic()
                for run, status in states:
                    is_due = status in ("running", "starting") or now - self._looked.get(run.id, 0.0) >= _IDLE_LOOK_S
                    if is_due or run.id in self._behind:
                        self._looked[run.id] = now
                        self._behind.discard(run.id)
                        self._behind |= {run.id} if run.look(_BUDGET_S) else set()
                after = [(run.id, run.version) for run in self.runs]
                has_changed = before != after or states != [(run, run.state().status) for run, _ in states]
            if has_changed:
                self._tell()
            if not self._behind:
                self._wake.wait(_LOOK_S if self._watchers > 0 else _IDLE_LOOK_S)
                self._wake.clear()
            time.sleep(0.01)  # lets requests have the lock

    def _tell(self) -> None:
        def wake() -> None:
            assert self.news is not None
            self.news.set()
            self.news = asyncio.Event()

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(wake)


def glance(run: ShownRun) -> dict[str, Any]:
    """Returns the state of a run that has not been read: the status at the end of its lowest rank's file.

    Without an end it runs as long as its files grow: those of hosts do every second.
    """
    folder = run.folder / "records"
    try:
        with open_regular(file_inside(folder, "rank-0.jsonl")) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            last = (file.read() or b"").rstrip().rpartition(b"\n")[2]
        values = parse_json_object(last)
        kind, step = values.get("type"), int(values.get("step", 0))
        written_at = max(path.lstat().st_mtime for path in (folder / "rank-0.jsonl", *folder.glob("host-*.jsonl")))
    except (OSError, ValueError, TypeError, AttributeError):
        return {"status": "starting", "step": 0, "sentence": ""}
    is_growing = time.time() - written_at < _SILENT_S
    status = values.get("status") if kind == "end" else "running" if is_growing else "unfinished"
    known = status if status in ("done", "failed", "stopped", "running") else "unfinished"
    return {"status": known, "step": step, "sentence": f"{known}, step {step:,}"}


def _ask_words(folder: Path, asked: set[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Has another process sum up a run, at a low priority; it is one of ``asked`` meanwhile."""
    command = [sys.executable, "-m", "paceline.view.html", str(folder.resolve())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        asked.add(process)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        out, err = process.communicate()
        asked.discard(process)
    try:
        return parse_json_object(out)
    except ValueError:
        return {"problem": "the summary of the run could not be made: " + err.decode("utf-8", "replace")[-400:]}
