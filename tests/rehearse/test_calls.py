"""What is known of operators changes nothing: recordings with it and without it are the same, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import Config, config_from_dict
from paceline.predict.replay.program import Program
from paceline.rehearse.dryrun.operators import KnownCalls, OperatorCall
from paceline.rehearse.dryrun.record import record_stages

aten = torch.ops.aten


def make_config(**parallel: Any) -> Config:
    accumulate = 4 if "pipeline" in parallel else 1
    model = {"kind": "gpt", "layers": 2, "heads": 2, "width": 32, "context": 16, "tied": True, "dropout": 0.0}
    return config_from_dict(
        {
            "model": model,
            "data": {"kind": "synthetic_tokens", "vocab_size": 64, "context": 16, "samples": 64},
            "parallel": {"ranks": 4, **parallel},
            "train": {"steps": 2, "global_batch": 4 * accumulate, "accumulate": accumulate, "precision": "bf16"},
            "optim": {"kind": "adamw", "lr": 1e-3, "clip_norm": 1.0},
            "comm": {"bucket_mb": 0.05, "first_bucket_mb": 0.01},
        }
    )


def programs(config: Config, calls: KnownCalls | None = None) -> tuple[Program, ...]:
    return record_stages(config, ranks=4, calls=calls)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "ddp"},
        {"strategy": "zero2"},
        {"strategy": "fsdp"},
        {"strategy": "ddp", "pipeline": 2},
        {"strategy": "zero1", "tensor": 2},
    ],
    ids=["ddp", "zero2", "fsdp", "pipeline", "tensor"],
)
def test_a_recording_is_the_same_without_what_is_known(
    parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(**parallel)
    known = programs(config)
    monkeypatch.setattr("paceline.rehearse.dryrun.operators._kind", lambda _: "")  # of no kind that is remembered
    assert programs(config) == known


def test_a_recording_is_the_same_with_what_another_has_learnt() -> None:
    config, calls = make_config(strategy="fsdp"), KnownCalls()
    first = programs(config, calls)
    programs(make_config(strategy="zero2"), calls)
    assert programs(config, calls) == first


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


class Counts(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def call_twice(func: Any, *args: Any) -> tuple[OperatorCall, OperatorCall, list[str]]:
    """Calls an operator twice; returns both, and what torch ran for the second."""
    calls = KnownCalls()
    first = calls.call(func, args, {})
    calls.kernels(func, args, {}, first)
    with Counts() as counts:
        second = calls.call(func, args, {})
    assert calls.kernels(func, args, {}, second) == KnownCalls().kernels(func, args, {}, first)
    return first, second, counts.names


def test_a_product_is_looked_at_once() -> None:
    first, second, ran = call_twice(aten.mm.default, on_meta(4, 8), on_meta(8, 2))
    assert ran == ["empty_strided"]
    assert (first.result.shape, first.result.stride()) == (second.result.shape, second.result.stride())
    assert first.result.untyped_storage()._cdata != second.result.untyped_storage()._cdata


def test_an_operator_with_several_results_makes_all_of_them_again() -> None:
    first, second, ran = call_twice(aten.native_layer_norm.default, on_meta(4, 8), [8], on_meta(8), None, 1e-5)
    assert ran == ["empty_strided"] * 3
    assert [each.shape for each in first.returned] == [each.shape for each in second.returned]
    assert isinstance(second.result, tuple)


def test_what_is_written_to_is_returned() -> None:
    tensor = on_meta(4)
    _, second, ran = call_twice(aten.add_.Tensor, tensor, on_meta(4))
    assert second.result is tensor
    assert not ran


def test_a_result_that_lies_in_its_argument_does_so_each_time() -> None:
    tensor = on_meta(4, 2)
    _, second, _ = call_twice(aten._unsafe_view.default, tensor, [8])
    assert second.result.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_values_are_computed_each_time() -> None:
    _, second, ran = call_twice(aten.add.Tensor, torch.ones(2), torch.ones(2))
    assert second.result.tolist() == [2.0, 2.0]
    assert ran == ["add"]


def test_the_same_tensor_twice_is_not_two_tensors() -> None:
    calls, one, other = KnownCalls(), on_meta(4), on_meta(4)
    places = []
    for args in ((one, one), (one, other)):
        call = calls.call(aten.mul.Tensor, args, {})
        (kernel,) = calls.kernels(aten.mul.Tensor, args, {}, call)
        places.append(([call.tensors[place] for place, _ in kernel.reads], call.tensors[kernel.writes[0][0]]))
        assert places[-1][1] is call.result
    assert places[0][0][0] is places[0][0][1] is one
    assert places[1][0][0] is one
    assert places[1][0][1] is other


def test_other_dtypes_and_values_of_another_type_are_another_call() -> None:
    calls, tensor = KnownCalls(), on_meta(4).to(torch.int64)
    for other in (1, 1.0, True, on_meta(4), tensor):
        found = calls.call(aten.mul.Tensor, (tensor, other), {}).result
        assert found.dtype == aten.mul.Tensor(tensor, other).dtype
