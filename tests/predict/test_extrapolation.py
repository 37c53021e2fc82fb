"""Predictions far from any row they were fitted on: they move as physics does, and do not jump.

From 8 to 4,096 devices, 1 to 64 stages, 1 to 8 tensor-parallel ranks, small to large batches, sequences of 2 Ki to
128 Ki tokens, on devices of every generation and under every class of frameworks. Bounds are loose: what is tested is
the direction, and that no step of a factor of two changes the cost of a token by more than it can.
"""

from __future__ import annotations

import itertools
import math

import pytest

from paceline.cluster.devices import Catalog
from paceline.plan.layout import Layout, Strategy
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Framework, Running, Workload
from paceline.predict.formulas.constants import FRAMEWORKS
from paceline.predict.formulas.step import Prediction, predict

DEVICES = ("v100-sxm-32gb", "t4", "a100-sxm-80gb", "a10g", "l4", "rtx-4090", "h100-sxm", "h200", "b200", "gb300")
LINKED = ("v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm", "h200", "b200", "gb300")
SHAPE = ModelShape(
    layers=64, width=4096, heads=32, kv_heads=32, mlp_width=16384, vocab_size=51200, mlp="gelu", tied=True
)
MIXTURE = ModelShape(
    layers=32, width=4096, heads=32, kv_heads=8, mlp_width=2048, vocab_size=51200, experts=64, active=8, tied=True
)
SHARDINGS: dict[Framework, Strategy] = {"eager": "fsdp", "compiled": "fsdp", "megatron": "zero1"}
FIGURES = ("compute", "tensor_wait", "launch_wait", "bubble", "exposed", "hidden", "contention", "slowest", "optimizer")


def run_on(
    device: str,
    framework: Framework = "megatron",
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    each: int = 8,
    micro_batch: int = 1,
    seq_len: int = 2048,
    model: ModelShape = SHAPE,
) -> Prediction:
    """Predicts a run with so many samples for each data-parallel rank."""
    devices = data * tensor * pipeline
    layout = Layout(
        strategy=SHARDINGS[framework],
        tensor=tensor,
        pipeline=pipeline,
        expert=min(8, data) if model.experts else 1,
        sequence_parallel=tensor > 1,
    ).for_ranks(devices)
    run = Running(
        global_batch=each * data, micro_batch=micro_batch, seq_len=seq_len, compute="fp16", framework=framework
    )
    cluster = Catalog().of_devices(device, devices, node_devices=min(8, devices))
    found = predict(Workload(model=model, layout=layout, run=run), cluster)
    assert all(math.isfinite(getattr(found.step, name)) and getattr(found.step, name) >= 0 for name in FIGURES)
    assert 0 < found.memory.device_bytes < math.inf
    return found


def token_seconds(found: Prediction) -> float:
    """What a token costs: seconds x devices."""
    return found.workload.layout.ranks / found.samples_per_s / found.workload.run.seq_len


def powers(first: int, last: int) -> list[int]:
    return [2**place for place in range(first.bit_length() - 1, last.bit_length())]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("device", DEVICES)
def test_more_data_parallel_ranks_never_pay_off_by_themselves(device: str, framework: Framework) -> None:
    costs = [token_seconds(run_on(device, framework, data=count)) for count in powers(8, 4096)]
    for place, (few, many) in enumerate(itertools.pairwise(costs)):
        # Sharding over more ranks leaves a little less of the optimizer to each.
        assert many > 0.98 * few
        # From one node to two the network comes in; after that a ring's latency grows, as its ranks do at most.
        assert place == 0 or many < 2 * few


@pytest.mark.parametrize("device", LINKED)
def test_more_stages_cost_their_bubble(device: str) -> None:
    found = [run_on(device, pipeline=count, each=128) for count in powers(1, 64)]
    for few, many in itertools.pairwise(found):
        assert many.step.bubble / many.seconds >= few.step.bubble / few.seconds
        # Where a stage is one block of a fast device, messages take as long as the block.
        assert 0.97 * token_seconds(few) < token_seconds(many) < 2 * token_seconds(few)
    # 63 of 191 slots stand empty in the last one, and the ends make its stages uneven.
    assert 1.4 < token_seconds(found[-1]) / token_seconds(found[0]) < 4


@pytest.mark.parametrize("device", LINKED)
def test_more_tensor_ranks_shorten_the_step_and_cost_more_in_all(device: str) -> None:
    found = [run_on(device, tensor=count, each=8, micro_batch=8) for count in powers(1, 16)]
    inside, across = found[:-1], found[-1]
    for few, many in itertools.pairwise(inside):
        assert many.seconds < few.seconds
        assert 0.97 * token_seconds(few) < token_seconds(many) < 1.6 * token_seconds(few)
    assert token_seconds(across) > 1.1 * token_seconds(inside[-1])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("device", DEVICES)
def test_larger_batches_make_a_token_cheaper(device: str, framework: Framework) -> None:
    found = [run_on(device, framework, data=64, each=count) for count in powers(1, 1024)]
    for few, many in itertools.pairwise(found):
        assert many.seconds > few.seconds
        assert 0.45 * token_seconds(few) < token_seconds(many) < 1.001 * token_seconds(few)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("device", DEVICES)
def test_longer_sequences_make_a_token_dearer(device: str, framework: Framework) -> None:
    lengths = powers(2048, 131072)
    found = [
        run_on(device, framework, data=8, each=131072 // length, micro_batch=131072 // length, seq_len=length)
        for length in lengths
    ]
    for few, many in itertools.pairwise(found):
        assert token_seconds(few) < token_seconds(many) < 2.1 * token_seconds(few)


@pytest.mark.parametrize("device", LINKED)
def test_pipelines_and_nodes_together_stay_in_bounds(device: str) -> None:
    small = token_seconds(run_on(device, data=1, tensor=8, pipeline=1, each=64))
    large = token_seconds(run_on(device, data=8, tensor=8, pipeline=64, each=64))
    assert small < large < 6 * small


@pytest.mark.parametrize("device", LINKED)
def test_mixtures_of_experts_scale_like_others(device: str) -> None:
    costs = [token_seconds(run_on(device, data=count, model=MIXTURE)) for count in powers(8, 4096)]
    for place, (few, many) in enumerate(itertools.pairwise(costs)):
        assert many > 0.97 * few
        assert place == 0 or many < 2 * few


def test_newer_devices_are_faster() -> None:
    order = ("t4", "v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm", "b200")
    for framework in FRAMEWORKS:
        costs = [token_seconds(run_on(device, framework, data=8, micro_batch=8)) for device in order]
        assert costs == sorted(costs, reverse=True)
