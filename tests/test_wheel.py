"""The wheel as a user gets it: installed elsewhere, in an empty folder, it trains what its own help begins with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
Paceline = Callable[..., str]


@pytest.fixture(scope="module")
def paceline(tmp_path_factory: pytest.TempPathFactory) -> Paceline:
    """The command of a wheel in an environment of its own, which borrows only what the package depends on."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    venv.create(place / "venv", with_pip=False, symlinks=True)
    python, (wheel,) = place / "venv" / "bin" / "python", place.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    subprocess.run([*install, "--no-deps", "--no-compile", str(wheel)], check=True)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    # A plain path, whose own .pth files are not read: among them is the one that leads to the sources.
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    empty = place / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}

    def run(*words: str) -> str:
        command = [str(python.parent / "paceline"), *words]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def first_example(paceline: Paceline) -> list[str]:
    found = re.search(r"Start with:\s+paceline (.*)", paceline("--help"))
    assert found is not None
    return found[1].split()


@pytest.mark.exhaustive
def test_what_help_starts_with_works_in_an_empty_folder(paceline: Paceline) -> None:
    quick = ("train.steps=2", "train.epochs=null", "comm.backend=virtual", "parallel.device=cpu", "parallel.ranks=2")
    assert "runs/digits/report.html" in paceline(*first_example(paceline), *quick)


def test_its_config_is_checked_and_written_out_there(paceline: Paceline) -> None:
    verb, config = first_example(paceline)
    assert verb == "train"
    assert paceline("config", "check", config) == f"{config}: no problems\n"
    paceline("config", "copy", config, "mine.yaml")
    assert paceline("config", "check", "mine.yaml") == "mine.yaml: no problems\n"


def test_the_course_comes_with_it(paceline: Paceline) -> None:
    assert "  1.1 " in paceline("learn", "check")
    assert "learn check 1.1 " in paceline("learn", "check", "1.1")
