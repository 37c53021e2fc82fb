"""Kept figures of layouts: what follows from ranks, groups, words and keys; and what the rules say of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from random import Random
from typing import Any

from kept_figures import assert_kept, told

from paceline.plan.layout import SHARING, STRATEGIES, Compression, Layout, Offload, groups_of, loss_rows, names_of
from paceline.plan.model_shape import ModelShape
from paceline.plan.plan import MemoryEstimate, Plan, RunMachine
from paceline.plan.rule_case import RuleCase, field_problems, named_twice, nearest_divisor, text_of
from paceline.plan.rules import RULES, check_layout, rules
from paceline.plan.workload import (
    Running,
    Workload,
    config_values,
    count_differences,
    layout_label,
    layout_text,
    mesh_text,
    stage_layers,
)
from paceline.schedule.schedules import make_schedule

GPT = ModelShape(layers=6, width=64, heads=4, kv_heads=2, mlp_width=160, vocab_size=300, context=46)
MODELS = {
    "gpt": GPT,
    "mlp": ModelShape(kind="mlp", layers=3),
    "resnet": ModelShape(kind="resnet", layers=8),
    "experts": replace(GPT, experts=4, active=2, mlp="gelu", tied=True, head_dim=24),
    "counted": replace(GPT, experts=4, active=2, total_params=2e6, score_dim=20),
    "sampled": ModelShape(kind="convolution", total_params=5e6, flops=3e9, activations=1e6, kernels=70),
    "unknown": ModelShape(kind="factory"),
}
OWN = make_schedule("zb-h1", 2, 4)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"strategy": "zero1", "bucket_mb": 50.0, "first_bucket_mb": 60.0, "compile": True},
    {"strategy": "zero2", "tensor": 2, "sequence_parallel": True},
    {"strategy": "fsdp", "reshard_after_forward": False, "checkpoint_activations": "full", "precision": "bf16_master"},
    {"strategy": "fsdp", "offload": Offload.of(["optimizer", "parameters"]), "compile": "auto"},
    {"strategy": "hybrid", "node_ranks": 4, "checkpoint_activations": "every_2"},
    {"strategy": "hybrid", "shard_ranks": 2, "tensor": 2, "gathers_logits": True},
    {"strategy": "hybrid", "tensor": 2, "node_ranks": 8},
    {"strategy": "hybrid", "pipeline": 2, "microbatch": 2},
    {"pipeline": 2, "schedule": "interleaved", "chunks": 3, "accumulate": 4},
    {"pipeline": 4, "schedule": "zb-v", "precision": "fp8", "compile": "auto"},
    {"pipeline": 2, "schedule": OWN, "checkpoint_activations": "matmuls"},
    {"pipeline": 2, "tensor": 2, "strategy": "zero1", "fused_loss": True},
    {"context_ranks": 2, "strategy": "fsdp"},
    {"context_ranks": 2, "strategy": "hybrid", "shard_ranks": 2},
    {"context_ranks": 4, "strategy": "hybrid", "shard_ranks": 2},
    {"context_ranks": 2, "tensor": 2},
    {"expert": 4, "strategy": "zero2"},
    {"expert": 2, "strategy": "hybrid", "shard_ranks": 4, "pipeline": 2},
    {"fused_loss": True, "offload": Offload.of(["gradients"])},
    {"compile": "auto", "precision": "fp8"},
    {"compile": False, "compression": Compression(policy="topk", exclude=("a.*",), min_size=10)},
]


def figures() -> dict[str, object]:
    parts = (_of_layouts(), _of_groups(), _of_rules(), _of_fields(), _of_models(), _of_plans(), _of_sharing())
    return {name: value for part in parts for name, value in part}


def test_layouts_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _said(layout: Layout) -> object:
    return [
        layout_text(layout, names_precision=True),
        layout_text(layout),
        layout_label(layout),
        mesh_text(layout),
        config_values(layout),
        config_values(layout, names_precision=True),
    ]


def _of_layouts() -> Iterator[tuple[str, object]]:
    """What follows from the number of ranks, and how a layout is said."""
    for place, options in enumerate(LAYOUTS):
        asked = Layout(**options)
        for ranks, node_ranks in ((16, None), (16, 8), (8, 4), (1, None)):
            if asked.pipeline * asked.tensor * asked.context_ranks * max(1, asked.shard_ranks) > ranks:
                continue
            layout = asked.for_ranks(ranks, node_ranks)
            if layout.data * layout.context_ranks % layout.shards:
                continue
            names = (
                "data",
                "shard_ranks",
                "node_ranks",
                "chunks",
                "compile",
                "ranks",
                "replicas",
                "shards",
                "num_stages",
            )
            names += ("shards_over_context", "is_split", "is_fully_sharded", "is_compiled", "splits_backward")
            names += ("schedule_name", "bucket_bytes", "first_bucket_bytes", "axes")
            found = {name: getattr(layout, name) for name in names}
            fuses = [layout.fuses_loss(size, device) for size in (8191, 8192) for device in ("cpu", "cuda")]
            less = layout.without_sharding()
            yield (
                f"{place} on {ranks} {node_ranks}",
                [
                    found,
                    fuses,
                    layout.shards_nothing(ranks),
                    [less.strategy, less.shard_ranks, less.prefetch],
                    _said(layout),
                ],
            )
            yield f"{place} on {ranks} {node_ranks} again", Layout.from_json(layout.to_json()) == layout
    first = Layout(strategy="hybrid", shard_ranks=2, pipeline=2).for_ranks(16)
    changes: list[dict[str, Any]] = [{"shard_ranks": 4}, {"strategy": "fsdp"}, {"schedule": "gpipe", "tensor": 2}]
    changes += [{"chunks": 2}, {"reshard_after_forward": False}, {"prefetch": 3}, {"bucket_mb": 1.0, "microbatch": 4}]
    changes += [{"pipeline": 1, "schedule": "gpipe"}]
    plain = replace(first, pipeline=1, strategy="ddp")
    differ = [[count_differences(each, replace(each, **change)) for change in changes] for each in (first, plain)]
    yield "differences", differ
    yield "stages", [stage_layers(layers, stages) for layers, stages in ((7, 3), (4, 4), (2, 3), (12, 5))]
    yield "rows", [loss_rows(*each) for each in ((50257, 2), (8192, 4), (10**7, 4), (2**21, 4), (100, 2))]


def _of_groups() -> Iterator[tuple[str, object]]:
    for place, options in enumerate(LAYOUTS):
        layout = Layout(**options)
        if layout.pipeline * layout.tensor * layout.context_ranks * max(1, layout.shard_ranks) > 16:
            continue
        layout = layout.for_ranks(16, 8)
        if layout.strategy == "hybrid" and layout.data * layout.context_ranks % layout.shards:
            continue
        for rank in (0, 5, 14):
            groups = groups_of(layout, rank)
            yield f"groups {place} {rank}", [groups, {str(ranks): name for ranks, name in names_of(groups).items()}]


def _choices() -> dict[str, tuple[Any, ...]]:
    offloads = [
        Offload.of(parts) for parts in (["optimizer"], ["gradients"], ["parameters"], ["optimizer", "parameters"])
    ]
    compressions = [Compression(policy="topk"), Compression(policy="powersgd", error_feedback=False, factor_rank=2)]
    compressions += [
        Compression(ratio=0.5),
        Compression(policy="int8", threshold=0.5),
        Compression(policy="topk", ratio=0.1),
    ]
    return {
        "strategy": STRATEGIES,
        "data": (0, 2, 3, 4),
        "pipeline": (1, 2, 3, 5),
        "tensor": (1, 2, 3, 4),
        "shard_ranks": (0, 2, 3, 8),
        "node_ranks": (0, 4, 3),
        "context_ranks": (1, 2),
        "expert": (1, 2, 3),
        "units": (None, ("a",), ("a", "b", "a")),
        "unit_mb": (None, 8.0),
        "prefetch": (1, 2),
        "reshard_after_forward": (True, False, 0, 1, 2, 3),
        "bucket_mb": (25.0, 0.5),
        "first_bucket_mb": (1.0, 0.5),
        "tunes_buckets": (False, True),
        "algorithm": ("native", "hierarchical"),
        "compression": (Compression(), *compressions),
        "schedule": ("1f1b", "interleaved", "zb-v", "zb-h1", OWN),
        "chunks": (0, 1, 2, 3),
        "stages": ("estimated", "measured", ("layers.1",), ("layers.1", "layers.1"), ("layers.1", "layers.3")),
        "stage_layers": (None, (3, 3), (2, 2, 2), (4, 0, 2), (1, 1), (3, 0), (2, 1)),
        "sequence_parallel": (False, True),
        "precision": ("fp32", "fp16", "fp8"),
        "checkpoint_activations": ("none", "full"),
        "offload": (Offload(), *offloads),
        "compile": ("none", "blocks"),
        "fused_loss": ("auto", True),
    }


def _of_rules() -> Iterator[tuple[str, object]]:
    """Layouts by chance, each with a few fields changed, on some ranks: which rules speak, and what they say."""
    random, choices = Random(3), _choices()
    names = sorted(choices)

    def of(values: Any) -> Any:
        return values[int(random.random() * len(values))]

    keys = {name: f"parallel.{name}" for name in (*names, "ranks", "heads", "kv_heads")}
    directed: list[dict[str, Any]] = [{"tensor": tensor, "sequence_parallel": True} for tensor in (2, 3, 4)]
    directed += [{"data": data, "pipeline": 2, "tensor": tensor} for data in (2, 3) for tensor in (1, 2)]
    directed += [{"strategy": "fsdp", "reshard_after_forward": number} for number in (0, 1, 3)]
    directed += [
        {"pipeline": pipeline, "chunks": chunks, "schedule": "interleaved"} for pipeline in (3, 8) for chunks in (2, 3)
    ]
    directed += [{"pipeline": 2, "stage_layers": counts} for counts in ((3, 3), (0, 6), (6, 0), (2, 2, 2), (5, 2))]
    directed += [{"algorithm": "hierarchical", "node_ranks": number} for number in (0, 1, 4, 8)]
    directed += [{"strategy": "hybrid", "node_ranks": number} for number in (0, 2, 8)]
    directed += [{"expert": expert, "strategy": strategy} for expert in (3, 4) for strategy in ("ddp", "fsdp")]
    for place in range(320):
        chosen = {of(names) for _ in range(1 + int(random.random() * 4))}
        if place % 2:
            chosen |= {"pipeline", "strategy"}
        asked = {name: of(choices[name]) for name in sorted(chosen)}
        if place < 2 * len(directed):
            asked = directed[place // 2]
        ranks, node_ranks, model = of((None, 1, 4, 6, 8, 12)), of((None, 0, 4)), of(sorted(MODELS))
        case = RuleCase(
            Layout(**asked),
            ranks=ranks,
            node_ranks=node_ranks,
            model=MODELS[model],
            keys=keys if place % 3 == 0 else {},
            strategy="zero3" if asked.get("strategy") == "fsdp" else "",
        )
        found = told(lambda case=case: [f"{each.what} | {each.fix}" for each in rules(case)])
        yield f"rules {place} {ranks} {node_ranks} {model} {_shown(asked)}", found
    yield "rules", {rule.__name__.strip("_"): " ".join(reads) for rule, reads in RULES.items()}
    yield (
        "checked",
        [told(lambda: check_layout(Layout(pipeline=2), 3)), told(lambda: check_layout(Layout(tensor=0), 3))],
    )
    some = RuleCase(Layout(pipeline=3, tensor=5), ranks=4)
    yield "some rules", [str(each) for each in rules(some, lambda reads: "tensor" in reads or "ranks" in reads)]
    cases = [
        RuleCase(Layout(pipeline=pipeline, tensor=tensor), ranks=ranks)
        for pipeline, tensor, ranks in ((1, 1, 3), (2, 1, 3), (2, 3, 6))
    ]
    yield (
        "cases",
        [[case.degrees, case.layout.degree, case.divides, case.said("pipeline", "strategy")] for case in cases],
    )


def _shown(asked: dict[str, Any]) -> str:
    return " ".join(f"{name}={'own' if value is OWN else text_of(value)}"[:40] for name, value in asked.items())


def _of_fields() -> Iterator[tuple[str, object]]:
    """Values that a field cannot have."""
    values = (
        None,
        0,
        1,
        -1,
        2.5,
        True,
        "x",
        "blocks",
        "auto",
        "measured",
        ("a",),
        (1,),
        (),
        Offload(),
        Compression(),
        OWN,
    )
    for each in fields(Layout):
        found = [
            told(lambda name=each.name, value=value: "; ".join(map(str, field_problems(Layout(**{name: value})))))
            for value in values
        ]
        yield f"field {each.name}", [str(text).replace(repr(OWN), "own") for text in found]
    numbers: list[dict[str, Any]] = [
        {"ratio": 0.0},
        {"ratio": 1.0},
        {"ratio": 1.1},
        {"factor_rank": 0},
        {"factor_rank": 1},
    ]
    numbers += [
        {"threshold": 0.0},
        {"plain_steps": -1},
        {"plain_steps": 0},
        {"min_size": -1},
        {"min_size": 0},
        {"policy": "topj"},
    ]
    numbers += [{"policy": "zzz"}, {"ratio": -1, "min_size": -2}]
    yield "compressions", {str(each): str(told(lambda each=each: Compression(**each).is_any)) for each in numbers}
    given = Compression(policy="topk", min_size=6, exclude=("head.*", "b"))
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("a", (2, 3)),
        ("a", (2, 2)),
        ("a", (9,)),
        ("head.weight", (9, 9)),
        ("b", (9, 9)),
    ]
    yield "takes", [given.takes(name, shape) for name, shape in shapes]
    yield "takes all", Compression(policy="topk", min_size=0).takes("a", (0, 3))
    yield (
        "divisors",
        [nearest_divisor(number, wanted) for number, wanted in ((12, 5), (12, 7), (7, 3), (16, 3), (9, 2))],
    )
    yield "twice", [named_twice(each) for each in ((), ("a",), ("b", "a", "b", "a"))]
    yield "texts", [text_of(each) for each in (Offload.of(["optimizer"]), ("a", 2), "estimated", True, 3, "x")]


def _of_models() -> Iterator[tuple[str, object]]:
    for name, model in MODELS.items():
        if model.heads or model.is_sampled:
            yield f"model {name}", [model.params, model.active_matmul_params if model.heads else 0]
        if model.heads:
            yield (
                f"widths {name}",
                [
                    model.head_width,
                    model.score_width,
                    model.query_width,
                    model.kv_width,
                    model.matrices,
                    model.end_params,
                    model.attention_params,
                    model.expert_params,
                    model.mlp_params,
                    model.layer_params,
                ],
            )
        yield f"layers {name}", [model.num_layers, model.is_sampled, model.gated]
    for options, running in (
        ({}, {}),
        ({"accumulate": 3, "microbatch": 2}, {}),
        ({"context_ranks": 2}, {"global_batch": 64.0}),
        ({"checkpoint_activations": "matmuls"}, {"recomputes_attention": True, "micro_batch": 3.0}),
        ({"checkpoint_activations": "matmuls"}, {"global_batch": 3.0}),
        ({"checkpoint_activations": "full"}, {"recomputes_attention": True}),
    ):
        for compute in ("tf32", "bf16"):
            run = Running(**{"seq_len": 100, "compute": compute, **running})
            work = Workload(model=GPT, layout=Layout(**options).for_ranks(8), run=run)
            found = [work.tokens, work.micro_batch, work.microbatches, work.global_batch, work.recompute, run.is_wide]
            yield f"workload {options} {running} {compute}", [*found, str(work)]


def _of_plans() -> Iterator[tuple[str, object]]:
    memory = MemoryEstimate(
        parameters=1,
        gradients=20,
        optimizer=300,
        activations=4000,
        buffers=5e4,
        temporary=6e5,
        framework=7e6,
        host=8e7,
        compression=9e8,
    )
    layout = Layout(strategy="fsdp", microbatch=6, accumulate=4, pipeline=2).for_ranks(8)
    plan = Plan(name="p", layout=layout, device="cpu", memory=memory, total_steps=3)
    yield "memory", [memory, memory.to_json()]
    yield "plan", [plan.batch, plan.with_microbatch(3).batch, plan.with_microbatch(8).layout.accumulate]
    told_of = plan.to_json()
    yield "plan told", {name: value for name, value in told_of.items() if name != "layout"}
    yield "plan again", [Plan.from_json(told_of) == plan, Plan.from_json(replace(plan, memory=None).to_json()).memory]
    machines = [
        RunMachine(device="cpu", ranks=6, node_ranks=each, device_bytes=1001, host_bytes=5) for each in (None, 3)
    ]
    yield "machines", [[machine.local_ranks, machine.budget_bytes] for machine in machines]


def _of_sharing() -> Iterator[tuple[str, object]]:
    for name, sharing in SHARING.items():
        yield (
            f"sharing {name}",
            [
                [sharing.copies_sent(count) for count in (1, 4)],
                [sharing.share_of_states(ranks) for ranks in (1, 2, 8)],
                sharing.collectives,
            ],
        )
    parts = ([], ["optimizer"], ["gradients"], ["parameters"], ["gradients", "parameters"])
    yield "offload", [[each, each.host_bytes, each.parts, each.is_any] for each in map(Offload.of, parts)]
