"""Simulated runs: the numbers of a run without clocks, times that repeat to the bit, slow ranks, and time lines."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster.devices import Cluster, load_cluster
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError, RankFailedError, RunFolderError, UsageError
from paceline.health.straggler import find_straggler
from paceline.records import meter
from paceline.records.records import CommRecord, EndRecord, EvalRecord, RunRecord, StepRecord
from paceline.records.report import summarize
from paceline.rehearse.prediction import memory_bound
from paceline.rehearse.simulate.recording import KeptRecords, draw_step, trace_events, write_records, write_trace
from paceline.rehearse.simulate.run import Conditions, Simulation, prepare, simulate
from paceline.train.assemble import build_trainer


def make_config(
    ranks: int = 2, steps: int = 3, cluster: Cluster | None = None, comm: dict[str, Any] | None = None, **parallel: Any
) -> Config:
    values = {
        "name": "tiny",
        "model": {"kind": "mlp", "hidden_dim": 16, "num_classes": 4, "dropout": 0.2},
        "data": {"kind": "synthetic_classification", "samples": 40, "features": 6, "classes": 4},
        "train": {"steps": steps, "global_batch": max(8, ranks) if cluster else 8, "eval_every": 2},
        "parallel": {"device": "cpu", "threads": 1, **parallel},
        "comm": comm or {},
    }
    return prepare(config_from_dict(values, source="test"), ranks=ranks, cluster=cluster)


MODELLED = Conditions(compute="modelled")


def losses(found: Simulation, rank: int = 0) -> list[tuple[float, float | None]]:
    return [(each.loss_sum, each.grad_norm) for each in found.records[rank] if isinstance(each, StepRecord)]


@pytest.mark.some(2)
@pytest.mark.parametrize("compute", ["measured", "modelled"])
@pytest.mark.parametrize(
    "parallel",
    [{}, {"strategy": "fsdp"}, {"strategy": "zero1"}, {"pipeline": 2, "schedule": "1f1b"}],
    ids=["ddp", "fsdp", "zero1", "pipeline"],
)
def test_clocks_change_no_number(parallel: dict[str, Any], compute: Any) -> None:
    config = make_config(**parallel)

    def plain(comm: Communicator) -> list[tuple[float, float | None]]:
        sink = KeptRecords()
        build_trainer(config, comm, sink=sink).run()
        return [(each.loss_sum, each.grad_norm) for each in sink.records if isinstance(each, StepRecord)]

    found = simulate(config, Conditions(compute=compute))
    assert [losses(found, rank) for rank in range(2)] == run_virtual(plain, 2)


def test_modelled_runs_repeat_to_the_bit(tmp_path: Path) -> None:
    config, text = make_config(), []
    for name in ("first", "second"):
        found = simulate(config, MODELLED)
        write_records(found.records, tmp_path / name)
        write_trace(tmp_path / name / "trace.json", found.clocks, found.steps)
        text.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.json*"))])
    assert text[0] == text[1]
    assert len(text[0]) == 3
    assert all(text[0])


def test_records_look_like_those_of_a_run(tmp_path: Path) -> None:
    found = simulate(make_config(ranks=4), MODELLED)
    write_records(found.records, tmp_path)
    with pytest.raises(RunFolderError, match="records of another run"):
        write_records(found.records, tmp_path)
    kinds = [type(each) for each in found.records[3]]
    assert kinds == [RunRecord, StepRecord, StepRecord, EvalRecord, StepRecord, EvalRecord, EndRecord]
    summary = summarize(tmp_path)
    assert (summary.status, summary.steps, summary.world_size, summary.backend) == ("done", 3, 4, "virtual")
    assert summary.test_accuracy == found.summary.test_accuracy
    assert summary.seconds == pytest.approx(found.summary.seconds, rel=0.01)
    for own in found.records:
        times = [each.time for each in own]
        assert times == sorted(times)
        for step in own:
            if isinstance(step, StepRecord):
                parts = step.data_s + step.forward_s + step.backward_s + step.optimizer_s + step.comm_s
                assert parts == pytest.approx(step.step_s)
                assert step.memory_bytes > 0


def test_a_slow_rank_or_link_slows_all_and_only_in_time() -> None:
    plain, slow, link = (
        simulate(make_config(ranks=4), dataclasses.replace(MODELLED, **change))
        for change in ({}, {"slow": {2: 3.0}}, {"slow_links": {1: 3.0}})
    )
    assert losses(plain) == losses(slow) == losses(link)
    assert slow.summary.step_s > 1.3 * plain.summary.step_s
    assert link.summary.step_s > 1.3 * plain.summary.step_s
    waited = [each.exposed_s for each in slow.summary.by_rank]
    assert min(range(4), key=lambda rank: waited[rank]) == 2  # the others wait for it
    assert slow.summary.efficiency < plain.summary.efficiency


@pytest.mark.parametrize("late", [0, 2])
def test_a_slow_rank_is_named_as_the_straggler(late: int) -> None:
    found = simulate(make_config(ranks=4, steps=8), dataclasses.replace(MODELLED, slow={late: 3.0}))
    steps: dict[int, dict[int, StepRecord]] = {}
    for rank, records in enumerate(found.records):
        for record in records:
            if isinstance(record, StepRecord):
                steps.setdefault(record.step, {})[rank] = record
    straggler = find_straggler(list(steps.values()))
    assert straggler is not None
    assert (straggler.rank, straggler.steps_last) == (late, straggler.steps)
    excess = {
        phase: getattr(steps[8][late], f"{phase}_s") - getattr(steps[8][1], f"{phase}_s")
        for phase in ("data", "forward", "backward", "optimizer")
    }
    assert straggler.phase == max(excess, key=lambda phase: excess[phase])


def test_a_faster_network_takes_less() -> None:
    config = make_config(ranks=8)
    here = simulate(config, MODELLED)
    there = simulate(config, dataclasses.replace(MODELLED, cluster=load_cluster("1x dgx-a100")))
    assert there.summary.by_rank[0].exposed_s < here.summary.by_rank[0].exposed_s
    assert there.records[0][0].device == "a100-sxm-80gb"  # type: ignore[union-attr]
    assert losses(here) == losses(there)


def test_a_time_line_has_every_rank_and_the_step_as_letters(tmp_path: Path) -> None:
    found = simulate(make_config(), MODELLED)
    events = trace_events(found.clocks, found.steps)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["rank 0, simulated", "rank 1, simulated"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"steps", "phases", "waits", "collectives"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"step 1", "forward", "backward", "optimizer", "all_reduce"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    write_trace(tmp_path / "deep" / "trace.json", found.clocks, found.steps)
    assert json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"] == events
    drawn = draw_step(found.clocks, found.steps)
    assert len(drawn) == 4
    assert {"F", "B", "U"} <= set(drawn[0])
    assert "=" in drawn[1]
    assert len(draw_step(found.clocks, found.steps, most=1)) == 3


def test_a_time_line_begins_with_the_first_step() -> None:
    found = simulate(make_config(), Conditions(slow={1: 2.0}))  # measured: set-up takes time
    assert min(bounds[0].start_s for bounds in found.steps) > 0
    spans = [event for event in trace_events(found.clocks, found.steps) if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    assert "set-up" not in {event["name"] for event in spans}


def test_bad_input_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"global_batch"):
        make_config(ranks=16)
    with pytest.raises(UsageError, match=r"slow = \{7: 2\}"):
        simulate(make_config(), Conditions(slow={7: 2.0}))
    with pytest.raises(UsageError, match="compute = 'guessed'"):
        simulate(make_config(), Conditions(compute="guessed"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="4 ranks on 2x"):
        simulate(make_config(ranks=4), Conditions(cluster=load_cluster("2x a100-sxm-80gb")))
    compiled = make_config()
    compiled = compiled.model_copy(update={"model": compiled.model.model_copy(update={"compile": True})})
    with pytest.raises(UsageError, match=r"model.compile"):
        simulate(compiled, MODELLED)


def test_a_rank_that_fails_is_named() -> None:
    def fail(rank: int, trainer: Any) -> None:
        del trainer
        if rank == 1:
            raise ValueError("a mistake of the user")

    with pytest.raises(RankFailedError, match="rank 1"):
        simulate(make_config(), MODELLED, watch=fail)


def test_records_of_communication_follow_the_simulated_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine takes, and once a second of the machine that is simulated."""
    slow = dataclasses.replace(MODELLED, slow={1: 10_000.0})
    days = itertools.count(step=86_400.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(time=lambda: next(days)))
    short, long = (simulate(make_config(ranks=2), each).records[0] for each in (MODELLED, slow))
    assert not [each for each in short if isinstance(each, CommRecord)]
    assert [each.step for each in long if isinstance(each, CommRecord)]


