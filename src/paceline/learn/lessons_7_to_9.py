"""Checks of lessons 7 to 9: pipelines, precision and MFU, and planning a run.

The truth comes from the formulas and schedules of predictions, the catalog of devices, and torch's own rounding.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from paceline.cluster.devices import load_cluster
from paceline.config import config_from_dict
from paceline.errors import UsageError
from paceline.learn.exercise import RIGHT, Said, judge_first, judge_number, says
from paceline.predict.formulas.saving import best_interval, time_between_failures
from paceline.predict.formulas.step import StageSeconds, pipeline_seconds
from paceline.predict.memory.memory import rank_estimates
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Schedule, align, parse_action
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import make_schedule

_PARAMETERS = 6.7e9  # of lessons 8 and 9

# Lesson 7: the bubble of a pipeline, and 1F1B.

_NAME = "yours"
_SIZES = ((2, 4), (4, 8), (4, 3), (3, 7), (5, 2))  # stages and microbatches; two with fewer microbatches than stages


def fewest_microbatches(stages: int, most: float, *, idle_over: Literal["step", "work"] = "step") -> int:
    """Returns the fewest microbatches whose idle time under 1F1B is at most so much of the step, or of the work."""
    each = StageSeconds(1.0, 2.0)
    for microbatches in itertools.count(1):
        step = pipeline_seconds([each] * stages, microbatches)
        work = microbatches * each.both
        if (step - work) / (step if idle_over == "step" else work) <= most + 1e-9:
            return microbatches
    raise AssertionError  # the count has no end


def check_microbatches(answer: float) -> Said:
    stages, most = 8, 0.05
    truth = fewest_microbatches(stages, most)
    mistakes = {
        "of_work": fewest_microbatches(stages, most, idle_over="work"),
        "one_stage_more": fewest_microbatches(stages + 1, most),
        "places": truth + stages - 1,
        "one_less": truth - 1,
    }
    return judge_number(answer, truth, mistakes)


def check_in_flight(peak_in_flight: Callable[[str, int, int, int], Any]) -> Said:
    """Compares with what schedules hold that are walked through."""
    for schedule in ("gpipe", "1f1b"):
        for stages, microbatches in _SIZES:
            held = measure_schedule(make_schedule(schedule, ranks=stages, microbatches=microbatches)).in_flight
            given = [peak_in_flight(schedule, stages, microbatches, rank) for rank in range(stages)]
            if given != list(held):
                call = f"{schedule} with p = {stages}, m = {microbatches}: your ranks 0 to {stages - 1} hold {given}."
                name = _slip_in_flight(schedule, stages, microbatches, given)
                return says(name, call=call, microbatches=microbatches)
    return RIGHT


def _slip_in_flight(schedule: str, stages: int, microbatches: int, given: Sequence[Any]) -> str:
    """Returns the name of what is known about a wrong list of what the ranks hold."""
    if None in given:
        return "none"
    if schedule == "gpipe":
        return "gpipe"
    usual = {
        "too_many": [stages - rank for rank in range(stages)],
        "upside_down": [min(microbatches, rank + 1) for rank in range(stages)],
        "same": [min(microbatches, stages)] * stages,
        "one_less": [min(microbatches, stages - 1 - rank) for rank in range(stages)],
    }
    return next((name for name, held in usual.items() if given == held), "otherwise")


def check_row(one_f_one_b_row: Callable[[int, int, int], Any]) -> Said:
    """Runs the reader's rows: do they run, hold no more than ours, and take no longer?"""
    for stages, microbatches in _SIZES:
        rows = [one_f_one_b_row(stages, microbatches, rank) for rank in range(stages)]
        if said := _rows_wrong(rows, stages, microbatches):
            return says(said.name, stages=stages, microbatches=microbatches, **said.gaps)
    return RIGHT


def _rows_wrong(rows: Sequence[Any], stages: int, microbatches: int) -> Said | None:
    """Says what is wrong with the rows of all ranks; None where nothing is."""
    try:
        schedule = _schedule_of(rows, stages, microbatches)
        check_schedule(schedule)
    except UsageError as error:
        # Actions of check_schedule have the rank too: B1.0 is B0 of rank 1.
        words = str(error).removeprefix(f"schedule {_NAME!r}, ")
        more = "\n  B1.0 is B0 in the row of rank 1" if re.search(r"[FB]\d+\.\d", words) else ""
        return says("broken", problem=words + more)
    theirs = measure_schedule(schedule)
    ours = measure_schedule(make_schedule("1f1b", ranks=stages, microbatches=microbatches))
    for rank, (held, most) in enumerate(zip(theirs.in_flight, ours.in_flight, strict=True)):
        if held > most:
            return says("memory", rank=rank, held=held)
    if theirs.makespan > ours.makespan + 1e-9:
        return says("slow", took=theirs.makespan, best=ours.makespan)
    return None


