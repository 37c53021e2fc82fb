"""``paceline chaos``: faults on real ranks and on virtual ones, recovered from on the path of every run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpoint, list_checkpoints, open_checkpoint, verify_checkpoint
from paceline.records.summary import read_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(600),  # a machine under load takes its time to start processes
]

Call = Callable[..., Any]
SETTINGS = ["recovery.max_restarts=20", "monitor.console=false", "train.deterministic=true", "comm.bucket_mb=1"]
GPT = """
name: small
model: {kind: gpt, layers: 2, heads: 2, width: 16, context: 8, dropout: 0.2, tied: true}
data: {kind: synthetic_tokens, samples: 200, vocab_size: 23, context: 8}
train: {steps: 20, global_batch: 24, accumulate: 2, deterministic: true}
optim: {kind: adamw, lr: 0.01, clip_norm: 1.0, schedule: {kind: cosine, warmup: 4}}
parallel: {ranks: 2, device: cpu, threads: 1}
checkpoint: {every_steps: 10}
monitor: {tensorboard: false, console: false}
comm: {bucket_mb: 1}
"""
FP16 = ["train.precision=fp16", "train.loss_scale=4194304"]
CASES = {
    "ddp": [],
    "ddp, topk": ["comm.compression={policy: topk, ratio: 0.1, min_size: 64}"],
    "ddp, fp16, topk": ["comm.compression={policy: topk, ratio: 0.1, min_size: 64, error_feedback: false}", *FP16],
    "zero2": ["parallel.strategy=zero2"],
    "zero2, fp16": ["parallel.strategy=zero2", *FP16],
    "fsdp": ["parallel.strategy=fsdp"],
    "fsdp, fp16": ["parallel.strategy=fsdp", *FP16],
    "pipeline": ["parallel.pipeline=2"],
    "pipeline, fp16": ["parallel.pipeline=2", *FP16],
}


@pytest.fixture
def chaos(project: Path, call: Call) -> Call:
    (project / "small.yaml").write_text(GPT)

    def run(config: str, *arguments: str, code: int = 0) -> Any:
        called = call("chaos", config, *arguments, "--json")
        assert called.code == code, called.err
        return json.loads(called.out)

    return run


def how(report: Any) -> list[tuple[str, str]]:
    return [(each["kind"], each["how"]) for each in report["faults"]]


def final_state(run: Path) -> Checkpoint:
    path = list_checkpoints(run / "checkpoints")[-1]
    assert path.name == "step-00000020"
    return open_checkpoint(path)


def test_virtual_ranks_recover_from_disks_that_lie(project: Path, chaos: Call) -> None:
    steps = ["train.steps=12", "checkpoint.every_steps=2", "recovery.on_full_disk=warn"]
    faults = "disk-full:rank=1@step=4,corrupt-checkpoint@step=9"
    report = chaos("tiny.yaml", *SETTINGS, *steps, "--backend", "virtual", "--faults", faults)
    assert how(report) == [("disk-full", "went on"), ("corrupt-checkpoint", "restarted")]
    full, damaged = report["faults"]
    assert (full["lost_steps"], damaged["lost_steps"]) == (0, 2)  # from 8 to 6
    assert "step-00000008/" in damaged["detail"]
    assert any("passed over step-00000008" in line for line in report["told"])
    assert report["handled"]
    assert report["steps"] == 12
    assert "each once an epoch" in report["samples"]
    found = list_checkpoints(project / "runs" / "tiny-chaos" / "checkpoints")
    assert [verify_checkpoint(path).step for path in found] == [10, 12]
    kept = json.loads((project / "runs" / "tiny-chaos" / "chaos" / "report.json").read_text())
    assert kept == report


@pytest.mark.soak
def test_real_ranks_recover_from_a_kill(chaos: Call, all_gone: Callable[[], list[int]]) -> None:
    steps = ["train.steps=6", "checkpoint.every_steps=2"]
    report = chaos("tiny.yaml", *SETTINGS, *steps, "--faults", "kill:rank=1:phase=backward@step=4")
    assert how(report) == [("kill", "restarted")]
    assert report["faults"][0]["verdict"] == "rank 1 was killed by SIGKILL after step 3"
    assert (report["lost_steps"], report["lost_samples"]) == (1, 8)
    assert report["interval"]["steps"] >= 1
    assert 0 < report["goodput"] < 1
    assert len(all_gone()) >= 4


def test_what_cannot_happen_is_refused_before_anything_starts(project: Path, call: Call) -> None:
    called = call("chaos", "tiny.yaml", "--faults", "kil:rank=1@step=2,kill:rank=1@setp=3")
    assert called.code == 2
    assert "did you mean kill?" in called.err
    assert "2 problems" in called.err
    called = call("chaos", "tiny.yaml", "--faults", "kill:rank=7@step=2,kill:rank=1@step=9")
    assert called.code == 2
    assert "ranks are 0 to 1" in called.err
    assert "the run has 3 steps" in called.err
    assert call("chaos", "tiny.yaml").code == 2
    assert not (project / "runs").exists()


@pytest.mark.soak
def test_a_run_that_stopped_for_a_full_disk_is_started_by_hand(chaos: Call) -> None:
    steps = ["train.steps=60", "checkpoint.every_steps=2"]
    report = chaos("small.yaml", *steps, "--faults", "disk-full:rank=1@step=4,preempt:rank=1@step=6")
    assert how(report) == [("disk-full", "stopped"), ("preempt", "stopped")]
    assert "No space left on device" in report["faults"][0]["verdict"]
    assert report["faults"][1]["verdict"] == "preempted: the state is saved"
    assert [each["lost_steps"] for each in report["faults"]] == [2, 0]


@pytest.mark.soak
def test_a_fault_that_never_comes_is_not_handled(chaos: Call) -> None:
    """There is no checkpoint after the second step."""
    settings = ["checkpoint.every_steps=2", "checkpoint.at_end=false"]
    report = chaos("tiny.yaml", *SETTINGS, *settings, "--faults", "disk-full@step=3", code=1)
    assert how(report) == [("disk-full", "never happened")]
    assert not report["handled"]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_is_the_run_that_was_not(case: str, project: Path, chaos: Call) -> None:
    """Twenty steps against ten and ten with SIGKILL between: the same bits, and the same samples."""
    report = chaos("small.yaml", *CASES[case], "--faults", "kill:rank=1@step=11", "--compare")
    assert how(report) == [("kill", "restarted")]
    assert report["lost_steps"] == 0
    twin = report["undisturbed"]
    assert twin["is_same"]
    assert (twin["num_steps"], twin["samples"]) == (20, "the same")
    ours, theirs = (final_state(project / "runs" / name) for name in ("small-chaos", "small-undisturbed"))
    assert ours.values == theirs.values
    assert ours.shapes() == theirs.shapes()
    for name in theirs.shapes():  # parameters, moments, what compression owes
        assert torch.equal(ours.read(name), theirs.read(name)), name
    for rank in (0, 1):
        assert str(ours.own(rank)) == str(theirs.own(rank))  # random states


@pytest.mark.soak
def test_any_rank_may_be_killed_in_any_phase(chaos: Call) -> None:
    phases = ("data", "forward", "backward", "optimizer", "saving", "evaluation")
    cases = [(rank, phase) for phase in phases for rank in (0, 1)]
    faults = [f"kill:rank={rank}:phase={phase}@step={4 + 3 * place}" for place, (rank, phase) in enumerate(cases)]
    settings = ["train.steps=42", "checkpoint.every_steps=3", "train.eval_every=3"]
    report = chaos("small.yaml", *settings, "data.eval_fraction=0.2", "--faults", ",".join(faults), "--compare")
    assert how(report) == [("kill", "restarted")] * len(cases)
    assert all(each["lost_steps"] <= 3 for each in report["faults"])
    assert report["undisturbed"]["is_same"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", ["virtual", "gloo"])
def test_random_faults_are_handled_as_the_policies_say(seed: int, backend: str, chaos: Call) -> None:
    settings = ["train.steps=40", "checkpoint.every_steps=5", "monitor.hang_s=4"]
    drawn = ["--random", "6", "--seed", str(seed), "--backend", backend]
    report = chaos("small.yaml", *settings, *drawn)
    assert report["steps"] == 40


MEMORY = ["train.steps=40", "checkpoint.every_steps=10", "checkpoint.memory.every_steps=4"]
SPREAD = {"ddp": [], "zero2": CASES["zero2"], "fsdp": CASES["fsdp"], "pipeline": CASES["pipeline"]}


@pytest.mark.soak
@pytest.mark.parametrize("case", SPREAD)
def test_whatever_dies_on_a_host_losses_are_those_of_a_run_without_it(case: str, chaos: Call) -> None:
    faults = {
        "kill-keeper:rank=1@step=6": "went on",
        "kill-in-snapshot:rank=1@step=11": "restarted",
        "kill-two:rank=1@step=17": "restarted",
        "kill-in-recovery:rank=0": "restarted",
        "kill:rank=1@step=25": "restarted",
        "kill-in-recovery:rank=0:": "restarted",
        "memory-full:rank=1@step=31": "went on",
        "kill:rank=0@step=35": "restarted",
    }
    report = chaos("small.yaml", *SPREAD[case], *MEMORY, "--faults", ",".join(faults), "--compare")
    assert [each["how"] for each in report["faults"]] == list(faults.values())
    assert report["undisturbed"]["is_same"]
    told = {each["fault"]: each["verdict"] for each in report["faults"]}
    assert "is started, and holds them on" in told["kill-keeper:rank=1@step=6"]
    assert "No space left on device" in told["memory-full:rank=1@step=31"]
    assert sum("in the memory of hosts (restart" in each for each in report["told"]) >= 4
    assert report["faults"][-1]["lost_steps"] == 4  # from 34 to 30, on disk


@pytest.mark.soak
def test_a_launcher_that_is_killed_leaves_nothing_but_the_disk(chaos: Call, all_gone: Callable[[], list[int]]) -> None:
    settings = ["train.steps=30", "checkpoint.memory.every_steps=4"]
    report = chaos("small.yaml", *settings, "--faults", "kill-launcher:rank=1@step=16", "--compare")
    assert how(report) == [("kill-launcher", "stopped")]
    assert report["undisturbed"]["is_same"]
    assert len(all_gone()) >= 4


@pytest.mark.soak
def test_a_host_is_lost_and_the_others_go_on_from_memory_with_every_sample_once(project: Path, chaos: Call) -> None:
    faults = "kill-two:rank=0@step=11,kill-host:rank=1@step=21,kill:rank=0@step=33"
    report = chaos("small.yaml", *MEMORY, "--hosts", "2", "--faults", faults, "--compare")
    assert how(report) == [("kill-two", "restarted"), ("kill-host", "restarted"), ("kill", "restarted")]
    assert report["undisturbed"]["samples"] == "the same"
    assert report["lost_steps"] <= 3 * 8
    sizes = [each.run.world_size for each in read_run(project / "runs" / "small-chaos")[0]]
    assert sizes[-4:] == [2, 2, 1, 1]
    assert "(its launcher has ended) is gone" in report["faults"][1]["verdict"]


@pytest.mark.soak
def test_the_loss_of_the_host_where_all_meet_stops_the_run_and_the_next_start_goes_on(chaos: Call) -> None:
    report = chaos("small.yaml", *MEMORY, "--hosts", "2", "--faults", "kill-host:rank=0@step=21", "--compare")
    assert how(report) == [("kill-host", "stopped")]
    assert report["faults"][0]["detail"] == "the launcher where all hosts meet"
    assert "does not reach the launcher where the hosts meet" in report["faults"][0]["verdict"]
    assert report["undisturbed"]["is_same"]


def test_a_run_that_is_refused_has_no_report(call: Call, project: Path) -> None:
    called = call("chaos", "tiny.yaml", "checkpoint.folder=tiny.yaml/x", "--faults", "kill@step=2", "--json")
    assert (called.code, called.out) == (2, "")
    assert not (project / "runs").exists()
