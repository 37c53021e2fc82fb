"""Fits the constants of the prediction on rows of the split ``calib``: bench/fit_constants.py FILE.csv [--write].

One set for each generation of devices and class of frameworks that such rows reach. What is made small is the mean over
families, weighed by the root of their rows, of the logarithm of predicted over measured, so that twice and half weigh
the same; near zero it is rounded, so that the search does not stick in a corner. A pull towards a prior keeps what few
rows tell apart from running away: the prior of a set is the set of the same framework on the generation that has the
most rows, and for that one the defaults. The search goes along one constant at a time, where that does not help along
two at once, and then on in the direction that helped, with steps that shrink: no random numbers, so that the same rows
give the same file. When the constants of a set stand, what its rows say of single shapes of blocks is found beside them
(bench/fit_blocks.py). Some five minutes.

    --check [SOURCE ...]   instead of writing, leave out each source of rows in turn (family and GPU; where some are
                           named those alone: mpt, or mpt:A100), fit its set anew, and score it; others stay

Rows of other splits are never looked at here. Memory has no fitted constants.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from fit_blocks import Key, Known, with_blocks
from fitted_text import domain_of, format_blocks, format_constants, format_domain
from paceline.plan.workload import Workload
from paceline.predict.formulas.constants import (
    DEVICE_FIELDS,
    Constants,
    ConstantSets,
    Domain,
    fitted_constants,
    kind_of,
    mean_of,
)
from paceline_bench.scored.measured_table import read_table
from paceline_bench.scored.published import in_metric, predict_case, read_case

START = Constants()
BOUNDS = {
    "matmul": (0.4, 0.98),
    "k_half": (16.0, 1500.0),
    "attention": (0.1, 0.8),
    "attention_half": (16.0, 4000.0),
    "traffic": (0.4, 3.0),
    "launch_us": (2.0, 80.0),
    "contention": (0.0, 1.0),
    "slowdown": (1.0, 1.4),
    "eight_bit": (0.4, 1.2),
    "convolution": (0.1, 1.1),
    "convolution_wide": (0.1, 1.1),
}
PULL = 0.003
PULL_OF_A_ROW = 0.06  # few rows tell little: they move the constants less
ROUNDED = 0.02  # errors below this weigh less and less
TARGET = Path(__file__).parents[1] / "src/paceline/predict/formulas/fitted_constants.yaml"
DOMAIN = TARGET.with_name("calibrated_domain.yaml")
BLOCKS = TARGET.with_name("measured_blocks.csv")

Groups = dict[Key, list[Known]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}, {BLOCKS.name}, {DOMAIN.name}")
    parser.add_argument("--check", nargs="*", metavar="SOURCE", help="score each source with constants of the others")
    arguments = parser.parse_args()
    groups = calibration_rows(arguments.file)
    if arguments.check is not None:
        check(groups, arguments.check)
        return
    sets = fit_all(groups)
    for key in sorted(groups):
        error = error_of(sets, groups[key], rounded=0.0)
        print(f"{key[0]}/{key[1]}: {len(groups[key])} rows, {100 * error:.1f} % mean over families", flush=True)
    text = HEADER + format_constants(sets)
    print(text)
    if arguments.write:
        TARGET.write_text(text)
        BLOCKS.write_text(HEADER.splitlines()[0] + "\n" + format_blocks({key: sets[key].blocks for key in groups}))
        DOMAIN.write_text(HEADER.splitlines()[0] + "\n" + format_domain(covered(groups)))


HEADER = """# Written by bench/fit_constants.py from rows of the split calib: do not edit.
# Shares of the catalog's figures, and times in microseconds: see predict/formulas/constants.py.
"""


def calibration_rows(file: Path) -> Groups:
    """Reads the rows that constants may be fitted on, by generation and framework."""
    table = read_table(file).of_split("calib")
    groups: Groups = defaultdict(list)
    for row, measured in zip(table.rows, table.measured, strict=True):
        if row.metric == "mem_gib":
            continue
        case = read_case(row)
        key = (case.cluster.device.generation, case.workload.run.framework)
        groups[key].append(Known(row.family, row.text["gpu"], case, float(measured)))
    return groups


def covered(groups: Groups) -> dict[tuple[str, str, str], Domain]:
    """Returns what the rows cover, by generation, framework and kind of model."""
    workloads: dict[tuple[str, str, str], list[Workload]] = defaultdict(list)
    for key, rows in groups.items():
        for row in rows:
            workloads[(*key, kind_of(row.case.workload))].append(row.case.workload)
    return domain_of(workloads)


def check(groups: Groups, asked: list[str]) -> None:
    """Prints the error of each family and GPU: with the constants that are shipped, and with ones fitted without it."""
    shipped = dict(fitted_constants())
    for left_out, rows in _sources(groups):
        if asked and not ":".join(left_out).startswith(tuple(asked)):
            continue
        inside = error_of(shipped, rows, rounded=0.0)
        outside = error_of(_without(left_out, groups, shipped), rows, rounded=0.0)
        print(
            f"{left_out[0]:<12}{left_out[1]:<32}{len(rows):>4} rows {100 * inside:6.1f} % fitted"
            f" {100 * outside:6.1f} % unseen",
            flush=True,
        )


def _without(left_out: tuple[str, str], groups: Groups, shipped: dict[Key, Constants]) -> dict[Key, Constants]:
    """The shipped sets, those that a source reaches fitted without it. A set without other rows is left out whole."""
    sets = dict(shipped)
    for key, rows in groups.items():
        rest = [row for row in rows if (row.family, row.gpu) != left_out]
        if len(rest) == len(rows):
            continue
        del sets[key]
        larger = {each: shipped[each] for each in _by_rows(groups) if len(groups[each]) > len(rows)}
        if rest:
            sets[key] = with_blocks(key, fit(key, rest, prior_of(key, larger)), rest)
    return sets


def _sources(groups: Groups) -> Iterator[tuple[tuple[str, str], list[Known]]]:
    found: dict[tuple[str, str], list[Known]] = defaultdict(list)
    for rows in groups.values():
        for row in rows:
            found[row.family, row.gpu].append(row)
    yield from sorted(found.items(), key=lambda each: each[0])


def fit_all(groups: Groups) -> dict[Key, Constants]:
    """Fits the sets with the most rows first: they are the priors of the others."""
    sets: dict[Key, Constants] = {}
    for key in _by_rows(groups):
        sets[key] = fit(key, groups[key], prior_of(key, sets))
    return {
        key: with_blocks(key, replace(constants, rows=len(groups[key])), groups[key]) for key, constants in sets.items()
    }


def _by_rows(groups: Groups) -> list[Key]:
    return sorted(groups, key=lambda each: (-len(groups[each]), each))


def prior_of(key: Key, sets: dict[Key, Constants]) -> Constants:
    """What a framework adds is taken from another generation; a device's rates lie between that and its own others."""
    prior = next((sets[other] for other in sets if other[1] == key[1]), START)
    same = [sets[other] for other in sets if other[0] == key[0]]
    found = mean_of([prior, mean_of(same, DEVICE_FIELDS)], DEVICE_FIELDS, prior) if same else prior
    return replace(found, blocks={})


