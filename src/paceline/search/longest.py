"""The longest sequence that fits, rung by rung, and what each rung costs: ``paceline predict CONFIG --longest``.

A rung is what a rank does for memory (``automatic.py``), the cheapest first; states on the host come last, with those
of the others that reach farthest. With a rung, one sample of so many tokens at a time (a multiple of 1,024) leaves the
usual margin of memory, by the formula of ``predict/memory/memory.py``. Its price is what a step of that length takes
longer than one without any rung, by the formulas of a step.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from paceline.cluster.devices import Cluster
from paceline.config import Config, layout_of, with_precision
from paceline.config.sections import GPTModelConfig
from paceline.errors import UsageError
from paceline.plan.layout import Layout, Offload
from paceline.plan.plan import MARGIN, RunMachine
from paceline.plan.workload import Value, config_values, layout_label
from paceline.predict.formulas.engine_costs import price
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.search.automatic import RUNGS, climb, judge
from paceline.search.candidates import strategies_for
from paceline.search.request import task_of
from paceline.units import format_bytes, format_seconds

STEP = 1024  # tokens
_MOST = 2**26 // STEP
_KEYS = ("parallel.strategy", "memory.checkpoint_activations", "memory.mlp_tiles", "memory.offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRung:
    """One rung: the tokens of a sample up to which it fits, and a step of that length; 0: not even the shortest."""

    label: str
    keys: dict[str, Value]
    tokens: int = 0
    memory_bytes: float = 0.0
    host_bytes: float = 0.0
    seconds: float = 0.0
    price: float = 0.0  # 0.25: a step takes a quarter longer than without any rung


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestLadder:
    """All rungs, the cheapest first."""

    name: str
    cluster: str
    ranks: int
    budget_bytes: float
    asked: int
    rungs: tuple[LongestRung, ...]

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("name", "cluster", "ranks", "budget_bytes", "asked")}
        rows = [{name: getattr(each, name) for name in LongestRung.__slots__} for each in self.rungs]
        return own | {"rungs": rows}

    def to_text(self) -> str:
        room = f"{format_bytes(self.budget_bytes)} of a rank, all but {MARGIN:.0%} of its memory"
        lines = [f"{self.name} on {self.cluster}: the longest sequence that fits into {room}", ""]
        width = max(len(each.label) for each in self.rungs)
        lines.append(f"{'rung':<{width}} {'tokens':>10} {'memory':>10} {'on host':>10} {'step':>13} {'longer by':>10}")
        for each in self.rungs:
            told = f"{each.label:<{width}} {each.tokens:>10,} "
            host = format_bytes(each.host_bytes) if each.host_bytes else ""
            if each.tokens:
                told += f"{format_bytes(each.memory_bytes):>10} {host:>10} {format_seconds(each.seconds):>13} "
                told += f"{each.price:>10.1%}"
            lines.append(told.rstrip())
        first = next((each.label for each in self.rungs if each.tokens >= self.asked), None)
        answer = f"need: {first}" if first else "fit with none of these: take more ranks, or a smaller model"
        if not all(each.tokens for each in self.rungs):
            lines += ["", f"0: not even {STEP:,} tokens fit, in the memory of a rank or in that of its host."]
        return "\n".join([*lines, "", f"The {self.asked:,} tokens of this config {answer}."])


def longest(config: Config, cluster: Cluster, ranks: int, *, host_bytes: float = float("inf")) -> LongestLadder:
    """Climbs the rungs on a cluster; ``host_bytes`` are those of a node. Raises UsageError for what has no tokens."""
    device = "cpu" if cluster.device.is_cpu else "cuda"
    config = with_precision(config.with_values("parallel", device=device, ranks=ranks), device)
    tokens_of = getattr(config.data, "context", None) or getattr(config.model, "context", None)
    if not isinstance(config.model, GPTModelConfig) or not hasattr(config.data, "context") or not tokens_of:
        raise UsageError(
            f"--longest with model.kind = {config.model.kind} and data.kind = {config.data.kind}\n"
            "  it is for rows of tokens, of which a formula knows what they take\n"
            "  take model.kind = gpt and data with a context, or predict one length after another"
        )
    where = RunMachine(
        device=device,
        ranks=ranks,
        node_ranks=min(ranks, cluster.node.devices),
        device_bytes=int(cluster.device.memory_bytes),
        host_bytes=int(min(host_bytes, 2**60)),
    )
    return LongestLadder(
        name=config.name,
        cluster=cluster.name,
        ranks=ranks,
        budget_bytes=where.budget_bytes,
        asked=tokens_of,
        rungs=tuple(_Climber(config, cluster, where).rungs()),
    )


class _Climber:
    def __init__(self, config: Config, cluster: Cluster, where: RunMachine) -> None:
        self._config, self._cluster, self._where = config, cluster, where
        self._states = StateFacts.of(config, where.device)

    def rungs(self) -> Iterator[LongestRung]:
        """Iterates over the rungs, each in the strategy in which it reaches farthest; states on the host with any."""
        layouts = self._layouts()
        for _, group in itertools.groupby(layouts, _step_of):
            tokens, layout = max(((self._tokens(each), each) for each in group), key=lambda each: each[0])
            is_alone = self._where.ranks == 1
            yield self._told(
                tokens, layout, layouts[0] if is_alone else RUNGS[0].on(replace(layout, offload=Offload()))
            )

    def _layouts(self) -> list[Layout]:
        config, where = self._config, self._where
        asked = layout_of(config, where.ranks, where.local_ranks)
        asked = replace(asked, microbatch=1, accumulate=asked.microbatch * asked.accumulate)
        strategies = [(asked.strategy, asked.shards)]
        is_given = "strategy" in config.parallel.model_fields_set and config.parallel.strategy != "auto"
        if not asked.is_split and (where.ranks == 1 or not is_given):
            strategies = list(strategies_for(where.ranks, where.local_ranks, is_split=False))
        keep = frozenset(config.memory.model_fields_set)
        return [each.layout for each in climb(self._facts(STEP), asked, where, self._states, keep, strategies)]

    def _tokens(self, layout: Layout) -> int:
        def is_too_long(count: int) -> bool:
            return bool(judge(self._facts(count * STEP), layout, self._where, self._states).rejected)

        return STEP * (bisect.bisect_left(range(1, _MOST + 1), True, key=is_too_long))

    def _told(self, tokens: int, layout: Layout, without: Layout) -> LongestRung:
        keys = {key: value for key, value in config_values(layout).items() if key in _KEYS}
        label = layout_label(layout)
        if self._where.ranks == 1:  # which shares nothing
            label = label.removeprefix("ddp, ").replace("ddp", "nothing")
        if not tokens:
            return LongestRung(label=label, keys=keys)
        need = estimate_memory(self._facts(tokens), layout, self._states)
        task = task_of(self._of_length(tokens), self._where.ranks)
        seconds, plain = (price(task.workload(each), self._cluster).seconds for each in (layout, without))
        return LongestRung(
            label=label,
            keys=keys,
            tokens=tokens,
            memory_bytes=need.device_bytes,
            host_bytes=need.host * self._where.local_ranks,
            seconds=seconds,
            price=seconds / plain - 1,
        )

    @cache  # noqa: B019
    def _facts(self, tokens: int) -> ModelFacts:
        facts = describe_model(self._of_length(tokens), self._where.device)
        assert facts is not None
        return facts

    def _of_length(self, tokens: int) -> Config:
        return self._config.with_values("data", context=tokens).with_values("model", context=tokens)


def _step_of(layout: Layout) -> tuple[object, ...]:
    """Returns what makes a rung of its own."""
    if layout.offload.moves_states:
        return (replace(layout.offload, activations=False),)
    return layout.checkpoint_activations, layout.mlp_tiles, layout.offload.activations
