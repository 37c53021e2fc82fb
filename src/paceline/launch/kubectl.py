"""``--on kubernetes``: a run as objects of a cluster, through the user's own kubectl. No torch in here.

``--set`` has the options of a cluster (``kubernetes_options.py``). The job's secret is made here and goes to kubectl's
standard input: it is in no file and on no command line. ``python -m paceline.launch.kubectl FOLDER`` in the background
follows the run: it keeps the log of the first pod and, in the end, the exit code.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import Config, load_config
from paceline.errors import LaunchError, UsageError
from paceline.health.exit_codes import DONE, FAILED, PREEMPTED
from paceline.launch import background
from paceline.launch.job import JobState, LaunchJob, TargetMachines, refuse_options
from paceline.launch.kubernetes import Manifest, labels_of, secret_object, to_text
from paceline.launch.kubernetes import render as render_manifests
from paceline.launch.kubernetes_options import KubernetesOptions, read_options, sized
from paceline.terminal import echo
from paceline.untrusted import parse_json_object

_LOOK_S = 2.0
_GROUPS = {"job": "batch", "statefulset": "apps", "jobset": "jobset.x-k8s.io", "trainjob": "trainer.kubeflow.org"}
_RESOURCES = {kind: f"{kind}.{group}" for kind, group in _GROUPS.items()}
_SECRET_BYTES = 32
_NOT_HERE = {
    "--hosts": "Kubernetes chooses the machines",
    "--port": "each run has a network name of its own: its pods meet at port 29400",
    "--max-requeues": "pods that were preempted start again without a limit; --set max_restarts=N counts failures",
    "--setup": "the pods run what is in the image",
    "--python": "the pods run the Python of the image",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """What a pod that trains is doing. ``exit_code``: of its container's last end; None: it has not ended."""

    name: str
    phase: str
    exit_code: int | None
    reason: str = ""


class Kubectl:
    """The user's kubectl, with the user's own cluster and credentials. ``program``: its path."""

    def __init__(self, options: KubernetesOptions, program: str = "kubectl") -> None:
        if (found := shutil.which(program)) is None:
            what = f"{program} is not installed here"
            fix = "install it, or print the manifests with --dry-run and apply them elsewhere"
            raise LaunchError(f"{what}\n  it applies the manifests and follows the run\n  {fix}")
        self._options = options
        self._command = [found, *([] if options.namespace is None else ["--namespace", options.namespace])]

    def check(self) -> str:
        """Returns the name of the cluster. Raises LaunchError where it does not answer, or takes no such run."""
        found = self._run(["config", "current-context"])
        if found.returncode:
            what = f"kubectl has no cluster: {found.stderr.strip().removeprefix('error: ')}"
            fix = "choose one: kubectl config use-context NAME; kubectl config get-contexts lists them"
            raise LaunchError(f"{what}\n  it applies the manifests\n  {fix}")
        context, kind = found.stdout.strip(), _RESOURCES[self._options.kind]
        done = self._run(["auth", "can-i", "create", kind])
        if done.stdout.strip() != "yes":
            said = (done.stderr or done.stdout).strip()
            what = f"the cluster {context} lets you create no {kind}: {said}"
            fix = "ask for the right, use another namespace or --set kind, or install what serves that kind"
            raise LaunchError(f"{what}\n  a run is such an object\n  {fix}")
        return context

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Makes all objects, and before them the job's secret where several nodes need one and there is none.

        The cluster is asked first whether it would take all of them: a patch may have what it does not know.
        """
        whole = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self._call(["apply", "--dry-run=server", "--filename", "-"], given=whole)
        asked = ["get", "secret", self._options.secret_name, "--ignore-not-found", "--output", "name"]
        if self._options.nodes > 1 and not self._call(asked).strip():
            if self._options.secret is not None:
                secret, rule = self._options.secret, "the nodes prove themselves with it"
                what = f"there is no Secret {secret} in the cluster"
                fix = f"make it: kubectl create secret generic {secret}"
                raise UsageError(f'{what}\n  {rule}\n  {fix} --from-literal=secret="$(openssl rand -hex 32)"')
            made = secret_object(self._options, secrets.token_hex(_SECRET_BYTES))
            self._call(["create", "--filename", "-"], given=json.dumps(made))
        self._call(["apply", "--filename", "-"], given=whole)

    def look(self) -> tuple[int | None, list[PodState]]:
        """Returns the exit code of the run, None until it has ended, and its pods."""
        selector = ",".join(f"{key}={value}" for key, value in labels_of(self._options, "worker").items())
        pods = self._get(["pods", "--selector", selector]).get("items", [])
        states = sorted((_pod_state(pod) for pod in pods), key=lambda pod: pod.name)
        return exit_code_of(self._get([_RESOURCES[self._options.kind], self._options.name]), states), states

    def follow(self, tell: Callable[[str], None] = echo, *, look_s: float = _LOOK_S) -> int:
        """Shows the log of the first pod until the run has ended; returns its exit code."""
        shown: set[str] = set()
        waits_for = ""
        while True:
            code, pods = self.look()
            first = next((pod for pod in pods if pod.phase in ("Running", "Succeeded", "Failed")), None)
            if first is not None and first.name not in shown:
                shown.add(first.name)
                subprocess.run([*self._command, "logs", "--follow", f"pod/{first.name}"], check=False)
                continue
            if code is not None:
                return code
            waiting = ", ".join(f"{pod.name}: {pod.reason or pod.phase}" for pod in pods) or "no pods yet"
            if waiting != waits_for:
                tell(f"paceline: {self._options.name}: {waiting}")
                waits_for = waiting
            time.sleep(look_s)

    def cancel(self) -> None:
        """Asks the pods to save and to end, and removes the run's objects; its volume and its secret stay."""
        options = self._options
        kinds = _RESOURCES[options.kind]
        if options.kind == "trainjob":
            kinds += ",trainingruntime.trainer.kubeflow.org"
        elif options.gang == "volcano":
            kinds += ",podgroup.scheduling.volcano.sh"
        kinds += ",configmap,service,networkpolicy,deployment"
        selector = f"app.kubernetes.io/instance={options.name}"
        self._call(["delete", kinds, "--selector", selector, "--ignore-not-found"])

    def _get(self, words: Sequence[str]) -> dict[str, Any]:
        return parse_json_object(self._call(["get", *words, "--output", "json"]))

    def _call(self, words: Sequence[str], given: str | None = None) -> str:
        done = self._run(words, given)
        if done.returncode:
            raise LaunchError(f"kubectl {words[0]} failed with exit code {done.returncode}\n  {done.stderr.strip()}")
        return done.stdout

    def _run(self, words: Sequence[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._command, *words], input=given, capture_output=True, text=True, check=False)


