"""The README's commands run in the order in which they stand, on a fresh copy, twice."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "paceline": [sys.executable, "-m", "paceline"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
QUICK = "paceline plan configs/gpt_7b.yaml"
NOT_COPIED = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "runs", "wheels")


def commands() -> list[str]:
    """Returns the commands of the README in order, without their remarks."""
    lines = [line.strip() for line in _FENCE.sub("", TEXT).splitlines() if line.startswith("    ")]
    return [re.split(r"\s+#", line)[0] for line in lines if not line.startswith("#")]


def script() -> str:
    """Returns the script that the README asks to save as train.py."""
    return next(block[2] for block in _FENCE.finditer(TEXT) if block[1] == "python")


def run(command: str, folder: Path, source: Path) -> str:
    name, *words = shlex.split(command)
    variables = {**os.environ, "PYTHONPATH": str(source), "NO_COLOR": "1"}
    done = subprocess.run(
        [*PROGRAMS[name], *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_is_known() -> None:
    names = [shlex.split(command)[0] for command in commands()]
    assert len(names) >= 10
    assert set(names) == {"make", *PROGRAMS}
    assert names[:2] == ["make", "make"]
    assert {"python train.py", "torchrun --standalone --nproc-per-node 2 train.py"} < set(commands())


def test_it_is_short_and_has_one_picture_with_words() -> None:
    assert len(TEXT.splitlines()) <= 180
    ((words, path),) = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", TEXT)
    assert len(words.split()) > 3
    assert (ROOT / path).is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", [each for each in commands() if each.startswith("make ")])
def test_make_knows_the_target(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "paceline train" in done.stdout or "pytest" in done.stdout


def test_the_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(script(), encoding="utf-8")
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    assert re.fullmatch(r"loss \d\.\d+ on 1 ranks\n", capsys.readouterr().out)


def test_a_quick_command_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (command,) = [each for each in commands() if each.startswith(QUICK)]
    assert "is the fastest of" in run(command, tmp_path, ROOT / "src")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_all_commands_run_in_order_and_twice(tmp_path: Path) -> None:
    clone = tmp_path / "paceline"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (clone / "train.py").write_text(script(), encoding="utf-8")
    for _ in range(2):
        for command in commands():
            if not command.startswith("make "):
                run(command, clone, clone / "src")
    assert {"digits", "digits-2", "quick", "quick-2"} <= {path.name for path in (clone / "runs").iterdir()}
