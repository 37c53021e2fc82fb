"""What is done when something goes wrong: the section ``recovery`` of a config.

A run is started again only while it gets further, and never for an error that came twice at the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from paceline.config.section import Count, NotNegative, Positive, Section
from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.config.schema import Config

OnNan: TypeAlias = Literal["skip", "roll_back", "lower_rate", "stop"]
OnSpike: TypeAlias = Literal["ignore", "note", "roll_back", "lower_rate", "stop"]
Restarts: TypeAlias = Annotated[int, Field(ge=0)]
Factor: TypeAlias = Annotated[float, Field(gt=0, lt=1)]

_BY_SPIKES = ("spike_by", "spike_threshold", "spike_window")


class RecoveryConfig(Section):
    """What is done when something goes wrong."""

    max_restarts: Restarts = Field(default=3, description="times that failed ranks are started again; 0: never")
    max_stalled_restarts: Restarts = Field(
        default=1, description="restarts in a row that may get no further than the attempts before"
    )
    warm: bool = Field(
        default=True, description="ranks are forked from a process that has torch loaded, where the system can"
    )
    on_nan: OnNan = Field(
        default="skip",
        description="gradients that are not finite; skip: leaves the step out, and stops after train.max_bad_steps in "
        "a row; roll_back, lower_rate: goes back then; stop: at the first",
    )
    on_spike: OnSpike = Field(
        default="ignore",
        description="a loss far above the last ones; note: a record; roll_back: goes on from the last checkpoint "
        "behind the data since; lower_rate: with the same data at a lower rate; stop",
    )
    spike_by: Literal["factor", "deviations"] = Field(
        default="factor", description="factor: over the median of the window; deviations: robust standard deviations"
    )
    spike_threshold: Positive = Field(default=3.0, description="how far above the median a spike begins")
    spike_window: Annotated[int, Field(ge=4)] = Field(default=50, description="steps whose losses are looked at")
    rate_factor: Factor = Field(default=0.5, description="lower_rate: what learning rates are multiplied by")
    max_roll_backs: Count = Field(default=3, description="times that a run goes back; one more stops it")
    on_oom: Literal["stop", "restart", "halve"] = Field(
        default="stop", description="out of memory; halve: starts again with half the microbatch, same global batch"
    )
    on_hang: Literal["restart", "stop"] = Field(default="restart", description="ranks that stopped making progress")
    on_full_disk: Literal["stop", "warn"] = Field(
        default="stop", description="a checkpoint that cannot be written; warn: goes on, and tries at the next one"
    )
    grace_s: NotNegative = Field(
        default=60.0, description="seconds from the signal of a preemption to the end, saved or not"
    )


def recovery_keys_apply(config: Config) -> list[Problem]:
    """No key is changed that nothing reads."""
    given, defaults = config.recovery, RecoveryConfig()
    changed = [name for name in RecoveryConfig.model_fields if getattr(given, name) != getattr(defaults, name)]
    goes_back = {"roll_back", "lower_rate"} & {given.on_nan, given.on_spike}
    rules = [
        (_BY_SPIKES, given.on_spike != "ignore", "it belongs to spikes of the loss", "recovery.on_spike = note"),
        (
            ("rate_factor",),
            "lower_rate" in (given.on_nan, given.on_spike),
            "it belongs to lower_rate",
            "recovery.on_nan = lower_rate",
        ),
        (("max_roll_backs",), bool(goes_back), "it belongs to runs that go back", "recovery.on_nan = roll_back"),
        (
            ("max_stalled_restarts",),
            given.max_restarts > 0,
            "it belongs to runs that are started again",
            "recovery.max_restarts = 3",
        ),
    ]
    return [
        Problem(
            what=f"recovery.{name} = {getattr(given, name)} has no effect here",
            rule=rule,
            fix=f"remove recovery.{name}, or set {fix}",
        )
        for names, is_read, rule, fix in rules
        for name in names
        if name in changed and not is_read
    ]


def roll_back_has_checkpoints(config: Config) -> list[Problem]:
    """A run that goes back has something to go back to."""
    keys = [f"recovery.{name}" for name in ("on_nan", "on_spike")]
    asked = [
        key
        for key, value in zip(keys, (config.recovery.on_nan, config.recovery.on_spike), strict=True)
        if value in ("roll_back", "lower_rate")
    ]
    if not asked or config.checkpoint.every_steps is not None or config.checkpoint.every_minutes is not None:
        return []
    return [
        Problem(
            what=f"{' and '.join(asked)} without checkpoints during the run",
            rule="a run goes back to its last checkpoint",
            fix="set checkpoint.every_steps or checkpoint.every_minutes",
        )
    ]
