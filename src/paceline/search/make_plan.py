"""``make_plan``: from what was asked and what is there to decided numbers, the plan that a run is carried out by.

    plan = make_plan(config, RunMachine(device="cuda", ranks=16, node_ranks=8))

A strategy that the config leaves open is chosen before, by ``choose`` in ``search/automatic.py``.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.config import Config, check_ranks, layout_of, with_precision
from paceline.errors import ConfigError
from paceline.plan.plan import Plan, RunMachine


def make_plan(config: Config, machine: RunMachine, *, source: str = "config") -> Plan:
    """Decides all about a run whose strategy is decided. Raises ConfigError with all that these ranks break."""
    problems = check_ranks(config, machine.ranks, machine.node_ranks)
    if problems:
        raise ConfigError(problems, source=source)
    config = with_precision(config, machine.device)
    return Plan(
        name=config.name,
        layout=layout_of(config, machine.ranks, machine.node_ranks),
        device=machine.device,
        finds_microbatch=config.train.microbatch == "auto",
    )


def with_length(plan: Plan, config: Config, *, train_samples: int, eval_samples: int) -> Plan:
    batch, in_epoch = plan.batch.global_batch, train_samples
    if config.data.last_batch == "drop":
        in_epoch -= train_samples % batch
    steps_per_epoch = -(-in_epoch // batch)
    total_steps = config.train.steps
    if total_steps is None:
        total_steps = max(1, round((config.train.epochs_to_run or 1.0) * steps_per_epoch))
    whole, rest = divmod(total_steps, max(steps_per_epoch, 1))
    return replace(
        plan,
        train_samples=train_samples,
        eval_samples=eval_samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_samples=whole * in_epoch + rest * batch,
    )


def decided_config(config: Config, plan: Plan) -> Config:
    """Returns the config with what was decided in the place of what it left open: what a run's folder keeps."""
    return config.with_values("parallel", device=plan.device, ranks=plan.layout.ranks)
