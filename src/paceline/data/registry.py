"""From the ``data`` section of a config to data sets: ours by kind, or the user's through a factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from paceline.config import sections
from paceline.data import datasets
from paceline.data.datasets import DataShape, MapDataset, SampleSubset, TensorPairs
from paceline.data.text import load_text, split_blocks
from paceline.errors import DataError

SyntheticConfig: TypeAlias = (
    sections.SyntheticClassificationDataConfig | sections.SyntheticImagesDataConfig | sections.SyntheticTokensDataConfig
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplits:
    """What to train on, what to evaluate on (``None``: nothing), and the sizes that a model must know."""

    train: MapDataset
    eval: MapDataset | None
    shape: DataShape


def build_data(config: sections.DataConfig, context: int | None, seed: int) -> DataSplits:
    """Makes the data sets that a config asks for: a pure function of its arguments (and of files and user code).

    ``context`` is the model's, for text whose own is not set. ``seed`` is the run's, for data that sets none.
    """
    seed = seed if config.seed is None else config.seed
    if config.kind == "digits":
        return _digits(config, seed)
    if config.kind == "text":
        return _text(config, context)
    if config.kind != "factory":
        return _synthetic(config, seed)
    return _factory(config, seed)


def _digits(config: sections.DigitsDataConfig, seed: int) -> DataSplits:
    raw, raw_eval = datasets.split_pairs(datasets.load_digits(), config.eval_fraction, seed)
    train, evaluation = raw, raw_eval
    if config.standardize:
        train = datasets.standardized(raw, raw)
        evaluation = None if raw_eval is None else datasets.standardized(raw_eval, raw)
    return DataSplits(train=train, eval=evaluation, shape=DataShape(kind="classes", features=64, classes=10))


def _text(config: sections.TextDataConfig, context: int | None) -> DataSplits:
    length = context if config.context is None else config.context
    if length is None:
        raise DataError(
            "data.context is not set, and neither is the model's\n"
            "  a text is cut into samples of that many tokens\n  set data.context, such as 128"
        )
    text = load_text(config.path, config.tokens)
    train, evaluation = split_blocks(text, length, config.eval_fraction)
    shape = DataShape(kind="tokens", vocab_size=text.vocab_size, context=length)
    return DataSplits(train=train, eval=evaluation, shape=shape)


def _synthetic(config: SyntheticConfig, seed: int) -> DataSplits:
    makers: dict[str, Callable[..., TensorPairs]] = {
        "synthetic_classification": datasets.synthetic_classification,
        "synthetic_images": datasets.synthetic_images,
        "synthetic_tokens": datasets.synthetic_tokens,
    }
    sizes = config.model_dump(include={"samples", "features", "classes", "channels", "size", "vocab_size", "context"})
    made = makers[config.kind](**sizes, seed=seed)
    train, evaluation = datasets.split_pairs(made, config.eval_fraction, seed)
    kind: Literal["tokens", "classes"] = "tokens" if config.kind == "synthetic_tokens" else "classes"
    shape = DataShape(kind=kind, size=sizes.get("size"), **asdict(sections.known_shape(config)))
    return DataSplits(train=train, eval=evaluation, shape=shape)


def _factory(config: sections.FactoryDataConfig, seed: int) -> DataSplits:
    from paceline.imports import import_from_path

    what = f"data.factory = {config.factory!r}"
    made = _call(import_from_path(config.factory, "data.factory"), config.args, what)
    if isinstance(made, DataSplits):
        return made
    if isinstance(made, tuple) and len(made) != 2:
        raise DataError(f"{what} returned a tuple of {len(made)}\n{_WHAT_A_FACTORY_RETURNS}")
    train, evaluation = made if isinstance(made, tuple) else (made, None)
    length = _check_made(train, f"the training set of {what}")
    if length == 0:
        raise DataError(f"{what} returned an empty training set\n  a run needs at least one sample")
    if evaluation is not None:
        _check_made(evaluation, f"the evaluation set of {what}")
    shape = _shape_of(train, what)
    if not isinstance(made, tuple):
        chosen, kept = datasets.split_indices(length, config.eval_fraction, seed)
        if len(kept):
            train, evaluation = SampleSubset(train, chosen), SampleSubset(train, kept)
    return DataSplits(train=train, eval=evaluation, shape=shape)


def _call(factory: Callable[..., Any], args: dict[str, Any], what: str) -> Any:
    """Calls the user's factory. Only arguments that do not fit are our business; its own errors pass as they are."""
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise DataError(
            f"{what} cannot be called with data.args = {args}: {error}\n"
            "  data.args are its keyword arguments\n  give those that it needs, and no others"
        ) from error
    except ValueError:  # a factory written in C may have no signature; the call itself will tell
        pass
    return factory(**args)


def _check_made(dataset: Any, name: str) -> int:
    """Returns the length of a data set from a factory; refuses what only looks like one."""
    if isinstance(dataset, torch.Tensor | np.ndarray):
        raise DataError(
            f"{name} is a {type(dataset).__name__}\n{_WHAT_A_FACTORY_RETURNS}\n"
            "  wrap tensors: torch.utils.data.TensorDataset(inputs, targets)"
        )
    if dataset is None or isinstance(dataset, str | bytes | Mapping):
        raise DataError(f"{name} is a {type(dataset).__name__}\n{_WHAT_A_FACTORY_RETURNS}")
    return datasets.check_map_style(dataset, name)


def _shape_of(dataset: Any, what: str) -> DataShape:
    """Returns the data set's ``shape`` where it is one of ours or a mapping; tables and arrays mean something else."""
    shape = getattr(dataset, "shape", None)
    if isinstance(shape, DataShape):
        return shape
    if not isinstance(shape, Mapping):
        return DataShape(kind="custom")
    try:
        return DataShape(**{"kind": "custom", **shape})
    except TypeError as error:
        raise DataError(
            f"{what} returned a data set with shape = {dict(shape)}: {error}\n"
            f"  the fields are {', '.join(DataShape.__dataclass_fields__)}"
        ) from error


_WHAT_A_FACTORY_RETURNS = "  a data factory returns a map-style data set, a tuple (train, eval), or DataSplits"
