"""The command line before any process is started: help, wrong input, and what each ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.checkpoint.manifest import Manifest, manifest_text
from paceline.cli.app import app
from paceline.config import config_from_dict
from paceline.errors import ConfigError
from paceline.run.decide import resolve_config
from paceline.run.location import RunOptions

WORLD = {"WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

Call = Callable[..., Any]

# Calls the command line in a fresh process; then says which of the slow modules that took.
CALL = """
import sys
sys.argv = ["paceline", *sys.argv[1:]]
try:
    import paceline.cli.main
    paceline.cli.main.main()
finally:
    print(*sorted({"torch", "numpy", "pydantic", "paceline.config"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["trian"]])
def test_help_is_not_slowed_down_by_what_it_does_not_need(arguments: list[str]) -> None:
    shown = subprocess.run([sys.executable, "-c", CALL, *arguments], capture_output=True, text=True, check=False)
    loaded = shown.stderr.splitlines()[-1].split()
    # typer itself may load pydantic for a verb.
    assert loaded == [] or (loaded == ["pydantic"] and not arguments[0].startswith("--"))
    if "--help" in arguments:
        assert "paceline train digits" in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize("group", ["", "bench", "checkpoint", "cluster", "config"])
def test_summaries_of_commands_fit_a_terminal_of_80_columns(group: str) -> None:
    shown = CliRunner().invoke(app, [*group.split(), "--help"], env={"COLUMNS": "80"}).output
    commands = shown.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert commands
    assert [line for line in commands if line.endswith("...") or len(line) > 80] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "tiny.yaml", "--node-ranks", "0"], "'--node-ranks': "),
        (["train", "tiny.yaml", "--node-ranks", "all"], "'--node-ranks': "),
    ],
)
def test_a_call_that_cannot_be_read_is_answered_with_usage(call: Call, arguments: list[str], message: str) -> None:
    called = call(*arguments)
    assert called.code == 2
    assert called.err.startswith("Usage: paceline")
    assert message in called.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny.yaml", "train.stpes=4"], "did you mean train.steps?"),
        (["tiny.yaml", "train.steps=four"], "train.steps = 'four' is not a whole number"),
        (["tiny.yaml", "train.steps"], "override 'train.steps' is malformed"),
        (["tny.yaml"], "did you mean tiny.yaml?"),
        (["tiny.yaml", "parallel.ranks=3"], "train.global_batch = 8 is not a multiple of parallel.ranks = 3"),
        (["tiny.yaml", "parallel.ranks=16"], "parallel.ranks = 16 is more than train.global_batch = 8"),
        (["tiny.yaml", "name=a/b"], "name = 'a/b' is not a plain folder name"),
        (["tiny.yaml", "parallel.device=cuda", "parallel.ranks=4000", "train.global_batch=4000"], "GPU of its own"),
        (["tiny.yaml", "--resume", "auto"], "no checkpoint in runs/tiny"),
        (["tiny.yaml", "--resume", "nowhere"], "no checkpoint in nowhere"),
        (["tiny.yaml", "monitor.folder=tiny.yaml/runs"], "cannot make the run's folder tiny.yaml/runs/tiny"),
        (["tiny.yaml", "checkpoint.folder=tiny.yaml/x"], "cannot write checkpoint.folder = tiny.yaml/x"),
        (["tiny.yaml", "checkpoint.folder=nothing://x/y"], "nothing://x/y cannot be opened"),
    ],
)
@pytest.mark.usefixtures("project")
def test_wrong_input_is_one_message_and_leaves_nothing(
    call: Call, project: Path, arguments: list[str], message: str
) -> None:
    before = sorted(project.rglob("*"))
    called = call("train", *arguments)
    assert called.code == 2
    assert called.out == ""
    assert called.err.startswith("paceline: ")
    assert message in called.err
    assert "Traceback" not in called.err
    assert sorted(project.rglob("*")) == before


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({**WORLD, "RANK": "9", "LOCAL_RANK": "0"}, "did you mean tiny.yaml?"),  # a config that only this host lacks
        ({**WORLD, "RANK": "9", "LOCAL_RANK": "1"}, None),
    ],
)
def test_a_rank_that_is_refused_is_not_silent(
    call: Call, variables: dict[str, str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    called = call("train", "tiny.yaml" if "MASTER" in (told or "") else "tny.yaml")
    assert called.code == 2
    assert called.err == "" if told is None else told in called.err


def test_a_config_that_is_not_here_is_looked_for_in_the_folder_of_configs(call: Call, project: Path) -> None:
    (project / "configs").mkdir()
    (project / "tiny.yaml").rename(project / "configs" / "tiny.yaml")
    for name, hint in (
        ("tyny.yaml", "did you mean configs/tiny.yaml?"),
        ("x.yaml", "the configs in configs are tiny.yaml"),
    ):
        called = call("train", name)
        assert called.code == 2
        assert hint in called.err


@pytest.mark.parametrize("ranks", ["auto", 2])
def test_a_machine_without_gpus_is_told_as_such(monkeypatch: pytest.MonkeyPatch, ranks: int | str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = config_from_dict(
        {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "parallel": {"device": "cuda", "ranks": ranks}}
    )
    with pytest.raises(ConfigError, match="torch reaches no GPU here"):
        resolve_config(config)


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "comm", "--output"],
        ["calibrate", "--output"],
        ["simulate", "tiny.yaml", "--trace"],
        ["predict", "tiny.yaml", "--cluster", "dgx-h100", "--trace"],
        ["plan", "tiny.yaml", "--cluster", "dgx-h100", "--output"],
        ["validate", "--rows"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(
    call: Call, project: Path, words: list[str]
) -> None:
    before = sorted(project.rglob("*"))
    for name, why in (
        (".", "it is a folder"),
        ("tiny.yaml/x/y.json", ""),
        ("absent/y.json", "there is no folder absent"),
    ):
        called = call(*words, name)
        assert (called.code, called.out) == (2, "")
        assert called.err.startswith(f"paceline: {name} cannot be written: {why}")
    assert sorted(project.rglob("*")) == before


@pytest.mark.parametrize(("name", "code"), [("runs/nowhere", 2), ("tiny.yaml", 2)])
@pytest.mark.usefixtures("project")
def test_a_report_on_nothing_is_refused(call: Call, name: str, code: int) -> None:
    called = call("report", name)
    assert (called.code, called.out) == (code, "")
    assert called.err.startswith(f"paceline: no run to report on in {name}: ")


def test_what_is_in_the_way_of_a_run_is_found_before_torch_is_loaded(project: Path) -> None:
    (project / "runs" / "tiny").mkdir(parents=True)
    (project / "runs" / "tiny" / "thesis.tex").write_text("")
    shown = subprocess.run(
        [sys.executable, "-c", CALL, "train", "tiny.yaml", "--force"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 2
    message, *_, loaded = shown.stderr.splitlines()
    assert message == "paceline: runs/tiny exists and is not a run's folder: it has no config.yaml"
    assert "torch" not in loaded


def test_replacing_a_run_and_going_on_with_it_exclude_each_other(call: Call, project: Path) -> None:
    checkpoint = project / "runs" / "tiny" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    empty = manifest_text(Manifest(step=3, position=0, world=0, tensors={}, files={}))
    (checkpoint / "manifest.json").write_text(empty)
    for resume in ("auto", "runs/tiny", str(checkpoint)):
        called = call("train", "tiny.yaml", "--force", "--resume", resume)
        assert called.code == 2
        assert called.err.startswith(
            f"paceline: --force would remove runs/tiny, from which --resume {resume} continues"
        )
    assert checkpoint.is_dir()


@pytest.mark.usefixtures("project")
def test_options_of_other_launchers_that_nothing_here_is_called_are_answered_at_once(call: Call) -> None:
    words = "train --config tiny.yaml --strategy fsdp --deepspeed ds.json --resum auto --batch-sise 3"
    called = call(*words.split())
    assert (called.code, called.out) == (2, "")
    answers = [block.splitlines()[-1].strip() for block in called.err.strip().split("\n\n")[1:]]
    assert answers == [
        "leave it out, or find its key: paceline config explain CONFIG",
        "did you mean --resume?",
        "did you mean --auto-batch-size?",
    ]
    assert "--deepspeed ds.json is not an option" in called.err
    assert call("train", "tiny.yaml", "--froce").err.endswith("did you mean --force?\n")


def test_a_config_of_others_is_translated_into_a_file_that_checks(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text("model: transformer\nbatch_size: 8\nnum_gpus: 2\nzero_redundancy: true\n")
    called = call("config", "import", "theirs.yaml")
    assert called.code == 0
    assert "batch_size = 8: taken for the batch of a rank" in called.err
    Path("mine.yaml").write_text(called.out)
    assert call("config", "check", "mine.yaml").out == "mine.yaml: no problems\n"
    assert "config import FILE" in call("config", "check", "theirs.yaml").err


@pytest.mark.parametrize(
    "words",
    [
        ("report", "runs/digit"),
        ("watch", "runs/digit"),
        ("sample", "runs/digit", "--prompt", "a"),
        ("checkpoint", "ls", "runs/digit"),
        ("checkpoint", "export", "runs/digit", "weights.safetensors"),
        ("calibrate", "--from", "runs/digit", "--output", "mine.yaml"),
        ("train", "tiny.yaml", "--resume", "runs/digit"),
    ],
    ids=lambda words: words[0],
)
def test_a_run_whose_name_is_misspelt_is_suggested(words: tuple[str, ...], project: Path, call: Call) -> None:
    (project / "runs" / "digits").mkdir(parents=True)
    called = call(*words)
    assert called.code == 2, called
    assert "did you mean runs/digits?" in called.err


@pytest.mark.parametrize("word", ["last", "latest", "auto"])
def test_the_newest_checkpoint_has_several_names_unless_a_folder_has_one(word: str, project: Path, call: Call) -> None:
    assert RunOptions(resume=word).resume == "auto"
    called = call("train", "tiny.yaml", "--resume", word)
    assert "no checkpoint in runs/tiny" in called.err
    (project / word).mkdir()
    assert RunOptions(resume=word).resume == word


def test_what_others_print_to_a_terminal_that_is_none_has_no_escape_codes() -> None:
    """Open MPI's ranks have a terminal of their own, whoever reads mpirun's output; torch's store traces C++."""
    shows = "import os; app.run_command = lambda: print(os.environ['TERM'], os.environ['TORCH_CPP_LOG_LEVEL'])"
    code = f"import paceline.cli.app as app; {shows}; from paceline.cli.main import main; main()"
    asked = {"TERM": "xterm", "TORCH_CPP_LOG_LEVEL": "INFO"}
    plain = {name: value for name, value in os.environ.items() if name not in asked}
    for variables, told in (({}, "xterm ERROR"), ({"OMPI_COMM_WORLD_RANK": "1"}, "dumb ERROR"), (asked, "xterm INFO")):
        environment = plain | {"TERM": "xterm"} | variables
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == told
