"""Rules that tie several keys together: small pure functions from a config to its problems.

Each rule names the sections that it reads, so that it still runs when another section of the config is broken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from paceline.config.batch import check_batch
from paceline.config.checkpointing import checkpoint_keys_apply
from paceline.config.gpt_sizes import gpt_shape, head_problems, missing_dimensions
from paceline.config.known_data import known_shape
from paceline.config.layout import layout_problems
from paceline.config.recovery import recovery_keys_apply, roll_back_has_checkpoints
from paceline.config.schema import (
    Config,
    GPTModelConfig,
    MLPModelConfig,
    OptimConfig,
    ParallelConfig,
    ResNetModelConfig,
    TrainConfig,
)
from paceline.config.setting_rules import settings_agree
from paceline.config.sharding import data_ranks, is_split
from paceline.config.suggest import near_files
from paceline.errors import Problem
from paceline.plan.rule_case import text_of

_FITTING_DATA = {
    "mlp": ("digits", "synthetic_classification", "synthetic_images", "factory"),
    "resnet": ("synthetic_images", "factory"),
    "gpt": ("text", "synthetic_tokens", "factory"),
}
_LONGEST_NAME = 100
_OF_A_PIPELINE = ("schedule", "chunks", "stages", "stage_layers", "schedule_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A rule, and the sections that it reads."""

    needs: tuple[str, ...]
    run: Callable[[Config], list[Problem]]


def run_checks(config: Config, sections: Collection[str] | None = None) -> list[Problem]:
    """Lists the problems of a config; with ``sections``, only by the rules that read no other section."""
    found = [
        problem
        for check in CHECKS
        if sections is None or set(check.needs) <= set(sections)
        for problem in check.run(config)
    ]
    ranks = None if config.parallel.ranks == "auto" else config.parallel.ranks
    return found + layout_problems(config, ranks, node_ranks=0, sections=sections)


def check_ranks(config: Config, ranks: int, node_ranks: int | None = None) -> list[Problem]:
    """Lists what this number of ranks, ``node_ranks`` of them on a host (None: all), breaks.

    For when ``parallel.ranks = auto`` has been resolved, and the hosts are known.
    """
    of_ranks = layout_problems(config, ranks, node_ranks, only_of="ranks")
    return [*of_ranks, *_check_batch(config, ranks)]


def plain_name(config: Config) -> list[Problem]:
    """The name is a folder's name."""
    name = config.name
    is_plain = name.strip() == name and name not in ("", ".", "..") and len(name) <= _LONGEST_NAME
    if is_plain and not re.search(r'[/\\:\x00-\x1f<>"|?*]', name):
        return []
    plain = re.sub(r"[^\w.=+-]+", "-", name).strip("-.")[:_LONGEST_NAME] or "run"
    return [
        Problem(
            what=f"name = {name!r} is not a plain folder name",
            rule="the run is kept in monitor.folder/name, so a name has no path separators and is short",
            fix=f"try name = {plain}, and set monitor.folder for the place",
        )
    ]


def one_length(config: Config) -> list[Problem]:
    """The run's length is given once."""
    train = config.train
    if train.steps is None or train.epochs is None:
        return []
    return [
        Problem(
            what=f"train.steps = {train.steps} and train.epochs = {train.epochs:g} are both given",
            rule="a run has one length: steps or epochs",
            fix="remove one of them; on the command line, add train.epochs=null or train.steps=null",
        )
    ]


def batch_fits(config: Config) -> list[Problem]:
    """The batch can be divided among the ranks; for ``auto``, among some number of them."""
    ranks = config.parallel.ranks
    return _check_batch(config, None if ranks == "auto" else ranks)


