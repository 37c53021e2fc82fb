"""Small answers of the tools: files that cannot be read, chunks that overlap, zeros that differ in their sign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.storage import LocalFiles
from paceline.checkpoint.tools import audit
from paceline.checkpoint.tools.distributed import _do_overlap
from paceline.checkpoint.tools.listing import _compare_tensor


def saved(folder: Path, value: float) -> Path:
    def work(comm: Any) -> Path:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, value)
        return paceline.save(folder, paceline.parallelize(model, comm), step=1)

    return paceline.run_virtual(work, ranks=1)[0]


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, 1.0)

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(audit, "file_problem", refuse)
    manifest = open_checkpoint(path).manifest
    heard: list[int] = []
    found = audit.check_files(path, manifest, LocalFiles(), "fast", heard.append)
    assert found.problems == tuple(f"{name} cannot be read: Permission denied" for name in manifest.files)
    assert heard == [file.num_bytes for file in manifest.files.values()]


@pytest.mark.parametrize(
    ("boxes", "overlap"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], False),
        ([((2, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ([((0, 0), (3, 3)), ((2, 0), (1, 3))], True),
        ([((0, 0), (2, 3)), ((0, 0), (0, 3)), ((2, 0), (2, 3))], False),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], False),
        ([((0, 0), (4, 2)), ((0, 1), (4, 1))], True),
    ],
)
def test_chunks_of_a_tensor_overlap_or_not(boxes: Any, overlap: bool) -> None:
    assert bool(_do_overlap(boxes, (4, 3))) is overlap


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(0.0, -0.0, (1, 0.0, 0.0)), (2.0, 1.0, (1, 1.0, 0.5)), (1.0, 1.0, (0, 0.0, 0.0)), (0.0, 4.0, (1, 4.0, 1.0))],
)
def test_tensors_are_compared_by_their_bits_and_their_values(
    tmp_path: Path, one: float, other: float, expected: tuple[int, float, float]
) -> None:
    left, right = (open_checkpoint(saved(tmp_path / name, value)) for name, value in (("a", one), ("b", other)))
    (name,) = left.manifest.tensors
    found = _compare_tensor(left, right, name, lambda _: None)
    assert (found.num_different, found.max_absolute, found.max_relative) == expected
