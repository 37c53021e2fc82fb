"""Settings of a run in one object that is changed by assignment, and checked while it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from paceline.classic.arguments import check_choice, did_you_mean, expect, plain_number, refuse
from paceline.config import Config, config_from_dict
from paceline.errors import Problem

_FEATURES = 784
_BACKENDS = ("nccl", "gloo", "shared_memory", "auto")
_SMALLEST = {"world_size": 1, "batch_size": 1, "epochs": 1, "model_dim": 2, "num_classes": 2, "dataset_size": 1}


@dataclass(init=False, slots=True)
class DistributedConfig:
    """Settings of a classifier on synthetic data, to be changed by assignment; ``to_config`` makes the real config.

    A name that is not a setting and a value that cannot be one are refused with UsageError when they are assigned.
    ``backend = "nccl"``, the default, means NCCL where ranks have GPUs and Gloo where they have none: these settings
    also describe runs on a laptop. ``batch_size`` counts the samples of one step over all ranks.
    """

    world_size: int = 4
    backend: str = "nccl"
    batch_size: int = 64
    epochs: int = 10
    learning_rate: float = 0.001
    model_dim: int = 512
    num_classes: int = 10
    dataset_size: int = 10_000

    def __init__(self, **settings: Any) -> None:
        given = {field.name: field.default for field in fields(type(self))} | settings
        asked = [(name, plain_number(value)) for name, value in settings.items()]
        refuse("DistributedConfig", [problem for name, value in asked for problem in _check_setting(name, value)])
        for name, value in given.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        value = plain_number(value)
        refuse("DistributedConfig", _check_setting(name, value))
        object.__setattr__(self, name, value)

    def to_config(self) -> Config:
        """Returns the config of the run: an MLP, AdamW, and ``dataset_size`` samples of 784 features.

        A fifth of the samples is kept for evaluation. Raises ConfigError with all problems between settings.
        """
        values = {
            "model": {"kind": "mlp", "hidden_dim": self.model_dim, "num_classes": self.num_classes},
            "data": {
                "kind": "synthetic_classification",
                "samples": self.dataset_size,
                "features": _FEATURES,
                "classes": self.num_classes,
            },
            "parallel": {"ranks": self.world_size},
            "comm": {"backend": "auto" if self.backend == "nccl" else self.backend},
            "optim": {"kind": "adamw", "lr": self.learning_rate},
            "train": {"epochs": self.epochs, "global_batch": self.batch_size},
        }
        names = "world_size is parallel.ranks, batch_size is train.global_batch"
        return config_from_dict(values, source=f"DistributedConfig ({names})")


def _check_setting(name: str, value: Any) -> list[Problem]:
    """A setting exists, and has a value that it can have."""
    names = tuple(field.name for field in fields(DistributedConfig))
    shown = f"{name} = {value!r}"
    if name not in names:
        rule = f"the settings are {', '.join(names)}"
        return [Problem(what=f"{shown} is not a setting", rule=rule, fix=did_you_mean(name, names))]
    if name == "backend":
        return check_choice(name, value, _BACKENDS)
    if name == "learning_rate":
        is_fine = type(value) in (int, float) and 0 < value < math.inf
        rule, fix = "it is a number above 0", "try learning_rate = 0.001"
    else:
        is_fine = type(value) is int and value >= _SMALLEST[name]
        is_whole = isinstance(value, float) and value.is_integer()
        rule, fix = f"it is a whole number of at least {_SMALLEST[name]}", f"write {int(value)}" if is_whole else ""
    return expect(is_fine, shown, rule, fix)