def _check_batch(config: Config, ranks: int | None) -> list[Problem]:
    train, parallel = config.train, config.parallel
    if train.microbatch == "auto" and train.accumulate is not None:
        return [
            Problem(
                what=f"train.microbatch = auto with train.accumulate = {train.accumulate}",
                rule="global_batch = microbatch x accumulate x ranks: what is found decides accumulate",
                fix="remove train.accumulate, or give train.microbatch",
            )
        ]
    microbatch = None if train.microbatch == "auto" else train.microbatch
    if parallel.sharding_strategy == "auto":  # how many ranks share the batch is not decided yet
        return check_batch(train.global_batch, microbatch, train.accumulate, None)
    if not is_split(parallel):
        return check_batch(train.global_batch, microbatch, train.accumulate, ranks)
    if ranks is not None and ranks % (parallel.pipeline * parallel.tensor):
        return []  # said by the rules of the degrees
    data = parallel.data if ranks is None else data_ranks(parallel, ranks)
    return check_batch(train.global_batch, microbatch, train.accumulate, data, ranks_key="parallel.data")


def model_suits_data(config: Config) -> list[Problem]:
    """The model can read what the data gives."""
    model, data = config.model.kind, config.data.kind
    fitting = _FITTING_DATA.get(model)
    if fitting is None or data in fitting:
        return []
    models = [each for each, kinds in _FITTING_DATA.items() if data in kinds]
    return [
        Problem(
            what=f"model.kind = {model} cannot read data.kind = {data}",
            rule=f"{model} reads {', '.join(fitting)}",
            fix=f"try data.kind = {fitting[0]}, or model.kind = {' or '.join(models)}",
        )
    ]


def dimensions_match(config: Config) -> list[Problem]:
    """Dimensions given to the model are those of the data, where the data's are known beforehand."""
    model, shape = config.model, known_shape(config.data)
    if model_suits_data(config):
        return []
    problems: list[Problem] = []
    if isinstance(model, MLPModelConfig):
        problems += _exactly("input_dim", model.input_dim, shape.features, "features of a sample")
        problems += _at_least("num_classes", model.num_classes, shape.classes, "classes")
    elif isinstance(model, ResNetModelConfig):
        problems += _exactly("in_channels", model.in_channels, shape.channels, "channels of an image")
        problems += _at_least("num_classes", model.num_classes, shape.classes, "classes")
    elif isinstance(model, GPTModelConfig):
        problems += _at_least("vocab_size", model.vocab_size, shape.vocab_size, "tokens of the vocabulary")
    return problems


def _exactly(key: str, given: int | None, known: int | None, meaning: str) -> list[Problem]:
    if given is None or known is None or given == known:
        return []
    what = f"model.{key} = {given}, but the data has {known} {meaning}"
    return [Problem(what=what, rule="they are the same number", fix=f"set model.{key} = {known}, or leave it out")]


def _at_least(key: str, given: int | None, known: int | None, meaning: str) -> list[Problem]:
    if given is None or known is None or given >= known:
        return []
    what = f"model.{key} = {given} is fewer than the data's {known} {meaning}"
    return [Problem(what=what, rule="each needs an output", fix=f"set model.{key} = {known}, or leave it out")]


def gpt_has_dimensions(config: Config) -> list[Problem]:
    """A GPT has a size, or its dimensions."""
    if not isinstance(config.model, GPTModelConfig) or not (missing := missing_dimensions(config.model)):
        return []
    return [
        Problem(
            what=f"a gpt without model.size lacks {', '.join('model.' + name for name in missing)}",
            rule="layers, heads and width are given, or come from the size",
            fix="try model.size = gpt-micro, or set them",
        )
    ]


def gpt_heads_fit(config: Config) -> list[Problem]:
    """Heads divide the width, heads of keys and values divide the heads, and rotary positions have pairs."""
    shape = gpt_shape(config.model) if isinstance(config.model, GPTModelConfig) else None
    if shape is None:
        return []
    return head_problems(
        width=shape.width, heads=shape.heads, kv_heads=shape.kv_heads, is_rotary=shape.positions == "rotary"
    )


def context_fits(config: Config) -> list[Problem]:
    """Samples are not longer than the model's context, and someone says how long they are."""
    shape = gpt_shape(config.model) if isinstance(config.model, GPTModelConfig) else None
    if shape is None or config.data.kind not in ("text", "synthetic_tokens"):
        return []
    context = config.data.context
    if shape.context is None and context is None:
        return [
            Problem(
                what="neither model.context nor data.context is given",
                rule="the length of a sample comes from one of them, or from model.size",
                fix="try model.context = 128",
            )
        ]
    if shape.context is None or context is None or context <= shape.context:
        return []
    return [
        Problem(
            what=f"model.context = {shape.context} is smaller than data.context = {context}",
            rule="a sample must fit into the model's context",
            fix=f"set model.context = {context}, or data.context = {shape.context}",
        )
    ]


