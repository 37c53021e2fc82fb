"""What we will do: a config resolved for a number of ranks and a data set, as frozen data that serialises to JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.config import BatchPlan, Config, config_batch, data_ranks, shard_group
from paceline.mesh import Mesh
from paceline.plan.memory import MemoryEstimate


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
    memory: MemoryEstimate | None = None  # of one rank; None where nobody has described the model

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        values = dataclasses.asdict(self)
        values["mesh"] = dict(self.mesh.axes)
        values["memory"] = None if self.memory is None else self.memory.to_json()
        return values


def make_plan(
    config: Config, *, ranks: int, train_samples: int, eval_samples: int, node_ranks: int | None = None
) -> Plan:
    """Resolves a config, whose strategy is decided. Raises ConfigError when its batch does not fit the ranks.

    ``node_ranks`` is how many ranks share a host; None: all.
    """
    batch = config_batch(config, ranks)
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
        mesh=plan_mesh(config, ranks, node_ranks),
        batch=batch,
        train_samples=train_samples,
        eval_samples=eval_samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_samples=whole * samples_per_epoch + rest * batch.global_batch,
    )


def with_microbatch(plan: Plan, microbatch: int) -> Plan:
    """Returns the plan with the same global batch in microbatches of this size, which cuts it evenly."""
    accumulate = plan.batch.samples_per_rank // microbatch
    batch = dataclasses.replace(plan.batch, microbatch=microbatch, accumulate=accumulate)
    return dataclasses.replace(plan, batch=batch)


def plan_mesh(config: Config, ranks: int, node_ranks: int | None = None) -> Mesh:
    """Returns the axes ``pipeline``, ``replicate``, ``shard`` and ``tensor``, without those of size 1 but replicas.

    Tensor ranks, which talk the most, are neighbours, then those that share a copy of the model; stages, which talk
    least, are farthest apart.
    """
    parallel = config.parallel
    group = shard_group(parallel, ranks, node_ranks)
    data = data_ranks(parallel, ranks)
    sizes = {
        "pipeline": parallel.pipeline,
        "replicate": data // group,
        "shard": group,
        "tensor": parallel.tensor,
    }
    return Mesh.of(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "replicate"})
