"""What routers of experts do, as records: how often each expert was chosen, over all ranks with a part of the batch.

Routers count on their device (``models/balance.py``). Every so many steps the ranks add up what they counted since, in
one all-reduce of (layers, experts + 3) numbers; the sum is copied to the host behind it, and read a step or more later,
when the device has come so far. No step waits for it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple, cast

import torch

from paceline.clock import Mark, seconds_between
from paceline.engines.engine import Engine
from paceline.health.experts import WINDOWS, judge_experts
from paceline.models.balance import take_loads
from paceline.models.experts import Router
from paceline.records.records import EventRecord, ExpertsRecord, Record
from paceline.train.step import StepResult


class _Taken(NamedTuple):
    step: int
    steps: int
    layers: tuple[str, ...]
    sums: torch.Tensor  # (layers, experts + 3): choices; dropped, entropy, auxiliary
    end: Mark | float


class LoadsHook:
    """Writes records of the routers of an engine's model, and tells of what is wrong with them once."""

    def __init__(
        self, engine: Engine, every: int, mark: Callable[[], Mark | float], write: Callable[[Record], None]
    ) -> None:
        self._engine, self._every, self._mark, self._write_record = engine, every, mark, write
        self._steps = 0  # since counts were taken
        self._taken: deque[_Taken] = deque()
        self._seen: defaultdict[str, deque[ExpertsRecord]] = defaultdict(lambda: deque(maxlen=WINDOWS))
        self._told: set[tuple[str, str]] = set()

    def __call__(self, _: object, result: StepResult) -> None:
        self.after(result.step, is_last=result.is_last)

    def after(self, step: int, *, is_last: bool) -> None:
        """Ends a step. All ranks call it."""
        self._steps += 1
        if step % self._every == 0 or is_last:
            self._take(step)
        while self._taken and (is_last or isinstance(end := self._taken[0].end, float) or end.is_past()):
            self._write(self._taken.popleft())

    def _take(self, step: int) -> None:
        engine = self._engine
        loads = take_loads(engine.module)
        numbers = [(each.dropped.sum(), each.entropy, each.auxiliary) for each in loads.values()]
        rows = zip((each.choices.double() for each in loads.values()), numbers, strict=True)
        sums = torch.stack([torch.cat((choices, torch.stack([n.double() for n in more]))) for choices, more in rows])
        engine.gradient_comm.all_reduce(sums).wait()
        if engine.gradient_comm.rank == 0 and engine.groups.tensor.rank == 0:  # others have the same
            layers = tuple(name.replace("_orig_mod.", "") for name in loads)
            self._taken.append(_Taken(step, self._steps, layers, sums.to("cpu", non_blocking=True), self._mark()))
        self._steps = 0

    def _write(self, taken: _Taken) -> None:
        seconds_between(taken.end, taken.end)  # of the last step: waits for the device
        active, ranks = cast("Router", self._engine.routers[0]).active, self._engine.groups.expert.size
        for layer, (*counts, dropped, entropy, auxiliary) in zip(taken.layers, taken.sums.tolist(), strict=True):
            tokens = round(sum(counts) / active)
            record = ExpertsRecord(
                step=taken.step,
                layer=layer,
                steps=taken.steps,
                tokens=tokens,
                choices=tuple(map(round, counts)),
                dropped=round(dropped),
                entropy=entropy / max(1, tokens) / math.log(max(2, len(counts))),
                auxiliary=auxiliary / max(1, tokens),
                ranks=ranks,
                time=time.time(),
            )
            self._write_record(record)
            self._seen[layer].append(record)
        for found in judge_experts([list(own) for own in self._seen.values()]):
            if (found.kind, found.layer) not in self._told:
                self._told.add((found.kind, found.layer))
                told = EventRecord(name="experts", step=taken.step, detail=asdict(found), time=time.time())
                self._write_record(told)
