"""Policies: what they say, and what a device must be able to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from paceline.engines import precision as precisions
from paceline.engines.precision import (
    PRECISIONS,
    Precision,
    check_precision,
    keeps_dtype,
    kept_parameters,
    mixed_precision,
    precision_named,
)
from paceline.errors import UsageError

CPU = torch.device("cpu")


def test_a_policy_is_found_by_its_name_and_others_are_passed_through() -> None:
    assert list(PRECISIONS) == ["fp32", "bf16", "fp16", "bf16_master", "fp8", "fp8_row"]
    assert all(precision_named(name).name == name for name in PRECISIONS)
    own = Precision(name="own", reduce_dtype=torch.bfloat16)
    assert precision_named(own) is own
    with pytest.raises(UsageError, match=r"precision = 'fp4' is unknown\n  it is one of fp32, bf16, fp16, bf16_master"):
        precision_named("fp4")


def test_only_half_precision_with_a_small_range_scales_its_loss() -> None:
    assert [name for name, policy in PRECISIONS.items() if policy.scales_loss] == ["fp16"]


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_a_forward_pass_computes_in_the_policys_dtype(name: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with PRECISIONS[name].context(CPU):
        assert layer(torch.ones(2, 4)).dtype is dtype
    assert layer.weight.dtype is torch.float32


def test_floating_point_inputs_are_cast_and_others_are_left_alone() -> None:
    tokens, floats = torch.ones(2, dtype=torch.int64), torch.ones(2)
    (first, rest), named = PRECISIONS["bf16_master"].cast_inputs(((tokens, [floats, "text"]), {"mask": floats > 0}))
    assert first is tokens
    assert (rest[0].dtype, rest[1], named["mask"].dtype) == (torch.bfloat16, "text", torch.bool)
    arguments = ((floats,), {})
    assert PRECISIONS["bf16"].cast_inputs(arguments) is arguments  # autocast does it, operator by operator


def test_buffers_are_cast_only_where_the_policy_says_so() -> None:
    model = nn.BatchNorm1d(3)
    PRECISIONS["bf16_master"].cast_buffers(model)
    assert model.running_mean is not None
    assert model.running_mean.dtype is torch.float32
    dataclasses.replace(PRECISIONS["bf16_master"], buffer_dtype=torch.float64).cast_buffers(model)
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        "running_mean": torch.float64,
        "running_var": torch.float64,
        "num_batches_tracked": torch.int64,
    }


def test_norms_with_running_statistics_keep_their_parameters() -> None:
    model = nn.ModuleDict(
        {
            "batch": nn.BatchNorm2d(3),
            "layer": nn.LayerNorm(3),
            "instance": nn.InstanceNorm2d(3, affine=True),
            "tracked": nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
            "untracked": nn.BatchNorm2d(3, track_running_stats=False),
        }
    )
    assert [name for name, module in model.items() if keeps_dtype(module)] == ["batch", "tracked"]
    kept = kept_parameters(model)
    assert {n for n, p in model.named_parameters() if p in kept} == {
        "batch.weight",
        "batch.bias",
        "tracked.weight",
        "tracked.bias",
    }


@pytest.mark.parametrize("name", list(PRECISIONS))
def test_this_cpu_computes_in_every_policy(name: str) -> None:
    check_precision(PRECISIONS[name], CPU)


def test_a_device_that_fails_at_a_dtype_is_refused_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand more")

    monkeypatch.setattr(precisions, "_try_product", fail)
    with pytest.raises(UsageError) as failure:
        check_precision(PRECISIONS["fp16"], CPU)
    assert str(failure.value) == (
        "precision = 'fp16' on cpu: float16 does not work there: \"addmm_impl_cpu_\" not implemented for 'Half'\n"
        "  the device must compute forward and backward in the dtype of the policy\n"
        "  use precision = 'bf16', or 'fp32'"
    )
    check_precision(PRECISIONS["fp32"], CPU)  # needs no trial


def test_a_dtype_that_autocast_would_switch_off_with_a_warning_is_refused() -> None:
    """Torch warns and goes on in fp32: a run that is called fp8 and is not."""
    unknown = Precision(name="own", autocast_dtype=torch.float64)
    with pytest.raises(UsageError, match="precision = 'own' on cpu: float64 does not work there: In CPU autocast"):
        check_precision(unknown, CPU)


def test_a_gpu_without_bf16_gets_fp16_and_refuses_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    device = torch.device("cuda", 0)
    assert mixed_precision(device).name == "fp16"
    assert mixed_precision(CPU).name == "bf16"
    for name in ("bf16", "bf16_master"):
        with pytest.raises(UsageError, match=r"bfloat16 does not work there(.|\n)*use precision = 'fp16', or 'fp32'"):
            check_precision(PRECISIONS[name], device)
