"""Ctrl-C at any moment: exit code 130, one line, no traceback; twice: at once. Real processes, real signals."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline.cli

LINE = "paceline: ended by SIGINT (Ctrl-C)"

# Calls the command line in a fresh process, and presses Ctrl-C when a module is looked for, or at the very end.
PRESS = """
import atexit, os, signal, sys
moment = sys.argv.pop(1)

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
if moment == "the end":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
from paceline.cli.main import main
main()
"""

# A command that does not come to its end when it is interrupted.
STUBBORN = """
import sys, time
import paceline.cli.app, paceline.cli.main

def run_command():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("unwinding", flush=True)
        time.sleep(60)

paceline.cli.app.run_command = run_command
paceline.cli.main._PATIENCE_S = float(sys.argv[1])
paceline.cli.main.main()
"""

# What is loaded on the way to ``paceline --version``.
LOADED = """
import sys
sys.argv = ["paceline", "--version"]
before = set(sys.modules)
try:
    from paceline.cli.main import main
    main()
finally:
    print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


def press_at(moment: str) -> tuple[int, str]:
    command = [sys.executable, "-c", PRESS, moment, "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return shown.returncode, shown.stderr.strip()


@pytest.mark.parametrize("moment", ["paceline.cli.app", "typer.main", "the end"])
def test_ctrl_c_while_python_loads_or_ends_is_one_line(moment: str) -> None:
    assert press_at(moment) == (130, LINE)


def start_command(folder: Path, before: str) -> subprocess.CompletedProcess[str]:
    """Runs ``paceline --version`` by the script that is installed, with shell commands before Python starts."""
    script, python = folder / "bin" / "paceline", folder / "bin" / "python"
    script.parent.mkdir()
    shutil.copy(Path(paceline.cli.__file__).with_name("paceline.sh"), script)
    python.write_text(f'#!/bin/sh\n{before}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / "link").symlink_to(script)
    command = [str(folder / "link"), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_installed_command_runs_the_python_beside_it(tmp_path: Path) -> None:
    assert start_command(tmp_path, ":").stdout == f"paceline {paceline.__version__}\n"


@pytest.mark.skipif(
    subprocess.run(["env", "--block-signal=INT", "true"], capture_output=True, check=False).returncode != 0,
    reason="this env cannot hold signals back",
)
def test_ctrl_c_before_python_has_started_is_one_line(tmp_path: Path) -> None:
    shown = start_command(tmp_path, "kill -INT $$")
    assert (shown.returncode, shown.stderr.strip(), shown.stdout) == (130, LINE, "")


@pytest.mark.exhaustive
def test_ctrl_c_at_the_import_of_any_module_is_one_line() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False).stderr.split()
    before = ("paceline", "paceline.cli", "paceline.cli.main", "types", "__future__")  # before our first line
    moments = [each for each in loaded if each not in before]
    assert len(moments) > 100
    for moment in random.Random(0).sample(moments, 60):
        assert press_at(moment) in ((130, LINE), (0, "")), moment  # the latter: no finder is asked for it


def test_an_import_is_not_unwound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch aborts where its import is interrupted. The temporary folder of a run is removed all the same."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nfinally:\n    print('unwound')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    code = "import sys, paceline.cli.app, paceline.cli.main as m\nfrom paceline.run.signals import scratch_folder\n"
    code += "def run():\n    with scratch_folder():\n        import slow\n"
    code += "paceline.cli.app.run_command = run\nm.main()\n"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (shown.returncode, shown.stderr.strip(), shown.stdout) == (130, LINE, "")
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("patience", ["60", "0.05"])
def test_a_command_that_hangs_is_left_at_the_second_ctrl_c_or_after_a_while(patience: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN, patience], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        if patience == "60":
            assert process.stdout.readline() == "unwinding\n"
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read().strip() == LINE


def test_ctrl_c_while_ranks_load_or_train_ends_the_run(
    project: Path, live: Callable[..., Any], all_gone: Callable[[], list[int]]
) -> None:
    run = live()
    run.wait_until(lambda: (project / "runs" / "tiny").is_dir())
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.error()
    assert run.error().startswith(LINE)
    assert run.error().count("\n") == 1
    all_gone()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("real_starts")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_at_random_moments_of_a_run(
    project: Path,
    live: Callable[..., Any],
    all_gone: Callable[[], list[int]],
    record_property: Callable[[str, object], None],
    presses: int,
) -> None:
    record_property("faults", 15)
    moments = random.Random(presses)
    for _ in range(15):
        run = live("--force", "checkpoint.every_steps=20")
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(moments.uniform(0.3, 8.0))
        run.process.send_signal(signal.SIGINT)
        if presses == 2:
            with contextlib.suppress(subprocess.TimeoutExpired):  # while Python loads, the first leaves at once
                run.process.wait(0.05)
            run.process.send_signal(signal.SIGINT)
        assert run.process.wait(3.0) == 130  # 2 s, and some for a machine that is busy
        assert run.error().startswith(LINE)
        assert run.error().count("\n") == 1
        all_gone()
    assert not [path for path in Path(project, "runs").glob(".*") if path.is_dir()]
