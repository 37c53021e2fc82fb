"""What a run writes about itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from paceline.config.sections import Count, NotNegativeCount, Positive, Section


class MonitorConfig(Section):
    """What the run writes about itself."""

    folder: str = Field(default="runs", min_length=1, description="run folders are made in here")
    log_every: Count = Field(default=10, description="steps between lines on the console")
    tensorboard: bool = Field(default=True, description="write TensorBoard events, of all ranks and of the host")
    trackers: Annotated[tuple[str, ...], Strict(False)] = Field(
        default=(), description="tensorboard, wandb, mlflow, trackio, or a sink of your own: package.module:name"
    )
    console: bool = Field(default=True, description="print progress")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least level of lines in the logs of ranks"
    )
    sample_s: Positive | None = Field(
        default=1.0,
        description="seconds between measurements of GPUs, processors, memory, network and disks; null: none",
    )
    trace: bool = Field(default=False, description="record every communication")
    histograms: NotNegativeCount | None = Field(
        default=None, description="steps between histograms of all weights and gradients; null or 0: none"
    )
    hang_s: Positive | None = Field(
        default=60.0, description="seconds without progress on any rank until the run is ended with a verdict"
    )
    hang_setup_s: Positive = Field(
        default=600.0, description="the same during set-up, the first step, evaluation and checkpoints"
    )
