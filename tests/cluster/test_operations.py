"""Prices of kernels on a device with tables: between what was measured, and what stands in where nothing was."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.costs import seconds_between
from paceline.cluster.devices import Catalog, Device, ShapeRate, load_cluster
from paceline.cluster.kernels import Operation, host_seconds, memory_rate, work_seconds


def _device(**changes: object) -> Device:
    plain = replace(Catalog().device("cpu-host"), shapes=(), memory_rates={}, operation_s=None, tensor_s=0.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def _product(layout: str) -> Operation:
    return Operation(name="mm", family="matmul", sizes=(64, 32, 16), layout=layout)


def test_products_of_a_layout_run_at_what_was_measured_in_it() -> None:
    shapes = tuple(
        ShapeRate(kind="matmul", dtype="fp32", sizes=(64, 32, 16), flops=rate, layout=layout)
        for layout, rate in (("nt", 1e9), ("nn", 2e9))
    )
    device = _device(shapes=shapes)
    flops = 2.0 * 64 * 32 * 16
    assert work_seconds(device, _product("nt")) == flops / 1e9
    assert work_seconds(device, _product("nn")) == flops / 2e9
    assert work_seconds(device, replace(_product("nn"), batch=3)) == 3 * flops / 2e9
    assert flops / 2e9 <= work_seconds(device, _product("tn")) <= flops / 1e9  # not measured: among the others
    assert work_seconds(_device(), _product("nt")) == flops / device.ceiling("fp32")


def test_small_products_of_a_processor_take_a_time_that_does_not_shrink_with_them() -> None:
    """Measured: 100 us for a call, and 10 GFLOP/s besides."""
    floor, sizes = 1e-4, ((8, 8, 8), (32, 128, 128), (256, 256, 256))
    shapes = tuple(
        ShapeRate(kind="matmul", dtype="fp32", sizes=each, flops=flops / (floor + flops / 1e10), layout="nt")
        for each in sizes
        for flops in (2.0 * math.prod(each),)
    )
    device = _device(shapes=shapes)
    for wanted in ((32, 64, 16), (32, 256, 128), (64, 128, 10), (1024, 256, 256)):
        product = replace(_product("nt"), sizes=wanted)
        assert work_seconds(device, product) == pytest.approx(floor + product.flops / 1e10, rel=0.2)
    for each in shapes:
        product = replace(_product("nt"), sizes=each.sizes)
        assert work_seconds(device, product) == product.flops / each.flops


def test_convolutions_of_an_image_reach_little_of_a_gpu_that_was_measured() -> None:
    """The first layer of a ResNet-50 on 256 images takes about what it would for 32 channels instead of three."""
    device, places = Catalog().device("h200"), 256 * 112**2
    few, full = (
        Operation(name="convolution", family="matmul", dtype="bf16", sizes=(places, channels * 49, 64))
        for channels in (3, 32)
    )
    assert 1e-3 < work_seconds(device, few) < 2e-3
    assert work_seconds(device, few) == pytest.approx(work_seconds(device, full), rel=0.5)
    gradient = replace(few, name="convolution_backward", sizes=(64, places, 147))
    assert work_seconds(device, gradient) == work_seconds(device, few)
    odd = replace(gradient, sizes=(64, 49 * 3, 64))  # an odd number of places is no matter
    assert work_seconds(device, odd) == work_seconds(device, replace(odd, name="mm"))
    cpu = _device()
    assert work_seconds(cpu, few) == work_seconds(cpu, replace(few, name="mm"))


def test_the_gradient_of_a_pooling_goes_through_memory_slowly_on_a_gpu() -> None:
    gradient = Operation(name="max_pool2d_with_indices_backward", family="reduction", reads=((0, 10**9),))
    gpu, cpu = Catalog().device("h200"), Catalog().device("cpu-host")
    assert work_seconds(gpu, gradient) > 3 * work_seconds(gpu, replace(gradient, name="sum"))
    assert work_seconds(cpu, gradient) == work_seconds(cpu, replace(gradient, name="sum"))


def test_the_backward_of_attention_has_a_rate_of_its_own() -> None:
    sizes = (2, 4, 128, 32)
    shapes = (
        ShapeRate(kind="attention", dtype="fp32", sizes=sizes, flops=1e9),
        ShapeRate(kind="attention_backward", dtype="fp32", sizes=sizes, flops=4e9),
    )
    forward = Operation(name="attention", family="attention", sizes=sizes)
    backward = Operation(name="attention_backward", family="attention_backward", sizes=sizes)
    assert (forward.flops, backward.flops) == (2 * 8 * 128**2 * 32, 5 * 8 * 128**2 * 32)
    assert replace(forward, is_causal=False).flops == 2 * forward.flops
    assert work_seconds(_device(shapes=shapes), backward) == backward.flops / 4e9
    assert work_seconds(_device(shapes=shapes[:1]), backward) == backward.flops / 1e9


def test_families_that_were_not_measured_go_as_plain_ones_and_those_by_the_memory() -> None:
    device = _device(memory_rates={"pointwise": ((1000, 1e9), (100_000, 1e8)), "softmax": ((1000, 5e7),)})
    assert memory_rate(device, "softmax", 12) == memory_rate(device, "softmax", 1e9) == 5e7
    assert memory_rate(device, "pointwise", 1) == 1e9
    assert memory_rate(device, "norm", 10_000) == pytest.approx(math.sqrt(1e9 * 1e8))
    assert memory_rate(_device(), "norm", 10_000) == device.memory_bandwidth * device.memory_share


def test_the_host_pays_for_each_operation_and_for_each_tensor_of_a_list() -> None:
    device = _device(operation_s=5e-6, tensor_s=1e-6)
    update = Operation(name="_fused_adamw_", family="optimizer", tensors=11)
    assert host_seconds(device, update) == pytest.approx(15e-6)
    assert host_seconds(device, replace(update, tensors=1), is_compiled=True) == device.compiled_launch_s
    assert host_seconds(_device(), replace(update, tensors=1)) == device.launch_s


@given(st.floats(min_value=1, max_value=1e12))
def test_a_table_never_jumps(size: float) -> None:
    points = ((1024, 1e-5), (65536, 2e-5), (1 << 20, 3e-4))
    here, more = seconds_between(points, size), seconds_between(points, size * 1.01)
    assert here <= more <= here * 1.02


def test_what_a_processor_emulates_takes_its_own_rate_in_small_products_and_in_attention() -> None:
    """The floor of small products is the library's, and not what the shortest product in bf16 took: 33 ms."""
    device = load_cluster("cpu-host").device
    assert device.emulates("bf16")
    small = Operation(name="mm", family="matmul", dtype="bf16", sizes=(32, 32, 32), layout="nn")
    assert work_seconds(device, small) == pytest.approx(small.flops / device.ceiling("bf16"), rel=0.3)
    wide = Operation(name="attention", family="attention", sizes=(8, 4, 128, 32))
    times = work_seconds(device, replace(wide, dtype="bf16")) / work_seconds(device, wide)
    assert times == pytest.approx(device.ceiling("fp32") / device.ceiling("bf16"))
    assert device.peak("bf16") == device.peak("fp32")  # what an MFU is a share of
    assert load_cluster("1x h200").device.peak("bf16") > load_cluster("1x h200").device.peak("fp32")


def test_attention_computes_whole_tiles_of_scores() -> None:
    """A ViT's 197 tokens are 2 tiles of 128 queries and 4 of 64 keys: 256 by 256 scores."""
    device = load_cluster("1x h100-sxm").device
    odd = Operation(name="attention", family="attention", dtype="bf16", sizes=(8, 12, 197, 64), is_causal=False)
    assert work_seconds(device, odd) == pytest.approx((256 / 197) ** 2 * odd.flops / (0.4 * device.ceiling("bf16")))
    even = replace(odd, sizes=(8, 12, 1024, 64), keys=640)
    assert work_seconds(device, even) == even.flops / (0.4 * device.ceiling("bf16"))
