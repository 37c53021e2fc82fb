"""The calibrated domain: what lies inside, and why something lies outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.devices import load_cluster
from paceline.cluster.kernels import todays_attention_seconds
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Framework, Running, Workload
from paceline.predict.formulas.constants import constants_for, fitted_constants, outside_of
from paceline.predict.formulas.step import predict
from paceline_bench.scored.published import known_model

SHAPE = ModelShape(
    layers=24, width=2048, heads=16, kv_heads=16, mlp_width=8192, vocab_size=51200, mlp="gelu", tied=True
)
RUN = Running(global_batch=64, micro_batch=2, seq_len=2048, compute="bf16")
INSIDE = Workload(model=SHAPE, layout=Layout(strategy="fsdp").for_ranks(8), run=RUN)
AMPERE, HOPPER, BLACKWELL = (load_cluster(name) for name in ("8x a100-sxm-80gb", "8x h100-sxm", "8x b200"))


def test_what_rows_cover_is_inside() -> None:
    found = predict(INSIDE, AMPERE)
    assert found.outside == ()
    assert found.fitted


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"micro_batch": 1, "seq_len": 32}, "sequences of 32 tokens, where those runs have"),
        ({"micro_batch": 1024}, "2,097,152 tokens in a microbatch, where those runs have"),
        ({"compute": "fp32"}, "fp32, where those runs are in bf16"),
    ],
)
def test_sizes_and_precisions_that_no_row_has_are_outside(changes: dict[str, object], told: str) -> None:
    found = predict(replace(INSIDE, run=replace(RUN, **changes)), AMPERE)  # type: ignore[arg-type]
    assert any(reason.startswith(told) for reason in found.outside), found.outside
    assert not found.fitted


def test_a_tiny_model_is_outside_by_its_width() -> None:
    tiny = replace(SHAPE, width=64, heads=2, kv_heads=2, mlp_width=256)
    assert any("a width of 64" in reason for reason in predict(replace(INSIDE, model=tiny), AMPERE).outside)


def test_models_of_a_kind_that_was_not_fitted_are_outside() -> None:
    image = known_model("ResNet-50")
    assert image is not None
    run = Running(global_batch=1024, micro_batch=128, seq_len=1, compute="fp16")
    work = Workload(model=image, layout=Layout().for_ranks(8), run=run)
    assert predict(work, AMPERE).outside == ()
    assert "no model of this kind (convolution)" in predict(work, HOPPER).outside[0]
    experts = known_model("Mixtral 8x7B")
    assert experts is not None
    assert "mixture of experts" in predict(replace(INSIDE, model=experts), AMPERE).outside[0]


@pytest.mark.parametrize("framework", ["eager", "compiled", "megatron"])
def test_constants_composed_of_others_are_outside(framework: Framework) -> None:
    found = predict(replace(INSIDE, run=replace(RUN, framework=framework)), BLACKWELL)
    assert found.outside == (
        f"no constants were fitted for blackwell devices under {framework} frameworks: they are composed of others",
    )


def test_a_factor_of_two_is_inside() -> None:
    low, high = fitted_constants()["ampere", "eager"].domain["transformer"].sizes["width"]
    for width, count in ((low / 2, 0), (low / 2 - 64, 1), (high * 2, 0), (high * 2 + 64, 1)):
        work = replace(INSIDE, model=replace(SHAPE, width=int(width), heads=1, kv_heads=1))
        assert len(outside_of(work, AMPERE, fitted_constants())) == count


def test_products_of_a_device_that_eager_runs_alone_tell_of_are_as_much_faster_as_elsewhere() -> None:
    sets = fitted_constants()
    found, is_fitted = constants_for(sets, "volta", "megatron")
    ratio = sets["ampere", "megatron"].matmul / sets["ampere", "eager"].matmul
    assert not is_fitted
    assert found.matmul == pytest.approx(min(0.98, sets["volta", "eager"].matmul * ratio))
    # on Hopper compiled runs tell of the device as well: their mean
    hopper, _ = constants_for(sets, "hopper", "megatron")
    assert sets["hopper", "eager"].matmul < hopper.matmul < sets["hopper", "compiled"].matmul


def test_attention_of_2025_is_as_fast_as_it_was_measured_alone() -> None:
    device = HOPPER.device
    rates, flops = fitted_constants()["hopper", "eager"], 1e12
    for is_back, share in ((False, 0.70), (True, 0.65)):
        own = (device, rates, flops, 8192, "bf16")
        assert todays_attention_seconds(*own, is_back=is_back) == pytest.approx(
            flops / (share * device.ceiling("bf16"))
        )
    short = todays_attention_seconds(device, rates, flops, 512, "bf16", is_back=False)
    assert short > todays_attention_seconds(device, rates, flops, 8192, "bf16", is_back=False)