def exit_code_of(workload: dict[str, Any], pods: Sequence[PodState]) -> int | None:
    """Returns the exit code of a run that has ended, else None. A StatefulSet ends by ``cancel`` alone (``pod.py``)."""
    found = _inside(workload, "status").get("conditions", [])
    conditions = {each.get("type") for each in found if each.get("status") == "True"}
    if conditions & {"Complete", "Completed", "SuccessCriteriaMet"}:
        return DONE
    if "Failed" in conditions:
        codes = [pod.exit_code for pod in pods if pod.exit_code not in (None, DONE, PREEMPTED)]
        return next((code for code in codes if code != FAILED), FAILED) if codes else FAILED
    return None


def _inside(found: dict[str, Any], key: str) -> dict[str, Any]:
    inner = found.get(key)
    return inner if isinstance(inner, dict) else {}


def _pod_state(pod: dict[str, Any]) -> PodState:
    status = _inside(pod, "status")
    code: int | None = None
    reason = str(status.get("reason", ""))
    for container in status.get("containerStatuses", []):
        now, before = _inside(container, "state"), _inside(container, "lastState")
        ended = _inside(now, "terminated") or _inside(before, "terminated")
        code = ended.get("exitCode", code)
        reason = str(_inside(now, "waiting").get("reason", reason))
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            reason = str(condition.get("message", reason))
    name = str(_inside(pod, "metadata").get("name"))
    return PodState(name=name, phase=str(status.get("phase")), exit_code=code, reason=reason)


def machines(job: LaunchJob) -> TargetMachines:
    """Returns what a pod is given. Raises UsageError or ConfigError for what no cluster can run."""
    refuse_options(job, _NOT_HERE)
    _manifests(job)
    return replace(given(job), notes=(f"the cluster is {Kubectl(read_options(job)).check()}",))


def given(job: LaunchJob) -> TargetMachines:
    """Returns what the manifests ask for, which is known without a cluster."""
    gib = sized(read_options(job), _config(job)).memory_gib or 0
    return TargetMachines(where=f"a pod with {gib} GiB", host_bytes=gib * 2.0**30)


def render(job: LaunchJob) -> str:
    return to_text(_manifests(job))


def submit(job: LaunchJob) -> str:
    manifests = _manifests(job)
    Kubectl(read_options(job)).apply(manifests)
    (Path(job.folder) / "script").write_text(to_text(manifests), encoding="utf-8")
    return background.hold(job, "paceline.launch.kubectl")


def state(job: LaunchJob) -> JobState:
    if (code := job.exit_code()) is not None:
        return JobState(kind="ended", words="ended", code=code)
    code, pods = Kubectl(read_options(job)).look()
    words = ", ".join(f"{pod.name} {pod.reason or pod.phase}" for pod in pods) or "no pods yet"
    is_followed = background.state(job).kind == "running"  # it has yet to write the rest of the log
    if code is not None and not is_followed:
        return JobState(kind="ended", words=words, code=code)
    is_running = any(pod.phase == "Running" for pod in pods)
    return JobState(kind="running" if is_running else "waiting", words=words)


def cancel(job: LaunchJob) -> None:
    """Removes the objects: the pods are asked to save first. The volume with the runs stays."""
    Kubectl(read_options(job)).cancel()


def _config(job: LaunchJob) -> Config:
    return load_config(Path(job.config), [*job.overrides, f"name={job.run}"])  # the pods get it as a file


def _manifests(job: LaunchJob) -> list[Manifest]:
    return render_manifests(read_options(job), _config(job))


if __name__ == "__main__":
    sys.exit(Kubectl(read_options(LaunchJob.read(Path(sys.argv[1])))).follow())