def fit(key: Key, rows: list[Known], prior: Constants) -> Constants:
    """Searches along one constant at a time or two, then once more as far along what helped."""
    search, step = _Search(key, rows, prior), 0.4
    singly = [((name, 1),) for name in _telling(key, rows, prior)]
    both = [(*first, (name, sign)) for first, ((name, _),) in combinations(singly, 2) for sign in (1, -1)]
    while step > 0.005:
        before = search.best
        if not search.along(singly, step) and not search.along(both, step):
            step /= 2
        else:
            search.takes(_further(before, search.best))
    return search.best


Way = tuple[tuple[str, int], ...]


class _Search:
    """The best constants so far."""

    def __init__(self, key: Key, rows: list[Known], prior: Constants) -> None:
        self.key, self.rows, self.prior, self.best = key, rows, prior, prior
        self.least = objective(key, prior, rows, prior)

    def takes(self, trial: Constants) -> bool:
        """Takes what is better than the best."""
        value = objective(self.key, trial, self.rows, self.prior)
        if value >= self.least - 1e-6:
            return False
        self.best, self.least = trial, value
        return True

    def along(self, ways: Iterable[Way], step: float) -> bool:
        """Goes a step along each way, forth or back; says whether any helped."""
        before = self.best
        for way in ways:
            if not self.takes(_go(self.best, way, step)):
                self.takes(_go(self.best, way, -step))
        return self.best is not before


def _go(constants: Constants, way: Way, step: float) -> Constants:
    for name, sign in way:
        constants = moved(constants, name, sign * step)
    return constants


def _telling(key: Key, rows: list[Known], prior: Constants) -> list[str]:
    """The constants of which these rows tell anything."""
    start = error_of({key: prior}, rows, rounded=0.0)
    return [
        name
        for name in BOUNDS
        if any(error_of({key: moved(prior, name, by)}, rows, rounded=0.0) != start for by in (0.4, -0.4))
    ]


def moved(constants: Constants, name: str, by: float) -> Constants:
    low, _ = BOUNDS[name]
    value = getattr(constants, name)
    return replace(constants, **{name: _kept(name, value + by * 0.5 if low == 0 else value * math.exp(by))})


def _further(start: Constants, end: Constants) -> Constants:
    changes = {}
    for name, (low, _) in BOUNDS.items():
        first, last = getattr(start, name), getattr(end, name)
        changes[name] = _kept(name, 2 * last - first if low == 0 else last * last / first)
    return replace(end, **changes)


def _kept(name: str, value: float) -> float:
    low, high = BOUNDS[name]
    return min(high, max(low, value))


def objective(key: Key, constants: Constants, rows: list[Known], prior: Constants) -> float:
    pull = PULL + PULL_OF_A_ROW / len(rows)
    return error_of({key: constants}, rows, rounded=ROUNDED) + pull * distance(constants, prior)


def distance(constants: Constants, prior: Constants) -> float:
    total = 0.0
    for name, (low, _) in BOUNDS.items():
        value, start = getattr(constants, name), getattr(prior, name)
        total += (value - start) ** 2 * 4 if low == 0 else math.log(value / start) ** 2
    return total


def error_of(sets: ConstantSets, rows: list[Known], *, rounded: float) -> float:
    """The mean over families of the mean absolute logarithm of predicted over measured."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        predicted = in_metric(row.case, predict_case(row.case, sets))
        errors[row.family].append(math.hypot(math.log(predicted / row.measured), rounded))
    weights = {family: math.sqrt(len(each)) for family, each in errors.items()}
    total = sum(weights[family] * sum(each) / len(each) for family, each in errors.items())
    return total / sum(weights.values())


if __name__ == "__main__":
    main()