def text_exists(config: Config) -> list[Problem]:
    """The text file is there."""
    if config.data.kind != "text" or config.data.path is None or Path(config.data.path).is_file():
        return []
    path = Path(config.data.path)
    state = "is a folder" if path.is_dir() else "does not exist"
    near = near_files(path)
    return [
        Problem(
            what=f"data.path = {config.data.path!r} {state}",
            rule=f"it is a text file, and a relative path starts at {Path.cwd()}",
            fix=f"did you mean {' or '.join(near)}?" if near else "leave it out to train on Python's documentation",
        )
    ]


def backend_suits_device(config: Config) -> list[Problem]:
    """NCCL moves bytes between GPUs only, and shared memory between CPUs."""
    backend, device = config.comm.backend, config.parallel.device
    if (backend, device) == ("nccl", "cpu"):
        rule, other = "nccl moves bytes between GPUs only", "cuda"
    elif (backend, device) == ("shared_memory", "cuda"):
        rule, other = "ranks on GPUs talk through nccl", "cpu"
    else:
        return []
    what = f"comm.backend = {backend} with parallel.device = {device}"
    return [Problem(what=what, rule=rule, fix=f"set comm.backend = auto, or parallel.device = {other}")]


def buckets_repeat(config: Config) -> list[Problem]:
    """A deterministic run cuts its gradients the same way every time."""
    if config.comm.bucket_mb != "auto" or not config.train.deterministic:
        return []
    return [
        Problem(
            what="comm.bucket_mb = auto with train.deterministic = true",
            rule="measured sizes differ from run to run, and with them the order in which some sums are rounded",
            fix="set comm.bucket_mb = 25, or the size that an earlier run has found",
        )
    ]


def table_is_asked(config: Config) -> list[Problem]:
    """A table of measured all-reduces is given to somebody who asks it."""
    comm = config.comm
    if comm.algorithm_table is None or comm.algorithm == "auto":
        return []
    return [
        Problem(
            what=f"comm.algorithm_table = {comm.algorithm_table} with comm.algorithm = {comm.algorithm}",
            rule="the table says which algorithm is fastest, and here one is chosen already",
            fix="set comm.algorithm = auto, or leave comm.algorithm_table out",
        )
    ]


def strategy_can_be_chosen(config: Config) -> list[Problem]:
    """``parallel.strategy = auto`` has a whole model to choose for, and nothing that only some strategies take."""
    parallel, policy, problems = config.parallel, config.comm.compression.policy, list[Problem]()
    if parallel.strategy != "auto":
        return []
    if policy != "none":
        problems.append(
            Problem(
                what=f"comm.compression.policy = {policy} with parallel.strategy = auto",
                rule="compression works where replicas average the same gradients: auto may choose a strategy that has "
                "none",
                fix="set parallel.strategy = ddp or hybrid, or comm.compression.policy = none",
            )
        )
    if is_split(parallel) and parallel.sharding_strategy == "manual":
        problems.append(
            Problem(
                what=f"parallel.strategy = auto with {_degrees(parallel)}",
                rule="it chooses for models that each rank, or all ranks together, hold whole",
                fix="set parallel.strategy = zero1 or ddp; or leave all of it to parallel.sharding_strategy = auto",
            )
        )
    return problems


def mesh_is_asked_once(config: Config) -> list[Problem]:
    """What ``parallel.sharding_strategy = auto`` chooses is not given as well."""
    parallel = config.parallel
    if parallel.sharding_strategy == "manual":
        return []
    open_values = {name: field.default for name, field in type(parallel).model_fields.items()} | {"strategy": "auto"}
    return [
        Problem(
            what=f"parallel.sharding_strategy = auto with parallel.{key} = {text_of(value)}",
            rule="auto chooses the strategy, the pipeline and tensor degrees, and how the pipeline runs",
            fix=f"{'set parallel.strategy = auto' if key == 'strategy' else f'remove parallel.{key}'}, or set "
            "parallel.sharding_strategy = manual",
        )
        for key in ("strategy", "pipeline", "tensor", "data", *_OF_A_PIPELINE, "sequence_parallel")
        if (value := getattr(parallel, key)) != open_values[key]
    ]


