"""What we will do: a config resolved for a number of ranks and a data set, as frozen data that serialises to JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.config import BatchPlan, Config, batch_plan
from paceline.mesh import Mesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions of a run: who computes what, in how many steps of which batch."""

    name: str
    strategy: str
    mesh: Mesh
    batch: BatchPlan
    train_samples: int
    eval_samples: int
    steps_per_epoch: int
    total_steps: int
    total_samples: int

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        values = dataclasses.asdict(self)
        values["mesh"] = dict(self.mesh.axes)
        return values


def make_plan(config: Config, *, ranks: int, train_samples: int, eval_samples: int) -> Plan:
    """Resolves a config. Raises ConfigError when its batch does not fit the number of ranks."""
    batch = batch_plan(config.train, ranks)
    samples_per_epoch = train_samples
    if config.data.last_batch == "drop":
        samples_per_epoch -= train_samples % batch.global_batch
    steps_per_epoch = -(-samples_per_epoch // batch.global_batch)
    total_steps = config.train.steps
    if total_steps is None:
        total_steps = max(1, round((config.train.epochs_to_run or 1.0) * steps_per_epoch))
    whole, rest = divmod(total_steps, max(steps_per_epoch, 1))
    return Plan(
        name=config.name,
        strategy=config.parallel.strategy,
        mesh=Mesh.of(replicate=ranks),
        batch=batch,
        train_samples=train_samples,
        eval_samples=eval_samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_samples=whole * samples_per_epoch + rest * batch.global_batch,
    )
