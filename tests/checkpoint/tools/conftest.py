"""Checkpoints of a small GPT, saved by each strategy; each made once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained_gpt import LLAMA, Save, save_trained

from paceline.comm.virtual.communicator import run_virtual


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Returns the checkpoint of a strategy, ranks and model, made when it is first asked for. Do not write to it."""
    known: dict[tuple[object, ...], Path] = {}

    def get(strategy: str = "fsdp", ranks: int = 2, model: dict[str, object] = LLAMA) -> Path:
        key = (strategy, ranks, str(model))
        if key not in known:
            folder = tmp_path_factory.mktemp("saved")
            run_virtual(lambda comm: save_trained(comm, folder, strategy, model), ranks)
            known[key] = folder / "step-00000007"
        return known[key]

    return get