def _schedule_of(rows: Sequence[Any], stages: int, microbatches: int) -> Schedule:
    """Makes a schedule of the reader's rows, stuck ones too. Raises UsageError for a row that is no list of texts."""
    orders = []
    for rank, row in enumerate(rows):
        if not isinstance(row, list | tuple) or not all(isinstance(each, str) for each in row):
            shown = repr(str(row)[:60])
            raise UsageError(f"the row of rank {rank} is {shown}\n  a row is a list of texts\n  such as ['F0', 'B0']")
        for text in row:
            if text[:1] not in ("F", "B") or not text[1:].isdigit():
                rule = "an action is F or B with the number of a microbatch"
                raise UsageError(f"rank {rank} has {text[:20]!r}\n  {rule}\n  such as 'F0'")
        orders.append([parse_action(f"{text[:1]}{rank}.{text[1:]}") for text in row])
    try:
        return align(_NAME, orders, range(stages), microbatches)
    except KeyError:  # an action that never runs has no time
        placed = tuple(range(stages))
        return Schedule(name=_NAME, rows=tuple(map(tuple, orders)), placement=placed, microbatches=microbatches)


# Lesson 8: MFU, updates that bf16 loses, and the width from which on a product is compute-bound.


def check_mfu(answer: float) -> Said:
    device = load_cluster("1x dgx-h100").device

    def percent(flops: float = 6.0, *, devices: int = 8, dtype: str = "bf16") -> float:
        """Returns the MFU of the exercise's step; ``flops`` are those of a parameter and token."""
        return 100 * flops * _PARAMETERS * 1_048_576 / (12.9 * devices * device.peak(dtype))

    mistakes = {"share": percent() / 100, "forward": percent(2.0), "backward": percent(4.0), "one_flop": percent(3.0)}
    mistakes |= {"recompute": percent(8.0), "one_device": percent(devices=1), "fp8": percent(dtype="fp8")}
    return judge_number(answer, percent(), mistakes, tolerance=0.015)


_WEIGHTS = (1.0, 1.9921875, 0.0546875, 3.0, 300.0, 0.0078125)  # all of them are bf16 numbers
_PARTS = (0.05, 0.1, 0.3, 0.45, 0.55, 0.8, 1.3)  # updates, in distances to the next number


def _distance(weight: float, significant_bits: int = 8) -> float:
    return 2.0 ** (math.floor(math.log2(weight)) - significant_bits + 1)


_CASES = tuple((weight, part * _distance(weight)) for weight in _WEIGHTS for part in _PARTS)


# What usual mistakes answer.
_MOVE_SLIPS: tuple[tuple[Callable[[float, float], bool], str], ...] = (
    (lambda w, u: u >= _distance(w), "whole_distance"),
    (lambda _, u: u > _distance(1.0) / 2, "same_for_all"),
    (lambda w, u: u > w / 256, "share"),
    (lambda w, u: u > w / 128, "share"),
    (lambda w, u: u > _distance(w, 9) / 2, "nine_bits"),
    (lambda w, u: u > _distance(w, 11) / 2, "fp16"),
    (lambda w, u: w + u != w, "float64"),
)


def check_moves(moves: Callable[[float, float], Any]) -> Said:
    """Compares with torch's own rounding, and with what usual mistakes answer."""
    import torch  # here: the other exercises do not need it

    given = [moves(weight, update) for weight, update in _CASES]
    if odd := [each for each in given if each not in (True, False)]:
        return says("no_bool", given=odd[0])
    sums = torch.tensor([weight + update for weight, update in _CASES], dtype=torch.float64).to(torch.bfloat16)
    expected = [rounded != weight for rounded, (weight, _) in zip(sums.tolist(), _CASES, strict=True)]
    if given == expected:
        return RIGHT
    for mistake, name in _MOVE_SLIPS:
        if given == [mistake(*case) for case in _CASES]:
            return says(name)
    index = next(place for place, each in enumerate(given) if each != expected[place])
    (weight, update), said = _CASES[index], given[index]
    return says("otherwise", weight=weight, update=update, given=said, expected=not said)


