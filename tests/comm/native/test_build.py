"""The compiled part of shared memory: built once, and a reason where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.comm.shared.native import collectives as build
from paceline.errors import CommunicationError

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="the machine has no C++ compiler")


@needs_compiler
@pytest.mark.exhaustive  # every test with shared memory runs what the compiler made; this makes it once more
def test_the_library_is_built_once(tmp_path: Path) -> None:
    check_built_once(build.find_compiler(), tmp_path)


def test_what_a_compiler_made_is_kept(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho made > "$last"\n')
    compiler.chmod(0o755)
    check_built_once(str(compiler), tmp_path)


def check_built_once(compiler: str, tmp_path: Path) -> None:
    made = build.build(compiler, tmp_path / "new")
    written = made.stat().st_mtime_ns
    assert build.build(compiler, tmp_path / "new") == made
    assert made.stat().st_mtime_ns == written
    assert list(made.parent.iterdir()) == [made], "nothing else is left behind"


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'cannot make it: out of paper' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(CommunicationError, match=r"c\+\+ cannot compile shared_memory\.cpp: .*out of paper"):
        build.build(str(compiler), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_flags_that_a_compiler_does_not_know_are_left_out(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-march=native*) exit 1;; esac\nfor last; do :; done\necho made > "$last"\n'
    )
    compiler.chmod(0o755)
    assert build.build(str(compiler), tmp_path).read_text() == "made\n"


def test_without_a_compiler_there_is_a_reason_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommunicationError, match="no C\\+\\+ compiler"):
        build.find_compiler()
    build.load.cache_clear()
    try:
        assert build.load() == build.Library(code=None, problem=build.load().problem)
        assert "no C++ compiler" in build.load().problem
    finally:
        build.load.cache_clear()
