"""torch's ``distributed_test.py``: which tests it has, and a process that runs some of them for all workers."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from judging import run_once

RUNNER = "run_tests"  # of the folder torch_distributed; by name, so that the tests' server may fork it


@functools.cache
def needs_of_tests() -> dict[str, str]:
    """The tests' names, with the decorators that ask for GPUs; read from the file, which takes seconds to import."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "testing/_internal/distributed/distributed_test.py"
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    outer = (each for each in tree.body if isinstance(each, ast.ClassDef))
    inner = (each for kind in outer for each in kind.body if isinstance(each, ast.ClassDef))
    (base,) = (each for each in inner if each.name == "_DistTestBase")
    tests = (each for each in base.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"))
    return {each.name: " ".join(t for t in map(ast.unparse, each.decorator_list) if "_gpu" in t) for each in tests}


def run_torchs_tests(folder: Path, name: str, tests: list[str], backend: str) -> dict[str, tuple[str, str]]:
    """How each of some tests ended; one worker runs them, whom the others wait for."""

    def run_all(output: Path) -> None:
        names = output.with_suffix(".names")
        names.write_text(json.dumps(tests))
        command = [sys.executable, "-m", RUNNER, str(names), str(output.parent), str(output), backend]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "torch_distributed")}
        subprocess.run(command, check=True, capture_output=True, timeout=900, env=environment)

    return {test: (outcome, why) for test, outcome, why in run_once(folder, name, run_all)}
