"""What the arms of the GPU benchmark train: one config for each model, which all arms read.

The config is the one that ships (``configs/``), or stands here where that is not at hand. Arms that are no ``paceline
train`` take model, data, order of samples and optimizer settings from it, so that all of them compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paceline.config import Config, config_from_dict, dump_yaml, load_config

OnDevice: TypeAlias = Literal["cuda", "cpu"]
_OPTIM = {"kind": "adamw", "lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.95], "clip_norm": 1.0}
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
    kinds: tuple[str, ...]
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


def _gpt(batch: int, model: Mapping[str, Any], data: Mapping[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "gpt", "dropout": 0.0, **model},
        "data": dict(data),
        "train": {"steps": 100, "global_batch": batch, **train},
        "optim": _OPTIM,
    }


def _random_tokens(vocabulary: int, context: int) -> dict[str, Any]:
    return {"kind": "synthetic_tokens", "samples": 2048, "vocab_size": vocabulary, "context": context}


def _shipped_gpt(names: tuple[str, str], values: Mapping[str, Any], steps: tuple[int, int], *more: str) -> GpuWorkload:
    """Returns a GPT by its name and that of its config; ``steps``: of the warm-up, and timed; ``more``: arms."""
    (model, file), (warm_up, timed) = names, steps
    path, kinds = f"configs/{file}.yaml", (*_GPT, *more)
    return GpuWorkload(model=model, shipped=path, values=values, steps=timed, warm_up=warm_up, kinds=kinds)


_GPT = ("plain", "masters", "accelerate", "lightning", "engine", "train")
_FAST = {"compile": True}
_MASTER = {"precision": "bf16_master"}
_OF_CHARS = {
    "layers": 6,
    "heads": 6,
    "width": 384,
    "context": 256,
    "norm": "layer",
    "mlp": "gelu",
    "positions": "learned",
    "tied": True,
}

WORKLOADS = {
    each.model: each
    for each in (
        _shipped_gpt(
            ("gpt-124m", "gpt_124m"),
            _gpt(32, {"size": "gpt-124m", **_FAST}, _random_tokens(50304, 1024), **_MASTER),
            (15, 40),
        ),
        _shipped_gpt(
            ("gpt-1.1b", "gpt_1b"),
            _gpt(8, {"size": "gpt-1.1b", **_FAST}, _random_tokens(32000, 2048), **_MASTER),
            (10, 25),
            "fp8",
        ),
        _shipped_gpt(
            ("gpt-10m", "gpt_10m_chars"),
            _gpt(64, _OF_CHARS | _FAST, {"kind": "text", "tokens": "char"}, **_MASTER),
            (50, 200),
            "graphs",
        ),
        GpuWorkload(
            model="resnet50",
            shipped="configs/resnet50.yaml",
            values={
                "model": {"kind": "resnet", "depth": 50, "num_classes": 1000, **_FAST},
                "data": {"kind": "synthetic_images", "samples": 2048, "classes": 1000, "size": 224, "workers": 8},
                "train": {"steps": 100, "global_batch": 256, "precision": "bf16"},
                "optim": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-5},
            },
            steps=40,
            warm_up=15,
            kinds=("plain", "channels_last", "accelerate", "lightning", "engine", "train"),
            unit="images",
        ),
    )
}

# The same machinery on a CPU, in seconds: its figures mean nothing.
TINY_WORKLOADS = {
    each.model: each
    for each in (
        GpuWorkload(
            model="gpt-tiny",
            values=_gpt(
                4, {"layers": 2, "heads": 2, "width": 32, "context": 16}, _random_tokens(64, 16), precision="bf16"
            )
            | {"optim": _OPTIM | {"lr": 0.02}},  # so that a few steps tell arms apart that compute different things
            steps=4,
            warm_up=2,
            kinds=(*_GPT, "graphs", "fp8"),
            device="cpu",
        ),
        GpuWorkload(
            model="resnet-tiny",
            values={
                "model": {"kind": "resnet", "depth": 18, "width": 4, "stem": "small"},
                "data": {"kind": "synthetic_images", "samples": 64, "size": 8},
                "train": {"steps": 10, "global_batch": 4, "precision": "bf16"},
                "optim": {"kind": "sgd", "lr": 0.05},
            },
            steps=4,
            warm_up=2,
            kinds=("plain", "channels_last", "engine", "train"),
            unit="images",
            device="cpu",
        ),
    )
}


ALL_WORKLOADS = WORKLOADS | TINY_WORKLOADS


def workloads_on(device: str) -> dict[str, GpuWorkload]:
    """Returns the workloads of a device: ``cuda``, or ``cpu`` for a trial of the machinery."""
    return WORKLOADS if device == "cuda" else TINY_WORKLOADS
