"""What each field of a layout may be: the rules that come before all others, for layouts that are made in code."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, get_args

from paceline.errors import Problem
from paceline.plan.layout import CHECKPOINTS, STRATEGIES, Algorithm, Buffers, Compile, Compression, Layout, Offload
from paceline.schedule.grid import Schedule
from paceline.schedule.schedules import CHUNKS

WORDS: dict[str, tuple[str, ...]] = {
    "strategy": STRATEGIES,
    "algorithm": get_args(Algorithm),
    "checkpoint_activations": CHECKPOINTS,
    "buffers": get_args(Buffers),
    "compile": get_args(Compile),
    "schedule": tuple(CHUNKS),
}
"""What fields may be that are one of some words; a schedule may also be one's own."""

MEANINGS = {
    "strategy": "ddp: every rank holds the whole model; zero1, zero2, zero3 (the same as fsdp): the ranks share "
    "optimizer state, gradients too, parameters too; hybrid: fsdp inside groups; auto: what fits and is fastest, "
    "with the pipeline and tensor degrees and the checkpointing that go with it",
    "data": "ranks that share the batch; null: ranks / (pipeline x tensor)",
    "pipeline": "ranks that run the model's layers one after another, in stages",
    "tensor": "ranks that share each layer: heads, features, vocabulary",
    "shard_ranks": "hybrid: ranks that hold one copy of the model together; null: node_ranks",
    "units": "fsdp: modules that are gathered as one, by name; null: the model's repeated blocks",
    "unit_mb": "fsdp: gather modules together up to this size, in MiB; null: the model's blocks",
    "prefetch": "fsdp: units that are gathered ahead of their use",
    "reshard_after_forward": "fsdp: free gathered parameters after forward, keep them, or spread them over this many "
    "ranks",
    "bucket_mb": "gradients reduced together, in MiB; auto: what the first steps show to wait least",
    "first_bucket_mb": "size of the first bucket, in MiB: small starts early",
    "overlap": "reduce gradients while backward still runs",
    "schedule": "pipeline: in which order microbatches run forward and backward",
    "chunks": "pipeline: stages of each rank; null: 1, or 2 for interleaved and zb-v",
    "stages": "pipeline: auto cuts by estimated cost, measured by timing the layers; or names of the layers at which "
    "a new stage begins",
    "stage_layers": "pipeline: how many blocks each stage runs; null: see stages",
    "sequence_parallel": "tensor: between split layers, each rank works on a part of the tokens",
    "precision": "fp32: computes in dtype; bf16, fp16: autocast; bf16_master: bf16 parameters with fp32 masters; fp8: "
    "so, and linear layers of blocks in 8 bits, scaled tensor by tensor; fp8_row: scaled row by row; auto: "
    "bf16_master on GPUs with bf16, else fp32",
    "checkpoint_activations": "what backward computes again: nothing, blocks (all but their inputs), all but matrix "
    "products, or every n-th block",
    "fused_loss": "compute the loss with the output layer, in chunks, so that there are never the logits of all "
    "tokens; auto: on a GPU, for vocabularies of 8192 and more",
    "buffers": "buffers such as batch-norm statistics: rank 0's for all, or each its own",
    "sync_batchnorm": "batch norm takes its statistics over all ranks, as one process would",
    "accumulate": "microbatches of a step; null: global_batch / (microbatch x ranks), or 1",
}
"""What fields mean that a config and the command line may set, in a sentence each."""

_AT_LEAST = {  # whole numbers
    **dict.fromkeys(("pipeline", "tensor", "context", "expert", "microbatch", "accumulate"), 1),
    **dict.fromkeys(("data", "shard_ranks", "node_ranks", "chunks", "prefetch"), 0),
}
_OBJECTS = {
    "offload": (Offload, "paceline.Offload(optimizer=True)"),
    "compression": (Compression, 'paceline.Compression(policy="topk")'),
}


def field_problems(layout: Layout) -> list[Problem]:
    """Lists the fields of a layout whose values are of no use: unknown words, wrong types, numbers out of range."""
    return [problem for each in fields(layout) for problem in _problems(each.name, getattr(layout, each.name))]


def unknown_word(name: str, value: Any, words: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem where a value is none of the words, with the one that is most like it."""
    if value not in words:
        near = difflib.get_close_matches(str(value), words, n=1)
        fix = f"did you mean {near[0]}?" if near else ""
        yield Problem(what=f"{name} = {value!r} is unknown", rule=f"it is one of {', '.join(words)}", fix=fix)


def _problems(name: str, value: Any) -> Iterator[Problem]:
    if name == "schedule" and isinstance(value, str):
        if value not in CHUNKS:
            near = difflib.get_close_matches(value, CHUNKS, n=1)
            fix = f"did you mean {near[0]}?" if near else "take one of them, or a schedule of your own"
            yield Problem(
                what=f"there is no schedule {value!r}", rule=f"the schedules are {', '.join(CHUNKS)}", fix=fix
            )
    elif name in WORDS and name != "schedule":
        yield from unknown_word(name, value, WORDS[name])
    elif name in _AT_LEAST:
        if type(value) is not int or value < _AT_LEAST[name]:
            least = _AT_LEAST[name]
            yield Problem(what=f"{name} = {value!r}", rule="it is a whole number", fix=f"give {least} or more")
    elif name in _OBJECTS:
        kind, example = _OBJECTS[name]
        if not isinstance(value, kind):
            yield Problem(what=f"{name} = {value!r}", rule=f"it is a paceline.{kind.__name__}", fix=f"give {example}")
    elif name in ("bucket_mb", "first_bucket_mb", "unit_mb"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not is_number and not (name == "unit_mb" and value is None):
            yield Problem(what=f"{name} = {value!r}", rule="it is a size in MiB", fix="give a number, 0 or more")
    elif isinstance(getattr(_DEFAULT, name), bool) and name != "reshard_after_forward":
        if not isinstance(value, bool):
            yield Problem(what=f"{name} = {value!r}", rule="it is a yes or no", fix="give True or False")
    else:
        yield from _mixed(name, value)


def _mixed(name: str, value: Any) -> Iterator[Problem]:
    """Checks fields that may be of several types."""
    rules = {
        "reshard_after_forward": (isinstance(value, int), "True, False, or a number of ranks"),
        "schedule": (isinstance(value, Schedule), "the name of a schedule, or a schedule"),
        "stages": (value in ("estimated", "measured") or _holds(value, str), "estimated, measured, or names of layers"),
        "units": (value is None or _holds(value, str), "names of modules, or None"),
        "stage_layers": (value is None or _holds(value, int), "a count of blocks for each stage, or None"),
        "precision": (isinstance(value, str), "the name of a precision"),
        "fused_loss": (value == "auto" or isinstance(value, bool), "auto, True or False"),
    }
    is_good, rule = rules[name]
    if not is_good:
        yield Problem(what=f"{name} = {value!r}", rule=f"it is {rule}", fix="leave it out for the default")


def _holds(value: Any, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)


_DEFAULT = Layout()
