"""Models that transformers builds from a local folder of Hugging Face. No network, and no code but the library's.

A pretrained model is built without values, whatever the strategy: inside ``parameters_on_meta()`` parameters have
shapes and no memory; buffers have values, which are in no file. ``mark_unfilled`` says that each rank later reads what
it holds (``checkpoint/tools/incoming.py``), so that engines give them memory, and draw no values for them.

A causal language model is a base model and an output layer, known by ``base_model``, ``get_output_embeddings()`` and
``config.vocab_size``, not by its class. ``with_head_loss`` gives it a loss that never holds the logits. What some do to
their logits behind the output layer (a soft cap, a scale) would be lost, so those of two tokens are compared first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from paceline.config.hf_folder import PREPROCESSOR
from paceline.config.peft_folder import resolve_lora
from paceline.errors import ConfigError, Problem, UsageError
from paceline.models.head_loss import head_loss
from paceline.models.lora import add_lora, fits, output_layer

if TYPE_CHECKING:
    from paceline.config.sections import HFModelConfig
    from paceline.data.datasets import DataShape


_TASKS = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}


def load_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        what = f"model.kind = hf needs transformers, which cannot be imported: {error}"
        rule = "it builds the models of Hugging Face folders"
        raise UsageError(f"{what}\n  {rule}\n  pip install 'paceline[hf]'") from error


def build_hugging_face(config: HFModelConfig, shape: DataShape, *, is_unfilled: bool = False) -> nn.Module:
    """Builds the model of a folder, maybe without values. Raises ConfigError for data that it cannot read."""
    library = load_transformers()
    settings = _settings(library, config)
    kind = _class(library, settings, config)
    if problems := [*_problems(settings, shape, config)]:
        raise ConfigError(problems)
    if shape.pad_token is not None:
        settings.pad_token_id = shape.pad_token
    settings.use_cache = False  # keys and values of tokens before: of use where text is written, and memory here
    try:
        # The mark tells the library to draw nothing for a parameter; without values that would still take a while.
        with parameters_on_meta(_is_hf_initialized=True) if is_unfilled else contextlib.nullcontext():
            model: nn.Module = kind(settings)
    except (ImportError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        what = f"model.path = {config.path!r}: {kind.__name__} cannot be built: {error}"
        rule = "transformers builds it from config.json"
        raise UsageError(f"{what}\n  {rule}\n  check that file, or set model.task") from error
    model.train()
    if shape.pad_token is not None:
        model = with_padding(model, shape.pad_token)
    if is_unfilled:
        _draw(model, config.fresh)
        mark_unfilled(parameter for parameter in model.parameters() if parameter.is_meta)
    lora = resolve_lora(config.lora)
    if lora.rank:
        add_lora(model, **lora.model_dump(exclude={"path"}), trained=config.fresh)
    return model


def text_settings(config: HFModelConfig) -> Any:
    """Returns the library's config of a folder's transformer."""
    return text_part(_settings(load_transformers(), config))


def text_part(settings: Any) -> Any:
    """Returns what a config says of the transformer of texts; models of text and images keep it in a part."""
    return settings.get_text_config() if hasattr(settings, "get_text_config") else settings


def _settings(library: Any, config: HFModelConfig) -> Any:
    try:
        return library.AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"model.path = {config.path!r}: transformers makes no config of it: {str(error).splitlines()[0]}"
        rule = "it must know the model_type in config.json; code of the folder is never run"
        fix = "use a newer transformers, or a factory: model: {kind: factory, ...}"
        raise UsageError(f"{what}\n  {rule}\n  {fix}") from error


def _class(library: Any, settings: Any, config: HFModelConfig) -> Any:
    """Returns the class of the model: that of the task, or the one that the config names."""
    if config.task is not None:
        automatic = getattr(library, _TASKS[config.task])
        try:
            return automatic._model_mapping[type(settings)]
        except KeyError:
            rule = "transformers has no such model of this family"
            fix = "choose another task, or leave it out"
            raise UsageError(f"model.task = {config.task} for a {settings.model_type}\n  {rule}\n  {fix}") from None
    names = getattr(settings, "architectures", None) or []
    found = getattr(library, str(names[0]), None) if names else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        what = f"model.path = {config.path!r}: architectures = {names} in config.json is no class of transformers"
        raise UsageError(f"{what}\n  it names the class of the model\n  set model.task to one of {', '.join(_TASKS)}")
    return found


def _problems(settings: Any, shape: DataShape, config: HFModelConfig) -> Iterator[Problem]:
    """Yields what the model has no room for. The number of classes follows the data where the head is new."""
    if shape.kind == "classes" and shape.classes is not None:
        if not config.pretrained or config.fresh:
            settings.num_labels = shape.classes
            if shape.class_names is not None:
                settings.id2label = dict(enumerate(shape.class_names))
                settings.label2id = {name: number for number, name in enumerate(shape.class_names)}
        elif settings.num_labels < shape.classes:
            what = f"the model has {settings.num_labels} classes, and the data {shape.classes}"
            fix = "name the head in model.fresh, such as [classifier], and it begins anew with the data's classes"
            yield Problem(what=what, rule="its head is that of the folder", fix=fix)
    own = getattr(settings, "pad_token_id", None)
    if shape.pad_token is not None and own is not None and own != shape.pad_token and config.pretrained:
        what = f"pad_token_id = {own} in config.json, and the tokenizer pads with {shape.pad_token}"
        rule = "the model leaves out of its attention what the data pads with"
        yield Problem(what=what, rule=rule, fix='name the token in tokenizer_config.json: {"pad_token": ...}')
    rooms = {
        "vocab_size": (shape.vocab_size, "tokens of the vocabulary", "take the model's own tokenizer for the data")
    }
    rooms["max_position_embeddings"] = shape.context, "tokens of a sample", "set data.context to what the model has"
    for name, (needed, unit, fix) in rooms.items():
        has = getattr(text_part(settings), name, None)
        if shape.vocab_size is not None and isinstance(has, int) and needed is not None and needed > has >= 0:
            what = f"{name} = {has} in config.json, but the data has {needed} {unit}"
            rule = "the model needs room for all that the data has"
            yield Problem(what=what, rule=rule, fix=fix)


@torch.no_grad()
def _draw(model: Any, patterns: list[str]) -> None:
    """Gives fresh parameters the values that the library draws for their modules."""
    for prefix, module in model.named_modules():
        names = [name for name, value in module._parameters.items() if value is not None]
        if not any(fits(f"{prefix}.{name}", pattern) for name in names for pattern in patterns):
            continue
        for name in names:
            old = module._parameters[name]
            module._parameters[name] = nn.Parameter(torch.zeros(old.shape, dtype=old.dtype))
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
        model._init_weights(module)


def file_names(model: nn.Module, names: Iterable[str]) -> tuple[dict[str, str], dict[str, list[list[str]]]]:
    """Returns what files call each tensor of a model, by the conversions that the library knows of its classes.

    Experts that are stacked in the model may be many tensors in files. They are apart: a row for each of the matrices
    that stand one below the other (gate and up), with the names of all experts.
    """
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    plain = [each for each in mapping if not getattr(each, "operations", None)]
    stacks = [each for each in mapping if _stacks_experts(getattr(each, "operations", None) or [])]
    single: dict[str, str] = {}
    stacked: dict[str, dict[str, list[str]]] = {}
    for name in names:
        ours = functools.reduce(lambda key, each: each.rename_source_key(key)[0], plain, name)
        into = ((each, *each.rename_source_key(ours)) for each in stacks)
        converter, target, pattern = next((each for each in into if each[2] is not None), (None, ours, None))
        if converter is None or pattern is None:
            single[ours] = name
        else:
            stacked.setdefault(target, {each: [] for each in converter.source_patterns})[pattern].append(name)
    return single, {name: list(rows.values()) for name, rows in stacked.items()}


def _stacks_experts(operations: list[Any]) -> bool:
    kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in operations]
    return kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


# What folders have for tokens, images and generation, apart from the weights.
_BESIDE = [f"{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab")]
_BESIDE += ["vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"]
_BESIDE += ["generation_config.json", PREPROCESSOR]


def folder_files(model: nn.Module) -> dict[str, bytes]:
    """Returns what a folder has of a model but the weights, from the one that it came from; nothing for others."""
    settings: Any = getattr(model, "config", None)
    if not callable(getattr(settings, "to_json_string", None)) or not hasattr(model, "save_pretrained"):
        return {}
    settings = copy.deepcopy(settings)
    settings.architectures = [type(model).__name__]
    if hasattr(settings, "use_cache"):
        settings.use_cache = True  # off while it trains
    folder = getattr(settings, "_name_or_path", None)
    beside = [Path(folder) / name for name in _BESIDE] if folder else []
    found = {path.name: path.read_bytes() for path in beside if path.is_file()}
    return {"config.json": settings.to_json_string().encode(), **found}


_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # keys of Hugging Face's configs


class _WithPadding(nn.Module):
    """Mixed into the class of a model of texts: called with tokens alone, it leaves padding out of its attention."""

    _padding: int
    config: Any

    def forward(self, tokens: Tensor | None = None, **options: Any) -> Any:
        if tokens is not None and tokens.ndim > 2:  # of pairs: tokens, and the text that each is of
            if getattr(self.config, "type_vocab_size", 1) > 1:
                options["token_type_ids"] = tokens[:, 1]
            tokens = tokens[:, 0]
        if tokens is not None and "attention_mask" not in options:
            is_first = torch.arange(tokens.shape[1], device=tokens.device) == 0  # of a row that is left out: no nan
            options |= {"input_ids": tokens, "attention_mask": ((tokens != self._padding) | is_first).long()}
        return super().forward(**options)


def with_padding(model: nn.Module, token: int) -> nn.Module:
    """Changes a model in place: ``model(tokens)`` takes tokens in which ``token`` stands behind shorter texts."""
    name = type(model).__name__
    model.__class__ = type(name, (_WithPadding, type(model)), {"__module__": type(model).__module__})
    vars(model)["_padding"] = token
    return model


class _WithHeadLoss(nn.Module):
    """Mixed into the class of a model: names, parameters and all other methods stay as they are."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None, *, counts: bool = False) -> Any:
        """Returns the logits; with ``targets`` their summed cross entropy, with ``counts`` right answers too."""
        hidden, head = _hidden(self, tokens), output_layer(self)
        return head(hidden) if targets is None else head_loss(hidden, head.weight, targets, counts=counts)

    def loss_vocabulary(self) -> int:
        return int(output_layer(self).weight.shape[0])


