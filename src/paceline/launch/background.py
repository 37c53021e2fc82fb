"""``--on local``: this machine, in the background; the run outlives the terminal.

``python -m paceline.launch.background FOLDER -- COMMAND ...`` runs a command, keeps its output, hands signals on to it,
and leaves its exit code. What holds runs elsewhere (``ssh.py``, ``ray_hosts.py``, ``kubectl.py``) is started so, too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from paceline.cluster.detect import detect_machine
from paceline.errors import LaunchError, UsageError
from paceline.launch.job import LAUNCHED, JobState, LaunchJob, TargetMachines, refuse_options, refuse_settings

_NOT_HERE = {
    "--time": "this machine has no time limits",
    "--queue": "this machine has no queues",
    "--hosts": "it is this machine alone: --on ssh is for others",
    "--port": "the ranks of one machine meet in a folder, without a port",
    "--max-requeues": "nothing queues the run again: it leaves with code 75",
    "--setup": "the run has the environment of this shell",
}
_TURN_S = 1.0


def machines(job: LaunchJob) -> TargetMachines:
    """Returns what this machine has. Raises UsageError for several nodes, or more GPUs than there are."""
    refuse_options(job, _NOT_HERE)
    refuse_settings(job, ())
    if job.nodes != 1:
        raise UsageError(f"--nodes {job.nodes} with --on local\n  it is one machine\n  use --on ssh --hosts a,b")
    here = detect_machine(with_gpus=job.gpus > 0)
    if job.gpus > len(here.gpus):
        what = f"--gpus-per-node {job.gpus}, and this machine has {len(here.gpus)}"
        raise UsageError(f"{what}\n  every rank needs a GPU of its own")
    memory = min(here.gpu_memory_bytes, default=None)
    return TargetMachines(where="this machine", device_bytes=memory, host_bytes=here.memory_bytes)


def render(job: LaunchJob) -> str:
    return f"{shlex.join(job.command())}\n"


def submit(job: LaunchJob) -> str:
    return start(job, job.command())


def hold(job: LaunchJob, module: str) -> str:
    """Starts the process on this machine that runs a launch elsewhere: ``python -m MODULE FOLDER``."""
    job.write()
    return start(job, [sys.executable, "-m", module, job.folder])


def start(job: LaunchJob, command: list[str]) -> str:
    """Starts a command in a session of its own; returns an id by which its process is known also to others."""
    words = ["/usr/bin/env", f"{LAUNCHED}={job.name}", sys.executable, "-m", "paceline.launch.background", job.folder]
    options: dict[str, Any] = {"cwd": job.workdir, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with job.log.open("ab") as log:
        process = subprocess.Popen([*words, "--", *command], stdout=log, stderr=log, **options)
    return f"{process.pid}:{psutil.Process(process.pid).create_time():.2f}"


def state(job: LaunchJob) -> JobState:
    if (process := _process(job)) is not None:
        return JobState(kind="running", words=f"running as process {process.pid} of this machine")
    code = job.exit_code()
    return JobState(kind="ended", words="ended" if code is not None else "gone, without an exit code", code=code)


def cancel(job: LaunchJob) -> None:
    if (process := _process(job)) is None:
        raise LaunchError(f"{job.name} does not run any more\n  paceline launch status {job.name}")
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGTERM)


def _process(job: LaunchJob) -> psutil.Process | None:
    number, _, created = job.id.partition(":")
    try:
        process = psutil.Process(int(number))
        is_ours = f"{process.create_time():.2f}" == created and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return None
    return process if is_ours else None


def run_command(command: Sequence[str], stdin: int | None = None) -> tuple[int, list[int]]:
    """Runs a command and hands signals on to it; returns its exit code, and the signals, those to come among them."""
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, hand_on)
    process = subprocess.Popen(command, stdin=stdin)
    if asked:
        process.send_signal(asked[0])  # it came while the process was starting
    return exit_code_of(process), asked


def exit_code_of(process: subprocess.Popen[bytes]) -> int:
    """Returns a process's code as a shell does; waits in turns, as a signal just before a long wait would be lost."""
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TURN_S)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main(arguments: list[str]) -> int:
    """Runs the command, and leaves its exit code in the launch's folder."""
    folder, command = Path(arguments[0]), arguments[2:]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    code, _ = run_command(command, stdin=subprocess.DEVNULL)
    partial = folder / f".exit-{os.getpid()}"
    partial.write_text(f"{code}\n", encoding="ascii")
    partial.replace(folder / "exit")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
