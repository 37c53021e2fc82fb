"""docs/deployment.md says what the code does, and the commands of the pages about launching are taken."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from manifest_schemas import check_pod, pods_of, validate
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.config import check_hosts, config_from_dict, load_config
from paceline.health.exit_codes import DONE, MEANINGS
from paceline.launch.job import TARGETS, TargetMachines, find_target
from paceline.launch.kubernetes import render
from paceline.launch.kubernetes_options import KubernetesOptions
from paceline.launch.pod_patch import read_patch
from paceline.run.whereami import parse_nodes

ROOT = Path(__file__).parents[2]
OPTIONS = KubernetesOptions(name="digits", image="paceline:0.1")
CONFIG = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}})
PAGES = ("deployment.md", "train.md", "faults.md", "security.md")


def commands(verb: str) -> list[list[str]]:
    """Returns the words of every command of the pages that starts a run, but for its program."""
    text = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(rf"^    (?:[A-Z_]+=\S+ )?paceline ({verb} configs/.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in sorted(set(found))]


def rows() -> dict[int, list[str]]:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    table = page.partition("## Exit codes for schedulers")[2].partition("\n## ")[0]
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if re.match(r"\| \d", line)
    ]
    return {int(row[0]): row[1:] for row in found}


def test_codes_and_meanings_are_those_of_the_code() -> None:
    assert {code: row[0] for code, row in rows().items()} == MEANINGS


@pytest.mark.parametrize("code", sorted(set(MEANINGS) - {DONE}))
def test_a_job_does_what_the_table_says(code: int) -> None:
    (job,) = [each for each in render(OPTIONS, CONFIG) if each["kind"] == "Job"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    taken = (rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", []))
    words = {"Ignore": "again, not counted", "FailJob": "ends", None: "again, counted"}[next(taken, None)]
    assert rows()[code][3] == words


def test_systemd_does_what_the_table_says() -> None:
    unit = (ROOT / "infrastructure" / "cloud-init.yaml.tftpl").read_text(encoding="utf-8")
    always = re.findall(r"RestartForceExitStatus=(.*)", unit)[0].split()
    never = re.findall(r"RestartPreventExitStatus=(.*)", unit)[0].split()
    for code, row in rows().items():
        if code != DONE:
            expected = "again" if str(code) in always else "ends" if str(code) in never else "again, counted"
            assert row[5] == expected


@pytest.mark.parametrize("words", commands("launch"), ids=" ".join)
def test_every_launch_of_the_pages_is_taken(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in TARGETS:
        target = find_target(name)
        monkeypatch.setattr(target, "machines", lambda _: TargetMachines(where="there"))
    verb, config, *rest = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    done = CliRunner().invoke(app, [verb, config, *rest, "--dry-run"])
    assert done.exit_code == 0, done.exception
    if "kubernetes" in words:
        manifests = list(yaml.safe_load_all(done.stdout))
        assert len(manifests) >= 5
        for manifest in manifests:
            validate(manifest)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/kubernetes").glob("*/*.yaml")), ids=lambda path: path.name)
def test_every_manifest_that_the_page_names_is_valid(path: Path) -> None:
    manifests = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for manifest in manifests:
        if manifest.get("kind", "Kustomization") != "Kustomization":  # patch.yaml is a part of an object
            validate(manifest)


def test_the_patches_of_the_page_make_valid_pods() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    text = page.partition("as root with that capability, in a namespace that allows it:\n\n")[2].partition("\n\n")[0]
    patch = read_patch(textwrap.dedent(text))
    for manifest in render(replace(OPTIONS, gpus=2, network={"rdma/hca": 2}, patch=patch), CONFIG):
        validate(manifest)


def test_the_quick_start_is_in_the_namespace_of_its_overlay() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (overlay,) = re.findall(r"kubectl apply -k (\S+)", page)
    folder = ROOT / overlay
    namespace = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))["namespace"]
    block = page.partition("storage class into the overlay first:\n\n")[2].partition("\n\n")[0].splitlines()
    lines = [shlex.split(line, comments=True) for line in block]
    assert lines[0] == ["kubectl", "create", "namespace", namespace]
    assert lines[2] == ["kubectl", "apply", "-k", overlay]
    assert all(words[1:3] == ["-n", namespace] for words in (lines[1], *lines[3:]))
    made = {
        (each["kind"].lower(), each["metadata"]["name"])
        for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/base/run.yaml").read_text(encoding="utf-8"))
    }
    (viewed,) = [word for words in lines for word in words if word.startswith("deployment/")]
    assert tuple(viewed.split("/")) in made


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_kubectl_makes_valid_objects_of_an_overlay_and_warns_of_nothing(overlay: str) -> None:
    folder = ROOT / "deploy" / "kubernetes" / "overlays" / overlay
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    manifests = list(yaml.safe_load_all(made.stdout))
    for manifest in manifests:
        validate(manifest)
        for pod in pods_of(manifest):
            check_pod(pod)
    (job,) = [each for each in manifests if each["kind"] == "Job"]
    (trains,) = job["spec"]["template"]["spec"]["containers"]
    assert trains["image"].startswith("registry.example.com/paceline:")
    assert trains["args"][:2] == ["train", "/etc/paceline/config.yaml"]
    assert {each["metadata"].get("namespace") for each in manifests} == {"paceline"}


@pytest.mark.parametrize("words", [each for each in commands("train") if "--nnodes" in each], ids=" ".join)
def test_every_run_on_several_hosts_of_the_pages_divides_its_batch(words: list[str]) -> None:
    counts, overrides = words[words.index("--nnodes") + 1], [word for word in words if "=" in word]
    nodes = parse_nodes(counts, "host1:29400")
    config = load_config(ROOT / words[1], overrides)
    for ranks in (1, 2, 8):
        assert not check_hosts(config, ranks, range(nodes.least, nodes.count + 1))
