"""The memory of a run that is planned: of a config whose ranks are decided, of a plan, and of layouts in a search."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.config import Config, layout_of
from paceline.errors import ConfigError, UsageError
from paceline.plan.layout import Layout
from paceline.plan.plan import MemoryEstimate, Plan
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory, estimate_ranks, is_known


def rank_estimates(config: Config, hosts: int = 1) -> tuple[MemoryEstimate, ...]:
    """Estimates what a rank of each pipeline stage holds, for a config whose device and ranks are settled.

    Empty where that is not known beforehand: a microbatch or strategy that is found later, a model of the user's own
    code, a schedule of the user's own, or a model that cannot be cut so.
    """
    parallel, ranks = config.parallel, config.parallel.decided_ranks
    if "auto" in (config.train.microbatch, parallel.strategy):
        return ()
    try:
        layout = layout_of(config, ranks, ranks // hosts)
        model = describe_model(config, parallel.device)
        if model is None or not is_known(model, layout):
            return ()
        return estimate_ranks(model, layout, StateFacts.of(config, parallel.device))
    except (UsageError, ConfigError):
        return ()


def with_memory(plan: Plan, config: Config, model: ModelFacts | None, device: str) -> Plan:
    """Returns the plan with an estimate of what a rank will hold, if the model is known: the rank with the most."""
    if model is None or not is_known(model, plan.layout):
        return plan
    return replace(plan, memory=estimate_memory(model, plan.layout, StateFacts.of(config, device)))


@dataclass(slots=True, kw_only=True)
class EngineMemory:
    """Bytes of a rank by layout, for the model, dtype and optimizer of one config; each layout is estimated once."""

    facts: ModelFacts
    states: StateFacts
    _known: dict[Layout, MemoryEstimate | None] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, device: str = "cuda") -> EngineMemory | None:
        """Returns the estimate of a config; None where only the model's own code could tell."""
        facts = describe_model(config, device)
        return None if facts is None else cls(facts=facts, states=StateFacts.of(config, device))

    def __call__(self, layout: Layout) -> float:
        found = self.estimate(layout)
        return float("inf") if found is None else float(found.device_bytes)

    def estimate(self, layout: Layout) -> MemoryEstimate | None:
        """Returns bytes by category; None where the model cannot be cut so."""
        flight = min(layout.accumulate, 2 * layout.pipeline * layout.chunks)  # more are never in flight
        layout = replace(layout, accumulate=flight)
        if layout not in self._known:
            try:
                self._known[layout] = estimate_memory(self.facts, layout, self.states)
            except UsageError:
                self._known[layout] = None
        return self._known[layout]
