"""What a step's traffic should take, and other facts that a run's records, plan and devices say together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kept_figures import is_same
from made_records import END, RUN, STEP

from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import wire_cost
from paceline.records.facts import RunFacts, catalog_name, find_facts
from paceline.records.records import CommRecord, EventRecord, Record, RunRecord
from paceline.records.summary import RunRecords

H100 = replace(RUN, device="NVIDIA H100 80GB HBM3", world_size=4, num_parameters=25 * 2**20)
SENT = CommRecord(step=1, kind="all_reduce", group="data", ranks=4, calls=2, bytes=2**22, seconds=0.1, time=1.0)


def facts_of(folder: Path, run: RunRecord, *others: Record, cluster: str = "", hosts: tuple[str, ...] = ()) -> RunFacts:
    steps = [replace(STEP, step=number) for number in (1, 2)]
    names = hosts or (run.host,) * run.world_size
    ranks = [[replace(run, rank=rank, host=name), *steps, *others, END] for rank, name in enumerate(names)]
    return find_facts(folder, RunRecords.of(ranks), cluster)


def price(run: RunRecord, kind: str, num_bytes: int) -> float:
    cost = wire_cost(load_cluster("4x h100-sxm"), run.world_size, run.world_size)
    return cost(kind, num_bytes, tuple(range(run.world_size)))


def test_without_records_of_operations_the_gradients_are_priced_in_buckets(tmp_path: Path) -> None:
    """100 MiB of gradients in fp32 are four buckets, beside two sums of a number."""
    run, total, bucket = H100, 100 * 2**20, 25 * 2**20
    small = 2 * price(run, "all_reduce", 4)
    found = facts_of(tmp_path, run, cluster="4x h100-sxm").priced_comm_s
    assert found == pytest.approx(small + 4 * price(run, "all_reduce", bucket), rel=1e-12)
    sharded = facts_of(tmp_path, replace(run, strategy="fsdp"), cluster="4x h100-sxm").priced_comm_s
    gathers = 2 * price(run, "all_gather", bucket) + price(run, "reduce_scatter", bucket)
    assert sharded == pytest.approx(small + 4 * gathers, rel=1e-12)
    odd = facts_of(tmp_path, replace(run, num_parameters=25 * 2**20 + 1), cluster="4x h100-sxm").priced_comm_s
    assert odd == pytest.approx(small + 5 * price(run, "all_reduce", (total + 4) // 5), rel=1e-12)
    tiny = facts_of(tmp_path, replace(run, num_parameters=1), cluster="4x h100-sxm").priced_comm_s
    assert tiny == pytest.approx(small + price(run, "all_reduce", 4), rel=1e-12)


def test_operations_that_were_recorded_are_priced_as_they_were(tmp_path: Path) -> None:
    found = facts_of(tmp_path, H100, SENT, replace(SENT, kind="all_gather", calls=1), cluster="4x h100-sxm")
    expected = 2 * price(H100, "all_reduce", 2**21) + price(H100, "all_gather", 2**22)
    assert found.priced_comm_s == pytest.approx(expected / 2, rel=1e-12)  # of two steps
    assert [row.kind for row in found.traffic] == ["all_gather", "all_reduce"]


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 1},
        {"world_size": 2**16 + 1},
        {"strategy": "ddp in a pipeline of 2"},
        {"strategy": "hybrid"},
        {"strategy": "of the user's own"},
        {"num_parameters": 0},
        {"device": "cuda of nobody"},
    ],
)
def test_what_is_not_known_has_no_price(changes: dict[str, Any], tmp_path: Path) -> None:
    found = facts_of(tmp_path, replace(H100, **changes), hosts=("node-1",))
    assert found.priced_comm_s is None


def test_hosts_without_a_catalog_entry_are_priced_by_their_processors(tmp_path: Path) -> None:
    run = replace(H100, device="cpu", backend="gloo", world_size=2)
    found = facts_of(tmp_path, run)
    cost = wire_cost(None, 2, 2)
    total = 100 * 2**20
    expected = 2 * cost("all_reduce", 4, (0, 1)) + 4 * cost("all_reduce", total // 4, (0, 1))
    assert found.priced_comm_s == pytest.approx(expected, rel=1e-12)
    assert (found.num_hosts, found.is_inside_a_host) == (1, True)
    apart = facts_of(tmp_path, run, hosts=("a", "b"))
    assert (apart.num_hosts, apart.is_inside_a_host) == (2, False)
    cost = wire_cost(None, 2, 1)
    expected = 2 * cost("all_reduce", 4, (0, 1)) + 4 * cost("all_reduce", total // 4, (0, 1))
    assert apart.priced_comm_s is not None
    assert is_same(apart.priced_comm_s, expected)
    assert not facts_of(tmp_path, replace(run, backend="virtual")).is_inside_a_host


@pytest.mark.parametrize(
    ("name", "expected"),
    [("4x h100-sxm", "4x h100-sxm"), ("a/b", ""), ("a\\b", ""), ("own.yaml", ""), ("own.yml", ""), ("", "")],
)
def test_a_file_is_no_name_of_the_catalog(name: str, expected: str) -> None:
    assert catalog_name(name) == expected


def test_memory_is_of_the_plan_the_records_and_the_device(tmp_path: Path) -> None:
    planned = {"device_bytes": 99, "parameters": 5, "none": 0, "less": -1, "text": "x", "share": 0.5, "buffers": 7}
    (tmp_path / "plan.json").write_text(json.dumps({"memory": planned}))
    cut = {"microbatch": 8, "reason": "memory ran out"}
    events = [EventRecord(name="microbatch", step=3, detail=cut, time=1.0)]
    events += [EventRecord(name="microbatch", step=5, detail={"microbatch": "x"}, time=1.0)]
    found = facts_of(tmp_path, replace(H100, device="h100-sxm"), *events).memory
    assert (found.by_category, found.cuts, found.peak_bytes) == ({"parameters": 5, "buffers": 7}, {3: 8}, 2**20)
    assert found.capacity_bytes is not None
    assert found.filled == 2**20 / found.capacity_bytes
    for text in ("", "[]", '{"memory": 3}'):
        (tmp_path / "plan.json").write_text(text)
        assert facts_of(tmp_path, replace(H100, device="cpu")).memory.by_category == {}
    cpu = facts_of(tmp_path, replace(H100, device="cpu")).memory
    assert (cpu.capacity_bytes, cpu.filled) == (None, 0.0)
