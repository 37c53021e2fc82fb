"""Objects of the user's own code, named in a config as ``package.module:name``."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import UsageError, did_you_mean

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def import_from_path(spec: str, what: str) -> Callable[..., Any]:
    """Imports the callable that ``spec`` names, such as ``"my_project.nets:build"``; messages call its field ``what``.

    The current working directory is searched first, and stays on ``sys.path``: code may import neighbours later, and
    worker processes inherit it. Raises UsageError for another form, module or name, or what cannot be called.
    """
    if IMPORT_PATH.fullmatch(spec) is None:
        rule = "the form is package.module:name"
        raise UsageError(f"{what} = {spec!r} does not name a function or class\n  {rule}\n  {_suggest_form(spec)}")
    module_name, _, path = spec.partition(":")
    if module_name == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        fix = "put it into a file beside the notebook, or train by a function of a cell: paceline.run_ranks(function)"
        raise UsageError(f"{what} = {spec!r} is defined in a cell\n  ranks of a config import it from a file\n  {fix}")
    found: Any = _import_module(module_name, spec, what)
    for name in path.split("."):
        if not hasattr(found, name):
            offered = [each for each in dir(found) if not each.startswith("_")]
            fix = did_you_mean(name, offered, "check its spelling, or define it there")
            raise UsageError(f"{what} = {spec!r}: {getattr(found, '__name__', found)} has no {name!r}\n  {fix}")
        found = getattr(found, name)
    if not callable(found):
        text = f"{what} = {spec!r} is of type {type(found).__name__}, which cannot be called"
        rule = "it must be a function or a class"
        raise UsageError(f"{text}\n  {rule}\n  define {path} with def or class, or name another")
    return found  # type: ignore[no-any-return]


def _suggest_form(spec: str) -> str:
    """Returns the likely fix for a spec of another form: often only the colon is a dot, or the file is named."""
    stem = spec.removesuffix(".py")
    if stem != spec or "/" in spec:
        return f"name the module, not its file: {stem.partition(':')[0].strip('./').replace('/', '.')}:build, say"
    module, _, name = spec.rpartition(".")
    if ":" not in spec and module and name:
        return f"did you mean {module}:{name}?"
    return "for a function build in my_model.py, write my_model:build"


def _import_module(name: str, spec: str, what: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may be younger than the finder's view of its folder
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            rule = f"the current directory ({here}) is searched first, then the installed packages"
            fix = "start from the folder that holds the module, or install its package"
            raise UsageError(f"{what} = {spec!r}: there is no module {missing!r}\n  {rule}\n  {fix}") from error
        text = f"{what} = {spec!r}: importing {name} raised {type(error).__name__}: {error}"
        rule = f"the module was found, but fails on its own; try: python -c 'import {name}'"
        raise UsageError(f"{text}\n  {rule}") from error
