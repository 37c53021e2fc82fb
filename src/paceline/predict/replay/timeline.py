"""A small deterministic event core: streams that run their work in order, and work that waits for other work.

A piece of work starts when its stream has finished what was added before and all it waits for is done. So overlap,
prefetch and bubbles come out of the order in which work is issued, as on a device's streams.

    timeline = Timeline()
    gathered = timeline.add("link", 2.0, "gather 0")
    computed = timeline.add("compute", 3.0, "forward 0", after=(gathered,))
    timeline.end                                            # 5.0

A pipeline is such a timeline with one stream a rank; ``pipeline_seconds`` is its closed form: for stage costs c_i
(forward and backward of one microbatch), m microbatches and v chunks, (m - 1) max c + sum c / v + (max c)(1 - 1/v).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work that was done: on which stream, from when to when."""

    stream: str
    name: str
    start: float
    end: float


@dataclass(slots=True)
class Timeline:
    """Streams and what they did."""

    spans: list[Span] = field(default_factory=list)
    _free: dict[str, float] = field(default_factory=dict)

    def add(self, stream: str, seconds: float, name: str = "", after: Iterable[Span] = ()) -> Span:
        """Puts work at the end of a stream; it waits for all of ``after``. Returns it with its times."""
        start = max([self._free.get(stream, 0.0), *(other.end for other in after)])
        span = Span(stream, name, start, start + seconds)
        self._free[stream] = span.end
        self.spans.append(span)
        return span

    @property
    def end(self) -> float:
        """When the last work is done."""
        return max(self._free.values(), default=0.0)

    def busy(self, stream: str) -> float:
        """Returns how long a stream works."""
        return sum(span.end - span.start for span in self.spans if span.stream == stream)

    def idle(self, stream: str) -> float:
        """Returns how long a stream stands still before everything is done."""
        return self.end - self.busy(stream)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One microbatch on one rank of a pipeline: over all its chunks."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def pipeline_seconds(stages: Sequence[StageSeconds], microbatches: int, chunks: int = 1, message: float = 0.0) -> float:
    """Returns how long 1F1B (interleaved where chunks > 1) takes, by the closed form.

    ``message`` is what a rank waits for a neighbour's tensor; it is paid on the way in and out, once for each chunk.
    """
    slowest = max(stage.both for stage in stages)
    whole = sum(stage.both for stage in stages)
    ranks = len(stages)
    fill = (whole - slowest) / chunks
    return microbatches * slowest + fill + 2 * (ranks - 1) * message


def walk_pipeline(stages: Sequence[StageSeconds], microbatches: int, message: float = 0.0) -> Timeline:
    """Runs 1F1B on the event core: the reference for the closed form, and what a trace shows."""
    if microbatches < 1 or not stages:
        raise UsageError(f"{len(stages)} stages, {microbatches} microbatches: a pipeline has one of each at least")
    ranks = len(stages)
    orders = [_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
    timeline, done = Timeline(), dict[tuple[str, int, int], Span]()
    places = [0] * ranks
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for rank in range(ranks):
            while places[rank] < len(orders[rank]) and (
                span := _next(timeline, done, stages, rank, orders[rank][places[rank]], message)
            ):
                kind, number = orders[rank][places[rank]]
                done[kind, rank, number] = span
                places[rank] += 1
        assert places != before, "a schedule of our own cannot deadlock"
    return timeline


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    warm = min(ranks - rank, microbatches)
    order = [("F", number) for number in range(warm)]
    for number in range(microbatches):
        order.append(("B", number))
        if number + warm < microbatches:
            order.append(("F", number + warm))
    return order


def _next(
    timeline: Timeline,
    done: dict[tuple[str, int, int], Span],
    stages: Sequence[StageSeconds],
    rank: int,
    action: tuple[str, int],
    message: float,
) -> Span | None:
    """Adds a rank's next action where what it needs is there."""
    kind, number = action
    neighbour = rank - 1 if kind == "F" else rank + 1
    needs = [] if neighbour in (-1, len(stages)) else [done.get((kind, neighbour, number))]
    if kind == "B":
        needs.append(done.get(("F", rank, number)))
    if None in needs:
        return None
    arrived = [
        Span("", "", 0.0, span.end + (message if place == 0 and neighbour not in (-1, len(stages)) else 0.0))
        for place, span in enumerate(needs)
        if span
    ]
    seconds = stages[rank].forward if kind == "F" else stages[rank].backward
    return timeline.add(f"rank {rank}", seconds, f"{kind}{number}", after=arrived)
