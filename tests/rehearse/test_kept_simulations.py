"""Kept figures of simulations and predictions: clocks as text and events, conditions, sources of plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from kept_cases import dry_config
from kept_figures import assert_kept, told
from torch import nn

from paceline.cluster.devices import load_cluster
from paceline.comm.virtual.clock import ClockSpan, VirtualClock
from paceline.records.records import EndRecord, EvalRecord, StepRecord
from paceline.rehearse.dryrun.expected import better_of
from paceline.rehearse.planning import read_source
from paceline.rehearse.prediction import config_on, memory_bound, predict_decided
from paceline.rehearse.simulate.recording import KeptRecords, StepBounds, draw_step, summarize_clocks, trace_events
from paceline.rehearse.simulate.run import Conditions, Simulation, check_conditions, prepare
from paceline.search.expectation import Expectation

CPU = torch.device("cpu")


def figures() -> dict[str, object]:
    parts = (_of_clocks(), _of_conditions(), _of_predictions())
    return {name: value for part in parts for name, value in part}


def test_simulations_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _spans() -> tuple[list[VirtualClock], list[list[StepBounds]]]:
    clocks = [VirtualClock(rank, CPU, measures=False, factor=1.0, keep=100) for rank in range(3)]
    for clock in clocks:
        late = 0.25 * clock.rank
        clock.spans += [
            ClockSpan("compute", "set-up", 0.0, 0.5),
            ClockSpan("compute", "data", 0.9, 1.1),
            ClockSpan("compute", "forward", 1.1 + late, 2.0),
            ClockSpan("compute", "odd", 2.0, 2.2),
            ClockSpan("communication", "all_reduce", 1.5, 2.5 + late, 64, (0, 1, 2)),
            ClockSpan("wait", "all_reduce", 2.2, 2.5 + late),
            ClockSpan("compute", "backward", 2.5 + late, 3.5),
            ClockSpan("compute", "optimizer", 3.5, 3.9),
            ClockSpan("compute", "evaluation", 4.1, 6.0),
        ]
    steps = [
        [StepBounds(1, 1.0 - 0.1 * rank, 2.4, 0.5), StepBounds(2, 2.4, 4.0 - 0.5 * rank, None if rank else 0.7)]
        for rank in range(3)
    ]
    return clocks, steps


def _of_clocks() -> Iterator[tuple[str, object]]:
    clocks, steps = _spans()
    yield "drawn", draw_step(clocks, steps)
    yield "drawn two", draw_step(clocks, steps, most=2)
    yield (
        "not drawn",
        [draw_step(clocks, [[], *steps[1:]]), draw_step([], []), draw_step(clocks, [[StepBounds(1, 2.0, 2.0)]] * 3)],
    )
    yield "events", [[str(value) for value in event.values()] for event in trace_events(clocks, steps)]
    yield "no events", len(trace_events(clocks, [[], [], []]))
    record = StepRecord(
        step=1,
        epoch=0.5,
        position=6,
        loss=2.0,
        loss_sum=8.0,
        count=4,
        lr=0.1,
        grad_norm=1.0,
        samples=4,
        step_s=1.5,
        data_s=0.1,
        forward_s=0.4,
        backward_s=0.5,
        comm_s=0.3,
        optimizer_s=0.2,
        samples_per_s=2.0,
        memory_bytes=5,
        time=1.0,
    )
    rows: list[list[Any]] = []
    for rank in range(3):
        own = [
            replace(
                record, step=step, step_s=1.0 + 0.1 * step + 0.2 * rank, comm_s=0.3 * rank, loss_sum=float(8 + step)
            )
            for step in (1, 2, 3)
        ]
        rows.append([*own, EndRecord(status="done", step=3, seconds=4.0 + rank, message="", time=4.0)])
    evaluation = EvalRecord(step=3, loss=1.5, accuracy=0.5, samples=9, seconds=1.0, time=3.0)
    yield "summary", summarize_clocks(rows, clocks, steps)
    yield "summary evaluated", summarize_clocks([[evaluation, *rows[0]], *rows[1:]], clocks, [[], [], []]).to_json()
    kept = KeptRecords(clocks[0])
    clocks[0].now_s = 9.0
    kept.write(record, evaluation)
    yield "dated", [each.time for each in kept.records]
    config = prepare(dry_config(parallel={"device": "cpu"}, train={"global_batch": 24}), ranks=3)
    found = Simulation(
        config=config,
        conditions=Conditions(slow={0: 3.0}),
        records=(),
        clocks=tuple(clocks),
        steps=tuple(map(tuple, steps)),
        summary=summarize_clocks(rows, clocks, steps),
    )
    yield "hosts", [[each.time, each.values] for each in found.hosts]


def _of_conditions() -> Iterator[tuple[str, object]]:
    plain = dry_config(parallel={"device": "cpu"})
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"ranks": 2}),
        ({}, {"ranks": 0}),
        ({}, {"device": "tpu"}),
        ({}, {"ranks": 6, "cluster": "4x cpu-host"}),
        ({"node_ranks": 2}, {"ranks": 4, "cluster": "4x cpu-host"}),
        ({"node_ranks": 4}, {"ranks": 4, "cluster": "4x cpu-host"}),
        ({"strategy": "hybrid"}, {"ranks": 4, "cluster": "2x g4dn.12xlarge"}),
        ({"ranks": "auto"}, {}),
        ({"ranks": "auto", "pipeline": 3}, {"ranks": 4}),
        ({}, {"ranks": 8, "cluster": "2x g4dn.12xlarge"}),
        ({}, {"ranks": 6, "cluster": "2x g4dn.12xlarge"}),
    ]
    for place, (parallel, options) in enumerate(cases):
        config = dry_config(parallel={"device": "cpu", **parallel}, train={"global_batch": 48})
        given = {name: load_cluster(value) if name == "cluster" else value for name, value in options.items()}
        found: Any = told(lambda config=config, given=given: prepare(config, **given))
        yield (
            f"prepared {place}",
            found
            if isinstance(found, str)
            else [found.parallel.ranks, found.parallel.device, found.parallel.node_ranks, found.comm.backend],
        )
    settled = prepare(plain, ranks=2)
    for place, conditions in enumerate(
        (
            Conditions(),
            Conditions(backend="nccl"),
            Conditions(backend="shared_memory"),
            Conditions(cluster=load_cluster("2x cpu-host"), backend="gloo"),
            Conditions(compute="odd"),
            Conditions(cluster=load_cluster("1x dgx-a100"), compute="modelled", slow={5: 2.0}),
            Conditions(slow={1: 0.0}),
            Conditions(cluster=load_cluster("1x dgx-a100"), slow_links={1: 2.0}),
        )
    ):
        yield (
            f"conditions {place}",
            [
                told(lambda conditions=conditions: check_conditions(settled, conditions)),
                conditions.gpu,
                type(conditions.rates).__name__,
            ],
        )
    compiled = prepare(dry_config(parallel={"device": "cpu"}, model={"compile": True}), ranks=2)
    yield (
        "compiled",
        [
            told(lambda kind=kind: check_conditions(compiled, Conditions(compute=kind)))
            for kind in ("modelled", "measured")
        ],
    )


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.flatten(1))


def _of_predictions() -> Iterator[tuple[str, object]]:
    first, second = Expectation(ranks=2, reason="a"), Expectation(ranks=2, step_s=1.0, memory_bytes=5.0)
    dry = [
        Expectation(ranks=2, reason="b"),
        Expectation(ranks=2, step_s=2.0),
        Expectation(ranks=2, step_s=2.0, memory_bytes=7.0),
        None,
    ]
    yield "better", [better_of(formula, each) for formula in (first, second, None) for each in dry]
    cluster = load_cluster("2x cpu-host")
    config = dry_config(parallel={"device": "auto", "ranks": 2})
    yield (
        "ranks",
        [
            config_on(config, cluster)[1],
            config_on(config, cluster, ranks=3)[1],
            told(lambda: config_on(config, cluster, overrides=["a=b"])),
        ],
    )
    open_ranks = dry_config(parallel={"device": "auto", "ranks": "auto"})
    yield "open ranks", config_on(open_ranks, load_cluster("3x cpu-host"))[1]
    yield "bounds", [memory_bound(config, load_cluster(name), 2) for name in ("2x cpu-host", "1x dgx-a100")]
    decided = [{"rank": 2}, {"slow": {2: 1.5}}, {"slow": {0: 0.0}}]
    yield (
        "refused predictions",
        [told(lambda each=each: predict_decided(config, cluster, 2, **each)) for each in decided],
    )
    yield "too many", told(lambda: predict_decided(config, cluster, 3))
    half = dry_config(parallel={"device": "auto", "ranks": 2}, train={"precision": "bf16"})
    yield "not measured", told(lambda: predict_decided(half, load_cluster("2x cpu-host-alone"), 2))
    found, step = predict_decided(config, load_cluster("1x dgx-a100"), 2, rank=1)
    yield "predicted", [step.shown, found.train.microbatch, step.rough, sorted(step.memory), found.train.precision]
    where = load_cluster("1x dgx-a100")
    sources: list[tuple[Any, list[str]]] = [
        (3, []),
        (_Own, []),
        (config, ["train.steps=3"]),
        (lambda: _Own(), ["data.kind=digits"]),
        (_Own, ["data.kind=digits", "train.global_batch=8"]),
    ]
    for place, (source, overrides) in enumerate(sources):
        made: Any = told(lambda source=source, overrides=overrides: read_source(source, where, overrides=overrides))
        if isinstance(made, str):
            yield f"source {place}", made.partition(" at 0x")[0]
        else:
            task = made.tasks[0]
            yield (
                f"source {place}",
                [
                    made.no_config,
                    task.global_batch,
                    task.seq_len,
                    task.model.total_params,
                    task.model.flops,
                    task.model.activations,
                    task.checkpoints,
                ],
            )
    values = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 50, "n_positions": 16}
    yield "values", read_source(values, where, overrides=["train.global_batch=8"]).tasks[0].model.params
