"""What a plan says of itself: bytes that add up, why a config is not judged, and devices without units for a dtype."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.devices import load_cluster
from paceline.config import Config, config_from_dict
from paceline.search.request import request_for
from paceline.search.result import PlanResult, plan_for
from paceline.search.search import host_bytes


def make_config(*, batch: int = 64, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "name": "planned",
        "model": {"kind": "gpt", "layers": 8, "heads": 16, "width": 2048, "vocab_size": 32000},
        "data": {"kind": "synthetic_tokens", "vocab_size": 32000, "context": 2048, "samples": 1024},
        "train": {"steps": 1, "global_batch": batch, "precision": "bf16_master"},
    }
    return config_from_dict({**values, **{name: {**values.get(name, {}), **keys} for name, keys in sections.items()}})


def planned(config: Config, cluster: str = "1x dgx-h100", precision: str | None = None) -> PlanResult:
    return planned_once(config.model_dump_json(), cluster, precision)


@functools.cache
def planned_once(config: str, cluster: str, precision: str | None) -> PlanResult:
    return plan_for(request_for(Config.model_validate_json(config), load_cluster(cluster), precision=precision))


@pytest.mark.parametrize("cluster", ["1x dgx-h100", "1x h100-sxm", "cpu-host"])
def test_categories_add_up_to_what_decides_whether_a_plan_fits(cluster: str) -> None:
    precision = {"precision": "fp32"} if cluster == "cpu-host" else {}
    found = planned(make_config(model={"layers": 2, "width": 256}, train=precision), cluster)
    plans = found.to_json(top=1000)["plans"]
    for plan in plans:
        assert sum(plan["memory_by_category"].values()) == pytest.approx(plan["memory_bytes"])
        assert plan["memory_bytes"] == pytest.approx(sum(plan["memory_by_estimate"].values()))
    assert plans


def test_categories_are_of_the_formula_where_the_package_does_not_build_the_model() -> None:
    own = planned(make_config()).to_json(top=1)["plans"][0]
    assert own["memory_by_category"] == own["memory_by_estimate"]
    request = request_for(make_config(), load_cluster("1x dgx-h100"))
    strange = replace(request, tasks=tuple(replace(task, need=None) for task in request.tasks))
    found = plan_for(strange)
    plan = found.to_json(top=1)["plans"][0]
    assert plan["memory_by_estimate"] is None
    assert plan["memory_by_category"] == {**plan["memory_by_formula"], "buffers": 0.0}
    assert "memory is by formula" in found.to_text(1)


NOT_JUDGED = [
    ({"train": {"global_batch": 4}}, "parallel.ranks = 8 is more than train.global_batch = 4"),
    ({"train": {"global_batch": 12}}, "12"),
    ({"parallel": {"strategy": "auto"}}, "parallel.strategy = auto"),
    ({"train": {"microbatch": "auto"}}, "train.microbatch = auto"),
    ({"parallel": {"pipeline": 2, "schedule": "gpipe"}}, "its schedule has no formula"),
]


@pytest.mark.some(2)
@pytest.mark.parametrize(("changes", "reason"), NOT_JUDGED)
def test_a_config_that_is_not_judged_says_why(changes: dict[str, dict[str, Any]], reason: str) -> None:
    found = planned(make_config(**changes))
    assert found.as_written is None
    assert reason in found.not_judged
    assert f"as written: not judged, as {found.not_judged}" in found.to_text()
    assert found.to_json()["as_written_not_judged"] == found.not_judged


def test_another_precision_is_not_what_is_written() -> None:
    found = planned(make_config(), precision="bf16")
    assert found.as_written is None
    assert "precision" in found.not_judged


def test_a_config_that_is_judged_needs_no_reason() -> None:
    found = planned(make_config())
    assert found.as_written is not None
    assert found.to_json()["as_written_not_judged"] is None
    assert "not judged" not in found.to_text()


def test_a_device_without_units_for_a_dtype_is_told_of() -> None:
    volta = planned(make_config(), "1x dgx-1")
    (line,) = volta.assumed
    assert line == (
        "v100-sxm-16gb has no units for bf16, and emulates it, at 15.7 TFLOP/s at best: its units are for fp32 and fp16"
    )
    assert f"assumed: {line}" in volta.to_text()
    assert volta.to_json()["assumed"] == [line]
    assert planned(make_config(train={"precision": "fp16"}), "1x dgx-1").assumed == ()
    assert planned(make_config()).assumed == ()


@pytest.mark.parametrize("asked", [["parameters"], ["optimizer", "gradients", "parameters"]])
def test_what_offload_brings_with_it_is_part_of_it(asked: list[str]) -> None:
    found, same = (
        planned(make_config(parallel={"strategy": "fsdp"}, train={"microbatch": 1}, memory={"offload": offload}))
        for offload in (asked, ["optimizer", "parameters"])
    )
    assert found.as_written is not None
    assert same.as_written is not None
    assert found.as_written == same.as_written
    assert host_bytes(found.as_written.workload) > 0
