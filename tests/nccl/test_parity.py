"""Every engine on real ranks computes what one process computes, in float64; on NCCL without a warning of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from nccl_cases import GLOO, GLOO_TOO, NCCL, step_to_host
from nccl_pool import NcclPool

from paceline.comm.base import Communicator
from paceline.config import config_from_dict
from paceline.train.randomness import compute_threads
from paceline.verify.case import ConfigCase, Settings, check_settings, complete
from paceline.verify.measure import absolute, compare, merge
from paceline.verify.runs import StepValues, run_distributed, run_reference

TOLERANCE = 1e-12
CONFIG: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 4, "heads": 4, "kv_heads": 2, "width": 32, "context": 16, "tied": True},
    "data": {"kind": "synthetic_tokens", "samples": 64, "vocab_size": 64, "context": 16},
    "train": {"dtype": "float64", "precision": "fp32"},
    # An optimizer that divides by the size of gradients magnifies their last digits by lr / eps.
    "optim": {"lr": 1e-3, "eps": 1e-4},
}
MIXTURE = {"experts": 4, "active": 2, "shared_experts": 1, "expert_width": 24}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"accumulate": 3},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp", "checkpoint_activations": "full", "accumulate": 2},
    "pipeline, 1f1b": {"pipeline": 2, "schedule": "1f1b", "accumulate": 4},
    "pipeline, zb-v": {"pipeline": 2, "schedule": "zb-v", "chunks": 2, "accumulate": 4},
    "tensor": {"tensor": 2},
    "tensor, sequence": {"tensor": 2, "sequence_parallel": True},
    "experts": {"expert": 2, "accumulate": 2},
    "experts, fsdp": {"expert": 2, "strategy": "fsdp", "checkpoint_activations": "full"},
}
MESHES: dict[str, dict[str, Any]] = {
    "hybrid": {"strategy": "hybrid", "shard_ranks": 2},
    "pipeline x zero1": {"pipeline": 2, "strategy": "zero1", "schedule": "1f1b", "accumulate": 4},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2, "schedule": "1f1b", "accumulate": 4},
    "tensor x fsdp": {"tensor": 2, "strategy": "fsdp"},
    "tensor x experts": {"tensor": 2, "expert": 2, "strategy": "zero2"},
}
ALL = dict.fromkeys(LAYOUTS, 2) | dict.fromkeys(MESHES, 4)


def train_share(comm: Communicator, case: ConfigCase, settings: Settings) -> list[StepValues]:
    return [step_to_host(values) for values in run_distributed(comm, case, settings)]


def check(pool: GlooPool, name: str) -> None:
    settings = complete(Settings.of(ranks=ALL[name], steps=2, **{**LAYOUTS, **MESHES}[name]))
    check_settings(settings)
    batch = 2 * settings.data_ranks * settings.accumulate + 1  # one over: no two shares weigh the same
    more = MIXTURE if settings.layout.expert > 1 else {}
    case = ConfigCase(config_from_dict({**CONFIG, "model": {**CONFIG["model"], **more}}), batch=batch)
    with torch.random.fork_rng(devices=[]), compute_threads(1):
        expected = run_reference(case, settings).steps
    per_rank = pool.run(train_share, case, settings, ranks=settings.ranks)
    found = merge(
        compare(ours, theirs, absolute) for values in per_rank for ours, theirs in zip(values, expected, strict=True)
    )
    assert found.largest <= TOLERANCE, found
    if isinstance(pool, NcclPool):
        assert "unbatched P2P" not in pool.printed()


@pytest.mark.parametrize("pool", [GLOO_TOO, NCCL], indirect=True)
@pytest.mark.parametrize("name", ALL)
def test_ranks_compute_what_one_process_does(pool: GlooPool, name: str) -> None:
    check(pool, name)


@pytest.mark.parametrize("pool", [GLOO], indirect=True)
def test_the_tests_of_nccl_ranks_run_on_gloo(pool: GlooPool) -> None:
    check(pool, "zero2")
