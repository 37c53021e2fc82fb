"""Fits the constants of the prediction on rows of the split ``calib``: bench/fit_constants.py FILE.csv [--write].

One set for each generation of devices and class of frameworks that such rows reach. What is made small is the mean over
families of the mean absolute logarithm of predicted over measured, so that twice and half weigh the same, plus a pull
towards the starting values that keeps what few rows tell apart from running away. The search goes along one constant
at a time with steps that shrink: no random numbers, so that the same rows give the same file.

Rows of other splits are never looked at here. Memory has no fitted constants.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.planner.constants import Constants, ConstantSets, format_constants
from paceline.planner.predict import in_metric, predict_case
from paceline.planner.published import Case, read_case, read_table

START = Constants()
BOUNDS = {
    "matmul": (0.4, 0.92),
    "k_half": (16.0, 1500.0),
    "attention": (0.1, 0.8),
    "attention_half": (16.0, 4000.0),
    "traffic": (0.4, 3.0),
    "launch_us": (2.0, 80.0),
    "contention": (0.0, 0.5),
    "slowdown": (1.0, 2.0),
    "eight_bit": (0.4, 1.2),
    "convolution": (0.1, 1.0),
}
PULL = 0.003
PULL_OF_A_ROW = 0.06  # few rows tell little: they move the constants less
TARGET = Path(__file__).parents[1] / "src/paceline/planner/fitted_constants.yaml"


@dataclass(frozen=True)
class Known:
    family: str
    case: Case
    measured: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    parser.add_argument("--only", default="", help="generation/framework to fit; the others are kept as they are")
    arguments = parser.parse_args()
    groups = calibration_rows(arguments.file)
    sets: dict[tuple[str, str], Constants] = {}
    if arguments.only:
        from paceline.planner.constants import fitted_constants

        sets = dict(fitted_constants())
    for key in sorted(groups):
        if arguments.only and "/".join(key) != arguments.only:
            continue
        sets[key], error = fit(key, groups[key])
        print(f"{key[0]}/{key[1]}: {len(groups[key])} rows, {100 * error:.1f} % mean over families", flush=True)
    text = HEADER + format_constants(sets)
    print(text)
    if arguments.write:
        TARGET.write_text(text)


HEADER = """# Written by bench/fit_constants.py from rows of the split calib: do not edit.
# Shares of the catalog's figures, and times in microseconds: see planner/constants.py.
"""


def calibration_rows(file: Path) -> dict[tuple[str, str], list[Known]]:
    """Reads the rows that constants may be fitted on, by generation and framework."""
    table = read_table(file).of_split("calib")
    groups: dict[tuple[str, str], list[Known]] = defaultdict(list)
    for row, measured in zip(table.rows, table.measured, strict=True):
        if row.metric == "mem_gib":
            continue
        case = read_case(row)
        key = (case.cluster.device.generation, case.workload.run.framework)
        groups[key].append(Known(row.family, case, float(measured)))
    return groups


def fit(key: tuple[str, str], rows: list[Known]) -> tuple[Constants, float]:
    """Searches along one constant at a time."""
    best, least = START, objective(key, START, rows)
    step = 0.4
    while step > 0.02:
        improved = False
        for name in BOUNDS:
            for direction in (1, -1):
                trial = moved(best, name, direction * step)
                value = objective(key, trial, rows)
                if value < least - 1e-6:
                    best, least, improved = trial, value, True
                    break
        if not improved:
            step /= 2
    return best, error_of({key: best}, rows)


def moved(constants: Constants, name: str, by: float) -> Constants:
    low, high = BOUNDS[name]
    value = getattr(constants, name)
    value = value + by * 0.5 if low == 0 else value * math.exp(by)
    return replace(constants, **{name: min(high, max(low, value))})


def objective(key: tuple[str, str], constants: Constants, rows: list[Known]) -> float:
    return error_of({key: constants}, rows) + (PULL + PULL_OF_A_ROW / len(rows)) * distance(constants)


def distance(constants: Constants) -> float:
    total = 0.0
    for name, (low, _) in BOUNDS.items():
        value, start = getattr(constants, name), getattr(START, name)
        total += (value - start) ** 2 * 4 if low == 0 else math.log(value / start) ** 2
    return total


def error_of(sets: ConstantSets, rows: list[Known]) -> float:
    """The mean over families of the mean absolute logarithm of predicted over measured."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        predicted = in_metric(row.case, predict_case(row.case, sets))
        errors[row.family].append(abs(math.log(predicted / row.measured)))
    return sum(sum(each) / len(each) for each in errors.values()) / len(errors)


if __name__ == "__main__":
    main()
