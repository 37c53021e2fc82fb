"""Full sharding of models that read parameters beside the calls of their unit: right, and with one note on its cost."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from engine_cases import SHARES, Borrowed, Recipe, assert_same, build, run_engine, run_single
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.errors import RankFailedError

# Models whose default units are called: no note. All have 5 numbers in, 3 out.


class Attending(nn.Module):
    """torch's attention reads the weight of its output layer, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        row = self.first(x)[:, None].expand(-1, 3, -1) * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
        return self.last(self.attention(row, row, row)[0].sum(1))


class DictOfBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for name in ("left", "right")})
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.parts["right"](self.parts["left"](x)))


class ListOfContainers(nn.Module):
    """The rows look like blocks, but only what is in them is called."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.ModuleList([nn.Linear(7, 5), nn.LayerNorm(5)])})
            for _ in range(3)
        )
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for row in self.rows:
            assert isinstance(row, nn.ModuleDict)
            hidden = torch.tanh(row["up"](x))
            for layer in row["down"]:  # type: ignore[attr-defined]
                hidden = layer(hidden)
            x = x + hidden
        return self.last(x)


class Lists(nn.Module):
    """Lists and dicts of parameters, and a plain list beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])
        self.named = nn.ParameterDict({"out": nn.Parameter(torch.randn(5, 3))})
        self.middle = nn.Linear(5, 5)
        self.plain = [self.middle.weight]

    def forward(self, x: torch.Tensor) -> Any:
        for weight in self.several:
            x = torch.tanh(x @ weight)
        return torch.tanh(self.middle(x) @ self.plain[0]) @ self.named["out"]


# Models that read parameters of units that are not gathered.


class Walked(nn.Module):
    """A mixed Sequential that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.LayerNorm(9))
        self.last = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.features:
            x = layer(x)
        return self.last(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 9)
        self.mixing = nn.Parameter(torch.randn(9, 9))
        self.recurrent = nn.LSTM(9, 9, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.recurrent((x @ self.mixing)[:, None].expand(-1, 2, -1))[0]
        return torch.tanh(self.layer(mixed[:, -1]))


class Encoding(nn.Module):
    """Calls a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.encoder = Encoder()
        self.last = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.encoder.encode(self.first(x)))


class Checkpointed(Encoding):
    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(self.encoder.encode, self.first(x), use_reentrant=False))


class Reentrant(Encoding):
    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(self.encoder.encode, self.first(x), use_reentrant=True))


class Rows(nn.Module):
    """Blocks that are called, and whose weights are read before and after their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        early = self.rows[1].weight
        for row in self.rows:
            x = torch.tanh(row(x))
        return self.last(F.linear(x, early) + F.linear(x, self.rows[0].weight))


class Penalised(Walked):
    """Goes through the parameters of a unit, of which a rank has pieces."""

    def forward(self, x: torch.Tensor) -> Any:
        squares = sum(weight.square().sum() for weight in self.features.parameters() if weight.dim() == 2)
        return self.last(self.features(x)) * squares


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 5))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


class Lending(nn.Module):
    """A unit whose output is a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()
        self.middle = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.position(1)
        return self.last(torch.tanh(self.middle(x) + found) * found)


CALLED = (Attending, DictOfBlocks, ListOfContainers, Lists)
READ = (Walked, Encoding, Checkpointed, Reentrant, Rows, Penalised, Lending, Borrowed)
NOTE = "while their unit"

OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "kept": {"reshard_after_forward": False},
    "not ahead": {"prefetch": 0},
    "spread": {"reshard_after_forward": 1},
    "one by one": {"unit_mb": 1e-6},
}


@functools.cache
def single(model: type[nn.Module], recipe: Recipe) -> Any:
    return run_single(model, recipe)


def shard(module: nn.Module, comm: Communicator, **options: Any) -> Any:
    return parallelize(module, comm, "hybrid" if "shard_ranks" in options else "fsdp", **options)


