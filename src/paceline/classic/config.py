"""Settings of a run in one object that is changed by assignment; and checks of arguments, which tell all at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError, Problem, UsageError, did_you_mean

_FEATURES = 784
_BACKENDS = ("nccl", "gloo", "shared_memory", "auto")
_SMALLEST = {"world_size": 1, "batch_size": 1, "epochs": 1, "model_dim": 2, "num_classes": 2, "dataset_size": 1}


def refuse(who: str, problems: list[Problem]) -> None:
    """Raises UsageError with all problems, if there are any."""
    if problems:
        raise UsageError(str(ConfigError(problems, source=who)))


def plain_number(value: Any) -> Any:
    """Turns numbers of other libraries, such as numpy's, into Python's; leaves what is no number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def expect(is_fine: bool, what: str, rule: str, fix: str = "") -> list[Problem]:
    """Returns a problem unless something is fine."""
    return [] if is_fine else [Problem(what=what, rule=rule, fix=fix)]


def check_names(given: Iterable[str], known: tuple[str, ...]) -> list[Problem]:
    """Arguments have names that are known."""
    rule, unknown = f"the arguments by name are {', '.join(known)}", [name for name in given if name not in known]
    return [
        Problem(what=f"{name} is not an argument", rule=rule, fix=did_you_mean(name, known, cutoff=0.5))
        for name in unknown
    ]


def check_type(name: str, value: Any, kind: Any, expected: str) -> list[Problem]:
    return expect(isinstance(value, kind), f"{name} is of type {type(value).__name__}", f"it is {expected}")


def check_count(name: str, value: Any, least: int = 1, fix: str = "") -> list[Problem]:
    rule = f"it is a whole number of at least {least}"
    return expect(type(value) is int and value >= least, f"{name} = {value!r}", rule, fix)


def check_choice(name: str, value: Any, choices: tuple[str, ...], *, also: str = "", says: str = "") -> list[Problem]:
    """An argument is one of some words; ``also`` is what else it may be, ``says`` what is said of another value."""
    rule, is_known = f"it is {also}one of {', '.join(choices)}", isinstance(value, str) and value in choices
    near = did_you_mean(value.lower(), choices, cutoff=0.5) if isinstance(value, str) else ""
    return expect(is_known, f"{name} = {value!r} {says}".rstrip(), rule, near)


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
        wrong = [_check_setting(name, plain_number(value)) for name, value in settings.items()]
        refuse("DistributedConfig", [problem for each in wrong for problem in each])
        for field in fields(type(self)):
            setattr(self, field.name, settings.get(field.name, field.default))

    def __setattr__(self, name: str, value: Any) -> None:
        value = plain_number(value)
        refuse("DistributedConfig", _check_setting(name, value))
        object.__setattr__(self, name, value)

    def to_config(self) -> Config:
        """Returns the config: an MLP, AdamW, 784 features. Raises ConfigError with all problems between settings."""
        samples = {"samples": self.dataset_size, "features": _FEATURES, "classes": self.num_classes}
        values = {
            "model": {"kind": "mlp", "hidden_dim": self.model_dim, "num_classes": self.num_classes},
            "data": {"kind": "synthetic_classification", **samples},
            "parallel": {"ranks": self.world_size},
            "comm": {"backend": "auto" if self.backend == "nccl" else self.backend},
            "optim": {"kind": "adamw", "lr": self.learning_rate},
            "train": {"epochs": self.epochs, "global_batch": self.batch_size},
        }
        names = "world_size is parallel.ranks, batch_size is train.global_batch"
        return config_from_dict(values, source=f"DistributedConfig ({names})")


def _check_setting(name: str, value: Any) -> list[Problem]:
    """A setting exists, and has a value that it can have."""
    names, shown = tuple(field.name for field in fields(DistributedConfig)), f"{name} = {value!r}"
    if name not in names:
        rule, near = f"the settings are {', '.join(names)}", did_you_mean(name, names, cutoff=0.5)
        return [Problem(what=f"{shown} is not a setting", rule=rule, fix=near)]
    if name == "backend":
        return check_choice(name, value, _BACKENDS)
    if name == "learning_rate":
        is_fine = type(value) in (int, float) and 0 < value < math.inf
        return expect(is_fine, shown, "it is a number above 0", "try learning_rate = 0.001")
    is_whole = isinstance(value, float) and value.is_integer()
    return check_count(name, value, _SMALLEST[name], f"write {int(value)}" if is_whole else "")
