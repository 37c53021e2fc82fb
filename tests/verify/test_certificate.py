"""The certificate: what passes, what fails and where, and what is refused because it cannot be compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from gloo_pool import GlooPool
from torch import nn

import paceline
from paceline.cli.verify import BUILT_IN
from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import share_memory
from paceline.config import Config, config_from_dict
from paceline.errors import CollectiveMismatchError, RankFailedError, UsageError
from paceline.verify import certificate as certificates
from paceline.verify.case import VERIFIED, ConfigCase, FunctionCase, Settings, cut, num_samples
from paceline.verify.certificate import Certificate, certify
from paceline.verify.measure import compare
from paceline.verify.runs import run_distributed, run_reference

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def make_blocks() -> nn.Module:
    """Four blocks of one type, so that there are units to shard and to checkpoint."""
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Sequential(nn.Linear(5, 3), nn.Identity()))


def make_batch(step: int, size: int = 11) -> Batch:
    generator = torch.Generator().manual_seed(40 + step)
    return torch.randn(size, 5, generator=generator), torch.randint(3, (size,), generator=generator)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, nesterov=True)


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Counts the samples of class 0 twice."""
    weights = torch.where(targets == 0, 2.0, 1.0).to(outputs)
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (losses * weights).sum(), weights.sum()  # type: ignore[return-value]


# What passes.


def built_in(name: str) -> Config:
    return config_from_dict({**BUILT_IN[name], "train": {"dtype": "float64"}})


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "strategy", "ranks", "accumulate"),
    [
        pytest.param("mlp", "ddp", 4, 1, marks=pytest.mark.exhaustive),
        ("mlp", "zero1", 2, 3),
        ("mlp", "hybrid", 4, 2),
        pytest.param("gpt", "ddp", 2, 2, marks=pytest.mark.exhaustive),
        ("gpt", "zero2", 2, 1),
        ("gpt", "fsdp", 2, 1),
        pytest.param("resnet", "ddp", 3, 1, marks=pytest.mark.exhaustive),
        pytest.param("resnet", "fsdp", 2, 2, marks=pytest.mark.exhaustive),  # by default on real processes, below
    ],
)
def test_built_in_cases_pass(name: str, strategy: str, ranks: int, accumulate: int) -> None:
    """Several buckets and units, tied weights, convolutions, batch norm; a batch that no two shares divide alike."""
    case = ConfigCase(built_in(name), batch=2 * ranks * accumulate + 1, layers_as_blocks=True)
    found = certify(case, Settings.of(strategy=strategy, ranks=ranks, steps=2, accumulate=accumulate))
    assert found.passed, found.divergence
    assert found.divergence is None
    assert 0.0 < found.max_abs_error < 1e-12  # not zero: two runs were compared, not one with itself


@covering(
    options={
        "accumulate": {"accumulate": 3},
        "more parts than samples": {"ranks": 4, "accumulate": 3, "clip": None, "steps": 2},  # 12 parts for 11 samples
        "checkpointed": {"clip": 1e-3, "checkpoint_activations": "full", "steps": 2},
        "one rank": {"ranks": 1},
        "momentum": {"ranks": 2, "make_optimizer": make_sgd},
    },
    strategy=VERIFIED,
)
def test_every_strategy_passes(strategy: str, options: dict[str, Any]) -> None:
    shards = {"shard_ranks": 1} if strategy == "hybrid" and options.get("ranks") == 1 else {}
    found = paceline.verify(make_blocks, make_batch, F.cross_entropy, strategy=strategy, **shards, **options)
    assert found.passed, found.divergence
    assert found.strategy == strategy
    assert found.max_abs_error < 1e-13


def test_the_way_of_sharding_may_be_chosen() -> None:
    policy = {"units": ("0", "3"), "reshard_after_forward": 2, "prefetch": 2, "steps": 2}
    for strategy, options in (("fsdp", {}), ("hybrid", {"shard_ranks": 2})):
        found = paceline.verify(
            make_blocks, make_batch, F.cross_entropy, strategy=strategy, ranks=4, **policy, **options
        )
        assert found.passed, found.divergence
        assert found.shard_ranks == options.get("shard_ranks")


