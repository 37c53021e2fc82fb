"""A step: the slowest of many devices, and a pipeline beside its closed form."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.devices import load_cluster
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.step import StageSeconds, pipeline_seconds, predict, slowest_device, slowest_share
from paceline.predict.formulas.uneven import expected_most
from paceline.schedule.measure import ScheduleCosts, StageCost, measure_schedule
from paceline.schedule.schedules import make_schedule

SHAPE = ModelShape(layers=8, width=2048, heads=16, kv_heads=16, mlp_width=8192, vocab_size=51200, mlp="gelu", tied=True)


def integral(count: int) -> float:
    """The expected largest deviate, from its density on a fine grid."""
    normal, step = NormalDist(), 1e-3
    points = [place * step for place in range(-8000, 8001)]
    return step * sum(x * count * normal.cdf(x) ** (count - 1) * normal.pdf(x) for x in points)


@pytest.mark.parametrize("count", [2, 8, 64, 1024])
def test_the_expected_largest_deviate_is_that_of_the_density(count: int) -> None:
    assert expected_most(count) == pytest.approx(integral(count), rel=0.05)
    assert expected_most(1) == 0.0


def test_a_node_is_what_constants_come_from_and_more_devices_lose_more() -> None:
    assert [slowest_share(count) for count in (1, 2, 8)] == [0.0, 0.0, 0.0]
    shares = [slowest_share(8 * 2**power) for power in range(10)]
    assert shares == sorted(set(shares))
    assert 0.02 < shares[-1] < 0.05


def test_a_step_says_what_it_loses_to_the_slowest() -> None:
    steps = []
    for devices in (8, 64, 512):
        layout = Layout().for_ranks(devices)
        run = Running(global_batch=4 * devices, micro_batch=4, seq_len=2048, compute="bf16")
        cluster = load_cluster(f"{devices // 8}x dgx-h100")
        steps.append(predict(Workload(model=SHAPE, layout=layout, run=run), cluster).step)
    assert steps[0].slowest == 0.0
    assert [step.slowest / step.compute for step in steps] == pytest.approx([slowest_share(n) for n in (8, 64, 512)])
    with_it, without = steps[2].total, replace(steps[2], slowest=0.0).total
    assert with_it - without == pytest.approx(steps[2].slowest)


def test_kernels_of_a_large_world_run_on_its_slowest_device() -> None:
    device, host = load_cluster("1x dgx-h100").device, load_cluster("cpu-host").device
    assert slowest_device(device, 8) is device
    assert slowest_device(device, 1024).factor == pytest.approx(device.factor * (1 + slowest_share(1024)))
    assert slowest_device(host, 1024) is host


# Pipelines.


def walked(stages: list[StageSeconds], microbatches: int, message: float = 0.0) -> float:
    """What 1F1B takes, action by action."""
    costs = tuple(StageCost(forward=each.forward, backward_input=each.backward, backward_weight=0.0) for each in stages)
    schedule = make_schedule("1f1b", len(stages), microbatches)
    return measure_schedule(schedule, ScheduleCosts(stages=costs, communication=message)).makespan


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 5.0), st.floats(0.1, 5.0))
def test_equal_stages_take_what_the_closed_form_says(ranks: int, batches: int, forward: float, backward: float) -> None:
    stages = [StageSeconds(forward, backward)] * ranks
    took = walked(stages, batches)
    assert took == pytest.approx((batches + ranks - 1) * (forward + backward))
    assert pipeline_seconds(stages, batches) == pytest.approx(took)


def test_a_slow_last_stage_sets_the_pace() -> None:
    stages = [StageSeconds(1.0, 2.0)] * 3 + [StageSeconds(1.5, 3.0)]
    assert walked(stages, 8) == pytest.approx(pipeline_seconds(stages, 8)) == pytest.approx(8 * 4.5 + 9)


def test_chunks_divide_the_fill_and_messages_lengthen_it() -> None:
    stages = [StageSeconds(1.0, 2.0)] * 4
    assert pipeline_seconds(stages, 8, chunks=3) == pytest.approx(8 * 3 + 9 / 3)
    assert pipeline_seconds(stages, 8, message=0.1) == pytest.approx(8 * 3 + 9 + 6 * 0.1)
    assert walked(stages, 8, message=0.1) >= pipeline_seconds(stages, 8, message=0.1) - 1e-9
