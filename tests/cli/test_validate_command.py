"""``paceline validate`` from the command line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
SHIPPED = Path(__file__).parents[2] / "validation" / "published.csv"

HELP = """
import sys
sys.argv = ["paceline", "validate", sys.argv[1], "--json"]
try:
    import paceline.cli.main
    paceline.cli.main.main()
finally:
    print(*sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


def test_scoring_needs_no_torch() -> None:
    shown = subprocess.run([sys.executable, "-c", HELP, str(SHIPPED)], capture_output=True, text=True, check=False)
    assert shown.stderr.strip() == ""
    found = json.loads(shown.stdout)
    assert 40 <= found["rows"] <= 90
    assert found["skipped"] == []
    assert found["overall"]["mean_over_families"] < 0.25


def test_the_shipped_selection_is_scored_by_default(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHIPPED.parents[1])
    shown = call("validate")
    assert shown.code == 0
    for part in ("family", "internevo", "mean over families", "Spearman", "known out-of-memory runs"):
        assert part in shown.out


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
