"""The text of ``/metrics``, and the examples that name its metrics."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from made_records import END, RUN, STEP, write_records
from prometheus_client.parser import text_string_to_metric_families

from paceline.records.prometheus import metrics, metrics_text
from paceline.records.records import CommRecord, ExpertsRecord, HostRecord, to_line

DEPLOY = Path(__file__).parents[2] / "deploy" / "monitoring"
COMM = CommRecord(step=2, kind="all_reduce", group="world", ranks=2, calls=1, bytes=100, seconds=0.5, time=1.0)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**named: str) -> frozenset[tuple[str, str]]:
    return frozenset(named.items())


def test_the_newest_numbers_have_run_and_rank(tmp_path: Path) -> None:
    run = tmp_path / 'a "run"\\'
    tokens = replace(RUN, unit="tokens", units_per_sample=10.0)
    write_records(run, 0, tokens, STEP, replace(STEP, step=2, loss=0.125, mfu=0.4), COMM)
    write_records(run, 1, replace(RUN, rank=1), replace(STEP, loss=None), END)
    host = HostRecord(host="n1", values={"hw.gpu.utilization/3": 0.75, "system.cpu.utilization": 0.5}, time=2.0)
    (run / "records" / "host-n1.jsonl").write_text(to_line(host))
    found = samples(metrics_text([run]))
    first = labels(run=run.name, rank="0")
    assert found["paceline_loss", first] == 0.125
    assert found["paceline_step", first] == 2
    assert found["paceline_mfu", first] == 0.4
    assert found["paceline_units_per_second", first | labels(unit="tokens")] == 3200
    assert found["paceline_phase_seconds", first | labels(phase="comm")] == 0.025
    assert found["paceline_comm_bytes_per_second", first | labels(kind="all_reduce", group="world")] == 200
    assert ("paceline_loss", labels(run=run.name, rank="1")) not in found
    assert found["paceline_ended", labels(run=run.name, rank="1", status="done")] == 1
    assert found["paceline_hw_gpu_utilization", labels(run=run.name, host="n1", device="3")] == 0.75
    assert found["paceline_system_cpu_utilization", labels(run=run.name, host="n1")] == 0.5


def test_the_newest_loads_of_each_layer_are_told(tmp_path: Path) -> None:
    old = ExpertsRecord(
        step=2, layer="layers.0.mlp", steps=2, tokens=8, choices=(4, 4, 4, 4), dropped=0, entropy=0.9, auxiliary=1.0,
        ranks=1, time=1.0,
    )  # fmt: skip
    new = replace(old, step=4, choices=(8, 4, 4, 0), dropped=4, entropy=0.5)
    write_records(tmp_path / "run", 0, RUN, STEP, old, replace(old, layer="layers.1.mlp"), new, replace(STEP, step=4))
    found = samples(metrics_text([tmp_path / "run"]))
    first, second = (labels(run="run", rank="0", layer=f"layers.{layer}.mlp") for layer in (0, 1))
    names = [f"paceline_experts_{name}" for name in ("most", "least", "entropy", "auxiliary", "dropped")]
    assert [found[name, first] for name in names] == [2.0, 0.0, 0.5, 1.0, 0.25]
    assert [found[name, second] for name in names] == [1.0, 1.0, 0.9, 1.0, 0.0]


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    path = write_records(tmp_path / "run", 0, RUN, STEP)
    path.write_text(path.read_text() + "not json\n" + to_line(replace(STEP, step=9))[:-20])
    found = samples(metrics_text([tmp_path / "run", tmp_path / "gone", tmp_path]))
    assert found["paceline_step", labels(run="run", rank="0")] == 1


def test_an_attempt_begins_anew(tmp_path: Path) -> None:
    write_records(tmp_path / "run", 0, RUN, STEP, END, RUN)
    found = samples(metrics_text([tmp_path / "run"]))
    assert not [name for name, _ in found if name in ("paceline_ended", "paceline_step")]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.records.prometheus._TAIL_BYTES", 2000)
    steps = [replace(STEP, step=number) for number in range(1, 50)]
    write_records(tmp_path / "run", 0, RUN, *steps)
    found = samples(metrics_text([tmp_path / "run"]))
    assert found["paceline_step", labels(run="run", rank="0")] == 49
    assert found["paceline_steps_planned", labels(run="run", rank="0")] == RUN.total_steps


def test_the_series_of_a_run_leave_when_it_is_over(tmp_path: Path) -> None:
    ended = write_records(tmp_path / "ended", 0, RUN, STEP, END)
    killed = write_records(tmp_path / "killed", 0, RUN, STEP)

    def shown(age_s: float) -> set[str]:
        for path in (ended, killed):
            os.utime(path, (time.time() - age_s, time.time() - age_s))
        return {dict(named)["run"] for _, named in samples(metrics_text([tmp_path / "ended", tmp_path / "killed"]))}

    assert [shown(60), shown(3600), shown(100_000)] == [{"ended", "killed"}, {"killed"}, set()]


def test_runs_of_one_name_stay_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        write_records(tmp_path / parent / "run", 0, RUN, STEP)
    found = samples(metrics_text([tmp_path / "a" / "run", tmp_path / "b" / "run"]))
    assert {dict(names)["run"] for _, names in found} == {str(tmp_path / each / "run") for each in "ab"}


def _expressions() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    board = json.loads((DEPLOY / "grafana.json").read_text())
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [
        *alerts,
        *panels,
        *(each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"),
    ]


def test_the_examples_name_metrics_that_there_are() -> None:
    named = [name for text in _expressions() for name in re.findall(r"paceline_\w+", text)]
    assert len(named) > 25
    assert set(named) <= metrics().keys()


def test_runs_that_are_over_raise_no_alarm_on_what_a_run_does_now() -> None:
    """Their last values stay in ``/metrics``: a rule must ask for a run that still writes, or for how it ended."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    lasting = {"PacelineRunFailed", "PacelineLossNotFinite"}
    rules = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert lasting <= rules.keys()
    for name in rules.keys() - lasting:
        assert "time() - paceline_last_record_timestamp_seconds" in rules[name], name