@pytest.mark.parametrize(("ranks", "expected"), [(2, 1), (6, 3)])
def test_hybrid_shards_over_half_of_the_ranks(ranks: int, expected: int) -> None:
    found = paceline.verify(make_model, make_batch, F.cross_entropy, strategy="hybrid", ranks=ranks, steps=1)
    assert found.passed, found.divergence
    assert found.shard_ranks == expected


@covering(
    options={
        "default": {},
        "one rank": {"ranks": 1},
        "many parts": {"ranks": 3, "accumulate": 4},
        "more parts than samples": {"accumulate": 3},  # 12 parts for 11 samples
        "no clipping": {"clip": None},
        "tight clipping": {"clip": 1e-3},
        "one step": {"steps": 1},
        "momentum": {"make_optimizer": make_sgd},
    },
    loss={"mean": F.cross_entropy, "sum and count": summed},
)
def test_a_users_functions_pass(options: dict[str, Any], loss: Callable[..., Any]) -> None:
    found = paceline.verify(make_model, make_batch, loss, **options)
    assert found.passed, found.divergence
    assert found.max_abs_error < 1e-13


def test_a_loss_may_have_one_element() -> None:
    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets).reshape(1)

    def pair(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(outputs, targets, reduction="sum").reshape(1), len(targets)

    assert paceline.verify(make_model, make_batch, mean, ranks=2, steps=1).passed
    assert paceline.verify(make_model, make_batch, pair, ranks=2, steps=1).passed


def test_dropout_is_switched_off() -> None:
    def model() -> nn.Module:
        return nn.Sequential(make_model(), nn.Dropout(0.5))

    assert paceline.verify(model, make_batch, F.cross_entropy, ranks=2, steps=1).passed


class Remembers(nn.Module):
    """Lets the first sample of a batch change what the next batch gives; rank 0 has it, the others need it sent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("level", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x) * self.level.clone()
        if self.training:
            self.level.copy_(x[0, :1].detach().abs() + 0.5)
        return output


def test_buffers_that_move_are_not_taken_for_randomness() -> None:
    assert paceline.verify(Remembers, make_batch, F.cross_entropy, ranks=3).passed


def test_the_callers_functions_are_asked_for_each_step() -> None:
    asked = []

    def batch(step: int) -> Batch:
        asked.append(step)
        return make_batch(step)

    paceline.verify(make_model, batch, F.cross_entropy, ranks=2, steps=3)
    assert sorted(asked) == sorted([0, 1, 2] * 3)  # one process and two ranks


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hybrid"])
def test_ragged_last_batches_and_few_samples(strategy: str) -> None:
    for batch in (lambda step: make_batch(step, 1), lambda step: make_batch(step, 9 - 7 * step)):
        found = paceline.verify(make_blocks, batch, F.cross_entropy, ranks=4, steps=2, strategy=strategy)
        assert found.passed, found.divergence


# The certificate itself.


def test_a_certificate_says_what_was_verified() -> None:
    found = paceline.verify(make_model, make_batch, F.cross_entropy, ranks=3, steps=2, accumulate=2, clip=0.5)
    assert (found.strategy, found.ranks, found.backend, found.steps) == ("ddp", 3, "virtual", 2)
    assert (found.accumulate, found.clip, found.batch, found.dtype) == (2, 0.5, 11, "float64")
    assert found.num_parameters == 5 * 6 + 6 + 6 * 4 + 4 + 4 * 3 + 3
    assert (found.tolerance, found.measure, found.bound) == (1e-10, "absolute", "sums in another order, in float64")
    assert (found.precision, found.checkpoint_activations, found.shard_ranks) == ("fp32", "none", None)
    assert found.reference == "one process on whole batches"
    assert found.max_abs_error == found.errors.largest
    assert found.seconds > 0


def test_a_certificate_is_json() -> None:
    good = paceline.verify(make_model, make_batch, F.cross_entropy, ranks=2, steps=1)
    bad = paceline.verify(normed, make_batch, F.cross_entropy, ranks=2, steps=1, sync_batchnorm=False)
    for found in (good, bad):
        values = json.loads(json.dumps(found.to_json()))
        assert set(values) == {field.name for field in dataclasses.fields(Certificate)}
        assert values["passed"] is found.passed
        assert set(values["errors"]) == {"loss", "gradients", "norm", "parameters", "buffers"}
    assert good.to_json()["divergence"] is None
    assert bad.to_json()["divergence"] == dataclasses.asdict(bad.divergence)  # type: ignore[arg-type]


def test_tolerance_decides() -> None:
    strict = paceline.verify(make_model, make_batch, F.cross_entropy, ranks=3, steps=1, tolerance=1e-30)
    assert not strict.passed
    assert strict.divergence is not None
    options: dict[str, Any] = {"ranks": 2, "steps": 1, "sync_batchnorm": False}
    assert not paceline.verify(normed, make_batch, F.cross_entropy, **options).passed
    assert paceline.verify(normed, make_batch, F.cross_entropy, **options, tolerance=10.0).passed


# What fails, and where.


def normed() -> nn.Module:
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)]
    return nn.Sequential(*layers, nn.Linear(6, 3))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [("ddp", 3, 1), ("ddp", 2, 2), ("zero1", 2, 2), ("zero2", 3, 1), ("fsdp", 3, 1), ("fsdp", 2, 2), ("hybrid", 4, 2)],
)
def test_batch_norm_passes_with_the_statistics_of_all_ranks(strategy: str, ranks: int, accumulate: int) -> None:
    found = paceline.verify(
        normed,
        lambda step: make_batch(step, 17),
        F.cross_entropy,
        strategy=strategy,
        ranks=ranks,
        steps=2,
        accumulate=accumulate,
    )
    assert found.passed, found.divergence
    assert 0.0 < found.errors.buffers < 1e-10
    # Statistics are those of a microbatch, so the one process goes through as many.
    batches = "whole batches" if accumulate == 1 else "batches in 2 pieces"
    assert found.reference == f"one process on {batches}"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"), [("ddp", 2, 1), ("ddp", 4, 1), ("ddp", 2, 2), ("zero1", 2, 1), ("fsdp", 2, 2)]
)
def test_batch_norm_of_each_rank_fails_and_the_first_one_is_named(strategy: str, ranks: int, accumulate: int) -> None:
    found = paceline.verify(
        normed,
        lambda step: make_batch(step, 17),
        F.cross_entropy,
        strategy=strategy,
        ranks=ranks,
        steps=1,
        accumulate=accumulate,
        sync_batchnorm=False,
    )
    assert not found.passed
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.what, found.divergence.step) == ("3", "forward", 0)
    assert found.divergence.error > 1e-3
    assert "BatchNorm" in found.divergence.hint
    assert "synchronise it over the ranks" in str(found.divergence)


def test_batch_norm_passes_where_the_batch_is_not_cut() -> None:
    assert paceline.verify(normed, make_batch, F.cross_entropy, ranks=1).passed


def test_batch_norm_of_a_config_is_named_too() -> None:
    case = ConfigCase(built_in("resnet"), batch=9)
    found = certify(case, Settings.of(ranks=2, steps=1, sync_batchnorm=False))
    assert not found.passed
    assert found.divergence is not None
    model = case.make_model()
    first = next(name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    assert (found.divergence.module, found.divergence.what) == (first, "forward")


class Counts(nn.Module):
    """Keeps a sum over the samples that it has seen; nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum()
        return self.linear(x)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_buffers_are_compared_even_if_no_output_depends_on_them(strategy: str) -> None:
    """Rank 0 has seen its share of the samples only."""
    found = paceline.verify(Counts, make_batch, F.cross_entropy, strategy=strategy, ranks=2, steps=1)
    assert not found.passed
    assert found.errors.buffers > 0.1
    assert max(found.errors.loss, found.errors.gradients, found.errors.parameters) < 1e-12
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.what) == (0, "buffer (seen)")


