"""A patch of pods: merged as kubectl itself merges it, and refused where the pod could not work with it."""

from __future__ import annotations

import json
import shutil
import subprocess
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from manifest_schemas import Manifest, pods_of, validate
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.config import config_from_dict
from paceline.errors import ConfigError
from paceline.launch.kubernetes import render, to_text
from paceline.launch.kubernetes_options import Kind, KubernetesOptions
from paceline.launch.pod_patch import MERGE_KEYS, merge, read_patch

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "deploy/kubernetes/examples/patch.yaml").read_text(encoding="utf-8")
ASKED = KubernetesOptions(name="digits", image="paceline:0.1", nodes=2, gpus=2)
CONFIG = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 10}})
# Each changes another part: what is added, what is replaced whole, what is removed.
PATCHES = (
    EXAMPLE,
    "spec: {securityContext: {seccompProfile: {$patch: delete}}}",
    "spec: {terminationGracePeriodSeconds: 7, enableServiceLinks: null}",
    "spec: {volumes: [{name: tmp, emptyDir: {sizeLimit: 9Gi}}, {name: shm, $patch: delete}]}",
    "spec: {containers: [{name: paceline, env: [{name: HOME, value: /data}, {name: A, value: b}]}]}",
    "spec: {containers: [{name: paceline, resources: {$patch: replace, limits: {memory: 1Gi}}}]}",
    "spec: {containers: [{name: paceline, volumeMounts: [{mountPath: /dev/shm, $patch: delete}], args: [a]}]}",
    "spec: {containers: [{name: side, image: other:1}], hostAliases: [{ip: 10.0.0.1, hostnames: [a]}]}",
)


def template_of(manifests: list[Manifest]) -> Manifest:
    (job,) = [each for each in manifests if each["kind"] == "Job"]
    template: Manifest = job["spec"]["template"]
    return template


def unordered(part: Any, name: str = "") -> Any:
    """Returns lists that are merged by a key as mappings: their order means nothing."""
    if isinstance(part, dict):
        return {key: unordered(value, key) for key, value in part.items()}
    if isinstance(part, list) and name in MERGE_KEYS:
        return {str(each[MERGE_KEYS[name]]): unordered(each) for each in part}
    return [unordered(each) for each in part] if isinstance(part, list) else part


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed (apt install kubernetes-client)")
@pytest.mark.parametrize("text", PATCHES)
def test_a_patch_is_merged_as_kubectl_merges_it(text: str, tmp_path: Path) -> None:
    plain = render(replace(ASKED, shows_page=False), CONFIG)
    (job,) = [each for each in plain if each["kind"] == "Job"]
    (tmp_path / "job.yaml").write_text(to_text([job]))
    change = json.dumps({"spec": {"template": read_patch(text)}})
    # Not kubectl kustomize, whose own way of merging differs from version to version.
    command = ["kubectl", "patch", "--local", "--type=strategic", "-f", "job.yaml", "-p", change, "-o", "yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    expected = template_of([yaml.safe_load(done.stdout)])
    assert unordered(merge(template_of(plain), read_patch(text))) == unordered(expected)


def test_merging_changes_no_argument() -> None:
    pod, patch = template_of(render(ASKED, CONFIG)), read_patch(EXAMPLE)
    before = deepcopy((pod, patch))
    merge(pod, patch)
    assert (pod, patch) == before


@pytest.mark.parametrize("kind", get_args(Kind))
def test_one_patch_does_for_every_kind_of_run(kind: Kind) -> None:
    manifests = render(replace(ASKED, kind=kind, patch=read_patch(EXAMPLE)), CONFIG)
    for manifest in manifests:
        validate(manifest)
    pods = [pod for manifest in manifests for pod in pods_of(manifest)]
    (trains,) = [pod for pod in pods if pod.get("priorityClassName") == "batch"]
    (container,) = trains["containers"]
    assert container["name"] == ("node" if kind == "trainjob" else "paceline")
    assert {"name": "HF_HOME", "value": "/data/huggingface"} in container["env"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    (page,) = [pod for pod in pods if pod is not trains]  # the same image, and no place on a machine with GPUs
    assert (page["imagePullSecrets"], page["serviceAccountName"]) == ([{"name": "registry-login"}], "training")
    assert "nodeSelector" not in page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("metadata: {labels: {job: mine}}", "the patch changes the labels job"),
        ("metadata: {labels: null}", "the patch changes the labels app.kubernetes.io/component, "),
        ("spec: {containers: [{name: trainer, env: [{name: A, value: b}]}]}", "a container trainer without an image"),
        (
            "spec: {containers: [{name: paceline, volumeMounts: [{name: data, mountPath: /data}]}]}",
            "the patch mounts data at /data",
        ),
    ],
)
def test_what_no_pod_can_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        render(replace(ASKED, patch=read_patch(text)), CONFIG)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--on", "slurm", "--patch", "patch.yaml"], "--patch with --on slurm: it is an option of Kubernetes"),
        (["--on", "kubernetes", "--patch", "missing.yaml"], "--patch missing.yaml: No such file"),
        (["--on", "kubernetes", "--patch", "patch.yaml"], "it is a part of a pod's template"),
    ],
)
def test_a_patch_that_cannot_be_read_is_told(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patch.yaml").write_text("tolerations: []\n")
    command = ["launch", str(ROOT / "configs/digits.yaml"), "--set", "image=paceline:0.1", "--dry-run", *words]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert done.exit_code != 0
    assert told in f"{done.output} {done.exception}"