@pytest.mark.filterwarnings(f"ignore:.*{NOTE}")
@covering(model=[*CALLED, *READ], options=list(OPTIONS), shares=["two ranks", "accumulated", "ragged"])
def test_models_that_pass_under_ddp_train_as_one_process(model: type[nn.Module], options: str, shares: str) -> None:
    recipe = Recipe(shares=SHARES[shares])
    for result in run_engine(lambda module, comm: shard(module, comm, **OPTIONS[options]), model, recipe):
        assert_same(result, single(model, recipe), tolerance=1e-9)


@pytest.mark.filterwarnings(f"ignore:.*{NOTE}")
@pytest.mark.parametrize("model", [Walked, Rows, Reentrant])
def test_hybrid_groups_read_too(model: type[nn.Module]) -> None:
    recipe = Recipe(shares=SHARES["ragged"])
    for result in run_engine(lambda module, comm: shard(module, comm, shard_ranks=2), model, recipe):
        assert_same(result, single(model, recipe))


@pytest.mark.parametrize("model", CALLED)
def test_a_model_whose_parts_are_called_needs_no_note(model: type[nn.Module]) -> None:
    run_engine(shard, model, Recipe(shares=SHARES["two ranks"], steps=1))  # warnings are errors


@pytest.mark.some(1)
@pytest.mark.parametrize("model", READ)
def test_one_note_says_what_a_read_costs_and_the_cut_that_it_proposes_needs_none(model: type[nn.Module]) -> None:
    recipe = Recipe(shares=SHARES["accumulated"], steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_engine(shard, model, recipe)
    (note,) = [str(each.message) for each in caught]
    assert NOTE in note
    assert "MiB more on each rank" in note
    proposed = re.search(r"units=(\(.*?\)) \(", note)
    assert proposed is not None
    units = ast.literal_eval(proposed[1])
    for result in run_engine(lambda module, comm: shard(module, comm, units=units), model, recipe):
        assert_same(result, single(model, recipe), tolerance=1e-9)


# Passes of other kinds.


def losses(model: type[nn.Module], options: dict[str, Any], wrap: Callable[[Any], Iterator[torch.Tensor]]) -> list[Any]:
    def work(comm: Communicator) -> list[float]:
        engine = parallelize(build(model), comm, "fsdp", **options)
        return [float(loss) for loss in wrap(engine)]

    return run_virtual(work, ranks=2)


def several_kinds(engine: Any) -> Iterator[torch.Tensor]:
    """Evaluates, trains, runs two forwards before one backward, and a forward without one, then changes values."""
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    x = torch.arange(20, dtype=torch.float64).view(4, 5).sin()
    for step in range(3):
        with torch.no_grad():
            yield engine(x).sum()
        loss = engine(x).square().mean() + engine(x * (step + 2)).square().mean()
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield engine(x).sum().detach()
        engine.load_state_dict({name: value * 1.1 for name, value in engine.state_dict().items()})


@pytest.mark.filterwarnings(f"ignore:.*{NOTE}")
@pytest.mark.parametrize("model", [Walked, Rows, Lending, Penalised])
def test_evaluation_and_several_forwards_see_current_values(model: type[nn.Module]) -> None:
    expected = losses(model, {"units": ()}, several_kinds)[0]
    for found in losses(model, {}, several_kinds):
        assert found == pytest.approx(expected, abs=1e-10)


def three_steps(engine: Any) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    x = torch.arange(20).view(4, 5).sin()
    for _ in range(3):
        loss = engine(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


@pytest.mark.filterwarnings(f"ignore:.*{NOTE}")
def test_a_read_gives_parameters_in_the_dtype_of_the_module() -> None:
    def work(comm: Communicator, **options: Any) -> list[float]:
        engine = parallelize(build(Walked).float(), comm, "fsdp", precision="bf16_master", **options)
        return [float(loss) for loss in three_steps(engine)]

    assert run_virtual(work, ranks=2) == run_virtual(lambda comm: work(comm, units=()), ranks=2)


def test_stages_of_a_pipeline_may_read() -> None:
    def work(comm: Communicator, **options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        rows = nn.Sequential(*(nn.Sequential(Walked(), nn.Linear(3, 5)) for _ in range(4))).double()
        engine = parallelize(rows, comm, "fsdp", **options)
        x = torch.arange(40, dtype=torch.float64).view(8, 5).sin().chunk(engine.comm.size)[engine.comm.rank]
        engine.run_microbatches(x.chunk(2), lambda model, batch: (model(batch).square().sum(), len(batch)))
        return {name: value for name, value in engine.full_gradients().items() if value is not None}

    expected = run_virtual(lambda comm: work(comm, units=()), ranks=2)[0]
    with pytest.warns(UserWarning, match=NOTE):  # at this size, the features of a row are a unit
        results = run_virtual(lambda comm: work(comm, pipeline=2, unit_mb=0.0013), ranks=4)
    for found in results:
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


class Beside(nn.Module):
    """A block that reads a weight of the first one, which is no part of it."""

    def __init__(self, first: nn.Module | None) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        object.__setattr__(self, "first", first)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.layer(x))
        return x if self.first is None else F.linear(x, self.first.layer.weight)  # type: ignore[attr-defined]


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = Beside(None)
        self.rows = nn.ModuleList([first, Beside(first), Beside(first)])

    def forward(self, x: torch.Tensor) -> Any:
        for row in self.rows:
            x = row(x)
        return x


@pytest.mark.filterwarnings(f"ignore:.*{NOTE}", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.some(1)
@pytest.mark.parametrize("model", [Crossing, Walked])
def test_compiled_models_with_reads_keep_the_numbers(monkeypatch: pytest.MonkeyPatch, model: type[nn.Module]) -> None:
    """Without blocks, units are compiled one by one; what reads beside the calls of a unit runs as it is."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def work(comm: Communicator, **options: Any) -> list[float]:
        engine = parallelize(build(model).float(), comm, "fsdp", **options)
        return [float(loss) for loss in three_steps(engine)]

    expected = run_virtual(lambda comm: work(comm, units=()), ranks=2)[0]
    for found in run_virtual(lambda comm: work(comm, compile=True), ranks=2):
        assert found == pytest.approx(expected, rel=1e-5)


# What is an error, and what a read does not change.


def test_a_read_that_is_new_after_the_first_step_is_named() -> None:
    class Later(Rows):
        def forward(self, x: torch.Tensor, reads: bool = False) -> Any:
            return super().forward(x) if reads else self.last(x)

    def work(comm: Communicator) -> None:
        engine = parallelize(build(Later), comm, "fsdp")
        for step in range(2):
            engine(torch.ones(2, 5, dtype=torch.float64), step == 1).sum().backward()

    with pytest.raises(RankFailedError, match=r"rows\.1 are read beside calls of their unit \(rows\.1\), which is new"):
        run_virtual(work, ranks=2)


def test_only_the_rank_that_takes_a_branch_reads() -> None:
    class Sometimes(Rows):
        def forward(self, x: torch.Tensor, reads: bool = False) -> Any:
            x = torch.tanh(self.rows[0](x))
            return self.last(F.linear(x, self.rows[1].weight) if reads else x)

    def work(comm: Communicator) -> dict[str, Any]:
        engine = parallelize(build(Sometimes), comm, "fsdp")
        for _ in range(2):
            engine.zero_grad()
            engine(torch.ones(2, 5, dtype=torch.float64), comm.rank == 1).sum().backward()
        return engine.full_gradients()

    model = build(Sometimes)
    for reads in (False, True):
        (model(torch.ones(2, 5, dtype=torch.float64), reads).sum() / 2).backward()
    with pytest.warns(UserWarning, match=NOTE):
        found = run_virtual(work, ranks=2)
    for gradients in found:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


def test_after_a_forward_that_raised_a_read_gets_the_piece_and_waits_for_nobody() -> None:
    class Failing(Walked):
        def forward(self, x: torch.Tensor) -> Any:
            raise ValueError(f"a bad sample of {len(x)}")

    def work(comm: Communicator) -> bool:
        engine = parallelize(build(Failing), comm, "fsdp")
        with pytest.raises(ValueError, match="a bad sample"):
            engine(torch.ones(2, 5, dtype=torch.float64))
        pieces = dict(engine.named_parameters())
        return comm.rank == 1 or engine.features[0].weight is pieces["features.0.weight"]

    assert run_virtual(work, ranks=2) == [True, True]
