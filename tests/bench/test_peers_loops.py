"""The converted script of docs/convert.md: what changes in it, that it gives the plain numbers, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from loaded_script import load_script
from page_figures import ROOT, read_record

import paceline
import peers_loops
from own_loops.mistakes import ARMS, MISTAKES, script_of

RECORD = read_record("own-loops-cpu")
SILENT = {"uneven"}  # the page says that ours does not notice it


def test_the_page_shows_the_scripts_and_the_record() -> None:
    page = peers_loops.PAGE.read_text(encoding="utf-8")
    assert peers_loops.with_parts(page, RECORD) == page


def test_the_script_is_converted_by_fifteen_lines() -> None:
    counted = peers_loops.changed_lines("with_paceline")
    assert counted == {"changed": 15, "removed": 7, "added": 15}
    for arm, (name, _) in ARMS.items():
        (row,) = [row for row in RECORD["rows"] if row["kind"] == "script" and row["arm"] == arm]
        assert peers_loops.changed_lines(name).items() <= row.items(), f"{name}.py is not the script of the record"


@pytest.mark.parametrize("arm", ARMS)
def test_each_mistake_can_be_made_in_each_script(arm: str) -> None:
    for name, mistake in MISTAKES.items():
        made = script_of(arm, mistake.edits(arm))
        assert made != script_of(arm)
        compile(made, name, "exec")
        compile(script_of(arm, mistake.right.get(arm.split()[0], ())), name, "exec")


def test_ours_neither_trains_on_wrong_numbers_without_a_word_nor_hangs() -> None:
    rows = [row for row in RECORD["rows"] if row["kind"] == "mistake"]
    assert {(row["name"], row["arm"]) for row in rows} == {(name, arm) for name in MISTAKES for arm in ARMS}
    bad = {row["name"] for row in rows if row["arm"].startswith("paceline") and row["outcome"] in ("silent", "hang")}
    assert bad == SILENT


def test_the_converted_script_gives_the_plain_ones_curve_on_1_2_and_3_virtual_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run of 2 ranks goes on with 3."""
    own, make_run = threading.local(), paceline.Run

    def note_run(*args: Any) -> Any:
        own.run = make_run(*args)
        return own.run

    monkeypatch.setattr(paceline, "Run", note_run)
    monkeypatch.setattr(paceline, "connect", lambda: own.comm)
    plain = load_script(peers_loops.SCRIPTS / "plain.py").main(2)
    script = load_script(peers_loops.SCRIPTS / "with_paceline.py")

    def work(comm: Any, epochs: int) -> Any:
        own.comm = comm
        curve = script.main(epochs)
        own.run.close()  # as the end of its process does
        return curve

    for name, *turns in (("1", (1, 2)), ("3", (3, 2)), ("resumed", (2, 1), (3, 2))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for ranks, epochs in turns:
            curves = paceline.run_virtual(lambda comm, epochs=epochs: work(comm, epochs), ranks=ranks)
            assert all(peers_loops.difference(each, plain[:epochs]) < peers_loops.CLOSE for each in curves), name


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arm", ["paceline fsdp", "paceline ddp"])
def test_it_gives_that_curve_on_1_2_and_3_real_ranks(arm: str, tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    command = [sys.executable, "bench/peers_loops.py", "--arms", arm, "--mistakes", "none", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(output.read_text())["rows"]
    differences = [*row["off"].values(), row["resumed"]]
    assert len(differences) == 4
    assert max(differences) < peers_loops.CLOSE, row


def test_what_came_of_a_mistake_is_read_from_its_run() -> None:
    right = peers_loops.Done(code=0, curve=[1.0, 0.5], text="a.py:1: UserWarning: as ever\n")

    def outcome(code: int | None, curve: list[float] | None, text: str = "") -> tuple[str, str]:
        return peers_loops.outcome(peers_loops.Done(code=code, curve=curve, text=text), right)

    assert outcome(0, [1.0, 0.5], "a.py:1: UserWarning: as ever\n")[0] == "right"
    assert outcome(0, [1.0, 0.6]) == ("silent", "the curve differs by 1.0e-01")
    assert outcome(0, [1.0]) == ("silent", "it ended after 1 of 2 epochs")
    assert outcome(0, [1.0, 0.6], "b.py:2: UserWarning: rank 1 is late\n") == ("told", "rank 1 is late")
    assert outcome(None, None)[0] == "hang"
    assert outcome(1, None, "[rank1]: RuntimeError: reset\n") == ("error", "RuntimeError: reset")
    assert outcome(1, None, "paceline.errors.UsageError: not so\n  rule\n") == ("named", "UsageError: not so")
