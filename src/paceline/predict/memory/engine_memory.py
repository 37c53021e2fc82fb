"""What a rank of a layout needs, by the estimate that this package's engines are checked against (``memory.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.config import Config
from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline.plan.plan import MemoryEstimate
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory


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
            self._known[layout] = self._estimate(layout)
        return self._known[layout]

    def _estimate(self, layout: Layout) -> MemoryEstimate | None:
        try:
            return estimate_memory(self.facts, layout, self.states)
        except UsageError:
            return None  # it cannot be cut so
