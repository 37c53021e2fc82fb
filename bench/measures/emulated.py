"""Engines on links that one GPU emulates: twelve cases of model, ranks and network, each in a process of its own.

    case --process--> arms of ours and of torch in turns (paceline_bench/on_links.py), eager and compiled
                      ``predict --on gpu`` of the same case beside its dry run
                      best of ours beside best of torch

A 7B and a 70B stand there with three blocks each, and with a vocabulary of 4,096: as the blocks are a part of the whole
model's, so is the head. What a case could not do is a row with the reason, and the other cases go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from paceline.cluster.devices import load_cluster
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, config_from_dict
from paceline.errors import PacelineError
from paceline.rehearse.emulate import emulate
from paceline.rehearse.prediction import predict_decided
from paceline.run.function_ranks import run_processes
from paceline_bench.arms import BenchWorkload
from paceline_bench.engines import clean_up
from paceline_bench.on_links import Rows, bench_on_links
from paceline_bench.timing import Turns

_BLOCKS = {"layers": 3, "vocab_size": 4096, "context": 4096}
_70B = {"width": 8192, "heads": 64, "kv_heads": 8, "mlp_width": 28672, "tied": False}
_BASE = {"norm": "rms", "mlp": "swiglu", "positions": "rotary"}
MODELS = {
    "124m": BenchWorkload(model="gpt-124m", batch=32, context=1024),
    "1.1b": BenchWorkload(model="gpt-1.1b", batch=4, context=2048),
    "7b": BenchWorkload(
        model="3 blocks of 7B",
        batch=2,
        context=4096,
        shape=_BASE | _BLOCKS | {"width": 4096, "heads": 32, "mlp_width": 11008, "tied": False},
    ),
    "70b": BenchWorkload(model="3 blocks of 70B", batch=1, context=4096, shape=_BASE | _BLOCKS | _70B),
}
_TINY = {"width": 64, "heads": 4, "mlp_width": 128}
TINY = {  # the same on a CPU, to try the machinery: figures mean nothing
    "124m": BenchWorkload(model="gpt-nano", batch=1, context=8),
    "1.1b": BenchWorkload(model="gpt-nano", batch=2, context=8),
    "7b": BenchWorkload(model="3 blocks of 7B, tiny", batch=1, context=8, shape=_BASE | _BLOCKS | _TINY),
    "70b": BenchWorkload(model="3 blocks of 70B, tiny", batch=1, context=8, shape=_BASE | _BLOCKS | _TINY),
}
LINKS = {
    "8": (8, "1x dgx-h200"),
    "64": (64, "8x dgx-h200 over infiniband-ndr-8x"),  # 400 Gbit/s a card
    "64-100g": (64, "8x dgx-h200 over infiniband-edr-8x"),  # 100 Gbit/s a card
}
CASES = tuple(f"{model}/{links}" for model in MODELS for links in LINKS)
TURNS = Turns(rounds=8, steps_per_turn=1, warm_up=3)
_EAGER = "torch ddp,paceline ddp,torch fsdp2 bf16_master,paceline fsdp"  # the others are timed compiled alone
_COMPILED = "torch ddp,paceline ddp,paceline zero2,torch fsdp2,paceline fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCases:
    """How cases are measured. ``words``: arms whose name contains one of them; None: the usual ones."""

    device: str = "cuda"
    turns: Turns = TURNS
    words: Sequence[str] | None = None
    modes: Sequence[str] = ("eager", "compiled")
    strategies: Sequence[str] = ("ddp", "fsdp")  # of the emulated runs beside their dry runs
    case_limit_s: float = 150.0

    def workload(self, case: str) -> BenchWorkload:
        return (MODELS if self.device == "cuda" else TINY)[case.partition("/")[0]]


def bench_emulated(
    cases: Sequence[str], asked: EmulatedCases, limit_s: float, tell: Callable[[str], None]
) -> Iterator[Rows]:
    """Yields the rows of each case; begins none of which the slowest so far says that it would pass ``limit_s``."""
    began, slowest = time.monotonic(), 0.0
    for place, case in enumerate(cases):
        before = time.monotonic()
        if place and before - began + slowest > limit_s:
            tell(f"left, for want of time: --cases {','.join(cases[place:])}")
            return
        tell(f"{case} ...")
        join, threads = partial(_alone, asked.device), (os.cpu_count() or 1) if asked.device == "cuda" else 1
        try:
            (rows,) = run_processes(
                _measure_case, 1, args=(case, asked), timeout_s=asked.case_limit_s, threads=threads, join=join
            )
        except PacelineError as error:  # its process died, or took too long
            rows = [{"case": case, "error": str(error).splitlines()[0]}]
        slowest = max(slowest, time.monotonic() - before)
        tell(f"{case}: {time.monotonic() - before:.0f} s")
        yield rows


def _alone(device: str) -> Communicator:
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    return SoloCommunicator(where)


def _measure_case(comm: Communicator, case: str, asked: EmulatedCases) -> Rows:
    workload, (ranks, name) = asked.workload(case), LINKS[case.partition("/")[2]]
    cluster, rows = load_cluster(name), []
    for mode in asked.modes:
        words = asked.words or (_COMPILED if mode == "compiled" else _EAGER).split(",")
        rows += bench_on_links(workload, asked.turns, cluster, ranks, comm.device, words, compiled=mode == "compiled")
    rows += best_rows(rows)
    rows += [_beside_dry_run(workload, ranks, name, strategy, asked, comm) for strategy in asked.strategies]
    return [{"case": case, "cluster": name, "ranks": ranks} | row for row in rows]


def best_rows(rows: Rows) -> Rows:
    """Returns the fastest arm of ours beside torch's fastest: of all, and of those that replicate or shard."""
    kinds = {"all": ("",), "replicated": ("ddp", "zero"), "sharded": ("fsdp",)}
    found: Rows = []
    for kind, words in kinds.items():
        known = [row for row in rows if "error" not in row and any(word in row["arm"] for word in words)]
        ours = [row for row in known if row["arm"].startswith("paceline")]
        theirs = [row for row in known if row["arm"].startswith("torch")]
        if not ours or not theirs:
            continue
        mine, other = (min(each, key=lambda row: row["median_ms"]) for each in (ours, theirs))
        row: dict[str, Any] = {"model": mine["model"], "arm": f"best, {kind}", "compiled": mine["compiled"]}
        row |= {"ours": mine["arm"], "peer": other["arm"], "median_ms": mine["median_ms"]}
        for key, name in (("median_ms", "ratio"), ("exposed_ms", "exposed_ratio"), ("peak_bytes", "peak_ratio")):
            row[name] = round(mine[key] / other[key], 4) if other[key] and other[key] > 0 else None
        found.append(row)
    return found


