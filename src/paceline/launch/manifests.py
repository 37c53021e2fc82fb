"""The parts that all manifests of a run have: pods, volumes, services, network policies. No torch in here.

A manifest is plain data as kubectl reads it. No manifest has the job's secret in it: pods name the Secret object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import yaml

from paceline.comm.control.wire import SECRET
from paceline.config import Config, dump_yaml
from paceline.launch.kubernetes_options import PAGE_PORT, TENSORBOARD_PORT, KubernetesOptions

Manifest = dict[str, Any]

_TMP, _SHM = "/tmp", "/dev/shm"  # nosec B108  # mount points in a pod, no files of ours
RUNS, CONFIG = "/runs", "/etc/paceline/config.yaml"
PORT = 29400
USER_ID = 10001  # of the image's user
SECRET_KEY = "secret"
_AFTER_GRACE_S = 30  # to end ranks and to write records, once the time to save is over
_HELPER_MEMORY = "512Mi"


class _ManifestDumper(yaml.SafeDumper):
    """Writes a value that occurs twice twice, in place of a mark that refers to it."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _write_text)  # a file inside a manifest keeps its lines


def to_text(manifests: Sequence[Manifest]) -> str:
    """Returns manifests as YAML, one document for each."""
    return yaml.dump_all(manifests, Dumper=_ManifestDumper, sort_keys=False, width=120)


def metadata(options: KubernetesOptions, name: str, component: str, **more: Any) -> Manifest:
    """Returns the metadata of an object of this run; ``labels`` of ``more`` are added to ours."""
    labels = {**labels_of(options, component), **more.pop("labels", {})}
    place = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": name, **place, "labels": labels, **more}


def labels_of(options: KubernetesOptions, component: str) -> dict[str, str]:
    """Returns the labels by which the pods of this run are found. ``job`` is what people select by hand."""
    return {
        "app.kubernetes.io/name": "paceline",
        "app.kubernetes.io/instance": options.name,
        "app.kubernetes.io/component": component,
        "job": options.name,
    }


def train_arguments(options: KubernetesOptions, head: str) -> list[str]:
    """Returns the arguments of ``paceline`` in each pod. ``head`` is the host name of the first one."""
    words = ["train", CONFIG, f"monitor.folder={RUNS}", "--resume", "auto"]
    if options.nodes == 1:
        ranks = [] if options.resources.gpus else [f"parallel.ranks={options.resources.ranks}"]
        return [*words[:3], *ranks, *words[3:]]
    nodes = f"{options.nodes}" if options.min_nodes is None else f"{options.min_nodes}:{options.nodes}"
    where = ["--nnodes", nodes, "--rdzv", f"{head}:{PORT}"]
    return [*words, *where, "--node-ranks", str(options.resources.num_ranks)]


