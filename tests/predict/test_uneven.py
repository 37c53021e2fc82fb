"""The busiest of ranks that share experts, and what experts cost in the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.devices import load_cluster
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape, RouterRule
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.step import Prediction, predict
from paceline.predict.formulas.uneven import busiest_share

SHAPE = ModelShape(layers=8, width=2048, heads=16, kv_heads=16, mlp_width=2048, vocab_size=32000, experts=64, active=8)
DGX = load_cluster("dgx-h100")


def predicted(shape: ModelShape = SHAPE, *, expert: int = 1, tokens: int = 4096, is_ours: bool = True) -> Prediction:
    layout = Layout(data=8, expert=expert, microbatch=1, strategy="zero1", shard_ranks=8, node_ranks=8, chunks=1)
    run = Running(seq_len=tokens, compute="bf16", framework="compiled")
    return predict(Workload(model=shape, layout=layout, run=run), DGX, is_ours=is_ours)


def test_the_busiest_of_as_many_ranks_as_were_published_has_the_published_load() -> None:
    """One expert a rank, 64 of them: the table's own figure."""
    assert busiest_share(SHAPE, 64) == pytest.approx(1.72)
    assert busiest_share(replace(SHAPE, router=RouterRule(balance="bias")), 64) == pytest.approx(1.04)
    shares = [busiest_share(SHAPE, ranks) for ranks in (1, 2, 4, 8, 16, 64)]
    assert shares == sorted(shares)
    assert shares[0] == 1.0
    assert busiest_share(replace(SHAPE, router=RouterRule(capacity=1.1)), 64) == 1.1
    assert busiest_share(replace(SHAPE, experts=0), 8) == 1.0


def test_uneven_loads_take_longer_and_published_runs_are_even() -> None:
    even = replace(SHAPE, router=RouterRule(balance="bias"))
    assert predicted(expert=8).step.compute > 1.02 * predicted(even, expert=8).step.compute
    assert predicted(expert=8).step.tensor_wait > 1.1 * predicted(even, expert=8).step.tensor_wait
    assert predicted(expert=8, is_ours=False).step == predicted(even, expert=8, is_ours=False).step


def test_few_rows_of_an_expert_are_slower_than_their_flops() -> None:
    """As many FLOPs in 64 experts of which 8 are active as in 8 of which all are: tiles are emptier."""
    full = replace(SHAPE, experts=8)
    by_tokens = [
        predicted(SHAPE, tokens=tokens).step.compute / predicted(full, tokens=tokens).step.compute
        for tokens in (512, 4096)
    ]
    assert by_tokens[0] > by_tokens[1] > 1


def test_shared_experts_compute_while_rows_travel() -> None:
    """Rows that travel take no longer for it; a dense layer sends none."""
    alone, shared = predicted(expert=8), predicted(replace(SHAPE, shared_experts=1), expert=8)
    assert shared.step.compute > alone.step.compute
    assert shared.step.tensor_wait < alone.step.tensor_wait
    half = predicted(replace(SHAPE, dense_layers=4), expert=8)
    assert half.step.tensor_wait == pytest.approx(alone.step.tensor_wait / 2)


def test_experts_are_divided_by_their_ranks_and_the_rest_is_not() -> None:
    one, eight = (predicted(expert=ranks).memory.parameters for ranks in (1, 8))
    whole = SHAPE.layers * SHAPE.routed_params
    assert whole == 8 * 64 * 3 * 2048 * 2048
    assert one - eight == pytest.approx(2 * whole * 7 / 8)
