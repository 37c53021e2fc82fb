"""From a config to a model: what was asked, completed with what the data says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from paceline.config import sections
from paceline.config.checks import dimension_problems
from paceline.errors import ConfigError, Problem, UsageError
from paceline.imports import import_from_path
from paceline.models.gpt import GPT, gpt_config
from paceline.models.hugging_face import build_hugging_face
from paceline.models.mlp import MLPClassifier
from paceline.models.resnet import ResNet

if TYPE_CHECKING:
    from paceline.data.datasets import DataShape


_MLP_NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "DenseReluDense")


def build_model(config: sections.ModelConfig, shape: DataShape, *, is_unfilled: bool = False) -> nn.Module:
    """Builds the model that ``config`` asks for, on the default device and dtype; what is None follows from ``shape``.

    The random numbers are torch's, so seed before. Does not compile the model. ``is_unfilled`` is for pretrained
    models. Raises ConfigError with all problems when config and data do not fit together or leave a field open,
    UsageError for a factory that cannot be imported, raises, or returns something else.
    """
    if shape.end_token is not None and config.kind != "gpt":
        what = f"model.kind = {config.kind} cannot keep documents apart at token {shape.end_token}"
        raise ConfigError([Problem(what=what, rule="a gpt can", fix="set data.documents = joined")], source="model")
    if config.kind == "mlp" or config.kind == "resnet":
        return _build_classifier(config, shape)
    if config.kind == "gpt":
        return _build_gpt(config, shape)
    if config.kind == "hf":
        return build_hugging_face(config, shape, is_unfilled=is_unfilled)
    return _build_from_factory(config)


def model_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks of a model in order: what is compiled, checkpointed or sharded as one.

    A model says so with a method ``blocks()``. For others it is the ModuleList or Sequential with the most parameters
    whose children, two or more, are all of one type and have parameters; of one without forward, its parts.
    """
    blocks: object = getattr(model, "blocks", None)
    # Some models keep their blocks in an attribute of this name, and a Sequential is callable too.
    if callable(blocks) and not isinstance(blocks, nn.Module):
        found = list(blocks())
        if not all(isinstance(block, nn.Module) for block in found):
            what = f"{type(model).__name__}.blocks() returned {[type(block).__name__ for block in found]}"
            rule = "every block must be an nn.Module"
            raise UsageError(f"{what}\n  {rule}\n  return the repeated submodules in order, or rename the method")
    else:
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential) and len(each) > 1]
        rows = [row for row in map(list, lists) if len(set(map(type, row))) == 1 and all(map(num_parameters, row))]
        found = max(rows, key=lambda row: sum(map(num_parameters, row)), default=[])
    return [part for block in found for _, part in called_parts("", block)]


def model_mlps(model: nn.Module) -> list[nn.Module]:
    """Returns the MLPs of a model, as its method ``mlps()`` says; else those that its blocks call by such a name."""
    found = _ask(model, "mlps") or [mlp for block in model_blocks(model) for mlp in _mlps_in(block)]
    return list(dict.fromkeys(found))


