"""Records and predictions that somebody else wrote: a report neither hangs nor reads files that they name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from made_records import END, RUN, STEP, write_records

from paceline.records.records import CommRecord
from paceline.records.report import summarize
from paceline.search.expectation import Expectation


def test_numbers_of_ranks_beyond_reason_and_clusters_that_are_files(tmp_path: Path) -> None:
    many = CommRecord(step=1, kind="all_reduce", group="world", ranks=2**60, calls=1, bytes=8, seconds=0.0, time=1.0)
    steps = [replace(STEP, step=step, comm_s=0.05) for step in range(1, 12)]
    write_records(tmp_path, 0, replace(RUN, device="cpu", backend="gloo"), *steps, many, END)
    (tmp_path / "prediction.json").write_text(Expectation(cluster="../cluster.yaml", step_s=1.0).to_text())
    found = summarize(tmp_path)
    assert found.limits.what == "communication"
    assert found.traffic[0].bandwidth == 0.0
