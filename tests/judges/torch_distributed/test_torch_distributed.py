"""torch's own distributed tests: those of collectives and of data parallelism that need no GPU, on three ranks.

Our communicator through shared memory is the backend of its process groups, and an engine of ours stands in the place
of ``DistributedDataParallel`` (``in_place_of_torch.py``). The tests are torch's, unchanged.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from judging import chosen, end_as, run_once

pytestmark = [pytest.mark.judge, pytest.mark.timeout(600)]
RUNNER = "run_tests"  # beside this file; by name, so that the tests' server may fork it
NOT_OURS = {
    "any_source": "our communicators name the rank that they receive from",
    "monitored_barrier": "it is a function of Gloo's own",
    "allreduce_hook": "an engine takes a compression in the place of torch's hooks",
    "with_then_hook": "an engine takes a compression in the place of torch's hooks",
    "logging_data": "it reads the logging data of torch's class",
    "barrier_timeout_full_group": "it looks for Gloo's words; our error names the ranks that ended",
    "static_graph_api": "it sets a private flag of torch's class",
}


def needs_of_tests() -> dict[str, str]:
    """The tests' names, with the decorators that ask for GPUs; read from the file, which takes seconds to import."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "testing/_internal/distributed/distributed_test.py"
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (base,) = (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == "_DistTestBase")
    tests = (each for each in base.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"))
    return {each.name: " ".join(t for t in map(ast.unparse, each.decorator_list) if "_gpu" in t) for each in tests}


NEEDS = needs_of_tests()


def own_reason(name: str) -> str:
    if NEEDS[name]:
        return f"torch's own words: {NEEDS[name]}"
    return next((why for part, why in NOT_OURS.items() if part in name), "")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """How each test ended that was chosen."""

    def run_all(output: Path) -> None:
        names = output.with_suffix(".names")
        names.write_text(json.dumps([name for name in chosen(request, "name") if not own_reason(name)]))
        command = [sys.executable, "-m", RUNNER, str(names), str(output.parent), str(output)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run(command, check=True, capture_output=True, timeout=900, env=environment)

    rows = run_once(tmp_path_factory.getbasetemp(), "torch_distributed", run_all)
    return {name: (outcome, why) for name, outcome, why in rows}


@pytest.mark.parametrize("name", NEEDS)
def test_torchs_own_test_passes(name: str, outcomes: dict[str, tuple[str, str]]) -> None:
    if why := own_reason(name):
        pytest.skip(why)
    end_as(*outcomes[name])
