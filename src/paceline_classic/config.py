"""What users ask for: settings that are changed by assignment, arguments, and checks that tell all at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from torch import nn

from paceline.cluster.detect import bf16_instructions
from paceline.comm.base import Communicator
from paceline.comm.objects import ask_first_rank
from paceline.config import Config, config_from_dict
from paceline.engines.apply import STRATEGY_NAMES, parallelize
from paceline.engines.blocks import checkpoint_blocks
from paceline.engines.engine import Engine
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.precision import PRECISIONS, Precision
from paceline.engines.precision import mixed_precision as mixed_precision_of
from paceline.errors import ConfigError, Problem, UsageError, did_you_mean
from paceline.models.registry import model_blocks
from paceline.plan.layout import Offload, StrategyName
from paceline.plan.rule_case import unknown_word

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


def check_type(name: str, value: Any, kind: Any, expected: str) -> list[Problem]:
    return expect(isinstance(value, kind), f"{name} is of type {type(value).__name__}", f"it is {expected}")


def check_count(name: str, value: Any, least: int = 1, fix: str = "") -> list[Problem]:
    rule = f"it is a whole number of at least {least}"
    return expect(type(value) is int and value >= least, f"{name} = {value!r}", rule, fix)


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
        return list(unknown_word(name, value, _BACKENDS))
    if name == "learning_rate":
        is_fine = type(value) in (int, float) and 0 < value < math.inf
        return expect(is_fine, shown, "it is a number above 0", "try learning_rate = 0.001")
    is_whole = isinstance(value, float) and value.is_integer()
    return check_count(name, value, _SMALLEST[name], f"write {int(value)}" if is_whole else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """What a trainer takes besides, by name.

    ``cpu_offload`` keeps on the host whatever the strategy can keep there. ``checkpoint_dir`` is where
    ``save_checkpoint`` writes; of what it wrote the newest ``keep_checkpoints`` stay (None: all), besides the best.
    ``log_dir``, if given, gets the loss, samples and times of each call in ``trainer/``, as a ``DistributedMonitor``
    writes them. ``comm`` is for ranks that are connected already, ``shard_ranks`` for the groups of hybrid.
    """

    enable_activation_checkpointing: bool = False
    cpu_offload: bool = False
    checkpoint_dir: str | Path = "./checkpoints"
    keep_checkpoints: int | None = None
    log_dir: str | Path | None = None
    comm: Communicator | None = None
    shard_ranks: int = 0


def check_arguments(
    model: Any, strategy: Any, mixed_precision: Any, steps: Any, clip_val: Any, options: Mapping[str, Any]
) -> TrainerOptions:
    """Returns the options of a trainer. Raises UsageError with all problems of its arguments."""
    known = tuple(field.name for field in fields(TrainerOptions))
    more = TrainerOptions(**{name: value for name, value in options.items() if name in known})
    precision_rule = f"it is True, False, or one of {', '.join(PRECISIONS)}"
    is_precision = isinstance(mixed_precision, bool) or mixed_precision in tuple(PRECISIONS)
    near, clip = did_you_mean(str(mixed_precision), PRECISIONS, cutoff=0.5), plain_number(clip_val)
    keep, recomputes = more.keep_checkpoints, more.enable_activation_checkpointing
    clip_rule = "it is the largest global norm of a gradient, a number above 0"
    is_clip = clip is None or (type(clip) in (int, float) and clip > 0)
    offload_rule = "data parallelism keeps whole parameters on the device"
    offload_fix = "use strategy = 'fsdp', which works on one rank too"
    is_offload = more.cpu_offload is not True or strategy != "ddp"
    problems = [
        *check_type("model", model, nn.Module, "an nn.Module"),
        *unknown_word("strategy", strategy, STRATEGY_NAMES),
        *expect(is_precision, f"mixed_precision = {mixed_precision!r}", precision_rule, near),
        *check_count("gradient_accumulation_steps", steps, fix="for no accumulation, leave it out"),
        *expect(is_clip, f"gradient_clip_val = {clip_val!r}", clip_rule, "for no clipping, leave it out"),
        *check_type("enable_activation_checkpointing", recomputes, bool, "True or False"),
        *check_type("cpu_offload", more.cpu_offload, bool, "True or False"),
        *expect(is_offload, "cpu_offload = True with strategy = 'ddp'", offload_rule, offload_fix),
        *([] if keep is None else check_count("keep_checkpoints", keep, fix="for all of them, leave it out")),
        *check_type("checkpoint_dir", more.checkpoint_dir, (str, Path), "a path"),
        *check_type("log_dir", more.log_dir, (str, Path, type(None)), "a path"),
        *check_type("comm", more.comm, (Communicator, type(None)), "a communicator, as connect() gives"),
    ]
    rule = f"the arguments by name are {', '.join(known)}"
    for name in [name for name in options if name not in known]:
        fix = did_you_mean(name, known, cutoff=0.5)
        problems.append(Problem(what=f"{name} is not an argument", rule=rule, fix=fix))
    refuse("DistributedTrainer", problems)
    return more


def make_engine(
    model: nn.Module, comm: Communicator, strategy: StrategyName, mixed_precision: bool | str, more: TrainerOptions
) -> Engine:
    """Parallelizes a model as a trainer was asked to."""
    # All that a strategy can keep on the host.
    offload = Offload(optimizer=True, gradients=True, parameters=strategy not in ("zero1", "zero2"))
    engine = parallelize(
        model,
        comm,
        strategy,
        precision=_usual_precision(comm) if mixed_precision is True else mixed_precision or "fp32",
        checkpoint_activations=_checkpoint_parts(model, comm) if more.enable_activation_checkpointing else "none",
        offload=offload if more.cpu_offload else Offload(),
        shard_ranks=more.shard_ranks,
    )
    if isinstance(engine, ModuleEngine) and comm.takes_real_time:  # calls of train_step are an own loop
        engine.watch_replicas()
    return engine


def _usual_precision(comm: Communicator) -> Precision | str:
    """Returns what ``mixed_precision=True`` is: not bf16 on a CPU that has no instructions for it, which is told."""
    if comm.device.type != "cpu" or ask_first_rank(comm, bf16_instructions):
        return mixed_precision_of(comm.device)
    if comm.rank == 0:
        warnings.warn(
            "mixed_precision=True computes in fp32 here: this CPU has no bf16 instructions, and emulates it slowly\n"
            "  for bf16 all the same: mixed_precision='bf16'",
            stacklevel=4,
        )
    return "fp32"


def _checkpoint_parts(model: nn.Module, comm: Communicator) -> str:
    """Returns the policy for blocks; where there are none, checkpoints parts by size, or tells that none would gain."""
    if model_blocks(model):
        return "full"
    parts = parts_by_size(model)
    if parts:
        checkpoint_blocks(parts, "full")
    elif comm.rank == 0:
        warnings.warn(
            f"enable_activation_checkpointing=True has nothing to gain in {type(model).__name__}: it has no repeated "
            "blocks, and no two parts with layers inside\n"
            "  it trains without; for parts of your choice, give the model a method blocks()",
            stacklevel=4,
        )
    return "none"


def parts_by_size(model: nn.Module) -> list[nn.Module]:
    """Returns the parts of a model without blocks that are worth a second run each: two or more, with layers."""
    inside = model
    while True:
        parts = [each for each in inside.children() if any(True for _ in each.parameters())]
        with_layers = [each for each in parts if len(list(each.children())) > 1]
        if len(parts) != 1:
            return with_layers if len(with_layers) > 1 else []
        inside = parts[0]
