"""Runs the tests with the oldest and with the newest packages that pyproject.toml allows, and writes the record.

    python scripts/compat.py                          both (make compat): two environments, the tests in each
    python scripts/compat.py --arm lowest tests/comm  one of them, with some of the tests: nothing is recorded
    python scripts/compat.py --failed                 what failed in the record once more, in the same environments

    lowest    Python 3.11; of every package that Paceline needs, the series that its lower bound names: torch>=2.9 is
              the newest of 2.9. Packages of the extras data, hf, remote and watch too
    newest    Python 3.13; the newest of everything

pip is used as it is set up: where an unpinned torch brings CUDA along, give it an index of torch for CPUs
(PIP_EXTRA_INDEX_URL). Without the Python of an arm (python3.11, python3.13 on the PATH) the arm is refused. The record
is bench/results/compat-cpu.json: of each arm the versions, the commit, and the counts. A test that passes with --failed
is counted as passed; the record keeps under "again" how many were run once more, and at which commit. Exit code 1: a
test failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "bench" / "results" / "compat-cpu.json"
PYTHONS = {"lowest": "python3.11", "newest": "python3.13"}
EXTRAS = ("data", "hf", "remote", "watch")
_BOUND = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(?:\[\w+\])?>=(?P<version>[0-9.]+)")
_VERSIONS = """
import json, platform, sys
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))
"""


def lower_bounds(project: dict[str, Any]) -> dict[str, str]:
    """Returns the lower bound of every package that Paceline needs, and of those of some extras, by name."""
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    found = [_BOUND.fullmatch(each) for each in asked]
    return {each["name"]: each["version"] for each in found if each is not None}


def pins(bounds: dict[str, str]) -> list[str]:
    """Returns what holds pip at the series of each lower bound."""
    return [f"{name}=={version}.*" for name, version in bounds.items()]


def make_environment(arm: str, folder: Path, bounds: dict[str, str]) -> Path:
    """Makes the environment of an arm, and returns its Python; one that was made for the same bounds is kept."""
    python, held, ready = folder / "bin" / "python", folder / "pins.txt", folder / "ready"
    wanted = "\n".join(pins(bounds) if arm == "lowest" else []) + "\n"
    if ready.exists() and held.read_text(encoding="utf-8") == wanted:
        return python
    if (base := shutil.which(PYTHONS[arm])) is None:
        sys.exit(
            f"{PYTHONS[arm]} is not on the PATH\n  the arm {arm} runs on it\n  install it, or name the other --arm"
        )
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    held.write_text(wanted, encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
    subprocess.run([*install, "-c", str(held), "-e", f"{ROOT}[dev]"], check=True)
    ready.touch()
    return python


def run_tests(python: Path, tests: list[str], workers: int, report: Path) -> dict[str, Any]:
    """Runs tests, and returns how many passed, failed and were skipped, with the names of those that failed."""
    words = ["-q", "-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    subprocess.run([str(python), "-m", "pytest", *words, *tests], cwd=ROOT, check=False)
    return outcomes(report.read_text(encoding="utf-8"))


def outcomes(report: str) -> dict[str, Any]:
    """Counts what a report of pytest in JUnit's form tells; a test that fails and then cannot clean up counts once."""
    cases: dict[str, set[str]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):  # pytest wrote it a moment ago
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        cases.setdefault(name, set()).update(part.tag for part in case)
    failed = sorted(name for name, kinds in cases.items() if kinds & {"failure", "error"})
    skipped = sum("skipped" in kinds for name, kinds in cases.items() if name not in failed)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def once_more(before: dict[str, Any], found: dict[str, Any], commit: str) -> dict[str, Any]:
    """Returns the record of an arm whose failed tests were run once more."""
    if (ran := found["passed"] + found["skipped"] + len(found["failed"])) != len(before["failed"]):
        sys.exit(
            f"{len(before['failed'])} tests failed in the record, and {ran} were run\n  run the arm without --failed"
        )
    again = {"commit": commit, "ran": ran, "failed": len(found["failed"])}
    counts = {kind: before[kind] + found[kind] for kind in ("passed", "skipped")}
    return {**before, **counts, "failed": found["failed"], "again": [*before.get("again", []), again]}


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def run_arm(arm: str, asked: argparse.Namespace) -> int:
    """Runs the tests of an arm, writes its part of the record, and returns how many failed."""
    bounds = lower_bounds(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])
    before = read_record().get(arm, {"failed": [], "versions": {}})
    tests = before["failed"] if asked.failed else asked.tests or ["tests"]
    if not tests:
        return 0
    python = make_environment(arm, asked.folder.absolute() / arm, bounds)
    told = subprocess.run([str(python), "-c", _VERSIONS, *bounds], capture_output=True, text=True, check=True)
    versions = json.loads(told.stdout)
    if asked.failed and before["versions"] != versions:
        sys.exit(f"the environment of {arm} has other versions than the record\n  run the arm without --failed")
    state = ["git", "describe", "--always", "--dirty"]  # before the tests, which take a while
    commit = subprocess.run(state, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    found = run_tests(python, tests, asked.workers, asked.folder.absolute() / f"{arm}.xml")
    print(f"{arm}: {found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped")
    print("\n".join(f"  {each}" for each in found["failed"]))
    if asked.failed or not asked.tests:
        whole = {"versions": versions, "commit": commit, **found}
        now = once_more(before, found, commit) if asked.failed else whole
        RECORD.write_text(json.dumps({**read_record(), arm: now}, indent=1) + "\n", encoding="utf-8")
    return len(found["failed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", help="what of the tests to run; nothing is recorded then")
    parser.add_argument("--arm", choices=PYTHONS, help="one of the two")
    parser.add_argument("--failed", action="store_true", help="what failed in the record, which is then mended")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compat", help="where the environments go")
    parser.add_argument("--workers", type=int, default=3)
    asked = parser.parse_args()
    if asked.failed and asked.tests:
        parser.error("--failed names the tests: leave them out")
    return 1 if sum(run_arm(arm, asked) for arm in ([asked.arm] if asked.arm else PYTHONS)) else 0


if __name__ == "__main__":
    sys.exit(main())