def test_a_simulation_knows_the_hosts_of_its_cluster() -> None:
    cluster, by_hosts = load_cluster("2x dgx-a100"), {"algorithm": "hierarchical"}
    config = make_config(16, cluster=cluster, comm=by_hosts)
    assert config.parallel.node_ranks == 8
    assert make_config(12, cluster=cluster).parallel.node_ranks is None  # eight on one host, four on the other
    with pytest.raises(ConfigError, match="every host runs as many ranks"):
        make_config(12, cluster=cluster, comm=by_hosts)
    with pytest.raises(ConfigError, match="hierarchical on 8 ranks"):
        make_config(8, cluster=cluster, comm=by_hosts)
    with pytest.raises(UsageError, match=r"node_ranks = 4 on 2x dgx-a100\n.*8 share one"):
        make_config(16, cluster=cluster, node_ranks=4)
    hosts = dataclasses.replace(cluster, node=dataclasses.replace(cluster.node, devices=2))
    found = simulate(
        make_config(4, steps=1, cluster=hosts, comm=by_hosts), Conditions(cluster=hosts, compute="modelled")
    )
    assert [each.host for own in found.records for each in own if isinstance(each, RunRecord)] == [
        *("virtual-0", "virtual-0", "virtual-1", "virtual-1")
    ]


