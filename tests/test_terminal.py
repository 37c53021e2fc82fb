"""Terminal escapes and markup in what is read from files: shown, and never obeyed."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_runs import call as call
from made_records import END, RUN, STEP, write_records
from rich.table import Table

import paceline
from paceline.errors import did_you_mean
from paceline.records.console import ProgressView
from paceline.records.records import EventRecord
from paceline.terminal import new_console, plain, table_lines

ESCAPES = "\x1b[2J\x1b]0;title\x07 \x9b1A \r \u202e [bold]mark[/bold] :smile: done"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_whatever_a_terminal_obeys_is_written_out() -> None:
    every = "".join(map(chr, range(0x3000)))
    shown = plain(every)
    assert not OBEYED.search(shown)
    assert {each for each in every if unicodedata.category(each) == "Cc" and each in shown} == {"\n", "\t"}
    assert plain("\x1b[2Jä 北\n\ttail") == "\\x1b[2Jä 北\n\ttail"
    assert plain("step 3: 1.25 ü") == "step 3: 1.25 ü"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_console_keeps_its_own_colours_and_no_others(is_terminal: bool) -> None:
    file = io.StringIO()
    console = new_console(file)
    console._force_terminal = is_terminal
    table = Table("name", style="red")
    table.add_row(ESCAPES)
    console.print(ESCAPES, table)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()) if is_terminal else file.getvalue()
    assert not OBEYED.search(shown)
    assert "\\x1b[2J" in shown
    assert "[bold]mark[/bold] :smile:" in shown


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose records and checkpoints say things to the terminal."""
    folder = tmp_path / f"run{ESCAPES.replace('/', '')}"
    run = replace(RUN, host=ESCAPES, strategy=ESCAPES, device=ESCAPES)
    event = EventRecord(name=ESCAPES, step=1, detail={"why": ESCAPES}, time=RUN.time + 1)
    for rank in (0, 1):
        end = replace(END, status="failed", message=ESCAPES)
        write_records(folder, rank, replace(run, rank=rank), STEP, event, end)
    (folder / "checkpoints" / f"step-00000001{ESCAPES.replace('/', '')}").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000002").mkdir()
    (folder / "checkpoints" / "step-00000002" / "manifest.json").write_text(f'{{"format": "{ESCAPES}"}}')
    return folder


@pytest.mark.parametrize(
    "words", [["report"], ["checkpoint", "ls"], ["checkpoint", "verify"], ["checkpoint", "inspect"]]
)
def test_commands_show_what_files_say_escaped(call: Callable[..., Any], run: Path, words: list[str]) -> None:
    called = call(*words, str(run))
    assert called.out + called.err
    assert not OBEYED.search(called.out + called.err)
    if words == ["report"]:
        assert "\\x1b[2J" in called.out
        assert "[bold]mark[/bold]" in called.out


def test_progress_and_errors_are_escaped(capsys: pytest.CaptureFixture[str], call: Callable[..., Any]) -> None:
    view = ProgressView()
    view.write(replace(RUN, strategy=ESCAPES), EventRecord(name=ESCAPES, step=1, detail={}, time=RUN.time + 1))
    view.close()
    shown = capsys.readouterr().out
    assert "\\x1b[2J" in shown
    assert not OBEYED.search(shown)
    called = call("train", f"no{ESCAPES}.yaml")
    assert "\\x1b[2J" in called.err
    assert not OBEYED.search(called.err)


def test_nothing_else_writes_to_a_terminal() -> None:
    """All that the command line shows goes through ``terminal.py``."""
    package = Path(paceline.__file__).parent
    for path in [*package.glob("cli/*.py"), *package.glob("run/*.py"), *package.glob("records/*.py")]:
        found = re.search(r"typer\.echo\(|(?<![\w.])Console\(", path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found and found[0]}: take echo or new_console of paceline.terminal"


def test_columns_of_a_table_stand_below_one_another() -> None:
    assert table_lines([("step", "size"), ("8", "1.5 MiB"), ("1024", "2")]) == [
        "step  size",
        "8     1.5 MiB",
        "1024  2",
    ]


def test_a_word_that_is_not_known_is_answered_by_the_one_most_like_it() -> None:
    assert did_you_mean("rng", ("ring", "tree"), "take one") == "did you mean ring?"
    assert did_you_mean("xyz", ("ring", "tree"), "take one") == "take one"
