"""Puts a run on the cluster that ``kubectl`` talks to, follows it, and ends it. No torch in here.

The job's secret is made here and goes to kubectl's standard input: it is in no file and on no command line.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import LaunchError, UsageError
from paceline.health.exit_codes import DONE, FAILED, PREEMPTED
from paceline.launch.kubernetes_options import KubernetesOptions
from paceline.launch.manifests import SECRET_KEY, Manifest, labels_of, metadata
from paceline.terminal import echo
from paceline.untrusted import parse_json_object

_LOOK_S = 2.0
_RESOURCES = {
    "job": "job.batch",
    "statefulset": "statefulset.apps",
    "jobset": "jobset.jobset.x-k8s.io",
    "trainjob": "trainjob.trainer.kubeflow.org",
}
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """What a pod that trains is doing. ``exit_code``: of its container's last end; None: it has not ended."""

    name: str
    phase: str
    exit_code: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """Where a run on the cluster stands. ``exit_code``: None until it has ended."""

    exit_code: int | None
    pods: tuple[PodState, ...]


class Kubectl:
    """The user's kubectl, with the user's own cluster and credentials. ``program``: its path."""

    def __init__(self, options: KubernetesOptions, program: str = "kubectl") -> None:
        found = shutil.which(program)
        if found is None:
            raise LaunchError(
                f"{program} is not installed here\n  it applies the manifests and follows the run\n"
                "  install it, or print the manifests with --dry-run and apply them elsewhere"
            )
        self._options = options
        place = [] if options.namespace is None else ["--namespace", options.namespace]
        self._command = [found, *place]

    def check(self) -> str:
        """Returns the name of the cluster. Raises LaunchError where it does not answer, or takes no such run."""
        found = self._run(["config", "current-context"])
        if found.returncode:
            raise LaunchError(
                f"kubectl has no cluster: {found.stderr.strip().removeprefix('error: ')}\n  it applies the manifests\n"
                "  choose one: kubectl config use-context NAME; kubectl config get-contexts lists them"
            )
        context = found.stdout.strip()
        kind = _RESOURCES[self._options.kind]
        done = self._run(["auth", "can-i", "create", kind])
        if done.stdout.strip() != "yes":
            said = (done.stderr or done.stdout).strip()
            raise LaunchError(
                f"the cluster {context} lets you create no {kind}: {said}\n  a run is such an object\n"
                "  ask for the right, use another namespace or --set kind, or install what serves that kind"
            )
        return context

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Makes all objects, and before them the job's secret where several nodes need one and there is none."""
        if self._options.nodes > 1 and not self._exists("secret", self._options.secret_name):
            if self._options.secret is not None:
                raise UsageError(
                    f"there is no Secret {self._options.secret} in the cluster\n  the nodes prove themselves with it\n"
                    f"  make it: kubectl create secret generic {self._options.secret} "
                    f'--from-literal={SECRET_KEY}="$(openssl rand -hex 32)"'
                )
            self._call(["create", "--filename", "-"], given=json.dumps(self._new_secret()))
        whole = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self._call(["apply", "--filename", "-"], given=json.dumps(whole))

    def look(self) -> ClusterRun:
        """Returns where the run stands."""
        options = self._options
        kind = _RESOURCES[options.kind]
        selector = ",".join(f"{key}={value}" for key, value in labels_of(options, "worker").items())
        pods = self._get(["pods", "--selector", selector]).get("items", [])
        states = tuple(sorted((_pod_state(pod) for pod in pods), key=lambda pod: pod.name))
        return ClusterRun(exit_code=exit_code_of(self._get([kind, options.name]), states), pods=states)

    def follow(self, tell: Callable[[str], None] = echo, *, look_s: float = _LOOK_S) -> int:
        """Shows the log of the first pod until the run has ended; returns its exit code."""
        shown: set[str] = set()
        waits_for = ""
        while True:
            now = self.look()
            first = next((pod for pod in now.pods if pod.phase in ("Running", "Succeeded", "Failed")), None)
            if first is not None and first.name not in shown:
                shown.add(first.name)
                subprocess.run([*self._command, "logs", "--follow", f"pod/{first.name}"], check=False)
                continue
            if now.exit_code is not None:
                return now.exit_code
            waiting = ", ".join(f"{pod.name}: {pod.reason or pod.phase}" for pod in now.pods) or "no pods yet"
            if waiting != waits_for:
                tell(f"paceline: {self._options.name}: {waiting}")
                waits_for = waiting
            time.sleep(look_s)

    def cancel(self) -> None:
        """Asks the pods to save and to end, and removes the run's objects; its volume and its secret stay."""
        chosen = "configmap,service,networkpolicy,deployment"
        options = self._options
        kinds = _RESOURCES[options.kind]
        if options.kind == "trainjob":
            kinds += ",trainingruntime.trainer.kubeflow.org"
        if options.placement.gang == "volcano" and options.kind != "trainjob":
            kinds += ",podgroup.scheduling.volcano.sh"
        selector = f"app.kubernetes.io/instance={options.name}"
        self._call(["delete", f"{kinds},{chosen}", "--selector", selector, "--ignore-not-found"])

    def _new_secret(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata(self._options, self._options.secret_name, "secret"),
            "stringData": {SECRET_KEY: secrets.token_hex(_SECRET_BYTES)},
        }

    def _exists(self, kind: str, name: str) -> bool:
        found = self._call(["get", kind, name, "--ignore-not-found", "--output", "name"])
        return bool(found.strip())

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
    """Returns the exit code of a run whose workload is done or has failed; None while it goes on.

    A StatefulSet is never done: its pods stay behind a run that is (``pod.py``), and it ends by ``cancel``.
    """
    conditions = {each.get("type") for each in _inside(workload, "status").get("conditions", []) if _holds(each)}
    if conditions & {"Complete", "Completed", "SuccessCriteriaMet"}:
        return DONE
    if "Failed" in conditions:
        codes = [pod.exit_code for pod in pods if pod.exit_code not in (None, DONE, PREEMPTED)]
        return next((code for code in codes if code != FAILED), FAILED) if codes else FAILED
    return None


def _holds(condition: dict[str, Any]) -> bool:
    return condition.get("status") == "True"


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
        if condition.get("type") == "PodScheduled" and not _holds(condition):
            reason = str(condition.get("message", reason))
    return PodState(
        name=str(_inside(pod, "metadata").get("name")), phase=str(status.get("phase")), exit_code=code, reason=reason
    )
