"""Runs the soak: every test that injects faults into real processes. Writes how long it took and what it counted.

    python scripts/soak.py                 all of it (make soak)
    python scripts/soak.py --share 20      every 20th test, spread evenly: minutes
    python scripts/soak.py --hosts 20      so many hosts are lost and come back, of eight (root; half an hour)

The record is bench/results/soak-cpu.json, of a part soak-cpu-part.json: a row for each file of tests, and one for all.
``faults`` are those that tests count which inject many each. The exit code is that of pytest. The soak of hosts is
that of tests/pool/host_soak.py; its record is bench/results/soak-hosts-cpu.json: a row for each loss, and one for all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline_bench.timing import BenchRecord

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of the tests of one file; ``seconds`` are those of its tests, one after the other."""

    file: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    faults: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Counter:
    """A plugin of pytest that counts."""

    rows: dict[str, Row] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        row = self.rows.setdefault(file, Row(file=file))
        row.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            setattr(row, report.outcome, getattr(row, report.outcome) + 1)
        if report.when == "call":
            row.faults += sum(int(value) for name, value in report.user_properties if name == "faults")


def find_tests() -> list[str]:
    """Returns the names of all tests of the soak."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "soak"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in shown.splitlines() if "::" in line]


def take_share(names: Sequence[str], share: int) -> list[str]:
    """Returns every so many of the names, spread over them evenly; at least one."""
    return list(names[share // 2 :: share] or names[:1])


def summarize(counter: Counter, wall_s: float) -> list[dict[str, Any]]:
    """Returns the rows of a record: each file's, and that of all, whose seconds are those that it took."""
    rows = sorted(counter.rows.values(), key=lambda row: row.file)
    total = Row(file="all", seconds=wall_s)
    for name in ("passed", "failed", "skipped", "faults"):
        setattr(total, name, sum(getattr(row, name) for row in rows))
    return [asdict(row) | {"seconds": round(row.seconds, 1)} for row in [*rows, total]]


def soak_hosts(num_losses: int, seed: int, output: Path | None) -> int:
    """Loses so many hosts of a run and gives them back, and writes the record; 0: all was as it should be."""
    sys.path[:0] = [str(ROOT / "tests" / "pool"), str(ROOT / "bench")]
    from host_soak import CLOCKS_S, HOSTS, LEAST, is_right, run_soak, soaking

    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as folder, soaking(Path(folder), seed) as soak:
        is_well = False
        try:
            found = run_soak(soak, num_losses, num_steps=60 * num_losses)
            is_well = is_right(found["summary"])
        finally:
            if not is_well:
                print(soak.log, file=sys.stderr)
    BenchRecord(
        name="soak of hosts",
        command=" ".join(["python", "scripts/soak.py", *sys.argv[1:]]),
        rows=[*found["events"], found["summary"]],
        config={"hosts": HOSTS, "least": LEAST, "clocks_ahead_s": list(CLOCKS_S[:HOSTS]), "seed": seed},
    ).write(output or RESULTS / "soak-hosts-cpu.json")
    print(found["summary"])
    return 0 if is_well else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the soak and writes its record.")
    parser.add_argument("--share", type=int, default=1, help="every so many tests; 1: all")
    parser.add_argument("--workers", type=int, default=2, help="tests at a time")
    parser.add_argument("--output", type=Path, help="the record")
    parser.add_argument("--hosts", type=int, metavar="LOSSES", help="the soak of hosts instead, with so many losses")
    parser.add_argument("--seed", type=int, default=1, help="of the soak of hosts")
    asked = parser.parse_args()
    if asked.hosts is not None:
        return soak_hosts(asked.hosts, asked.seed, asked.output)
    if asked.share < 1 or asked.workers < 1:
        parser.error(f"--share {asked.share} --workers {asked.workers}: both are counts, of at least 1")
    os.chdir(ROOT)
    names = find_tests()
    taken = take_share(names, asked.share)
    counter, start = Counter(), time.monotonic()
    code = pytest.main(["-q", "-n", str(asked.workers), "--dist", "worksteal", "-m", "soak", *taken], plugins=[counter])
    rows = summarize(counter, time.monotonic() - start)
    output = asked.output or RESULTS / ("soak-cpu.json" if asked.share == 1 else "soak-cpu-part.json")
    BenchRecord(
        name="soak",
        command=" ".join(["python", "scripts/soak.py", *sys.argv[1:]]),
        rows=rows,
        config={"tests": len(taken), "of": len(names), "share": asked.share, "workers": asked.workers},
    ).write(output)
    print(f"{rows[-1]}\nthe record is {output}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
