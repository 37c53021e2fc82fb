"""``comm.algorithm`` in a run: every strategy trains to what it trains to natively, and messages are what travels."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest
import torch
from gloo_pool import GlooPool

from paceline.comm.algorithms.communicator import AlgorithmName
from paceline.comm.base import Communicator
from paceline.comm.traced import TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.errors import RankFailedError
from paceline.train.assemble import build_trainer

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 1, "heads": 2, "width": 16, "context": 8},
    "data": {"kind": "synthetic_tokens", "samples": 64, "context": 8, "vocab_size": 16},
    "optim": {"lr": 0.01, "clip_norm": 0.5},
    "train": {"steps": 2, "global_batch": 8, "dtype": "float64"},
}


def train(comm: Communicator, strategy: str, algorithm: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    parallel = {"strategy": strategy, "node_ranks": 2}
    config = config_from_dict({**GPT, "parallel": parallel, "comm": {"algorithm": algorithm, "first_bucket_mb": 0.01}})
    trainer = build_trainer(config, comm, node_ranks=2)
    trainer.run()
    engine = trainer.parts.engine
    assert isinstance(engine.comm, TracedCommunicator)
    return engine.full_state_dict(), dict(engine.comm.trace.num_bytes)


@cache
def native(strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    return run_virtual(lambda comm: train(comm, strategy, "native"), ranks=4)[0]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("strategy", "algorithm"),
    [
        *(("ddp", name) for name in get_args(AlgorithmName)),
        *[
            ("zero2", "ring"),
            ("fsdp", "ring"),
            ("fsdp", "halving_doubling"),
            ("fsdp", "auto"),
            ("hybrid", "hierarchical"),
        ],
    ],
)
def test_strategies_train_the_same_by_any_algorithm(strategy: str, algorithm: str) -> None:
    expected, plain = native(strategy)
    every = run_virtual(lambda comm: train(comm, strategy, algorithm), ranks=4)
    for found, counted in every:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)
            assert torch.equal(found[name], every[0][0][name])
        assert counted["send"] > 0
        assert "all_reduce" not in counted
    assert "send" not in plain


def test_real_ranks_train_the_same(gloo_pool: GlooPool) -> None:
    expected, _ = run_virtual(lambda comm: train(comm, "ddp", "ring"), ranks=2)[0]
    for found, counted in gloo_pool.run(train, "ddp", "ring", ranks=2):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert counted["send"] > 0


def test_hosts_that_are_found_to_be_one_are_refused() -> None:
    values = {**GPT, "comm": {"algorithm": "hierarchical"}}
    with pytest.raises(RankFailedError, match="hierarchical on 2 ranks with one host"):
        run_virtual(lambda comm: build_trainer(config_from_dict(values), comm), ranks=2)
