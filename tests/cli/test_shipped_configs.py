"""``paceline config ls`` and ``config copy``: what ships, listed and written out."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_runs import Call

from paceline.config.shipped import FOLDER, shipped_configs


def test_configs_are_listed_and_written_out(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = call("config", "ls")
    assert [line.split()[0] for line in listed.out.splitlines()] == list(shipped_configs())
    assert call("config", "copy", "digits").out == "digits.yaml: a copy of digits\n"
    assert Path("digits.yaml").read_bytes() == (FOLDER / "digits.yaml").read_bytes()
    Path("digits.yaml").write_text("name: mine\n")
    again = call("config", "copy", "digits")
    assert again.code == 2
    assert "digits.yaml is there" in again.err
    assert Path("digits.yaml").read_text() == "name: mine\n"
    assert call("config", "copy", "llama_1b", "own.json").code == 0
    assert Path("own.json").read_bytes() == (FOLDER / "llama_1b.json").read_bytes()
    unknown = call("config", "copy", "digit")
    assert unknown.code == 2
    assert "did you mean digits?" in unknown.err
    assert "there is no folder no/such" in call("config", "copy", "digits", "no/such/digits.yaml").err
