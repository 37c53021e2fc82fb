"""``paceline doctor`` from the command line: help without torch, findings as text and JSON, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

HELP = """
import sys
sys.argv = ["paceline", "doctor", "--help"]
try:
    import paceline.cli.main
    paceline.cli.main.main()
finally:
    print(*sorted({"torch", "numpy", "psutil", "paceline.config"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
        monkeypatch.delenv(name)


def test_help_teaches_and_needs_no_torch() -> None:
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert shown.stderr.strip() == ""
    for part in ("exit code 1", "paceline doctor digits", "--quick", "ranks that hang"):
        assert part in " ".join(shown.stdout.split())
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_two_real_ranks_shake_hands_and_the_findings_are_json(call: Call, project: Path) -> None:
    called = call("doctor", "tiny.yaml", "--json")
    result = json.loads(called.out)
    problems = [each["name"] for each in result["findings"] if each["status"] == "problem"]
    assert not {"handshake", "run", "variables", "python", "torch"} & set(problems)
    assert (called.code, result["ok"]) == ((1, False) if problems else (0, True))
    names = [each["name"] for each in result["findings"]]
    assert names[0] == "python"
    assert {"torch", "gpus", "processors", "memory", "disk", "host name", "variables", "run", "handshake"} <= set(names)
    (handshake,) = [each for each in result["findings"] if each["name"] == "handshake"]
    assert handshake["found"].startswith("two ranks started, met and agreed in")
    (shared,) = [each for each in result["findings"] if each["name"] == "shared handshake"]
    assert shared["found"].startswith("an all-reduce in shared memory takes") or shared["status"] == "note"
    assert not (project / "runs").exists()


def test_problems_are_told_with_a_fix_and_end_with_1(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "loud")
    called = call("doctor", "--quick")
    assert (called.code, called.err) == (1, "")
    assert "problem  variables" in called.out
    assert "it is one of VERSION, WARN, INFO, TRACE" in called.out
    assert "fix: unset NCCL_DEBUG" in called.out
    assert "handshake" not in called.out
    assert "1 problem" in called.out.splitlines()[-1]


def test_problems_of_the_config_are_findings_beside_those_of_the_machine(call: Call, project: Path) -> None:
    called = call("doctor", "tiny.yaml", "train.stpes=4", "--quick", "--json")
    result = json.loads(called.out)
    assert called.code == 1
    assert result["findings"][0]["name"] == "config"
    assert result["findings"][0]["fix"] == "did you mean train.steps?"
    assert any(each["name"] == "memory" for each in result["findings"])
    assert call("doctor", "none.yaml", "--quick", "--json").code == 1
    assert project.is_dir()


# A Python in which some libraries are not installed: no finder finds them.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("psutil", "torch")
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
sys.argv = ["paceline", "doctor"]
from paceline.cli.main import main
main()
"""


def test_without_its_libraries_the_doctor_still_speaks() -> None:
    shown = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "not installed: psutil, torch" in shown.stdout
    assert "1 problem" in shown.stdout
