"""A run as objects of Kubernetes: an indexed Job, a StatefulSet, a JobSet, or a TrainJob of Kubeflow. No torch in here.

    render(KubernetesOptions(name="digits", image="paceline:0.1", nodes=4), config)  ->  manifests for kubectl apply

The objects are in ``kubernetes_objects.yaml``, and their values here. No manifest has the job's secret in it: pods name
the Secret object. In each pod runs ``paceline train --nnodes``: one launcher with its ranks. All launchers meet at the
first pod. What follows a failure of a pod depends on its exit code ([Note: exit codes for Kubernetes]).

| kind | what starts pods again | after a preemption |
|---|---|---|
| job | the Job, each pod by itself; the other pods wait for it | the Job does not count it |
| statefulset | the kubelet, each container in its pod | the container starts again |
| jobset | JobSet, all pods together | RestartJobSetAndIgnoreMaxRestarts |
| trainjob | the JobSet that Kubeflow makes of our TrainingRuntime | the same |

[Note: exit codes for Kubernetes] 75 (preempted, saved) starts the pod again, and is not counted. 2 (refused) and 77
(gave up) end the run: another start would change nothing. Everything else counts as a failure and starts the pod again:
1 also comes from pods that lost the first one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paceline.bounded_yaml import load_shipped
from paceline.comm.control.wire import SECRET
from paceline.config import Config, dump_yaml
from paceline.errors import ConfigError
from paceline.health.exit_codes import NO_PROGRESS, PREEMPTED, REFUSED
from paceline.launch.kubernetes_options import KubernetesOptions, check_options, sized
from paceline.launch.pod_patch import WORKER, merge, patch_problems

Manifest = dict[str, Any]

RUNS, CONFIG = "/runs", "/etc/paceline/config.yaml"
PORT = 29400
USER_ID = 10001  # of the image's user
_AFTER_GRACE_S = 30  # to end ranks and to write records, once the time to save is over
_VALUE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
_OF_ALL_PODS = ("imagePullSecrets", "serviceAccountName")
# Kubeflow knows the job that trains by the name node.
_WORKERS = {"jobset": "workers", "trainjob": "node"}


class _ManifestDumper(yaml.SafeDumper):
    """Writes a value that occurs twice twice, in place of a mark that refers to it."""

    def ignore_aliases(self, _: object) -> bool:
        return True

    def write_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _ManifestDumper.write_text)  # a file inside a manifest keeps its lines


def to_text(manifests: Sequence[Manifest]) -> str:
    """Returns manifests as YAML, one document for each."""
    return yaml.dump_all(manifests, Dumper=_ManifestDumper, sort_keys=False, width=120)


def render(options: KubernetesOptions, config: Config) -> list[Manifest]:
    """Returns all objects of a run in the order in which kubectl makes them. Raises ConfigError with all problems."""
    check_options(options, config)
    options = sized(options, config)
    values = _values(options, config)
    values["init_containers"] = [fill("init_container", values)] if options.nodes > 1 else None
    values["pod"] = _patched_pod(options, values)
    values["job_set_spec"] = fill("job_set_spec", values)
    wanted = {
        "config_map": True,
        "volume_claim": options.claim is None,
        "worker_policy": True,
        "view_policy": options.shows_page,
        "service": options.kind in ("job", "statefulset"),  # the others make their own
        "pod_group": options.gang == "volcano" and options.kind != "trainjob",
        "runtime": options.kind == "trainjob",
        options.kind: True,
        **dict.fromkeys(("view", "view_service"), options.shows_page),
    }
    manifests = {name: fill(name, values) for name, is_wanted in wanted.items() if is_wanted}
    if options.shows_page:  # its pod runs the same image, and trains nothing
        shared = {key: value for key, value in options.patch.get("spec", {}).items() if key in _OF_ALL_PODS}
        template = manifests["view"]["spec"]["template"]
        template["spec"] = merge(template["spec"], shared)
    return list(manifests.values())


def _patched_pod(options: KubernetesOptions, values: Mapping[str, Any]) -> Manifest:
    pod: Manifest = merge(fill("pod", values), options.patch)
    if problems := list(patch_problems(pod, values["worker_labels"])):
        raise ConfigError(problems, source="--patch")
    for container in pod["spec"].get("containers", []):
        if container["name"] == WORKER and options.kind == "trainjob":
            container["name"] = "node"  # by which Kubeflow knows the container that trains
    return pod


def secret_object(options: KubernetesOptions, secret: str) -> Manifest:
    """Returns the object that has the job's secret, which is in no file."""
    values = {**_own_values(options), "secret_labels": labels_of(options, "secret"), "secret": secret}
    return dict(fill("secret", values))


