"""The report as one file: what is in it, how large it is, and that nothing in the data can leave its place."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_runs import call as call
from made_records import RUN, write_records
from view_runs import steps_of, write_run

from paceline.records.records import HostRecord, to_line
from paceline.records.summary import open_run
from paceline.search.expectation import Expectation
from paceline.view.document import Window, describe
from paceline.view.html import as_json, live_page, report_page, summary_of
from paceline.view.picture import smoothed, write_figure
from paceline.view.runs import read_runs

HOSTILE = "</script><script>alert(1)</script><!--\u2028"


def data_of(page: str) -> Any:
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])


def test_a_report_is_one_file_of_modest_size(tmp_path: Path) -> None:
    page = report_page(read_runs([write_run(tmp_path / "one", steps=400), write_run(tmp_path / "other", steps=400)]))
    assert len(live_page()[0]) < 300_000
    assert len(page) < 600_000
    assert not re.search(r'(src|href)="', page)
    found = data_of(page)
    assert [run["name"] for run in found["runs"]] == ["one", "other"]
    assert found["runs"][0]["words"]["facts"]
    assert found["differences"] == [["name", ["one", "other"]]]
    assert found["runs"][0]["timeline"]["steps"] == list(range(393, 401))


def test_records_that_are_known_are_not_read_again_and_give_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", steps=400)
    host = HostRecord(host="a", values={"hw.power/0": 5.0, "late": 1.0}, time=RUN.time + 1)
    (folder / "records" / "host-a.jsonl").write_text(to_line(host) + to_line(replace(host, values={"hw.power/0": 7.0})))
    (before,) = read_runs([folder])
    known = open_run(folder)
    for path in (folder / "records").glob("rank-*.jsonl"):
        path.write_bytes(b"x" * path.stat().st_size)
    (run,) = read_runs([folder], [known])
    assert not run.problems()
    assert (run.hosts, run.comm, run.events, run.ends) == (before.hosts, before.comm, before.events, before.ends)
    told, expected = (describe(each, Window(points=50)) for each in (run, before))
    assert as_json(told) == as_json(expected)
    assert next(each["mean"] for each in told["hosts"]) == [5.0, 7.0]


def test_no_text_of_a_run_leaves_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "run<img src=x onerror=alert(1)>"
    run = replace(RUN, world_size=1, strategy=HOSTILE, device="@SCRIPT@", host=HOSTILE)
    write_records(folder, 0, run, *steps_of(0, 1, 8))
    page = report_page(read_runs([folder]))
    assert page.count("<script") == live_page()[0].count("<script") == 2
    assert "alert(1)</script>" not in page
    assert data_of(page)["runs"][0]["facts"]["strategy"] == HOSTILE
    assert json.loads(as_json({"x": [float("nan"), float("inf"), 1.5], "y": HOSTILE})) == {
        "x": [None, None, 1.5],
        "y": HOSTILE,
    }


def test_the_page_has_the_tables_of_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for rank in (0, 1):
        run = replace(RUN, world_size=2, rank=rank)
        again = replace(run, time=run.time + 100.0)
        write_records(folder, rank, run, *steps_of(rank, 1, 8), again, *steps_of(rank, 1, 12))
    tables = {table["title"]: table for table in summary_of(folder)["tables"]}
    assert set(tables) >= {"what each rank did", "phases, seconds of a step", "goodput and lost work"}
    assert [row[0] for row in tables["goodput and lost work"]["rows"]] == [
        "steps that count",
        "steps made again",
        "down",
        "waiting for saves",
    ]
    assert tables["goodput and lost work"]["rows"][1][2] == "8 steps"
    page = data_of(report_page(read_runs([folder])))["runs"][0]["words"]["tables"]
    assert [table["title"] for table in page] == list(tables)


def test_a_page_keeps_the_prediction_from_before_the_start_and_labels_a_later_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = Expectation(ranks=2, step_s=0.555, memory_bytes=2.0**30)
    (folder / "prediction.json").write_text(before.with_later(Expectation(ranks=2, step_s=0.274)).to_text())
    shown = data_of(report_page(read_runs([folder])))["runs"][0]
    assert (shown["predicted"]["step_s"], shown["predicted"]["is_later"]) == (0.555, False)
    assert (shown["predicted"]["later"]["step_s"], shown["predicted"]["later"]["is_later"]) == (0.274, True)
    rows = {table["title"]: table["rows"] for table in shown["words"]["tables"]}["predicted and measured"]
    assert [row[:2] for row in rows if row[0].startswith("step")] == [
        ["step", "555.0 ms"],
        ["step, predicted while it ran", "274.0 ms"],
    ]


def test_words_of_a_run_whose_records_cannot_be_summed_up(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    path = folder / "records" / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"step":3', '"step":', 1))
    assert "a record cannot be read" in summary_of(folder)["problem"]
    told = data_of(report_page(read_runs([folder])))["runs"][0]
    assert told["curves"]["loss"]["mean"][0] == 1.0  # all else is shown
    assert len(told["problems"]) == 1


def test_the_command_writes_a_page_and_a_table(call: Callable[..., Any], tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "=one", steps=30), write_run(tmp_path / "$other", steps=20, slow=1.5)
    for folder, steps in ((one, 30), (other, 20)):
        text = f"model: {{kind: mlp}}\ndata: {{kind: digits}}\ntrain: {{steps: {steps}, global_batch: 8}}\n"
        (folder / "config.yaml").write_text(text)
    (tmp_path / "out").mkdir()
    files = [tmp_path / "out" / f"report.{kind}" for kind in ("html", "csv")]
    options = [word for path in files for word in (f"--{path.suffix[1:]}", str(path))]
    called = call("report", str(one), str(other), "--compare", *options)
    assert (called.code, called.err) == (0, "")
    assert "train.steps" in called.out
    assert re.search(r"final loss +0\.03\d+ +0\.05\d+ +\+5\d\.\d % +worse", called.out)
    assert all(f"wrote {path}" in called.out.replace("\n", "") for path in files)
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [row["run"] for row in rows] == ["'=one"] * 30 + ["$other"] * 20
    assert float(rows[9]["loss"]) == pytest.approx(0.1)
    many = json.loads(call("report", str(one), str(other), "--json").out)
    assert [run["name"] for run in many["runs"]] == ["=one", "$other"]
    assert call("report", str(one), "--compare").code == 2
    assert "no run to report on" in call("report", str(tmp_path / "out")).err
    for path, why in (("/proc/none/report.html", "there is no folder"), (str(one / "config.yaml"), "is no page")):
        refused = call("report", str(one), "--html", path)
        assert (refused.code, why in refused.err) == (2, True)


def test_smoothed_curves_do_not_lag_and_keep_their_gaps() -> None:
    line = np.arange(50.0)
    assert smoothed(line, 0.6)[10:40] == pytest.approx(line[10:40], abs=0.05)
    noisy = np.array([1.0, 3.0, np.nan, 1.0, 3.0])
    found = smoothed(noisy, 0.6)
    assert np.isnan(found).tolist() == [False, False, True, False, False]
    assert np.nanmax(np.abs(found - 2.0)) < 0.7  # the values are 1 off
    assert smoothed(noisy[:0], 0.6).size == 0


@pytest.mark.exhaustive
def test_charts_are_drawn_as_pictures(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "_one", steps=30), write_run(tmp_path / "$other$", steps=20)])
    runs += read_runs([write_run(tmp_path / "empty", steps=0)])
    for kind, begin in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        write_figure(runs, tmp_path / f"out.{kind}", kind)
        assert (tmp_path / f"out.{kind}").read_bytes().startswith(begin)
    write_figure(runs[2:], tmp_path / "empty.png", "png")
