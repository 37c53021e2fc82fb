"""Finds what blocks took over what the formulas say (predict/formulas/constants.py), shape by shape.

Least squares by Gauss and Newton on the logarithms of the two factors, with differences for derivatives: a prediction
is nearly linear in them. ``PULL_BLOCK`` weighs as much as one row that says 1; a head is some tenth of a step, so that
the same doubt is a hundredth of that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.predict.formulas.constants import BlockShape, Constants, Factors, MeasuredBlocks, shape_of
from paceline_bench.scored.published import PublishedRun, in_metric, predict_case

PULL_BLOCK = 1.0
PULL_HEAD = 0.02
TURNS = 6
STEP = 0.02
MOST = 1.5  # of a factor's logarithm
LEAST_ROWS = 4  # fewer would make a factor a constant of single rows

Key = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Known:
    family: str
    gpu: str
    case: PublishedRun
    measured: float


def with_blocks(key: Key, constants: Constants, rows: Sequence[Known]) -> Constants:
    """Returns a set that knows the blocks which its rows measured."""
    bare = replace(constants, blocks={})
    shapes: dict[BlockShape, list[Known]] = defaultdict(list)
    for row in rows:
        shape = shape_of(predict_case(row.case, {key: bare}).workload)
        if shape is not None:
            shapes[shape].append(row)
    kept = {shape: each for shape, each in shapes.items() if len(each) >= LEAST_ROWS}
    return replace(bare, blocks={shape: _factors(key, bare, shape, each) for shape, each in kept.items()})


def _factors(key: Key, bare: Constants, shape: BlockShape, rows: Sequence[Known]) -> Factors:
    def errors(block: float, head: float) -> list[float]:
        blocks: MeasuredBlocks = {shape: Factors(math.exp(block), math.exp(head))}
        sets = {key: replace(bare, blocks=blocks)}
        return [math.log(in_metric(row.case, predict_case(row.case, sets)) / row.measured) for row in rows]

    block, head = _least_squares(errors, tells_heads=_has_depths(rows))
    return Factors(round(math.exp(block), 4), round(math.exp(head), 4))


def _has_depths(rows: Sequence[Known]) -> bool:
    depths = set()
    for row in rows:
        model, layout = row.case.workload.model, row.case.workload.layout
        depths.add(model.layers / layout.pipeline)
    return len(depths) > 1


def _least_squares(errors: Callable[[float, float], list[float]], *, tells_heads: bool) -> tuple[float, float]:
    block = head = 0.0
    for _ in range(TURNS):
        here = errors(block, head)
        by_block = _slopes(here, errors(block + STEP, head))
        by_head = _slopes(here, errors(block, head + STEP)) if tells_heads else [0.0] * len(here)
        a = _dot(by_block, by_block) + PULL_BLOCK
        b = _dot(by_block, by_head)
        c = _dot(by_head, by_head) + PULL_HEAD
        u = _dot(by_block, here) + PULL_BLOCK * block
        v = _dot(by_head, here) + PULL_HEAD * head
        block = _kept(block - (c * u - b * v) / (a * c - b * b))
        head = _kept(head - (a * v - b * u) / (a * c - b * b))
    return block, head


def _slopes(here: Sequence[float], there: Sequence[float]) -> list[float]:
    return [(second - first) / STEP for first, second in zip(here, there, strict=True)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def _kept(value: float) -> float:
    return min(MOST, max(-MOST, value))
