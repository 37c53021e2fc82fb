"""``train.precision: auto``: what it is on which device, why, and that nobody is left with the word itself."""

from __future__ import annotations

import pytest

from paceline.cluster.devices import load_cluster
from paceline.config import Config, explain, layout_of, load_config, with_precision
from paceline.config.schema import TrainConfig
from paceline.plan.plan import RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.search.request import make_plan, planned_values, request_for
from paceline.search.result import plan_for

GPT = ["model={kind: gpt, layers: 2, width: 64, heads: 2}", "data={kind: synthetic_tokens, context: 32}"]


def config(*words: str) -> Config:
    return load_config(None, [*GPT, *words])


@pytest.mark.parametrize(
    ("device", "has_bf16", "dtype", "name", "reason"),
    [
        ("cuda", True, "float32", "bf16_master", "fp32 masters lose no update"),
        ("cuda", False, "float32", "fp32", "no units for bf16"),
        ("cuda", True, "float64", "fp32", "for exactness"),
        ("cpu", True, "float32", "fp32", "ranks on CPUs"),
        ("auto", True, "float32", "fp32", ""),
    ],
)
def test_what_auto_is(device: str, has_bf16: bool, dtype: str, name: str, reason: str) -> None:
    train = TrainConfig(dtype=dtype)  # type: ignore[arg-type]
    assert train.precision == "auto"
    assert train.precision_on(device, has_bf16=has_bf16) == name
    assert reason in train.precision_reason(device, has_bf16=has_bf16)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "bf16_master"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
def test_a_precision_that_is_named_is_taken(device: str, name: str) -> None:
    asked = config(f"train.precision={name}", f"parallel.device={device}")
    assert layout_of(asked).precision == name
    assert with_precision(asked, "cuda", has_bf16=False) is asked


def test_a_layout_holds_the_decided_name_alone() -> None:
    assert layout_of(config("parallel.device=cuda")).precision == "bf16_master"
    assert layout_of(config("parallel.device=cpu")).precision == "fp32"
    assert layout_of(config()).precision == "fp32"  # until the device is known
    for device, name in (("cuda", "bf16_master"), ("cpu", "fp32")):
        assert make_plan(config(), RunMachine(device=device, ranks=1)).layout.precision == name


def test_configs_of_cpu_ranks_stay_as_they_are() -> None:
    asked = config("parallel.device=cpu")
    assert with_precision(asked, "cpu") is asked
    assert with_precision(config(), "cuda").train.precision == "bf16_master"
    assert with_precision(config("parallel.device=cuda"), "cuda", has_bf16=False).train.precision == "fp32"


def test_exactness_goes_with_auto() -> None:
    assert layout_of(config("train.dtype=float64", "parallel.device=cuda")).precision == "fp32"


def test_explain_says_what_and_why() -> None:
    rows = {device: _row(config(f"parallel.device={device}")) for device in ("cuda", "cpu", "auto")}
    assert rows["cuda"][0] == "bf16_master"
    assert rows["cpu"] == ("fp32", "derived: ranks on CPUs, where bf16 is often slower than fp32")
    assert rows["auto"][0] is None
    assert "known with the device" in rows["auto"][1]
    assert not [row for row in explain(config("train.precision=bf16")) if row.key == "derived.precision"]


def _row(asked: Config) -> tuple[object, str]:
    (row,) = (row for row in explain(asked) if row.key == "derived.precision")
    return row.value, row.origin


@pytest.mark.parametrize(
    ("cluster", "name"), [("1x dgx-h100", "bf16_master"), ("1x dgx-1", "fp32"), ("cpu-host", "fp32")]
)
def test_a_plan_is_made_in_the_precision_that_the_run_will_have(cluster: str, name: str) -> None:
    found = load_cluster(cluster)
    asked = config("train.global_batch=16", "train.steps=1")
    request = request_for(asked, found)
    assert [task.base.precision for task in request.tasks] == [name]
    winner = plan_for(request).winner
    assert winner is not None
    assert winner.layout.precision == name
    written = planned_values(request.config, winner.workload, found)["train"].get("precision", "auto")
    assert written == ("auto" if cluster == "cpu-host" else name)


def test_memory_is_estimated_in_the_precision_of_the_device() -> None:
    half, whole = (describe_model(config(f"parallel.device={device}"), device) for device in ("cuda", "cpu"))
    named = describe_model(config("train.precision=bf16_master"), "cuda")
    assert half is not None
    assert whole is not None
    assert half == named
    assert half.blocks[0].input_bytes * 2 == whole.blocks[0].input_bytes
