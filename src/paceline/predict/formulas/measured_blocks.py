"""Blocks that published runs have measured: what they took over what the formulas say.

Formulas are smooth, libraries are not: for another shape they take another kernel, and a block may take a tenth more or
less than its neighbours would tell. Where rows of the split ``calib`` ran a block of just this shape, the formulas'
times of the block and of the head are multiplied by what those rows say:

    factors    least squares of log(predicted / measured) over the rows of a shape, pulled to 1 as by one row more that
               says 1: so one row moves its shape half of the way, and twenty nearly all of it
    head       told apart from the blocks only by rows of several depths; else 1

A shape has as many rows as there are depths, microbatches and layouts in the tables; it never names a row or a source.
``measured_blocks.csv`` is written by bench/fit_constants.py. Where no row ran the shape, the formulas stand.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Compute, Recompute, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """All that one rank's block depends on, beside the device's generation and the framework."""

    hidden: int
    ffn: int
    tensor: int
    seq_len: int
    samples: float
    compute: Compute
    recompute: Recompute
    fused_attention: bool


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured over predicted time."""

    block: float = 1.0
    head: float = 1.0


SHAPE_NAMES = tuple(each.name for each in fields(BlockShape))
MeasuredBlocks = Mapping[BlockShape, Factors]
UNKNOWN = Factors()


def shape_of(workload: Workload) -> BlockShape | None:
    """Returns the shape of a workload's blocks; None where blocks alone do not make the model, or experts are in it."""
    model, layout, run = workload.model, workload.layout, workload.run
    if not isinstance(model, ModelShape) or model.experts or layout.context > 1:
        return None
    return BlockShape(
        hidden=model.width,
        ffn=model.mlp_width,
        tensor=layout.tensor,
        seq_len=run.seq_len,
        samples=workload.micro_batch,
        compute=run.compute,
        recompute=workload.recompute,
        fused_attention=run.fused_attention,
    )


def factors_for(known: MeasuredBlocks, workload: Workload) -> Factors:
    """Returns what is known of a workload's blocks; factors of 1 where nothing is."""
    shape = shape_of(workload)
    return UNKNOWN if shape is None else known.get(shape, UNKNOWN)


def parse_blocks(text: str) -> dict[tuple[str, str], dict[BlockShape, Factors]]:
    """Reads factors from CSV: one line a shape, with its generation and framework."""
    found: dict[tuple[str, str], dict[BlockShape, Factors]] = defaultdict(dict)
    for line in csv.DictReader(each for each in text.splitlines() if not each.startswith("#")):
        shape = BlockShape(
            hidden=int(line["hidden"]),
            ffn=int(line["ffn"]),
            tensor=int(line["tensor"]),
            seq_len=int(line["seq_len"]),
            samples=float(line["samples"]),
            compute=cast(Compute, line["compute"]),
            recompute=cast(Recompute, line["recompute"]),
            fused_attention=line["fused_attention"] == "True",
        )
        found[line["generation"], line["framework"]][shape] = Factors(float(line["block"]), float(line["head"]))
    return dict(found)
