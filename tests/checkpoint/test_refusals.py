"""What cannot be read or written is told in three lines, whatever the system said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paceline.checkpoint.find import find_checkpoint
from paceline.checkpoint.storage import cannot_read, cannot_write, nothing_there
from paceline.errors import CheckpointError


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "give yourself the permission"),
        (errno.EIO, "look at the disk"),
    ],
)
def test_why_something_cannot_be_written(number: int, told: str) -> None:
    lines = str(cannot_write(Path("out"), OSError(number, os.strerror(number), "out/.x"))).splitlines()
    assert lines[0] == f"cannot write out: {os.strerror(number)}"
    assert len(lines) == 3
    assert told in "\n".join(lines)


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.EACCES, "as its owner"), (errno.ENOENT, "check the path"), (errno.EIO, "look at the disk")],
)
def test_why_something_cannot_be_read(number: int, told: str) -> None:
    lines = str(cannot_read(Path("run"), OSError(number, os.strerror(number), "run/x"))).splitlines()
    assert lines[0] == f"run/x cannot be read: {os.strerror(number)}"
    assert len(lines) == 3
    assert told in lines[2]


def test_a_place_without_checkpoints_is_told_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    for name, told in (
        ("none", "none: there is no such folder\n"),
        ("a.txt", "a.txt: it is a file\n"),
        ("a.pt", f"paceline checkpoint import {tmp_path / 'a.pt'} DST"),
        ("dcp", f"paceline checkpoint import {tmp_path / 'dcp'} DST"),
    ):
        message = str(nothing_there(tmp_path / name, "try another"))
        assert told in message
        assert message.endswith("try another") == ("import" not in told)


def test_a_place_that_cannot_be_looked_into_is_told(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to("manifest.json")  # which even the super-user cannot read
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read(.|\n)*use another checkpoint"):
        find_checkpoint("auto", tmp_path)
