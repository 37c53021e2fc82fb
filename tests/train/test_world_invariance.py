"""World size is not a hyper-parameter: samples, order, learning rates and losses are the same for any number of ranks.

The parity certificate (``paceline.verify``) brings its own batches and no schedule, so it cannot see a wrong share of
the data or a schedule that counts ranks. This is where those are seen; the second half plants such bugs, one by one,
and finds that the check reports each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from covering import covering
from kept_records import Kept

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, load_config
from paceline.data.datasets import MapDataset
from paceline.data.fetch import fetch_batch
from paceline.data.loader import StepBatch, TrainLoader
from paceline.data.order import DataOrder, share
from paceline.plan.layout import Layout
from paceline.records.records import StepRecord
from paceline.train import assemble
from paceline.train.optim import RateSchedule
from paceline.train.trainer import Trainer

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_pydoc.yaml"
STEPS = 6
TINY = [
    "model.layers=1",
    "model.heads=2",
    "model.width=16",
    "model.context=16",
    f"train.steps={STEPS}",
    "train.global_batch=8",
    "train.dtype=float64",
    "optim.schedule.warmup=2",
]
CUTS = {"2 ranks": (2, 1), "4 ranks": (4, 1), "1 rank x 4": (1, 4), "2 ranks x 2": (2, 2), "4 ranks x 2": (4, 2)}


class Recorded:
    """A data set that notes which samples it was asked for, call by call."""

    def __init__(self, inner: MapDataset) -> None:
        self._inner = inner
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batches are asked for whole")

    def __getitems__(self, indices: list[int]) -> Any:
        self.calls.append(list(indices))
        return fetch_batch(self._inner, np.asarray(indices, dtype=np.int64))


class Watched:
    """A loader that notes what each step said of itself, beside what the data set was really asked for."""

    def __init__(self, inner: TrainLoader, data: Recorded) -> None:
        self._inner, self._data = inner, data
        self.order = inner.order
        self.steps_seen: list[dict[int, list[int]]] = []
        self.places: list[tuple[int, int, int]] = []

    def steps(self, position: int = 0, num_steps: int | None = None) -> Generator[StepBatch, None, None]:
        for batch in self._inner.steps(position, num_steps):
            calls, self._data.calls = self._data.calls, []
            present = [number for number, piece in enumerate(batch.microbatches) if piece is not None]
            self.steps_seen.append(dict(zip(present, calls, strict=True)))
            self.places.append((batch.position, batch.next_position, batch.epoch))
            yield batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank read, by step and microbatch, and its records."""

    microbatches: list[dict[int, list[int]]]
    places: list[tuple[int, int, int]]
    records: list[StepRecord]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A run over all ranks: what must not depend on their number."""

    samples: list[list[int]]
    places: list[tuple[int, int, int]]
    progress: list[tuple[int, float, int]]
    rates: list[float]
    losses: list[float]
    norms: list[float]


def run_rank(comm: Communicator, config: Config) -> RankTrace:
    sink = Kept()
    trainer = assemble.build_trainer(config, comm, sink=sink)
    data = trainer.parts.loader._dataset
    assert isinstance(data, Recorded)
    watched = Watched(trainer.parts.loader, data)
    Trainer(dataclasses.replace(trainer.parts, loader=watched), sink=sink).run()  # type: ignore[arg-type]
    return RankTrace(microbatches=watched.steps_seen, places=watched.places, records=sink.steps)


def trace(overrides: Sequence[str], ranks: int, accumulate: int) -> Trace:
    """Runs the config on virtual ranks and puts together what they did; asserts that ranks agree where they must."""
    config = load_config(CONFIG, [*TINY, *overrides, f"parallel.ranks={ranks}", f"train.accumulate={accumulate}"])
    found = run_virtual(lambda comm: run_rank(comm, config), ranks)
    progress = [[(r.step, r.epoch, r.position) for r in rank.records] for rank in found]
    rates = [[r.lr for r in rank.records] for rank in found]
    norms = [[r.grad_norm for r in rank.records] for rank in found]
    for per_rank in ([rank.places for rank in found], progress, rates, norms):
        assert all(values == per_rank[0] for values in per_rank), "ranks disagree"
    samples = [
        [index for m in range(accumulate) for r in range(ranks) for index in found[r].microbatches[step].get(m, [])]
        for step in range(STEPS)
    ]
    sums = [sum(rank.records[step].loss_sum for rank in found) for step in range(STEPS)]
    counts = [sum(rank.records[step].count for rank in found) for step in range(STEPS)]
    losses = [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
    return Trace(
        samples=samples,
        places=found[0].places,
        progress=progress[0],
        rates=rates[0],
        losses=losses,
        norms=norms[0],  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def recorded_data(monkeypatch: pytest.MonkeyPatch) -> None:
    original = assemble.build_workload

    def build_workload(config: Config, layout: Layout | None = None, **options: Any) -> assemble.DataAndModel:
        work = original(config, layout, **options)
        data = dataclasses.replace(work.data, train=Recorded(work.data.train))
        return dataclasses.replace(work, data=data)

    monkeypatch.setattr(assemble, "build_workload", build_workload)


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of 19 training samples: steps of 8, 8 and 3, so that six steps are two epochs with ragged ends."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    words = "a line of riders who take turns in the wind, so that all of them go faster than any could alone. "
    path.write_text((words * 4)[:345])
    return f"data.path={path}"


@functools.cache
def clean_trace(overrides: tuple[str, ...], ranks: int = 1, accumulate: int = 1) -> Trace:
    """The run without a planted bug, which several tests start from."""
    return trace(overrides, ranks, accumulate)


def assert_same_run(ours: Trace, alone: Trace) -> None:
    assert ours.samples == alone.samples
    assert ours.places == alone.places
    assert ours.progress == alone.progress
    assert ours.rates == alone.rates
    assert ours.losses == pytest.approx(alone.losses, abs=1e-9)
    assert ours.norms == pytest.approx(alone.norms, abs=1e-9)


SCHEDULES = {
    "steps": ["optim.schedule.unit=steps"],
    "samples": ["optim.schedule.unit=samples", "optim.schedule.warmup=15"],
    "one cycle": ["optim.schedule.kind=one_cycle", "optim.schedule.warmup=0"],
}


@covering(overrides=SCHEDULES, cut=CUTS)
def test_any_cut_is_the_same_run(overrides: list[str], cut: tuple[int, int], short_text: str) -> None:
    """Order and rates exactly, losses to 1e-9, over ragged batches and the end of an epoch."""
    overrides = [*overrides, short_text]
    alone = clean_trace(tuple(overrides))
    assert [len(step) for step in alone.samples] == [8, 8, 3, 8, 8, 3]
    assert len(set(alone.rates)) > 3
    assert_same_run(clean_trace(tuple(overrides), *cut), alone)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_config_as_it_is(ranks: int) -> None:
    """On Python's own documentation, as the file says, for 1 rank and for more."""
    assert_same_run(trace([], ranks, 1), clean_trace(()))