class Centred(nn.Module):
    """Subtracts the mean over the batch: a mistake that no hint knows."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)
        self.centre = Centre()
        self.after = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.centre(torch.tanh(self.before(x))))


class Centre(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", VERIFIED)
def test_a_module_that_mixes_samples_is_named(strategy: str) -> None:
    found = paceline.verify(Centred, make_batch, F.cross_entropy, strategy=strategy, ranks=4, steps=1)
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.what, found.divergence.hint) == ("centre", "forward", "")


def test_a_loss_that_mixes_samples_is_found() -> None:
    """A mean over samples that is none: its gradient depends on the cut, although every output is right."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) + outputs.std(0).sum()

    found = paceline.verify(make_model, make_batch, loss, ranks=2, steps=1)
    assert not found.passed
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.step) == ("4", 0)
    assert found.divergence.what.startswith("gradient")


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (2, 2)])
def test_the_first_step_that_differs_is_named(step: int, expected: int) -> None:
    """The batch of one step reaches the ranks changed: a bug that begins late."""

    def batch(asked: int) -> Batch:
        inputs, targets = make_batch(asked)
        if asked == step and threading.current_thread().name == "rank-1":
            inputs = inputs + 1e-3
        return inputs, targets

    found = paceline.verify(make_model, batch, F.cross_entropy, ranks=2, steps=4)
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.module, found.divergence.what) == (expected, "0", "forward")