def check_width(answer: float) -> Said:
    device = load_cluster("1x dgx-h100").device

    def width(num_bytes: float = 4.0, *, flops: float = 2.0, dtype: str = "fp8") -> float:
        """Returns the width at which ``flops`` d^3 at the peak take as long as ``num_bytes`` d^2 from memory."""
        return num_bytes / flops * device.peak(dtype) / device.memory_bandwidth

    mistakes = {"two_bytes": width(6.0), "one_byte": width(3.0), "one_way": width(2.0)}
    mistakes |= {"one_flop": width(flops=1.0), "bf16": width(dtype="bf16"), "twice": width(8.0)}
    return judge_number(answer, width(), mistakes, tolerance=0.015)


# Lesson 9: how long a run takes, which strategy fits, and how often to save.

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
_THIRTEEN = {"size": "gpt-7b", "layers": 40, "heads": 40, "kv_heads": 40, "width": 5120, "mlp_width": 13_824}


def check_days(answer: float) -> Said:
    """Compares with the days by 6 P D; 15 whole days are right."""
    cluster, share, day_s = load_cluster("10x dgx-h100"), 0.4, 86_400

    def days(flops: float = 6.0, *, devices: int = cluster.devices, mfu: float = share) -> float:
        """Returns the days of the exercise's run; ``flops`` are those of a parameter and token."""
        return flops * _PARAMETERS * 1e12 / (devices * cluster.device.peak("bf16") * mfu) / day_s

    mistakes = {"once": days(1.0), "forward": days(2.0), "recompute": days(8.0), "nodes": days(devices=10)}
    mistakes |= {"one_node": days(devices=8), "no_mfu": days(mfu=1.0), "times_mfu": days(mfu=1.0) * share}
    return judge_number(answer, days(), mistakes | {"seconds": days() * day_s, "hours": days() * 24}, tolerance=0.025)


def state_bytes(strategy: str, ranks: int) -> int:
    """Returns the bytes of a rank's parameters, masters, gradients and moments, for 13 billion parameters."""
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "vocab_size": 32_000, **_THIRTEEN},
            "data": {"kind": "synthetic_tokens", "vocab_size": 32_000, "context": 4096},
            "train": {"global_batch": ranks, "precision": "bf16_master", "steps": 1},
            "parallel": {"ranks": ranks, "strategy": strategy, "device": "cuda"},
        },
        "exercise 9.2",
    )
    found = rank_estimates(config)[0]
    return int(found.parameters + found.gradients + found.optimizer)


def check_strategy(answer: str) -> Said:
    cluster = load_cluster("1x dgx-h100")
    needs = {name: state_bytes(name, cluster.devices) / 1e9 for name in STRATEGIES}
    return judge_first(answer, needs, cluster.device.memory_bytes / 1e9)


_SAVES = ((40.0, 1.8e8, 8), (40.0, 1.8e8, 80), (5.0, 1e7, 512), (120.0, 6e7, 16))
_INTERVAL_SLIPS: dict[str, Callable[[float, float, int], float]] = {
    "one_device": lambda save, failure, _: math.sqrt(2 * save * failure),
    "times_devices": lambda save, failure, devices: math.sqrt(2 * save * failure * devices),
    "whole_interval": lambda save, failure, devices: math.sqrt(save * failure / devices),
    "square": lambda save, failure, devices: 2 * save * failure / devices,
    "between_failures": lambda _save, failure, devices: failure / devices,
}


def check_interval(save_every: Callable[[float, float, int], Any]) -> Said:
    """Compares with the best interval, and with what usual mistakes answer."""
    given = [save_every(*case) for case in _SAVES]
    if odd := [each for each in given if isinstance(each, bool) or not isinstance(each, int | float)]:
        return says("no_number", given=odd[0])
    if _are_near(given, [best_interval(save, time_between_failures(each, n)) for save, each, n in _SAVES]):
        return RIGHT
    for name, mistake in _INTERVAL_SLIPS.items():
        if _are_near(given, [mistake(*case) for case in _SAVES]):
            return says(name)
    save, failure, devices = _SAVES[0]
    return says("otherwise", save=save, failure=failure, devices=devices, given=given[0])


def _are_near(given: list[Any], wanted: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(given, wanted, strict=True))


CHECKS = {
    "7.1": check_microbatches,
    "7.2": check_in_flight,
    "7.3": check_row,
    "8.1": check_mfu,
    "8.2": check_moves,
    "8.3": check_width,
    "9.1": check_days,
    "9.2": check_strategy,
    "9.3": check_interval,
}
