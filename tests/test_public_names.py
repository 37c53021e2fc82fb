"""The names that users import: which they are, where they live, and that asking for them is what loads their home."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import paceline
import paceline_classic

HOMES = {
    "connect": "paceline.run.own_loop",
    "run_ranks": "paceline.run.own_loop",
    "watch_ranks": "paceline.run.own_loop",
    "watch": "paceline.run.own_loop",
    "setup_distributed": "paceline.run.own_loop",
    "Run": "paceline.run.own_run",
    "disconnect": "paceline.comm.torch_dist",
    "Communicator": "paceline.comm.base",
    "parallelize": "paceline.engines.apply",
    "Layout": "paceline.plan.layout",
    "Offload": "paceline.plan.layout",
    "Compression": "paceline.plan.layout",
    "Engine": "paceline.engines.engine",
    "loader": "paceline.data.own_loader",
    "shard": "paceline.data.own_loader",
    "mean": "paceline.comm.objects",
    "gather": "paceline.comm.objects",
    "WeightAverage": "paceline.train.run_state",
    "Muon": "paceline.train.muon.muon",
    "save": "paceline.checkpoint.writer",
    "load": "paceline.checkpoint.writer",
    "run_virtual": "paceline.comm.virtual.communicator",
    "verify": "paceline.verify.certificate",
    "load_config": "paceline.config.load",
    "train": "paceline.run.train",
    "plan": "paceline.rehearse.planning",
    "predict": "paceline.rehearse.prediction",
    "errors": "paceline",
    "learn": "paceline",
    "classic": "paceline",
    "attention": "paceline.models.attention",
    "positions": "paceline.models.attention",
    "MLPClassifier": "paceline.models.mlp",
    "DistributedConfig": "paceline_classic.trainer",
    "DistributedTrainer": "paceline_classic.trainer",
    "EnhancedDistributedTrainer": "paceline_classic.trainer",
    "DistributedMonitor": "paceline_classic.monitor",
    "SimulatedTrainer": "paceline_classic.simulated",
    "MockDistributedTrainer": "paceline_classic.simulated",
    "DistributedTrainingAnalyzer": "paceline_classic.analysis",
    "CommunicationOptimizer": "paceline_classic.communication",
    "cleanup_distributed": "paceline_classic.communication",
    "compress_gradients": "paceline_classic.communication",
    "auto_scale_batch_size": "paceline_classic.communication",
}


def in_a_process(script: str) -> str:
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_public_names() -> None:
    assert paceline.__all__ == ["__version__", *HOMES]


@pytest.mark.parametrize(("name", "home"), HOMES.items())
def test_a_name_is_that_of_its_module(name: str, home: str) -> None:
    found = getattr(paceline, name)
    is_module = home == "paceline"
    expected = (
        importlib.import_module(f"paceline.{name}") if is_module else getattr(importlib.import_module(home), name)
    )
    assert found is expected
    assert callable(found) or is_module
    assert inspect.getdoc(getattr(paceline, name))


def imported_for_type_checkers(package: ModuleType) -> Iterator[tuple[str, str | None]]:
    (block,) = [node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If)]
    for node in block.body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            for alias in node.names:
                assert alias.asname == alias.name or alias.name == "*"  # exported, to a type checker
                yield alias.name, node.module


def test_type_checkers_see_the_same_names_in_the_same_places() -> None:
    own, earlier = (dict(imported_for_type_checkers(package)) for package in (paceline, paceline_classic))
    assert own.pop("*") == "paceline_classic"
    assert own | earlier == HOMES
    assert dict(imported_for_type_checkers(paceline.classic)) == {"*": "paceline_classic"}


def test_importing_paceline_imports_nothing_else_of_it_and_no_torch() -> None:
    script = "import sys, paceline; print([name for name in sys.modules if name.partition('.')[0] in {names}])"
    assert in_a_process(script.replace("{names}", "('torch', 'numpy', 'pydantic', 'paceline')")) == "['paceline']"


def test_a_name_is_loaded_on_first_use_and_kept() -> None:
    """One that needs no torch, which takes seconds to load."""
    script = (
        "import sys, paceline; home = 'paceline.plan.layout'; before = home in sys.modules; paceline.Layout; "
        "print(before, home in sys.modules, 'Layout' in vars(paceline), {'torch', 'paceline.train'} & set(sys.modules))"
    )
    assert in_a_process(script) == "False True True set()"


def test_an_unknown_name_is_told_with_those_that_exist() -> None:
    with pytest.raises(
        AttributeError, match="has no attribute 'conect'; it offers __version__, connect, run_ranks, watch"
    ):
        paceline.conect  # noqa: B018
    with pytest.raises(ImportError, match="conect"):
        exec("from paceline import conect")
