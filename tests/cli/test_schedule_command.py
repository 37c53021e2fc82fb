"""``paceline schedule`` from the command line: ready schedules and one's own, as grid, CSV, picture and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

HELP = """
import sys
sys.argv = ["paceline", "schedule", "--help"]
try:
    import paceline.cli.main
    paceline.cli.main.main()
finally:
    print(*sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


def test_help_teaches_and_needs_no_torch() -> None:
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert shown.stderr.strip() == ""
    for part in ("F0.3 is the forward of microbatch 3 in stage 0", "paceline schedule mine.csv", "forward:backward"):
        assert part in " ".join(shown.stdout.split())
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_a_grid_with_its_bubble_and_what_is_in_flight(call: Call) -> None:
    shown = call("schedule", "1f1b", "--stages", "4", "--microbatches", "8")
    assert shown.code == 0
    assert "1f1b: 4 ranks, 4 stages, 8 microbatches" in shown.out
    assert "rank 0   0           27.3%    4" in shown.out
    assert "bubble   27.3% of the makespan is idle, 37.5% relative to the work" in shown.out
    assert call("schedule", "1f1b").out == shown.out  # four stages and eight microbatches are the default


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_what_is_written_reads_back(name: str, call: Call, project: Path) -> None:
    assert call("schedule", name, "-s", "3", "-m", "4", "--csv", "mine.csv", "--messages").code == 0
    assert "SF0.0" in (project / "mine.csv").read_text()
    first = json.loads(call("schedule", name, "-s", "3", "-m", "4", "--json").out)
    again = json.loads(call("schedule", "mine.csv", "--json").out)
    assert {key for key in first if first[key] != again[key]} == {"rows"}
    assert first["programs"] == again["programs"]
    # The grid alone, on the way to another program.
    (project / "bare.csv").write_text(call("schedule", name, "-s", "3", "-m", "4", "--csv", "-").out)
    assert json.loads(call("schedule", "bare.csv", "--json").out) == first


def test_costs_of_stages_and_messages(call: Call) -> None:
    costs = ("--costs", "1,2:4,1:1:1", "--communication", "0.5", "--json")
    shown = json.loads(call("schedule", "gpipe", "-s", "3", "-m", "1", *costs).out)
    assert shown["busy"] == [3.0, 6.0, 3.0]
    assert shown["makespan"] == 3 + 6 + 3 + 4 * 0.5
    assert shown["bubble"] == pytest.approx(1 - 12 / (3 * 14))


def test_a_picture(call: Call, project: Path) -> None:
    assert call("schedule", "zb-v", "-s", "2", "-m", "2", "--png", "v.png").code == 0
    assert (project / "v.png").read_bytes().startswith(b"\x89PNG")


def test_programs_are_shown_on_request(call: Call) -> None:
    shown = call("schedule", "1f1b", "-s", "2", "-m", "1", "--messages")
    assert "rank 0 runs  F0.0 SF0.0 RB0.0 B0.0 R0" in shown.out
    assert "rank 1 runs  RF1.0 F1.0 B1.0 SB1.0 R1" in shown.out


def test_a_broken_file_is_refused_by_its_cell_and_writes_nothing(call: Call, project: Path) -> None:
    (project / "mine.csv").write_text("F0.0,F0.1,B0.0,B0.1\nF1.0,B1.0,B1.1,F1.1\n")
    refused = call("schedule", "mine.csv", "--csv", "new.csv", "--png", "new.png")
    assert refused.code == 2
    assert "schedule 'mine', rank 1, slot 2: B1.1 comes before F1.1, which is in slot 3" in refused.err
    assert not list(project.glob("new.*"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("2f2b",), ("no schedule '2f2b'", "did you mean 1f1b?")),
        (("absent.csv",), ("absent.csv cannot be read",)),
        (("tiny.yaml",), ("tiny.yaml, rank 1, slot 0: 'name: tiny' is not an action",)),
        (("mine.csv", "-s", "3", "--chunks", "2"), ("--stages, --chunks beside mine.csv", "the file says")),
        (("1f1b", "--chunks", "2"), ("'1f1b' with chunks = 2", "exactly 1")),
        (("1f1b", "--costs", "1,x,1,1"), ("'x' for stage 1 is not a cost", "--costs 1,1,1,1.5:3")),
        (("1f1b", "--costs", "1,1"), ("costs for 2 stages, and schedule '1f1b' has 4",)),
        (("1f1b", "--costs", "1,1,1,inf"), ("stage 3 takes inf forward",)),
        (("1f1b", "-s", "1000", "-m", "100000"), ("make a very large grid", "smaller one with the same ratio")),
        (("1f1b", "--csv", "absent/mine.csv"), ("cannot be written to absent/mine.csv",)),
        (("1f1b", "--png", "mine.docx"), ("cannot be drawn into mine.docx", "try mine.png")),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], parts: tuple[str, ...], call: Call, project: Path
) -> None:
    del project
    refused = call("schedule", *arguments)
    assert refused.code == 2
    assert refused.out == ""
    for part in parts:
        assert part in refused.err


def test_a_ring_of_ranks_that_share_sequences(call: Call) -> None:
    shown = call("schedule", "ring", "--ranks", "3")
    assert shown.code == 0
    assert "rank 2: 2 3  kv 2: 2/2 3-2 3/3  kv 1: 2-1 3-1  kv 0: 2-0 3-0" in shown.out
    rows = json.loads(call("schedule", "ring-contiguous", "--ranks", "2", "--json").out)["rows"]
    assert [[step["meets"] for step in row] for row in rows] == [["diagonal", "nothing"], ["diagonal", "all"]]


def test_a_name_that_is_nearly_a_ring_is_told(call: Call) -> None:
    refused = call("schedule", "ringg")
    assert (refused.code, refused.out) == (2, "")
    assert "zb-v, ring, ring-contiguous\n  did you mean ring?" in refused.err


@pytest.mark.parametrize("given", [("-m", "4"), ("--messages",), ("--ranks", "65")])
def test_what_a_ring_has_not_is_refused(given: tuple[str, ...], call: Call) -> None:
    refused = call("schedule", "ring", *given)
    assert refused.code == 2
    assert "give --ranks and --json alone" in refused.err
