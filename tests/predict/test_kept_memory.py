"""Kept figures of memory: what configs' models hold block by block, and what ranks hold under each layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from kept_figures import assert_kept, told

from paceline.config import config_from_dict
from paceline.plan.layout import CHECKPOINTS, COMPRESSIONS, Compression, Layout, Offload
from paceline.plan.model_shape import ModelShape
from paceline.predict.memory.activations import Widths, describe_gpt, describe_model
from paceline.predict.memory.facts import (
    LayerCost,
    ModelFacts,
    bounds_of,
    choose_bounds,
    num_in_flight,
    part_of,
    parts_of,
    stages_of,
)
from paceline.predict.memory.memory import (
    EngineMemory,
    StateFacts,
    estimate_memory,
    estimate_ranks,
    is_known,
    largest_microbatch,
    rank_estimates,
)

TOKENS: dict[str, Any] = {"kind": "synthetic_tokens", "vocab_size": 256, "context": 128}
IMAGES: dict[str, Any] = {"kind": "synthetic_images", "size": 63}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "micro": ({"kind": "gpt", "size": "gpt-micro"}, TOKENS),
    "124m": ({"kind": "gpt", "size": "gpt-124m", "layers": 3}, {**TOKENS, "vocab_size": 50257}),
    "few keys": ({"kind": "gpt", "size": "gpt-micro", "kv_heads": 2, "dropout": 0.1}, TOKENS),
    "dropped": ({"kind": "gpt", "size": "gpt-124m", "layers": 2, "dropout": 0.2}, TOKENS),
    "resnet18": ({"kind": "resnet", "depth": 18, "width": 16, "stem": "small"}, IMAGES),
    "resnet50": ({"kind": "resnet", "depth": 50, "width": 32}, IMAGES),
    "groups": ({"kind": "resnet", "depth": 18, "norm": "group", "width": 16}, IMAGES),
    "mlp": ({"kind": "mlp", "hidden_dim": 96}, {"kind": "digits"}),
    "mlp without dropout": ({"kind": "mlp", "dropout": 0.0}, {"kind": "digits"}),
}
PRECISIONS = ("fp32", "bf16", "fp16", "bf16_master")


def figures() -> dict[str, object]:
    return {**dict(_of_models()), **dict(_of_layouts()), **dict(_of_stages()), **dict(_of_configs())}


def test_memory_has_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _facts(name: str, device: str, train: dict[str, Any] | None = None, **sections: Any) -> ModelFacts:
    found = describe_model(_config(name, train, **sections), device)
    assert found is not None
    return found


def _config(name: str, train: dict[str, Any] | None = None, **sections: Any) -> Any:
    model, data = MODELS[name]
    model = {**model, **sections.pop("model", {})}
    return config_from_dict({"model": model, "data": data, "train": train or {}, **sections})


def _of_models() -> Iterator[tuple[str, object]]:
    """Facts of all models: precisions, devices, compiled or not."""
    for place, name in enumerate(MODELS):
        for number, precision in enumerate(PRECISIONS):
            device = "cuda" if (place + number) % 2 or precision == "fp16" else "cpu"
            sections: dict[str, Any] = {"parallel": {"device": device}}
            if device == "cuda" and number % 2:
                sections["model"] = {"compile": "whole" if place % 2 else "blocks"}
            yield f"{name} {precision} {device}", _told(_facts(name, device, {"precision": precision}, **sections))
    for device in ("cpu", "cuda"):
        yield f"wide {device}", _told(_facts("few keys", device, {"dtype": "float64"}))
        for ranks in (1, 2):
            parallel = {"device": device, "ranks": ranks}
            yield (
                f"graph {device} {ranks}",
                _told(_facts("resnet50", device, parallel=parallel, model={"compile": True})),
            )
    learned = ModelShape(
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        mlp_width=160,
        vocab_size=300,
        norm="layer",
        mlp="gelu",
        positions="learned",
        tied=True,
        context=48,
        dropout=0.1,
    )
    widths = Widths(stream=4, compute=2, is_autocast=True, device="cuda", is_compiled=True, is_one_graph=False)
    for device in ("cpu", "cuda"):
        for shape in (learned, replace(learned, dropout=0.0, norm="rms", mlp="swiglu", context=0, tied=False)):
            found = describe_gpt(shape, 32, widths._replace(device=device))
            yield f"learned {device} {shape.norm}", _told(found)


def _told(model: ModelFacts) -> object:
    """Returns facts without blocks that are like the one before."""
    blocks = [block for place, block in enumerate(model.blocks) if block not in model.blocks[:place]]
    return [
        blocks,
        model.root,
        model.entry,
        model.exit,
        model.loss,
        model.work,
        model.parameters,
        model.columns,
        model.buffer_bytes,
        model.temporary_bytes,
        model.tied_parameters,
        model.largest_block,
    ]


LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "ddp", "precision": "bf16_master"},
    {"strategy": "zero1", "bucket_mb": 0.1},
    {"strategy": "zero1", "precision": "fp8"},
    {"strategy": "zero2", "bucket_mb": 0.05},
    {"strategy": "zero2", "precision": "bf16_master"},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "prefetch": 0, "precision": "bf16_master"},
    {"strategy": "fsdp", "reshard_after_forward": False},
    {"strategy": "fsdp", "reshard_after_forward": 2, "prefetch": 2},
    {"strategy": "hybrid", "shard_ranks": 2},
    {"strategy": "zero1", "offload": Offload.of(["optimizer"])},
    {"strategy": "zero1", "offload": Offload.of(["optimizer"]), "precision": "bf16_master"},
    {"strategy": "zero2", "offload": Offload.of(["optimizer"]), "precision": "bf16_master"},
    {"strategy": "zero2", "offload": Offload.of(["gradients"])},
    {"strategy": "fsdp", "offload": Offload.of(["optimizer", "parameters"])},
    {"strategy": "fsdp", "offload": Offload.of(["gradients"])},
    {"strategy": "fsdp", "offload": Offload.of(["optimizer"]), "precision": "bf16_master"},
    {"strategy": "ddp", "fused_loss": True},
    {"strategy": "ddp", "gathers_logits": True},
    {"strategy": "ddp", "tensor": 2},
    {"strategy": "fsdp", "tensor": 2, "sequence_parallel": True},
    {"strategy": "ddp", "pipeline": 2, "accumulate": 6},
    {"strategy": "ddp", "pipeline": 2, "accumulate": 6, "schedule": "gpipe", "tensor": 2},
    {"strategy": "zero1", "pipeline": 2, "accumulate": 6, "schedule": "interleaved", "chunks": 2},
    {"strategy": "ddp", "pipeline": 2, "accumulate": 6, "schedule": "zb-v", "chunks": 2},
    {"strategy": "fsdp", "pipeline": 2, "accumulate": 3, "tensor": 2, "sequence_parallel": True},
]


def _of_layouts() -> Iterator[tuple[str, object]]:
    """What ranks hold: every strategy, offload, split, checkpointing and compression, on both devices."""
    models = {name: (_facts(name, "cuda", {"precision": "bf16"}), _facts(name, "cpu")) for name in ("124m", "groups")}
    for place, options in enumerate(LAYOUTS):
        layout = Layout(**{"microbatch": 1 + place % 3, **options}).for_ranks(8)
        for name, (on_gpu, on_cpu) in models.items():
            if layout.tensor > 1 and name == "groups":
                continue
            states = StateFacts(
                optimizer_slots=1 + place % 3, fewer_in_blocks=place % 2, itemsize=4 + 4 * (place % 7 == 1)
            )
            yield (
                f"{place} {name}",
                [
                    estimate_memory(on_gpu, layout, states),
                    estimate_memory(on_cpu, layout, replace(states, device="cpu")).device_bytes,
                    is_known(on_gpu, layout),
                    [each.device_bytes for each in estimate_ranks(on_gpu, layout, states)],
                ],
            )
    for name, (on_gpu, _) in models.items():
        for policy in CHECKPOINTS:
            for strategy in ("ddp", "fsdp"):
                layout = Layout(strategy=strategy, checkpoint_activations=policy, microbatch=3).for_ranks(4)
                yield f"{policy} {strategy} {name}", estimate_memory(on_gpu, layout, StateFacts())
        for policy in COMPRESSIONS:
            for has_feedback in (True, False):
                given = Compression(policy=policy, factor_rank=3, error_feedback=has_feedback)
                options = {"strategy": "hybrid", "shard_ranks": 2} if policy in ("topk", "powersgd") else {}
                layout = Layout(**{"strategy": "ddp", "compression": given, "bucket_mb": 0.2, **options}).for_ranks(4)
                yield f"{policy} {has_feedback} {name}", estimate_memory(on_gpu, layout, StateFacts())
        budgets = (0, 2 * 10**9, 10**10)
        layout = Layout(strategy="fsdp").for_ranks(4)
        yield f"largest {name}", [largest_microbatch(on_gpu, layout, StateFacts(), each) for each in budgets]


def _of_stages() -> Iterator[tuple[str, object]]:
    model = _facts("124m", "cuda")
    deep = replace(model, blocks=model.blocks * 4)
    schedules: list[dict[str, Any]] = [
        {"pipeline": 3},
        {"pipeline": 4, "schedule": "gpipe"},
        {"pipeline": 3, "schedule": "interleaved", "chunks": 3, "accumulate": 7},
        {"pipeline": 2, "schedule": "zb-v", "chunks": 2},
        {"pipeline": 2, "schedule": "zb-h1"},
        {"pipeline": 2, "stage_layers": (5, 7)},
        {"pipeline": 2, "stages": ("layers.3",)},
        {"pipeline": 3, "stages": ("head", "layers.1")},
        {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
        {"tensor": 4},
    ]
    for options in schedules:
        layout = Layout(**{"accumulate": 8, **options}).for_ranks(24)
        parts = [[part.in_flight, part.edge_bytes, _told(part.model)] for part in parts_of(deep, layout)]
        ranks = range(layout.pipeline)
        yield (
            f"parts {options}",
            [
                parts,
                bounds_of(deep, layout) if layout.pipeline > 1 else (),
                [stages_of(layout, rank) for rank in ranks],
                [num_in_flight(layout, rank) for rank in ranks],
            ],
        )
    yield "some layers", [_told(part_of(deep, layers, tensor=2)) for layers in ([0, 1], [3], [0, 13], [12, 13])]
    sizes = (3, 1, 4, 1, 5, 9, 2, 6)
    costs = [
        LayerCost(
            name=f"l{place}", forward=size, backward=2 * size, state_bytes=10 * size, activation_bytes=7 * (place % 3)
        )
        for place, size in enumerate(sizes)
    ]
    for stages in (1, 2, 3, 4, 8, 9):
        bounds = told(lambda stages=stages: choose_bounds(costs, stages))
        tight = told(
            lambda stages=stages: choose_bounds(costs, stages, memory_bytes=130, in_flight=range(stages, 0, -1))
        )
        cut = pairwise(bounds) if isinstance(bounds, tuple) else ()
        totals = tuple(sum(cost.total for cost in costs[begin:end]) for begin, end in cut)
        yield f"bounds {stages}", [bounds, tight, totals if isinstance(bounds, tuple) else ""]


def _of_configs() -> Iterator[tuple[str, object]]:
    """From configs: what each stage's ranks hold, and what a search asks."""
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("micro", {"optim": {"kind": "muon"}}, {}),
        ("micro", {"optim": {"kind": "sgd"}}, {"precision": "bf16", "ema_decay": 0.99}),
        ("micro", {"optim": {"kind": "sgd", "momentum": 0.0}}, {"dtype": "float64"}),
        ("micro", {"parallel": {"ranks": 4, "pipeline": 2}}, {"microbatch": 2, "global_batch": 16}),
        ("micro", {"parallel": {"ranks": 4, "strategy": "auto"}}, {}),
        ("micro", {"parallel": {"ranks": 4, "strategy": "hybrid"}}, {}),
        ("mlp", {"parallel": {"ranks": 2, "strategy": "fsdp"}}, {"microbatch": 4, "global_batch": 16}),
        ("resnet50", {"parallel": {"ranks": 4, "strategy": "zero2"}}, {"microbatch": 4, "global_batch": 32}),
    ]
    for place, (name, sections, train) in enumerate(cases):
        config = _config(
            name, train, **{**sections, "parallel": {"ranks": 2, "device": "cuda", **sections.get("parallel", {})}}
        )
        memory = EngineMemory.of(config)
        assert memory is not None
        layouts = [Layout(**each).for_ranks(8) for each in LAYOUTS[::5]]
        if name != "micro":
            layouts = [each for each in layouts if each.tensor == 1]
        found = [memory.estimate(layout) for layout in layouts]
        deep = replace(Layout(pipeline=2, schedule="gpipe").for_ranks(2), accumulate=100)
        yield (
            f"config {place} {name}",
            [
                rank_estimates(config, 2),
                rank_estimates(config),
                found,
                StateFacts.of(config, "cpu"),
                [memory.estimate(layout) for layout in (deep, replace(deep, pipeline=64, data=1))],
            ],
        )
