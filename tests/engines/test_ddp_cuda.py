"""Data parallelism on one CUDA device: virtual ranks, streams, compilation, and a loop that never waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import sized
from torch import nn

from paceline.clock import DeviceClock
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.engines.apply import parallelize
from paceline.engines.buckets.buckets import BucketChoice
from paceline.engines.ddp import DataParallel
from paceline.engines.groups import make_groups
from paceline.models.gpt import GPT, gpt_config
from paceline.records.sinks import JsonlSink
from paceline.train.assemble import build_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # compilers and drivers speak up in ways that differ by version
]
CONFIG: dict[str, Any] = {
    "model": {"kind": "gpt", "size": "gpt-nano", "context": 64},
    "data": {"kind": "synthetic_tokens", "samples": 256, "vocab_size": 64, "context": 64},
    "train": {"steps": 18, "global_batch": 16, "accumulate": 2},
    "optim": {"lr": 1e-3},
}


def train(comm: Communicator | None, steps: int) -> list[dict[str, torch.Tensor]]:
    """Trains a tiny GPT in float64 on 8 samples a step: alone in plain PyTorch, or a share of them on a rank."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    model = GPT(gpt_config("gpt-nano", dropout=0.0, vocab_size=64)).double().to(device)
    engine = None if comm is None else parallelize(model, comm, bucket_mb=0.1, first_bucket_mb=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step)).to(device)
        if comm is not None:
            tokens = tokens.chunk(comm.size)[comm.rank]
        logits = (engine or model)(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if engine is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return states


@pytest.mark.parametrize("ranks", [2, 4])
def test_virtual_ranks_on_one_gpu_equal_one_process(ranks: int) -> None:
    expected = train(None, 3)
    for states in run_virtual(lambda comm: train(comm, 3), ranks, device="cuda"):
        for ours, theirs in zip(states, expected, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)


def test_buckets_are_sized_by_events_of_the_device() -> None:
    def work(comm: Communicator) -> tuple[BucketChoice | None, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = GPT(gpt_config("gpt-nano", dropout=0.0, vocab_size=64)).double().to(comm.device)
        engine = DataParallel(model, make_groups(comm), sized(10**5, 5 * 10**4, tunes_buckets=comm.size > 1))
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step in range(11):
            tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step)).to(comm.device)
            tokens = tokens.chunk(comm.size)[comm.rank]
            F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.bucket_choice, engine.full_state_dict()

    _, expected = work(SoloCommunicator(torch.device("cuda", 0)))
    (chosen, _), *_ = found = run_virtual(work, 2, device="cuda")
    assert chosen is not None
    assert chosen.backward_s is not None
    assert chosen.backward_s > 0
    for choice, state in found:
        assert choice == chosen
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def test_two_runs_on_virtual_ranks_give_the_same_bits() -> None:
    def draw(comm: Communicator) -> torch.Tensor:
        torch.manual_seed(comm.rank)
        value = torch.randn(1000, device=comm.device)
        comm.all_reduce(value).wait()
        return value + F.dropout(torch.ones(1000, device=comm.device))

    first, second = (run_virtual(draw, 3, device="cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_training_never_waits_for_the_device(tmp_path: Path) -> None:
    """torch raises on any synchronisation inside the steps; all records are there in the end."""
    sink = JsonlSink(tmp_path / "rank-0.jsonl")
    trainer = build_trainer(config_from_dict(CONFIG), SoloCommunicator(torch.device("cuda", 0)), sink=sink)
    steps = trainer.steps()
    for _ in range(7):  # in the first ones the host is timed
        next(steps)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in steps:
        pass
    trainer.flush(wait=True)
    sink.close()
    lines = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"type":"step"' in line]) == 18


def test_compiled_training_learns() -> None:
    config = config_from_dict({**CONFIG, "model": {**CONFIG["model"], "compile": True}})
    trainer = build_trainer(config, SoloCommunicator(torch.device("cuda", 0)))
    losses = [float(result.outcome.loss_sum / result.outcome.count) for result in trainer.steps()]
    assert losses[-1] < losses[0]


def test_gradients_arrive_block_by_block_when_blocks_are_compiled() -> None:
    def work(comm: Communicator) -> list[int]:
        torch.manual_seed(0)
        model = GPT(gpt_config("gpt-nano", dropout=0.0, vocab_size=64))
        engine = parallelize(model, comm, bucket_mb=0.1, first_bucket_mb=0.05, compile=True)
        left: list[int] = []
        launch = engine._launch
        engine._launch = lambda bucket: (left.append(sum(engine._arrivals.counts)), launch(bucket))[1]  # type: ignore[method-assign]
        for _ in range(3):
            left.clear()
            engine(torch.zeros(2, 16, dtype=torch.long, device=comm.device)).sum().backward()
        return left

    for arrived_at_launch in run_virtual(work, 2, device="cuda", timeout_s=300):
        assert len(set(arrived_at_launch)) > 2, "buckets must leave at different moments of backward"


def test_clock_reads_device_time() -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    start = clock.mark()
    value = torch.ones(2048, 2048, device="cuda")
    for _ in range(20):
        value = value @ value * 1e-4
    end = clock.mark()
    assert end.seconds_since(start) > 0
    assert end.is_past()
