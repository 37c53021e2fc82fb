"""``paceline plan`` and ``paceline predict`` tell the same memory for the same layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.devices import load_cluster
from paceline.rehearse.planning import plan
from paceline.rehearse.prediction import config_on, memory_bound, predict_decided
from paceline.search.request import request_for, workload_as_written
from paceline.search.search import rank_one

CONFIGS = Path(__file__).parents[2] / "configs"
CLUSTER = "8x h100-sxm"
LAYOUTS = {
    "ddp": (),
    "zero1": ("parallel.strategy=zero1",),
    "zero2": ("parallel.strategy=zero2", "train.microbatch=2"),
    "fsdp": ("parallel.strategy=fsdp", "train.microbatch=1"),
    "hybrid": ("parallel.strategy=hybrid", "parallel.shard_ranks=4"),
    "fp32": ("train.precision=fp32",),
    "eager": ("parallel.strategy=zero1", "model.compile=false"),
    "again": ("parallel.strategy=fsdp", "memory.checkpoint_activations=full"),
    "matmuls": ("parallel.strategy=zero2", "memory.checkpoint_activations=matmuls"),
    "tensor": ("parallel.strategy=zero1", "parallel.tensor=2", "train.microbatch=2"),
    "pipeline": ("parallel.strategy=zero1", "parallel.pipeline=2", "train.microbatch=2"),
    "both": ("parallel.pipeline=2", "parallel.tensor=2", "train.microbatch=2"),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_plan_and_predict_tell_the_same_memory(name: str) -> None:
    """The bound is the same number; the dry run holds no more than it, and not much less."""
    cluster = load_cluster(CLUSTER)
    config, ranks = config_on(CONFIGS / "gpt_124m.yaml", cluster, overrides=LAYOUTS[name])
    decided, found = predict_decided(config, cluster, ranks)
    bound = memory_bound(decided, cluster, ranks)
    assert bound is not None
    request = request_for(decided, cluster)
    (task,) = request.tasks
    workload = workload_as_written(request.config, task, cluster)
    assert workload is not None
    assert rank_one(workload, cluster, task.need).memory_bytes == bound
    assert 0.75 * bound < found.total_memory < 1.03 * bound


def test_the_plan_of_a_config_as_it_is_written_has_the_memory_of_the_prediction() -> None:
    cluster, overrides = load_cluster(CLUSTER), LAYOUTS["zero2"]
    told = plan(CONFIGS / "gpt_124m.yaml", CLUSTER, overrides=overrides).to_json(1)["as_written"]
    config, ranks = config_on(CONFIGS / "gpt_124m.yaml", cluster, overrides=overrides)
    assert told["memory_bytes"] == memory_bound(config, cluster, ranks)
    assert sum(told["memory_by_category"].values()) == told["memory_bytes"]
