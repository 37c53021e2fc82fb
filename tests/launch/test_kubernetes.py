"""Manifests of Kubernetes: valid in strict mode whatever is asked for, safe, and right after a failure."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
import yaml
from hypothesis import given
from hypothesis import strategies as st
from manifest_schemas import Manifest, check_pod, pods_of, validate

from paceline.cli.app import app
from paceline.config import Config, config_from_dict, load_config
from paceline.errors import ConfigError
from paceline.health.exit_codes import MEANINGS, NO_PROGRESS, PREEMPTED, REFUSED
from paceline.launch.kubernetes import render, to_text
from paceline.launch.kubernetes_options import Gang, Kind, KubernetesOptions, sized
from paceline.launch.pod_patch import read_patch

ROOT = Path(__file__).parents[2]
KINDS: tuple[Kind, ...] = get_args(Kind)
ASKED = KubernetesOptions(name="digits", image="paceline:0.1", nodes=2)
PATCH = read_patch((ROOT / "deploy/kubernetes/examples/patch.yaml").read_text(encoding="utf-8"))


def a_config(**train: Any) -> Config:
    values = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"global_batch": 64, "steps": 10, **train}}
    return config_from_dict(values)


def test_the_schemas_are_strict() -> None:
    service = render(ASKED, a_config())[-1]
    validate(service)
    service["spec"]["prots"] = service["spec"].pop("ports")
    with pytest.raises(Exception, match="prots"):
        validate(service)


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("PodGroup", {"minMembers": 2}, "minMembers"),
        ("PodGroup", {"minMember": "two"}, "is not of type 'integer'"),
        ("JobSet", {"failurePolicy": {"maxRestart": 3}}, "maxRestart"),
        ("JobSet", {"startupPolicy": {"startupPolicyOrder": "AtOnce"}}, "'AtOnce' is not one of"),
        ("TrainJob", {"trainer": {"nodes": 2}}, "nodes"),
        ("TrainJob", {"runtimeRef": {"kind": "TrainingRuntime"}}, "'name' is a required property"),
        ("TrainingRuntime", {"mlPolicy": {"numNodes": 2, "torch": {"nproc": 2}}}, "nproc"),
    ],
)
def test_the_schemas_of_foreign_kinds_are_strict(kind: str, changed: Manifest, words: str) -> None:
    options = (replace(ASKED, gang="volcano"), replace(ASKED, kind="jobset"), replace(ASKED, kind="trainjob"))
    manifests = [each for asked in options for each in render(asked, a_config()) if each["kind"] == kind]
    validate(manifests[0])
    manifests[0]["spec"] |= changed
    with pytest.raises(Exception, match=words):
        validate(manifests[0])


def worker_of(manifests: list[Manifest]) -> Manifest:
    (pod,) = [
        pod
        for each in manifests
        if each["kind"] in ("Job", "StatefulSet", "JobSet", "TrainingRuntime")
        for pod in pods_of(each)
    ]
    return pod


NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@st.composite
def all_options(draw: st.DrawFn) -> KubernetesOptions:
    most = draw(st.sampled_from((1, 2, 4)))
    gang: Gang = draw(st.sampled_from(get_args(Gang)))
    kind: Kind = draw(st.sampled_from(KINDS))
    gpus = draw(st.sampled_from((0, 1, 8)))
    limit = draw(st.none() | st.integers(1, 10**6))
    return KubernetesOptions(
        name=draw(NAMES),
        image=draw(st.sampled_from(("paceline:0.1", "registry.example.com:5000/a/b@sha256:" + "0" * 64))),
        kind=kind,
        nodes=most,
        min_nodes=draw(st.sampled_from((None, most))),
        namespace=draw(st.none() | NAMES),
        gpus=gpus,
        ranks=draw(st.sampled_from((1, 2))),
        memory_gib=draw(st.none() | st.integers(8, 2048)),
        shm_gib=draw(st.none() | st.floats(1.5, 7)),
        network=draw(st.dictionaries(st.sampled_from(("rdma/hca", "vpc.amazonaws.com/efa")), st.integers(1, 32))),
        gang=gang,
        queue=None if gang == "none" else draw(NAMES),
        claim=draw(st.none() | NAMES),
        storage_class=draw(st.none() | NAMES),
        secret=draw(st.none() | NAMES),
        max_restarts=draw(st.integers(0, 9)),
        time_limit_s=None if kind == "statefulset" else limit,
        shows_page=draw(st.booleans()),
        scrape_from=draw(st.none() | NAMES),
        patch=draw(st.sampled_from(({}, PATCH))),
    )


@given(options=all_options())
def test_every_manifest_is_valid_and_safe(options: KubernetesOptions) -> None:
    manifests = render(options, a_config())
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)
    for manifest in manifests:
        validate(manifest)
        assert manifest["metadata"].get("namespace") == options.namespace
        for pod in pods_of(manifest):
            check_pod(pod)
    assert manifests == list(yaml.safe_load_all(to_text(manifests)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rendered_file_has_a_secret_object(kind: Kind) -> None:
    assert "Secret" not in {each["kind"] for each in render(replace(ASKED, kind=kind), a_config())}


def test_a_save_has_time_to_end() -> None:
    config = a_config().with_values("recovery", grace_s=99.5)
    assert worker_of(render(ASKED, config))["terminationGracePeriodSeconds"] > 99.5


def test_shared_memory_and_devices_are_those_asked_for() -> None:
    asked = replace(ASKED, gpus=8, memory_gib=64, shm_gib=16, network={"rdma/hca": 4})
    pod = worker_of(render(asked, a_config()))
    (shm,) = [each for each in pod["volumes"] if each["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16384Mi"}
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "64Gi", "nvidia.com/gpu": "8", "rdma/hca": "4"}


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"ranks": 1}, (2, 6, 2)),
        ({"ranks": 4}, (8, 18, 4)),
        ({"gpus": 1}, (6, 18, 2)),
        ({"gpus": 8}, (48, 144, 16)),
        ({"gpus": 8, "shm_gib": 64}, (48, 192, 64)),
        ({"gpus": 8, "cpus": 96, "memory_gib": 900}, (96, 900, 16)),
    ],
)
def test_sizes_that_are_not_given_follow_from_the_ranks(options: dict[str, Any], sizes: tuple[int, int, float]) -> None:
    found = sized(replace(ASKED, **options), a_config())
    assert (found.cpus, found.memory_gib, found.shm_gib) == sizes


def test_a_pod_has_memory_for_what_the_plan_keeps_on_the_host() -> None:
    config = load_config(ROOT / "configs" / "gpt_7b.yaml", ["parallel.strategy=fsdp", "train.microbatch=1"])
    asked = replace(ASKED, nodes=1, gpus=8)
    saved = config.with_values("checkpoint", every_steps=100)
    offloaded = config.with_values("memory", offload=("optimizer",))
    plain, copied, kept = (sized(asked, each).memory_gib or 0 for each in (config, saved, offloaded))
    # 6.7 billion parameters in 4 bytes, and AdamW's two numbers for each of them, on the 8 ranks of one pod.
    assert plain == 144
    assert (copied - plain) * 2**30 > 6.7e9 * 12
    assert (kept - plain) * 2**30 > 6.7e9 * 8
    fewer = sized(replace(asked, nodes=4, min_nodes=1), saved).memory_gib
    assert fewer == copied > (sized(replace(asked, nodes=4), saved).memory_gib or 0)


def test_only_a_named_namespace_reaches_the_page_and_none_tensorboard() -> None:
    manifests = render(replace(ASKED, scrape_from="monitoring"), a_config())
    (policy,) = [each for each in manifests if each["metadata"]["name"] == "digits-view" and "ingress" in each["spec"]]
    (rule,) = policy["spec"]["ingress"]
    named = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert rule == {"from": [{"podSelector": {}}, named], "ports": [{"port": 6070}]}
    (view,) = [each for each in manifests if each["kind"] == "Deployment"]
    (board,) = [each for each in view["spec"]["template"]["spec"]["containers"] if each["name"] == "tensorboard"]
    assert board["command"][board["command"].index("--host") + 1] == "127.0.0.1"
    (service,) = [each for each in manifests if each["kind"] == "Service" and each["metadata"]["name"] == "digits-view"]
    assert [port["port"] for port in service["spec"]["ports"]] == [6070]


@cache
def train_command() -> Any:
    whole: Any = typer.main.get_command(app)
    return whole.commands["train"]


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("job", "digits-0.digits"),
        ("statefulset", "digits-0.digits"),
        ("jobset", "digits-workers-0-0.digits"),
        ("trainjob", "digits-node-0-0.digits"),
    ],
)
def test_the_command_of_a_pod_is_one_that_paceline_reads(kind: Kind, head: str, tmp_path: Path) -> None:
    asked = replace(ASKED, kind=kind, nodes=4, min_nodes=4)
    manifests = render(asked, a_config())
    (container,) = worker_of(manifests)["containers"]
    given = train_command().make_context("train", container["args"][1:]).params
    assert (given["nnodes"], given["rdzv"], given["node_ranks"]) == ("4:4", f"{head}:29400", 1)
    assert given["resume"] == "auto"
    (config_map,) = [each for each in manifests if each["kind"] == "ConfigMap"]
    path = tmp_path / Path(given["config"]).name
    path.write_text(config_map["data"][path.name])
    assert load_config(path, given["overrides"]).monitor.folder == "/runs"


def test_one_node_needs_no_meeting_and_no_secret() -> None:
    pod = worker_of(render(replace(ASKED, nodes=1), a_config()))
    assert "--rdzv" not in pod["containers"][0]["args"]
    assert "secretKeyRef" not in json.dumps(pod)
    assert "initContainers" not in pod


def first_rule(rules: list[Manifest], code: int) -> str:
    """Returns the action of the first rule that takes an exit code, as Kubernetes looks for it."""
    found = (rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", []))
    return next(found, "Count")


def test_a_job_counts_no_preemption_and_ends_what_cannot_get_better() -> None:
    (job,) = [each for each in render(ASKED, a_config()) if each["kind"] == "Job"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    actions = {code: first_rule(rules, code) for code in MEANINGS if code}
    assert actions == {1: "Count", REFUSED: "FailJob", PREEMPTED: "Ignore", 76: "Count", NO_PROGRESS: "FailJob"}
    assert job["spec"]["backoffLimit"] == ASKED.max_restarts * ASKED.nodes


@pytest.mark.parametrize(
    ("message", "action"),
    [
        (
            "Container paceline for pod a/b failed with exit code 75 matching FailJob rule at index 0",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        (
            "Pod a/b has condition DisruptionTarget matching FailJob rule at index 1",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        ("Container paceline for pod a/b failed with exit code 2 matching FailJob rule at index 2", "FailJobSet"),
        ("Container paceline for pod a/b failed with exit code 77 matching FailJob rule at index 2", "FailJobSet"),
    ],
)
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_job_set_tells_exit_codes_apart(kind: Kind, message: str, action: str) -> None:
    (job_set,) = [
        e for e in render(replace(ASKED, kind=kind), a_config()) if e["kind"] in ("JobSet", "TrainingRuntime")
    ]
    spec = job_set["spec"].get("template", {}).get("spec", job_set["spec"])
    rules = [rule for rule in spec["failurePolicy"]["rules"] if "PodFailurePolicy" in rule["onJobFailureReasons"]]
    matching = (
        rule["action"]
        for rule in rules
        if any(re.search(pattern, message) for pattern in rule.get("onJobFailureMessagePatterns", [""]))
    )
    assert next(matching) == action


def test_kueue_holds_a_run_until_all_pods_have_a_place() -> None:
    placed = replace(ASKED, gang="kueue", queue="training")
    for kind in ("job", "jobset", "trainjob"):
        workload = render(replace(placed, kind=kind, shows_page=False), a_config())[-1]
        assert workload["spec"]["suspend"] is True
        assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


def test_volcano_schedules_the_fewest_pods_together() -> None:
    manifests = render(replace(ASKED, nodes=2, min_nodes=1, gang="volcano", queue="gold"), a_config())
    (group,) = [each for each in manifests if each["kind"] == "PodGroup"]
    assert group["spec"] == {"minMember": 1, "queue": "gold"}
    (job,) = [each for each in manifests if each["kind"] == "Job"]
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
    assert template["spec"]["schedulerName"] == "volcano"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "Digits_1"}, "'Digits_1' is no name of Kubernetes"),
        ({"image": "a b"}, "'a b' is no reference of an image"),
        ({"nodes": 0}, "0 to 0 nodes"),
        ({"min_nodes": 3}, "3 to 2 nodes"),
        ({"shm_gib": 0.0625}, "/dev/shm has 0.0625 GiB for 1 ranks"),
        ({"shm_gib": 16, "memory_gib": 16}, "/dev/shm has 16 GiB of a pod with 16 GiB"),
        ({"network": {"rdma": 1}}, "'rdma' is no name of a device resource"),
        ({"access_mode": "ReadWriteOnce"}, "2 nodes with a volume of ReadWriteOnce"),
        ({"queue": "q"}, "queue q without a scheduler that has queues"),
        ({"gang": "kueue"}, "Kueue without a queue"),
        ({"scrape_from": "a b"}, "the scrape_from 'a b' is no name of a Kubernetes object"),
        ({"kind": "statefulset", "time_limit_s": 9}, "a StatefulSet with a time limit of 9 s"),
        ({"nodes": 3}, "train.global_batch = 64 is not a multiple of parallel.ranks = 3"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_queued(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        render(replace(ASKED, **changed), a_config())


def test_all_problems_come_at_once() -> None:
    wrong = replace(ASKED, name="A", shm_gib=0.01, cpus=0)
    with pytest.raises(ConfigError) as caught:
        render(wrong, a_config())
    assert len(caught.value.problems) == 3


def test_the_rendered_examples_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "render_deploy.py"))
    assert script["main"](check=True) == 0, capsys.readouterr().err


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed (apt install kubernetes-client)")
@pytest.mark.parametrize(("overlay", "devices"), [("cpu", {}), ("gpu", {"nvidia.com/gpu": "8", "rdma/hca": "8"})])
def test_an_overlay_makes_valid_manifests(overlay: str, devices: dict[str, str]) -> None:
    folder = ROOT / "deploy" / "kubernetes" / "overlays" / overlay
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    manifests = list(yaml.safe_load_all(done.stdout))
    for manifest in manifests:
        validate(manifest)
        assert manifest["metadata"]["namespace"] == "paceline"
    pod = worker_of(manifests)
    check_pod(pod)
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    assert {name: count for name, count in limits.items() if name != "memory"} == devices
    ranks = devices.get("nvidia.com/gpu", "1")
    expected = worker_of(render(replace(ASKED, ranks=int(ranks)), load_config(ROOT / "configs" / "digits.yaml")))
    assert container["args"] == expected["containers"][0]["args"]
    assert container["image"].startswith("registry.example.com/paceline:")
