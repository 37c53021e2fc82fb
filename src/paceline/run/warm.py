"""Ranks from a process that has torch loaded: the launcher's side of ``warm_server.py``.

Loading torch takes seconds, and ranks that do it all at once share the cores. The server does it once, while the
launcher is still busy with the config, and again only if it was killed: a restart forks.

Some libraries of products start as many threads as OMP_NUM_THREADS says when they are loaded, whatever torch is told
later: on cores that ranks have for themselves, threads too many take turns and cost several times what they compute.
So the server is told before it loads anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster import detect
from paceline.run.console import say
from paceline.run.rank_process import allocator_variables
from paceline.run.scratch import scratch_folder

if TYPE_CHECKING:
    from paceline.config import Config

CPU_RANKS = 2  # where there is no GPU: enough to be distributed, and every machine has two cores

# What a rank needs, loaded once before ranks are forked.
_RANK_MODULES = (
    "paceline.run.worker",
    "paceline.train.assemble",
    "paceline.train.survive.hooks",
    "paceline.train.survive.hooks",
    "paceline.comm.torch_dist",
    "paceline.run.watch",
    "torch._dynamo",  # which optimizers load, and which takes as long as torch itself
)
_PATIENCE_S = 0.5
_LONGEST_ADDRESS = 100  # of a socket; Linux takes 107 bytes


class WarmRanks:
    """A server that forks ranks. One that was killed, and its ranks with it, is started again when ranks are."""

    def __init__(self, address: Path, modules: Sequence[str], threads: int | None) -> None:
        self.address = address
        self._modules = modules
        self._threads = threads
        self._server = self._start()

    def arguments(self, command: Sequence[str]) -> list[str]:
        """Returns the arguments of the Python that stands for a rank which runs ``python -m <command>``."""
        if self._is_gone("another one is started"):
            self._end()
            self._server = self._start()
        client = Path(__file__).with_name("warm_client.py")
        return ["-I", "-S", str(client), str(self.address), *command]

    def close(self) -> None:
        """Ends the server, and with it its ranks."""
        self._is_gone("its ranks went with it")
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self.address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.address))
            listener.listen(1024)  # from here on clients may come: they wait until the server has loaded its modules
            number, threads = listener.fileno(), self._threads
            told = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
            return subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "paceline.run.warm_server",
                    str(self.address),
                    str(number),
                    *self._modules,
                ],
                # Else torch may ask the driver for GPUs when it is loaded, after which no forked process can use one.
                env={**os.environ, **allocator_variables(), **told, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,  # Ctrl-C in a terminal goes to the launcher alone
            )

    def _is_gone(self, consequence: str) -> bool:
        """Says whether the server has ended by itself, and tells the user."""
        code = self._server.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            say(f"the process that ranks are forked from {how}: {consequence}")
        return code is not None

    def _end(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()  # which it takes for the launcher's end
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(_PATIENCE_S)  # while it loads its modules it does not look, and has no ranks
        if self._server.poll() is None:
            self._server.kill()
            self._server.wait()


def warm_ranks_of(config: Config, ranks: int | None = None) -> AbstractContextManager[WarmRanks | None]:
    """Starts a server for the ranks of a config, if it asks for one; ``ranks``: those of this host, where given."""
    modules = [*_RANK_MODULES, *(["sklearn.datasets"] if config.data.kind == "digits" else [])]
    return warm_ranks(modules, is_wanted=config.recovery.warm, threads=rank_threads(config, ranks))


@contextlib.contextmanager
def warm_ranks(
    modules: Sequence[str], *, is_wanted: bool = True, threads: int | None = None
) -> Iterator[WarmRanks | None]:
    """Starts a server that loads ``modules``, and ends it with its ranks; None where processes cannot be forked so.

    ``threads`` are those that each rank will compute with; None: not known yet. macOS forbids what its frameworks do in
    a forked process.
    """
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(scratch_folder()) / "ranks"
        if not is_wanted or sys.platform != "linux" or len(os.fsencode(address)) > _LONGEST_ADDRESS:
            yield None
            return
        yield stack.enter_context(contextlib.closing(WarmRanks(address, modules, threads)))


def rank_threads(config: Config, ranks: int | None = None) -> int | None:
    """Returns how many threads a rank of this host will compute with, before torch is there to tell of GPUs.

    ``ranks`` are those of this host, where they are given. None: the ranks will have GPUs.
    """
    parallel = config.parallel
    if parallel.threads is not None or parallel.device == "cuda":
        return parallel.threads
    count = ranks or (CPU_RANKS if parallel.ranks == "auto" else parallel.ranks)
    return max(1, len(detect.usable_cores()) // (1 if config.comm.backend == "virtual" else count))
