"""Turns of the GPU benchmark's arms, each in a process of its own; and rows of what they measured.

A row has medians over rounds, and the ratio within each round. The second start of an arm finds what the first compiled
in torch's cache on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paceline.cluster.devices import Peaks, find_peaks
from paceline.data.registry import data_of
from paceline.errors import LaunchError, PacelineError
from paceline.models.registry import build_model
from paceline.records.summary import read_run
from paceline.train.resolve import sample_flops
from paceline.untrusted import parse_json_object, read_regular
from paceline_bench.gpu.loops import ARMS, TRAIN, ArmTurn, GpuArm, GpuWorkload
from paceline_bench.timing import rotate

_PROCESS = "paceline_bench.gpu.loops"
_TIMEOUT_S = 1200.0
_LONGEST = 200  # characters of a reason

Tell = Callable[[str], None]


def arms_of(workload: GpuWorkload) -> list[GpuArm]:
    """Returns the arms of a model, the loops of others first."""
    return [each for each in ARMS if each.kind in workload.kinds]


def select_arms(workload: GpuWorkload, wanted: Sequence[str]) -> list[GpuArm]:
    """Returns the arms whose name contains one of the words, and the plain loops; all without words."""
    arms = arms_of(workload)
    found = [each for each in arms if not wanted or any(word in each.name for word in wanted)]
    return found if any(each.is_plain for each in found) else [*(each for each in arms if each.is_plain), *found]


def bench_gpu(
    workload: GpuWorkload, rounds: int, steps: int | None, wanted: Sequence[str], tell: Tell
) -> list[dict[str, Any]]:
    """Lets the arms of a model take turns; returns a row for each, those that could not run with the reason."""
    asked = replace(workload, steps=steps or workload.steps)
    arms = {arm.name: arm for arm in select_arms(asked, wanted)}
    turns: dict[str, list[ArmTurn]] = {name: [] for name in arms}
    failed = {name: arm.missing for name, arm in arms.items() if arm.missing}
    with tempfile.TemporaryDirectory() as scratch:
        file = asked.config_file(Path(scratch))
        for number, name in enumerate(rotate(list(arms), rounds)):
            if name in failed:
                continue
            try:
                found = _take_turn(arms[name], asked, file, Path(scratch) / str(number))
            except (PacelineError, OSError, ValueError, subprocess.TimeoutExpired) as error:
                failed[name] = " ".join(str(error).split())[:_LONGEST]
                tell(f"  {name}: {failed[name]}")
                continue
            turns[name].append(found)
            step_ms = 1e3 * found.median_s(asked.warm_up)
            tell(f"  {name}: {step_ms:.2f} ms a step, the first after {found.first_step_s:.1f} s")
        flops = _flops_of(asked, file)
    return make_rows(asked, list(arms.values()), turns, failed, flops)


def _take_turn(arm: GpuArm, workload: GpuWorkload, file: Path, folder: Path) -> ArmTurn:
    """Runs an arm in a process of its own; returns what it measured. Raises LaunchError where it failed."""
    folder.mkdir()
    started, steps = time.time(), workload.warm_up + workload.steps
    if arm.name.startswith(TRAIN):
        turn = run_train(workload, file, folder, workload.overrides(steps, precision=arm.precision))
        return replace(turn, started_at=started)
    asked, output = [arm.name, workload.model, workload.device, str(file), steps], folder / "output.json"
    command = [sys.executable, "-m", _PROCESS, json.dumps(asked), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    found = parse_json_object(read_regular(output)) if output.is_file() else {}
    if "error" in found or not found:
        raise LaunchError(
            found.get("error") or f"it left with exit code {done.returncode}: {done.stderr.strip()[-200:]}"
        )
    return replace(ArmTurn(**found), started_at=started)


def run_train(workload: GpuWorkload, file: Path, folder: Path, overrides: Sequence[str]) -> ArmTurn:
    """Runs ``paceline train`` as a user does, and reads its records."""
    words = [*overrides, "name=bench", f"monitor.folder={folder}"]
    command = [sys.executable, "-m", "paceline", "train", str(file), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise LaunchError(
            f"{' '.join(command[2:5])} left with exit code {done.returncode}: {done.stderr.strip()[:300]}"
        )
    attempt = read_run(folder / "bench")[0][-1]
    steps = attempt.steps
    peak = max(each.memory_bytes for each in steps)
    return ArmTurn(
        step_s=[each.step_s for each in steps],
        losses=[float("nan") if each.loss is None else each.loss for each in steps],
        peak_bytes=peak if workload.device == "cuda" else None,
        first_step_at=steps[0].time,
        samples=attempt.run.global_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one sample is: model FLOPs, forward and backward, and its tokens or images; and the device's peaks."""

    flops: float | None
    items: int
    peaks: Peaks


