"""What bench/launch_slurm.py keeps of its measurements, and that its config is one."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch_slurm
from paceline.config import load_config


def test_ratios_are_taken_within_each_round() -> None:
    ours, bare = [2.0, 8.0, 3.0], [1.0, 10.0, 2.0]
    found = launch_slurm.row(launch_slurm.OURS, ours, bare)
    assert (found["ratio"], found["median_s"], found["least_s"], found["most_s"]) == (1.5, 3.0, 2.0, 8.0)
    assert found["ratio_quartiles"] == pytest.approx([1.15, 1.75])
    assert launch_slurm.row(launch_slurm.BARE, bare, bare)["ratio"] == 1.0


def test_both_arms_train_the_same_batch_of_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(launch_slurm.CONFIG)
    config = load_config(tmp_path / "config.yaml")
    assert f"torch.randn({config.train.global_batch // launch_slurm.NODES}, 64" in launch_slurm.SCRIPT
    assert "nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)" in launch_slurm.SCRIPT
    assert config.model.kind == "mlp"
    batch = launch_slurm.BATCH.format(nodes=launch_slurm.NODES, python="python")
    assert "srun python -m torch.distributed.run --nnodes 2 --nproc-per-node 1" in batch
