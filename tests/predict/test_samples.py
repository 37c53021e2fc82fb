"""Steps of models known by what a sample costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.devices import load_cluster
from paceline.plan.layout import Layout
from paceline.plan.workload import Compute, Running, Workload
from paceline.predict.formulas.constants import Constants
from paceline.predict.formulas.step import sample_step
from paceline_bench.scored.published import known_model

CONSTANTS = Constants()
ONE = load_cluster("1x a100-sxm-80gb")


def work(name: str, batch: float, compute: Compute = "fp16", ranks: int = 1) -> Workload:
    model = known_model(name)
    assert model is not None
    assert model.is_sampled
    run = Running(global_batch=batch * ranks, micro_batch=batch, seq_len=1, compute=compute)
    return Workload(model=model, layout=Layout().for_ranks(ranks), run=run)


@pytest.mark.parametrize("name", ["ResNet-50", "EfficientNet-B0", "SSD300 ResNet-50", "GNMT v2", "Transformer-big"])
def test_sixteen_bits_are_faster_and_no_step_beats_the_memory(name: str) -> None:
    narrow, wide = (sample_step(work(name, 4096, each), ONE, CONSTANTS) for each in ("fp16", "tf32"))
    assert narrow.total < wide.total
    model = known_model(name)
    assert model is not None
    assert narrow.total > 4096 * model.activations * 2 / ONE.device.memory_bandwidth


@pytest.mark.parametrize(("compute", "is_product"), [("fp32", True), ("tf32", False), ("fp16", False)])
def test_convolutions_without_tensor_units_run_as_products_do(compute: Compute, is_product: bool) -> None:
    slow = replace(CONSTANTS, convolution=0.1, convolution_wide=0.1)
    fast, slower = (sample_step(work("ResNet-50", 64, compute), ONE, each).compute for each in (CONSTANTS, slow))
    assert (fast == slower) is is_product


def test_small_batches_wait_for_the_host() -> None:
    step = sample_step(work("EfficientNet-B4", 1), ONE, CONSTANTS)
    assert step.launch_wait > step.compute


def test_a_recurrence_reads_its_weights_for_every_token_of_a_sentence() -> None:
    few, many = (sample_step(work("GNMT v2", count * 50), ONE, CONSTANTS).compute for count in (32, 1024))
    assert many / few < 32 * 0.6


def test_planes_cost_more_than_channels_last_in_sixteen_bits_alone() -> None:
    base = work("SSD300 ResNet-50", 64)
    last = replace(base, model=replace(base.model, kind="convolution"))
    assert sample_step(base, ONE, CONSTANTS).compute > sample_step(last, ONE, CONSTANTS).compute
    wide = [replace(each, run=replace(each.run, compute="tf32")) for each in (base, last)]
    assert sample_step(wide[0], ONE, CONSTANTS) == sample_step(wide[1], ONE, CONSTANTS)


def test_the_slowest_of_many_ranks_sets_the_pace() -> None:
    clusters = {ranks: load_cluster(f"{ranks}x a100-sxm-80gb") for ranks in (1, 8, 64)}
    steps = {ranks: sample_step(work("GNMT v2", 6400, ranks=ranks), clusters[ranks], CONSTANTS) for ranks in clusters}
    assert steps[1].slowest == steps[64].bubble == 0
    assert 0 < steps[8].slowest < steps[64].slowest < steps[8].compute / 2
