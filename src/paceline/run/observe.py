"""What goes on beside the ranks of a run in the process that started them: its log, progress, samples and trackers."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.records.host import HostSampler, open_gpus
from paceline.records.records import EndRecord, EventRecord, RunRecord, follow_records
from paceline.records.sinks import JsonlSink
from paceline.run.console import tell
from paceline.run.logs import log, run_log
from paceline.run.notes import noted_processes
from paceline.run.result import RunOptions
from paceline.run.signals import polling, start_thread

if TYPE_CHECKING:
    from paceline.config import Config

_PATIENCE_S = 2.0


@contextlib.contextmanager
def observing(folder: Path, config: Config, options: RunOptions) -> Iterator[None]:
    """Observes a run that this process started: writes its log, shows progress, samples the host, feeds trackers."""
    from paceline.run.tracking import tracking

    is_shown = config.monitor.console and not options.is_quiet
    shows_log = is_shown and options.is_verbose
    with (
        run_log(folder, is_shown=shows_log),
        live_progress(folder, is_shown=is_shown and not options.is_verbose),  # its lines are in the log
        tracking(folder, config, log if shows_log else tell),
        observing_host(folder, config),
    ):
        yield


def observing_host(folder: Path, config: Config) -> contextlib.AbstractContextManager[None]:
    """Samples this host while the ranks that this process started train."""
    return sampling(folder, config.monitor.sample_s, lambda: noted_processes(folder, os.getpid()), log)


@contextlib.contextmanager
def live_progress(folder: Path, *, is_shown: bool) -> Iterator[None]:
    """Shows rank 0's records as they are written, in a thread of its own."""
    if not is_shown:
        yield
        return
    from paceline.records.console import ProgressView

    view, since, is_over, here = ProgressView(), time.time(), threading.Event(), f"{Path.cwd()}{os.sep}"

    def follow() -> None:
        for record in follow_records(folder / "records" / "rank-0.jsonl", is_over.is_set, poll_s=0.1):
            if record.time < since:  # a resumed run's file begins with what an earlier attempt wrote
                continue
            if isinstance(record, EventRecord):  # paths below the current folder are shown as seen from there
                near = {k: v.removeprefix(here) if isinstance(v, str) else v for k, v in record.detail.items()}
                record = replace(record, detail=near)
            # What went wrong is told once, with its cause; an attempt that failed in its set-up plans no steps.
            is_failure = isinstance(record, EndRecord) and record.status != "done"
            if not is_failure and not (isinstance(record, RunRecord) and record.total_steps == 0):
                view.write(record)

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    try:
        start_thread(thread)
        yield
    finally:
        is_over.set()
        thread.join(timeout=5.0)
        view.flush()
        view.close()


@contextlib.contextmanager
def sampling(
    folder: Path, every_s: float | None, processes: Callable[[], Mapping[int, int]], tell: Callable[[int, str], None]
) -> Iterator[None]:
    """Samples this host into ``records/host-NAME.jsonl`` while the block runs, and once more at its end; None: never.

    One sampler a host, in a thread of the launcher, or under another launcher of the host's first rank. ``processes``
    returns the processes of the ranks here. ``tell`` gets a level and a text for the log. A sampler that fails is told
    and ends, and the run goes on.
    """
    if every_s is None:
        yield
        return
    name = re.sub(r"[^\w.-]", "_", socket.gethostname())
    path = folder / "records" / f"host-{name}.jsonl"
    gpus, why = open_gpus()
    if gpus is None:
        tell(logging.INFO, f"no measurements of GPUs on this host: {why}")
    sampler, stack = HostSampler(processes, gpus), contextlib.ExitStack()
    sinks: list[JsonlSink] = []  # opened with the first sample: a run that is refused leaves nothing

    def look(_: threading.Event | None = None) -> bool:
        try:
            if not sinks:
                sinks.append(stack.enter_context(contextlib.closing(JsonlSink(path, waits_for_space=True))))
            sinks[0].write(sampler.look())
        except Exception as error:  # whatever a driver or a disk does
            tell(logging.WARNING, f"this host is not sampled any more: {type(error).__name__}: {error}")
            return True
        return False

    with stack:
        if gpus is not None:
            stack.callback(gpus.close)
        with polling(look, every_s=every_s, name="host", patience_s=_PATIENCE_S):
            yield
        look()
