"""The process that holds the connections of a run through ssh, until it has ended.

    python -m paceline.launch.ssh_hosts FOLDER

It has one launcher started on each host, prints what they print, and leaves with the code of the first host, where the
others meet. With hosts to spare (``--nodes 2:4``), one that is lost or did not answer is tried again: it joins the run.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from paceline.health.exit_codes import FAILED
from paceline.launch.job import LaunchJob
from paceline.launch.remote import give_order, run_order
from paceline.launch.ssh import ask_hosts, ssh_command, train_command
from paceline.terminal import echo

_AGAIN_S = 5.0
_LATE_S = 60.0  # for the other hosts, when the first has ended
_LOST = 255  # ssh's own


@dataclass(slots=True, kw_only=True)
class _Supervisor:
    job: LaunchJob
    command: list[str]
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Runs all hosts; returns the code of the first."""
        threads = [threading.Thread(target=self._keep, args=(host,), daemon=True) for host in self.job.hosts[1:]]
        first = self._start(self.job.hosts[0])
        for thread in threads:
            thread.start()
        code = self._follow(self.job.hosts[0], first)
        self.is_over.set()
        for thread in threads:
            thread.join(_LATE_S)
        self.signal(signal.SIGTERM)
        return FAILED if code == _LOST else code

    def signal(self, number: int) -> None:
        """Hands a signal on to all hosts."""
        for process in list(self.processes.values()):
            give_order(process, {"do": "signal", "number": int(number)})

    def _keep(self, host: str) -> None:
        """Has a host take part; again and again, where the run goes on without it."""
        while True:
            code = self._follow(host, self._start(host))
            if code in (0, 2) or self.job.least == self.job.nodes:
                return
            echo(f"{host}: left with exit code {code}; it is tried again in {_AGAIN_S:g} s", err=True)
            if self.is_over.wait(_AGAIN_S):
                return

    def _start(self, host: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(ssh_command(self.job, host), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        self.processes[host] = process
        give_order(process, run_order(self.job, self.command, self.secret, host))
        return process

    def _follow(self, host: str, process: subprocess.Popen[bytes]) -> int:
        """Prints what a host prints, with its name before that of all but the first; returns its exit code."""
        assert process.stdout is not None
        prefix = "" if host == self.job.hosts[0] else f"{host}: "
        for line in process.stdout:
            echo(f"{prefix}{line.decode('utf-8', 'replace').rstrip()}")
        return process.wait()


def main(folder: Path) -> int:
    """Runs the launch of a folder until it has ended."""
    job = LaunchJob.read(folder)
    address, found = ask_hosts(job)
    first = found[job.hosts[0]]
    if isinstance(first, str) or isinstance(first["port"], str):
        echo(f"host {job.hosts[0]}: {first if isinstance(first, str) else first['port']}", err=True)
        return FAILED
    supervisor = _Supervisor(job=job, command=train_command(job, address, int(first["port"])))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda number, _: supervisor.signal(number))
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
