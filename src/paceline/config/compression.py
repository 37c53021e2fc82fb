"""The rules that keys of ``comm.compression`` obey."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.config.schema import Config

_READERS = {"ratio": ("topk", "randomk"), "factor_rank": ("powersgd",), "threshold": ("threshold",)}


def compression_has_replicas(config: Config) -> list[Problem]:
    """Only replicas average the same gradients."""
    policy, strategy = config.comm.compression.policy, config.parallel.strategy
    if policy == "none" or strategy in ("ddp", "hybrid"):
        return []
    why = (
        "auto may choose a strategy that has none"
        if strategy == "auto"
        else f"in {strategy} each rank gets a slice of its own, and what the others did not send of it is nobody's"
    )
    return [
        Problem(
            what=f"comm.compression.policy = {policy} with parallel.strategy = {strategy}",
            rule=f"compression works where replicas average the same gradients: {why}",
            fix="set parallel.strategy = ddp or hybrid, or comm.compression.policy = none",
        )
    ]


def compression_keys_apply(config: Config) -> list[Problem]:
    """No key of the compression is changed that its policy does not read."""
    given = config.comm.compression
    defaults = type(given)()
    names = [name for name in type(given).model_fields if name != "policy"]
    policy = given.policy
    unread = [name for name in names if policy == "none" or policy not in _READERS.get(name, (policy,))]
    return [
        Problem(
            what=f"comm.compression.{name} = {getattr(given, name)} has no effect with "
            f"comm.compression.policy = {given.policy}",
            rule=f"it belongs to {' and '.join(_READERS.get(name, ('a policy that compresses',)))}",
            fix=f"remove comm.compression.{name}, or set comm.compression.policy = {_READERS.get(name, ('topk',))[0]}",
        )
        for name in unread
        if getattr(given, name) != getattr(defaults, name)
    ]


def residuals_have_one_unit(config: Config) -> list[Problem]:
    """What one step did not send must be in the unit of the next."""
    given = config.comm.compression
    if given.policy == "none" or not given.error_feedback or config.train.precision != "fp16":
        return []
    return [
        Problem(
            what=f"comm.compression.policy = {given.policy} with train.precision = fp16",
            rule="fp16 scales the loss by a factor that changes, and what a step did not send keeps its own factor",
            fix="set train.precision = bf16, or comm.compression.error_feedback = false",
        )
    ]
