"""Runs the judges, other people's tests and catalogues against ours, and writes their page.

    python scripts/judges.py            all cases (make judges), the record and docs/judges.md
    python scripts/judges.py --page     the page alone, from the record that there is

The record is bench/results/judges-cpu.json. The exit code is that of pytest.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JUDGES = ROOT / "tests" / "judges"
RECORD = ROOT / "bench" / "results" / "judges-cpu.json"
PAGE = ROOT / "docs" / "judges.md"

HEAD = """# Judges from outside

Our own tests prove what we thought of. A judge is a test or a catalogue that somebody else wrote, run against our
engines. `make judges` runs every case (minutes) and writes this page; `make test` runs a tenth of them, another one
each day.

A case is passed when our result is that of one process, refused when Paceline says before anything is trained that
it cannot do it, with the rule and a fix, and skipped when the case does not concern us. A failed case is a bug of
ours.

| judge | what it checks | passed | refused | skipped | failed |
|---|---|---|---|---|---|
"""


def page_of(record: dict[str, Any]) -> str:
    """Returns the page for a record: a table of judges, and why cases did not pass."""
    rows, notes = [], []
    for judge, found in record.items():
        counts = found["outcomes"]
        failed = counts.get("failed", 0) + counts.get("error", 0)
        numbers = " | ".join(str(counts.get(name, 0)) for name in ("passed", "refused", "skipped"))
        rows.append(f"| `{judge}` | {purpose_of(judge)} | {numbers} | {failed} |")
        told = [(*reason.split(": ", 1), count) for reason, count in sorted(found["reasons"].items())]
        reasons = [f"- {count} {outcome}: `{why}`" for outcome, why, count in told]
        notes += [f"## {judge}: what did not pass, and why", "", *reasons, ""] if reasons else []
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(notes).rstrip() + "\n"


def purpose_of(judge: str) -> str:
    """Returns the first sentence of the tests of a judge."""
    (path,) = (JUDGES / judge).glob("test_*.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def main() -> int:
    """Runs the judges, or only writes their page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write docs/judges.md from the record that there is")
    code = 0
    if not parser.parse_args().page:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "judge", "--all-judges", str(JUDGES)]
        code = subprocess.run([*command, "--judges-record", str(RECORD)], cwd=ROOT, check=False).returncode
    PAGE.write_text(page_of(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