def _mlps_in(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if name in _MLP_NAMES and can_be_called(child):
            yield child
        else:
            yield from _mlps_in(child)


def can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def called_parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns a module of this name, or the outermost modules inside of it that can be called and have parameters."""
    if can_be_called(module):
        return [(name, module)] if num_parameters(module) else []
    return [part for child, inner in module.named_children() for part in called_parts(f"{name}.{child}", inner)]


def model_ends(model: nn.Module) -> list[nn.Module]:
    """Returns the layers before and after the blocks that may be sharded by themselves, as ``ends()`` says.

    The model promises to call them: a weight that is read past its module's call cannot be gathered for that call.
    """
    return _ask(model, "ends")


def block_parts(block: nn.Module) -> list[nn.Module]:
    """Returns the modules that a block calls one after another, and may be sharded one by one, as ``parts()`` says.

    Beside them it has small weights only, such as those of norms.
    """
    return _ask(block, "parts")


def model_apart(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose weights are read apart from their calls (by a tied head), as ``apart()`` says."""
    return _ask(model, "apart")


def loss_vocabulary(model: nn.Module) -> int | None:
    """Returns how many logits a model would make of a token if it were not asked for the loss; None: it has none.

    With this method a model promises that ``model(inputs, targets=targets)`` returns the summed cross entropy, in which
    targets of -100 count nothing, and with ``counts=True`` a pair of it and the number of right answers.
    """
    method: object = getattr(model, "loss_vocabulary", None)
    return int(method()) if callable(method) else None


def _ask(model: nn.Module, name: str) -> list[nn.Module]:
    """Returns what a model's method says; nothing without one. Some models have a module of this name."""
    method: object = getattr(model, name, None)
    return list(method()) if callable(method) and not isinstance(method, nn.Module) else []


def check_initialised(model: nn.Module) -> None:
    """Raises UsageError for a model with lazy modules that have not seen a batch."""
    lazy = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if is_lazy(each)]
    if lazy:
        what = f"{', '.join(lazy[:3])}{' and others' if len(lazy) > 3 else ''} of the model have no shape yet"
        rule = "a lazy module learns its shapes from its first batch, and ranks share out parameters before that"
        fix = "run the model once when it is built: with torch.no_grad(): model(example)"
        raise UsageError(f"{what}\n  {rule}\n  {fix}")


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _build_classifier(config: sections.MLPModelConfig | sections.ResNetModelConfig, shape: DataShape) -> nn.Module:
    """Builds what was asked, completed with what the data offers; raises ConfigError where neither says a dimension."""
    if shape.features is None and shape.channels is not None and shape.size is not None:
        shape = replace(shape, features=shape.channels * shape.size * shape.size)
    problems = list(_kind_problems(config.kind, shape, needs="classes"))
    if config.kind == "resnet" and shape.kind == "classes" and shape.channels is None:
        what = f"model.kind = resnet, but a sample of the data is a flat row of {shape.features} features"
        rule = "a residual network reads images: channels x height x width"
        problems += [Problem(what=what, rule=rule, fix="set model.kind = mlp, or choose data with images")]
    problems += dimension_problems(config, shape)
    offered = {"input_dim": shape.features, "num_classes": shape.classes, "in_channels": shape.channels}
    sizes: dict[str, Any] = {
        field: getattr(config, field) or known for field, known in offered.items() if hasattr(config, field)
    }
    for field in (field for field, size in sizes.items() if size is None):
        what = f"model.{field} is not set, and the data does not tell it"
        rule = "what the config leaves open follows from the shape of the data"
        problems.append(Problem(what=what, rule=rule, fix=f"set model.{field}, or give the data set a shape"))
    _raise_any(problems)
    if config.kind == "mlp":
        return MLPClassifier(**sizes, hidden_dim=config.hidden_dim, dropout=config.dropout)
    return ResNet(config.depth, **sizes, width=config.width, norm=config.norm, stem=config.stem)


def _build_gpt(config: sections.GPTModelConfig, shape: DataShape) -> GPT:
    """Builds a GPT; the data's vocabulary goes before that of the size, whose other fields go before the data's."""
    _raise_any(_kind_problems(config.kind, shape, needs="tokens"))
    overrides = {name: getattr(config, name) for name in sections.GPT_DIMENSIONS}
    if config.vocab_size is None:
        overrides["vocab_size"] = shape.vocab_size
    if config.context is None and config.size is None:
        overrides["context"] = shape.context
    settings = gpt_config(config.size, **overrides)
    problems = [*dimension_problems(config, shape)]
    if shape.context is not None and shape.context > settings.context:
        what = f"model.context = {settings.context}, but a sample of the data has {shape.context} tokens"
        fix = f"set model.context = {shape.context}, or data.context = {settings.context}"
        problems += [Problem(what=what, rule="a model reads at most its context", fix=fix)]
    _raise_any(problems)
    return GPT(settings, end_token=shape.end_token)


def _build_from_factory(config: sections.FactoryModelConfig) -> nn.Module:
    factory = import_from_path(config.factory, "model.factory")
    try:
        model = factory(**config.args)
    except Exception as error:
        what = f"model.factory = {config.factory!r} raised {type(error).__name__}: {error}"
        raise UsageError(f"{what}\n  it was called with model.args = {config.args}") from error
    if not isinstance(model, nn.Module):
        rule = "it must return a torch.nn.Module"
        fix = "return the model from the function (a bare class of nn.Module works as a factory too)"
        raise UsageError(f"model.factory = {config.factory!r} returned {type(model).__name__}\n  {rule}\n  {fix}")
    check_initialised(model)
    return model


def _kind_problems(model: str, shape: DataShape, *, needs: str) -> Iterator[Problem]:
    if shape.kind not in (needs, "custom"):
        what = f"model.kind = {model} needs data of {needs}, but the data has {shape.kind}"
        fix = f"set model.kind = {'gpt' if shape.kind == 'tokens' else 'mlp or resnet'}, or choose other data"
        yield Problem(what=what, rule="mlp and resnet sort samples into classes; gpt predicts the next token", fix=fix)


def _raise_any(problems: Iterable[Problem]) -> None:
    if found := list(problems):
        raise ConfigError(found)
