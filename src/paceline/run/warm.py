"""Ranks from a process that has torch loaded: the launcher's side of ``warm_server.py``.

Loading torch takes seconds, and ranks that do it all at once share the cores. The server does it once, while the
launcher is still busy with the config, and again never: a restart forks.

Some libraries of products start as many threads as OMP_NUM_THREADS says when they are loaded, whatever torch is told
later: on cores that ranks have for themselves, threads too many take turns and cost several times what they compute.
So the server is told before it loads anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.run.cores import allocator_variables

_LONGEST_ADDRESS = 100  # of a socket; Linux takes 107 bytes


class WarmRanks:
    """A running server; ``arguments`` makes what the agent has to start for a rank."""

    def __init__(self, address: Path) -> None:
        self._address = address

    def arguments(self, command: Sequence[str]) -> list[str]:
        """Returns the arguments of the Python that stands for a rank which runs ``python -m <command>``."""
        client = Path(__file__).with_name("warm_client.py")
        return ["-I", "-S", str(client), str(self._address), *command]


@contextlib.contextmanager
def warm_ranks(
    modules: Sequence[str], *, is_wanted: bool = True, threads: int | None = None
) -> Iterator[WarmRanks | None]:
    """Starts a server that loads ``modules``, and ends it with its ranks; None where processes cannot be forked so.

    ``threads`` are those that each rank will compute with; None: not known yet. macOS forbids what its frameworks do in
    a forked process.
    """
    scratch = Path(tempfile.mkdtemp(prefix="paceline-"))
    address = scratch / "ranks"
    if not is_wanted or sys.platform != "linux" or len(os.fsencode(address)) > _LONGEST_ADDRESS:
        scratch.rmdir()
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(address))
        listener.listen(1024)  # from here on clients may come: they wait until the server has loaded its modules
        server = _start(listener.fileno(), address, modules, threads)
    try:
        yield WarmRanks(address)
    finally:
        assert server.stdin is not None
        server.stdin.close()  # which it takes for the launcher's end
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10.0)
        if server.poll() is None:
            server.kill()
            server.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def _start(listener: int, address: Path, modules: Sequence[str], threads: int | None) -> subprocess.Popen[bytes]:
    told = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline.run.warm_server", str(address), str(listener), *modules],
        # Else torch may ask the driver for GPUs when it is loaded, after which no forked process can use one.
        env={**os.environ, **allocator_variables(), **told, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener],
        start_new_session=True,  # Ctrl-C in a terminal goes to the launcher alone
    )
