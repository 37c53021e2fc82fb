"""torch's own ``distributed_test.py``: its tests of collectives and of data parallelism that need no GPU, three ranks.

Our communicator through shared memory is the backend of its process groups, and an engine of ours stands in the place
of ``DistributedDataParallel`` (``in_place_of_torch.py``). The tests are torch's, unchanged.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.judge, pytest.mark.timeout(600)]
RUNNER = Path(__file__).parent / "run_tests.py"
NOT_OURS = {
    "any_source": "our communicators name the rank that they receive from",
    "monitored_barrier": "it is a function of Gloo's own",
    "allreduce_hook": "an engine takes a compression in the place of torch's hooks",
    "with_then_hook": "an engine takes a compression in the place of torch's hooks",
    "logging_data": "it reads the logging data of torch's class",
    "barrier_timeout_full_group": "it looks for Gloo's words; our error names the ranks that ended",
    "static_graph_api": "it sets a private flag of torch's class",
}


def names() -> list[str]:
    """The tests' names, read without running the file, which takes seconds to import."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "testing/_internal/distributed/distributed_test.py"
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (base,) = (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == "_DistTestBase")
    return [each.name for each in base.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]


NAMES = names()


def own_reason(name: str) -> str:
    return next((why for part, why in NOT_OURS.items() if part in name), "")


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """How each test ended that was chosen: all are run at once by one worker, whom the others wait for."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "torch_distributed"
    folder.mkdir(exist_ok=True)
    chosen = [item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)]
    output = folder / "outcomes.jsonl"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            (folder / "names.json").write_text(json.dumps([name for name in chosen if not own_reason(name)]))
            command = [sys.executable, str(RUNNER), str(folder / "names.json"), str(folder), str(output)]
            subprocess.run(command, check=True, capture_output=True, timeout=900)
    lines = output.read_text(encoding="utf-8").splitlines()
    return {name: (outcome, why) for name, outcome, why in map(json.loads, lines)}


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_test_passes(name: str, outcomes: dict[str, tuple[str, str]]) -> None:
    if why := own_reason(name):
        pytest.skip(why)
    outcome, why = outcomes[name]
    if outcome == "skipped":
        pytest.skip(f"torch's own words: {why}")
    refusal = why.partition("paceline.errors.UsageError: ")[2]
    if refusal:
        pytest.skip(f"refused: {refusal}")
    assert outcome == "passed", why
