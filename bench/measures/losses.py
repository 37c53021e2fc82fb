"""Loss curves of fp8 beside bf16, on real text: at equal steps, and at equal time.

Both are ``paceline train`` on one model, one seed and one order of samples: the bytes of torch's own source files, some
45 MB. No sample comes twice in 500 steps, so each loss is that of text which the model has not seen, and nothing is
learned by heart. A loss is the mean of the last steps, because single batches differ more than precisions do. At equal
time: what bf16 had come to when fp8 had made so many steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from paceline.config import config_from_dict, dump_yaml
from paceline_bench.gpu.arms import Tell, run_train
from paceline_bench.gpu.loops import ArmTurn, GpuWorkload

POINTS = 10  # of a curve
_LARGE_VOCABULARY = 1024  # has room for all bytes
_SMOOTHED = 50  # steps
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


def compare_losses(model: str, precisions: Sequence[str], turns: Sequence[ArmTurn]) -> list[dict[str, Any]]:
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


def _loss_at(turn: ArmTurn, step: int) -> float:
    return fmean(turn.losses[max(0, step - _SMOOTHED) : step])


def _text_config(workload: GpuWorkload, folder: Path, steps: int) -> Path:
    """Writes the text and the config of a model that trains on it; a large output layer stays as it is."""
    config = workload.config(workload.config_file(folder), steps)
    values: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    vocabulary = values["model"].pop("vocab_size", None) or values["data"].get("vocab_size") or 0
    if vocabulary >= _LARGE_VOCABULARY:
        values["model"]["vocab_size"] = vocabulary
    text = folder / "text"
    sources = sorted(Path(torch.__file__).parent.rglob("*.py"))
    text.write_bytes(b"\n".join(each.read_bytes() for each in sources))
    values["data"] = {"kind": "text", "tokens": "bytes", "path": str(text)}
    path = folder / "text.yaml"
    path.write_text(dump_yaml(config_from_dict(values)), encoding="utf-8")
    return path
