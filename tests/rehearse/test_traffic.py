"""Compressed gradients and algorithms of our own: a dry rank hands over what a real one does, and they have a price."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from program_counts import count_bytes, count_operations, kernels_of
from real_traffic import issued_by_real_ranks

from paceline.cluster.costs import Placement, Wire, Wires, all_reduce_seconds
from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import algorithm_cost
from paceline.comm.algorithms.rounds import state_topology
from paceline.comm.dry.communicator import DryAlgorithmCommunicator, DryWorld, KeptJournal
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.predict.replay.program import Issue, Program, Wait
from paceline.predict.replay.replay import replay
from paceline.rehearse.dryrun.record import record_stages


def record(config: Config, **options: Any) -> Program:
    """Records the one rank that a model without stages has to run."""
    (program,) = record_stages(config, **options)
    return program


def make_config(ranks: int, comm: dict[str, Any], **parallel: Any) -> Config:
    return config_from_dict(
        {
            "name": "traffic",
            "model": {"kind": "gpt", "layers": 1, "heads": 2, "width": 32, "context": 16, "tied": True, "dropout": 0.0},
            "data": {"kind": "synthetic_tokens", "vocab_size": 64, "context": 16, "samples": 64},
            "parallel": {"ranks": ranks, "strategy": "ddp", **parallel},
            "train": {"steps": 2, "global_batch": 4 * ranks, "accumulate": 2},
            "optim": {"kind": "adamw", "lr": 1e-3, "clip_norm": 1.0},
            "comm": {"bucket_mb": 0.02, "first_bucket_mb": 0.01, **comm},
        }
    )


def counts(program: Program) -> tuple[Counter[str], Counter[str]]:
    return count_operations(program), count_bytes(program)


LONG = pytest.mark.exhaustive


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "policy",
    ["topk", "int8", *(pytest.param(each, marks=LONG) for each in ("randomk", "powersgd", "sign", "bf16", "fp16"))],
)
def test_compressed_gradients_travel_as_on_real_ranks(policy: str) -> None:
    ratio = {"ratio": 0.05} if policy in ("topk", "randomk") else {}
    config = make_config(2, {"compression": {"policy": policy, "min_size": 64, **ratio}})
    program = record(config, ranks=2)
    assert counts(program) == issued_by_real_ranks(config, 2, 2)[0]
    whole = record(make_config(2, {}), ranks=2)
    assert sum(count_bytes(program).values()) < sum(count_bytes(whole).values())
    assert sum(1 for _ in kernels_of(program)) > sum(1 for _ in kernels_of(whole))
    owed = program.peak_memory()["buffers"] - whole.peak_memory()["buffers"]
    assert owed > 0  # what was not sent is kept


@LONG
def test_steps_before_compression_begins_are_not_told_of() -> None:
    now = make_config(2, {"compression": {"policy": "bf16", "min_size": 64}})
    later = make_config(2, {"compression": {"policy": "bf16", "min_size": 64, "plain_steps": 50}})
    assert record(now, ranks=2) == record(later, ranks=2)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        ("ring", "zero2"),
        ("tree", "ddp"),
        ("hierarchical", "ddp"),
        pytest.param("hierarchical", "hybrid", marks=LONG),
        pytest.param("halving_doubling", "fsdp", marks=LONG),
        pytest.param("auto", "ddp", marks=LONG),
        pytest.param("ring", "ddp", marks=LONG),
    ],
)
def test_algorithms_send_the_messages_of_real_ranks(algorithm: str, strategy: str) -> None:
    ranks, node_ranks = 4, 2
    config = make_config(ranks, {"algorithm": algorithm}, strategy=strategy, node_ranks=node_ranks)
    real = issued_by_real_ranks(config, ranks, node_ranks)
    for rank in (0, ranks - 1):
        program = record(config, ranks=ranks, rank=rank, node_ranks=node_ranks)
        assert counts(program) == real[rank]
        assert count_operations(program)["send"]


@LONG
def test_a_pipeline_of_tensor_ranks_sends_the_messages_of_real_ones() -> None:
    config = make_config(4, {"algorithm": "ring"}, pipeline=2, tensor=2)
    real = issued_by_real_ranks(config, 4, 4)
    for program in record_stages(config, ranks=4, node_ranks=4):
        assert counts(program) == real[program.rank]


def test_rounds_but_the_first_are_waited_for_where_they_are_driven() -> None:
    journal = KeptJournal()
    comm = DryAlgorithmCommunicator(DryWorld(4).rank(1, journal), "ring", state_topology(4, 4))
    works = [comm.all_reduce(torch.empty(64, device="meta")) for _ in range(2)]
    assert [each.share for each in journal.operations] == [1 / 6] * 2
    assert journal.waits == []
    works[1].wait()  # carries out what was issued before, too
    assert [each.share for each in journal.operations] == [1 / 6, 1 / 6, 5 / 6, 5 / 6]
    assert journal.waits == [0, 2, 1, 3]
    works[0].wait()
    assert len(journal.operations) == 4


def test_numbers_that_the_host_reads_stay_right() -> None:
    world = DryWorld(4)
    for rank in (0, 3):
        comm = DryAlgorithmCommunicator(world.rank(rank), "auto", state_topology(4, 2))
        assert gather_objects(comm, {"rank": "alike"}) == [{"rank": "alike"}] * 4
        assert broadcast_object(comm, "told" if rank == 0 else None) == "told"
        number = torch.tensor([2.0])
        comm.all_reduce(number).wait()
        assert number.item() == 8.0


@pytest.mark.parametrize("name", ["2x dgx-h100", "4x cpu-host over ethernet-1g"])
def test_an_algorithm_has_the_price_of_its_formula(name: str) -> None:
    cluster = load_cluster(name)
    cost, ranks = partial(algorithm_cost, cluster), tuple(range(cluster.devices))
    seconds = {each: cost(each, "all_reduce", 10**8, ranks) for each in ("ring", "tree", "hierarchical")}
    assert len(set(seconds.values())) == 3
    inside, between = cluster.node.inside, cluster.between
    assert between is not None
    if cluster.device.is_cpu:
        near = Wire(alpha_s=inside.latency_s, bandwidth=inside.bandwidth * inside.efficiency)
        far = Wire(alpha_s=between.latency_s, bandwidth=between.bandwidth * between.efficiency)
        where = Placement(ranks=cluster.devices, hosts=cluster.nodes)
        assert seconds["ring"] == all_reduce_seconds("ring", 10**8, where, Wires(inside=near, across=far))
    with pytest.raises(UsageError, match="halving_doubling"):
        cost("star", "all_reduce", 1, ranks)


def test_a_step_by_rounds_hides_less_than_the_backend_does() -> None:
    cluster = load_cluster("1x dgx-h100")
    native, ring = (
        record(make_config(8, {"algorithm": algorithm}), ranks=8, node_ranks=8) for algorithm in ("native", "ring")
    )
    assert sum(isinstance(e, Issue) for e in ring.events) == 2 * sum(isinstance(e, Issue) for e in native.events)
    assert sum(isinstance(e, Wait) for e in ring.events) == 2 * sum(isinstance(e, Wait) for e in native.events)
    first, second = replay(native, cluster), replay(ring, cluster)
    assert second.longest.exposed > first.longest.exposed
    assert second.longest.moved == pytest.approx(first.longest.moved, abs=4)  # bytes of the tensors are the same


def test_a_threshold_sends_what_only_values_tell() -> None:
    config = make_config(2, {"compression": {"policy": "threshold"}})
    with pytest.raises(UsageError, match="topk"):
        record(config, ranks=2)


def test_a_table_for_other_ranks_is_refused(tmp_path: Path) -> None:
    config = make_config(4, {"algorithm": "auto", "algorithm_table": str(tmp_path / "none.json")})
    with pytest.raises(UsageError, match=r"none\.json"):
        record(config, ranks=4)
