"""Offload in a dry run: what crosses the bus, what the host does, and what the device no longer holds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from program_counts import count_bytes, events_of

from paceline.cluster.devices import load_cluster
from paceline.cluster.kernels import Operation
from paceline.config import Config, config_from_dict, layout_of
from paceline.engines.flat.shard import host_empty
from paceline.errors import UsageError
from paceline.predict.formulas.engine_costs import bus_bytes_per_s, host_bytes_per_s
from paceline.predict.formulas.step import COMPOSED_P90
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.predict.replay.program import TO_DEVICE, TO_HOST, Event, Issue, OnHost, Program, Run, Wait
from paceline.predict.replay.replay import replay
from paceline.rehearse.dryrun.held import mark_host_work
from paceline.rehearse.dryrun.record import record_stages

MICROBATCHES = 4
ALL = ("optimizer", "gradients", "parameters")


def record(config: Config, **options: Any) -> Program:
    """Records the one rank that a model without stages has to run."""
    (program,) = record_stages(config, **options)
    return program


def make_config(strategy: str, offload: tuple[str, ...], ranks: int = 4, **parallel: Any) -> Config:
    return config_from_dict(
        {
            "name": "offload",
            "model": {"kind": "gpt", "layers": 1, "heads": 2, "width": 32, "context": 16, "tied": True, "dropout": 0.0},
            "data": {"kind": "synthetic_tokens", "vocab_size": 64, "context": 16, "samples": 64},
            "parallel": {"ranks": ranks, "strategy": strategy, **parallel},
            "train": {"steps": 2, "global_batch": 4 * MICROBATCHES, "accumulate": MICROBATCHES},
            "optim": {"kind": "adamw", "lr": 1e-3, "clip_norm": 1.0},
            "memory": {"offload": list(offload)},
        }
    )


@cache
def recorded(strategy: str, *offload: str) -> Program:
    return record(make_config(strategy, offload), ranks=4)


def shard_bytes() -> int:
    return recorded("fsdp").peak_memory()["parameters"]


def test_states_are_not_on_the_device() -> None:
    program = recorded("fsdp", *ALL)
    peak = program.peak_memory()
    assert (peak["parameters"], peak["gradients"], peak["optimizer"]) == (0, 0, 0)
    kept = recorded("fsdp", "optimizer").peak_memory()
    assert (kept["parameters"], kept["optimizer"]) == (shard_bytes(), 0)  # a copy of the slice stays
    whole = recorded("fsdp").peak_memory()
    assert sum(peak.values()) < sum(kept.values()) < sum(whole.values())


@pytest.mark.parametrize(("strategy", "offload"), [("fsdp", ALL), ("zero2", ("optimizer",))])
def test_the_device_holds_what_the_estimate_says(strategy: str, offload: tuple[str, ...]) -> None:
    config = make_config(strategy, offload)
    facts = describe_model(config, "cuda")
    assert facts is not None
    layout = replace(layout_of(config, 4), microbatch=1)
    assert layout.shards == 4
    expected = estimate_memory(facts, layout, StateFacts.of(config, "cuda"))
    total = sum(recorded(strategy, *offload).peak_memory().values())
    assert total == pytest.approx(expected.device_bytes - expected.framework, rel=0.35)


def test_gradients_leave_with_every_microbatch_and_parameters_come_with_every_gather() -> None:
    moved = count_bytes(recorded("fsdp", *ALL))
    assert moved[TO_HOST] == MICROBATCHES * shard_bytes()
    gathered = moved["all_gather"]
    assert moved[TO_DEVICE] == gathered // 4  # of each gather this rank's slice
    alone = count_bytes(recorded("fsdp", "gradients"))
    assert alone[TO_HOST] == (MICROBATCHES - 1) * shard_bytes()  # the last one stays, and gets the sum of the others
    assert alone[TO_DEVICE] == shard_bytes()


def test_the_update_runs_on_the_host_and_waits_for_gradients() -> None:
    events = list(events_of(recorded("zero2", "optimizer")))
    updates = [each for each in events if isinstance(each, OnHost) and each.name.startswith("_fused")]
    assert updates
    assert not [each for each in events if isinstance(each, Run) and each.operation.family == "optimizer"]
    masters = recorded("zero2").peak_memory()["optimizer"] // 2
    assert sum(each.num_bytes for each in updates) == pytest.approx(7 * masters, rel=0.02)  # reads 4, writes 3 of them
    issued = {each.number for each in events if isinstance(each, Issue) and each.kind == TO_HOST}
    waited = {number for each in events if isinstance(each, OnHost) for number in each.waits}
    assert waited == issued
    assert [each for each in events if isinstance(each, OnHost) and each.reads]  # whether the norm is finite


@pytest.mark.parametrize("name", ["1x dgx-h100", "1x p3.8xlarge"])
def test_bus_and_host_have_a_price(name: str) -> None:
    cluster, program = load_cluster(name), recorded("fsdp", *ALL)
    found = replay(program, cluster).longest
    moved = count_bytes(program)
    for kind in (TO_HOST, TO_DEVICE):
        assert found.communication[kind] == pytest.approx(moved[kind] / bus_bytes_per_s(cluster))
        assert found.moved[kind] == moved[kind]
    worked = sum(each.num_bytes for each in program.events if isinstance(each, OnHost))
    assert 0 < found.on_host <= worked / host_bytes_per_s(cluster) * (1 + 1e-9)
    assert found.idle == pytest.approx(0.0, abs=1e-9)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)


def test_no_published_run_vouches_for_it() -> None:
    cluster = load_cluster("1x dgx-h100")
    usual, moved = (replay(recorded("fsdp", *offload), cluster) for offload in ((), ALL))
    reason = "offloaded states: no published run has them"
    assert reason in moved.outside
    assert reason not in usual.outside
    low, _ = moved.band
    assert low == pytest.approx(moved.seconds * (1 - COMPOSED_P90))


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero2", marks=pytest.mark.exhaustive)])
def test_a_composed_step_is_the_whole_one(strategy: str) -> None:
    offload = ALL if strategy == "fsdp" else ("optimizer",)
    whole = record(make_config(strategy, offload), ranks=4, is_whole=True)
    program, cluster = recorded(strategy, *offload), load_cluster("1x dgx-h100")
    assert replay(program, cluster).seconds == pytest.approx(replay(whole, cluster).seconds, rel=1e-9)
    assert count_bytes(program) == count_bytes(whole)


def test_one_rank_waits_for_its_parameters_when_it_reads_them() -> None:
    program = record(make_config("fsdp", ALL, ranks=1), ranks=1)
    copies = {each.number for each in program.events if isinstance(each, Issue) and each.kind == TO_DEVICE}
    assert copies
    assert {each.number for each in program.events if isinstance(each, Wait)} == copies


def test_a_cpu_has_nowhere_to_offload_to() -> None:
    on, off = (make_config("fsdp", offload, device="cpu") for offload in (ALL, ()))
    assert record(on, ranks=4) == record(off, ranks=4)


def test_data_parallelism_offloads_nothing() -> None:
    config = make_config("fsdp", ALL)
    asked = config.model_copy(update={"parallel": config.parallel.model_copy(update={"strategy": "ddp"})})
    with pytest.raises(UsageError, match="offload"):
        record(asked, ranks=4)


def test_host_memory_of_a_dry_run_is_not_there() -> None:
    made = host_empty(10**13, torch.float32, torch.device("meta"))
    assert made.is_meta
    assert made.numel() == 10**13


def kernel(name: str, reads: int, writes: int) -> Run:
    return Run(Operation(name=name, family="pointwise", dtype="fp32", reads=((reads, 8),), writes=((writes, 8),)))


def test_kernels_are_told_apart_by_where_they_read_and_write() -> None:
    places = {tensor: tensor for tensor in range(8)}
    events: list[Event] = [
        kernel("copy_", 0, 1),  # device 0 to host 1
        kernel("mul", 1, 2),  # on the host: 2 is the host's, too
        kernel("copy_", 2, 3),  # host 2 to device 3
        kernel("neg", 4, 5),  # on the device, without 3
        kernel("neg", 3, 5),
        Issue(7, "all_reduce", 8, (0, 1), "world"),
        Wait(7),
    ]
    found, starts = mark_host_work(events, {1}, places, 0)
    assert [type(each).__name__ for each in found] == [
        "Issue",
        "OnHost",
        "Issue",
        "Run",
        "Wait",
        "Run",
        "Issue",
        "Wait",
    ]
    assert starts == (0, 1, 2, 3, 4, 6, 7, 8)
    out, work, back, _, arrived, _, reduced, waited = found
    assert (out, back) == (Issue(7, TO_HOST, 8, (0,), TO_HOST), Issue(8, TO_DEVICE, 8, (0,), TO_DEVICE))
    assert work == OnHost("mul", 16, (7,), phase="forward")
    assert arrived == Wait(8)
    assert isinstance(reduced, Issue)
    assert (reduced.number, waited) == (9, Wait(9))


def test_an_average_of_what_is_on_the_host_is_there_too() -> None:
    config = make_config("fsdp", ALL)
    averaged = config.model_copy(update={"train": config.train.model_copy(update={"ema_decay": 0.9})})
    program = record(averaged, ranks=4)
    assert program.peak_memory() == recorded("fsdp", *ALL).peak_memory()
    assert [each for each in program.events if isinstance(each, OnHost) and each.name == "_foreach_lerp_"]
