"""Kept figures of choices: what ``auto`` becomes, what is expected of a run, whether it has room, and the ways out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kept_cases import GPT, GPUS, H100, HOST, IMAGES, SHORT, make_config
from kept_figures import assert_kept, through_json, told

from paceline.cluster.detect import Machine
from paceline.config import Config
from paceline.plan.layout import Layout
from paceline.plan.plan import RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts
from paceline.search.automatic import apply_choice, choose, first_microbatch, overhead_of, whole_ladder
from paceline.search.expect import (
    MemoryNeed,
    MemoryVerdict,
    expect_run,
    expected_memory,
    host_problems,
    needed,
    present_cluster,
    unpriced,
    ways_out,
)
from paceline.search.expectation import Expectation, compare
from paceline.units import GIB


def figures() -> dict[str, object]:
    parts = (_of_choices(), _of_expectations(), _of_memory())
    return {name: value for part in parts for name, value in part}


def test_choices_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _of_choices() -> Iterator[tuple[str, object]]:
    """What ``auto`` becomes."""
    large: dict[str, Any] = {"kind": "gpt", "size": "gpt-1.1b"}
    cases: list[tuple[str, Config, RunMachine, Machine | None]] = []
    for name, model, gib, host, ranks, local in (
        ("small", GPT, 80, 500, 4, 4),
        ("tight", large, 16, 500, 4, 4),
        ("tight hosts", large, 12, 500, 8, 4),
        ("one", large, 16, 200, 1, 1),
        ("no host", large, 8, 8, 4, 2),
        ("nothing", large, 2, 4, 2, 2),
    ):
        machine = RunMachine(
            device="cuda", ranks=ranks, node_ranks=local, device_bytes=gib * GIB, host_bytes=host * GIB
        )
        config = make_config(model, parallel={"strategy": "auto", "device": "cuda"}, train={"precision": "bf16_master"})
        cases += [(name, config, machine, None), (f"{name} timed", config, machine, GPUS)]
    where = RunMachine(device="cuda", ranks=4, device_bytes=80 * GIB, host_bytes=500 * GIB)
    auto: dict[str, Any] = {"strategy": "auto", "device": "cuda"}
    cases += [
        ("open", make_config(parallel=auto, train={"microbatch": "auto"}), where, GPUS),
        ("kept", make_config(parallel=auto, memory={"checkpoint_activations": "full", "offload": []}), where, GPUS),
        ("every", make_config(parallel=auto, memory={"checkpoint_activations": "every_2"}), where, GPUS),
        ("grouped", make_config(parallel={**auto, "shard_ranks": 2}), where, None),
        ("images", make_config({"kind": "resnet", "depth": 18}, IMAGES, parallel=auto), where, GPUS),
        ("mlp", make_config({"kind": "mlp"}, {"kind": "digits"}, parallel=auto), where, None),
        ("odd batch", make_config(parallel=auto, train={"global_batch": 6}), where, None),
        ("cores", make_config(parallel={"strategy": "auto", "device": "cpu"}), replace(where, device="cpu"), HOST),
    ]
    for name, config, machine, present in cases:
        model = describe_model(config, machine.device)
        assert model is not None
        found = told(
            lambda config=config, model=model, machine=machine, present=present: choose(config, model, machine, present)
        )
        if isinstance(found, str):
            yield f"choice {name}", found
            continue
        choice: Any = found
        shown: Any = through_json(choice.to_json())
        ladder = shown.pop("ladder")
        short = [
            [each["label"], each["rejected"], each["seconds"], each["overhead"], each["memory"]["device_bytes"]]
            for each in ladder
        ]
        applied = apply_choice(config, choice)
        decided = [
            applied.parallel.strategy,
            applied.parallel.pipeline,
            applied.parallel.tensor,
            applied.parallel.shard_ranks,
        ]
        decided += [applied.memory.checkpoint_activations, list(applied.memory.offload)]
        yield f"choice {name}", [choice.reason(), shown, short, ladder[0], decided]
    config = make_config(parallel={"device": "cuda"}, train={"microbatch": "auto", "precision": "bf16"})
    model = describe_model(config, "cuda")
    assert model is not None
    sizes = [1, 2, 4, 8]
    yield (
        "first",
        [
            first_microbatch(config, model, GPUS, sizes, ranks=ranks, node_ranks=local)
            for ranks, local in ((4, 4), (4, 2), (1, 1))
        ],
    )
    for options in (
        {"strategy": "zero2", "tensor": 2},
        {"strategy": "fsdp", "pipeline": 2, "accumulate": 4},
        {"tensor": 2, "pipeline": 2},
    ):
        for checkpoint in ("none", "matmuls", "full", "every_2"):
            layout = Layout(checkpoint_activations=checkpoint, **options).for_ranks(8)
            machines = [replace(where, ranks=8, node_ranks=local) for local in (2, 4, 8)]
            yield f"overhead {options} {checkpoint}", [overhead_of(model, layout, each, 4) for each in machines]
    ladder = whole_ladder(
        model, Layout(shard_ranks=2).for_ranks(8), replace(where, ranks=8, node_ranks=4), StateFacts()
    )
    yield "ladder", [[each.label, each.rejected] for each in ladder]


def _of_expectations() -> Iterator[tuple[str, object]]:
    cases: list[tuple[str, Config, Machine, dict[str, Any]]] = []
    for ranks in (1, 2, 4, 8):
        config = make_config(
            {"kind": "gpt", "size": "gpt-micro"},
            SHORT,
            parallel={"device": "cpu", "ranks": ranks},
            train={"precision": "fp32"},
        )
        cases += [(f"cpu {ranks}", config, HOST, {}), (f"threads {ranks}", config, HOST, {"threads": 2})]
    gpu = make_config(
        parallel={"device": "cuda", "ranks": 4, "strategy": "zero2"},
        train={"precision": "bf16"},
        comm={"algorithm": "ring"},
    )
    cases += [
        ("gpu", gpu, GPUS, {}),
        ("hosts", gpu, GPUS, {"hosts": 2}),
        ("odd gpus", gpu, replace(GPUS, gpus=(H100, "Tesla T4")), {}),
        ("no gpus", gpu, HOST, {}),
        ("virtual", make_config(parallel={"device": "cpu", "ranks": 2}, comm={"backend": "virtual"}), HOST, {}),
        ("bf16 cpu", make_config(parallel={"device": "cpu", "ranks": 2}, train={"precision": "bf16"}), HOST, {}),
        ("gloo", make_config(parallel={"device": "cuda", "ranks": 2}, comm={"backend": "gloo"}), GPUS, {}),
        (
            "shared",
            make_config(parallel={"device": "cpu", "ranks": 2}, comm={"backend": "gloo"}, train={"precision": "fp32"}),
            HOST,
            {},
        ),
        (
            "topk",
            make_config(parallel={"device": "cuda", "ranks": 2}, comm={"compression": {"policy": "topk"}}),
            GPUS,
            {},
        ),
        (
            "threshold",
            make_config(parallel={"device": "cuda", "ranks": 2}, comm={"compression": {"policy": "threshold"}}),
            GPUS,
            {},
        ),
        (
            "every",
            make_config(parallel={"device": "cuda", "ranks": 2}, memory={"checkpoint_activations": "every_2"}),
            GPUS,
            {},
        ),
        ("open", make_config(parallel={"device": "cuda", "ranks": 2}, train={"microbatch": "auto"}), GPUS, {}),
    ]
    for name, config, machine, options in cases:
        found = expect_run(config, machine, **options)
        yield f"expected {name}", [found, expected_memory(config, 1), unpriced(config, 1)]
        yield f"again {name}", Expectation.of_text(found.to_text()) == found
        cluster = told(
            lambda config=config, machine=machine: present_cluster(config, machine, config.parallel.decided_ranks, 1)[0]
        )
        if not isinstance(cluster, str):
            device: Any = cluster.device
            yield (
                f"present {name}",
                [device.peak_flops, device.memory_bandwidth, device.launch_s, device.memory_bytes, device.step_s],
            )
    first = Expectation(ranks=2, step_s=1.5, step_s_low=1.4, step_s_high=1.8, memory_bytes=2e9)
    late = Expectation(ranks=2, step_s=0.02, memory_bytes=2e9)
    kept = first.with_later(late)
    other = first.with_later(replace(late, memory_bytes=3e9))
    ways = [kept, other, Expectation(reason="x").with_later(late), first.with_later(Expectation(reason="y"))]
    for place, expected in enumerate(ways):
        for step_s, memory in (
            (1.6, 2_000_000_000),
            (1.9, None),
            (None, 3_000_000_000),
            (40.0, 0),
            (1.5, 1),
            (0.3, 10),
        ):
            found_now = compare(expected, step_s, memory)
            yield (
                f"compared {place} {step_s} {memory}",
                [found_now.lines(), found_now.step_ratio, found_now.memory_ratio, len(found_now.later())],
            )
    values = json.loads(kept.to_text())
    changes: list[dict[str, Any]] = [
        {"step_s": 0},
        {"step_s": True},
        {"step_s": "x"},
        {"assumed": "x"},
        {"assumed": [1]},
    ]
    changes += [
        {"fitted": 1},
        {"odd": 1},
        {"reason": 3},
        {"later": {**values, "later": values}},
        {"step_s_high": float("inf")},
    ]
    for change in changes:
        try:
            Expectation.of_text(json.dumps({**values, **change}))
            yield f"text {list(change)} {str(change)[:30]}", "read"
        except ValueError as error:
            yield f"text {list(change)} {str(change)[:30]}", str(error)


def _of_memory() -> Iterator[tuple[str, object]]:
    large: dict[str, Any] = {"kind": "gpt", "size": "gpt-1.1b"}
    cases = {
        "cpu": make_config(parallel={"device": "cpu", "ranks": 2}),
        "one": make_config(parallel={"device": "cpu", "ranks": 1}),
        "gpus": make_config(large, parallel={"device": "cuda", "ranks": 4}),
        "stages": make_config(parallel={"device": "cuda", "ranks": 4, "pipeline": 2}, train={"microbatch": 2}),
        "stages cpu": make_config(parallel={"device": "cpu", "ranks": 4, "pipeline": 2}, train={"microbatch": 2}),
        "virtual": make_config(parallel={"device": "cpu", "ranks": 2}, comm={"backend": "virtual"}),
        "offload": make_config(
            large, parallel={"device": "cuda", "ranks": 4, "strategy": "fsdp"}, memory={"offload": ["optimizer"]}
        ),
        "auto": make_config(large, parallel={"device": "cuda", "ranks": 2, "strategy": "auto"}),
        "every": make_config(
            large, parallel={"device": "cuda", "ranks": 2}, memory={"checkpoint_activations": "every_2"}
        ),
    }
    for name, config in cases.items():
        for node_ranks, in_turns in ((None, False), (1, False), (None, True)):
            need = needed(config, node_ranks=node_ranks, in_turns=in_turns)
            yield f"needed {name} {node_ranks} {in_turns}", need
        for free in (1, 10**10, 10**12):
            found = told(lambda config=config, free=free: host_problems(config, node_ranks=2, free_bytes=free))
            yield f"host {name} {free}", [str(each) for each in found] if isinstance(found, list) else found
    for total, has, free in (
        (100, 99, 99),
        (100, 100, 100),
        (90, 100, 100),
        (91, 100, 100),
        (50, 100, 49),
        (50, 100, 50),
        (80, 100, 85),
    ):
        verdict = MemoryVerdict(
            need=MemoryNeed(who="a rank needs", parts={"a": total - 3, "b": 2, "c": 1, "d": 0}),
            where="it",
            has_bytes=has * GIB / 2**30,
            free_bytes=free,
        )
        yield f"verdict {total} {has} {free}", [verdict.kind, str(verdict)]
    for name, machine in (
        ("gpus", GPUS),
        ("cpu", HOST),
        ("stages", GPUS),
        ("offload", replace(GPUS, memory_bytes=1e9)),
        ("gpus", HOST),
        ("every", GPUS),
    ):
        config = cases[name]
        need = needed(config)
        assert need is not None
        for share in (0.9, 0.5, 0.05):
            verdict = MemoryVerdict(need=need, where="it", has_bytes=share * need.total, free_bytes=share * need.total)
            yield f"ways {name} {len(machine.gpus)} {share}", ways_out(config, verdict, machine)
