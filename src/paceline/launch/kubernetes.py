"""A run as objects of Kubernetes: an indexed Job, a StatefulSet, a JobSet, or a TrainJob of Kubeflow. No torch in here.

    render(KubernetesOptions(name="digits", image="paceline:0.1", nodes=4), config)  ->  manifests for kubectl apply

In each pod runs ``paceline train --nnodes``: one launcher with its ranks. All launchers meet at the first pod. What
follows a failure of a pod depends on its exit code ([Note: exit codes for Kubernetes]).

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

from paceline.config import Config
from paceline.health.exit_codes import NO_PROGRESS, PREEMPTED, REFUSED
from paceline.launch import manifests
from paceline.launch.kubernetes_options import KubernetesOptions, check_options
from paceline.launch.manifests import Manifest

_KEEP_S = 7 * 24 * 3600  # how long the objects of a finished run stay, with their logs
_WORKERS = "workers"
_TRAINER_NODE = "node"  # Kubeflow knows the job and the container that train by this name


def render(options: KubernetesOptions, config: Config) -> list[Manifest]:
    """Returns all objects of a run in the order in which kubectl makes them. Raises ConfigError with all problems."""
    check_options(options, config)
    workloads = {"job": _job, "statefulset": _stateful_set, "jobset": _job_set, "trainjob": _train_job}
    found = [manifests.config_map(options, config)]
    if options.volume.claim is None:
        found.append(manifests.volume_claim(options))
    found += manifests.network_policies(options)
    if options.kind in ("job", "statefulset"):  # the others make their own
        found.append(manifests.headless_service(options))
    if options.placement.gang == "volcano" and options.kind != "trainjob":
        found.append(_pod_group(options))
    found += workloads[options.kind](options, config)
    if options.shows_page:
        found += manifests.view(options)
    return found


def _job(options: KubernetesOptions, config: Config) -> list[Manifest]:
    rules: list[Manifest] = [
        {"action": "Ignore", "onExitCodes": _codes(PREEMPTED)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": _codes(REFUSED, NO_PROGRESS)},
    ]
    pod = manifests.worker_pod(options, config, head=f"{options.name}-0.{options.name}")
    pod["spec"]["subdomain"] = options.name
    spec = {
        **_indexed(options, rules, backoff=options.max_restarts * options.nodes),
        **({"activeDeadlineSeconds": options.time_limit_s} if options.time_limit_s else {}),
        "ttlSecondsAfterFinished": _KEEP_S,
        # Pods that never found a machine in an elastic run need not come any more.
        **({"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if options.min_nodes is not None else {}),
        **_suspended(options),
        "template": pod,
    }
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": _workload(options), "spec": spec}]


def _stateful_set(options: KubernetesOptions, config: Config) -> list[Manifest]:
    pod = manifests.worker_pod(options, config, head=f"{options.name}-0.{options.name}", stays=True)
    spec = {
        "serviceName": options.name,
        "replicas": options.nodes,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": manifests.labels_of(options, "worker")},
        "template": pod,
    }
    return [{"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": _workload(options), "spec": spec}]


def _job_set(options: KubernetesOptions, config: Config) -> list[Manifest]:
    head = f"{options.name}-{_WORKERS}-0-0.{options.name}"
    pod = manifests.worker_pod(options, config, head=head)
    spec = {**_job_set_spec(options, _WORKERS, pod), **_suspended(options)}
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _workload(options), "spec": spec}]


def _train_job(options: KubernetesOptions, config: Config) -> list[Manifest]:
    """Returns a TrainingRuntime with our pods, and the TrainJob that uses it."""
    head = f"{options.name}-{_TRAINER_NODE}-0-0.{options.name}"
    pod = manifests.worker_pod(options, config, head=head, container=_TRAINER_NODE)
    template = _job_set_spec(options, _TRAINER_NODE, pod)
    (job,) = template["replicatedJobs"]
    job["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": manifests.metadata(options, options.name, "runtime"),
        "spec": {
            "mlPolicy": {"numNodes": options.nodes, "torch": {}},
            **({"podGroupPolicy": {"volcano": {}}} if options.placement.gang == "volcano" else {}),
            "template": {"spec": template},
        },
    }
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": options.name},
        "trainer": {"numNodes": options.nodes, "numProcPerNode": options.resources.num_ranks},
        **({"activeDeadlineSeconds": options.time_limit_s} if options.time_limit_s else {}),
        **_suspended(options),
    }
    job_of_runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _workload(options),
        "spec": spec,
    }
    return [runtime, job_of_runtime]


def _job_set_spec(options: KubernetesOptions, workers: str, pod: Manifest) -> Manifest:
    """Returns the spec of a JobSet with one indexed Job, all of whose pods start again together.

    A JobSet does not see exit codes, but why its Job failed. So the Job fails by a rule of its own for each code, and
    the JobSet tells the rules apart by their messages.
    """
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules: list[Manifest] = [
        {"action": "FailJob", "onExitCodes": _codes(PREEMPTED)},
        disrupted,
        {"action": "FailJob", "onExitCodes": _codes(REFUSED, NO_PROGRESS)},
    ]
    deadline = {"activeDeadlineSeconds": options.time_limit_s} if options.time_limit_s else {}
    job = {**_indexed(options, rules, backoff=0), **(deadline if options.kind == "jobset" else {}), "template": pod}
    by_rule = {"onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": options.max_restarts,
            "rules": [
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    **by_rule,
                    "onJobFailureMessagePatterns": [f"exit code {PREEMPTED} ", "condition DisruptionTarget "],
                },
                {"name": "refused", "action": "FailJobSet", **by_rule},
                {"name": "late", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
            ],
        },
        "replicatedJobs": [{"name": workers, "replicas": 1, "template": {"spec": job}}],
    }


def _indexed(options: KubernetesOptions, rules: list[Manifest], *, backoff: int) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        "backoffLimit": backoff,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
    }


def _codes(*codes: int) -> Manifest:
    return {"operator": "In", "values": list(codes)}


def _workload(options: KubernetesOptions) -> Manifest:
    queue = {"kueue.x-k8s.io/queue-name": options.placement.queue} if options.placement.gang == "kueue" else {}
    return manifests.metadata(options, options.name, "worker", labels=queue)


def _suspended(options: KubernetesOptions) -> Manifest:
    """Kueue lets a run go once all of its pods have a place."""
    return {"suspend": True} if options.placement.gang == "kueue" else {}


def _pod_group(options: KubernetesOptions) -> Manifest:
    queue = {} if options.placement.queue is None else {"queue": options.placement.queue}
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": manifests.metadata(options, options.name, "worker"),
        "spec": {"minMember": options.fewest, **queue},
    }