class Routed(nn.Module):
    """Sends samples to experts, looks positions up in a table without samples, and goes wrong on one rank if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(5, 1)
        self.experts = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))
        self.wrong = Wrong(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions(torch.arange(5)).squeeze(1)
        chosen = x[:, :3].argmax(1)
        hidden = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                hidden = hidden.index_add(0, rows, expert(x[rows]))
        return self.out(self.wrong(hidden))


class Wrong(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output + 1e-3 if threading.current_thread().name == "rank-1" else output


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate", "size"),
    [
        ("ddp", 2, 1, 3),
        ("ddp", 2, 2, 11),
        ("ddp", 3, 2, 5),
        ("zero1", 3, 2, 3),
        ("zero2", 3, 2, 5),
        ("fsdp", 3, 2, 3),
        ("fsdp", 2, 2, 11),
        ("hybrid", 4, 2, 5),
    ],
)
def test_the_place_is_found_past_branches_tables_and_ranks_without_samples(
    strategy: str, ranks: int, accumulate: int, size: int
) -> None:
    """Neither an expert that only some pieces called, nor pieces that are missing, are taken for the culprit."""
    found = paceline.verify(
        Routed,
        lambda step: make_batch(step, size),
        F.cross_entropy,
        strategy=strategy,
        ranks=ranks,
        steps=1,
        accumulate=accumulate,
    )
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.what) == ("wrong", "forward")
    assert found.divergence.error == pytest.approx(1e-3)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradients[0] * (1.01 if threading.current_thread().name.startswith("rank-") else 1.0)


class WrongBackward(nn.Module):
    """Right on the way forward; on the way back, what reaches ``first`` is one per cent too large on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(WrongGradient.apply(self.first(x))))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("clip", "strategy"), [(None, "ddp"), (1e-3, "ddp"), (1e-3, "zero1"), (1e-3, "zero2"), (1e-3, "fsdp")]
)
def test_clipping_does_not_hide_whose_gradient_is_wrong(clip: float | None, strategy: str) -> None:
    """One wrong gradient changes the norm, and by that every clipped gradient."""
    options: dict[str, Any] = {"strategy": strategy, "ranks": 2, "steps": 1, "clip": clip}
    found = paceline.verify(WrongBackward, make_batch, F.cross_entropy, **options)
    assert found.divergence is not None
    assert found.divergence.module == "first"
    assert found.divergence.what.startswith("gradient")


def test_nan_on_one_rank_is_a_failure_with_a_place() -> None:
    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            return output * math.nan if threading.current_thread().name == "rank-1" else output

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), Breaks(5, 3))

    found = paceline.verify(model, make_batch, F.cross_entropy, ranks=2, steps=1)
    assert not found.passed
    assert found.max_abs_error == math.inf
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.what) == ("1", "forward")


# What is refused.


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * torch.randn(len(x), 3, dtype=x.dtype)


