"""``--on kubernetes``: a run as objects of a cluster, through the user's own kubectl.

``--set`` has the options of a cluster (``kubernetes_settings.py``). A process in the background follows the run: it
keeps the log of the first pod and, in the end, the exit code.

    python -m paceline.launch.kubernetes_target FOLDER
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from paceline.config import Config, load_config
from paceline.errors import LaunchError
from paceline.launch import background
from paceline.launch.job import JobState, LaunchJob, refuse_options
from paceline.launch.kubectl import Kubectl
from paceline.launch.kubernetes import render as render_manifests
from paceline.launch.kubernetes_settings import read_options
from paceline.launch.manifests import to_text
from paceline.launch.target import TargetMachines

_NOT_HERE = {
    "--array": "it is an option of Slurm",
    "--hosts": "Kubernetes chooses the machines",
    "--port": "each run has a network name of its own: its pods meet at port 29400",
    "--max-requeues": "pods that were preempted start again without a limit; --set max_restarts=N counts failures",
    "--setup": "the pods run what is in the image",
    "--python": "the pods run the Python of the image",
}
_LOOK_S = 0.2
_WRITTEN_S = 60.0  # until the launch has been written down


def machines(job: LaunchJob) -> TargetMachines:
    """Returns what a pod is given. Raises UsageError or ConfigError for what no cluster can run."""
    refuse_options(job, _NOT_HERE)
    options = read_options(job)
    render_manifests(options, config_of(job))
    return replace(given(job), notes=(f"the cluster is {Kubectl(options).check()}",))


def given(job: LaunchJob) -> TargetMachines:
    """Returns what the manifests ask for, which is known without a cluster."""
    gib = read_options(job).resources.memory_gib
    return TargetMachines(where=f"a pod with {gib} GiB", host_bytes=gib * 2.0**30)


def render(job: LaunchJob) -> str:
    """Returns the manifests."""
    return to_text(render_manifests(read_options(job), config_of(job)))


def submit(job: LaunchJob) -> str:
    """Applies the manifests, and follows the run in the background. Returns the id of the process that does."""
    options = read_options(job)
    Kubectl(options).apply(render_manifests(options, config_of(job)))
    (Path(job.folder) / "script").write_text(render(job), encoding="utf-8")
    return background.start(job, [sys.executable, "-m", "paceline.launch.kubernetes_target", job.folder])


def state(job: LaunchJob) -> JobState:
    """Says what the cluster says of the pods."""
    if (code := job.exit_code()) is not None:
        return JobState(kind="ended", words="ended", code=code)
    now = Kubectl(read_options(job)).look()
    words = ", ".join(f"{pod.name} {pod.reason or pod.phase}" for pod in now.pods) or "no pods yet"
    is_followed = background.state(job).kind == "running"  # it has yet to write the rest of the log
    if now.exit_code is not None and not is_followed:
        return JobState(kind="ended", words=words, code=now.exit_code)
    is_running = any(pod.phase == "Running" for pod in now.pods)
    return JobState(kind="running" if is_running else "waiting", words=words)


def cancel(job: LaunchJob) -> None:
    """Removes the objects: the pods are asked to save first. The volume with the runs stays."""
    Kubectl(read_options(job)).cancel()


def config_of(job: LaunchJob) -> Config:
    """Returns the config that the pods get as a file."""
    return load_config(Path(job.config), [*job.overrides, f"name={job.run}"])


def main(folder: Path) -> int:
    """Follows a launch until it has ended; returns its exit code."""
    deadline = time.monotonic() + _WRITTEN_S
    while not (folder / "job.json").is_file():
        if time.monotonic() > deadline:
            raise LaunchError(f"{folder} has no launch")
        time.sleep(_LOOK_S)
    return Kubectl(read_options(LaunchJob.read(folder))).follow()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