def schedule_file_fits(config: Config) -> list[Problem]:
    """A schedule of one's own is there, is read, and no other one is asked for."""
    parallel = config.parallel
    if parallel.schedule_file is None or parallel.sharding_strategy == "auto":
        return []
    path, problems = Path(parallel.schedule_file), list[Problem]()
    if parallel.pipeline == 1:
        problems.append(
            Problem(
                what=f"parallel.schedule_file = {parallel.schedule_file} has no effect with parallel.pipeline = 1",
                rule="it belongs to pipeline parallelism",
                fix="remove parallel.schedule_file, or set parallel.pipeline = 2",
            )
        )
    other = {"schedule": "1f1b", "chunks": None}
    for key in (key for key, default in other.items() if getattr(parallel, key) != default):
        problems.append(
            Problem(
                what=f"parallel.schedule_file and parallel.{key} = {getattr(parallel, key)} are both given",
                rule="the file says what each rank does, and with which stages",
                fix=f"remove parallel.{key}, or parallel.schedule_file",
            )
        )
    if not path.is_file():
        near = near_files(path)
        problems.append(
            Problem(
                what=f"parallel.schedule_file = {parallel.schedule_file!r} does not exist",
                rule=f"it is a CSV file as paceline schedule --csv writes, and a relative path starts at {Path.cwd()}",
                fix=f"did you mean {' or '.join(near)}?" if near else "leave it out, and set parallel.schedule",
            )
        )
    return problems


def microbatch_is_known(config: Config) -> list[Problem]:
    """Trials of a microbatch are for a model that each rank runs by itself."""
    if not is_split(config.parallel) or config.train.microbatch != "auto":
        return []
    return [
        Problem(
            what=f"train.microbatch = auto with {_degrees(config.parallel)}",
            rule="a pass is one of several ranks together, so that one of them cannot try how much fits",
            fix=f"set train.accumulate = {4 * config.parallel.pipeline}, or train.microbatch",
        )
    ]


def _degrees(parallel: ParallelConfig) -> str:
    asked = {"pipeline": parallel.pipeline, "tensor": parallel.tensor}
    return " x ".join(f"parallel.{name} = {degree}" for name, degree in asked.items() if degree > 1)


def warmup_fits(config: Config) -> list[Problem]:
    """The warmup ends before the schedule does; a one-cycle schedule still has to come down after it."""
    schedule = config.optim.schedule
    length, name = schedule.length, "optim.schedule.length"
    if length is None and schedule.unit == "steps" and config.train.steps is not None:
        length, name = config.train.steps, "train.steps"
    must_come_down = schedule.kind == "one_cycle"
    if length is None or schedule.warmup < length or (schedule.warmup == length and not must_come_down):
        return []
    relation = "leaves nothing of" if schedule.warmup == length else "is longer than"
    return [
        Problem(
            what=f"optim.schedule.warmup = {schedule.warmup:g} {relation} {name} = {length:g} {schedule.unit}",
            rule="the warmup is the first part of the schedule"
            + (", and one_cycle comes down in the second" if must_come_down else ""),
            fix=f"try optim.schedule.warmup = {length // 10:g}",
        )
    ]


def optim_keys_apply(config: Config) -> list[Problem]:
    """No key of the optimizer is changed that its kind does not read."""
    optim, defaults = config.optim, OptimConfig()
    unread = {"adamw": ("momentum", "nesterov", "args"), "sgd": ("betas", "eps", "args")}.get(optim.kind, ())
    owners = {"args": "an optimizer given by its path", "betas": "adamw", "eps": "adamw"}
    return [
        Problem(
            what=f"optim.{key} = {getattr(optim, key)} has no effect with optim.kind = {optim.kind}",
            rule=f"it belongs to {owners.get(key, 'sgd')}",
            fix=f"remove optim.{key}, or change optim.kind",
        )
        for key in unread
        if getattr(optim, key) != getattr(defaults, key)
    ]