def labels_of(options: KubernetesOptions, component: str) -> dict[str, str]:
    """Returns the labels by which the pods of this run are found. ``job`` is what people select by hand."""
    known = {"name": "paceline", "instance": options.name, "component": component}
    return {**{f"app.kubernetes.io/{key}": value for key, value in known.items()}, "job": options.name}


def fill(name: str, values: Mapping[str, Any]) -> Any:
    """Returns an object of ``kubernetes_objects.yaml`` with its values; a key or an item that has none is left out."""

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            found = {key: filled(value) for key, value in part.items()}
            return {key: value for key, value in found.items() if value is not None}
        if isinstance(part, list):
            return [value for value in map(filled, part) if value is not None]
        if not isinstance(part, str):
            return part
        whole = _VALUE.fullmatch(part)
        if whole is not None and whole[1]:
            return values[whole[1]]
        return _VALUE.sub(lambda found: str(values[found[1] or found[2]]), part)

    return filled(_objects()[name])


@cache
def _objects() -> Any:
    return load_shipped(Path(__file__).with_name("kubernetes_objects.yaml").read_text(encoding="utf-8"))


def _own_values(options: KubernetesOptions) -> dict[str, Any]:
    found = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    return found | {name: getattr(options, name) for name in ("claim_name", "fewest", "num_ranks", "secret_name")}


def _values(options: KubernetesOptions, config: Config) -> dict[str, Any]:
    kind, is_kueue, is_volcano = options.kind, options.gang == "kueue", options.gang == "volcano"
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if is_kueue else {}
    scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.scrape_from}}}
    labels = {f"{each}_labels": labels_of(options, each) for each in ("config", "runs", "worker", "view", "runtime")}
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    return {"preempted": PREEMPTED, "refused": REFUSED, "no_progress": NO_PROGRESS} | {
        **_own_values(options),
        **labels,
        **_pod_values(options, config),
        "workload_labels": labels["worker_labels"] | queue,
        "config": dump_yaml(config),
        "scraper": scraper if options.scrape_from else None,
        "group_policy": {"volcano": {}} if is_volcano else None,
        "backoff": options.max_restarts * options.nodes,
        "job_limit_s": options.time_limit_s if kind == "jobset" else None,
        # Pods that never found a machine in an elastic run need not come any more.
        "success_policy": {"rules": [{"succeededIndexes": "0"}]} if options.min_nodes is not None else None,
        # Kueue lets a run go once all of its pods have a place.
        "suspend": True if is_kueue else None,
        "job_set_suspend": True if is_kueue and kind == "jobset" else None,
        "workers": _WORKERS.get(kind),
        "step_metadata": step if kind == "trainjob" else None,
    }


def _pod_values(options: KubernetesOptions, config: Config) -> dict[str, Any]:
    kind, shm_gib = options.kind, options.shm_gib or 0
    head = "-".join([options.name, *([_WORKERS[kind], "0"] if kind in _WORKERS else []), "0"]) + f".{options.name}"
    stays = kind == "statefulset"  # where a container that ends would be started again
    is_volcano = options.gang == "volcano"
    devices = {options.gpu_resource: str(options.gpus)} if options.gpus else {}
    devices |= {name: str(count) for name, count in options.network.items()}
    limits = {"memory": f"{options.memory_gib}Gi", **devices}
    secret = {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": options.secret_name, "key": "secret"}}}
    toleration = {"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    group = {"scheduling.k8s.io/group-name": options.name}
    words = ["train", CONFIG, f"monitor.folder={RUNS}"]
    if options.nodes == 1 and not options.gpus:
        words.append(f"parallel.ranks={options.ranks}")
    words += ["--resume", "auto"]
    if options.nodes > 1:
        nodes = f"{options.nodes}" if options.min_nodes is None else f"{options.min_nodes}:{options.nodes}"
        words += ["--nnodes", nodes, "--rdzv", f"{head}:{PORT}", "--node-ranks", str(options.num_ranks)]
    return {"runs": RUNS, "port": PORT, "user": USER_ID, "head": head} | {
        "container": WORKER,
        "command": [*(["python", "-m", "paceline.launch.pod", "stay"] if stays else []), "paceline"],
        "arguments": words,
        "secret_variable": secret if options.nodes > 1 else None,
        "requests": {"cpu": str(options.cpus), **limits},
        "limits": limits,
        "restart_policy": "Always" if stays else "Never",
        "grace_s": math.ceil(config.recovery.grace_s) + _AFTER_GRACE_S,
        "shm_mib": math.ceil(shm_gib * 1024),
        "annotations": group if is_volcano and kind != "trainjob" else None,
        "scheduler": "volcano" if is_volcano else None,
        "tolerations": [toleration] if options.gpus else None,
        "subdomain": options.name if kind == "job" else None,
    }