def is_causal(model: nn.Module) -> bool:
    base, config = getattr(model, "base_model", None), getattr(model, "config", None)
    has_parts = isinstance(base, nn.Module) and base is not model and hasattr(config, "vocab_size")
    return has_parts and isinstance(output_layer(model), nn.Linear)


def with_head_loss(model: nn.Module) -> nn.Module:
    """Changes a causal language model in place: ``model(tokens, targets=targets)`` is its summed loss.

    ``model(tokens)`` returns the logits. Targets are shifted already. Raises UsageError for a model that lacks the
    parts, or whose logits are more than its output layer's products.
    """
    name = type(model).__name__
    if not is_causal(model):
        rule = "it needs base_model, get_output_embeddings() that returns a linear layer, and config.vocab_size"
        fix = "give it loss_vocabulary() and a forward that takes targets: see docs/fused-loss.md"
        raise UsageError(f"{name} has no output layer that can be found\n  {rule}\n  {fix}")
    head: nn.Linear = output_layer(model)
    bias: Tensor | None = head.bias
    if bias is not None or not _is_product(model, head):
        what = f"the logits of {name} are not the products of its hidden states with its output layer alone"
        rule = "the fused loss computes these, and would leave out a bias, a scale or a cap"
        fix = "set train.fused_loss = false, or give the model a forward of its own that takes targets"
        raise UsageError(f"{what}\n  {rule}\n  {fix}")
    model.__class__ = type(name, (_WithHeadLoss, type(model)), {"__module__": type(model).__module__})
    return model


