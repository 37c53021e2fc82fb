"""A run on a cluster through kubectl. No API server can be had here: a program in its place answers what one would."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import config_from_dict
from paceline.errors import LaunchError, UsageError
from paceline.health.exit_codes import DONE, FAILED, REFUSED
from paceline.launch.job import LaunchJob, follow
from paceline.launch.kubectl import Kubectl, PodState, exit_code_of
from paceline.launch.kubernetes import render
from paceline.launch.kubernetes_options import KubernetesOptions
from paceline.launch.start import prepare, start

OPTIONS = KubernetesOptions(name="digits", image="paceline:0.1", nodes=2, namespace="here")
CONFIG = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 10}})

# Writes down how it was called, and answers with the next of the files that fit the call.
PROGRAM = r"""#!/bin/sh
folder=$(dirname "$0")
shift 2  # --namespace here
echo "$@" >> "$folder/calls"
[ "$2" = --dry-run=server ] && [ -e "$folder/refuses" ] && { cat "$folder/refuses" >&2; exit 1; }
case "$1" in apply|create) cat > "$folder/$1.json" ;; esac
for file in "$folder/$1-$2".*; do
  [ -e "$file" ] || continue
  cat "$file"
  [ -e "$folder/$1-$2.last" ] && [ "$file" = "$folder/$1-$2.last" ] || rm "$file"
  exit 0
