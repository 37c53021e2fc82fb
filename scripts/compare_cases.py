"""The cases that ``compare_checkouts.py`` runs: short runs with tiny models, predictions, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Reader = Literal["run", "json", "text", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Commands to run one after another in one folder, and what to read from the last of them."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    reader: Reader
    ignored: tuple[str, ...] = ()  # keys of the JSON whose values are measured
    starts_with_before: bool = False  # the first command runs BEFORE's code on both sides: old files must still load


def _train(
    name: str, config: str, *overrides: str, verb: tuple[str, ...] = ("train",), options: tuple[str, ...] = ()
) -> Case:
    command = (*verb, f"configs/{config}.yaml", *SHORT[config], *overrides, *options, "--json", "--force")
    return Case(name=name, commands=(command,), reader="run")


QUIET = ("monitor.tensorboard=false", "monitor.trace=true", "checkpoint.asynchronous=false")
TEXT = ("data.path=text.txt", "data.eval_fraction=0.2", "optim.schedule.warmup=0", "train.steps=3", *QUIET)
TINY = ("model.width=32", "model.context=16", "train.eval_every=null", *TEXT)
SHORT = {
    "digits": ("train.epochs=null", "train.steps=4", *QUIET),
    "resnet_images": (
        *("train.epochs=null", "train.steps=2", "train.global_batch=8", "model.width=4", "model.norm=batch"),
        *("data.samples=32", "data.size=8", "optim.schedule.warmup=0", *QUIET),
    ),
    "gpt_small": ("comm.compression.plain_steps=1", *TEXT),
    "gpt_fsdp": TINY,
    "gpt_pipeline": ("model.width=32", "model.context=16", "train.eval_every=null", *TEXT),
    "gpt_3d": TINY,
}
VIRTUAL = ("parallel.ranks=4", "comm.backend=virtual", "parallel.threads=1")
MODELLED = ("--compute", "modelled", "--cluster", "4x h100-sxm", "--ranks", "4", "--trace", "trace.json")


def all_cases() -> Iterator[Case]:
    yield from _data_parallel()
    yield from _model_parallel()
    yield from _checkpoints()
    yield from _predictions()
    yield from _errors()


def _data_parallel() -> Iterator[Case]:
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        yield _train(f"{strategy}-virtual", "gpt_fsdp", f"parallel.strategy={strategy}", *VIRTUAL)
    yield _train("hybrid-virtual", "gpt_fsdp", "parallel.strategy=hybrid", "parallel.shard_ranks=2", *VIRTUAL)
    yield _train("auto-virtual", "gpt_fsdp", "parallel.strategy=auto", *VIRTUAL)
    yield _train("resnet-ddp-virtual", "resnet_images", *VIRTUAL)
    for strategy, backend in (("ddp", "gloo"), ("ddp", "shared_memory"), ("fsdp", "gloo"), ("zero2", "shared_memory")):
        real = (f"parallel.strategy={strategy}", f"comm.backend={backend}", "parallel.ranks=2")
        yield _train(f"{strategy}-{backend}", "gpt_fsdp", *real)
    yield _train("compression-topk", "gpt_small", "comm.compression.policy=topk", *VIRTUAL)
    for policy in ("powersgd", "int8"):
        compressed = ("parallel.strategy=ddp", f"comm.compression.policy={policy}")
        yield _train(f"compression-{policy}", "gpt_fsdp", *compressed, *VIRTUAL)
    many = ("train.accumulate=2", "optim.clip_norm=0.1")
    yield _train("accumulate-clip-ddp", "gpt_fsdp", "parallel.strategy=ddp", *many, *VIRTUAL)
    yield _train("accumulate-clip-fsdp", "gpt_fsdp", *many, *VIRTUAL)
    yield _train("bf16-master-fsdp", "gpt_fsdp", "train.precision=bf16_master", *VIRTUAL)
    yield _train("recompute-full", "gpt_fsdp", "memory.checkpoint_activations=full", *VIRTUAL)
    yield _train("recompute-matmuls", "gpt_fsdp", "memory.checkpoint_activations=matmuls", *VIRTUAL)
    yield _train("offload-fsdp", "gpt_fsdp", "memory.offload=[optimizer]", *VIRTUAL)
    yield _train("microbatch-auto", "digits", "train.microbatch=auto", *VIRTUAL)
    for name, slow in (("simulate-ddp", ()), ("simulate-slow-rank", ("--slow", "rank=2:1.5x"))):
        yield _train(name, "digits", verb=("simulate",), options=(*MODELLED, *slow))
    yield _train("simulate-fsdp", "gpt_fsdp", verb=("simulate",), options=MODELLED)


def _model_parallel() -> Iterator[Case]:
    virtual = ("comm.backend=virtual", "parallel.threads=1")
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"):
        yield _train(f"pipeline-{schedule}", "gpt_pipeline", f"parallel.schedule={schedule}", *virtual)
    yield _train("pipeline-1f1b-gloo", "gpt_pipeline", "comm.backend=gloo")
    flat = ("parallel.pipeline=1", "train.accumulate=null", "parallel.strategy=ddp")
    two = ("parallel.ranks=2", "parallel.data=1", *flat)
    yield _train("tensor-2", "gpt_3d", *two)
    yield _train("tensor-2-sequence", "gpt_3d", *two, "parallel.sequence_parallel=true")
    yield _train("tensor-2-fsdp-2", "gpt_3d", "parallel.ranks=4", *flat[:2], "parallel.strategy=fsdp")
    yield _train("3d-zero1", "gpt_3d")


def _checkpoints() -> Iterator[Case]:
    written = _train("", "gpt_fsdp", "checkpoint.every_steps=2", "parallel.strategy=zero1", *VIRTUAL).commands[0]
    more = (*(each.replace("train.steps=3", "train.steps=5") for each in SHORT["gpt_fsdp"]), "--json")
    resume = ("train", "configs/gpt_fsdp.yaml", *more, "--resume", "auto")
    real = (*resume, "parallel.strategy=fsdp", "parallel.ranks=2", "comm.backend=gloo")
    virtual = (*resume, "parallel.strategy=hybrid", "parallel.shard_ranks=2", *VIRTUAL)
    yield Case(name="resume-zero1x4-as-fsdp-x2", commands=(written, real), reader="run")
    yield Case(name="resume-of-before", commands=(written, virtual), reader="run", starts_with_before=True)
    verify = ("checkpoint", "verify", "runs/gpt-fsdp", "--json")
    yield Case(name="checkpoint-verify", commands=(written, verify), reader="json", ignored=("seconds",))


def _predictions() -> Iterator[Case]:
    seven, cluster = "configs/gpt_7b.yaml", ("--cluster", "4x dgx-h100")
    spread = ("parallel.pipeline=4", "parallel.tensor=2", "train.microbatch=1", "--cluster", "1x dgx-h100")
    numbers = {
        "plan-json": ("plan", seven, *cluster),
        "plan-scaling": ("plan", seven, *cluster, "--gpus", "8,16,32,64"),
        "predict-fsdp": ("predict", seven, "parallel.strategy=fsdp", "train.microbatch=2", *cluster),
        "predict-pipeline-tensor": ("predict", seven, *spread),
        "predict-digits": ("predict", "configs/digits.yaml", "--cluster", "8x h100-sxm", "--slow", "rank=2:1.5x"),
        "validate": ("validate",),
        "schedule-zb-v": ("schedule", "zb-v", "--stages", "4", "--microbatches", "8"),
        "explain-3d": ("config", "explain", "configs/gpt_3d.yaml"),
        "cluster-json": ("cluster", "show", "4x dgx-h100"),
        "verify-gpt-fsdp": ("verify", "gpt", "--strategy", "fsdp", "--ranks", "4"),
        "verify-3d": ("verify", "gpt", "--pipeline", "2", "--tensor", "2", "--data", "2", "--ranks", "8"),
    }
    for name, command in numbers.items():
        ignored = ("seconds",) if name.startswith("verify") else ()
        yield Case(name=name, commands=((*command, "--json"),), reader="json", ignored=ignored)
    texts = {
        "plan-text": ("plan", seven, *cluster),
        "schedule-text": ("schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--messages"),
        "schedule-interleaved": ("schedule", "interleaved", "--stages", "2", "--microbatches", "4", "--csv", "-"),
        "explain-text": ("config", "explain", "configs/digits.yaml", "train.microbatch=8", "--ranks", "4"),
        "config-schema": ("config", "schema"),
        "cluster-text": ("cluster", "show", "p4d.24xlarge x 2"),
    }
    for name, command in texts.items():
        yield Case(name=name, commands=(command,), reader="text")


def _errors() -> Iterator[Case]:
    wrong = {
        "unknown-key": ("train", "configs/digits.yaml", "parallel.rank=4"),
        "many-problems": ("train", "configs/digits.yaml", "train.steps=-1", "optim.lr=fast", "comm.bakend=gloo"),
        "batch": ("train", "configs/digits.yaml", "parallel.ranks=4", "train.microbatch=3", "train.accumulate=2"),
        "mesh": ("train", "configs/gpt_3d.yaml", "parallel.ranks=6"),
        "stages": ("train", "configs/gpt_pipeline.yaml", "parallel.pipeline=8", "parallel.ranks=8"),
        "shard-ranks": ("train", "configs/digits.yaml", "parallel.strategy=hybrid", "parallel.shard_ranks=3", *VIRTUAL),
        "compression": ("train", "configs/gpt_small.yaml", "parallel.strategy=fsdp"),
        "heads": ("train", "configs/gpt_3d.yaml", "parallel.tensor=8", "parallel.ranks=32"),
        "no-file": ("train", "configs/digit.yaml"),
        "no-checkpoint": ("train", "configs/digits.yaml", "--resume", "auto"),
        "no-cluster": ("plan", "configs/gpt_7b.yaml", "--cluster", "4x dgx-h1000"),
        "schedule": ("schedule", "1f2b"),
        "no-plan-fits": ("plan", "configs/gpt_1t.yaml", "--cluster", "1x dgx-h100"),
    }
    for name, command in wrong.items():
        yield Case(name=f"error-{name}", commands=(command,), reader="error")
