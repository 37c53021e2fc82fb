"""Kept figures of models: logits and gradients in float64 with weights by formula; what a pass leaves; shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kept_figures import assert_kept, told
from kept_tensors import fill, gradients, row, sums
from torch import nn

from paceline.models.document_attention import document_mask
from paceline.models.gpt import GPT, SIZES, KeyValues, document_starts, gpt_config
from paceline.models.head_loss import OutputLayer, check_targets, head_loss
from paceline.models.layers import model_layers
from paceline.models.mlp import MLPClassifier, former_names
from paceline.models.registry import num_parameters
from paceline.models.resnet import ResNet
from paceline.plan.model_shape import ModelShape

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, width=16, mlp_width=24, vocab_size=31, context=12)
SHAPES = {
    "current": SHAPE,
    "classic": replace(SHAPE, norm="layer", mlp="gelu", positions="learned", tied=True, kv_heads=4),
    "dropped": replace(SHAPE, dropout=0.1, kv_heads=1),
}


def figures() -> dict[str, object]:
    parts = (_of_gpts(), _of_losses(), _of_classifiers())
    return {name: value for part in parts for name, value in part}


def test_models_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _of_gpts() -> Iterator[tuple[str, object]]:
    for name, shape in SHAPES.items():
        for end_token in (None, 7):
            model = fill(GPT(shape, end_token).double()).eval()
            tokens, targets = row(10), row(10, 3)
            logits = model(tokens)
            loss, correct = model(tokens, targets, counts=True)
            loss.backward()
            yield (
                f"{name} {end_token}",
                [sums(logits), loss.item(), int(correct), gradients(model), model(tokens, targets).item()],
            )
            if end_token is None:
                cache = KeyValues()
                steps = [
                    model(tokens[:, :4], cache=cache),
                    model(tokens[:, 4:5], cache=cache),
                    model(tokens[:, 5:9], cache=cache),
                ]
                yield f"{name} read on", [[sums(each) for each in steps], cache.length]
                x: Any = tokens
                for layer in model_layers(model):
                    x = layer.run(x)
                yield (
                    f"{name} layers",
                    [
                        sums(x),
                        [layer.name for layer in model_layers(model)],
                        [len(layer.modules) for layer in model_layers(model)],
                    ],
                )
            else:
                yield f"{name} refused", told(model.pipeline_layers)
        yield (
            f"{name} parts",
            [
                len(model.blocks()),
                len(model.ends()),
                len(model.apart()),
                model.loss_vocabulary(),
                list(model.example_inputs()[0].shape),
            ],
        )
        yield f"{name} too long", told(lambda model=model: model(row(13)))
        stds = [float(getattr(module, "std", 0.0)) for module in model.modules() if hasattr(module, "std")]
        yield f"{name} spread", stds
    tokens = torch.tensor([[1, 7, 7, 3, 4, 7, 2], [7, 1, 2, 3, 7, 0, 7]])
    starts = document_starts(tokens, 7)
    yield (
        "documents",
        [starts.flatten().tolist(), document_mask(starts, is_causal=True).to(torch.int64).flatten().tolist()],
    )
    sizes: list[tuple[str | None, dict[str, Any]]] = [
        ("gpt-124m", {}),
        ("gpt-micro", {"heads": 2, "width": 64}),
        (None, {}),
    ]
    sizes += [
        ("gpt-1.1b", {"vocab_size": 5, "kv_heads": None}),
        ("gpt-big", {}),
        ("gpt-micro", {"hats": 1}),
        ("gpt-micro", {"heads": 5}),
    ]
    sizes += [
        ("gpt-micro", {"layers": 0, "dropout": 1.0}),
        ("gpt-micro", {"norm": "x", "dropout": -0.1}),
        ("gpt-micro", {"dropout": 0.0}),
    ]
    yield (
        "sizes",
        {f"{size} {given}": told(lambda size=size, given=given: gpt_config(size, **given)) for size, given in sizes},
    )
    yield "all sizes", {name: [shape.vocab_size, shape.params] for name, shape in SIZES.items()}


def _of_losses() -> Iterator[tuple[str, object]]:
    """The loss with its output layer: rows, smoothing, ignored targets, what is asked for."""
    torch_hidden = torch.sin(torch.arange(2 * 5 * 6, dtype=torch.float64)).reshape(2, 5, 6)
    torch_weight = torch.cos(torch.arange(9 * 6, dtype=torch.float64)).reshape(9, 6)
    targets = torch.tensor([[0, 8, -100, 3, 3], [2, -100, 7, 1, 0]])
    for rows in (None, 1, 3, 10, 99):
        for smoothing in (0.0, 0.2):
            hidden, weight = torch_hidden.clone().requires_grad_(), torch_weight.clone().requires_grad_()
            loss, correct = head_loss(hidden, weight, targets, rows=rows, smoothing=smoothing, counts=True)
            (3 * loss).backward()
            plain = F.cross_entropy(
                (torch_hidden @ torch_weight.t()).flatten(0, 1),
                targets.flatten(),
                reduction="sum",
                label_smoothing=smoothing,
            )
            assert loss.item() == pytest.approx(float(plain))
            yield f"loss {rows} {smoothing}", [loss.item(), int(correct), sums(hidden.grad), sums(weight.grad)]
    for for_hidden, for_weight in ((True, False), (False, True), (False, False)):
        hidden, weight = (
            torch_hidden.clone().requires_grad_(for_hidden),
            torch_weight.clone().requires_grad_(for_weight),
        )
        loss = head_loss(hidden, weight, targets.clamp(min=0), ignored=3)
        if loss.requires_grad:
            loss.backward()
        yield f"asked {for_hidden} {for_weight}", [loss.item(), sums(hidden.grad), sums(weight.grad)]
    half = [each.to(torch.bfloat16).requires_grad_() for each in (torch_hidden, torch_weight)]
    loss = head_loss(half[0], half[1], targets, rows=4)
    loss.backward()
    yield (
        "half",
        [
            str(loss.dtype),
            [str(each.grad.dtype) for each in half if each.grad is not None],
            abs(loss.item() - head_loss(torch_hidden, torch_weight, targets).item()) < 0.5,
        ],
    )
    empty = head_loss(torch_hidden[:0].requires_grad_(), torch_weight, targets[:0], counts=True)
    yield "empty", [each.item() for each in empty]
    on_meta = torch_hidden.to("meta").requires_grad_(), torch_weight.to("meta").requires_grad_()
    head_loss(*on_meta, targets.to("meta"), rows=4).backward()
    yield "meta", [list(each.grad.shape) for each in on_meta if each.grad is not None]
    wrong: list[tuple[Any, Any, Any]] = [
        (torch_hidden, torch_weight[0], targets),
        (torch_hidden, torch_weight[:, :5], targets),
    ]
    wrong += [
        (torch_hidden, torch_weight, targets[:1]),
        (torch_hidden, torch_weight, targets + 1),
        (torch_hidden, torch_weight, targets - 1),
    ]
    yield "wrong", [told(lambda each=each: head_loss(*each).item()) for each in wrong]
    with torch.autocast("cpu", torch.bfloat16):
        yield (
            "autocast",
            [
                str(head_loss(hidden.detach().float(), weight.detach().float(), targets).dtype),
                float(head_loss(torch_hidden, torch_weight, targets)),
            ],
        )
    layer, biased = fill(OutputLayer(6, 9, bias=False).double()), OutputLayer(6, 9)
    yield (
        "layer",
        [
            sums(layer(torch_hidden)),
            layer(torch_hidden, targets).item(),
            told(lambda: biased(torch_hidden.float(), targets)),
        ],
    )
    yield "targets", [told(lambda low=low: check_targets(torch.tensor([0, low]), 5, -1)) for low in (-1, -2, 4, 5)]


def _of_classifiers() -> Iterator[tuple[str, object]]:
    images = torch.sin(torch.arange(2 * 3 * 16 * 16, dtype=torch.float64)).reshape(2, 3, 16, 16)
    for depth, norm, stem in (
        (18, "batch", "small"),
        (18, "group", "imagenet"),
        (50, "group", "small"),
        (50, "batch", "imagenet"),
    ):
        drawn = ResNet(depth, 5, width=8, norm=norm, stem=stem)
        scales = [
            float(module.weight.detach().mean())
            for module in drawn.modules()
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm)
        ]
        groups = [module.num_groups for module in drawn.modules() if isinstance(module, nn.GroupNorm)]
        model = fill(drawn.double()).eval()
        logits = model(images[:, :, :8, :8] if depth == 50 else images)
        logits.sum().backward()
        x: Any = images
        for layer in model_layers(model):
            x = layer.run(x)
        yield (
            f"resnet {depth} {norm} {stem}",
            [
                sums(logits),
                sums(model.head.weight.grad),
                sums(x),
                scales,
                groups,
                num_parameters(model),
                list(model.example_inputs()[0].shape),
                len(model.blocks()),
            ],
        )
    mlp = fill(MLPClassifier(12, 7, 4).double()).eval()
    inputs = images[:, :, :2, :2]
    x = inputs
    for layer in mlp.pipeline_layers():
        x = layer.run(x)
    yield (
        "mlp",
        [
            sums(mlp(inputs)),
            sums(x),
            [layer.name for layer in mlp.pipeline_layers()],
            list(mlp.example_inputs()[0].shape),
        ],
    )
    old = {
        f"layers.{place}.{kind}": mlp.state_dict()[f"layers.{place - 1}.{kind}"]
        for place in (1, 4, 7)
        for kind in ("weight", "bias")
    }
    again = MLPClassifier(12, 7, 4).double().eval()
    again.load_state_dict(old)
    yield (
        "former",
        [
            sums(again(inputs)),
            len(former_names(list(old), list(mlp.state_dict()))),
            len(former_names(list(mlp.state_dict()), list(old))),
        ],
    )
    calls: list[Any] = [
        lambda: ResNet(34),
        lambda: ResNet(norm="x"),
        lambda: ResNet(stem="x"),
        lambda: ResNet(width=0),
        lambda: MLPClassifier(0),
        lambda: MLPClassifier(hidden_dim=1),
        lambda: MLPClassifier(num_classes=0),
    ]
    yield "refused", [told(call) for call in calls]
    yield "least", [num_parameters(MLPClassifier(1, 2, 1)), num_parameters(ResNet(18, 1, 1, 1))]
