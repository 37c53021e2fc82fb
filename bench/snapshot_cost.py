"""Measures what snapshots in memory cost the steps they fall in: ``paceline train`` with one every few steps.

    python bench/snapshot_cost.py configs/gpt_124m.yaml configs/gpt_1b.yaml --output bench/results/snapshots-h200.json
    python bench/snapshot_cost.py configs/gpt_124m.yaml --steps 200 --every 10 train.microbatch=16

Steps of one run are compared with one another: those behind a snapshot, whose copies they wait for; those beside which
it is hashed and kept; and all others. A step's time is the device's, from the end of the step before: what the host
stands still for is in it. The first twenty steps are left out. Where a snapshot takes longer than its interval, the
next one waits: ``steps_between`` says how long. Where the time of one goes tell ``copied_after_s`` (it is on the host),
``written_after_s`` (it is hashed, and in files) and ``kept_after_s`` (other hosts have it).
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from paceline.records.records import EventRecord, StepRecord, read_records
from paceline_bench.timing import BenchRecord

_WARM_UP = 20
# Moments on the way of a snapshot, from when it was begun: all is on the host, in files, and with other hosts.
_UNTIL = {"copied": "copied_seconds", "written": "written_seconds", "kept": "seconds"}


def measure(config: str, overrides: list[str], steps: int, every: int) -> dict[str, Any]:
    """Trains, and returns the row of one config."""
    with tempfile.TemporaryDirectory(prefix="paceline-snapshots-") as folder:
        settings = [f"train.steps={steps}", f"checkpoint.memory.every_steps={every}", "checkpoint.at_end=false"]
        settings += [f"monitor.folder={folder}", "name=run", "monitor.keep_steps=all", "monitor.tensorboard=false"]
        command = [sys.executable, "-m", "paceline", "train", config, *settings, *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = list(read_records(Path(folder) / "run" / "records" / "rank-0.jsonl"))
    events = [each for each in found if isinstance(each, EventRecord)]
    refused = [str(each.detail["reason"]) for each in events if each.name == "no_snapshots"]
    kept = {each.step: each.detail for each in events if each.name == "snapshot" and each.step >= _WARM_UP}
    times = {each.step: (each.step_s, each.time) for each in found if isinstance(each, StepRecord)}
    if refused or not kept:
        raise SystemExit(f"{config}: no snapshot was kept: {'; '.join(refused) or 'the run was too short'}")
    behind = {step + 1 for step in kept} & times.keys()
    # From the copy on, until the snapshot was kept, as far as that took whole steps.
    beside = {
        step
        for first, detail in kept.items()
        for step, (_, time) in times.items()
        if step > first + 1 and time - times[first][1] < float(detail["seconds"])
    } - behind
    alone = {step for step in times if step > _WARM_UP} - behind - beside
    base = median(times[step][0] for step in alone or beside)
    order = sorted(kept)

    def share(steps_of: set[int]) -> float | None:
        return round(median(times[step][0] for step in steps_of) / base - 1.0, 5) if steps_of else None

    return {
        "config": config,
        "every_steps": every,
        "snapshots": len(kept),
        "steps_between": median(b - a for a, b in itertools.pairwise(order)) if len(order) > 1 else None,
        "bytes": max(int(each["bytes"]) for each in kept.values()),
        "step_s": round(base, 6),
        "steps_alone": len(alone),
        "blocked_share": share(behind),
        "beside_share": share(beside),
        "host_and_wait_s": round(median(float(each["stall_seconds"]) for each in kept.values()), 6),
        **{f"{name}_after_s": median(float(each[key]) for each in kept.values()) for name, key in _UNTIL.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what snapshots in memory cost.")
    parser.add_argument("configs", nargs="+", help="configs, and settings for all of them: key=value")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    overrides = [each for each in asked.configs if "=" in each]
    rows = []
    for config in asked.configs:
        if config not in overrides:
            rows.append(measure(config, overrides, asked.steps, asked.every))
            print(rows[-1], flush=True)
    settings = {"steps": asked.steps, "every": asked.every, "overrides": overrides}
    command = shlex.join(["python", *sys.argv])
    record = BenchRecord(name="cost of snapshots", command=command, rows=rows, config=settings)
    if asked.output is not None:
        record.write(asked.output)


if __name__ == "__main__":
    main()
