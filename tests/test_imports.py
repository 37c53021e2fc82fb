"""Importing the user's own code by path."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.imports import import_from_path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a module in the current directory, which is not on the path; returns its name, new for each test."""
    name = f"user_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "class Net:\n    @classmethod\n    def small(cls): return cls()\ndef build_model(): return 3\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return name


def test_it_finds_installed_code() -> None:
    assert import_from_path("collections:OrderedDict", "model.factory") is OrderedDict


def test_it_finds_code_in_the_current_directory_and_keeps_that_on_the_path(module: str) -> None:
    assert import_from_path(f"{module}:build_model", "model.factory")() == 3
    import_from_path(f"{module}:Net", "model.factory")
    assert sys.path.count(str(Path.cwd())) == 1
    assert sys.path[0] == str(Path.cwd())


def test_it_follows_dots_after_the_colon(module: str) -> None:
    assert type(import_from_path(f"{module}:Net.small", "model.factory")()).__name__ == "Net"


@pytest.mark.parametrize(
    ("spec", "fix"),
    [
        ("my_model", "write my_model:build"),
        ("my.nets.build", "did you mean my.nets:build?"),
        ("nets/small.py:build", "name the module, not its file"),
        ("./nets.py", "name the module, not its file: nets:build"),
        ("nets:", "the form is package.module:name"),
        (":build", "the form is package.module:name"),
        ("a:b:c", "the form is package.module:name"),
        ("", "the form is package.module:name"),
        ("nets:build()", "the form is package.module:name"),
    ],
)
def test_another_form_is_refused_with_the_likely_fix(spec: str, fix: str) -> None:
    with pytest.raises(UsageError) as raised:
        import_from_path(spec, "train.loss")
    assert f"train.loss = {spec!r}" in str(raised.value)
    assert fix in str(raised.value)


@pytest.mark.usefixtures("module")
def test_a_missing_module_says_where_it_was_searched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no module 'nowhere_at_all'") as raised:
        import_from_path("nowhere_at_all.nets:build", "model.factory")
    assert str(tmp_path) in str(raised.value)


def test_a_missing_submodule_is_named() -> None:
    with pytest.raises(UsageError, match=r"there is no module 'collections\.nothing'"):
        import_from_path("collections.nothing:build", "model.factory")


def test_a_missing_name_is_answered_with_the_nearest(module: str) -> None:
    with pytest.raises(UsageError, match=rf"{module} has no 'build_modle'\n  did you mean build_model\?"):
        import_from_path(f"{module}:build_modle", "model.factory")
    with pytest.raises(UsageError, match="has no 'zzz'\n  check its spelling"):
        import_from_path(f"{module}:zzz", "model.factory")


def test_what_cannot_be_called_is_refused(module: str) -> None:
    with pytest.raises(UsageError, match="is of type int, which cannot be called"):
        import_from_path(f"{module}:number", "model.factory")


@pytest.mark.parametrize("line", ["import nowhere_at_all", "1 / 0", "this is not python"])
def test_a_module_that_fails_by_itself_is_told_apart_from_a_missing_one(module: str, tmp_path: Path, line: str) -> None:
    broken = f"broken_{module}"
    (tmp_path / f"{broken}.py").write_text(line)
    with pytest.raises(UsageError, match=f"importing {broken} raised") as raised:
        import_from_path(f"{broken}:build", "model.factory")
    assert isinstance(raised.value.__cause__, Exception)
