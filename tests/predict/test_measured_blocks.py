"""Blocks of measured shapes: known ones take what they took, others what the formulas say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.devices import load_cluster
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.constants import (
    Constants,
    ConstantSets,
    Factors,
    constants_for,
    fitted_constants,
    shape_of,
)
from paceline.predict.formulas.step import predict

CLUSTER = load_cluster("4x a100-sxm-80gb")
WORK = Workload(
    model=ModelShape(
        layers=20, width=2048, heads=16, kv_heads=16, mlp_width=8192, vocab_size=50304, mlp="gelu", tied=True
    ),
    layout=Layout(pipeline=2, overlap=False, checkpoint_activations="full").for_ranks(4),
    run=Running(
        global_batch=16, micro_batch=2, seq_len=1024, compute="fp16", framework="megatron", fused_attention=False
    ),
)
KEY = ("ampere", "megatron")


def knowing(factors: Factors) -> ConstantSets:
    shape = shape_of(WORK)
    assert shape is not None
    return {KEY: Constants(blocks={shape: factors})}


def seconds(sets: ConstantSets, work: Workload = WORK) -> float:
    return predict(work, CLUSTER, sets).seconds


def test_a_known_block_takes_as_many_times_as_long() -> None:
    plain, twice = seconds({KEY: Constants()}), seconds(knowing(Factors(2.0, 2.0)))
    step = predict(WORK, CLUSTER, {KEY: Constants()}).step
    fixed = step.exposed + step.optimizer
    assert twice - fixed == pytest.approx(2 * (plain - fixed), rel=0.02)


def test_blocks_and_heads_have_factors_of_their_own() -> None:
    plain = seconds({KEY: Constants()})
    block, head = (seconds(knowing(each)) - plain for each in (Factors(1.1, 1.0), Factors(1.0, 1.1)))
    assert block > 2 * head > 0


@pytest.mark.parametrize(
    "other",
    [
        replace(WORK, run=replace(WORK.run, micro_batch=4)),
        replace(WORK, layout=replace(WORK.layout, checkpoint_activations="none")),
        replace(WORK, layout=replace(WORK.layout, data=1, tensor=2)),
        replace(WORK, model=replace(WORK.model, width=4096)),  # type: ignore[type-var]
    ],
)
def test_other_shapes_are_left_to_the_formulas(other: Workload) -> None:
    assert seconds(knowing(Factors(2.0, 2.0)), other) == seconds({KEY: Constants()}, other)


def test_the_depth_is_not_part_of_a_shape() -> None:
    deeper = replace(WORK, model=replace(WORK.model, layers=40))  # type: ignore[type-var]
    assert shape_of(deeper) == shape_of(WORK)


def test_sets_that_were_not_fitted_know_no_blocks() -> None:
    sets = fitted_constants()
    assert sets[KEY].blocks
    for generation in ("hopper", "blackwell"):
        composed, fitted = constants_for(sets, generation, "megatron")
        assert not fitted
        assert not composed.blocks
