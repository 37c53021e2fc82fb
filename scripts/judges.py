"""Runs the judges, other people's tests and catalogues against ours, and writes their page.

    python scripts/judges.py            all cases (make judges), the record and docs/judges.md
    python scripts/judges.py --gpu      the same of the cases for a GPU, on a machine that has one
    python scripts/judges.py --page     the page alone, from the records that there are

The records are bench/results/judges-cpu.json, judges-gpu.json and mutants-cpu.json, which scripts/mutants.py writes.
The exit code is that of pytest.
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
GPU_RECORD = RECORD.with_name("judges-gpu.json")
MUTANTS_RECORD = RECORD.with_name("mutants-cpu.json")
GPU_WAYS = ["-n", "8", "--dist", "loadgroup", "-m", "gpu and judge"]  # NCCL ranks in a few workers: they share the GPU
PAGE = ROOT / "docs" / "judges.md"

HEAD = """# Judges from outside

Our own tests prove what we thought of. A judge is a test or a catalogue that somebody else wrote, run against our
engines. `make judges` runs every case (minutes) and writes this page; `make test` runs a tenth of them, another one
each day (`python -m pytest --judges-day 3` runs that of another day).

A case is passed when our result is that of one process, refused when Paceline says before anything is trained that
it cannot do it, with the rule and a fix, and skipped when the case does not concern us. A failed case is a bug of
ours.

"""
GPU_HEAD = """## On a GPU

The same catalogues and models on a GPU that all ranks share, virtual ones and those of NCCL, against one process on
that GPU: in float64, in bf16, compiled, in fp8. `python scripts/judges.py --gpu` runs them (minutes). In float64 an
engine's numbers must agree to nine digits; in bf16 a tensor's move may be off by a fiftieth of it, because a number
that is rounded the other way is off by 2^-8 (`tests/judges/oracle.py`).

"""
MUTANTS_HEAD = """## Small mistakes judge the tests

`python scripts/mutants.py` makes small mistakes in the source, one at a time, in rooms that train, keep or predict: an
operator turned, a call left out. Then it looks which test notices. What a GPU alone runs is left out, as `make test`
has none.

"""
TABLE = """| judge | what it checks | passed | refused | skipped | failed |
|---|---|---|---|---|---|
"""


def page_of(
    record: dict[str, Any], gpu_record: dict[str, Any] | None = None, mutants: dict[str, Any] | None = None
) -> str:
    """Returns the page: tables of judges for a record, and that of a GPU; why cases did not pass; small mistakes."""
    page = HEAD + table_of(record)
    if gpu_record is not None:
        machine = gpu_record["machine"]
        judges = {judge: found for judge, found in gpu_record.items() if judge != "machine"}
        page += f"\n{GPU_HEAD}The last run was on one {machine['device']} with torch {machine['torch']}.\n\n"
        page += table_of(judges)
    return page + (f"\n{MUTANTS_HEAD}{told_of(mutants)}" if mutants is not None else "")


def told_of(mutants: dict[str, Any]) -> str:
    """Returns how many mistakes were noticed, and those that were not, with the reason where somebody has read it."""
    told = mutants["summary"]
    text = (
        f"Of {told['mistakes']} mistakes (seed {mutants['seed']}) the tests noticed {told['by_all']:.1%}, "
        f"and those of the mistake's own room {told['by_room']:.1%} (`bench/results/mutants-cpu.json`)."
    )
    if first := mutants.get("first"):  # what a draw of one's own will find, before anybody has read it
        text += f" As drawn, before those that lived had tests: {first['by_all']:.1%} and {first['by_room']:.1%}."
    text += " Not noticed:\n\n"
    rows = [
        f"- `{each['file']}:{each['line']}`: `{each['was']}` became `{each['is']}`: {each.get('why', 'not read yet')}"
        for each in mutants["mistakes"]
        if each["noticed"] == "nobody"
    ]
    return text + "\n".join(rows) + "\n"


def table_of(record: dict[str, Any]) -> str:
    rows, notes = [], []
    for judge, found in record.items():
        counts = found["outcomes"]
        failed = counts.get("failed", 0) + counts.get("error", 0)
        numbers = " | ".join(str(counts.get(name, 0)) for name in ("passed", "refused", "skipped"))
        rows.append(f"| `{judge}` | {purpose_of(judge)} | {numbers} | {failed} |")
        told = [(*reason.split(": ", 1), count) for reason, count in sorted(found["reasons"].items())]
        reasons = [f"- {count} {outcome}: `{why}`" for outcome, why, count in told]
        notes += [f"## {judge}: what did not pass, and why", "", *reasons, ""] if reasons else []
    return TABLE + "\n".join(rows) + "\n\n" + "\n".join(notes).rstrip() + "\n"


def purpose_of(judge: str) -> str:
    """Returns the first sentence of the tests of a judge."""
    folder, _, name = judge.partition("/")
    (path,) = (JUDGES / folder).glob(f"test_{name or '*'}.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def main() -> int:
    """Runs the judges, or only writes their page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write docs/judges.md from the records that there are")
    parser.add_argument("--gpu", action="store_true", help="run the cases for a GPU")
    given, code = parser.parse_args(), 0
    if not given.page:
        ways = GPU_WAYS if given.gpu else ["-n", "2", "-m", "judge and not gpu"]
        command = [sys.executable, "-m", "pytest", "-q", *ways, "--all-judges", str(JUDGES), "--judges-record"]
        record = GPU_RECORD if given.gpu else RECORD
        code = subprocess.run([*command, str(record)], cwd=ROOT, check=False).returncode
    PAGE.write_text(page_of(*read_records()), encoding="utf-8")
    return code


def read_records() -> list[dict[str, Any] | None]:
    """Returns the records that there are, in the order in which the page takes them."""
    paths = (RECORD, GPU_RECORD, MUTANTS_RECORD)
    return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in paths]


if __name__ == "__main__":
    sys.exit(main())
