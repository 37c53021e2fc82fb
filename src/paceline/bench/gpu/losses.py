"""Loss curves of fp8 beside bf16, on real text: at equal steps, and at equal time.

Both are ``paceline train`` on one model, one seed and one order of samples of Python's own documentation. A loss is the
mean of the last few steps, because single batches differ more than precisions do. At equal time: what bf16 had come to
when fp8 had made so many steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.bench.gpu.arms import Tell, run_train
from paceline.bench.gpu.process import Turn
from paceline.bench.gpu.workloads import GpuWorkload
from paceline.config import config_from_dict, dump_yaml

POINTS = 10  # of a curve
_LARGE_VOCABULARY = 1024  # has room for the characters of any text
_SMOOTHED = 10  # steps
_WARM_UP = 50  # steps at most in which the rate rises: without them large models do not train


def bench_losses(workload: GpuWorkload, steps: int, precisions: Sequence[str], tell: Tell) -> list[dict[str, Any]]:
    """Trains a model in both precisions; returns a row for each tenth of the steps. The first is what is compared with.

    Raises LaunchError where a run fails.
    """
    turns = []
    with tempfile.TemporaryDirectory() as scratch:
        file = _text_config(workload, Path(scratch), steps)
        for precision in precisions:
            folder = Path(scratch) / precision
            folder.mkdir()
            warm_up = min(_WARM_UP, steps // 4)
            overrides = [*workload.overrides(steps, precision=precision), f"optim.schedule.warmup={warm_up}"]
            turns.append(run_train(workload, file, folder, overrides))
            tell(f"  {precision}: loss {_loss_at(turns[-1], steps):.4f} after {steps} steps")
    return compare_losses(workload.model, precisions, turns)


def compare_losses(model: str, precisions: Sequence[str], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Returns the rows of two curves: ``first`` is what the second is compared with."""
    first, second = turns
    # The first step compiles: it says nothing of how fast either is.
    first_at, second_at = (list(accumulate([0.0, *turn.step_s[1:]])) for turn in turns)
    steps = min(len(first.losses), len(second.losses))
    rows = []
    for number in range(1, POINTS + 1):
        step = max(1, steps * number // POINTS)
        seconds = second_at[step - 1]
        then = max(1, sum(each <= seconds for each in first_at))
        ours, theirs, at_that_time = _loss_at(second, step), _loss_at(first, step), _loss_at(first, then)
        rows.append(
            {
                "part": "losses",
                "model": model,
                "precision": precisions[1],
                "other": precisions[0],
                "step": step,
                "loss": round(ours, 5),
                "other_loss": round(theirs, 5),
                "difference": round(ours / theirs - 1, 5),
                "seconds": round(seconds, 3),
                "other_step_then": then,
                "other_loss_then": round(at_that_time, 5),
                "difference_then": round(ours / at_that_time - 1, 5),
            }
        )
    return rows


def _loss_at(turn: Turn, step: int) -> float:
    return fmean(turn.losses[max(0, step - _SMOOTHED) : step])


def _text_config(workload: GpuWorkload, folder: Path, steps: int) -> Path:
    """Writes the config of a model with Python's documentation as its data; a large output layer stays as it is."""
    config = workload.config(workload.config_file(folder), steps)
    values: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    vocabulary = values["model"].pop("vocab_size", None) or values["data"].get("vocab_size") or 0
    if vocabulary >= _LARGE_VOCABULARY:
        values["model"]["vocab_size"] = vocabulary
    values["data"] = {"kind": "text", "tokens": "char"}
    path = folder / "text.yaml"
    path.write_text(dump_yaml(config_from_dict(values)), encoding="utf-8")
    return path
