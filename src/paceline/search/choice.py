"""What a choice is: candidates that are judged by memory, the one that was taken, and why.

A margin of the device's memory is kept free: allocators lose some, and estimates are estimates. The candidates and
their order are in ``ladder.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import Config, with_precision
from paceline.errors import ConfigError, Problem
from paceline.plan.describe import layout_label
from paceline.plan.layout import Layout
from paceline.plan.plan import MemoryEstimate
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.units import format_bytes, format_count, format_seconds

MARGIN = 0.1  # of the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The machine, as far as memory is concerned: ``device_bytes`` for each rank, ``host_bytes`` for all of a host."""

    device: str  # cpu or cuda
    device_bytes: int
    host_bytes: int
    ranks: int
    node_ranks: int  # ranks on one host


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A layout, what it would need, and why it was not taken; empty where it was, or was not looked at."""

    layout: Layout
    memory: MemoryEstimate
    overhead: float = 0.0  # of a split model: time beside computing, in parts of it, by a rule of thumb
    rejected: str = ""
    seconds: float | None = None  # that a step is predicted to take, where that was asked

    @property
    def label(self) -> str:
        """The layout in a few words: ``fsdp, checkpoint full``."""
        return layout_label(self.layout)

    def to_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            **{name: getattr(layout, name) for name in ("strategy", "microbatch", "pipeline", "tensor", "data")},
            **{name: getattr(self, name) for name in ("overhead", "rejected", "seconds", "label")},
            "group": layout.shards,
            "checkpoint": layout.checkpoint_activations,
            "offload": layout.offload.parts,
            "memory": self.memory.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, all candidates in order, and the room that they were judged by."""

    chosen: Judged
    ladder: tuple[Judged, ...]
    room: Room
    parameters: int
    key: str = "parallel.strategy"  # what was auto
    left_out: tuple[str, ...] = ()  # what cannot be done here, and why
    machine: str = ""  # that seconds were predicted for
    untimed: str = ""  # why none were

    @property
    def tried(self) -> tuple[Judged, ...]:
        """The candidates up to the one that was taken."""
        return self.ladder[: self.ladder.index(self.chosen) + 1]

    @property
    def budget_bytes(self) -> int:
        return budget_of(self.room)

    def reason(self) -> str:
        """Says in one paragraph what was chosen and why."""
        need, room = format_bytes(self.chosen.memory.device_bytes), format_bytes(self.room.device_bytes)
        ranks = "1 rank" if self.room.ranks == 1 else f"{self.room.ranks} ranks"
        first = (
            f"{self.key} = auto: {self.chosen.label}, about {need} of {format_bytes(self.budget_bytes)} a rank "
            f"(all but {MARGIN:.0%} of {room}) for {format_count(self.parameters)} parameters on {ranks}, "
            f"microbatch {self.chosen.layout.microbatch}"
        )
        rejected = [candidate for candidate in self.tried if candidate.rejected]
        impossible = f"; impossible: {'; '.join(self.left_out[:2])}" if self.left_out else ""
        if not rejected:
            told = "it is the cheapest, and fits" if self.chosen.seconds is None else "it fits"
            return f"{first}; {told}{impossible}{self._timing()}"
        reasons = "; ".join(f"{each.label} {each.rejected}" for each in rejected[:4])
        more = f"; and {len(rejected) - 4} more" if len(rejected) > 4 else ""
        return f"{first}; not {reasons}{more}{impossible}{self._timing()}"

    def _timing(self) -> str:
        """Says what the candidates that fit are predicted to take, or why nobody predicted it."""
        if self.chosen.seconds is None:
            return f"; taken in order and not by time: {self.untimed}" if self.untimed else ""
        others = sorted(
            (each.seconds, place, each.label)
            for place, each in enumerate(self.ladder)
            if each.seconds is not None and each is not self.chosen
        )
        told = ", ".join(f"{label} {format_seconds(seconds)}" for seconds, _, label in others[:3])
        return f"; predicted {format_seconds(self.chosen.seconds)} a step on {self.machine}" + (
            f" ({told})" if told else ""
        )

    def to_json(self) -> dict[str, Any]:
        plain = ("key", "budget_bytes", "parameters", "machine", "untimed")
        return {
            **{name: getattr(self, name) for name in plain},
            "chosen": self.chosen.label,
            "microbatch": self.chosen.layout.microbatch,
            "ladder": [each.to_json() for each in self.ladder],
            "left_out": list(self.left_out),
        }