def _hidden(model: Any, tokens: Tensor) -> Tensor:
    return cast("Tensor", model.base_model(tokens, use_cache=False, return_dict=True).last_hidden_state)


@torch.no_grad()
def _is_product(model: nn.Module, head: nn.Linear) -> bool:
    """Compares logits with products, on two tokens. Of what has no values, the config says it."""
    if head.weight.is_meta:
        return not any(getattr(model.config, name, None) for name in _CHANGES_LOGITS)
    was_training = model.training
    model.eval()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=head.weight.device)
    try:
        logits, products = model(tokens).logits.float(), head(_hidden(model, tokens)).float()
    except (AttributeError, TypeError):  # its parts are called in another way
        return False
    finally:
        model.train(was_training)
    return torch.allclose(logits, products, rtol=1e-4, atol=1e-5)


_MARK = "_paceline_unfilled"
FILL = "_paceline_fill"  # an attribute of a model: what reads its values into the engine that takes it over


@contextlib.contextmanager
def parameters_on_meta(**marks: Any) -> Iterator[None]:
    """Lets modules that are built inside keep their parameters on the meta device, with ``marks`` as attributes."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(param).update(marks)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def mark_unfilled(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def is_unfilled(parameter: torch.Tensor) -> bool:
    return getattr(parameter, _MARK, False)


def allocate_unfilled(models: Iterable[nn.Module], device: torch.device) -> None:
    """Gives unfilled parameters memory on a device, and keeps what is tied tied, also between the models."""
    made: dict[int, tuple[Any, nn.Parameter]] = {}  # with the old one: the id of what is gone is used again
    for module in (inner for model in models for inner in model.modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or not (parameter.is_meta and is_unfilled(parameter)):
                continue
            if id(parameter) not in made:
                values = torch.empty_like(parameter, device=device)
                new = nn.Parameter(values, requires_grad=parameter.requires_grad)
                vars(new).update(vars(parameter))  # marks
                made[id(parameter)] = parameter, new
            module._parameters[name] = made[id(parameter)][1]
