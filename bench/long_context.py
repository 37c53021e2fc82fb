"""Long sequences on one GPU through ``paceline train``: each run's step and memory, beside what was predicted of it.

    python bench/long_context.py --list                      # the cases by value, and about how long each takes
    python bench/long_context.py                             # as many as fit into --budget seconds
    python bench/long_context.py --append                    # and once more: those that the record does not have
    python bench/long_context.py --append --cases limit-1b   # by name or group, whether the record has them or not

Each case is a run of ``configs/gpt_1b.yaml`` in a process of its own, one sample a step. Its row has what
``prediction.json`` said before the start, by formula; the median step but for the first, which compiles; the most bytes
that tensors took, and that the allocator kept; and its ratio to its peer. Where a case changes nothing that is computed
(inputs on the host), losses are compared to the bit with those of the peer.

Cases of a limit take the longest sequence that is predicted to need 96 % of the device's memory, and the shortest that
is predicted to need 104 %. The second must be refused; then it is started all the same, and has to run out of memory.

The record is written after each case, so that a run that is cut off keeps what it has. A case for which too little of
the budget is left is skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.calibrate.kernels import Shapes, attention_rates
from paceline.calibrate.timing import Stopwatch
from paceline.config import Config, layout_of, load_config
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.units import GIB
from paceline_bench.timing import BenchRecord
from warm_runs import found_in, with_errors

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "gpt_1b.yaml"
EAGER = "model.compile=false"
FULL = "memory.checkpoint_activations=full"
OFFLOAD, TILES = "memory.offload=[activations]", "memory.mlp_tiles=auto"
UNDER, OVER = 0.96, 1.04  # of the device's memory
START_S = 45.0  # a process, compiling, and its end
START_EAGER_S = 14.0
LENGTHS = [(1, 16, 8192, 128), (1, 16, 32_768, 128), (1, 16, 131_072, 128), (1, 24, 65_536, 128)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. ``share``: tokens follow from this share of the device's memory. ``about_s``: a step, for the budget."""

    name: str
    group: str
    about_s: float
    tokens: int = 0
    settings: tuple[str, ...] = ()
    steps: int = 3
    peer: str = ""
    same_losses: bool = False
    share: float = 0.0

    @property
    def whole_s(self) -> float:
        start = START_EAGER_S if EAGER in self.settings else START_S
        return start + self.steps * self.about_s + (START_EAGER_S if self.share > 1 else 0)


def around(name: str, group: str, about_s: float, *settings: str) -> tuple[Case, Case]:
    """Returns a pair around the limit: a run that fits, and one that does not."""
    fits = Case(name=f"{name}-fits", group=group, about_s=about_s, settings=settings, steps=2, share=UNDER)
    beyond = Case(name=f"{name}-beyond", group=group, about_s=about_s, settings=settings, steps=2, share=OVER)
    return fits, beyond


B3, B7 = "model.size=gpt-3b", "model.size=gpt-7b"
CASES = (
    Case(name="131k-full", group="main", tokens=131_072, about_s=13.3, settings=(FULL,)),
    Case(
        name="131k-offload",
        group="main",
        tokens=131_072,
        about_s=13.5,
        settings=(FULL, OFFLOAD),
        peer="131k-full",
        same_losses=True,
    ),
    Case(name="131k-tiles", group="main", tokens=131_072, about_s=13.6, settings=(FULL, TILES), peer="131k-full"),
    Case(name="65k-none", group="main", tokens=65_536, about_s=3.0),
    Case(name="65k-full", group="main", tokens=65_536, about_s=3.8, settings=(FULL,)),
    Case(name="32k-none", group="main", tokens=32_768, about_s=1.0),
    Case(name="262k-auto", group="more", tokens=262_144, about_s=46.0, settings=("memory=auto",), steps=2),
    Case(name="262k-full", group="more", tokens=262_144, about_s=51.0, settings=(FULL,), steps=2),
    Case(name="3b-131k-full", group="more", tokens=131_072, about_s=30.0, settings=(FULL, B3), steps=2),
    Case(name="65k-tiles", group="more", tokens=65_536, about_s=3.2, settings=(TILES,), peer="65k-none"),
    Case(
        name="65k-matmuls",
        group="more",
        tokens=65_536,
        about_s=3.1,
        settings=("memory.checkpoint_activations=matmuls",),
        peer="65k-none",
    ),
    Case(name="3b-262k-full", group="3b", tokens=262_144, about_s=110.0, settings=(FULL, B3), steps=1),
    Case(name="524k-full", group="524k", tokens=524_288, about_s=200.0, settings=(FULL,), steps=2),
    # A step of 13 minutes: for a shell without a limit. The other has half of the blocks.
    Case(name="1m", group="1m", tokens=1_048_576, about_s=780.0, settings=(FULL, OFFLOAD, TILES), steps=1),
    Case(
        name="1m-half",
        group="1m-half",
        tokens=1_048_576,
        about_s=392.0,
        settings=(FULL, OFFLOAD, TILES, "model.layers=10"),
        steps=1,
    ),
    *around("1b-eager", "limit-eager", 4.0, EAGER),
    *around("3b-eager", "limit-eager", 2.0, EAGER, B3),
    *around("7b-eager", "limit-eager", 1.0, EAGER, B7),
    *around("1b-eager-matmuls", "limit-eager", 8.0, EAGER, "memory.checkpoint_activations=matmuls"),
    *around("7b-eager-matmuls", "limit-eager", 2.0, EAGER, B7, "memory.checkpoint_activations=matmuls"),
    *around("1b-none", "limit-1b", 5.5),
    *around("1b-matmuls", "limit-1b", 10.0, "memory.checkpoint_activations=matmuls"),
    *around("1b-tiles", "limit-1b", 22.0, TILES),
    *around("3b-none", "limit-large", 2.5, B3),
    *around("3b-tiles", "limit-large", 8.0, B3, TILES),
    *around("7b-none", "limit-large", 1.0, B7),
)


