"""Feeds the readers of checkpoints, weights, records, configs and messages with damaged and hostile input.

    python scripts/fuzz.py --output bench/results/fuzz-cpu.json         # 10,000 inputs: minutes; with a record
    python scripts/fuzz.py --seed 7 --inputs 500 --only manifests
    python scripts/fuzz.py --seed 7 --only manifests --number 1234      # one input again, its folder is kept

No input may run code, write outside of its folder, take more than 5 s or 1 GiB, or end in a traceback. The input
``number`` of a target and seed is always the same one. ``tests/pool/fuzz_targets.py`` lists the targets.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "pool"))

from fuzz_guard import verdict_of
from fuzz_targets import TARGETS, Target, remove_template

from paceline_bench.timing import BenchRecord


def fuzz(target: Target, seed: int, numbers: range, home: Path, *, keeps: bool = False) -> list[str]:
    """Runs inputs of a target, each in a folder of its own below ``home``; returns what went wrong, in words."""
    problems = []
    for number in numbers:
        folder = home / f"{target.name.replace(' ', '-')}-{number}" / "work"
        folder.mkdir(parents=True)
        run = target.case(random.Random(f"{seed} {target.name} {number}"), folder)
        verdict = verdict_of(run, folder)
        left = [path.name for path in folder.parent.iterdir() if path != folder]
        verdict += f"\nleft beside its folder: {left}" if left else ""
        if verdict:
            problems.append(f"{target.name}, seed {seed}, number {number}:\n{verdict}")
        if not keeps:
            shutil.rmtree(folder.parent)
    return problems


def main() -> int:
    """Runs the targets, shows a line for each, and returns 1 where an input did what it must not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a part of a target's name")
    parser.add_argument("--number", type=int, help="this input alone; its folder is kept")
    parser.add_argument("--output", type=Path, help="the record: a row for each target")
    asked = parser.parse_args()
    chosen = [target for target in TARGETS if asked.only is None or asked.only in target.name]
    total, home, problems = sum(target.weight for target in chosen), Path(tempfile.mkdtemp(prefix="fuzz-")), []
    rows: list[dict[str, Any]] = []
    for target in chosen:
        count = -(-asked.inputs * target.weight // total)
        numbers = range(count) if asked.number is None else range(asked.number, asked.number + 1)
        start = time.perf_counter()
        found = fuzz(target, asked.seed, numbers, home, keeps=asked.number is not None)
        problems += found
        seconds = round(time.perf_counter() - start, 1)
        rows.append({"target": target.name, "inputs": len(numbers), "bad": len(found), "seconds": seconds})
        print(f"{target.name:<22}{len(numbers):>6} inputs  {len(found):>4} bad  {seconds:>6.1f} s", flush=True)
    print("\n\n".join(problems[:20]), file=sys.stderr)
    remove_template()
    if asked.number is None:
        shutil.rmtree(home)
    else:
        print(f"kept in {home}")
    if asked.output is not None:
        words = ["python", "scripts/fuzz.py", *sys.argv[1:]]
        config = {"seed": asked.seed, "inputs": sum(row["inputs"] for row in rows)}
        BenchRecord(name="fuzz", command=" ".join(words), rows=rows, config=config).write(asked.output)
        print(f"the record is {asked.output}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
