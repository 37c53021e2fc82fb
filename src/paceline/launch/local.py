"""``--on local``: this machine, in the background; the run outlives the terminal."""

from __future__ import annotations

from paceline.cluster.detect import detect_machine
from paceline.errors import UsageError
from paceline.launch.background import cancel as cancel
from paceline.launch.background import start
from paceline.launch.background import state as state
from paceline.launch.job import LaunchJob, refuse_options, refuse_settings, shell
from paceline.launch.target import TargetMachines

_NOT_HERE = {
    "--array": "it is an option of Slurm",
    "--time": "this machine has no time limits",
    "--queue": "this machine has no queues",
    "--hosts": "it is this machine alone: --on ssh is for others",
    "--port": "the ranks of one machine meet in a folder, without a port",
    "--max-requeues": "nothing queues the run again: it leaves with code 75",
    "--setup": "the run has the environment of this shell",
}


def machines(job: LaunchJob) -> TargetMachines:
    """Returns what this machine has. Raises UsageError for several nodes, or more GPUs than there are."""
    refuse_options(job, _NOT_HERE)
    refuse_settings(job, ())
    if job.nodes != 1:
        raise UsageError(f"--nodes {job.nodes} with --on local\n  it is one machine\n  use --on ssh --hosts a,b")
    here = detect_machine(with_gpus=job.gpus > 0)
    if job.gpus > len(here.gpus):
        raise UsageError(
            f"--gpus-per-node {job.gpus}, and this machine has {len(here.gpus)}\n  every rank needs a GPU of its own"
        )
    memory = min(here.gpu_memory_bytes, default=None)
    return TargetMachines(where="this machine", device_bytes=memory, host_bytes=here.memory_bytes)


def render(job: LaunchJob) -> str:
    """Returns the command."""
    return f"{shell(job.command())}\n"


def submit(job: LaunchJob) -> str:
    """Starts it in the background."""
    return start(job, job.command())
