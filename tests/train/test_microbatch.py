"""``train.microbatch: auto``: trials leave nothing behind, ranks agree, and the batch stays what was asked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.data.datasets import TensorPairs
from paceline.engines.apply import parallelize
from paceline.errors import RankFailedError, TrainingError
from paceline.free_memory import MemoryGauge, measure_machine
from paceline.train.assemble import build_trainer
from paceline.train.loss import CrossEntropy
from paceline.train.survive.memory import TrialLimits, find_microbatch, optimizer_bytes

FEATURES = 4


class Limited(nn.Module):
    """Holds at most ``most`` samples, and has buffers and random numbers that trials could spoil."""

    def __init__(self, most: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(FEATURES, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.most = most
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError(f"{len(x)} samples")
        result: torch.Tensor = self.dropout(self.norm(self.layer(torch.cat([x, x]))))[: len(x)]
        return result


def search(
    comm: Communicator, most: list[int], strategy: str = "ddp", per_rank: int = 24, first: int = 1
) -> dict[str, Any]:
    model = Limited(most[comm.rank])
    engine = parallelize(model, comm, strategy, sync_batchnorm=False)
    data = TensorPairs(torch.zeros(7, FEATURES), torch.zeros(7, dtype=torch.int64))
    before, state = torch.get_rng_state(), {n: b.clone() for n, b in model.named_buffers()}
    limits = TrialLimits(samples_per_rank=per_rank, first=first, limit_bytes=10**15)
    found = find_microbatch(engine, CrossEntropy(1.0), data, torch.float32, limits)
    return {
        "samples": found.samples,
        "sizes": model.sizes,
        "is_clean": torch.equal(before, torch.get_rng_state())
        and all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())
        and all(p.grad is None for p in [*engine.parameters(), *model.parameters()]),
    }


@pytest.mark.parametrize(
    ("strategy", "most", "first", "expected"),
    [
        ("ddp", [24, 24], 1, 24),
        ("ddp", [24, 7], 24, 6),
        ("ddp", [5, 12], 8, 4),
        ("ddp", [1, 1], 24, 1),
        ("zero1", [24, 7], 1, 6),
        ("zero2", [5, 12], 8, 4),
    ],
)
def test_ranks_agree_on_the_largest_that_all_can_hold(
    strategy: str, most: list[int], first: int, expected: int
) -> None:
    work = functools.partial(search, most=most, strategy=strategy, first=first)
    for found in run_virtual(work, ranks=2):
        assert found["samples"] == expected
        assert found["is_clean"]
        assert len(found["sizes"]) <= 7


def test_full_sharding_searches_too_and_says_what_fits_where_it_fails() -> None:
    found = run_virtual(functools.partial(search, most=[24, 24], strategy="fsdp"), ranks=2)
    assert [each["samples"] for each in found] == [24, 24]
    assert all(each["is_clean"] for each in found)
    with pytest.raises(RankFailedError) as caught:
        run_virtual(functools.partial(search, most=[24, 12], strategy="fsdp", first=12), ranks=2)
    assert isinstance(caught.value.error, TrainingError)
    assert "set train.microbatch = 12, which fits" in str(caught.value.error)


def test_nothing_fits() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_virtual(functools.partial(search, most=[24, 0]), ranks=2)
    assert isinstance(caught.value.error, TrainingError)
    assert "not even 1 sample fits" in str(caught.value.error)


def test_real_ranks(gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(search, [24, 7], "ddp", ranks=2)
    assert [each["samples"] for each in found] == [6, 6]


class Wide(nn.Module):
    """Holds 4 MiB for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x.mean(1, keepdim=True) * self.scale).repeat(1, 2**20)
        result: torch.Tensor = self.layer(x) * wide.exp().mean()
        return result


def search_memory(comm: Communicator, room_mib: int) -> tuple[int | None, int]:
    """Searches under a limit of so many MiB above what this process holds."""
    engine = parallelize(Wide(), comm)
    data = TensorPairs(torch.zeros(7, FEATURES), torch.zeros(7, dtype=torch.int64))
    limit = MemoryGauge(comm.device).now_bytes() + room_mib * 2**20
    limits = TrialLimits(samples_per_rank=64, limit_bytes=round(limit / 0.9))
    found = find_microbatch(engine, CrossEntropy(1.0), data, torch.float32, limits)
    return found.samples, max(each.peak_bytes or 0 for each in found.trials) - limit


def test_the_limit_is_measured() -> None:
    """In a new process: what is resident there is its own. A sample holds 4 MiB, and its gradients as much.

    One that has worked before would take memory that it has freed and still holds, and nobody would see it grow.
    """
    pool = GlooPool()
    try:
        samples, over = pool.run(search_memory, 200, ranks=1)[0]
    finally:
        pool.close()
    assert samples in (8, 16)
    assert over <= 64 * 2**20  # of eight samples more than fit


def test_the_optimizers_state_is_reserved() -> None:
    def work(comm: Communicator) -> int:
        return optimizer_bytes(parallelize(nn.Linear(8, 8), comm, "zero1"), slots=2)

    found = run_virtual(work, ranks=2)
    assert sum(found) == 2 * 4 * (8 * 8 + 32 + 32 - 8 - 24) or sum(found) >= 2 * 4 * 72


def make_trainer(comm: Communicator, values: dict[str, Any]) -> Any:
    trainer = build_trainer(config_from_dict(values), comm)
    trainer.run()
    return trainer.parts.plan, trainer.parts.engine.full_state_dict(), trainer.step


def test_the_global_batch_stays_what_was_asked() -> None:
    base: dict[str, Any] = {
        "model": {"kind": "mlp", "hidden_dim": 8, "dropout": 0.0},
        "data": {"kind": "digits"},
        "train": {"steps": 2, "global_batch": 24, "dtype": "float64"},
    }
    auto = {**base, "train": {**base["train"], "microbatch": "auto"}}
    (found, ours, steps), (expected, theirs, _) = (
        run_virtual(functools.partial(make_trainer, values=values), ranks=2)[0] for values in (auto, base)
    )
    assert (found.batch.global_batch, found.batch.microbatch * found.batch.accumulate) == (24, 12)
    assert (found.total_samples, steps) == (expected.total_samples, 2)
    assert found.memory is not None
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-12)


def test_the_room_of_a_cpu_rank_is_its_share_of_the_host() -> None:
    room = measure_machine("cpu", ranks=4, node_ranks=2)
    assert room.device_bytes == room.host_bytes // 2
    assert room.host_bytes > 2**20


def test_the_gauge_sees_what_comes_and_goes() -> None:
    gauge = MemoryGauge(torch.device("cpu"))
    before = gauge.now_bytes()
    gauge.reset()
    torch.ones(2**24).sum()
    peak = gauge.peak_bytes()
    assert peak - before >= 2**25  # at least half of 64 MiB: some may have been there before
    gauge.reset()
    # The allocator may keep what was freed, and the process's own pages come and go.
    assert gauge.peak_bytes() <= peak + 2**22
