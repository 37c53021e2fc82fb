"""A name that is given to what was written: what had it goes, or is there again where that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoint.storage import LocalFiles, put_in_place


def make(path: Path, kind: str, text: str) -> None:
    if kind == "folder":
        path.mkdir()
        path = path / "inside"
    path.write_text(text)


def text_of(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("before", ["folder", "file", None])
def test_what_had_the_name_is_replaced(tmp_path: Path, kind: str, before: str | None) -> None:
    partial, final = tmp_path / ".new", tmp_path / "name"
    make(partial, kind, "new")
    if before is not None:
        make(final, before, "old")
    put_in_place(LocalFiles(), partial, final)
    assert text_of(final) == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["name"]


@pytest.mark.parametrize("before", ["folder", "file"])
def test_what_had_the_name_is_back_where_that_fails(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, final = LocalFiles(), tmp_path / "name"
    make(final, before, "old")
    rename = LocalFiles.rename

    def fail(self: LocalFiles, source: Path, target: Path) -> None:
        if source.name == ".new":
            raise OSError(5, "Input/output error")
        rename(self, source, target)

    monkeypatch.setattr(LocalFiles, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        put_in_place(storage, tmp_path / ".new", final)
    assert text_of(final) == "old"