class FunctionalDropout(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("model", [Noisy, FunctionalDropout])
def test_random_models_are_refused(model: type[nn.Linear]) -> None:
    with pytest.raises(UsageError, match=r"draws random numbers(?s:.*)switch dropout and noise off"):
        paceline.verify(lambda: model(5, 3), make_batch, F.cross_entropy)


def test_a_loss_that_is_not_finite_proves_nothing() -> None:
    """Two runs that both give nan agree in everything, and in nothing."""
    for broken in (math.nan, math.inf):
        with pytest.raises(UsageError, match="loss of step 0 is"):
            paceline.verify(make_model, make_batch, lambda o, t, b=broken: F.cross_entropy(o, t) * b)

    def later(step: int) -> Batch:
        inputs, targets = make_batch(step)
        return (inputs * math.inf if step == 1 else inputs), targets

    with pytest.raises(UsageError, match="loss of step 1 is nan"):
        paceline.verify(make_model, later, F.cross_entropy)


def test_a_model_that_cannot_be_trained_so_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has no blocks"):
        paceline.verify(make_model, make_batch, F.cross_entropy, checkpoint_activations="full")

    class ScalesTogether(torch.optim.SGD):
        """Divides all gradients by the norm of all that it sees."""

        def step(self, closure: Any = None) -> Any:
            seen = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            total = sum(p.grad.square().sum() for p in seen) ** 0.5
            for p in seen:
                p.grad = p.grad / total
            return super().step(closure)

    with pytest.raises(UsageError, match="ScalesTogether cannot update sharded parameters"):
        paceline.verify(make_model, make_batch, F.cross_entropy, strategy="zero1", make_optimizer=ScalesTogether)


def test_rounding_that_an_optimizer_magnifies_is_told_from_a_wrong_update() -> None:
    """The bias before a norm has a gradient of nothing but rounding, which Adam scales up to its learning rate."""

    def make_adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.5, eps=1e-12)

    found = paceline.verify(normed, make_batch, F.cross_entropy, ranks=2, steps=1, make_optimizer=make_adam)
    assert not found.passed
    assert found.errors.gradients < 1e-14
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.what) == ("2", "update (bias)")
    assert "its gradient cancels" in found.divergence.hint


def test_functions_that_cannot_be_sent_are_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(certificates, "run_processes", started)
    monkeypatch.setattr(certificates, "run_reference", started)
    with pytest.raises(UsageError, match=r"cannot be sent there(?s:.*)use backend='virtual'"):
        paceline.verify(make_model, make_batch, lambda o, t: F.cross_entropy(o, t), backend="gloo")


def test_a_model_that_is_made_only_once_is_refused() -> None:
    model = make_model()
    with pytest.raises(UsageError, match="parallelized already"):
        paceline.verify(lambda: model, make_batch, F.cross_entropy, ranks=2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), r"loss_fn returned shape \[11\]"),
        (lambda o, t: float(F.cross_entropy(o, t)), "loss_fn returned float"),
        (lambda o, t: (F.cross_entropy(o, t), 1, 2), "loss_fn returned tuple"),
    ],
)
def test_losses_of_another_form_are_refused(loss: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        paceline.verify(make_model, make_batch, loss)


def test_batches_whose_tensors_disagree_are_refused() -> None:
    with pytest.raises(UsageError, match=r"same number of samples along dim 0; got \[4, 5\]"):
        num_samples((torch.ones(4, 2), torch.ones(5)))


def test_errors_of_the_users_code_come_with_their_rank() -> None:
    def batch(step: int) -> Batch:
        if threading.current_thread().name == "rank-1":
            raise KeyError("no such file")
        return make_batch(step)

    with pytest.raises(RankFailedError, match="rank 1 failed: KeyError") as failure:
        paceline.verify(make_model, batch, F.cross_entropy, ranks=2)
    assert isinstance(failure.value.__cause__, KeyError)


def test_a_verdict_of_the_communicator_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator, *_: Any) -> None:
        comm.all_reduce(torch.zeros(1 + comm.rank)).wait()

    monkeypatch.setattr(certificates, "run_distributed", run)
    with pytest.raises(CollectiveMismatchError):
        paceline.verify(make_model, make_batch, F.cross_entropy, ranks=2)