def worker_pod(
    options: KubernetesOptions, config: Config, head: str, *, container: str = "paceline", stays: bool = False
) -> Manifest:
    """Returns the template of the pods that train. ``stays``: a container that ends would be started again."""
    resources, placement = options.resources, options.placement
    wrapper = ["python", "-m", "paceline.launch.pod", "stay"] if stays else []
    devices = {**({resources.gpu_resource: str(resources.gpus)} if resources.gpus else {})}
    devices |= {name: str(count) for name, count in resources.network.items()}
    memory = {"memory": f"{resources.memory_gib}Gi"}
    worker = {
        "name": container,
        "image": options.image,
        "command": [*wrapper, "paceline"],
        "args": train_arguments(options, head),
        "env": _environment(options),
        "resources": {"requests": {"cpu": str(resources.cpus), **memory, **devices}, "limits": {**memory, **devices}},
        "securityContext": _container_security(locks_memory=bool(resources.network)),
        "startupProbe": {**_alive_probe(), "periodSeconds": 5, "failureThreshold": 24},
        "livenessProbe": {**_alive_probe(), "periodSeconds": 30, "failureThreshold": 4},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/paceline", "readOnly": True},
            {"name": "runs", "mountPath": RUNS},
            {"name": "shm", "mountPath": _SHM},
            {"name": "tmp", "mountPath": _TMP},
        ],
    }
    spec = {
        **_pod_security(),
        **({"restartPolicy": "Always"} if stays else {"restartPolicy": "Never"}),
        "terminationGracePeriodSeconds": math.ceil(config.recovery.grace_s) + _AFTER_GRACE_S,
        **({"initContainers": [_wait_for_head(options, head)]} if options.nodes > 1 else {}),
        "containers": [worker],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{options.name}-config"}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{math.ceil(resources.shm_gib * 1024)}Mi"}},
            {"name": "tmp", "emptyDir": {}},
        ],
        **({"nodeSelector": dict(placement.node_selector)} if placement.node_selector else {}),
        **({"schedulerName": "volcano"} if placement.gang == "volcano" else {}),
    }
    if resources.gpus:
        spec["tolerations"] = [{"key": resources.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    annotations = {"scheduling.k8s.io/group-name": options.name} if placement.gang == "volcano" else {}
    return {
        "metadata": {
            "labels": labels_of(options, "worker"),
            **({"annotations": annotations} if annotations and options.kind != "trainjob" else {}),
        },
        "spec": spec,
    }


def _environment(options: KubernetesOptions) -> list[Manifest]:
    # The root of the file system is read-only: what libraries cache goes to /tmp.
    values = {"HOME": _TMP, "USER": "paceline", "MPLCONFIGDIR": f"{_TMP}/matplotlib"}
    values["PACELINE_LAUNCHER"] = "none"  # the arguments say all that variables of a Job or a TrainJob would
    found: list[Manifest] = [{"name": name, "value": value} for name, value in values.items()]
    if options.nodes > 1:
        reference = {"secretKeyRef": {"name": options.secret_name, "key": SECRET_KEY}}
        found.append({"name": SECRET, "valueFrom": reference})
    return found


def _alive_probe() -> Manifest:
    command = ["python", "-m", "paceline.launch.pod", "alive"]
    return {"exec": {"command": command}, "timeoutSeconds": 15}


def _wait_for_head(options: KubernetesOptions, head: str) -> Manifest:
    return {
        "name": "wait-for-first",
        "image": options.image,
        "command": ["python", "-m", "paceline.launch.pod", "wait", head, str(PORT)],
        "resources": {"requests": {"cpu": "100m", "memory": _HELPER_MEMORY}, "limits": {"memory": _HELPER_MEMORY}},
        "securityContext": _container_security(),
    }


def _container_security(*, locks_memory: bool = False) -> Manifest:
    capabilities: Manifest = {"drop": ["ALL"]}
    if locks_memory:
        capabilities["add"] = ["IPC_LOCK"]  # RDMA registers memory that must not be paged out
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}


def _pod_security() -> Manifest:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def config_map(options: KubernetesOptions, config: Config) -> Manifest:
    """Returns the object that has the whole config as a file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(options, f"{options.name}-config", "config"),
        "data": {"config.yaml": dump_yaml(config)},
    }


def volume_claim(options: KubernetesOptions) -> Manifest:
    """Returns the claim of the volume with the run folders."""
    volume = options.volume
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(options, options.claim, "runs"),
        "spec": {
            "accessModes": [volume.access_mode],
            "resources": {"requests": {"storage": f"{volume.size_gib}Gi"}},
            **({} if volume.storage_class is None else {"storageClassName": volume.storage_class}),
        },
    }


def headless_service(options: KubernetesOptions) -> Manifest:
    """Returns the service that gives each pod a name, from the moment that it has an address."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options, options.name, "worker"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels_of(options, "worker"),
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }


def network_policies(options: KubernetesOptions) -> list[Manifest]:
    """Returns who may connect: pods of this run to one another, pods of the namespace to the page."""

    def policy(component: str, ingress: list[Manifest]) -> Manifest:
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(options, f"{options.name}-{component}", component),
            "spec": {
                "podSelector": {"matchLabels": labels_of(options, component)},
                "policyTypes": ["Ingress"],
                "ingress": ingress,
            },
        }

    same_run = {"from": [{"podSelector": {"matchLabels": labels_of(options, "worker")}}]}
    found = [policy("worker", [same_run])]
    if options.shows_page:
        ports = [{"port": PAGE_PORT}, {"port": TENSORBOARD_PORT}]
        found.append(policy("view", [{"from": [{"podSelector": {}}], "ports": ports}]))
    return found


def view(options: KubernetesOptions) -> list[Manifest]:
    """Returns the pod that shows the run folders, the live page and TensorBoard, and its service."""
    commands = {
        "page": (["paceline", "watch", RUNS, "--host", "0.0.0.0", "--port", str(PAGE_PORT), "--no-open"], PAGE_PORT),  # nosec B104
        "tensorboard": (
            ["tensorboard", "--logdir", RUNS, "--host", "0.0.0.0", "--port", str(TENSORBOARD_PORT)],  # nosec B104
            TENSORBOARD_PORT,
        ),
    }
    labels = labels_of(options, "view")
    containers = [
        {
            "name": name,
            "image": options.image,
            "command": command,
            "env": [{"name": "HOME", "value": _TMP}, {"name": "USER", "value": "paceline"}],
            "ports": [{"name": name, "containerPort": port}],
            "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 10},
            "livenessProbe": {"tcpSocket": {"port": port}, "initialDelaySeconds": 30, "periodSeconds": 30},
            "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
            "securityContext": _container_security(),
            "volumeMounts": [{"name": "runs", "mountPath": RUNS, "readOnly": True}, {"name": "tmp", "mountPath": _TMP}],
        }
        for name, (command, port) in commands.items()
    ]
    volumes = [{"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}}, {"name": "tmp", "emptyDir": {}}]
    pod = {"metadata": {"labels": labels}, "spec": {**_pod_security(), "containers": containers, "volumes": volumes}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(options, f"{options.name}-view", "view"),
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options, f"{options.name}-view", "view"),
        "spec": {
            "selector": labels,
            "ports": [{"name": name, "port": port, "targetPort": name} for name, (_, port) in commands.items()],
        },
    }
    return [deployment, service]