def overrides(case: Case, tokens: int, folder: str = "runs") -> list[str]:
    return [
        *("train.global_batch=1", f"train.steps={case.steps}", "checkpoint.at_end=false", "optim.schedule.warmup=0"),
        *(f"model.context={tokens}", f"data.context={tokens}", f"data.samples={max(2, case.steps)}"),
        *("parallel.device=cuda", "parallel.ranks=1", f"monitor.folder={folder}", f"name={case.name}"),
        "recovery.max_restarts=0",
        *case.settings,
    ]


def need_of(case: Case, tokens: int) -> float:
    """Returns the bytes that a run is predicted to need of the device; 0 where it decides itself what it does."""
    config: Config = load_config(CONFIG, overrides(case, tokens))
    if config.is_open:
        return 0.0
    model = describe_model(config, "cuda")
    assert model is not None
    return estimate_memory(model, layout_of(config, 1), StateFacts.of(config, "cuda")).device_bytes


def tokens_for(case: Case, has: float) -> int:
    """Returns the most tokens, a multiple of 1,024, that stay below a share of the memory; above it, the fewest."""
    step, low, high = 1024, 1, 4096
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need_of(case, middle * step) <= case.share * has else (low, middle)
    return step * (low if case.share < 1 else high)


def train(case: Case, tokens: int, folder: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "train", str(CONFIG), *overrides(case, tokens, folder), "--quiet"]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


def run(case: Case, has: float) -> dict[str, Any]:
    tokens = case.tokens or tokens_for(case, has)
    started, options = time.time(), list[str]()
    row: dict[str, Any] = {"case": case.name, "group": case.group, "tokens": tokens, "settings": list(case.settings)}
    row["needs_gib"], row["has_gib"] = round(need_of(case, tokens) / GIB, 2), round(has / GIB, 2)
    with tempfile.TemporaryDirectory() as folder:
        if case.share > 1:
            asked = train(case, tokens, folder)
            row["refused"] = asked.returncode != 0 and "out of memory" in asked.stderr + asked.stdout
            options = ["--no-memory-check", "--force"]
        done = train(case, tokens, folder, *options)
        row["ran"] = done.returncode == 0
        row = with_errors(row | found_in(Path(folder) / case.name))
        if done.returncode:
            row["error"] = (done.stderr or done.stdout)[-600:]
    row["took_s"] = round(time.time() - started, 1)
    return row


def time_attention() -> dict[str, Any]:
    """Times causal attention alone, at lengths that ``paceline calibrate`` does not wait for."""
    shapes = Shapes(products={}, attention=tuple(LENGTHS), stream_bytes=0)
    rates = attention_rates(torch.device("cuda"), shapes, Stopwatch(most_s=1.0, finish=torch.cuda.synchronize))
    return {"case": "attention", "group": "attention", "rates": [asdict(each) for each in rates]}


def compared(rows: list[dict[str, Any]]) -> None:
    """Adds to rows what they are beside their peers."""
    by_name = {row["case"]: row for row in rows}
    for case in CASES:
        row, peer = by_name.get(case.name), by_name.get(case.peer)
        if row and peer and "step_s" in row and "step_s" in peer:
            row["ratio"] = round(row["step_s"] / peer["step_s"], 4)
            if case.same_losses:
                row["same_losses"] = row["losses"] == peer["losses"]


def chosen(names: list[str], done: set[str]) -> Iterator[tuple[str, float, Callable[[float], dict[str, Any]]]]:
    """Iterates over cases by value, those that are named or all that are not done: name, seconds, and how to run it."""

    def is_asked(name: str, group: str) -> bool:
        return bool({name, group} & set(names)) if names else name not in done

    if is_asked("attention", "attention"):
        yield "attention", 25.0, lambda _: time_attention()
    for case in CASES:
        if is_asked(case.name, case.group):
            yield case.name, case.whole_s, partial(run, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[], help="names or groups; else all that fit into the budget")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/long-context-h200.json")
    parser.add_argument("--append", action="store_true", help="keep the rows of the record that this run does not make")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    if asked.list:
        for case in CASES:
            print(f"{case.name:<20} {case.group:<12} {case.whole_s:6.0f} s  {' '.join(case.settings)}")
        return
    has = float(torch.cuda.get_device_properties(0).total_memory)
    rows = json.loads(asked.output.read_text())["rows"] if asked.append and asked.output.exists() else []
    ends = time.time() + asked.budget
    for name, seconds, work in chosen(asked.cases, {row["case"] for row in rows}):
        if time.time() + seconds > ends:
            print(f"{name}: skipped, {ends - time.time():.0f} s are left of the budget, and it takes {seconds:.0f} s")
            continue
        row = work(has)
        rows = [each for each in rows if each["case"] != name] + [row]
        compared(rows)
        command = " ".join(["python", "bench/long_context.py", *sys.argv[1:]])
        config = {"config": f"configs/{CONFIG.name}", "device": torch.cuda.get_device_name()}
        BenchRecord(name="long-context", command=command, rows=rows, config=config).write(asked.output)
        print({key: value for key, value in row.items() if key != "losses"}, flush=True)


if __name__ == "__main__":
    main()