def test_memory_of_a_simulated_gpu_is_what_the_gpu_would_hold() -> None:
    config, cluster = make_config(steps=1), load_cluster("2x h100-sxm")
    found = {
        each.memory_bytes
        for own in simulate(config, dataclasses.replace(MODELLED, cluster=cluster)).records
        for each in own
        if isinstance(each, StepRecord)
    }
    assert found == {memory_bound(config, cluster, 2)}
    on_host = memory_bound(config, load_cluster("cpu-host"), 2)
    assert on_host is not None
    assert min(found) > 2 * on_host  # what CUDA itself takes


def test_memory_of_a_model_that_nobody_has_described_is_not_told() -> None:
    values = {
        "model": {"kind": "factory", "factory": "own_model:Own", "args": {"width": 8}},
        "data": {"kind": "synthetic_classification", "samples": 16, "features": 64, "classes": 10},
        "train": {"steps": 1, "global_batch": 4},
        "parallel": {"device": "cpu", "threads": 1},
    }
    cluster = load_cluster("1x dgx-a100")
    found = simulate(prepare(config_from_dict(values), ranks=2, cluster=cluster), Conditions(cluster=cluster))
    assert [each.memory_bytes for each in found.records[0] if isinstance(each, StepRecord)] == [0]


def test_the_backend_of_a_simulated_run_counts_or_is_refused() -> None:
    config, host = make_config(steps=1), load_cluster("2x cpu-host")
    gloo, shared = (
        simulate(config, dataclasses.replace(MODELLED, cluster=host, backend=name)).summary.step_s
        for name in ("gloo", "shared_memory")
    )
    assert shared < gloo
    for name, named in (("nccl", "2x h100-sxm"), ("shared_memory", "2x cpu-host")):
        with pytest.raises(UsageError, match=f"comm.backend = {name} without a cluster(.|\n)*{named}"):
            simulate(config, dataclasses.replace(MODELLED, backend=name))
