"""Whole runs on real ranks: what they print and leave, how they go on, and under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import dump_yaml, load_config
from paceline.records.records import EndRecord, EventRecord, Record, RunRecord, StepRecord, read_records
from paceline.run.decide import BackgroundPrediction
from paceline.run.folder import claim_folder
from paceline.run.processes import loopback_interface
from paceline.run.worker import _predict

pytestmark = [
    # torch leaves the files of redirected output to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(600),  # a machine under load takes its time to start processes
]

Call = Callable[..., Any]
Ends = Callable[[Path], list[Record]]

GPT = [
    "model={kind: gpt, layers: 1, heads: 2, width: 16, context: 8}",
    "data={kind: synthetic_tokens, vocab_size: 16, samples: 64, context: 8}",
]


def test_a_run_and_how_it_goes_on(project: Path, call: Call, ends: Ends, all_gone: Callable[[], list[int]]) -> None:
    """One story, as each chapter takes seconds: a run, more of it on fewer ranks, and nothing left to do."""
    (project / "configs").mkdir()
    (project / "tiny.yaml").rename(project / "configs" / "tiny.yaml")  # the user's code is found from here all the same
    run = project / "out" / "tiny"

    called = call("train", "configs/tiny.yaml", "monitor.folder=out", "monitor.trace=true")
    assert (called.code, called.err) == (0, "")
    lines = called.out.splitlines()
    assert lines[0] == "ddp on 2 ranks (shared_memory, cpu)   36 parameters   global batch 8   3 steps"
    (saved,) = [line for line in lines if line.startswith("step 3   checkpoint   ")]
    assert " saved to out/tiny/checkpoints in " in saved  # as seen from here
    assert "\x1b" not in called.out
    assert "\r" not in called.out
    assert "tiny  done" in lines
    where = lines.index("The run is in out/tiny: records, checkpoints, logs, config.")
    assert max(map(len, lines[where:])) <= 80
    commands = [line.partition("#")[0].strip() for line in lines[where + 2 : -2]]
    assert commands == [
        "paceline train out/tiny/config.yaml train.steps=6 --resume auto",
        "paceline verify out/tiny/config.yaml --ranks 4",
        "paceline config explain out/tiny/config.yaml",
        "paceline report out/tiny",
        "paceline train gpt_pydoc",
    ]
    assert lines[-2:] == ["", "Its report, for a browser, is out/tiny/report.html"]
    assert [end.status for end in ends(run) if isinstance(end, EndRecord)] == ["done", "done"]
    assert {path.name for path in run.iterdir()} == {
        *(".lock", "config.yaml", "plan.json", "records", "checkpoints", "logs", "trace", "health", "report.html")
    }
    logs = {path.stem: path.read_text().splitlines() for path in (run / "logs").glob("*.log")}
    assert logs.keys() == {"rank-0", "rank-1", "run"}
    whole = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (rank [01]|launcher) INFO (paceline|user_code): .+")
    ours = [
        line for lines in logs.values() for line in lines if not line.startswith("[Gloo] ")
    ]  # torch 2.10's own word
    assert [line for line in ours if not whole.fullmatch(line)] == []
    for rank in ("0", "1"):
        assert any(line.endswith(f" rank {rank} INFO user_code: a net of width 4") for line in logs[f"rank-{rank}"])
    assert any(line.endswith(" rank 0 INFO user_code: a net of width 4") for line in logs["run"])
    assert logs["run"][-1].endswith(" launcher INFO paceline: the run is done")
    traced = [json.loads(line) for line in (run / "trace" / "rank-1.jsonl").read_text().splitlines()]
    assert all(-600 < each["time"] - ends(run)[1].time < 1 for each in traced)
    assert {"all_reduce", "broadcast"} <= {operation["kind"] for operation in traced}
    assert load_config(run / "config.yaml").parallel.ranks == 2
    assert len(all_gone()) >= 2

    called = call("train", "out/tiny/config.yaml", "train.steps=5", "parallel.ranks=1", "--resume", "auto", "--json")
    assert (called.code, called.err) == (0, "")
    summary = json.loads(called.out)
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("done", 5, 1)
    records = list(read_records(run / "records" / "rank-0.jsonl"))
    assert [record.step for record in records if isinstance(record, StepRecord)] == [1, 2, 3, 4, 5]
    assert [record.world_size for record in records if isinstance(record, RunRecord)] == [2, 1]
    assert load_config(run / "config.yaml").train.steps == 5

    called = call("train", "out/tiny/config.yaml", "--resume", "auto", "monitor.console=false")
    assert (called.code, called.err) == (0, "")
    assert called.out.splitlines()[0] == "nothing left to do: the checkpoint is of step 5, and the run ends there"
    assert "train.steps=10" in called.out


def check_prediction(found: Any, run: Path, cluster: str) -> None:
    assert found["predicted"] == json.loads((run / "prediction.json").read_text())
    assert (found["predicted"]["reason"], found["predicted"]["cluster"]) == ("", cluster)
    assert found["step_ratio"] == found["measured_step_s"] / found["predicted"]["step_s"]


@pytest.mark.exhaustive
def test_a_transformer_is_told_what_it_was_expected_to_take(project: Path, call: Call) -> None:
    called = call("train", "tiny.yaml", *GPT, "parallel.ranks=1", "--json")
    assert (called.code, called.err) == (0, "")
    check_prediction(json.loads(called.out)["prediction"], project / "runs" / "tiny", "1x cpu-host")
    called = call("report", "runs/tiny")
    assert [line.split()[0] for line in called.out.splitlines() if " measured " in line] == ["predicted"] * 2


@pytest.mark.parametrize(("ranks_here", "is_predicted"), [("2", True), ("1", False)])
def test_under_torchrun_the_first_rank_predicts_a_run_on_one_host(
    project: Path, monkeypatch: pytest.MonkeyPatch, ranks_here: str, is_predicted: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    config = load_config(project / "tiny.yaml", ["train.steps=100"])
    with claim_folder(project / "runs" / "tiny", dump_yaml(config)) as claimed:
        assert isinstance(_predict(config, claimed, (0, 1)), BackgroundPrediction) == is_predicted


@pytest.mark.exhaustive
def test_under_torchrun_it_is_one_rank_of_many(project: Path, ends: Ends) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "paceline",
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "GLOO_SOCKET_IFNAME")}
    settings = ["parallel.ranks=auto", f"comm.interface={loopback_interface()}"]
    done = subprocess.run(
        [*torchrun, "train", "tiny.yaml", *GPT, *settings, "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["world_size"]) == ("done", 2)
    check_prediction(summary["prediction"], project / "runs" / "tiny", "2x cpu-host")
    assert [end.status for end in ends(project / "runs" / "tiny") if isinstance(end, EndRecord)] == ["done", "done"]
    assert load_config(project / "runs" / "tiny" / "config.yaml").parallel.ranks == 2
    for path in (project / "runs" / "tiny" / "records").iterdir():
        (event,) = [each for each in read_records(path) if isinstance(each, EventRecord) and each.name == "settings"]
        assert event.detail == {"GLOO_SOCKET_IFNAME": loopback_interface()}
