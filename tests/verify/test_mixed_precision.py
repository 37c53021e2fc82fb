"""Mixed precision is verified against one process of the same policy, within the rounding of the reduction."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from gloo_pool import GlooPool
from torch import nn

import paceline
from paceline.train.step import LossScaler
from paceline.verify import certificate as certificates
from paceline.verify.case import FunctionCase, Settings
from paceline.verify.certificate import Certificate
from paceline.verify.measure import bound_for, compare
from paceline.verify.runs import run_distributed, run_reference

Batch = tuple[torch.Tensor, torch.Tensor]
MIXED = ("bf16", "bf16_master", "fp16")


class Net(nn.Module):
    """Two tied layers between blocks, with a norm in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3))
        self.again = nn.Linear(16, 16)
        self.again.weight = self.layers[0][1].weight  # type: ignore[index]
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(torch.relu(self.again(hidden)))


def make_normed() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Sequential(nn.Linear(6, 3), nn.Identity(), nn.Identity()))


def make_batch(step: int, size: int = 19) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def verify(model: Any = Net, batch: Any = make_batch, **options: Any) -> Certificate:
    return paceline.verify(model, batch, F.cross_entropy, **options)


@pytest.mark.some(1)
@covering(
    always={"strategy": ["fsdp"]},
    strategy=["ddp", "zero1", "zero2", "fsdp", "hybrid"],
    precision=["bf16_master", "bf16", "fp16"],
)
def test_mixed_precision_passes_within_the_rounding_of_float32(strategy: str, precision: str) -> None:
    """The same pieces are rounded to half precision in the same way, so far less than the bound is left."""
    for options in ({"accumulate": 2, "ranks": 2}, {"ranks": 4, "clip": None, "checkpoint_activations": "full"}):
        found = verify(strategy=strategy, precision=precision, steps=2, **options)
        assert found.passed, found.divergence
        assert found.errors.largest < 2e-6 < found.tolerance
        assert (found.measure, found.precision, found.dtype) == ("relative", precision, "float32")
        pieces = found.ranks * found.accumulate
        assert found.reference.startswith(f"one process of {precision} on batches in {pieces} pieces, from the ranks'")


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_rounds_alike(ranks: int) -> None:
    """A third of a loss is another number in half precision, and must be weighed there as on a rank."""
    for precision in MIXED:
        found = verify(
            strategy="fsdp", precision=precision, ranks=ranks, steps=2, batch=lambda step: make_batch(step, 5)
        )
        assert found.passed, found.divergence
        assert found.errors.largest < 2e-6


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("strategy", "precision"), [("ddp", "bf16"), ("zero2", "bf16_master"), ("fsdp", "fp16"), ("fsdp", "bf16_master")]
)
def test_batch_norm_has_a_bound_of_its_own(strategy: str, precision: str) -> None:
    """One process cannot take statistics over pieces, so it rounds other numbers."""
    found = verify(make_normed, strategy=strategy, precision=precision, ranks=3, steps=2, accumulate=2)
    assert found.passed, found.divergence
    assert found.tolerance == 2 * torch.finfo(torch.float16 if precision == "fp16" else torch.bfloat16).eps
    assert "batches in 2 pieces" in found.reference
    assert 0.0 < found.errors.buffers < found.tolerance


def test_the_bounds_are_wide_enough_for_one_edge_and_narrower_than_half_precision() -> None:
    bounds = {precision: verify(precision=precision, ranks=2, steps=1).tolerance for precision in MIXED}
    assert bounds == {"bf16": 2.0**-12, "bf16_master": 2.0**-12, "fp16": 2.0**-15}


def current_rank() -> str:
    return threading.current_thread().name


