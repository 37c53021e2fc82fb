"""Single functions of scripts around torch's own data parallelism."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import UsageError


def test_the_largest_elements_are_kept_as_indices_and_values() -> None:
    gradient = torch.tensor([1.2, -0.3, 0.8, -0.1, 2.1])
    found = paceline.compress_gradients(gradient, compression_ratio=0.6)
    assert found.indices().tolist() == [[0, 2, 4]]
    assert torch.equal(found.values(), gradient[[0, 2, 4]])
    assert torch.equal(found.to_dense(), torch.tensor([1.2, 0.0, 0.8, 0.0, 2.1]))


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_gradients_of_a_model_are_compressed_one_by_one(kind: Any) -> None:
    gradients = [torch.arange(20.0).view(4, 5), torch.tensor(3.0), None, torch.zeros(0, 2)]
    matrix, number, nothing, empty = paceline.compress_gradients(kind(gradients))
    assert matrix.to_dense().nonzero().tolist() == [[3, 3], [3, 4]], "a tenth by default"
    assert number.to_dense() == 3.0
    assert nothing is None
    assert empty.shape == (0, 2)
    assert paceline.compress_gradients({"w": gradients[0]}, 1)["w"].to_dense().equal(gradients[0])
    with pytest.raises(UsageError, match="compression_ratio = 0\n"):
        paceline.compress_gradients(gradients, 0)


def test_the_batch_grows_with_the_ranks() -> None:
    assert paceline.auto_scale_batch_size(4, 32) == 128
    assert paceline.auto_scale_batch_size(world_size=1, base_batch_size=32) == 32
    with pytest.raises(UsageError, match=r"2 problems\n\nworld_size = 0\n(.*\n)+base_batch_size = 1.5"):
        paceline.auto_scale_batch_size(0, 1.5)  # type: ignore[arg-type]


def test_processes_that_a_script_started_are_joined_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        "paceline.run.own_loop.connect", lambda backend: seen.append((backend, *(os.environ[name] for name in names)))
    )
    with monkeypatch.context() as patch:
        for name in names:
            patch.setenv(name, "of before")
            os.environ.pop(name)
        paceline.setup_distributed(1, 4)
        os.environ["MASTER_PORT"] = "7777"
        paceline.setup_distributed(1, 4, "gloo")
        with pytest.raises(UsageError, match="a launcher has set RANK=1\n"):
            paceline.setup_distributed(2, 4)
    assert seen == [("auto", "1", "4", "1", "127.0.0.1", "29500"), ("gloo", "1", "4", "1", "127.0.0.1", "7777")]
    with pytest.raises(UsageError, match="rank = 4 and world_size = 4"):
        paceline.setup_distributed(4, 4)
    assert paceline.cleanup_distributed is paceline.disconnect
