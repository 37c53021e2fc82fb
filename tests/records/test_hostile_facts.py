"""Records and predictions that somebody else wrote: a report neither hangs nor reads files that they name."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import END, RUN, STEP, write_records
from rich.console import Console

from paceline.errors import RunFolderError
from paceline.records.records import CommRecord, EventRecord
from paceline.records.report import render, summarize
from paceline.search.expectation import Expectation


def test_numbers_of_ranks_beyond_reason_and_clusters_that_are_files(tmp_path: Path) -> None:
    many = CommRecord(step=1, kind="all_reduce", group="world", ranks=2**60, calls=1, bytes=8, seconds=0.0, time=1.0)
    steps = [replace(STEP, step=step, comm_s=0.05) for step in range(1, 12)]
    write_records(tmp_path, 0, replace(RUN, device="cpu", backend="gloo"), *steps, many, END)
    (tmp_path / "prediction.json").write_text(Expectation(cluster="../cluster.yaml", step_s=1.0).to_text())
    found = summarize(tmp_path)
    assert found.limits.what == "communication"
    assert found.traffic[0].bandwidth == 0.0


@pytest.mark.parametrize(
    ("target", "told"), [("/dev/zero", "it is a device, and not a file"), ("rank-0.jsonl", "symbolic links")]
)
def test_records_that_are_a_device_or_a_link_to_itself_are_refused_in_words(
    tmp_path: Path, target: str, told: str
) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "rank-0.jsonl").symlink_to(target)
    with pytest.raises(RunFolderError, match=told):
        summarize(tmp_path)


def test_an_end_of_an_unknown_status_is_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    path = write_records(tmp_path, 0, RUN, STEP, END)
    path.write_text(path.read_text().replace('"status":"done"', '"status":"exploded"'))
    with pytest.raises(RunFolderError, match="line 3: record of type end has status = 'exploded'"):
        summarize(tmp_path)


@pytest.mark.parametrize("detail", [{}, {"seconds": "long"}, {"seconds": None, "step": 1.0}])
def test_a_report_goes_without_a_first_step_that_has_no_seconds(tmp_path: Path, detail: dict[str, object]) -> None:
    first = EventRecord(name="first_step", step=1, detail=detail, time=RUN.time)
    write_records(tmp_path, 0, RUN, first, STEP, END)
    assert "first step after" not in shown(tmp_path)


def test_parts_of_a_first_step_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    first = EventRecord(name="first_step", step=1, detail={"seconds": 2.5, "data": [], "step": 2.0}, time=RUN.time)
    compiled = EventRecord(name="compiled", step=1, detail={"what": "the model"}, time=RUN.time)
    write_records(tmp_path, 0, RUN, first, compiled, STEP, END)
    assert "the step 2.0 s" in shown(tmp_path)


def shown(folder: Path) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(summarize(folder)))
    return console.export_text()
