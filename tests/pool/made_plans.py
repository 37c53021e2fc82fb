"""Plans of a config on a number of ranks, with the length that follows from so many samples."""

from __future__ import annotations

from paceline.config import Config
from paceline.plan.plan import Plan, RunMachine
from paceline.search.request import make_plan, with_length


def plan_of(
    config: Config, *, ranks: int, train_samples: int, eval_samples: int = 0, node_ranks: int | None = None
) -> Plan:
    plan = make_plan(config, RunMachine(device="cpu", ranks=ranks, node_ranks=node_ranks))
    return with_length(plan, config, train_samples=train_samples, eval_samples=eval_samples)
