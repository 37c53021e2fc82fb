"""What the arms of the GPU benchmark train: one config for each model, which all arms read.

The config is the one that ships (``configs/``), or stands here where that is not at hand. Arms that are no ``paceline
train`` take model, data, order of samples and optimizer settings from it, so that all of them compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paceline.bounded_yaml import load_yaml
from paceline.config import Config, config_from_dict, dump_yaml, load_config

OnDevice: TypeAlias = Literal["cuda", "cpu"]
# What a benchmark leaves out of a run: evaluation, checkpoints, ragged batches (for which plain loops would compile
# again), and rates that depend on the number of steps.
_TIMED = (
    *("data.eval_fraction=0.0", "data.last_batch=drop", "optim.schedule.kind=constant", "optim.schedule.warmup=0"),
    *("checkpoint.at_end=false", "parallel.ranks=1", "monitor.console=false"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWorkload:
    """A model with its batch: ``steps`` of a turn are timed after ``warm_up`` others. ``kinds``: which arms suit it."""

    model: str
    shipped: str = ""
    values: Mapping[str, Any] = field(hash=False)
    steps: int
    warm_up: int
    kinds: Sequence[str] = field(hash=False)
    unit: Literal["tokens", "images"] = "tokens"
    device: OnDevice = "cuda"

    def config_file(self, folder: Path) -> Path:
        """Returns the config that ships, or writes the one that stands for it into a folder."""
        if self.shipped and Path(self.shipped).is_file():
            return Path(self.shipped).absolute()
        path = folder / f"{self.model}.yaml"
        path.write_text(dump_yaml(config_from_dict(self.values)), encoding="utf-8")
        return path

    def overrides(self, steps: int, *, precision: str | None = None) -> list[str]:
        """Returns what is changed in the config for a turn of so many steps, warm-up included."""
        changed = [*_TIMED, f"parallel.device={self.device}", f"train.steps={steps}"]
        return changed if precision is None else [*changed, f"train.precision={precision}"]

    def config(self, file: Path, steps: int, *, precision: str | None = None) -> Config:
        """Reads the config as ``paceline train`` does with these overrides."""
        return load_config(file, self.overrides(steps, precision=precision))


@cache
def all_workloads() -> dict[str, GpuWorkload]:
    """Returns the workloads of all devices by model, from ``workloads.yaml``."""
    text = resources.files("paceline.bench.gpu").joinpath("workloads.yaml").read_text(encoding="utf-8")
    return {model: GpuWorkload(model=model, **about) for model, about in load_yaml(text).items()}


def workloads_on(device: str) -> dict[str, GpuWorkload]:
    """Returns the workloads of a device: ``cuda``, or ``cpu`` for a trial of the machinery."""
    return {model: each for model, each in all_workloads().items() if each.device == device}
