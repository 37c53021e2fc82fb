"""What goes on beside the ranks of a run in the process that started them: its log, progress, samples and trackers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.run.console import live_progress, tell
from paceline.run.logs import log, run_log
from paceline.run.notes import noted_processes
from paceline.run.result import RunOptions

if TYPE_CHECKING:
    from paceline.config import Config


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


@contextlib.contextmanager
def observing_host(folder: Path, config: Config) -> Iterator[None]:
    """Samples this host while the ranks that this process started train."""
    from paceline.run.sampling import sampling

    with sampling(folder, config.monitor.sample_s, lambda: noted_processes(folder, os.getpid()), log):
        yield
