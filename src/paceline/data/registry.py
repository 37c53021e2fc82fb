"""From the ``data`` section of a config to data sets: ours by kind, or the user's through a factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from paceline.config import sections
from paceline.data import datasets, synthetic
from paceline.data.datasets import DataShape, InMemoryDataset, MapDataset, Pair, SampleSubset, TensorPairs
from paceline.errors import DataError

# A text as tokens, in blocks for a language model.
#
# A block of context T holds T inputs and, one token later, T targets; the next block starts T tokens on. So every token
# of a text is an input at most once and a target at most once. Tokens are kept in the smallest integer type that holds
# the vocabulary, and become int64 in the batch: a gigabyte of bytes costs a gigabyte.


_NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """The tokens of a text (1-D), and the characters that they stand for in order; ``None`` for bytes."""

    tokens: torch.Tensor
    vocab_size: int
    characters: str | None
    source: str


class TokenBlocks(InMemoryDataset):
    """Blocks of ``context`` tokens and their successors: inputs ``tokens[i*T:(i+1)*T]``, targets one token later."""

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.context

    def take(self, index: torch.Tensor, *, pinned: bool = False) -> Pair:  # noqa: ARG002  # tokens are few bytes
        # A view: neighbouring blocks share the token that is the last target of one and the first input of the other.
        blocks = self.tokens.unfold(0, self.context + 1, self.context)[index]
        return _as_int64(blocks[:, :-1]), _as_int64(blocks[:, 1:])


def load_text(path: str | None, unit: Literal["char", "byte"]) -> EncodedText:
    """Reads a UTF-8 file, or the documentation inside Python where ``path`` is ``None``, and encodes it.

    The characters of the whole text, sorted, are the vocabulary; bytes always have 256 tokens.
    """
    source = "the documentation inside Python" if path is None else f"data.path = {path!r}"
    content = _python_documentation().encode() if path is None else _read_file(path)
    if unit == "byte":
        tokens = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
        return EncodedText(tokens=tokens, vocab_size=_NUM_BYTES, characters=None, source=source)
    # Fixed-width code points let numpy sort and number the characters of a long text in one go.
    points = np.frombuffer(_decode(content, source).encode("utf-32-le"), dtype=np.uint32)
    vocabulary, numbers = np.unique(points, return_inverse=True)
    return EncodedText(
        tokens=torch.from_numpy(numbers.reshape(-1).astype(_smallest_dtype(len(vocabulary)))),
        vocab_size=len(vocabulary),
        characters="".join(map(chr, vocabulary.tolist())),
        source=source,
    )


def split_blocks(text: EncodedText, context: int, eval_fraction: float) -> tuple[TokenBlocks, TokenBlocks | None]:
    """Cuts the text once, to train on and to evaluate on; raises ``DataError`` where a part has not one whole block."""
    if context < 1:
        raise DataError(f"data.context = {context}\n  a sample has at least one token")
    cut = round(len(text.tokens) * (1 - eval_fraction))
    train = _blocks(text, "training", text.tokens[:cut], context, eval_fraction)
    if eval_fraction == 0:
        return train, None
    return train, _blocks(text, "evaluation", text.tokens[cut:], context, eval_fraction)


def _blocks(text: EncodedText, part: str, tokens: torch.Tensor, context: int, eval_fraction: float) -> TokenBlocks:
    if len(tokens) <= context:
        raise DataError(
            f"the {part} part of {text.source} has {len(tokens)} tokens, of {len(text.tokens)} in all with "
            f"data.eval_fraction = {eval_fraction}, for a context of {context}\n"
            f"  one sample needs {context + 1} tokens: the context, and one more as the last target\n"
            f"  bring a longer text, a shorter context, or another data.eval_fraction (0: no evaluation)"
        )
    return TokenBlocks(tokens, context)


def _python_documentation() -> str:
    """Returns the help topics that CPython carries, in the order of their names; they differ between versions."""
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise DataError(
            "this Python was installed without pydoc_data.topics, its own documentation\n"
            "  it is the text that is used where data.path is not set\n  set data.path to a UTF-8 text file"
        ) from error
    return "\n".join(text for _, text in sorted(topics.topics.items()))


def _read_file(path: str) -> bytes:
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise DataError(
            f"data.path = {path!r} cannot be read: {error.strerror}\n"
            f"  it is looked for from the current directory, {Path.cwd()}\n"
            "  check the path and its permissions, or leave it out to use the documentation inside Python"
        ) from error
    if not content:
        raise DataError(f"data.path = {path!r} is an empty file\n  a text needs at least two tokens")
    return content


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8: {error.reason} at byte {error.start}\n"
            '  characters are read as UTF-8\n  convert the file, or set data.tokens = "byte"'
        ) from error


def _smallest_dtype(vocab_size: int) -> type[np.uint8] | type[np.int16] | type[np.int32]:
    if vocab_size <= np.iinfo(np.uint8).max + 1:
        return np.uint8
    return np.int16 if vocab_size <= np.iinfo(np.int16).max + 1 else np.int32


def _as_int64(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.to(torch.int64, memory_format=torch.contiguous_format)


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
    makers: dict[str, Callable[..., InMemoryDataset]] = {
        "synthetic_classification": datasets.synthetic_classification,
        "synthetic_images": synthetic.make_images,
        "synthetic_tokens": synthetic.make_tokens,
    }
    names = {"samples", "features", "classes", "channels", "size", "vocab_size", "context", "dtype"}
    sizes = config.model_dump(include=names)
    made = makers[config.kind](**sizes, seed=seed)
    kind: Literal["tokens", "classes"] = "tokens" if config.kind == "synthetic_tokens" else "classes"
    shape = DataShape(kind=kind, size=sizes.get("size"), **asdict(sections.known_shape(config)))
    if sizes.get("dtype") == "uint8":
        shape = replace(shape, mean=(synthetic.PIXEL_MEAN,), std=(synthetic.PIXEL_DEVIATION,))
    if not isinstance(made, TensorPairs):
        return _subsets(made, config.eval_fraction, seed, shape)
    train, evaluation = datasets.split_pairs(made, config.eval_fraction, seed)
    return DataSplits(train=train, eval=evaluation, shape=shape)


def _subsets(dataset: MapDataset, eval_fraction: float, seed: int, shape: DataShape) -> DataSplits:
    """Cuts a data set in two by the numbers of its samples."""
    chosen, kept = datasets.split_indices(len(dataset), eval_fraction, seed)
    if not len(kept):
        return DataSplits(train=dataset, eval=None, shape=shape)
    return DataSplits(train=SampleSubset(dataset, chosen), eval=SampleSubset(dataset, kept), shape=shape)


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
        return _subsets(train, config.eval_fraction, seed, shape)
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
