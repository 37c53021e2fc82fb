"""Synchronised batch norm against one process that sees the whole batch."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from gloo_pool import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.batchnorm import SyncBatchNorm, combine, standing_in, synchronise_batchnorm
from paceline.engines.blocks import checkpoint_blocks
from paceline.errors import RankFailedError, StuckRankError
from paceline.models.resnet import ResNet

TOLERANCE = 1e-10
STEPS = 3


class Block(nn.Module):
    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Layers of all kinds of input, and of different widths; the head is defined first and called last."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head_norm = nn.BatchNorm1d(3, **options)
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.layers = nn.Sequential(Block(4, **options), Block(4, **options))
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head_norm(self.out(self.layers(self.stem(x)).mean((2, 3))))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(2, momentum=0.3)
        self.second = nn.BatchNorm3d(4)
        self.out = nn.Linear(4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x.flatten(2))  # samples, channels, positions
        volume = self.second(torch.tanh(rows).reshape(-1, 4, 2, 2, 2))
        return self.out(volume.mean(-1).flatten(1))


class Twice(nn.Module):
    """A layer that is called twice, and one that is frozen and never called back."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm2d(2).requires_grad_(False)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.out = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(self.frozen(x)))
        return self.out(self.norm(torch.tanh(self.conv(x))).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": ConvNet,
    "cumulative": lambda: ConvNet(momentum=None),
    "not affine": lambda: ConvNet(affine=False),
    "not tracking": lambda: ConvNet(track_running_stats=False),
    "neither": lambda: ConvNet(affine=False, track_running_stats=False, eps=1e-3),
    "volumes": Volumes,
    "twice": Twice,
    "resnet": lambda: ResNet(18, num_classes=3, in_channels=2, width=2, norm="batch", stem="small"),
}
# Samples of each rank in each step; None: the rank runs no forward, 0: it runs one without samples.
EVEN = [(3, 3, 3, 3)] * STEPS
RAGGED = [(4, 1, 2, 3), (2, 5, 1, 1), (3, 3, 4, 2)]
SOME_SIT_OUT = [(4, 3, 2, 2), (3, None, 4, None), (None, 2, 3, 1)]
Shares = Sequence[Sequence[int | None]]


def make(name: str) -> nn.Module:
    torch.manual_seed(6)
    model = MODELS[name]().double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None:
                module.weight.uniform_(0.5, 1.5)
    return model


