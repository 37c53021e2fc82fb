"""Kept figures of models as they are taken apart: layers, adapters, what a pass leaves, values, the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from kept_figures import assert_kept, told
from kept_tensors import fill, gradients, row, sums
from torch import Tensor, nn

from paceline.config.sections import GPTModelConfig, MLPModelConfig, ResNetModelConfig
from paceline.data.datasets import DataShape
from paceline.models.gpt import GPT
from paceline.models.layers import Chain, PipelineLayer, model_layers, sequential_layers
from paceline.models.lora import adapters, add_lora, fits, matches, merged
from paceline.models.measured import KnownValues, answering, measure_activations, measure_model, operator_flops
from paceline.models.registry import (
    build_model,
    called_parts,
    check_initialised,
    loss_vocabulary,
    model_apart,
    model_blocks,
    model_ends,
    num_parameters,
)
from paceline.plan.model_shape import ModelShape

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, width=16, mlp_width=24, vocab_size=31, context=12)
SHAPES = {
    "current": SHAPE,
    "classic": replace(SHAPE, norm="layer", mlp="gelu", positions="learned", tied=True, kv_heads=4),
    "dropped": replace(SHAPE, dropout=0.1, kv_heads=1),
}


def figures() -> dict[str, object]:
    parts = (_of_layers(), _of_adapters(), _of_counts(), _of_values(), _of_registry())
    return {name: value for part in parts for name, value in part}


def test_parts_of_models_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


class _Two(nn.Module):
    def __init__(self, row: list[PipelineLayer] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1)) if row is None else None
        self.row = row

    def pipeline_layers(self) -> Any:
        layers = [PipelineLayer(name=name, run=module, modules=(module,)) for name, module in self.named_children()]
        return layers if self.row is None else self.row


def _of_layers() -> Iterator[tuple[str, object]]:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), inner, nn.Linear(3, 2))
    layers = model_layers(model)
    yield (
        "sequential",
        [
            [layer.name for layer in layers],
            [len(layer.modules) for layer in layers],
            [type(layer.run).__name__ for layer in layers],
        ],
    )
    hooked = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    hooked[1].register_forward_hook(lambda *_: None)
    yield "hooked", [layer.name for layer in sequential_layers(hooked, "a.")]
    yield "bare", [layer.name for layer in sequential_layers(nn.Sequential(nn.ReLU()))]
    chain = Chain((nn.Flatten(), nn.ReLU()))
    yield "chain", sums(chain(torch.arange(-4.0, 4.0).reshape(2, 2, 2)))
    module, other = nn.Linear(2, 2), _Two()
    rows: list[Any] = [[], [module], [PipelineLayer(name="a", run=module, modules=(module,))]]
    yield "said", [told(lambda each=each: model_layers(_Two(each))) for each in rows]
    one = _Two([])
    part = PipelineLayer(name="a", run=one.first, modules=(one.first,))
    cases = (
        [part, part],
        [part],
        [part, replace(part, name="b", modules=(one,))],
        [part, replace(part, name="b", modules=(one.second,))],
    )
    for place, case in enumerate(cases):
        one.row = list(case)
        yield f"row {place}", told(lambda: len(model_layers(one)))
    yield "left", told(lambda: model_layers(other))
    yield (
        "no row",
        told(
            lambda: model_layers(
                nn.ModuleDict({"b": nn.ModuleList([nn.Linear(2, 2)]), "c": nn.Sequential(nn.Linear(3, 3))})
            )
        ),
    )


def _of_adapters() -> Iterator[tuple[str, object]]:
    for options in ({}, {"rank": 2, "alpha": 6.0, "targets": ["key", "mlp.*"], "trained": ["norm", "layers.0.mlp.up"]}):
        model = fill(GPT(SHAPE).double()).eval()
        names = add_lora(model, **options)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        zeros = float(
            sum(
                parameter.detach().abs().sum()
                for name, parameter in model.named_parameters()
                if name.endswith("lora_b")
            )
        )
        before = sums(model(row(8)))
        fill(model)
        model(row(8)).sum().backward()
        weight = model.layers[0].attention.key
        found = [merged(weight.weight, weight.lora_a, weight.lora_b, 1.5, is_transposed=each) for each in (False,)]
        yield (
            f"lora {options}",
            [names, trained, zeros, before, sums(model(row(8))), adapters([model], []), [sums(each) for each in found]],
        )
        yield f"lora {options} gradients", gradients(model)
    square = torch.arange(9.0).reshape(3, 3)
    yield "merged", [sums(merged(square, square[:1], square[:, :1], 2.0, is_transposed=each)) for each in (False, True)]
    yield "refused lora", [told(lambda: add_lora(GPT(SHAPE), targets=["zzz"])), told(lambda: add_lora(nn.ReLU()))]
    names = [
        ("a.b.c", "c"),
        ("a.b.c", "b.c"),
        ("a.b.c", "*.c"),
        ("c", "b.c"),
        ("a.b.c", "b"),
        ("a.b.c", "b.*"),
        ("a.b.c", "x"),
    ]
    yield "names", [[matches(*each), fits(*each)] for each in names]


def _loss(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")


def _of_counts() -> Iterator[tuple[str, object]]:
    """What a forward pass leaves, by storage: operators whose kernels do not depend on the version of torch."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))

    def batch(samples: int) -> Any:
        return torch.ones(samples, 6), torch.zeros(samples, dtype=torch.int64)

    found = measure_activations(model, _loss, batch(4), [model[2], model[2][0]])
    work = found.work
    sizes = [found.outside, found.blocks, found.largest, found.total, work.total_params, work.flops, work.activations]
    yield "activations", [*sizes, work.kind, found.written_bytes >= work.activations]
    yield "facts", _facts(measure_model(model, _loss, batch, [model[2]]))
    pictures = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    pictures.register_buffer("more", torch.zeros(5))
    yield (
        "pictures",
        _facts(measure_model(pictures, _loss, lambda n: (torch.ones(n, 2, 6, 6), torch.zeros(n, dtype=torch.int64)))),
    )
    aten = torch.ops.aten
    left, right = torch.ones(3, 4), torch.ones(4, 5)
    four = torch.ones(2, 3, 5, 8)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    output = (four, torch.ones(2, 3, 5))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    yield (
        "flops",
        [
            operator_flops(aten.mm.default, (left, right), {}, left @ right),
            operator_flops(aten.relu.default, (left,), {}, left),
            operator_flops(attention, (four, torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 6)), {}, output),
            operator_flops(
                backward,
                (four, four, torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 6), four, torch.ones(2, 3, 5)),
                {},
                output,
            ),
        ],
    )


