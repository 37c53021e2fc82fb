"""The slowest of many devices: what all ranks wait for."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest

from paceline.cluster.devices import load_cluster
from paceline.plan.layout import Layout
from paceline.plan.workload import ModelShape, Running, Workload
from paceline.predict.formulas.predict import predict
from paceline.predict.formulas.slowest import expected_most, slowest_device, slowest_share

SHAPE = ModelShape(layers=8, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=51200)


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