# Pieces.


def test_pieces_of_a_batch_are_the_batch() -> None:
    batch = {"x": torch.arange(22).reshape(11, 2), "y": (torch.arange(11), "label", torch.tensor(3.0))}
    pieces = [cut(batch, part, 4) for part in range(4)]
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch["x"])
    assert [num_samples(piece) for piece in pieces] == [2, 3, 3, 3]
    assert all(piece["y"][1:] == ("label", torch.tensor(3.0)) for piece in pieces)
    assert [cut(batch, part, 13) is None for part in range(13)].count(True) == 2


def test_a_config_gives_the_same_case_wherever_it_is_built() -> None:
    """A rank of another process builds it anew from what was sent."""
    case = ConfigCase(built_in("mlp"), batch=5)
    first = case.make_batch(1)
    sent = pickle.loads(pickle.dumps(case))
    for ours, theirs in zip(first, sent.make_batch(1), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(case.make_model().parameters(), sent.make_model().parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(first[0], case.make_batch(2)[0])


def test_a_function_without_a_seed_gives_the_same_model_each_time() -> None:
    case = FunctionCase(model=make_model, batch=make_batch, loss=F.cross_entropy)
    for ours, theirs in itertools.pairwise([case.make_model() for _ in range(3)]):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# Real processes.


def verified_on_this_rank(comm: Communicator, name: str, settings: Settings, shares: bool = False) -> list[float]:
    """Runs where a rank of ``backend="gloo"`` runs; says how far each step is from one process."""
    comm = share_memory(comm) if shares else comm
    case = ConfigCase(built_in(name), batch=7)
    pairs = zip(run_distributed(comm, case, settings), run_reference(case, settings).steps, strict=True)
    return [compare(ours, expected).largest for ours, expected in pairs]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        pytest.param("gpt", "ddp", {}, marks=pytest.mark.exhaustive),
        ("gpt", "ddp", {"accumulate": 2}),
        pytest.param("gpt", "zero1", {"accumulate": 2}, marks=pytest.mark.exhaustive),
        ("mlp", "zero2", {"accumulate": 2}),
        ("gpt", "fsdp", {"accumulate": 2, "checkpoint_activations": "full"}),
        ("mlp", "hybrid", {"shard_ranks": 1}),
        ("resnet", "fsdp", {}),
    ],
)
def test_real_processes_compute_what_one_would(
    gloo_pool: GlooPool, name: str, strategy: str, options: dict[str, Any]
) -> None:
    settings = Settings.of(strategy=strategy, ranks=2, steps=3, **options)
    for errors in gloo_pool.run(verified_on_this_rank, name, settings, ranks=2):
        assert max(errors) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        ("gpt", "ddp", {"accumulate": 2}),
        ("mlp", "zero1", {}),
        ("gpt", "fsdp", {}),
        ("mlp", "hybrid", {"shard_ranks": 1}),
    ],
)
def test_processes_that_share_memory_do_too(
    gloo_pool: GlooPool, name: str, strategy: str, options: dict[str, Any]
) -> None:
    settings = Settings.of(strategy=strategy, ranks=2, steps=4, **options)
    for errors in gloo_pool.run(verified_on_this_rank, name, settings, True, ranks=2):
        assert max(errors) < 1e-12


def test_processes_are_asked_for_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """``backend="gloo"`` hands the case to real ranks and compares what comes back."""
    calls = []

    def run_processes(function: Callable[..., Any], ranks: int, *, args: Any, threads: int) -> list[Any]:
        assert threads == 1
        calls.append((function, ranks))
        return paceline.run_virtual(lambda comm: function(comm, *args), ranks)

    monkeypatch.setattr(certificates, "run_processes", run_processes)
    case = ConfigCase(built_in("mlp"), batch=5)
    found = certify(case, Settings.of(ranks=2, steps=2, backend="gloo"))
    assert found.passed
    assert found.backend == "gloo"
    assert calls == [(run_distributed, 2)]
