"""A model as a row of layers: where a pipeline may cut it.

A model says so with a method

    def pipeline_layers(self) -> Sequence[PipelineLayer]

whose layers, run one after another, compute what ``forward`` does. Between two layers any cut is allowed. A plain
``nn.Sequential`` needs no such method, and neither do causal language models of Hugging Face (``_causal_layers``).

What a layer uses it lists: all modules whose parameters, buffers or modes it reads. A module may be in several layers
(a tied output layer reads the embedding's weight), and every parameter and buffer of the model is in at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.attention import current_part, positions
from paceline.models.lora import output_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayer:
    """One layer, with the modules that it uses; ``name`` is that of the first, by which split points are given."""

    name: str
    run: Callable[..., Any]
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls one after another, of modules say. An object, not a closure: a deep copy of a model runs its own."""

    calls: tuple[Callable[..., Any], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.calls
        x = first(*args, **kwargs)
        for call in others:
            x = call(x)
        return x


def model_layers(model: nn.Module) -> tuple[PipelineLayer, ...]:
    """Returns the layers of a model: what it says itself, or the children of a plain Sequential. Raises UsageError."""
    say: object = getattr(model, "pipeline_layers", None)
    if callable(say) and not isinstance(say, nn.Module):
        layers = tuple(say())
    elif isinstance(model, nn.Sequential) and _is_plain(model):
        layers = sequential_layers(model)
    else:
        layers = tuple(_causal_layers(model) or ())
        if not layers:
            raise UsageError(_explain(model))
    _check(model, layers)
    return layers


def sequential_layers(sequential: nn.Sequential, prefix: str = "") -> tuple[PipelineLayer, ...]:
    """Returns a layer for each child with parameters; those without (activations, dropout) join the last.

    Plain Sequentials inside are opened. ``prefix`` is the name of ``sequential`` in the model, with a dot at its end.
    """
    rows: list[list[tuple[str, nn.Module]]] = []
    waiting: list[tuple[str, nn.Module]] = []  # before the first layer: they join it
    for name, module in _opened(sequential, prefix):
        if any(True for _ in module.parameters()):
            rows.append([*waiting, (name, module)])
            waiting = []
        elif rows:
            rows[-1].append((name, module))
        else:
            waiting.append((name, module))
    joined = [(row[0][0], tuple(module for _, module in row)) for row in (*rows, waiting) if row]
    made = [(name, modules[0] if len(modules) == 1 else Chain(modules), modules) for name, modules in joined]
    return tuple(PipelineLayer(name=name, run=run, modules=modules) for name, run, modules in made)


def _opened(sequential: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in sequential._modules.items():  # named_children() leaves out a module's second place
        if isinstance(module, nn.Sequential) and _is_plain(module):
            yield from _opened(module, f"{prefix}{name}.")
        elif module is not None:
            yield prefix + name, module


def _is_plain(model: nn.Sequential) -> bool:
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    return type(model).forward is nn.Sequential.forward and "forward" not in vars(model) and not any(hooks)


def _explain(model: nn.Module) -> str:
    kind = type(model).__name__
    rows = [(n, m) for n, m in model.named_modules() if n and isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    name = max(rows, key=lambda row: sum(p.numel() for p in row[1].parameters()), default=("layers", None))[0]
    return (
        f"{kind} cannot be cut into stages: it has no method pipeline_layers(), and is not a plain nn.Sequential\n"
        "  a stage runs a part of the model's layers, and only the model knows in which order forward calls them\n"
        "  split forward into embed(), a row of layers and the rest, and add, from paceline.models.layers:\n"
        f"      def pipeline_layers(self):  # of {kind}\n"
        '          first = PipelineLayer(name="embedding", run=self.embed, modules=(self.embedding,))\n'
        f'          row = [PipelineLayer(name=f"{name}.{{i}}", run=layer, modules=(layer,))\n'
        f"                 for i, layer in enumerate(self.{name})]\n"
        '          last = PipelineLayer(name="head", run=self.unembed, modules=(self.head,))\n'
        "          return [first, *row, last]\n"
        "  every module with parameters is in the modules of a layer that uses it; see docs/pipeline.md"
    )


def _check(model: nn.Module, layers: Sequence[PipelineLayer]) -> None:
    kind = type(model).__name__
    strange = [type(layer).__name__ for layer in layers if not isinstance(layer, PipelineLayer)]
    if strange or not layers:
        raise UsageError(
            f"{kind} has {f'{strange[0]} among its' if strange else 'no'} pipeline layers\n"
            "  they are a row of PipelineLayer, from paceline.models.layers\n  return one for each part of forward"
        )
    names = [layer.name for layer in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        rule = "split points are given by name\n  name each after its first module"
        raise UsageError(f"two pipeline layers of {kind} are called {twice[0]!r}\n  {rule}")
    inner = {id(module) for module in model.modules()} - {id(model)}
    for layer in layers:
        for module in layer.modules:
            if id(module) not in inner:
                what, fix = f"a {type(module).__name__} that is not in the model", "list those of named_modules()"
                if module is model:
                    what = "the model itself"
                    fix = "list those it reads, and give a parameter of the model itself a module of its own"
                rule = "a layer uses modules below the model"
                raise UsageError(f"pipeline layer {layer.name!r} of {kind} uses {what}\n  {rule}\n  {fix}")
    _check_complete(model, layers)


def _check_complete(model: nn.Module, layers: Sequence[PipelineLayer]) -> None:
    used = {id(inner) for layer in layers for module in layer.modules for inner in module.modules()}
    left = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if id(module) not in used
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    if left:
        more, verb = (f" and {len(left) - 1} more", "belong") if len(left) > 1 else ("", "belongs")
        rule = "what no stage has would be neither trained nor saved"
        fix = "name the module in the modules of the layer that uses it; a tensor of the model itself needs a module"
        raise UsageError(f"{left[0]}{more} of {type(model).__name__} {verb} to no pipeline layer\n  {rule}\n  {fix}")


# Causal language models of Hugging Face: embedding, blocks, norm and head. A block is called without a mask: the fused
# attention is causal then. So sequences are whole, without padding, and at most as long as a sliding window.

# Embedding, blocks, last norm, and what else belongs to the embedding and to every block, as attributes of the base.
_LLAMA = ("embed_tokens", "layers", "norm", (), "rotary_emb")
_FAMILIES: dict[str, tuple[str, str, str, tuple[str, ...], str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _LLAMA),
    "gpt_neox": ("embed_in", "layers", "final_layer_norm", ("emb_dropout",), "rotary_emb"),
    "gpt2": ("wte", "h", "ln_f", ("wpe", "drop"), ""),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    embedding: nn.Module
    positions: nn.Module | None
    dropout: nn.Module | None

    def __call__(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(_positions(x))
        return x if self.dropout is None else self.dropout(x)


@dataclass(frozen=True, slots=True)
class _Block:
    block: nn.Module
    rotary: nn.Module | None
    window: int | None

    def __call__(self, x: Tensor) -> Tensor:
        part = current_part()
        length = x.shape[1] if part is None else part.length(x.shape[1])
        if self.window is not None and length > self.window:
            what = f"{length} tokens for a sliding window of {self.window}, in a pipeline"
            rule = "its blocks attend to all tokens before"
            raise UsageError(f"{what}\n  {rule}\n  set data.context to at most the window")
        places = _positions(x)
        turned = {} if self.rotary is None else {"position_embeddings": self.rotary(x, places)}
        found = self.block(x, attention_mask=None, position_ids=places, **turned)
        stream: Tensor = found[0] if isinstance(found, tuple) else found  # older releases return more
        return stream


def _causal_layers(model: Any) -> list[PipelineLayer] | None:
    """Returns the layers of a causal language model of Hugging Face; None for any other model."""
    base, settings = getattr(model, "base_model", None), getattr(model, "config", None)
    family = _FAMILIES.get(str(getattr(settings, "model_type", None)))
    head = output_layer(model)
    if family is None or not isinstance(base, nn.Module) or base is model or not isinstance(head, nn.Linear):
        return None
    if getattr(settings, "_attn_implementation", None) == "eager":
        what = f"{type(model).__name__} with attention of its own (eager) cannot be cut into stages"
        rule = "its blocks need a mask, which stages do not send"
        raise UsageError(f"{what}\n  {rule}\n  build it with attn_implementation='sdpa'")
    first, row, last, beside, turns = family
    embedding, blocks, norm = (getattr(base, name) for name in (first, row, last))
    extra = {name: getattr(base, name, None) for name in beside}
    entry = _Entry(embedding, extra.get("wpe"), extra.get("drop", extra.get("emb_dropout")))
    rotary = getattr(base, turns) if turns else None
    window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
    prefix = model.base_model_prefix
    around = () if rotary is None else (rotary,)
    modules = (embedding, *(each for each in extra.values() if each is not None))
    return [
        PipelineLayer(name=f"{prefix}.{first}", run=entry, modules=modules),
        *(
            PipelineLayer(name=f"{prefix}.{row}.{i}", run=_Block(block, rotary, window), modules=(block, *around))
            for i, block in enumerate(blocks)
        ),
        PipelineLayer(name=f"{prefix}.{last}", run=Chain((norm, head)), modules=(norm, head)),
    ]


def _positions(x: Tensor) -> Tensor:
    places = positions(x.shape[1], x.device)
    return places if places.ndim > 1 else places.unsqueeze(0)
