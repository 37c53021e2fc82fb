"""The formulas against what autograd really saves, counted on fake tensors of the real sizes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.config import config_from_dict, layout_of
from paceline.data.datasets import DataShape
from paceline.models.measured import measure_model
from paceline.models.registry import build_model, model_blocks, num_parameters
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory

KNOWN_ERROR = 0.01
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

TOKENS: dict[str, Any] = {"kind": "synthetic_tokens", "vocab_size": 256}
IMAGES: dict[str, Any] = {"kind": "synthetic_images", "size": 64}
MODELS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "gpt", "size": "gpt-micro"}, {**TOKENS, "context": 128}),
    ({"kind": "gpt", "size": "gpt-124m", "layers": 2}, {**TOKENS, "context": 512}),
    ({"kind": "gpt", "size": "gpt-1.1b", "layers": 2}, {**TOKENS, "context": 2048}),
    ({"kind": "gpt", "size": "gpt-micro", "kv_heads": 2, "dropout": 0.1}, {**TOKENS, "context": 64}),
    ({"kind": "gpt", "size": "gpt-micro", "experts": 8, "active": 2}, {**TOKENS, "context": 64}),
    ({"kind": "gpt", "size": "gpt-micro", "head_dim": 48}, {**TOKENS, "context": 64}),
    ({"kind": "gpt", "size": "gpt-micro", "head_dim": 24, "qk_norm": "head"}, {**TOKENS, "context": 64}),
    ({"kind": "gpt", "size": "gpt-micro", "kv_heads": 2, "qk_norm": "whole"}, {**TOKENS, "context": 64}),
    (
        {"kind": "gpt", "size": "gpt-micro", "experts": 8, "active": 3, "shared_experts": 2, "expert_width": 96}
        | {"dense_layers": 1, "mlp": "gelu", "router": {"scores": "sigmoid"}},
        {**TOKENS, "context": 64},
    ),
    ({"kind": "resnet", "depth": 18, "width": 16, "stem": "small"}, IMAGES),
    ({"kind": "resnet", "depth": 18, "norm": "group", "width": 16}, IMAGES),
    ({"kind": "mlp"}, {"kind": "digits"}),
    ({"kind": "mlp", "dropout": 0.0}, {"kind": "digits"}),
]


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    logits = model(inputs)
    if logits.dtype == torch.bfloat16:  # as the losses of the train room do
        logits = logits.float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")


def shape_of(data: dict[str, Any]) -> DataShape:
    if data["kind"] == "synthetic_tokens":
        return DataShape(kind="tokens", vocab_size=data["vocab_size"], context=data["context"])
    if data["kind"] == "synthetic_images":
        return DataShape(kind="classes", channels=3, size=data["size"], classes=10, features=3 * data["size"] ** 2)
    return DataShape(kind="classes", features=64, classes=10)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """As ``model.to(dtype)``, which cannot swap fake tensors; norms with statistics stay, as they do in training."""
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm2d):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().to(dtype))


def measure(config: Any, shape: DataShape) -> tuple[ModelFacts, int, int]:
    """Returns what is measured of a model that takes no memory, its parameters and the bytes of its buffers.

    A mixture has values: how many tokens come to an expert decides what its products are.
    """
    precision, has_values = config.train.precision, bool(getattr(config.model, "experts", None))

    def make_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        if shape.kind == "tokens":
            tokens = torch.zeros(samples, shape.context or 0, dtype=torch.int64)
            return tokens, tokens.clone()
        sizes = (shape.channels, shape.size, shape.size) if shape.channels else (shape.features,)
        dtype = torch.bfloat16 if precision == "bf16_master" else torch.float32
        return torch.zeros(samples, *sizes, dtype=dtype), torch.zeros(samples, dtype=torch.int64)

    with contextlib.nullcontext() if has_values else FakeTensorMode():
        model = build_model(config.model, shape)
        if precision == "bf16_master":
            cast(model, torch.bfloat16)
        with torch.autocast("cpu", AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST):
            facts = measure_model(model, cross_entropy, make_batch, model_blocks(model))
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        return facts, num_parameters(model), buffers


def per_sample(facts: ModelFacts) -> float:
    return facts.root.saved_bytes + sum(block.saved_bytes for block in facts.blocks)


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(str(each) for each in value.values())


PRECISIONS = ("fp32", "bf16", "bf16_master")
CASES: list[Any] = [  # each model with one precision by default, and all precisions in turn
    pytest.param(model, data, precision, marks=() if (number - place) % 3 == 0 else pytest.mark.exhaustive)
    for number, (model, data) in enumerate(MODELS)
    for place, precision in enumerate(PRECISIONS)
]
CASES.append(({"kind": "resnet", "depth": 50}, IMAGES, "bf16"))


@pytest.mark.some(1)
@pytest.mark.parametrize(("model", "data", "precision"), CASES, ids=name_of)
def test_formula_against_measurement(model: dict[str, Any], data: dict[str, Any], precision: str) -> None:
    config = config_from_dict({"model": model, "data": data, "train": {"precision": precision}})
    facts = describe_model(config, "cpu")
    assert facts is not None
    measured, parameters, buffers = measure(config, shape_of(data))
    assert facts.parameters == measured.parameters == parameters
    assert [block.parameters for block in facts.blocks] == [block.parameters for block in measured.blocks]
    assert facts.buffer_bytes == measured.buffer_bytes == buffers
    assert per_sample(facts) == pytest.approx(per_sample(measured), rel=KNOWN_ERROR)
    casts = [sum(block.cast_bytes for block in (*each.blocks, each.root)) for each in (facts, measured)]
    # A few hundred kilobytes of statistics do not depend on the batch either.
    assert casts[0] == pytest.approx(casts[1], rel=KNOWN_ERROR, abs=300_000 if model["kind"] == "resnet" else 10_000)
    for ours, theirs in zip(facts.blocks, measured.blocks, strict=True):
        assert ours.input_bytes == theirs.input_bytes
        if not model.get("dropout"):  # attention without a fused kernel is two more products
            assert ours.product_bytes == theirs.product_bytes


def test_what_only_code_can_tell_is_not_guessed() -> None:
    own = config_from_dict({"model": {"kind": "factory", "factory": "a:b"}, "data": {"kind": "digits"}})
    assert describe_model(own, "cpu") is None
    images = {"kind": "factory", "factory": "a:b"}
    assert describe_model(config_from_dict({"model": {"kind": "resnet"}, "data": images}), "cpu") is None
    assert describe_model(config_from_dict({"model": {"kind": "mlp"}, "data": images}), "cpu") is None
    known = {"kind": "mlp", "input_dim": 8, "num_classes": 2}
    assert describe_model(config_from_dict({"model": known, "data": images}), "cpu") is not None


def test_a_gpu_saves_no_more_than_a_cpu() -> None:
    config = config_from_dict({"model": {"kind": "gpt", "size": "gpt-124m"}, "data": {**TOKENS, "context": 512}})
    on_gpu, on_cpu = describe_model(config, "cuda"), describe_model(config, "cpu")
    assert on_gpu is not None
    assert on_cpu is not None
    assert per_sample(on_gpu) <= per_sample(on_cpu)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_master", "fp32"])
def test_a_gpu_shares_keys_and_values_in_16_bits(precision: str) -> None:
    model = {"kind": "gpt", "size": "gpt-1.1b", "layers": 2}
    few, full = (
        describe_model(
            config_from_dict(
                {
                    "model": {**model, "kv_heads": heads},
                    "data": {**TOKENS, "context": 512},
                    "train": {"precision": precision},
                    "parallel": {"device": "cuda"},
                }
            ),
            "cuda",
        )
        for heads in (8, 16)
    )
    assert few is not None
    assert full is not None
    tokens, layers, width = 512, 2, 2048
    saved = 0 if precision == "fp32" else tokens * layers * 2 * (width // 2) * 2
    assert per_sample(full) - per_sample(few) == saved


def test_a_fused_loss_keeps_no_logits() -> None:
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "size": "gpt-124m"},
            "data": {"kind": "synthetic_tokens", "vocab_size": 50304, "context": 1024},
            "train": {"global_batch": 32, "precision": "bf16_master"},
        }
    )
    facts, states = describe_model(config, "cuda"), StateFacts.of(config, "cuda")
    assert facts is not None
    fused, plain = (
        estimate_memory(facts, replace(layout_of(config, 1), fused_loss=asked), states) for asked in ("auto", False)
    )
    tokens, vocabulary, width = 32 * 1024, 50304, 768
    assert plain.activations - fused.activations == tokens * (4 * vocabulary - 2 * width)
    assert plain.temporary - fused.temporary == vocabulary * (tokens * 6 - 8192 * 2 - width * 4)
    on_cpu = replace(states, device="cpu")
    assert estimate_memory(facts, layout_of(config, 1), on_cpu).activations == plain.activations
    split = replace(layout_of(config, 2), tensor=2, data=1)
    assert estimate_memory(facts, split, states) == estimate_memory(facts, replace(split, fused_loss=False), states)
