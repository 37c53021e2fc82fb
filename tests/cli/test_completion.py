"""The Tab key: asked as the scripts of ``paceline --show-completion`` ask; nothing slow is loaded for an answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.app import run_command
from paceline.config.suggest import known_fields, known_paths

Ask = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "digits-2"):
        (tmp_path / "runs" / name / "records").mkdir(parents=True)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    (tmp_path / "elsewhere" / "mine" / "config.yaml").write_text("name: mine\n")
    (tmp_path / "my.yaml").write_text("name: mine\n")
    (tmp_path / "my.txt").write_text("")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Returns what bash is offered for the last of some words."""

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("_PACELINE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("paceline", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as ended:
            run_command()
        assert ended.value.code == 0
        return capsys.readouterr().out.split()

    return ask


def test_verbs_and_options(offered: Ask) -> None:
    assert offered("tr") == ["train"]
    assert "verify" in offered("checkpoint", "")
    assert offered("train", "digits", "--res") == ["--resume"]


def test_configs_are_those_that_ship_and_files(offered: Ask) -> None:
    found = offered("train", "")
    assert {"digits", "gpt_pydoc", "my.yaml", "runs/"} <= set(found)
    assert not {"my.txt", "llama_1b"} & set(found)
    assert offered("predict", "elsewhere/mine/") == ["elsewhere/mine/config.yaml"]


def test_keys_are_offered_by_section_and_the_last_one_with_values(offered: Ask) -> None:
    assert {"name=", "optim.", "train."} <= set(offered("train", "my.yaml", ""))
    keys = offered("train", "my.yaml", "train.steps=3", "optim.")
    assert set(keys) == {
        f"{path}{'.' if is_section else '='}"
        for path, (_, is_section) in known_paths().items()
        if path.startswith("optim.") and path.count(".") == 1
    }
    assert offered("train", "my.yaml", "opt") == keys
    assert offered("train", "my.yaml", "optim.nest") == [f"optim.nesterov={each}" for each in ("", "true", "false")]
    assert offered("train", "my.yaml", "optim.eps") == ["optim.eps=", "optim.eps=1e-08"]
    assert offered("train", "my.yaml", "no.such") == []


def test_bash_takes_a_key_and_its_value_for_three_words(offered: Ask) -> None:
    zeros = ["zero1", "zero2", "zero3"]
    assert offered("train", "my.yaml", "parallel.strategy", "=", "ze") == zeros
    assert offered("train", "my.yaml", "parallel.strategy=ze") == [f"parallel.strategy={each}" for each in zeros]


def test_runs_are_those_of_the_folder_runs_and_of_the_one_being_written(offered: Ask) -> None:
    for verb in (("report",), ("watch",), ("sample",), ("checkpoint", "ls")):
        assert offered(*verb, "") == ["runs/digits", "runs/digits-2"]
    assert offered("report", "runs/digits-") == ["runs/digits-2"]
    assert offered("report", "elsewhere/") == ["elsewhere/mine"]


def test_all_keys_are_known_to_both_lists() -> None:
    assert known_paths().keys() == {field.path for field in known_fields()}


def test_torch_is_not_loaded_for_it() -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline\ntrain\nx\noptim.l", "COMP_CWORD": "3"}
    code += "from paceline.cli.main import main; main()"
    command, env = [sys.executable, "-c", code, "train"], {**os.environ, **asked}
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == ["optim.lr=", "optim.lr_scaling=", "optim.lr_batch=", "False"]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_script_for_bash_asks_so() -> None:
    words = "COMP_WORDS=(paceline report runs/digits-); COMP_CWORD=2; _paceline_completion paceline"
    paceline = Path(sys.executable).parent / "paceline"
    show = f"source <({paceline} --show-completion bash); {words}; printf '%s ' ${{COMPREPLY[@]}}"
    env = {**os.environ, "PATH": f"{paceline.parent}:{os.environ['PATH']}"}
    env |= {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    found = subprocess.run(["bash", "-c", show], env=env, capture_output=True, text=True, check=True)
    assert found.stdout == "runs/digits-2 "
