"""``parallel.strategy: auto``: the cheapest way to train a model that fits into memory, and why.

Candidates stand in the order of what they cost; the first that fits is taken:

    strategy       ddp, zero1, zero2     2 P (N-1)/N bytes a step each; more is shared, a little less overlaps
                   hybrid                3 P inside a host, and little between hosts; only where there are several
                   fsdp                  3 P (N-1)/N
    checkpointing  none, matmuls, full   computes again: nothing, all but the matrix products, the whole forward (+ 1/3)
    offload        none, optimizer, + gradients and parameters    the host's memory and its bus, in every step

Recomputation costs time on every rank and offload more still, so that every strategy is tried before the next of them.
Where this machine can be priced, the fastest of those that fit takes the place of the first (``search/automatic.py``).
A margin of the device's memory is kept free: allocators lose some, and estimates are estimates. Models that are split
themselves are chosen among in ``mesh_choice.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import Config, batch_plan
from paceline.errors import ConfigError, Problem
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import MemoryEstimate, Setting, estimate_memory, setting_of
from paceline.units import format_bytes, format_count, format_seconds

MARGIN = 0.1  # of the device's memory
_OFFLOADS = ((), ("optimizer",), ("optimizer", "gradients", "parameters"))
_CHECKPOINTS = ("none", "matmuls", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The machine, as far as memory is concerned: ``device_bytes`` for each rank, ``host_bytes`` for all of a host."""

    device: str  # cpu or cuda
    device_bytes: int
    host_bytes: int
    ranks: int
    node_ranks: int  # ranks on one host


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train, what it would need, and why it was not taken; empty where it was, or was not looked at."""

    strategy: str
    group: int
    checkpoint: str
    offload: tuple[str, ...]
    memory: MemoryEstimate
    microbatch: int = 1
    pipeline: int = 1
    tensor: int = 1
    data: int = 1  # ranks that share the batch
    overhead: float = 0.0  # of a split model: time beside computing, in parts of it, by a rule of thumb
    rejected: str = ""
    seconds: float | None = None  # that a step is predicted to take, where that was asked

    @property
    def mesh(self) -> str:
        """The axes in a few words: ``pipeline 2 x tensor 4 x data 8``, ``data 64``."""
        degrees = {"pipeline": self.pipeline, "tensor": self.tensor}
        return " x ".join([*(f"{name} {size}" for name, size in degrees.items() if size > 1), f"data {self.data}"])

    @property
    def label(self) -> str:
        """The options in a few words: ``fsdp, checkpoint full``."""
        name = f"hybrid in groups of {self.group}" if self.strategy == "hybrid" else self.strategy
        is_split = self.pipeline * self.tensor > 1
        parts = [self.mesh, *([name] if self.data > 1 else [])] if is_split else [name]
        if self.checkpoint != "none":
            parts.append(f"checkpoint {self.checkpoint}")
        if self.offload:
            parts.append("offload " + " and ".join(self.offload))
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, all candidates in order, and the room that they were judged by."""

    chosen: Candidate
    ladder: tuple[Candidate, ...]
    room: Room
    budget_bytes: int
    microbatch: int
    parameters: int
    key: str = "parallel.strategy"  # what was auto
    left_out: tuple[str, ...] = ()  # what cannot be done here, and why
    machine: str = ""  # that seconds were predicted for
    untimed: str = ""  # why none were

    @property
    def tried(self) -> tuple[Candidate, ...]:
        """The candidates up to the one that was taken."""
        return self.ladder[: self.ladder.index(self.chosen) + 1]

    def reason(self) -> str:
        """Says in one paragraph what was chosen and why."""
        need, room = format_bytes(self.chosen.memory.device_bytes), format_bytes(self.room.device_bytes)
        ranks = "1 rank" if self.room.ranks == 1 else f"{self.room.ranks} ranks"
        first = (
            f"{self.key} = auto: {self.chosen.label}, about {need} of {format_bytes(self.budget_bytes)} a rank "
            f"(all but {MARGIN:.0%} of {room}) for {format_count(self.parameters)} parameters on {ranks}, "
            f"microbatch {self.microbatch}"
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
        """Returns the choice as plain data, the whole ladder with it."""
        return {
            "key": self.key,
            "chosen": self.chosen.label,
            "budget_bytes": self.budget_bytes,
            "microbatch": self.microbatch,
            "parameters": self.parameters,
            "ladder": [
                dataclasses.asdict(each) | {"label": each.label, "memory": each.memory.to_json()}
                for each in self.ladder
            ],
            "left_out": list(self.left_out),
            "machine": self.machine,
            "untimed": self.untimed,
        }


def choose_for_config(config: Config, model: ModelFacts, room: Room) -> Choice:
    """Takes the cheapest candidate that fits. What the config says about memory itself is kept as it is.

    A microbatch that is to be found counts as one sample. Raises ConfigError where nothing fits.
    """
    microbatch = 1 if config.train.microbatch == "auto" else batch_plan(config.train, room.ranks).microbatch
    asked = setting_of(config, group=config.parallel.shard_ranks or 1, microbatch=microbatch, device=room.device)
    return choose_strategy(model, asked, room, keep=frozenset(config.memory.model_fields_set))


def choose_strategy(model: ModelFacts, asked: Setting, room: Room, keep: frozenset[str] = frozenset()) -> Choice:
    """Takes the first candidate that fits: those of ``asked`` with another strategy, checkpointing and offload.

    ``keep`` names what stays as asked: ``checkpoint_activations``, ``offload``. A group of more than one rank in
    ``asked`` is that of hybrid sharding. Raises ConfigError where nothing fits, with what would come nearest.
    """
    ladder = [judge(model, setting, room) for setting in data_settings(model, asked, room, keep)]
    return take_first(ladder, model, room)


def take_first(
    ladder: Sequence[Candidate],
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
        chosen=chosen,
        ladder=tuple(ladder),
        room=room,
        budget_bytes=budget_of(room),
        microbatch=chosen.microbatch,
        parameters=model.parameters,
        key=key,
        left_out=left_out,
    )


def budget_of(room: Room) -> int:
    """Returns the bytes that a candidate may take of a rank's device."""
    return round(room.device_bytes * (1 - MARGIN))


def apply_choice(config: Config, choice: Choice) -> Config:
    """Returns the config with what was chosen in the place of ``auto``."""
    chosen = choice.chosen
    parallel = config.parallel.model_copy(
        update={
            "strategy": chosen.strategy,
            "shard_ranks": chosen.group if chosen.strategy == "hybrid" else None,
            "pipeline": chosen.pipeline,
            "tensor": chosen.tensor,
            "sharding_strategy": "manual",
        }
    )
    memory = config.memory.model_copy(
        update={"checkpoint_activations": chosen.checkpoint, "offload": tuple(chosen.offload)}
    )
    return config.model_copy(update={"parallel": parallel, "memory": memory})


def judge(model: ModelFacts, setting: Setting, room: Room, overhead: float = 0.0) -> Candidate:
    """Returns a way to train as a candidate: rejected, with the reason, if there is no room for it."""
    memory, spread = estimate_memory(model, setting), setting.spread
    return Candidate(
        strategy=setting.strategy,
        group=setting.group,
        checkpoint=setting.checkpoint,
        offload=setting.offload,
        memory=memory,
        microbatch=setting.microbatch,
        pipeline=spread.pipeline,
        tensor=spread.tensor,
        data=room.ranks // (spread.pipeline * spread.tensor),
        overhead=overhead,
        rejected=_rejection(memory, budget_of(room), room),
    )


def checkpoints_for(model: ModelFacts, asked: Setting, keep: frozenset[str]) -> tuple[str, ...]:
    """Returns the checkpointing to try, the cheapest first."""
    checkpoints = (asked.checkpoint,) if "checkpoint_activations" in keep else _CHECKPOINTS
    return checkpoints if model.blocks else checkpoints[:1]  # there is nothing to checkpoint block by block


def data_settings(model: ModelFacts, asked: Setting, room: Room, keep: frozenset[str]) -> Iterator[Setting]:
    """Iterates over the ways to train whole models, the cheapest first."""
    checkpoints = checkpoints_for(model, asked, keep)
    offloads = (asked.offload,) if "offload" in keep else _OFFLOADS if room.device == "cuda" else ((),)
    for offload, checkpoint in itertools.product(offloads, checkpoints):
        for strategy, group in _strategies(asked, room):
            if offload and not _can_offload(strategy, offload):
                continue
            if room.ranks == 1 and strategy != "ddp" and not offload:  # with nobody to share with, nothing is saved
                continue
            yield dataclasses.replace(asked, strategy=strategy, group=group, checkpoint=checkpoint, offload=offload)


def _can_offload(strategy: str, offload: tuple[str, ...]) -> bool:
    if strategy in ("zero1", "zero2"):
        return "optimizer" in offload and "parameters" not in offload
    return strategy != "ddp"


def _strategies(asked: Setting, room: Room) -> Iterator[tuple[str, int]]:
    yield "ddp", 1
    yield "zero1", room.ranks
    if room.ranks > 1:
        yield "zero2", room.ranks
        group = asked.group if asked.group > 1 else room.node_ranks
        if 1 < group < room.ranks and room.ranks % group == 0:
            yield "hybrid", group
    yield "fsdp", room.ranks


def _rejection(memory: MemoryEstimate, budget: int, room: Room) -> str:
    if memory.device_bytes > budget:
        return f"needs {format_bytes(memory.device_bytes)}"
    on_host = memory.host * room.node_ranks
    if on_host > room.host_bytes * (1 - MARGIN):
        return f"needs {format_bytes(on_host)} of the host's {format_bytes(room.host_bytes)}"
    return ""


def _keys(candidate: Candidate) -> str:
    """Names the keys of a candidate, as one would set them."""
    keys = {"strategy": candidate.strategy, "pipeline": candidate.pipeline, "tensor": candidate.tensor}
    return ", ".join(f"parallel.{name} = {value}" for name, value in keys.items() if value != 1)


def _nothing_fits(ladder: Sequence[Candidate], model: ModelFacts, room: Room, key: str) -> Problem:
    least = min(ladder, key=lambda candidate: candidate.memory.device_bytes)
    need, microbatch = least.memory, least.microbatch
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
        fix=f"try more ranks, or {smaller}; to try anyway, set {_keys(least)}",
    )
