"""What a rank of a candidate needs, by the estimate that this package's engines are checked against (``estimate/``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.config import Config
from paceline.errors import UsageError
from paceline.predict.formulas.tuning import DEFAULT_BUCKET_MB
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import MemoryEstimate, Setting, estimate_memory, setting_of
from paceline.predict.memory.parts import Spread, stage_bounds
from paceline.search.candidates import CHECKPOINTS, Candidate
from paceline.units import MIB


@dataclass(slots=True, kw_only=True)
class EngineMemory:
    """Bytes of a candidate's rank, for the model, precision and optimizer of one config."""

    facts: ModelFacts
    base: Setting
    _bounds: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    _known: dict[tuple[object, ...], MemoryEstimate | None] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, device: str = "cuda") -> EngineMemory | None:
        """Returns the estimate of a config; None where only the model's own code could tell."""
        facts = describe_model(config, device)
        return None if facts is None else cls.of_facts(facts, config, device)

    @classmethod
    def of_facts(cls, facts: ModelFacts, config: Config, device: str = "cuda") -> EngineMemory:
        """Returns the estimate of a model that was described, or measured, for a config."""
        base = setting_of(config, group=1, microbatch=1, device=device)
        return cls(facts=facts, base=replace(base, offload=(), compression="none"))

    def __call__(self, candidate: Candidate) -> float:
        found = self.estimate(candidate)
        return float("inf") if found is None else float(found.device_bytes)

    def estimate(self, candidate: Candidate) -> MemoryEstimate | None:
        """Returns bytes by category; None where the model cannot be cut so."""
        layout = candidate.layout
        flight = min(candidate.accumulate, 2 * layout.pipeline * layout.chunks)  # more are never in flight
        key = (*candidate.knobs.values(), candidate.shard, flight)
        if key not in self._known:
            self._known[key] = self._estimate(candidate, flight)
        return self._known[key]

    def _estimate(self, candidate: Candidate, microbatches: int) -> MemoryEstimate | None:
        layout, tuning = candidate.layout, candidate.tuning
        try:
            spread = Spread(
                pipeline=layout.pipeline,
                tensor=layout.tensor,
                is_sequence=layout.sequence_parallel,
                schedule=candidate.schedule or "1f1b",
                chunks=layout.chunks,
                microbatches=microbatches,
                bounds=self._bounds_of(layout.pipeline * layout.chunks) if layout.pipeline > 1 else None,
            )
            setting = replace(
                self.base,
                strategy=candidate.strategy,
                group=candidate.shard,
                microbatch=candidate.microbatch,
                checkpoint=CHECKPOINTS[candidate.recompute],
                offload=tuning.offload,
                reshard=tuning.reshard,
                bucket_bytes=int((tuning.bucket_mb or DEFAULT_BUCKET_MB) * MIB),
                precision=candidate.precision or self.base.precision,
                spread=spread,
            )
            return estimate_memory(self.facts, setting)
        except UsageError:
            return None  # it cannot be cut so

    def _bounds_of(self, stages: int) -> tuple[int, ...] | None:
        if stages not in self._bounds:
            self._bounds[stages] = stage_bounds(self.facts, stages)
        return self._bounds[stages]
