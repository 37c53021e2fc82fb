"""Kept figures of searches: plans with their reasons, choices of ``auto``, expectations, scaling, models as read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kept_cases import BERT, GPT, GPT2, IMAGES, LLAMA, MIXTRAL, QWEN, SHORT, TOKENS, make_config
from kept_figures import assert_kept, through_json, told

from paceline.cluster.devices import load_cluster
from paceline.config import Config
from paceline.plan.model_shape import ModelShape
from paceline.plan.plan import RunMachine
from paceline.search.candidates import TrainingTask, candidates_for, resized
from paceline.search.request import (
    decided_config,
    make_plan,
    read_hugging_face,
    request_for,
    request_for_hugging_face,
    why_no_config,
    why_not_written,
    with_length,
)
from paceline.search.result import PlanResult, plan_for
from paceline.search.scaling import draw_scaling, scaling_rows
from paceline.search.search import budget_of, host_bytes, node_bytes, search, smallest_changes, what_would_fit
from paceline.units import GIB


def figures() -> dict[str, object]:
    parts = (_of_plans(), _of_searches(), _of_models(), _of_requests())
    return {name: value for part in parts for name, value in part}


def test_searches_give_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _plan(result: PlanResult) -> object:
    found = through_json(result.to_json(3))
    cheapest = result.cheapest_row()
    return [found, result.to_text(3), told(result.to_yaml), cheapest and cheapest.devices, result._repr_html_()[:300]]


def _of_plans() -> Iterator[tuple[str, object]]:
    """Plans in full: as text, JSON and YAML."""
    small: dict[str, Any] = {"kind": "gpt", "size": "gpt-micro"}
    cases: list[tuple[str, Config, str, dict[str, Any], dict[str, Any]]] = [
        ("gpus", make_config(parallel={"device": "cuda"}), "2x h100-sxm", {}, {"gpus": [1, 2, 4], "price": 2.0}),
        ("by cost", make_config(parallel={"strategy": "zero1"}), "2x a10g", {"precision": "auto"}, {"by": "cost"}),
        (
            "by memory",
            make_config(train={"microbatch": 4}),
            "2x v100-sxm-16gb",
            {"precision": "fp16"},
            {"by": "memory"},
        ),
        ("cores", make_config(small, SHORT, parallel={"device": "cpu"}), "4x cpu-host", {}, {"gpus": [1, 2]}),
        ("compressed", make_config(comm={"compression": {"policy": "topk"}}), "2x g5.12xlarge", {}, {}),
        ("images", make_config({"kind": "resnet", "depth": 50}, IMAGES), "2x rtx-4090", {}, {"gpus": [1, 2]}),
        ("compiled", make_config({**GPT, "compile": True}, parallel={"pipeline": 2}), "4x h100-sxm", {}, {}),
        ("too large", make_config({"kind": "gpt", "size": "gpt-1.1b", "layers": 200}), "1x t4", {}, {}),
    ]
    for name, config, cluster, options, asked in cases:
        request = request_for(config, load_cluster(cluster), **options)
        result = plan_for(replace(request, host_memory=200 * GIB), **asked)
        yield f"plan {name}", _plan(result)
        if result.scaling:
            pictures: list[Any] = []
            with patch("paceline.search.scaling.save_picture", lambda figure, _, kept=pictures: kept.append(figure)):
                draw_scaling(result.scaling, Path("any.svg"), "title")
            yield f"picture {name}", _picture(pictures[0])
    for source, precision in ((LLAMA, None), (MIXTRAL, "auto"), (BERT, "bf16")):
        request = request_for_hugging_face(
            source, load_cluster("2x a100-sxm-80gb"), ["train.global_batch=16"], precision
        )
        yield f"plan {source['model_type']}", _plan(plan_for(request))
    for by, price in (("speed", None), ("time", -1.0), ("time", float("nan"))):
        request = request_for(make_config(small, SHORT), load_cluster("1x t4"))
        yield (
            f"refused {by} {price}",
            told(lambda request=request, by=by, price=price: plan_for(request, by=by, price=price)),
        )


def _picture(figure: Any) -> object:
    """What is drawn, whatever version draws it."""
    found: list[object] = [figure.get_suptitle()]
    for axes in figure.axes:
        lines = [[list(map(float, data)) for data in each.get_data()] for each in axes.lines]
        styles = [f"{each.get_color()} {each.get_marker()} {each.get_linestyle()}" for each in axes.lines]
        words = [axes.get_xlabel(), axes.get_ylabel(), [each.get_text() for each in axes.get_xticklabels()]]
        words += [axes.get_xscale(), axes.get_yscale(), [axes.spines[side].get_visible() for side in ("top", "left")]]
        legend = axes.get_legend()
        found += [lines, styles, words, legend and [each.get_text() for each in legend.get_texts()]]
    rates, shares = figure.axes
    found.append([rates.yaxis.get_major_formatter()(value, 0) for value in (12.0, 999.0, 1000.0, 54321.0)])
    found.append(shares.get_ylim())
    return found


def _of_searches() -> Iterator[tuple[str, object]]:
    shape = ModelShape(layers=8, width=1024, heads=8, kv_heads=4, mlp_width=4096, vocab_size=32000)
    experts = replace(shape, experts=4, active=2)
    for name, model, cluster, batch, framework in (
        ("plain", shape, "2x g5.12xlarge", 24, "eager"),
        ("compiled", shape, "4x a100-sxm-80gb", 16, "compiled"),
        ("experts", experts, "2x g4dn.12xlarge", 8, "eager"),
    ):
        task = TrainingTask(model=model, global_batch=batch, seq_len=1024, framework=framework)
        where, left_out = load_cluster(cluster), Counter[str]()
        layouts = list(candidates_for(task, where, left_out))
        kinds = Counter(
            f"{each.strategy} {each.schedule_name} {each.expert} {each.sequence_parallel}" for each in layouts
        )
        yield (
            f"candidates {name}",
            [len(layouts), dict(left_out), dict(kinds), sum(each.microbatch for each in layouts)],
        )
        for host_memory in (float("inf"), 20 * GIB):
            found = search(task, where, host_memory=host_memory)
            best = [[str(each), each.seconds, each.memory_bytes, found.fits(each)] for each in found.ranked[::40]]
            rest = [found.looked_at, found.budget, found.num_fit, found.left_out]
            yield (
                f"search {name} {host_memory}",
                [
                    best,
                    rest,
                    [[host_bytes(each.workload), node_bytes(each.workload, where)] for each in found.ranked[:3]],
                ],
            )
        asked = task.workload(replace(layouts[0], microbatch=batch // layouts[0].data // layouts[0].accumulate))
        yield (
            f"changes {name}",
            [
                [each.keys, each.seconds, str(each)]
                for named in ((), ("train.microbatch", "parallel.data", "train.accumulate"))
                for each in smallest_changes(asked, found, named=named)
            ],
        )
    odd = TrainingTask(model=shape, global_batch=7, seq_len=1024)
    yield (
        "no mesh",
        [told(lambda name=name: search(odd, load_cluster(name)).num_fit) for name in ("2x dgx-a100", "1x dgx-a100")],
    )
    plain = replace(odd, model=replace(shape, layers=1, heads=1, kv_heads=1))
    for batch in (6, 7, 12):
        task = replace(plain, global_batch=batch)
        for name in ("2x dgx-a100", "1x dgx-a100", "1x g4dn.12xlarge"):
            found_now = told(lambda task=task, name=name: search(task, load_cluster(name)).num_fit)
            yield f"no mesh for {batch} on {name}", found_now
    large = TrainingTask(
        model=replace(shape, layers=96, width=8192, heads=64, kv_heads=8, mlp_width=30000),
        global_batch=64,
        seq_len=8192,
    )
    found = search(large, load_cluster("1x g4dn.12xlarge"))
    yield (
        "nothing fits",
        [
            [each.keys for each in what_would_fit(found)],
            found.nearest and [found.nearest.label, found.nearest.memory_bytes],
        ],
    )
    where = load_cluster("2x dgx-a100")
    yield (
        "resized",
        {
            count: told(lambda count=count: [resized(where, count).name, resized(where, count).devices])
            for count in (0, 1, 3, 8, 9, 16, 24, 30)
        },
    )
    yield "budget", budget_of(where)
    task = TrainingTask(model=shape, global_batch=24, seq_len=1024)
    for weak in (True, False):
        rows = scaling_rows(task, load_cluster("2x g5.12xlarge"), [8, 1, 3, 4, 4], weak=weak)
        yield (
            f"rows {weak}",
            [[row.devices, row.global_batch, row.efficiency, row.why, row.best and str(row.best)] for row in rows],
        )


def _of_models() -> Iterator[tuple[str, object]]:
    """Shapes of Hugging Face models."""
    sources: list[dict[str, Any]] = [LLAMA, MIXTRAL, QWEN, GPT2, BERT, {**GPT2, "n_inner": 100}, {"text_config": LLAMA}]
    sources += [
        {**LLAMA, "head_dim": 96},
        {**LLAMA, "head_dim": 128},
        {**LLAMA, "sliding_window": 5, "use_sliding_window": False},
    ]
    sources += [{**LLAMA, "max_position_embeddings": 100, "tie_word_embeddings": True}]
    for place, source in enumerate(sources):
        shape, values = read_hugging_face(source)
        yield f"read {place}", [shape, values, why_no_config(shape)]
    wrong: list[dict[str, Any]] = [
        {},
        {"hidden_size": 3, "num_hidden_layers": 2},
        {"model_type": "lama"},
        {"model_type": "zzz"},
    ]
    wrong += [{**LLAMA, "num_experts": 4}, {**LLAMA, "num_attention_heads": 7}, {**LLAMA, "num_key_value_heads": 3}]
    wrong += [
        {**LLAMA, "vocab_size": 0},
        {**LLAMA, "vocab_size": True},
        {**MIXTRAL, "num_experts_per_tok": 9},
        {"model_type": "gpt2"},
    ]
    yield "wrong", [told(lambda source=source: read_hugging_face(source)) for source in wrong]


def _of_requests() -> Iterator[tuple[str, object]]:
    config = make_config({"kind": "gpt", "size": "gpt-micro"}, {"kind": "text", "context": 32})
    for precision in (None, "auto", "fp23"):
        found = told(lambda precision=precision: request_for(config, load_cluster("2x t4"), precision=precision))
        if isinstance(found, str):
            yield f"request {precision}", found
        else:
            made: Any = found
            yield (
                f"request {precision}",
                [
                    made.assumed,
                    [
                        [each.compute, each.global_batch, each.names_precision, each.base.precision]
                        for each in made.tasks
                    ],
                ],
            )
    by_microbatch = make_config(train={"global_batch": None, "microbatch": 3}, parallel={"strategy": "zero1"})
    yield "batch of microbatches", request_for(by_microbatch, load_cluster("2x t4")).tasks[0].global_batch
    for overrides in ([], ["train.global_batch=8", "data.context=256"], ["train.precision=bf16"]):
        found = request_for_hugging_face(MIXTRAL, load_cluster("2x t4"), overrides)
        yield (
            f"hugging face {overrides}",
            [found.assumed, found.no_config, found.tasks[0].global_batch, found.tasks[0].seq_len],
        )
    cluster = load_cluster("1x dgx-a100")
    sections: list[dict[str, Any]] = [{}, {"parallel": {"strategy": "auto"}, "train": {"microbatch": "auto"}}]
    sections += [
        {"parallel": {"schedule": "gpipe", "pipeline": 2}},
        {"parallel": {"schedule": "gpipe"}},
        {"train": {"global_batch": 5}},
    ]
    sections += [
        {"memory": {"checkpoint_activations": "every_3"}},
        {"parallel": {"tensor": 5}},
        {"parallel": {"strategy": "hybrid"}},
    ]
    yield "not written", [told(lambda each=each: why_not_written(make_config(**each), cluster)) for each in sections]
    for data, train in (
        ({}, {}),
        ({"last_batch": "drop"}, {}),
        ({}, {"steps": None, "epochs": 2.5}),
        ({}, {"steps": 70}),
    ):
        config = make_config(None, {**TOKENS, **data}, train=train)
        plan = make_plan(config, RunMachine(device="cpu", ranks=2))
        plan = with_length(plan, config, train_samples=200, eval_samples=7)
        lengths = [plan.steps_per_epoch, plan.total_steps, plan.total_samples, plan.eval_samples, plan.finds_microbatch]
        yield f"length {data} {train}", [*lengths, decided_config(config, plan).parallel.ranks]
    yield (
        "refused plan",
        told(lambda: make_plan(make_config(parallel={"tensor": 2}), RunMachine(device="cpu", ranks=3))),
    )