def _flops_of(workload: GpuWorkload, file: Path) -> StepWork:
    """Counts the model's FLOPs. MFU of all arms is of the bf16 peak, so that fp8 and bf16 compare."""
    config = workload.config(file, 1)
    data = data_of(config)
    with torch.device("meta"):
        model = build_model(config.model, data.shape)
    on_gpu = workload.device == "cuda" and torch.cuda.is_available()
    peaks = find_peaks(torch.cuda.get_device_name(), "bf16") if on_gpu else Peaks()
    items = (data.shape.context or 1) if workload.unit == "tokens" else 1
    return StepWork(flops=sample_flops(config, data, model), items=items, peaks=peaks)


def make_rows(
    workload: GpuWorkload,
    arms: Sequence[GpuArm],
    turns: dict[str, list[ArmTurn]],
    failed: dict[str, str],
    work: StepWork,
) -> list[dict[str, Any]]:
    """Returns a row for each arm: its ratio to the best plain loop in the same round, below 1 is faster."""
    plain = [arm.name for arm in arms if arm.is_plain and arm.name not in failed]
    theirs = [arm.name for arm in arms if arm.is_fp8 and not arm.name.startswith("paceline") and arm.name not in failed]
    times = {name: [turn.median_s(workload.warm_up) for turn in own] for name, own in turns.items()}
    best, best_fp8 = (min(names, key=lambda name: median(times[name]), default="") for names in (plain, theirs))
    rows = []
    for arm in arms:
        row: dict[str, Any] = {"model": workload.model, "arm": arm.name, "is_plain": arm.is_plain}
        if arm.name in failed:
            rows.append(row | {"error": failed[arm.name]})
            continue
        row |= _figures(workload, turns[arm.name], times[arm.name], work)
        row |= {"peer": best, "ratio": _ratio(times[arm.name], times.get(best, []))}
        if arm.is_fp8 and best_fp8:
            row |= {"fp8_peer": best_fp8, "fp8_ratio": _ratio(times[arm.name], times[best_fp8])}
        rows.append(row)
    return rows


def _figures(workload: GpuWorkload, turns: Sequence[ArmTurn], times: Sequence[float], work: StepWork) -> dict[str, Any]:
    seconds, samples = median(times), turns[0].samples
    rate = None if work.flops is None else work.flops * samples / seconds
    return {
        "step_ms": round(1e3 * seconds, 3),
        "rounds_ms": [round(1e3 * each, 3) for each in times],
        f"{workload.unit}_per_s": round(work.items * samples / seconds, 1),
        "tflops": None if rate is None else round(rate / 1e12, 2),
        "mfu": _share(rate, work.peaks.sheet),
        "mfu_measured": _share(rate, work.peaks.measured),
        "peak_bytes": max((turn.peak_bytes for turn in turns if turn.peak_bytes is not None), default=None),
        "first_step_s": round(turns[0].first_step_s, 2),
        "second_start_s": round(turns[-1].first_step_s, 2) if len(turns) > 1 else None,
        "loss": round(turns[-1].losses[-1], 5),
        "loss_step": workload.warm_up + workload.steps,
        "batch": samples,
        "context": work.items if workload.unit == "tokens" else None,
        "num_steps": workload.steps,
    }


def _share(rate: float | None, peak: float | None) -> float | None:
    return None if rate is None or not peak else round(rate / peak, 4)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    found = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    return round(median(found), 4) if found else None