def test_one_rank_reads_the_order_of_the_data(short_text: str) -> None:
    """What the others are compared with is right itself: the order as a pure function of seed and position."""
    alone = trace([short_text], 1, 1)  # not a kept one: a test below plants a bug, and asks again
    order = DataOrder(length=19, global_batch=8, seed=0)
    position = 0
    for samples, place in zip(alone.samples, alone.places, strict=True):
        batch = order.batch_at(position)
        assert samples == batch.indices.tolist()
        assert place == (position, batch.next_position, batch.epoch)
        position = batch.next_position
    for epoch in (alone.samples[:3], alone.samples[3:]):
        assert sorted(index for step in epoch for index in step) == list(range(19))
    assert alone.samples[:3] != alone.samples[3:]


# The same check finds what is planted: data.


def overlapping(indices: Any, part: int, parts: int) -> Any:
    """Every share but the last also has the first sample of the next one."""
    size = len(indices)
    return indices[part * size // parts : (part + 1) * size // parts + (1 if parts > 1 else 0)]


def one_missing(indices: Any, part: int, parts: int) -> Any:
    """Shares of equal size: what does not divide is left out."""
    size = len(indices) // parts
    return indices[part * size : (part + 1) * size]


def strided(indices: Any, part: int, parts: int) -> Any:
    """Every sample once, but dealt out like cards: another order in which they are summed, and other microbatches."""
    return indices[part::parts]


def padded(indices: Any, part: int, parts: int) -> Any:
    """Shares made equal by repeating samples, as samplers do that must not leave a rank without any."""
    size = -(-len(indices) // parts)
    return np.resize(indices, size * parts)[part * size : (part + 1) * size]


def rank_major(self: TrainLoader, batch: Any) -> Any:
    """Microbatch m of rank r is part r x accumulate + m: a rank's share in one piece."""
    parts = self._ranks * self._accumulate
    first = self._rank * self._accumulate
    return batch, [share(batch.indices, part, parts) for part in range(first, first + self._accumulate)]


def same_for_all(self: TrainLoader, batch: Any) -> Any:
    """Every rank reads rank 0's share: the sampler that nobody told the rank."""
    parts = self._ranks * self._accumulate
    return batch, [share(batch.indices, part, parts) for part in range(0, parts, self._ranks)]


def own_shuffle(self: TrainLoader, batch: Any) -> Any:
    """Every rank shuffles with a seed of its own and takes its share of that."""
    order = dataclasses.replace(self.order, seed=self.order.seed + self._rank)
    indices = order.batch_at(batch.position).indices
    parts = self._ranks * self._accumulate
    return batch, [share(indices, part, parts) for part in range(self._rank, parts, self._ranks)]


def restarting(self: DataOrder, position: int) -> Iterator[Any]:
    """The epoch is not part of the key: every epoch has the order of the first."""
    while True:
        batch = DataOrder.batch_at(self, position)
        first = DataOrder.batch_at(self, position % self.samples_per_epoch)
        yield dataclasses.replace(batch, indices=first.indices)
        position = batch.next_position


DATA_BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "shares overlap": ("paceline.data.loader.share", overlapping),
    "a share misses samples": ("paceline.data.loader.share", one_missing),
    "shares are dealt out": ("paceline.data.loader.share", strided),
    "shares are padded": ("paceline.data.loader.share", padded),
    "microbatches in another order": ("paceline.data.loader.TrainLoader._cut", rank_major),
    "all ranks read the same share": ("paceline.data.loader.TrainLoader._cut", same_for_all),
    "each rank shuffles for itself": ("paceline.data.loader.TrainLoader._cut", own_shuffle),
}


@pytest.mark.parametrize(("target", "bug"), DATA_BUGS.values(), ids=DATA_BUGS.keys())
def test_wrong_shares_of_the_data_are_found(
    target: str, bug: Callable[..., Any], short_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = clean_trace((short_text,))
    assert_same_run(clean_trace((short_text,), 2, 2), alone)
    monkeypatch.setattr(target, bug)
    wrong = trace([short_text], 2, 2)
    assert wrong.samples != alone.samples
    with pytest.raises(AssertionError):
        assert_same_run(wrong, alone)


def test_an_order_that_repeats_itself_each_epoch_is_found(short_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataOrder, "batches", restarting)
    with pytest.raises(AssertionError):
        test_one_rank_reads_the_order_of_the_data(short_text)


# And learning rates.


def rate_bug(ranks: int, accumulate: int, count: Callable[[float, int, int], float]) -> Callable[..., float]:
    original = RateSchedule.factor

    def factor(self: RateSchedule, *, before: float, after: float) -> float:
        return original(self, before=count(before, ranks, accumulate), after=count(after, ranks, accumulate))

    return factor


RATE_BUGS: dict[str, tuple[list[str], Callable[[float, int, int], float]]] = {
    "advanced by every rank": (SCHEDULES["steps"], lambda progress, ranks, _: progress * ranks),
    "advanced by every microbatch": (SCHEDULES["steps"], lambda progress, _, accumulate: progress * accumulate),
    "counts a rank's own samples": (SCHEDULES["samples"], lambda progress, ranks, _: progress // ranks),
    "counts a microbatch's samples": (SCHEDULES["samples"], lambda progress, _, accumulate: progress // accumulate),
}


@pytest.mark.parametrize(("overrides", "count"), RATE_BUGS.values(), ids=RATE_BUGS.keys())
def test_schedules_that_count_the_wrong_thing_are_found(
    overrides: list[str], count: Callable[[float, int, int], float], short_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*overrides, short_text]
    alone = clean_trace(tuple(overrides))
    assert_same_run(clean_trace(tuple(overrides), 2, 2), alone)
    monkeypatch.setattr(RateSchedule, "factor", rate_bug(2, 2, count))
    wrong = trace(overrides, 2, 2)
    assert wrong.samples == alone.samples
    assert wrong.rates != alone.rates
    with pytest.raises(AssertionError):
        assert_same_run(wrong, alone)


def test_a_rate_scaled_with_the_ranks_is_found(short_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of thumb that multiplies the rate by the world size: not here, where the global batch stays."""
    alone = clean_trace((short_text,))
    original = assemble.build_optimizer

    def build_optimizer(config: Any, *others: Any) -> Any:
        return original(config.model_copy(update={"lr": 2 * config.lr}), *others)

    monkeypatch.setattr(assemble, "build_optimizer", build_optimizer)
    wrong = trace([short_text], 2, 1)
    assert wrong.samples == alone.samples
    with pytest.raises(AssertionError):
        assert_same_run(wrong, alone)


def test_losses_weighed_by_ranks_are_found(short_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order and rates alone would not tell: the losses drift apart after the first ragged batch."""
    alone = clean_trace((short_text,))
    original = assemble.build_loss

    def build_loss(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)

        class Mean(type(loss)):  # type: ignore[misc]
            """Has a mean for its sum, and calls it one sample's."""

            def __call__(self, model: Any, batch: Any) -> Any:
                value = super().__call__(model, batch)
                return dataclasses.replace(value, total=value.total / len(batch[0]) * 4)

        return Mean(loss.elements_per_sample)

    monkeypatch.setattr(assemble, "build_loss", build_loss)
    wrong = trace([short_text], 2, 1)
    assert (wrong.samples, wrong.rates) == (alone.samples, alone.rates)
    with pytest.raises(AssertionError):
        assert_same_run(wrong, alone)
