"""When the run is saved, where, and which saves are kept: the section ``checkpoint`` of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from paceline.config.section import Count, Positive, Section
from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.config.schema import Config

Best: TypeAlias = Annotated[int, Field(ge=0)]


class CheckpointConfig(Section):
    """When the run is saved, and how many saves are kept."""

    every_steps: Count | None = Field(default=None, description="steps between checkpoints; null: not by steps")
    every_minutes: Positive | None = Field(default=None, description="minutes between checkpoints; null: not by time")
    at_end: bool = Field(default=True, description="save when the run ends")
    keep: Count = Field(default=2, description="newest checkpoints that are kept")
    keep_every: Count | None = Field(default=None, description="keep those of every so many steps, too")
    keep_best: Best = Field(default=0, description="keep so many of the best, too, by best_metric")
    best_metric: Literal["eval_loss", "eval_accuracy"] = Field(
        default="eval_loss", description="what is best, of the evaluations at the steps that are saved"
    )
    best_mode: Literal["min", "max"] | None = Field(
        default=None, description="whether less or more is better; null: less of a loss, more of an accuracy"
    )
    asynchronous: bool | Literal["auto"] = Field(
        default="auto",
        description="copy to host memory, and write while training goes on; auto: from 32 MiB a rank on",
    )
    folder: str | None = Field(
        default=None, min_length=1, description="where checkpoints go, shared by all hosts; null: the run's folder"
    )
    verify: Literal["full", "fast", "none"] = Field(
        default="full", description="what is checked before a resume; full: all hashes, fast: sizes"
    )


def checkpoint_keys_apply(config: Config) -> list[Problem]:
    """Finds keys of ``checkpoint`` that have no effect, or cannot be followed."""
    found, problems = config.checkpoint, []
    usual = type(found)()
    if found.keep_best == 0 and (found.best_metric, found.best_mode) != (usual.best_metric, usual.best_mode):
        problems.append(
            Problem(
                what="checkpoint.best_metric or best_mode with checkpoint.keep_best = 0",
                rule="they say which are the best ones to keep",
                fix="set checkpoint.keep_best = 1, or leave them out",
            )
        )
    if found.keep_best and config.train.eval_every is None and found.every_steps is not None:
        problems.append(
            Problem(
                what=f"checkpoint.keep_best = {found.keep_best} without train.eval_every",
                rule="the best are told by evaluations at the steps that are saved",
                fix=f"set train.eval_every = {found.every_steps}",
            )
        )
    return problems
