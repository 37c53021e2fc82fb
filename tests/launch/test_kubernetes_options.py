"""Words of a command line become options of a run on Kubernetes, or are refused with what they should be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import config_from_dict
from paceline.errors import UsageError
from paceline.launch.job import LaunchJob, read_time
from paceline.launch.kubernetes import render
from paceline.launch.kubernetes_options import SETTINGS, KubernetesOptions, object_name, read_options

ASKED = LaunchJob(
    name="digits",
    target="kubernetes",
    run="digits",
    config="digits.yaml",
    workdir="/",
    folder="/",
    python="python",
    nodes=4,
    least=2,
    gpus=8,
    ranks=8,
    queue="training",
    time="1:30:00",
)
IMAGE = {"image": "paceline:0.1"}


def test_all_words_together() -> None:
    words = {
        **IMAGE,
        "kind": "jobset",
        "namespace": "ml",
        "secret": "mine",
        "max_restarts": "5",
        "page": "no",
        "cpus": "64",
        "memory_gib": "512",
        "shm_gib": "12.5",
        "gpu_resource": "amd.com/gpu",
        "network": "rdma/hca=8,example.com/efa=4",
        "scrape_from": "monitoring",
        "patch": "spec: {priorityClassName: batch}",
        "gang": "volcano",
        "claim": "runs",
        "size_gib": "7",
        "storage_class": "fast",
        "access_mode": "ReadWriteMany",
    }
    assert set(words) == set(SETTINGS)
    assert read_options(replace(ASKED, settings=words)) == KubernetesOptions(
        name="digits",
        image="paceline:0.1",
        kind="jobset",
        nodes=4,
        min_nodes=2,
        namespace="ml",
        secret="mine",
        max_restarts=5,
        time_limit_s=5400,
        shows_page=False,
        gpus=8,
        ranks=8,
        cpus=64,
        memory_gib=512,
        shm_gib=12.5,
        gpu_resource="amd.com/gpu",
        network={"rdma/hca": 8, "example.com/efa": 4},
        gang="volcano",
        queue="training",
        claim="runs",
        size_gib=7,
        storage_class="fast",
        scrape_from="monitoring",
        patch={"spec": {"priorityClassName": "batch"}},
    )


def test_a_queue_is_one_of_the_scheduler_that_is_named() -> None:
    found = read_options(replace(ASKED, settings={**IMAGE, "gang": "kueue"}))
    assert (found.gang, found.queue) == ("kueue", "training")
    assert read_options(replace(ASKED, queue=None, settings=IMAGE)).queue is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "--on kubernetes without an image"),
        ({**IMAGE, "kinds": "job"}, "did you mean kind?"),
        ({**IMAGE, "kind": "pod"}, "it is one of job, statefulset, jobset, trainjob"),
        ({**IMAGE, "cpus": "-4"}, "it is a whole number"),
        ({**IMAGE, "shm_gib": "inf"}, "it is a number"),
        ({**IMAGE, "page": "maybe"}, "it is yes or no"),
        ({**IMAGE, "network": "rdma/hca"}, "it is NAME=VALUE, with commas between several"),
        ({**IMAGE, "network": "rdma/hca=x"}, "it is a whole number"),
        ({**IMAGE, "patch": "tolerations: []"}, "it is a part of a pod's template: metadata, spec, or both"),
        ({**IMAGE, "patch": "spec: {containers: [paceline]}"}, "containers is a list of items that have a name"),
        ({**IMAGE, "patch": "spec: {containers: {name: paceline}}"}, "containers is a list of items that have a name"),
        ({**IMAGE, "patch": "metadata: {labels: {stage: 2}}"}, "labels has a text for each key"),
        ({**IMAGE, "patch": "spec: ["}, "it is YAML, with nothing that JSON has not: while parsing"),
        (
            {**IMAGE, "patch": "spec: {a: !!binary aGk=}"},
            "it is YAML, with nothing that JSON has not: Object of type bytes",
        ),
        ({**IMAGE, "patch": "spec: {affinity: {$patch: keep}}"}, "$patch is delete or replace"),
        ({**IMAGE, "patch": "spec: {volumes: [{name: [a]}]}"}, "volumes is a list of items that have a name"),
    ],
)
def test_what_is_wrong_is_told_with_what_it_should_be(words: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_options(replace(ASKED, settings=words))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("1-0", 86400), ("2-03:04:05", 183845)]
)
def test_times_are_those_of_slurm(text: str, seconds: int) -> None:
    assert read_time(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "1:2:3:4", "-5", "1h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--time"):
        read_time(text)


@given(name=st.text(max_size=80))
def test_every_name_of_a_run_becomes_one_of_kubernetes(name: str) -> None:
    config = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}})
    manifests = render(KubernetesOptions(name=object_name(name), image="paceline:0.1"), config)
    names = [each["metadata"]["name"] for each in manifests]
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", each) for each in names), names


def test_names_stay_as_they_are_where_they_can() -> None:
    assert [object_name(name) for name in ("gpt-fsdp", "GPT_fsdp.2", "2b")] == ["gpt-fsdp", "gpt-fsdp-2", "run-2b"]


def test_long_names_stay_apart() -> None:
    long = "a" * 50
    names = {object_name(name) for name in (long, f"{long}-2", f"{long}-3")}
    assert len(names) == 3
    assert all(len(name) <= 40 for name in names)
