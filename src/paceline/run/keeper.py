"""The keeper of a host: a process that holds the ranks' snapshots in memory, and serves them to other hosts.

    python -m paceline.run.keeper ROOT LISTENER

The folder ROOT (``comm/control/kept.py``) is made by the host's launcher, in the system's memory file system; LISTENER
is the descriptor of a socket, which the launcher holds too: a keeper that is killed is started again behind the same
address, and what was kept is still there. When the launcher goes (end of input on standard input), however it goes, the
keeper removes the folder and ends. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm.control.kept import FOLDER, ROOT, Kept
from paceline.comm.control.server import ControlServer
from paceline.comm.control.wire import Address, listen, secret_of
from paceline.errors import UsageError
from paceline.run.processes import end_helper
from paceline.run.signals import ENDING, PREEMPTING, polling, scratch_folder

if TYPE_CHECKING:
    from paceline.run.rendezvous import Rendezvous
    from paceline.run.whereami import Surroundings

MEMORY = "PACELINE_MEMORY"  # for ranks: the folder of their host
_LOOK_S, _PATIENCE_S, _LAST_S = 0.2, 5.0, 2.0


class Keeper:
    """The keeper of this host, for its launcher. ``root`` has what is kept."""

    def __init__(self, root: Path, listener: socket.socket, address: Address) -> None:
        self.root, self.address = root, address
        self._listener = listener
        self._process = self._start()

    def meet(self, place: int, size: int, met: Rendezvous) -> None:
        """Tells the hosts of a round where this keeper answers, and learns where theirs do, before ranks start.

        Those of a round have proved one secret, which other runs may have: a keeper's has all their addresses in it.
        """
        addresses = [self.address]
        if size > 1:
            told = met.exchange("keepers", f"{self.address.host} {self.address.port}", place, size)
            addresses = [Address(host, int(port)) for host, _, port in (each.partition(" ") for each in told)]
        known = secret_of(os.environ) + " ".join(map(str, addresses)).encode()
        Kept(self.root).write_secret(hashlib.sha256(known).hexdigest().encode())
        Kept(self.root).write_keepers(place, addresses)

    def look(self) -> bool:
        """Starts the keeper again if it has ended, or was stopped and would let other hosts wait."""
        code, stopped = self._process.poll(), os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        if code is not None or os.waitid(os.P_PID, self._process.pid, stopped):
            from paceline.run.logs import say

            self._process.kill()
            how = "was stopped" if code is None else f"ended with {code}"
            say(f"the keeper of this host's snapshots {how}: another one is started, and holds them on")
            self._process.wait()
            self._process = self._start()
        return False

    def close(self) -> None:
        end_helper(self._process, _PATIENCE_S)

    def _start(self) -> subprocess.Popen[bytes]:
        number = self._listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.run.keeper", str(self.root), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,  # Ctrl-C in a terminal goes to the launcher alone
        )


@contextlib.contextmanager
def keeping(nodes: Surroundings | None, *, is_wanted: bool = True) -> Iterator[Keeper | None]:
    """Runs a keeper beside the block; what it keeps goes with it. The environment has the run's secret."""
    if not is_wanted:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(FOLDER))
            root = folder / ROOT
            Kept(root).make(secret_of(os.environ))
        except OSError as error:
            what = f"checkpoint.memory: nothing can be kept in {FOLDER}: {error.strerror or error}"
            fix = f"give {FOLDER} more room (docker run --shm-size), or leave checkpoint.memory out"
            raise UsageError(f"{what}\n  snapshots lie there, in memory\n  {fix}") from error
        address = Address(str(folder / "keeper") if nodes is None else nodes.own_address())
        with listen(address) as listener:
            if nodes is not None:
                address = Address(address.host, listener.getsockname()[1])
            with (
                contextlib.closing(Keeper(root, listener, address)) as made,
                polling(made.look, every_s=_LOOK_S, name="keeper", patience_s=_PATIENCE_S),
            ):
                yield made


def main() -> None:
    root, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    for number in (*ENDING, *PREEMPTING):
        signal.signal(number, signal.SIG_IGN)  # where all processes of a job are signalled: the launcher decides
    kept = Kept(root)
    with ControlServer([listener], kept.secret, operations=kept.operations()):
        while os.read(0, 1):
            pass
    for _ in range(round(_LAST_S / _LOOK_S)):  # ranks may still write, until they see that the launcher is gone
        shutil.rmtree(root.parent, ignore_errors=True)
        if not root.parent.exists():
            break
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
