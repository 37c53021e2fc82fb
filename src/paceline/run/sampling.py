"""Samples this host while its ranks train, into ``records/host-NAME.jsonl`` of the run's folder.

One sampler a host, in a thread of the launcher, which trains nothing. Under another launcher, such as torchrun, the
first rank of each host has the thread.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from paceline.records.host import HostSampler, open_gpus
from paceline.records.sinks import JsonlSink
from paceline.run.polling import polling

_PATIENCE_S = 2.0


def host_path(folder: Path) -> Path:
    """Returns where the samples of this host go."""
    name = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return folder / "records" / f"host-{name}.jsonl"


@contextlib.contextmanager
def sampling(
    folder: Path, every_s: float | None, processes: Callable[[], Mapping[int, int]], tell: Callable[[int, str], None]
) -> Iterator[None]:
    """Samples the host every so many seconds while the block runs, and once more at its end; None: never.

    ``processes`` returns the processes of the ranks here. ``tell`` gets a level and a text for the log. A sampler that
    fails is told and ends, and the run goes on.
    """
    if every_s is None:
        yield
        return
    gpus, why = open_gpus()
    if gpus is None:
        tell(logging.INFO, f"no measurements of GPUs on this host: {why}")
    sampler, stack = HostSampler(processes, gpus), contextlib.ExitStack()
    sinks: list[JsonlSink] = []  # opened with the first sample: a run that is refused leaves nothing

    def look(_: threading.Event | None = None) -> bool:
        try:
            if not sinks:
                sinks.append(
                    stack.enter_context(contextlib.closing(JsonlSink(host_path(folder), waits_for_space=True)))
                )
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