done
[ "$1" = get ] && [ "$2" = secret ] && exit 0
[ "$1" = config ] && echo test-cluster
[ "$1" = get ] && { echo "no such thing" >&2; exit 1; }
exit 0
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "kubectl"
    path.write_text(PROGRAM)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def a_pod(name: str, phase: str, **state: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": [{"state": state}]}}


def test_the_secret_goes_to_standard_input_alone(program: Path) -> None:
    Kubectl(OPTIONS, str(program)).apply(render(OPTIONS, CONFIG))
    made = json.loads((program.parent / "create.json").read_text())
    secret = made["stringData"]["secret"]
    assert made["metadata"]["name"] == "digits-secret"
    assert len(secret) >= 32
    applied = (program.parent / "apply.json").read_text()
    assert {each["kind"] for each in json.loads(applied)["items"]} >= {"Job", "Service", "ConfigMap"}
    assert secret not in applied
    assert secret not in (program.parent / "calls").read_text()


def test_what_the_cluster_would_not_take_makes_no_object(program: Path) -> None:
    (program.parent / "refuses").write_text('unknown field "spec.template.spec.tolerationz"')
    with pytest.raises(LaunchError, match=r"kubectl apply failed .*\n  unknown field"):
        Kubectl(OPTIONS, str(program)).apply(render(OPTIONS, CONFIG))
    assert (program.parent / "calls").read_text() == "apply --dry-run=server --filename -\n"


def test_a_secret_of_the_user_must_be_there(program: Path) -> None:
    with pytest.raises(UsageError, match="there is no Secret mine in the cluster"):
        Kubectl(replace(OPTIONS, secret="mine"), str(program)).apply(render(OPTIONS, CONFIG))


def test_a_secret_that_is_there_is_kept(program: Path) -> None:
    (program.parent / "get-secret.last").write_text("secret/digits-secret\n")
    Kubectl(OPTIONS, str(program)).apply(render(OPTIONS, CONFIG))
    assert not (program.parent / "create.json").exists()


def test_a_run_is_followed_through_a_preemption_to_its_end(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = program.parent
    waiting = a_pod("digits-0-aaa", "Pending", waiting={"reason": "ImagePullBackOff"})
    first = a_pod("digits-0-aaa", "Failed", terminated={"exitCode": 75})
    second = a_pod("digits-0-bbb", "Succeeded", terminated={"exitCode": 0})
    for number, pods in enumerate([[], [waiting], [first], [first]]):
        (folder / f"get-pods.{number}").write_text(json.dumps({"items": pods}))
    (folder / "get-pods.last").write_text(json.dumps({"items": [second]}))
    done = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    for number in range(4):
        (folder / f"get-job.batch.{number}").write_text(json.dumps({"status": {}}))
    (folder / "get-job.batch.last").write_text(json.dumps(done))
    (folder / "logs---follow.0").write_text("preempted\n")
    (folder / "logs---follow.1").write_text("trained\n")
    told: list[str] = []
    assert Kubectl(OPTIONS, str(program)).follow(told.append, look_s=0) == DONE
    assert capfd.readouterr().out == "preempted\ntrained\n"
    assert told[:2] == ["paceline: digits: no pods yet", "paceline: digits: digits-0-aaa: ImagePullBackOff"]


@pytest.mark.parametrize(
    ("condition", "codes", "expected"),
    [
        ("Complete", [0, 0], DONE),
        ("Completed", [0, 75], DONE),
        ("Failed", [75, 1, 2], REFUSED),
        ("Failed", [1, 1], FAILED),
        ("Failed", [], FAILED),
        ("Suspended", [75], None),
    ],
)
def test_the_exit_code_of_a_run_is_that_of_the_pod_that_says_most(
    condition: str, codes: list[int], expected: int | None
) -> None:
    pods = [PodState(name=f"p-{code}", phase="Failed", exit_code=code) for code in codes]
    workload = {"status": {"conditions": [{"type": condition, "status": "True"}]}}
    assert exit_code_of(workload, pods) == expected


def test_what_kubectl_says_is_told(program: Path) -> None:
    with pytest.raises(LaunchError, match="kubectl get failed with exit code 1\n  no such thing"):
        Kubectl(OPTIONS, str(program)).look()


def test_cancel_leaves_the_volume_and_the_secret(program: Path) -> None:
    Kubectl(OPTIONS, str(program)).cancel()
    (call,) = (program.parent / "calls").read_text().splitlines()
    assert call.startswith("delete job.batch,configmap,service,networkpolicy,deployment --selector ")
    assert "app.kubernetes.io/instance=digits" in call


def test_without_kubectl_the_way_out_is_told() -> None:
    with pytest.raises(LaunchError, match="not installed here"):
        Kubectl(OPTIONS, "kubectl-that-is-not-there")


def test_a_cluster_is_asked_whether_it_takes_the_run(program: Path) -> None:
    (program.parent / "auth-can-i.0").write_text("yes\n")
    (program.parent / "auth-can-i.1").write_text("no\n")
    assert Kubectl(OPTIONS, str(program)).check() == "test-cluster"
    with pytest.raises(LaunchError, match=r"test-cluster lets you create no job\.batch: no"):
        Kubectl(OPTIONS, str(program)).check()


# As a target of `paceline launch`.


ROOT = Path(__file__).parents[2]
REQUEST = LaunchJob(target="kubernetes", nodes=2, settings={"image": "paceline:0.1", "namespace": "here"})


@pytest.fixture
def cluster(program: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the program in the place of kubectl, and this process into a folder of its own."""
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (program.parent / "auth-can-i.last").write_text("yes\n")
    (program.parent / "work").mkdir()
    monkeypatch.chdir(program.parent / "work")
    return program.parent


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the follower outlives its object
def test_a_launch_is_submitted_and_followed_to_its_exit_code(cluster: Path) -> None:
    ended = a_pod("digits-0-aaa", "Failed", terminated={"exitCode": 77})
    failed = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    (cluster / "get-pods.last").write_text(json.dumps({"items": [ended]}))
    (cluster / "get-job.batch.last").write_text(json.dumps(failed))
    (cluster / "logs---follow.last").write_text("it made no progress\n")
    target, job, lines = prepare(ROOT / "configs" / "digits.yaml", [], REQUEST)
    assert lines[-1] == "the cluster is test-cluster"
    job = start(target, job)
    written: list[str] = []
    assert follow(target, job, written.append, written.append) == 77
    assert "it made no progress\n" in "".join(written)
    applied = json.loads((cluster / "apply.json").read_text())["items"]
    (made,) = [each for each in applied if each["kind"] == "Job"]
    assert made["spec"]["completions"] == 2
    assert "--node-ranks" in made["spec"]["template"]["spec"]["containers"][0]["args"]
    target.cancel(job)
    assert (cluster / "calls").read_text().splitlines()[-1].startswith("delete job.batch,")


def test_a_cluster_that_does_not_answer_refuses_a_launch_and_not_a_dry_run(cluster: Path) -> None:
    (cluster / "auth-can-i.last").write_text("no\n")
    with pytest.raises(UsageError, match="lets you create no"):
        prepare(ROOT / "configs" / "digits.yaml", [], REQUEST)
    target, job, lines = prepare(ROOT / "configs" / "digits.yaml", [], REQUEST, is_dry=True)
    assert "not asked for its machines" in lines[-1]
    assert "kind: Job\n" in target.render(job)
    assert not (cluster / "apply.json").exists()
