"""Schedules as CSV, as a grid and as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import lower
from paceline.schedule.measure import ScheduleCosts, StageCost, measure_schedule
from paceline.schedule.schedules import SCHEDULE_NAMES, make_schedule
from paceline.schedule.text import draw, format_csv, parse_csv, read_csv, render_text


@settings(max_examples=40)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 10))
def test_csv_reads_back_as_it_was(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    assert parse_csv(format_csv(schedule)) == schedule
    # Without the header the rows say it all.
    bare = "".join(format_csv(schedule).splitlines(keepends=True)[1:])
    assert parse_csv(bare, source=name) == schedule


def test_csv_keeps_messages_and_reduces(tmp_path: Path) -> None:
    programs = lower(make_schedule("1f1b", 2, 2))
    slots = max(map(len, programs))
    rows = tuple((*program, *[None] * (slots - len(program))) for program in programs)
    schedule = replace(make_schedule("1f1b", 2, 2), rows=rows, name="my own")
    (tmp_path / "mine.csv").write_text(format_csv(schedule))
    found = read_csv(tmp_path / "mine.csv")
    check_schedule(found)
    assert found == schedule
    assert lower(found) == programs


def test_csv_may_come_from_a_spreadsheet() -> None:
    text = "\ufeffF0.0,,,B0.0,,\r\n, F1.0 ,B1.0\r\n\r\n"
    schedule = parse_csv(text, source="folder/mine.csv")
    assert (schedule.name, schedule.placement, schedule.microbatches) == ("mine", (0, 1), 1)
    check_schedule(schedule)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("mine.csv has no rows",)),
        ("# schedule=x\n", ("mine.csv has no rows",)),
        ("F0.0,B0.0\nF1.0,Q1.0\n", ("mine.csv, rank 1, slot 1: 'Q1.0' is not an action", "write F0.3")),
        ("F0.0,B0.0\nF2.0,B2.0\n", ("no rank runs stage 1",)),
        ("F0.0,F999999999.0\n", ("no rank runs stage 1, and there is a stage 999999999",)),
        ("# placement=0,x\nF0.0,B0.0\n", ("placement=0,x is not made of whole numbers",)),
        ("# microbatches=\nF0.0,B0.0\n", ("microbatches= is not made of whole numbers",)),
        ("# ranks=2\nF0.0,B0.0\n", ("sets ranks", "schedule, placement, microbatches")),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(UsageError) as refused:
        read_csv(tmp_path / "mine.csv")
    for part in parts:
        assert part in str(refused.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    for name in ("picture.csv", "absent.csv", "."):
        with pytest.raises(UsageError, match="cannot be read as a schedule"):
            read_csv(tmp_path / name)


def test_a_stray_action_is_the_one_that_is_on_the_wrong_rank() -> None:
    schedule = parse_csv("F0.0,F0.1,F1.1,B0.0,B0.1\nF1.0,B1.0,,B1.1\n", source="mine")
    with pytest.raises(UsageError, match=r"rank 0, slot 2: F1.1 is on the wrong rank: stage 1 is on rank 1"):
        check_schedule(schedule)


def test_the_grid_is_to_scale() -> None:
    assert render_text(make_schedule("1f1b", 2, 2)) == (
        "1f1b: 2 ranks, 2 stages, 2 microbatches\n"
        "F3 is the forward of microbatch 3, B is a backward; a column is 1 of time\n"
        "\n"
        "column   0  1  2  3  4  5  6  7  8\n"
        "rank 0   F0 F1 .  .  B0--- .  B1---\n"
        "rank 1   .  F0 B0--- F1 B1--- .  .\n"
        "\n"
        "         stages      idle     in flight at most\n"
        "rank 0   0           33.3%    2\n"
        "rank 1   1           33.3%    1\n"
        "\n"
        "makespan 9 for 6 of work a rank\n"
        "bubble   33.3% of the makespan is idle, 50.0% relative to the work"
    )


def test_a_wide_grid_is_cut_into_blocks() -> None:
    schedule = make_schedule("zb-v", 3, 6)
    lines = render_text(schedule, width=72).splitlines()
    assert max(map(len, lines[2:])) <= 72
    assert sum(line.startswith("column") for line in lines) == 4
    for rank, order in enumerate(schedule.orders()):
        shown = [word for line in lines if line.startswith(f"rank {rank}  ") for word in line.split()[2:]]
        assert [word for word in shown if word[0] in "FIW"] == list(map(str, order))
    assert render_text(schedule, width=1)  # one column a block, and no endless loop


def test_costs_that_fit_no_unit_are_shown_by_slot() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    stages = tuple(StageCost(forward=f, backward_input=0.7, backward_weight=0.9) for f in (1.0, 1.3))
    text = render_text(schedule, measure_schedule(schedule, ScheduleCosts(stages=stages)))
    assert "a column is a slot" in text
    assert "rank 1   .  F0 F1 B0 B1 ." in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"schedule.{ending}"
    draw(make_schedule("zb-v", 2, 3), path)
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert path.read_bytes().startswith(begins)


def test_pictures_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    schedule = make_schedule("gpipe", 1, 1)
    with pytest.raises(UsageError, match=r"its ending is its format(.|\n)*try .*schedule\.png"):
        draw(schedule, tmp_path / "schedule.grid")
    with pytest.raises(UsageError, match="cannot be written"):
        draw(schedule, tmp_path / "absent" / "schedule.png")