def take_first(
    ladder: Sequence[Judged],
    model: ModelFacts,
    room: Room,
    *,
    key: str = "parallel.strategy",
    left_out: tuple[str, ...] = (),
) -> Choice:
    """Takes the first candidate that fits, of at least one. Raises ConfigError where none does."""
    chosen = next((candidate for candidate in ladder if not candidate.rejected), None)
    if chosen is None:
        raise ConfigError([_nothing_fits(ladder, model, room, key)], source="config")
    return Choice(
        chosen=chosen, ladder=tuple(ladder), room=room, parameters=model.parameters, key=key, left_out=left_out
    )


def budget_of(room: Room) -> int:
    """Returns the bytes that a candidate may take of a rank's device."""
    return round(room.device_bytes * (1 - MARGIN))


def apply_choice(config: Config, choice: Choice) -> Config:
    """Returns the config with what was chosen in the place of ``auto``, and the precision of the device."""
    layout = choice.chosen.layout
    changed = with_precision(config, choice.room.device).with_values(
        "memory", checkpoint_activations=layout.checkpoint_activations, offload=layout.offload.parts
    )
    return changed.with_values(
        "parallel",
        strategy=layout.strategy,
        shard_ranks=layout.shards if layout.strategy == "hybrid" else None,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        sharding_strategy="manual",
    )


def judge(model: ModelFacts, layout: Layout, room: Room, states: StateFacts, overhead: float = 0.0) -> Judged:
    """Estimates what a layout needs; it is rejected, with the reason, if there is no room for it."""
    memory = estimate_memory(model, layout, states)
    return Judged(layout=layout, memory=memory, overhead=overhead, rejected=_rejection(memory, budget_of(room), room))


def _rejection(memory: MemoryEstimate, budget: int, room: Room) -> str:
    if memory.device_bytes > budget:
        return f"needs {format_bytes(memory.device_bytes)}"
    on_host = memory.host * room.node_ranks
    if on_host > room.host_bytes * (1 - MARGIN):
        return f"needs {format_bytes(on_host)} of the host's {format_bytes(room.host_bytes)}"
    return ""


def _keys(layout: Layout) -> str:
    """Names the keys of a layout, as one would set them."""
    keys = {"strategy": layout.strategy, "pipeline": layout.pipeline, "tensor": layout.tensor}
    return ", ".join(f"parallel.{name} = {value}" for name, value in keys.items() if value != 1)


def _nothing_fits(ladder: Sequence[Judged], model: ModelFacts, room: Room, key: str) -> Problem:
    least = min(ladder, key=lambda candidate: candidate.memory.device_bytes)
    need, microbatch = least.memory, least.layout.microbatch
    parts = ", ".join(
        f"{name} {format_bytes(value)}"
        for name, value in sorted(dataclasses.asdict(need).items(), key=lambda item: -item[1])
        if value and name != "host"
    )
    smaller = f"train.microbatch = {microbatch // 2} or auto" if microbatch > 1 else "a smaller model or context"
    host = (
        "; the host's memory is too small for more offload" if any("host" in each.rejected for each in ladder) else ""
    )
    return Problem(
        what=f"{key} = auto: nothing fits into {format_bytes(budget_of(room))} of memory a rank; {least.label} "
        f"comes nearest with {format_bytes(need.device_bytes)} ({parts}){host}",
        rule=f"{format_count(model.parameters)} parameters, {room.ranks} ranks, and {MARGIN:.0%} of memory kept free",
        fix=f"try more ranks, or {smaller}; to try anyway, set {_keys(least.layout)}",
    )
