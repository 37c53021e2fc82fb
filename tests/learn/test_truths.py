"""The formulas of the exercises come to what the library computes, what ranks send, and what the engines do."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from paceline import parallelize, run_virtual
from paceline.cluster.costs import Placement, Wire, Wires, host_link_bytes, scatter_seconds, sent_bytes
from paceline.cluster.devices import load_cluster
from paceline.comm.base import Communicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.config import config_from_dict, load_config
from paceline.config.layout import layout_of
from paceline.plan.layout import Layout, Strategy
from paceline.predict.formulas.saving import best_interval, time_between_failures
from paceline.predict.formulas.step import StageSeconds, pipeline_seconds
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import EngineMemory, StateFacts, estimate_memory, rank_estimates
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import make_schedule
from paceline_course.course import find
from paceline_course.exercise import calculate


def truth(number: str, **given: float) -> float:
    """Returns what the formula of an exercise comes to; ``given`` takes the place of its numbers."""
    exercise = find(number)
    return calculate(exercise.truth, exercise.symbols() | given)


def slip(number: str, name: str) -> float:
    exercise = find(number)
    formula = exercise.slips[name]
    assert isinstance(formula, str)
    return calculate(formula, exercise.symbols())


def test_the_bytes_of_a_star_are_those_that_rank_0_sends() -> None:
    def star(comm: Communicator) -> int:
        comm, tensor = TracedCommunicator(comm, Trace(comm.device)), torch.ones(1000)
        for other in range(1, comm.size):
            if comm.rank == 0:
                comm.recv(torch.empty(1000), source=other).wait()
            elif comm.rank == other:
                comm.send(tensor, to=0).wait()
        for other in range(1, comm.size):
            if comm.rank == 0:
                comm.send(tensor, to=other).wait()
            elif comm.rank == other:
                comm.recv(tensor, source=0).wait()
        return comm.trace.num_bytes["send"]

    assert run_virtual(star, ranks=8)[0] == truth("1.2")


def test_bytes_of_rings_and_hosts_are_those_of_the_cost_model() -> None:
    assert truth("2.1") == sent_bytes("ring", 4e6, Placement(ranks=8), 0)
    assert truth("3.2") == sent_bytes("ring", 2e9, Placement(ranks=16), 0)
    assert truth("6.1") == 4 * sent_bytes("ring", 2 * 2048 * 4096 * 2, Placement(ranks=4), 0)
    four_hosts = Placement(ranks=32, hosts=4)
    assert truth("2.3") == host_link_bytes("hierarchical", 1e8, four_hosts)
    assert slip("2.3", "ring") == host_link_bytes("ring", 1e8, four_hosts)


def test_tokens_that_hide_are_those_of_the_cost_model() -> None:
    wire, parameters = Wire(alpha_s=0.0, bandwidth=50e9), 1e9
    reduce_s = wire.seconds(sent_bytes("ring", 2 * parameters, Placement(ranks=64), 0))
    assert truth("3.3") == pytest.approx(reduce_s * 400e12 / (4 * parameters))
    gather_s = scatter_seconds("ring", 2 * parameters, Placement(ranks=64), Wires(inside=wire))
    assert truth("5.3") == pytest.approx(gather_s * 400e12 / (2 * parameters))


def test_states_are_those_that_predictions_have() -> None:
    def state_gb(parameters: float, strategy: Strategy) -> float:
        model = ModelFacts(blocks=(), root=BlockFacts(parameters=int(parameters)))
        need = estimate_memory(model, Layout(strategy=strategy).for_ranks(8), StateFacts())
        return (need.parameters + need.gradients + need.optimizer) / 1e9

    assert truth("4.1") == state_gb(3e9, "zero1")
    exercise = find("4.3")
    for name in exercise.needs:
        assert calculate(exercise.needs[name], exercise.symbols()) == state_gb(7e9, name) + 30  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_states_with_masters_are_those_that_predictions_have(strategy: str) -> None:
    shape = {"size": "gpt-7b", "layers": 40, "heads": 40, "kv_heads": 40, "width": 5120, "mlp_width": 13_824}
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "vocab_size": 32_000, **shape},
            "data": {"kind": "synthetic_tokens", "vocab_size": 32_000, "context": 4096},
            "train": {"global_batch": 8, "precision": "bf16_master", "steps": 1},
            "parallel": {"ranks": 8, "strategy": strategy, "device": "cuda"},
        }
    )
    need, exercise = rank_estimates(config)[0], find("9.2")
    states = need.parameters + need.gradients + need.optimizer
    assert states / 1e9 == pytest.approx(calculate(exercise.needs[strategy], exercise.symbols()), rel=0.02)


@pytest.mark.parametrize(("blocks", "microbatches"), [(3, 1), (2, 2)])
def test_gathers_are_those_of_the_engine(blocks: int, microbatches: int) -> None:
    def count(comm: Communicator) -> int:
        trace = Trace(comm.device)
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))
        model = nn.Sequential(nn.Linear(2, 4, bias=False), layers)  # the first layer is the root's
        units = tuple(f"1.{number}" for number in range(blocks))
        engine = parallelize(model, TracedCommunicator(comm, trace), "fsdp", units=units)
        for _ in range(2):  # the first step learns the order
            trace.num_operations.clear()
            for number in range(microbatches):
                with contextlib.nullcontext() if number == microbatches - 1 else engine.no_sync():
                    engine(torch.ones(1, 2)).sum().backward()
        return trace.num_operations["all_gather"]

    assert run_virtual(count, ranks=2) == [truth("5.1", L=blocks, k=microbatches)] * 2


def test_intervals_are_the_best_ones() -> None:
    exercise = find("9.3")
    for case in exercise.cases:
        fails_s = time_between_failures(case["device_failure_s"], case["devices"])
        assert exercise.symbols(**case)["truth"] == pytest.approx(best_interval(case["save_s"], fails_s))


def test_the_states_of_4_4_are_those_that_predictions_have() -> None:
    exercise, config = find("4.4"), "gpt_7b"
    for case in exercise.cases:
        if case["N"] != 8:
            continue
        words = [
            f"parallel.strategy={case['strategy']}",
            "parallel.ranks=8",
            "train.microbatch=1",
            "train.global_batch=8",
        ]
        given = load_config(config, words)
        memory = EngineMemory.of(given)
        need = memory.estimate(layout_of(given, 8, 8)) if memory is not None else None
        assert need is not None
        states = need.parameters + need.gradients + need.optimizer
        assert states == pytest.approx(exercise.symbols(**case)["states"], rel=0.01)


def test_an_all_reduce_is_the_collective_of_1_3_and_an_all_gather() -> None:
    def halves(comm: Communicator) -> bool:
        mine, part, whole = torch.arange(4.0) + 10 * comm.rank, torch.empty(1), torch.empty(4)
        assert find("1.3").truth == "reduce_scatter"
        comm.reduce_scatter(part, mine).wait()
        comm.all_gather(whole, part).wait()
        comm.all_reduce(mine).wait()
        return torch.equal(whole, mine)

    assert all(run_virtual(halves, ranks=4))


def test_what_a_rank_holds_is_what_schedules_hold_that_are_walked_through() -> None:
    exercise = find("7.2")
    for case in exercise.cases:
        schedule = make_schedule(case["schedule"], ranks=case["p"], microbatches=case["k"])
        assert exercise.symbols(**case)["truth"] == measure_schedule(schedule).in_flight[case["rank"]]


def test_the_fewest_microbatches_are_those_of_the_schedule() -> None:
    def idle(stages: int, microbatches: int) -> float:
        step = pipeline_seconds([StageSeconds(1.0, 2.0)] * stages, microbatches)
        return (step - 3 * microbatches) / step

    def fewest(stages: int) -> int:
        return next(filter(lambda m: idle(stages, m) <= 0.05 + 1e-9, itertools.count(1)))

    assert truth("7.1") == fewest(8)
    assert slip("7.1", "one_stage_more") == fewest(9)


def test_peaks_are_those_of_the_catalog() -> None:
    device, near = load_cluster("1x dgx-h100").device, partial(pytest.approx, rel=1e-3)
    assert find("8.1").symbols()["F"] == near(device.peak("bf16"))
    assert find("9.1").symbols()["F"] == near(device.peak("bf16"))
    assert find("8.3").symbols()["F"] == near(device.peak("fp8"))
    assert find("8.3").symbols()["W"] == near(device.memory_bandwidth)