def _facts(found: Any) -> object:
    return [found.blocks, found.root, found.buffer_bytes, found.temporary_bytes, replace(found.work, kernels=1)]


def _of_values() -> Iterator[tuple[str, object]]:
    """Tensors without values whose values are known all the same."""
    values = KnownValues()
    found: dict[str, object] = {}
    with torch.device("meta"), answering(values):
        places = torch.arange(5)
        made = {
            "sum": places.sum(),
            "compared": (places < 3).all(),
            "ones": torch.ones_like(places).sum(),
            "filled": torch.full((3,), 7).sum(),
            "new": places.new_zeros(4).sum(),
            "picked": places[[1, 3]].sum(),
            "floats": torch.ones(3).sum(),
            "random": torch.randint(0, 5, (3,)).sum(),
            "empty": torch.empty(3, dtype=torch.int64).sum(),
            "indexed": places[torch.tensor([0, 4], device="cpu")].max(),
        }
        changed = torch.zeros(3, dtype=torch.int64)
        made["changed"] = changed.add_(1).sum()
        large = torch.arange(2**24 + 1)
        made["large"] = large.max()
        for name, tensor in made.items():
            try:
                found[name] = tensor.item()
            except (RuntimeError, NotImplementedError):
                found[name] = "not known"
    yield "values", found
    told_of = torch.empty(2, device="meta")
    values.tell(told_of, lambda: torch.tensor([2.0, 3.0]))
    known = values.value(told_of)
    plain = values.value(torch.tensor([4.0]))
    yield "told", [sums(known), values.value(torch.empty(2, device="meta")), sums(plain)]


class _Blocks(nn.Module):
    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self._said = blocks

    def blocks(self) -> Any:
        return self._said


def _of_registry() -> Iterator[tuple[str, object]]:
    tokens = DataShape(kind="tokens", vocab_size=40, context=8)
    classes = DataShape(kind="classes", features=12, classes=3)
    images = DataShape(kind="classes", channels=3, size=4, classes=5)
    small: dict[str, Any] = {"kind": "gpt", "layers": 1, "heads": 2, "width": 8}
    cases: list[tuple[Any, DataShape]] = [
        (GPTModelConfig(**small), tokens),
        (GPTModelConfig(**small, vocab_size=50, context=16), tokens),
        (GPTModelConfig(**small, context=4), tokens),
        (GPTModelConfig(**small), classes),
        (GPTModelConfig(kind="gpt", size="gpt-micro"), tokens),
        (GPTModelConfig(**small), replace(tokens, end_token=3)),
        (MLPModelConfig(kind="mlp"), replace(tokens, end_token=3)),
        (MLPModelConfig(kind="mlp"), classes),
        (MLPModelConfig(kind="mlp"), images),
        (MLPModelConfig(kind="mlp"), replace(classes, classes=None)),
        (MLPModelConfig(kind="mlp", num_classes=9, hidden_dim=6), classes),
        (MLPModelConfig(kind="mlp"), tokens),
        (ResNetModelConfig(kind="resnet", width=8), images),
        (ResNetModelConfig(kind="resnet", width=8), classes),
        (ResNetModelConfig(kind="resnet", width=8, in_channels=3, num_classes=2), DataShape(kind="custom")),
    ]
    for place, (config, shape) in enumerate(cases):
        built = told(lambda config=config, shape=shape: build_model(config, shape))
        yield f"built {place}", built if isinstance(built, str) else [num_parameters(built), type(built).__name__]
    rows = nn.ModuleDict(
        {"a": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "b": nn.ModuleList([nn.Linear(9, 9), nn.ReLU()])}
    )
    rows["c"] = nn.ModuleList([nn.ModuleDict({"x": nn.Linear(3, 3), "y": nn.ReLU()}) for _ in range(2)])
    rows["d"] = nn.ModuleList([nn.Linear(90, 90)])
    yield (
        "blocks",
        [
            [type(each).__name__ for each in model_blocks(rows)],
            len(model_blocks(nn.Linear(2, 2))),
            sum(map(num_parameters, model_blocks(rows))),
        ],
    )
    yield (
        "said blocks",
        [len(model_blocks(_Blocks([nn.Linear(2, 2)]))), told(lambda: model_blocks(_Blocks([nn.Linear(2, 2), 3])))],
    )
    yield "parts", [name for name, _ in called_parts("c", rows["c"])]
    gpt = GPT(SHAPES["classic"])
    yield (
        "ends",
        [
            len(model_ends(gpt)),
            len(model_apart(gpt)),
            len(model_ends(nn.ReLU())),
            loss_vocabulary(gpt),
            loss_vocabulary(nn.ReLU()),
        ],
    )
    lazy = [nn.Sequential(*(nn.LazyLinear(2) for _ in range(count))) for count in (1, 3)]
    yield "lazy", [told(lambda each=each: check_initialised(each)) for each in (*lazy, gpt)]