class OffOnOneRank(nn.Linear):
    """Computes what is one part in a hundred too large, on one rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output * 1.01 if current_rank() == "rank-1" else output


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("strategy", "precision"), [("ddp", "bf16"), ("zero1", "fp16"), ("zero2", "bf16_master"), ("fsdp", "bf16_master")]
)
def test_the_first_module_that_differs_is_named(strategy: str, precision: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), OffOnOneRank(6, 6), nn.Linear(6, 3))

    found = verify(model, strategy=strategy, precision=precision, ranks=2, steps=1, accumulate=2)
    assert not found.passed
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.module, found.divergence.what) == (0, "2", "forward")


def test_a_step_is_compared_from_where_the_ranks_were() -> None:
    """A mistake of one step is not carried into the next ones: the reference follows the ranks."""

    def batch(step: int) -> Batch:
        inputs, targets = make_batch(step)
        return (inputs * 1.5 if step == 1 and current_rank() == "rank-0" else inputs), targets

    case = FunctionCase(model=Net, batch=batch, loss=F.cross_entropy)
    settings = Settings.of(precision="bf16", ranks=2, steps=3)
    ranks = paceline.run_virtual(lambda comm: run_distributed(comm, case, settings), 2)
    reference = run_reference(case, settings, ranks[0])
    bound = bound_for(settings, reference.pieces)
    errors = [
        compare(ours, expected, bound.measure).largest for ours, expected in zip(ranks[1], reference.steps, strict=True)
    ]
    assert errors[0] < bound.tolerance < errors[1]
    assert errors[2] < bound.tolerance


def test_ranks_that_overflow_fail_and_are_not_followed() -> None:
    """Rank 0 is past following after step 1, and the reference says so step by step without stopping."""

    def batch(step: int) -> Batch:
        inputs, targets = make_batch(step)
        return (inputs * 1e30 if step == 1 and current_rank() == "rank-0" else inputs), targets

    found = verify(batch=batch, precision="bf16", ranks=2, steps=3, strategy="fsdp")
    assert not found.passed
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.what) == (1, "forward")


def test_a_loss_that_is_scaled_needs_no_other_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 is scaled for real: the factor of a rank's loss is far from that of the mean."""
    scales = []
    factors = LossScaler.factors

    def noted(self: LossScaler, *args: Any, **kwargs: Any) -> Any:
        scales.append(float(self.scale))
        return factors(self, *args, **kwargs)

    monkeypatch.setattr(LossScaler, "factors", noted)
    assert verify(precision="fp16", ranks=2).passed
    assert set(scales) == {1024.0}


# Real processes.


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("strategy", "precision"), [("ddp", "bf16"), ("zero1", "fp16"), ("fsdp", "bf16"), ("fsdp", "bf16_master")]
)
def test_real_processes_round_alike(
    gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch, strategy: str, precision: str
) -> None:
    """With the casts that autocast keeps: a tied weight is cast once, and its gradients are added up in bf16."""
    cached = []

    def run_processes(function: Any, ranks: int, *, args: Any, threads: int) -> list[Any]:
        assert threads == 1
        cached.append(args[1].caches_casts)
        return gloo_pool.run(function, *args, ranks=ranks)

    monkeypatch.setattr(certificates, "run_processes", run_processes)
    found = verify(strategy=strategy, precision=precision, ranks=2, accumulate=2, backend="gloo")
    assert found.passed, found.divergence
    assert found.errors.largest < 2e-6
    assert cached == [True]


def make_blocks() -> nn.Module:
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 16), nn.Sequential(*layers), nn.Linear(16, 3))


@pytest.mark.some(1)
@covering(
    always={"strategy": ["fsdp"]}, strategy=["ddp", "zero1", "zero2", "fsdp", "hybrid"], precision=["fp8", "fp8_row"]
)
def test_fp8_passes_within_its_bound(strategy: str, precision: str) -> None:
    """Ranks cast what one process casts; full sharding gathers weights that are rounded slice by slice."""
    found = verify(
        make_blocks, lambda step: make_batch(step, 64), strategy=strategy, precision=precision, ranks=4, steps=2
    )
    assert found.passed, found.divergence
    assert found.tolerance == 2.0**-8
    assert found.errors.largest < (2.0**-9 if strategy in ("fsdp", "hybrid") else 2e-6)
    assert "float8_e4m3fn" in found.bound


def test_fp8_that_computes_something_else_fails() -> None:
    class Coarse(nn.Linear):
        """A layer that one rank multiplies a little more."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.02 if current_rank() == "rank-1" else 1.0)

    def model() -> nn.Module:
        made = make_blocks()
        made[2] = Coarse(16, 3)
        return made

    assert not verify(model, lambda step: make_batch(step, 64), precision="fp8", ranks=4, steps=1).passed
