"""Runs the tests with the oldest and with the newest packages that pyproject.toml allows, and writes the record.

    python scripts/compat.py                          both (make compat): two environments, the tests in each
    python scripts/compat.py --arm lowest tests/comm  one of them, with some of the tests: nothing is recorded

    lowest    Python 3.11; of every package that Paceline needs, the series that its lower bound names: torch>=2.9 is
              the newest of 2.9. Packages of the extras data, hf, remote and watch too
    newest    Python 3.13; the newest of everything

pip is used as it is set up: where an unpinned torch brings CUDA along, give it an index of torch for CPUs
(PIP_EXTRA_INDEX_URL). Without the Python of an arm (python3.11, python3.13 on the PATH) the arm is refused. The record
is bench/results/compat-cpu.json. Exit code 1: a test failed.
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
    """Makes the environment of an arm, and returns its Python; one that is there is kept."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    if (base := shutil.which(PYTHONS[arm])) is None:
        sys.exit(
            f"{PYTHONS[arm]} is not on the PATH\n  the arm {arm} runs on it\n  install it, or name the other --arm"
        )
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    held = folder / "pins.txt"
    held.write_text("\n".join(pins(bounds) if arm == "lowest" else []) + "\n", encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
    subprocess.run([*install, "-c", str(held), "-e", f"{ROOT}[dev]"], check=True)
    (folder / "ready").touch()
    return python


def run_tests(python: Path, tests: list[str], workers: int, report: Path) -> dict[str, Any]:
    """Runs tests, and returns how many passed, failed and were skipped, with the names of those that failed."""
    words = ["-q", "-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([str(python), "-m", "pytest", *words, *tests], cwd=ROOT, check=False)
    return outcomes(report.read_text(encoding="utf-8"))


def outcomes(report: str) -> dict[str, Any]:
    """Counts what a report of pytest in JUnit's form tells."""
    failed, skipped, total = [], 0, 0
    for case in ElementTree.fromstring(report).iter("testcase"):  # pytest wrote it a moment ago
        total += 1
        kinds = {part.tag for part in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        skipped += "skipped" in kinds
    return {"passed": total - len(failed) - skipped, "skipped": skipped, "failed": sorted(failed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", help="what of the tests to run; nothing is recorded then")
    parser.add_argument("--arm", choices=PYTHONS, help="one of the two")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compat", help="where the environments go")
    parser.add_argument("--workers", type=int, default=3)
    asked = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds, num_failed = lower_bounds(project), 0
    for arm in [asked.arm] if asked.arm else list(PYTHONS):
        python = make_environment(arm, asked.folder.absolute() / arm, bounds)
        found = run_tests(python, asked.tests or ["tests"], asked.workers, asked.folder.absolute() / f"{arm}.xml")
        told = subprocess.run([str(python), "-c", _VERSIONS, *bounds], capture_output=True, text=True, check=True)
        num_failed += len(found["failed"])
        print(f"{arm}: {found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped")
        print("\n".join(f"  {each}" for each in found["failed"]))
        if not asked.tests:
            record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
            record[arm] = {"versions": json.loads(told.stdout), **found}
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
