"""A prediction: step time and memory of a workload on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.devices import Cluster
from paceline.plan.model_shape import ModelShape, SampleModel
from paceline.plan.workload import Workload
from paceline.predict.formulas.constants import Constants, ConstantSets, between, constants_for, fitted_constants
from paceline.predict.formulas.domain import outside_of
from paceline.predict.formulas.samples import sample_step
from paceline.predict.formulas.step import StepParts, transformer_step
from paceline.predict.memory.footprint import Footprint, footprint

# Errors that nine of ten rows of the split dev stay below, inside the calibrated domain (without the table whose very
# blocks were measured) and outside.
FITTED_P90 = 0.15
COMPOSED_P90 = 0.29


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step takes and needs. ``outside``: why it lies outside the calibrated domain (calibrated_domain.yaml)."""

    workload: Workload
    step: StepParts
    memory: Footprint
    fits: bool
    outside: tuple[str, ...] = ()

    @property
    def fitted(self) -> bool:
        """Whether it lies inside that domain, with constants fitted for this generation and framework."""
        return not self.outside

    @property
    def seconds(self) -> float:
        return self.step.total

    @property
    def band(self) -> tuple[float, float]:
        """Seconds between which nine of ten published runs of this kind would be: see docs/prediction.md."""
        error = FITTED_P90 if self.fitted else COMPOSED_P90
        return self.seconds * (1 - error), self.seconds * (1 + error)

    @property
    def samples_per_s(self) -> float:
        return self.workload.micro_batch * self.workload.microbatches * self.workload.layout.data / self.seconds


def predict(workload: Workload, cluster: Cluster, sets: ConstantSets | None = None) -> Prediction:
    """Predicts a step of a workload on a cluster."""
    sets = fitted_constants() if sets is None else sets
    constants, fitted = _constants(workload, cluster, sets)
    price = sample_step if isinstance(workload.model, SampleModel) else transformer_step
    memory = footprint(workload)
    return Prediction(
        workload=workload,
        step=price(workload, cluster, constants),
        memory=memory,
        fits=memory.total <= cluster.device.memory_bytes,
        outside=outside_of(workload, cluster, is_fitted=fitted),
    )


def _constants(workload: Workload, cluster: Cluster, sets: ConstantSets) -> tuple[Constants, bool]:
    """Returns the set for a workload. Tensor-parallel layers of torch break a compiled block into pieces."""
    generation, framework = cluster.device.generation, workload.run.framework
    if framework == "compiled" and workload.layout.tensor > 1:
        return between(sets, generation, "compiled", "eager"), (generation, "compiled") in sets
    return constants_for(sets, generation, framework)


def model_flops(workload: Workload) -> float:
    """Of one sequence (or sample), forward and backward, attention in full."""
    model, length = workload.model, workload.run.seq_len
    if isinstance(model, SampleModel):
        return 3 * model.flops
    return transformer_flops(model, length)


def transformer_flops(model: ModelShape, length: int) -> float:
    """Of one sequence of a transformer, forward and backward, attention in full."""
    return length * (6 * model.active_matmul_params + 12 * model.layers * model.score_width * length)