def data(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    x = torch.randn(samples, 2, 4, 4, generator=generator, dtype=torch.float64) * 3 + 7
    return x, torch.randint(0, 3, (samples,), generator=generator)


def train_alone(model: nn.Module, shares: Shares) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step, counts in enumerate(shares):
        x, y = data(step, sum(count or 0 for count in counts))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return state_of(model)


def train_rank(model: nn.Module, comm: Communicator, shares: Shares) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step, counts in enumerate(shares):
        total = sum(count or 0 for count in counts)
        x, y = data(step, total)
        ends = list(itertools.accumulate(count or 0 for count in counts))
        mine = counts[comm.rank]
        optimizer.zero_grad()
        if mine is None:
            with standing_in(model):
                reduce(model, comm)
        else:
            part = slice(ends[comm.rank] - mine, ends[comm.rank])
            (F.cross_entropy(model(x[part]), y[part], reduction="sum") / total).backward()
            reduce(model, comm)
        optimizer.step()
    return state_of(model)


def reduce(model: nn.Module, comm: Communicator) -> None:
    """Stands for the engine: sums over ranks, on the communicator of the engine."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            comm.all_reduce(parameter.grad).wait()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def cut(shares: Shares, ranks: int) -> Shares:
    return [counts[:ranks] for counts in shares]


# Parity.


@pytest.mark.some(3)
@covering(always={"ranks": [3]}, name=list(MODELS), ranks=[1, 2, 3, 4])
def test_training_is_that_of_one_process(name: str, ranks: int) -> None:
    shares = cut(RAGGED if ranks % 2 else EVEN, ranks)
    expected = train_alone(make(name), shares)

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        return train_rank(synchronise_batchnorm(make(name), comm), comm, shares)

    for found in run_virtual(work, ranks):
        check_close(found, expected)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_without_samples_stand_in(name: str) -> None:
    expected = train_alone(make(name), SOME_SIT_OUT)

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        return train_rank(synchronise_batchnorm(make(name), comm), comm, SOME_SIT_OUT)

    for found in run_virtual(work, 4):
        check_close(found, expected)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "twice"])
def test_a_rank_may_stand_in_before_it_has_ever_run(name: str) -> None:
    shares = [(None, 6), (None, 5), (2, 4)]
    expected = train_alone(make(name), shares)

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        return train_rank(synchronise_batchnorm(make(name), comm), comm, shares)

    for found in run_virtual(work, 2):
        check_close(found, expected)


def test_a_batch_without_samples_counts_nothing() -> None:
    shares = [(4, 0, 3), (0, 5, 2), (3, 0, 0)]
    expected = train_alone(make("plain"), shares)

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        return train_rank(synchronise_batchnorm(make("plain"), comm), comm, shares)

    for found in run_virtual(work, 3):
        check_close(found, expected)


@pytest.mark.parametrize("policy", ["full", "matmuls", "every_2"])
def test_checkpointed_blocks_ask_once(policy: str) -> None:
    expected = train_alone(make("plain"), SOME_SIT_OUT)

    def work(comm: VirtualCommunicator) -> tuple[dict[str, torch.Tensor], Any]:
        trace = Trace(comm.device)
        model = synchronise_batchnorm(make("plain"), TracedCommunicator(comm, trace))
        checkpoint_blocks(list(model.layers), policy)
        found = train_rank(model, comm, SOME_SIT_OUT)
        return found, dict(trace.num_operations)

    for found, operations in run_virtual(work, 4):
        check_close(found, expected)
        assert operations == {"all_gather": 3 * STEPS, "all_reduce": 3 * STEPS}


def train_engine(comm: Communicator, name: str, shares: Shares, strategy: str) -> dict[str, torch.Tensor]:
    groups = 2 if strategy == "hybrid" else 0
    engine = parallelize(make(name), comm, strategy, shard_ranks=groups, checkpoint_activations="every_2")
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.01, momentum=0.9)
    for step, counts in enumerate(shares):
        total = sum(count or 0 for count in counts)
        x, y = data(step, total)
        mine, before = counts[comm.rank], sum(count or 0 for count in counts[: comm.rank])
        optimizer.zero_grad()
        if mine is None:
            engine.join_pass()
        else:
            loss = F.cross_entropy(engine(x[before : before + mine]), y[before : before + mine], reduction="sum")
            (loss * comm.size / total).backward()
        optimizer.step()
    return engine.full_state_dict()


@covering(
    strategy=["ddp", "zero1", "zero2", "fsdp", "hybrid"],
    shares={"some sit out": SOME_SIT_OUT, "most sit out": [(None, 6, 2, 2), (3, None, None, None), (2, 4, 1, 1)]},
)
def test_every_engine_with_ranks_that_sit_out(strategy: str, shares: Shares) -> None:
    """The layers' messages and the engine's collectives go their own ways: in the first pass too, none waits."""
    expected = train_alone(make("plain"), shares)
    for found in run_virtual(lambda comm: train_engine(comm, "plain", shares, strategy), 4):
        check_close(found, expected)


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_engines_on_gloo_ranks_that_sit_out(gloo_pool: GlooPool, strategy: str) -> None:
    shares = [(None, 4), (3, 2), (4, None)]
    expected = train_alone(make("plain"), shares)
    for found in gloo_pool.run(train_engine, "plain", shares, strategy, ranks=2, timeout_s=90.0):
        check_close(found, expected)


def gloo_work(comm: Communicator, name: str, shares: Shares) -> dict[str, torch.Tensor]:
    return train_rank(synchronise_batchnorm(make(name), comm), comm, shares)


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "shares"), [("plain", cut(RAGGED, 2)), ("resnet", [(3, 2), (None, 4), (4, None)])])
def test_the_same_on_gloo_ranks(gloo_pool: GlooPool, name: str, shares: Shares) -> None:
    expected = train_alone(make(name), shares)
    for found in gloo_pool.run(gloo_work, name, shares, ranks=2, timeout_s=90.0):
        check_close(found, expected)


# Statistics.


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_combined_moments_are_those_of_all_values(counts: list[int], offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(count, 3, generator=generator, dtype=torch.float64) + offset for count in counts]
    zeros = torch.zeros(3, dtype=torch.float64)
    means = torch.stack([part.mean(0) if len(part) else zeros for part in parts])
    squares = torch.stack([(part - part.mean(0)).square().sum(0) if len(part) else zeros for part in parts])
    found = combine(torch.tensor(counts, dtype=torch.float64)[:, None], means, squares)
    everything = torch.cat(parts)
    assert found.count == len(everything)
    torch.testing.assert_close(found.mean, everything.mean(0), rtol=1e-12, atol=1e-12)
    # A mean far from zero is itself rounded, and with it every deviation; a sum of squares would lose all digits.
    torch.testing.assert_close(found.variance, everything.var(0, correction=0), rtol=1e-9, atol=1e-12)


def test_evaluation_uses_running_statistics_and_asks_nobody() -> None:
    def work(comm: VirtualCommunicator) -> None:
        trace = Trace(comm.device)
        model, alone = (
            synchronise_batchnorm(make("plain"), TracedCommunicator(comm, trace)).eval(),
            make("plain").eval(),
        )
        x, _ = data(0, 3 + comm.rank)
        assert torch.equal(model(x), alone(x))
        with torch.no_grad(), standing_in(model):
            pass
        assert not trace.num_operations

    run_virtual(work, 2)


def test_without_running_statistics_evaluation_looks_at_the_whole_batch() -> None:
    x, _ = data(0, 7)
    expected = make("not tracking").eval()(x).detach()

    def work(comm: Communicator) -> torch.Tensor:
        model = synchronise_batchnorm(make("not tracking"), comm).eval()
        with torch.no_grad():
            if comm.rank == 1:
                with standing_in(model):
                    return torch.empty(0, 3, dtype=torch.float64)
            return model(x[:4] if comm.rank == 0 else x[4:])

    torch.testing.assert_close(torch.cat(run_virtual(work, 3)), expected, rtol=1e-12, atol=1e-12)


def test_training_mode_without_gradients_moves_statistics_everywhere() -> None:
    shares = [(2, None, 3), (None, 4, 1)]
    alone = make("plain")
    with torch.no_grad():
        for step, counts in enumerate(shares):
            alone(data(step, sum(count or 0 for count in counts))[0])

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        model = synchronise_batchnorm(make("plain"), comm)
        with torch.no_grad():
            for step, counts in enumerate(shares):
                x, _ = data(step, sum(count or 0 for count in counts))
                mine, before = counts[comm.rank], sum(count or 0 for count in counts[: comm.rank])
                if mine is None:
                    with standing_in(model):
                        continue
                model(x[before : before + mine])
        return state_of(model)

    for found in run_virtual(work, 3):
        check_close(found, state_of(alone))


def test_nobody_has_samples() -> None:
    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        model = synchronise_batchnorm(make("plain"), comm)
        with standing_in(model):
            pass
        return state_of(model)

    for found in run_virtual(work, 2):
        check_close(found, state_of(make("plain")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_keep_wide_statistics(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(1)) + 4).to(dtype)
    alone = nn.BatchNorm2d(3)
    y = x.clone().requires_grad_()
    expected = alone(y)
    (expected.float() ** 3).sum().backward()

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = nn.Sequential(nn.BatchNorm2d(3))
        synchronise_batchnorm(layer, comm)
        part = x[:4] if comm.rank == 0 else x[4:]
        part = part.clone().requires_grad_()
        found = layer(part)
        (found.float() ** 3).sum().backward()
        assert layer[0].running_var.dtype == layer[0].weight.grad.dtype == torch.float32
        return found.detach(), part.grad, layer[0].weight.grad, layer[0].running_var

    (out0, grad0, w0, var), (out1, grad1, w1, _) = run_virtual(work, 2)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    assert out0.dtype == grad0.dtype == dtype
    torch.testing.assert_close(torch.cat([out0, out1]), expected.detach(), **close)
    torch.testing.assert_close(torch.cat([grad0, grad1]), y.grad, rtol=close["rtol"] * 4, atol=close["atol"] * 16)
    torch.testing.assert_close(w0 + w1, alone.weight.grad, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
    torch.testing.assert_close(var, alone.running_var, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_finite_differences() -> None:
    """Of the input, through the statistics of both ranks: rank 0 changes its samples, the loss is that of both."""

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        layer = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)).double()
        synchronise_batchnorm(layer, comm)
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64)
        x.requires_grad_()

        def loss() -> torch.Tensor:
            return (layer(x) ** 3 + layer(x).sin()).sum()

        loss().backward()
        numeric = torch.zeros_like(x)
        for index in range(x.numel()):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    x.view(-1)[index] += step * (comm.rank == 0)
                    value = loss()
                    x.view(-1)[index] -= step * (comm.rank == 0)
                    comm.all_reduce(value).wait()
                    values.append(value)
            numeric.view(-1)[index] = (values[0] - values[1]) / 2e-6
        return x.grad, numeric

    (found, numeric), _ = run_virtual(work, 2)
    torch.testing.assert_close(found, numeric, rtol=1e-6, atol=1e-8)


# How it fits in.


def test_layers_stay_the_same_objects() -> None:
    def work(comm: Communicator) -> None:
        model = make("resnet")
        modules, tensors = list(model.modules()), {id(t) for t in [*model.parameters(), *model.buffers()]}
        names = list(model.state_dict())
        assert synchronise_batchnorm(model, comm) is model
        assert list(model.modules()) == modules
        assert {id(t) for t in [*model.parameters(), *model.buffers()]} == tensors
        assert list(model.state_dict()) == names
        layers = [module for module in modules if isinstance(module, nn.BatchNorm2d)]
        assert layers
        assert all(isinstance(layer, SyncBatchNorm) for layer in layers)
        layers[0].reset_parameters()  # that of its own class
        twin = copy.deepcopy(model).eval()
        x, _ = data(0, 2)
        assert torch.equal(twin(x), model.eval()(x))

    run_virtual(work, 2)


def test_what_is_left_alone() -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    def work(comm: Communicator) -> None:
        model = nn.Sequential(Own(2), nn.InstanceNorm2d(2), nn.GroupNorm(1, 2), nn.SyncBatchNorm(2))
        synchronise_batchnorm(model, comm)
        assert [isinstance(layer, SyncBatchNorm) for layer in model] == [False, False, False, True]
        with pytest.raises(ValueError, match="expected"):
            synchronise_batchnorm(nn.Sequential(nn.BatchNorm2d(2)), comm)(torch.zeros(2, 2))

    run_virtual(work, 2)
    alone = run_virtual(lambda comm: synchronise_batchnorm(make("plain"), comm), 1)[0]
    assert not any(isinstance(module, SyncBatchNorm) for module in alone.modules())


def test_one_gather_and_one_reduction_for_each_layer() -> None:
    def work(comm: VirtualCommunicator) -> tuple[Any, Any]:
        trace = Trace(comm.device)
        model = synchronise_batchnorm(make("plain"), TracedCommunicator(comm, trace))
        x, y = data(0, 4)
        F.cross_entropy(model(x), y).backward()
        return dict(trace.num_operations), dict(trace.num_bytes)

    for operations, num_bytes in run_virtual(work, 2):
        assert operations == {"all_gather": 3, "all_reduce": 3}
        assert num_bytes == {"all_gather": 3 * 2 * 8 * (2 + 2 * 4), "all_reduce": 3 * 8 * 2 * 4}


def test_layers_in_another_order_are_told() -> None:
    def work(comm: Communicator) -> None:
        model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
        synchronise_batchnorm(model, comm)
        model[comm.rank](torch.randn(4, 3))

    with pytest.raises(
        RankFailedError, match=r"(?s)rank \d is at batch-norm layer \d, rank \d at layer \d of 2.*order"
    ):
        run_virtual(work, 2)


def test_a_rank_that_does_not_take_part_is_found() -> None:
    def work(comm: Communicator) -> None:
        model = synchronise_batchnorm(make("plain"), comm)
        if comm.rank == 0:
            model(data(0, 4)[0])

    with pytest.raises(StuckRankError, match="no rank can go on"):
        run_virtual(work, 2)


def compiled_work(comm: Communicator, shares: Shares) -> dict[str, torch.Tensor]:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
    model = synchronise_batchnorm(make("plain"), comm)
    checkpoint_blocks(list(model.layers), "every_2")
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    return train_rank(model, comm, shares)


@pytest.mark.exhaustive
def test_blocks_may_be_compiled_checkpointed_or_not(gloo_pool: GlooPool) -> None:
    shares = cut(RAGGED, 2)
    expected = train_alone(make("plain"), shares)
    for found in gloo_pool.run(compiled_work, shares, ranks=2, timeout_s=120.0):
        check_close(found, expected)


def test_a_layer_with_a_weight_and_no_bias_trains() -> None:
    """Found by torch's catalogue of modules, since layers may be built so."""

    def build() -> nn.Module:
        torch.manual_seed(2)
        layer = nn.BatchNorm1d(3)
        layer.register_parameter("bias", None)
        return nn.Sequential(nn.Linear(4, 3), layer).double()

    batch = torch.randn(6, 4, dtype=torch.float64)
    alone = build()
    alone(batch).pow(3).mean().backward()

    def train(comm: Communicator) -> dict[str, torch.Tensor | None]:
        engine = parallelize(build(), comm, "ddp")
        engine(batch[comm.rank * 3 : comm.rank * 3 + 3]).pow(3).mean().backward()
        return engine.full_gradients()

    for found in run_virtual(train, 2):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-14)