def _beside_dry_run(
    workload: BenchWorkload, ranks: int, cluster: str, strategy: str, asked: EmulatedCases, comm: Communicator
) -> dict[str, Any]:
    """Runs a few steps of a config as ``predict --on gpu`` does; returns them beside what the dry run says."""
    row: dict[str, Any] = {"model": workload.model, "arm": f"paceline predict --on gpu, {strategy}"}
    try:
        config, predicted = predict_decided(
            config_of(workload, ranks, strategy, asked.device), load_cluster(cluster), ranks
        )
        found = emulate(config, predicted, device=comm.device, steps=6)
    except Exception as error:  # the other cases are worth having
        return row | {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    finally:
        clean_up(comm.device)
    if found.problem:
        return row | {"error": found.problem}
    dry, longest = predicted.longest, found.longest
    return row | {
        "compiled": predicted.program.is_compiled,
        "median_ms": 1e3 * found.seconds,
        "exposed_ms": 1e3 * longest.exposed,
        "peak_bytes": longest.allocated_bytes or None,
        "dry_run_ms": 1e3 * predicted.seconds,
        "dry_run_exposed_ms": 1e3 * dry.exposed,
        "dry_run_compute_ms": 1e3 * dry.compute,
        "dry_run_host_ms": 1e3 * dry.launch_wait,
        "dry_run_peak_bytes": predicted.total_memory,
        "off": round(found.off, 4),
        "by_kind": {kind: asdict(each) for kind, each in sorted(longest.traffic.items())},
    }


def config_of(workload: BenchWorkload, ranks: int, strategy: str, device: str) -> Config:
    """Returns the config of a case: what ``paceline train`` would be given."""
    shape = workload.gpt
    fields = ("layers", "heads", "kv_heads", "width", "mlp_width", "norm", "mlp", "positions", "tied", "vocab_size")
    model = {name: getattr(shape, name) for name in fields}
    values = {
        "name": workload.model,
        "model": {"kind": "gpt", "context": workload.context, "dropout": 0.0, "compile": device == "cuda", **model},
        "data": {
            "kind": "synthetic_tokens",
            "vocab_size": shape.vocab_size,
            "context": workload.context,
            "samples": workload.batch * ranks,
            "eval_fraction": 0.0,
        },
        "parallel": {"device": device, "ranks": ranks, "strategy": strategy},
        "train": {
            "steps": 8,
            "global_batch": workload.batch * ranks,
            "precision": "bf16_master" if device == "cuda" else "fp32",
        },
        "optim": {"kind": "adamw", "lr": 1e-4},
    }
    return config_from_dict(values, "bench")
