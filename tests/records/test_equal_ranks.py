"""Ranks that took equally long are equal, however the sums of their times are rounded: the lowest one counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_records import END, RUN, STEP, write_records

from paceline.records.facts import find_traffic
from paceline.records.records import CommRecord, Record
from paceline.records.report import plain_tables, summarize
from paceline.records.summary import read_run, settled

SENT = CommRecord(step=1, kind="all_reduce", group="data", ranks=3, calls=3, bytes=2**24, seconds=0.02, time=1.0)


def records_of(rank: int, num_steps: int, seconds: float) -> list[Record]:
    run = replace(RUN, rank=rank, world_size=3)
    step = replace(STEP, optimizer_s=seconds)
    made = [[replace(step, step=number), replace(SENT, step=number)] for number in range(1, num_steps + 1)]
    return [run, *(record for both in made for record in both), END]


def write_run(folder: Path, *ranks: tuple[int, float]) -> Path:
    for rank, (num_steps, seconds) in reversed(list(enumerate(ranks))):
        write_records(folder, rank, *records_of(rank, num_steps, seconds))
    return folder


# Sums of so many hundredths are rounded up or down: the means differ in the last digit.
@pytest.mark.parametrize("counts", [(20, 17, 16), (16, 17, 20), (19, 20, 18), (17, 16, 20), (18, 19, 16)])
def test_of_equal_ranks_the_lowest_is_told(counts: tuple[int, int, int], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", *((count, 0.02) for count in counts))
    (sent,) = find_traffic(read_run(folder))
    assert (sent.calls, sent.step) == (3 * counts[0], counts[0])
    phases = next(table for table in plain_tables(summarize(folder)) if table.title.startswith("phases"))
    assert phases.rows[-1] == ("update", "20.0 ms", "20.0 %", "20.0 ms", "0", "20.0 ms", "0")


def test_of_others_the_least_and_the_most_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", (5, 0.02), (4, 0.01), (3, 0.03))
    phases = next(table for table in plain_tables(summarize(folder)) if table.title.startswith("phases"))
    assert phases.rows[-1] == ("update", "20.0 ms", "19.2 %", "10.0 ms", "1", "30.0 ms", "2")


def test_nine_digits_count() -> None:
    assert settled(0.1 + 0.2) == settled(0.3)
    assert settled(1.0) < settled(1.0 + 1e-8)
    assert (settled(0.0), settled(float("inf")), settled(-2e-30)) == (0.0, float("inf"), -2e-30)