def nesterov_has_momentum(config: Config) -> list[Problem]:
    """Nesterov's momentum needs momentum."""
    if config.optim.kind != "sgd" or not config.optim.nesterov or config.optim.momentum > 0:
        return []
    return [
        Problem(
            what="optim.nesterov = true with optim.momentum = 0",
            rule="Nesterov's method looks ahead along the momentum",
            fix="try optim.momentum = 0.9, or optim.nesterov = false",
        )
    ]


def rate_has_a_batch(config: Config) -> list[Problem]:
    """A learning rate that grows with the batch says for which batch it is meant."""
    optim = config.optim
    if (optim.lr_scaling == "none") == (optim.lr_batch is None):
        return []
    if optim.lr_batch is None:
        return [
            Problem(
                what=f"optim.lr_scaling = {optim.lr_scaling} without optim.lr_batch",
                rule="the rate grows with train.global_batch / optim.lr_batch",
                fix="set optim.lr_batch to the global batch that optim.lr is meant for",
            )
        ]
    return [
        Problem(
            what=f"optim.lr_batch = {optim.lr_batch} has no effect with optim.lr_scaling = none",
            rule="it says for which batch optim.lr is meant, for a rate that grows with the batch",
            fix="set optim.lr_scaling = linear or sqrt, or remove optim.lr_batch",
        )
    ]


def precision_fits(config: Config) -> list[Problem]:
    """Lower precision starts from float32, and only fp16 scales the loss."""
    train, problems = config.train, []
    if train.dtype == "float64" and train.precision != "fp32":
        problems.append(
            Problem(
                what=f"train.precision = {train.precision} with train.dtype = float64",
                rule="lower precision is for speed and memory, float64 for exactness",
                fix="set train.dtype = float32, or train.precision = fp32",
            )
        )
    if train.precision != "fp16" and train.loss_scale != TrainConfig().loss_scale:
        problems.append(
            Problem(
                what=f"train.loss_scale = {train.loss_scale:g} has no effect with train.precision = {train.precision}",
                rule="only fp16 scales the loss: its small gradients would vanish",
                fix="remove train.loss_scale, or set train.precision = fp16",
            )
        )
    return problems


def _average_is_kept(config: Config) -> list[Problem]:
    """Finds an evaluation of an average that is not kept."""
    if not config.train.ema_eval or config.train.ema_decay is not None:
        return []
    return [
        Problem(
            what="train.ema_eval = true without train.ema_decay",
            rule="the average of the parameters is evaluated where one is kept",
            fix="set train.ema_decay = 0.999, or leave train.ema_eval out",
        )
    ]


CHECKS: tuple[Check, ...] = (
    Check(needs=("name",), run=plain_name),
    Check(needs=("model", "data"), run=model_suits_data),
    Check(needs=("model", "data"), run=dimensions_match),
    Check(needs=("model",), run=gpt_has_dimensions),
    Check(needs=("model",), run=gpt_heads_fit),
    Check(needs=("model", "data"), run=context_fits),
    Check(needs=("data",), run=text_exists),
    Check(needs=("parallel", "comm"), run=backend_suits_device),
    Check(needs=("comm", "train"), run=buckets_repeat),
    Check(needs=("comm",), run=table_is_asked),
    Check(needs=("comm",), run=settings_agree),
    Check(needs=("optim", "train"), run=warmup_fits),
    Check(needs=("optim",), run=optim_keys_apply),
    Check(needs=("optim",), run=nesterov_has_momentum),
    Check(needs=("optim",), run=rate_has_a_batch),
    Check(needs=("train",), run=precision_fits),
    Check(needs=("parallel", "comm"), run=strategy_can_be_chosen),
    Check(needs=("parallel",), run=mesh_is_asked_once),
    Check(needs=("parallel",), run=schedule_file_fits),
    Check(needs=("parallel", "train"), run=microbatch_is_known),
    Check(needs=("checkpoint", "train"), run=checkpoint_keys_apply),
    Check(needs=("train",), run=_average_is_kept),
    Check(needs=("recovery",), run=recovery_keys_apply),
    Check(needs=("recovery", "checkpoint"), run=roll_back_has_checkpoints),
    Check(needs=("train",), run=one_length),
    Check(needs=("train", "parallel"), run=batch_fits),
)
