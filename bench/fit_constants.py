"""Fits the constants of the prediction on rows of the split ``calib``: bench/fit_constants.py FILE.csv [--write].

One set for each generation of devices and class of frameworks that such rows reach. What is made small is the mean over
families, weighed by the root of their rows, of the logarithm of predicted over measured, so that twice and half weigh
the same; near zero it is rounded, so that the search does not stick in a corner. A pull towards a prior keeps what few
rows tell apart from running away: the prior of a set is the set of the same framework on the generation that has the
most rows, and for that one the defaults. The search goes along one constant at a time, and then on in the direction
that helped, with steps that shrink: no random numbers, so that the same rows give the same file. When the constants of
a set stand, what its rows say of single shapes of blocks is found beside them (bench/fit_blocks.py).

With ``--write`` all sets are fitted once more without each family in turn (src/paceline_bench/scored/held_out.yaml):
by these ``paceline validate`` scores a family as one that nobody has seen. These sets know no measured blocks.

Rows of other splits are never looked at here. Memory has no fitted constants.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from fit_blocks import Key, Known, with_blocks
from fitted_text import domain_of, format_blocks, format_constants, format_domain, format_held_out
from paceline.plan.workload import Workload
from paceline.predict.formulas.constants import DEVICE_FIELDS, Constants, ConstantSets, Domain, kind_of, mean_of
from paceline.predict.formulas.step import Prediction, step_parts
from paceline_bench.scored.measured_table import read_table
from paceline_bench.scored.published import in_metric, predict_case, read_case

START = Constants()
# What Megatron's host takes for a kernel: Megatron-Bridge's runs of small experts, which are dev rows, wait for it
# (Qwen3 30B with a sample a microbatch on H100 and B200).
MEGATRON_LAUNCH_US = 30.0
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
PULL_OF_A_ROW = 0.5  # few rows tell little: they move the constants less
ROUNDED = 0.02  # errors below this weigh less and less
TARGET = Path(__file__).parents[1] / "src/paceline/predict/formulas/fitted_constants.yaml"
DOMAIN = TARGET.with_name("calibrated_domain.yaml")
BLOCKS = TARGET.with_name("measured_blocks.csv")
HELD_OUT = Path(__file__).parents[1] / "src/paceline_bench/scored/held_out.yaml"

Groups = dict[Key, list[Known]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    names = ", ".join(each.name for each in (TARGET, BLOCKS, DOMAIN, HELD_OUT))
    parser.add_argument("--write", action="store_true", help=f"write {names}")
    arguments = parser.parse_args()
    groups = calibration_rows(arguments.file)
    sets = fit_all(groups)
    for key in sorted(groups):
        error = error_of(sets, groups[key], rounded=0.0)
        print(f"{key[0]}/{key[1]}: {len(groups[key])} rows, {100 * error:.1f} % mean over families", flush=True)
    text = HEADER + format_constants(sets)
    print(text)
    if arguments.write:
        TARGET.write_text(text)
        first = HEADER.splitlines()[0] + "\n"
        BLOCKS.write_text(first + format_blocks({key: sets[key].blocks for key in groups}))
        DOMAIN.write_text(first + format_domain(covered(groups)))
        HELD_OUT.write_text(first + format_held_out(held_out(groups)))


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


def held_out(groups: Groups) -> dict[str, dict[Key, Constants]]:
    """Fits all sets without each family that has rows among these."""
    found = {}
    for family in sorted({row.family for rows in groups.values() for row in rows}):
        rest = {key: [row for row in rows if row.family != family] for key, rows in groups.items()}
        rest = {key: rows for key, rows in rest.items() if rows}
        domain: dict[Key, dict[str, Domain]] = defaultdict(dict)
        for (generation, framework, kind), each in covered(rest).items():
            domain[generation, framework][kind] = each
        sets = fit_all(rest)
        found[family] = {key: replace(each, blocks={}, domain=domain[key]) for key, each in sets.items()}
        print(f"fitted without {family}", flush=True)
    return found


def fit_all(groups: Groups) -> dict[Key, Constants]:
    """Fits the sets with the most rows first: they are the priors of the others."""
    sets: dict[Key, Constants] = {}
    for key in sorted(groups, key=lambda each: (-len(groups[each]), each)):
        sets[key] = replace(fit(key, groups[key], prior_of(key, sets)), rows=len(groups[key]))
    return {key: with_blocks(key, constants, groups[key]) for key, constants in sets.items()}


def prior_of(key: Key, sets: dict[Key, Constants]) -> Constants:
    """What a framework adds is taken from another generation; a device's rates are those of its other frameworks."""
    start = replace(START, launch_us=MEGATRON_LAUNCH_US) if key[1] == "megatron" else START
    prior = next((sets[other] for other in sets if other[1] == key[1]), start)
    same = [sets[other] for other in sets if other[0] == key[0]]
    found = mean_of(same, DEVICE_FIELDS, prior, weights=[math.sqrt(each.rows) for each in same]) if same else prior
    return replace(found, blocks={})


_fitted: dict[tuple[object, ...], Constants] = {}


def fit(key: Key, rows: list[Known], prior: Constants) -> Constants:
    """Searches along one constant at a time, then once more as far along what helped.

    A family that is left out leaves many sets as they were: the same rows and the same prior are not fitted twice.
    """
    known = (key, *map(id, rows), *(getattr(prior, name) for name in BOUNDS))
    if known not in _fitted:
        _fitted[known] = _searched(key, rows, prior)
    return _fitted[known]


def _searched(key: Key, rows: list[Known], prior: Constants) -> Constants:
    search, step = _Search(key, rows, prior), 0.4
    names = _telling(key, rows, prior)
    while step > 0.03:
        before = search.best
        if search.along(names, step):
            search.takes(_further(before, search.best))
        else:
            step /= 2
    return search.best


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

    def along(self, names: Iterable[str], step: float) -> bool:
        """Moves each constant by a step, up or down; says whether any of it helped."""
        before = self.best
        for name in names:
            if not self.takes(moved(self.best, name, step)):
                self.takes(moved(self.best, name, -step))
        return self.best is not before


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
        errors[row.family].append(math.hypot(math.log(_predicted(row, sets) / row.measured), rounded))
    weights = {family: math.sqrt(len(each)) for family, each in errors.items()}
    total = sum(weights[family] * sum(each) / len(each) for family, each in errors.items())
    return total / sum(weights.values())


@cache
def _as_shipped(row: Known) -> Prediction:
    return predict_case(row.case)


def _predicted(row: Known, sets: ConstantSets) -> float:
    """Predicts a row in its metric. Of a run that leaves nothing open, constants change the parts of the step alone."""
    case = row.case
    if case.chooses_micro_batch or case.chooses_chunks or len(case.expert_ranks) > 1:
        return in_metric(case, predict_case(case, sets))
    prediction = _as_shipped(row)
    return in_metric(case, replace(prediction, step=step_parts(prediction.workload, case.cluster, sets)))


if __name__ == "__main__":
    main()
