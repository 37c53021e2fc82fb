"""``paceline validate`` from the command line."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_bench.scored.measured_table import SHIPPED

Call = Callable[..., Any]
ROOT = Path(__file__).parents[2]

HELP = """
import sys
sys.argv = ["paceline", "validate", sys.argv[1], "--json"]
try:
    import paceline.cli.main
    paceline.cli.main.main()
finally:
    print(*sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


def test_scoring_needs_no_torch(tmp_path: Path) -> None:
    lines = SHIPPED.read_text(encoding="utf-8").splitlines(keepends=True)
    some = tmp_path / "some.csv"
    some.write_text("".join([lines[0], *lines[1::20]]), encoding="utf-8")
    shown = subprocess.run([sys.executable, "-c", HELP, str(some)], capture_output=True, text=True, check=False)
    assert shown.stderr.strip() == ""
    found = json.loads(shown.stdout)
    assert found["rows"] == len(lines[1::20])
    assert found["skipped"] == []
    assert found["overall"]["mean_over_families"] < 0.25


def test_the_rows_behind_the_headline_come_with_the_package(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # outside of the repository
    shown = call("validate")
    assert shown.code == 0
    for part in (
        "family",
        "held out",
        "in the band of their prediction",
        "internevo",
        "Spearman",
        "that ran out of memory were predicted to fit",
        "split dev: 479 rows",
    ):
        assert part in shown.out
    assert "fitted on the very rows it is scored on" in shown.out
    headline = next(line for line in shown.out.splitlines() if line.startswith("step time"))
    error = headline.split("step time")[1].split("mean over families")[0].strip()
    for page in ("README.md", "docs/planning.md", "docs/prediction.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert re.search(rf"published runs [^.]*\b{re.escape(error)} on average", text), f"{page} does not say {error}"


def test_rows_are_written(call: Call, tmp_path: Path) -> None:
    shown = call("validate", str(SHIPPED), "--split", "calib", "--rows", str(tmp_path / "rows.csv"))
    assert shown.code == 0
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0] == "id,metric_name,measured,predicted,skipped"
    assert len(lines) > 5
    nowhere = call("validate", str(SHIPPED), "--rows", str(tmp_path / "none" / "rows.csv"))
    assert nowhere.code == 2
    assert "rows.csv cannot be written" in nowhere.err


def test_a_table_of_which_no_row_has_a_score_ends_with_1(call: Call, tmp_path: Path) -> None:
    with SHIPPED.open(newline="") as file:
        cells = next(csv.DictReader(file))
    odd = write_row(tmp_path / "odd.csv", cells | {"compile": "maybe"})
    shown = call("validate", str(odd))
    assert (shown.code, shown.err) == (1, f"no row of {odd} has a score: each is listed with its reason\n")
    assert "line 2, column compile: 'maybe'" in shown.out
    as_json = call("validate", str(odd), "--json")
    assert as_json.code == 1
    assert [each["id"] for each in json.loads(as_json.out)["skipped"]] == [cells["id"]]
    assert call("validate", str(write_row(odd, cells | {"value": "OOM"}))).code == 0


def write_row(path: Path, cells: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells))
        writer.writeheader()
        writer.writerow(cells)
    return path


def test_what_is_no_table_is_refused(call: Call, tmp_path: Path) -> None:
    shown = call("validate", str(tmp_path / "none.csv"))
    assert shown.code == 2
    assert "cannot be read" in shown.err
    shown = call("validate", str(SHIPPED), "--split", "none")
    assert shown.code == 2
    assert "splits of this file: calib, dev" in shown.err
