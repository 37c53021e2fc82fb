"""From the ``data`` section of a config to data sets: ours by kind, or the user's through a factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from paceline.config import Config
from paceline.config import data_sections as sections
from paceline.config.sections import GPTModelConfig, gpt_shape
from paceline.data import datasets, synthetic
from paceline.data.checked import NO_NEEDS, CheckedSamples, ModelNeeds, check_classes, needs_of
from paceline.data.datasets import DataShape, MapDataset, SampleSubset, TensorPairs
from paceline.data.labelled_texts import LabelledTexts, is_text, labels_of, other_fields, pad_token
from paceline.data.mixture import Joined, Mixture, common_shape, common_tokenizer
from paceline.data.order import Indices
from paceline.data.packing import Documents, PackedRows, RowDocuments, token_documents
from paceline.data.rows import ArrowRows, Augment, CsvRows, ImageFolder, JsonLines, RowDataset, Rows, class_names
from paceline.data.streams import StreamSamples, StreamSource, call_factory
from paceline.data.token_files import open_tokens
from paceline.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from paceline.data.windows import RandomWindows, TokenArray, TokenBlocks, Tokens, check_part, load_text, split_tokens
from paceline.errors import DataError, did_you_mean

SyntheticConfig: TypeAlias = (
    sections.SyntheticClassificationDataConfig | sections.SyntheticImagesDataConfig | sections.SyntheticTokensDataConfig
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplits:
    """What to train and evaluate on (None: nothing), sizes for a model, what tokens mean, inputs as ``pictures``."""

    train: MapDataset
    eval: MapDataset | None
    shape: DataShape
    tokenizer: Tokenizer | None = None
    pictures: Callable[[torch.Tensor], torch.Tensor] | None = None


def data_of(config: Config) -> DataSplits:
    model = config.model
    shape = gpt_shape(model) if isinstance(model, GPTModelConfig) else None
    context = getattr(model, "context", None) if shape is None else shape.context or None
    return build_data(config.data, context, config.train.seed, needs_of(config))


def build_data(config: sections.DataConfig, context: int | None, seed: int, needs: ModelNeeds = NO_NEEDS) -> DataSplits:
    """Makes a config's data sets, a pure function. ``context`` is the model's, ``seed`` the run's."""
    seed = seed if config.seed is None else config.seed
    if config.kind == "digits":
        train, evaluation = datasets.split_pairs(datasets.load_digits(), config.eval_fraction, seed)
        raw = train
        if config.standardize:
            evaluation = None if evaluation is None else datasets.standardized(evaluation, raw)
            train = datasets.standardized(raw, raw)
        pictures = partial(datasets.digit_pictures, reference=raw if config.standardize else None)
        return DataSplits(train=train, eval=evaluation, shape=sections.known_shape(config), pictures=pictures)
    if config.kind == "text":
        return _text(config, context, seed, needs)
    if config.kind == "tokens":
        return _tokens(config, context, seed)
    if isinstance(config, sections.ImagesDataConfig):
        return _images(config, seed, needs)
    if isinstance(config, sections.RowsDataConfig):
        return _rows(config, context, seed, needs)
    if config.kind == "mixture":
        return _mixture(config, context, seed, needs)
    if config.kind == "stream":
        return _stream(config, needs)
    if config.kind != "factory":
        return _synthetic(config, seed)
    return _factory(config, seed, needs)


def _mixture(config: sections.MixtureDataConfig, context: int | None, seed: int, needs: ModelNeeds) -> DataSplits:
    # By name, so that a mixture does not depend on the order in which a file lists its sources.
    made = {name: build_data(config.sources[name], context, seed, needs) for name in sorted(config.sources)}
    weights = {name: config.weights.get(name, 1.0) for name in made}
    train = Mixture({name: each.train for name, each in made.items()}, weights, seed, config.samples, config.shuffle)
    kept = {name: each.eval for name, each in made.items() if each.eval is not None}
    shape = common_shape({name: each.shape for name, each in made.items()})
    tokenizer = common_tokenizer({name: each.tokenizer for name, each in made.items()})
    return DataSplits(train=train, eval=Joined(kept) if kept else None, shape=shape, tokenizer=tokenizer)


def _stream(config: sections.StreamDataConfig, needs: ModelNeeds) -> DataSplits:
    source = StreamSource(factory=config.factory, args=config.args, kept=config.eval_samples, on_end=config.on_end)
    shape = _shape_of(source.open(), source.name)
    rules = None if needs.has_own_loss else needs.rules(shape)
    kept = StreamSamples(source, config.eval_samples, is_kept=True, rules=rules) if config.eval_samples else None
    return DataSplits(train=StreamSamples(source, config.samples, rules=rules), eval=kept, shape=shape)


def _text(config: sections.TextDataConfig, context: int | None, seed: int, needs: ModelNeeds) -> DataSplits:
    length = _context(config.context, context)
    text = load_text(config.path, config.tokens or needs.tokenizer() or "char")
    train, evaluation = split_tokens(TokenArray(text.tokens), length, config.eval_fraction, text.source)
    kept = None if evaluation is None else TokenBlocks(evaluation, length)
    shape = DataShape(kind="tokens", vocab_size=text.tokenizer.vocab_size, context=length)
    windows = _windows(config.windows, train, length, seed)
    return DataSplits(train=windows, eval=kept, shape=shape, tokenizer=text.tokenizer)


def _tokens(config: sections.TokensDataConfig, context: int | None, seed: int) -> DataSplits:
    length = _context(config.context, context)
    options: dict[str, Any] = {"dtype": config.dtype, "vocab_size": config.vocab_size, "verify": config.verify}
    opened = open_tokens(config.path, **options)
    known, source = opened.tokens.vocab_size, f"data.path = {config.path!r}"
    end_token = _end_token(config, opened.end_token, known, source)
    shape = DataShape(kind="tokens", vocab_size=known, context=length)
    shape = replace(shape, end_token=end_token if sections.are_apart(config) else None)
    fraction = config.eval_fraction if config.eval_path is None else 0.0
    other = None if config.eval_path is None else open_tokens(config.eval_path, **options).tokens
    if sections.is_packed(config):
        assert end_token is not None
        train, kept = token_documents(opened.tokens, end_token, fraction)
        kept = kept if other is None else token_documents(other, end_token)[0]
        return replace(_packed(config, train, kept, seed, shape, end_token), tokenizer=opened.tokenizer)
    tokens, evaluation = split_tokens(opened.tokens, length, fraction, source)
    if other is not None:
        check_part(len(other), length, f"data.eval_path = {config.eval_path!r}", fraction)
        evaluation = other
    blocks = None if evaluation is None else TokenBlocks(evaluation, length, shape.end_token)
    windows = _windows(config.windows, tokens, length, seed, shape.end_token)
    return DataSplits(train=windows, eval=blocks, shape=shape, tokenizer=opened.tokenizer)


def _end_token(
    config: sections.TokensDataConfig | sections.RowsDataConfig, known: int | None, vocabulary: int | None, source: str
) -> int | None:
    """Returns the token that ends documents, where the config needs one; of rows, to keep them apart."""
    finds = isinstance(config, sections.TokensDataConfig) and sections.is_packed(config)
    if not sections.are_apart(config) and not finds:
        return None
    end_token = known if config.end_token is None else config.end_token
    if end_token is None or (vocabulary is not None and end_token >= vocabulary):
        key = "packing" if config.documents is None else "documents"
        fix = "set data.end_token, such as 50256 for GPT-2's, or prepare the data with paceline data prepare"
        what = f"{source} has end token {end_token}, of {vocabulary} tokens"
        rule = f"data.{key} = {getattr(config, key)} needs a token at the end of each document"
        raise DataError(f"{what}\n  {rule}\n  {fix}")
    return end_token


def _packed(
    config: sections.TokensDataConfig | sections.RowsDataConfig,
    train: Documents,
    kept: Documents | None,
    seed: int,
    shape: DataShape,
    end_token: int | None,
) -> DataSplits:
    assert shape.context is not None
    form: dict[str, Any] = {"context": shape.context, "packing": config.packing, "seed": seed, "end_token": end_token}
    source = f"part of data.path = {config.path!r}"
    evaluation = None if kept is None else PackedRows(kept, source=f"the evaluation {source}", **form)
    return DataSplits(train=PackedRows(train, source=f"the training {source}", **form), eval=evaluation, shape=shape)


def _context(own: int | None, of_model: int | None) -> int:
    if own is None and of_model is None:
        what = "data.context is not set, and neither is the model's"
        raise DataError(f"{what}\n  a text is cut into samples of that many tokens\n  set data.context, such as 128")
    return own or of_model or 0


def _windows(kind: sections.Windows, tokens: Tokens, context: int, seed: int, end: int | None = None) -> TokenBlocks:
    """Makes the samples to train on; those to evaluate on are always blocks, so that each token counts once."""
    return RandomWindows(tokens, context, seed, end) if kind == "random" else TokenBlocks(tokens, context, end)


def _synthetic(config: SyntheticConfig, seed: int) -> DataSplits:
    makers: dict[str, Callable[..., MapDataset]] = {"synthetic_classification": datasets.synthetic_classification}
    makers |= {"synthetic_images": synthetic.make_images, "synthetic_tokens": synthetic.make_tokens}
    names = {"samples", "features", "classes", "channels", "size", "vocab_size", "context", "dtype"}
    sizes = config.model_dump(include=names)
    made = makers[config.kind](**sizes, seed=seed)
    shape = sections.known_shape(config)
    if sizes.get("dtype") == "uint8":
        shape = replace(shape, mean=(synthetic.PIXEL_MEAN,), std=(synthetic.PIXEL_DEVIATION,))
    if not isinstance(made, TensorPairs):
        return _parts(made, made, config, seed, shape)
    train, evaluation = datasets.split_pairs(made, config.eval_fraction, seed)
    return DataSplits(train=train, eval=evaluation, shape=shape)


def _images(config: sections.ImagesDataConfig, seed: int, needs: ModelNeeds) -> DataSplits:
    made = needs.images(config.size)
    size = made.size or sections.IMAGE_SIZE

    def open_folder(path: str, augment: Augment) -> ImageFolder:
        return ImageFolder(Path(path).expanduser(), size, augment=augment, on_bad=config.on_bad, seed=seed)

    train, plain = open_folder(config.path, config.augment), open_folder(config.eval_path or config.path, "none")
    if train.classes != plain.classes:
        rule = "a class has the same folder name in both"
        raise DataError(f"data.path has classes {train.classes}, data.eval_path has {plain.classes}\n  {rule}")
    check_classes(len(np.unique(train.targets)), f"data.path = {config.path!r}")
    names, labels = needs.labels(train.classes, f"the folders of data.path = {config.path!r}")
    for each in (train, plain):
        each.targets = np.array(labels)[each.targets]
    shape = replace(sections.known_shape(config), features=3 * size**2, size=size, mean=made.mean, std=made.std)
    return _parts(train, plain, config, seed, replace(shape, classes=len(names), class_names=names))


def open_rows(config: sections.RowsDataConfig, path: str) -> Rows:
    place = Path(path).expanduser()
    rows: Rows
    if config.kind == "jsonl":
        rows = JsonLines(place)
    elif config.kind == "csv":
        rows = CsvRows(place)
    else:
        rows = ArrowRows(place, config.kind, _fields(config))
    if not len(rows):
        raise DataError(f"data.path = {path!r} has no rows\n  a run needs samples\n  check the path")
    for key in ("inputs", "text_pair", "targets"):
        name = getattr(config, key)
        if name is not None and (others := other_fields(rows, name)):
            what = f"data.{key} = {name!r}, and no row of {path!r} has it"
            fix = did_you_mean(name, others, f"set data.{key}")
            raise DataError(f"{what}\n  the first row has {', '.join(map(repr, others))}\n  {fix}")
    return rows


def _fields(config: sections.RowsDataConfig) -> tuple[str, ...]:
    """Returns what a row is read by: the text, the second one of a pair, the target."""
    return tuple(name for name in (config.inputs, config.text_pair, config.targets) if name is not None)


def _labelled_texts(
    config: sections.RowsDataConfig, rows: Rows, context: int | None, seed: int, needs: ModelNeeds, tokenizer: Tokenizer
) -> DataSplits:
    """Texts with a class each. Names of classes are the model's where it knows them, else sorted."""
    assert config.targets is not None
    where = f"data.targets = {config.targets!r} of data.path = {config.path!r}"
    length = _context(config.context, context)
    numbered = class_names(Path(config.path).expanduser(), config.targets)  # whose rows have numbers
    named = numbered or labels_of(rows, config.targets)
    numbers: dict[Any, int] = {number: number for number in range(config.classes or 0)}
    names: tuple[str, ...] | None = None
    if named:
        check_classes(len(named), where)
        names, labels = needs.labels(named, f"the classes of {where}")
        numbers = dict(zip(range(len(named)) if numbered else named, labels, strict=True))
    if not numbers:
        what = f"{where} are numbers, and data.classes is not set"
        raise DataError(f"{what}\n  a model has an output for each class\n  set data.classes")

    how: dict[str, Any] = {"tokenizer": tokenizer, "context": length, "on_bad": config.on_bad}
    train = LabelledTexts(rows=rows, fields=_fields(config), numbers=numbers, **how)
    plain = train if config.eval_path is None else replace(train, rows=open_rows(config, config.eval_path))
    classes = len(names) if names else config.classes
    known = config.vocab_size or tokenizer.vocab_size
    shape = DataShape(kind="classes", classes=classes, class_names=names, vocab_size=known, context=length)
    shape = replace(shape, pad_token=pad_token(tokenizer))
    return replace(_parts(train, plain, config, seed, shape), tokenizer=tokenizer)


def rows_tokenizer(config: sections.RowsDataConfig, needs: ModelNeeds, rows: Rows) -> Tokenizer | None:
    """Returns what encodes the texts of rows; None for numbers. Raises DataError for texts that nothing encodes."""
    where = f"{config.inputs!r} of data.path = {config.path!r}"
    has_texts = is_text(rows, config.inputs)
    idle = [key for key in ("tokenizer", "text_pair") if getattr(config, key) is not None]
    if not has_texts and config.targets is not None:
        if idle:
            rule = "of rows with targets, texts are encoded, and numbers are not"
            raise DataError(f"data.{idle[0]} is set, and {where} is no text\n  {rule}\n  leave data.{idle[0]} out")
        return None
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer | None = ByteTokenizer(has_end=True)
    else:
        folder = None if config.tokenizer is None else Path(config.tokenizer).expanduser()
        tokenizer = needs.tokenizer() if folder is None else open_tokenizer(folder)
    if has_texts and tokenizer is None:
        rule = "a model reads tokens: those of data.tokenizer, or of the tokenizer.json in model.path"
        what = f"{where} is text, and there is no tokenizer"
        raise DataError(f"{what}\n  {rule}\n  set data.tokenizer = bytes, or a folder")
    if config.targets is not None and tokenizer is not None:
        pad_token(tokenizer)
    return tokenizer


def _packed_rows(
    config: sections.RowsDataConfig, rows: Rows, length: int, seed: int, needs: ModelNeeds, tokenizer: Tokenizer | None
) -> DataSplits:
    vocabulary = config.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    shape = DataShape(kind="tokens", vocab_size=vocabulary, context=length)
    rules, source = needs.rules(shape), f"data.path = {config.path!r}"
    end_token = _end_token(config, tokenizer.end_token if tokenizer else None, rules.vocab_size, source)

    def documents_of(rows: Rows, numbers: Indices) -> RowDocuments:
        how: dict[str, Any] = {"tokenizer": tokenizer, "on_bad": config.on_bad}
        samples = RowDataset(rows=rows, inputs=config.inputs, targets=config.targets, rules=rules, **how)
        return RowDocuments(samples, numbers, end_token)

    chosen, left = datasets.split_indices(len(rows), 0.0 if config.eval_path else config.eval_fraction, seed)
    others = rows if config.eval_path is None else open_rows(config, config.eval_path)
    left = left if config.eval_path is None else np.arange(len(others))
    kept = documents_of(others, left) if len(left) else None
    shape = replace(shape, end_token=end_token)
    return replace(_packed(config, documents_of(rows, chosen), kept, seed, shape, end_token), tokenizer=tokenizer)


def _rows(config: sections.RowsDataConfig, context: int | None, seed: int, needs: ModelNeeds) -> DataSplits:
    rows = open_rows(config, config.path)
    tokenizer = rows_tokenizer(config, needs, rows)
    if sections.is_packed(config):
        return _packed_rows(config, rows, _context(config.context, context), seed, needs, tokenizer)
    if config.targets is not None and tokenizer is not None:
        return _labelled_texts(config, rows, context, seed, needs, tokenizer)
    length = _context(config.context, context) if config.targets is None else None
    known, labels, names = config.classes, None, None
    if config.targets is not None and (found := class_names(Path(config.path).expanduser(), config.targets)):
        check_classes(len(found), f"data.targets = {config.targets!r} of data.path = {config.path!r}")
        names, labels = needs.labels(found, f"the classes of data.targets = {config.targets!r}")
        known = len(found)
    vocabulary = config.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    kind: Literal["classes", "custom", "tokens"] = "classes" if known else "custom"
    shape = DataShape(kind="tokens" if config.targets is None else kind, classes=known, vocab_size=vocabulary)

    train = RowDataset(
        rows=rows,
        inputs=config.inputs,
        targets=config.targets,
        rules=needs.rules(shape),
        tokenizer=tokenizer,
        context=length,
        on_bad=config.on_bad,
        labels=labels,
    )
    plain = train if config.eval_path is None else replace(train, rows=open_rows(config, config.eval_path))
    if config.targets is None:
        shape = replace(shape, context=length)
    else:
        first, other = train[0][0], plain[0][0]
        if first.shape != other.shape:
            shapes = f"{list(first.shape)} in data.path and {list(other.shape)} in data.eval_path"
            rule = "a model reads samples of one form"
            raise DataError(f"{config.inputs!r} has the shape {shapes}\n  {rule}\n  bring them to one form")
        classes = config.classes if names is None else max(config.classes or 0, len(names))
        features = len(first) if first.ndim == 1 else None
        shape = replace(shape, features=features, classes=classes, class_names=names)
    return replace(_parts(train, plain, config, seed, shape), tokenizer=tokenizer)


def _parts(train: MapDataset, plain: MapDataset, config: Any, seed: int, shape: DataShape) -> DataSplits:
    """Returns both data sets; where they are of one path, its samples are cut in two by their numbers."""
    if getattr(config, "eval_path", None) is not None:
        return DataSplits(train=train, eval=plain, shape=shape)
    chosen, kept = datasets.split_indices(len(train), config.eval_fraction, seed)
    if not len(kept):
        return DataSplits(train=train, eval=None, shape=shape)
    return DataSplits(train=SampleSubset(train, chosen), eval=SampleSubset(plain, kept), shape=shape)


def _factory(config: sections.FactoryDataConfig, seed: int, needs: ModelNeeds) -> DataSplits:
    from paceline.imports import import_from_path

    what = f"data.factory = {config.factory!r}"
    made = call_factory(import_from_path(config.factory, "data.factory"), config.args, what)
    if not isinstance(made, DataSplits):
        if isinstance(made, tuple) and len(made) != 2:
            raise DataError(f"{what} returned a tuple of {len(made)}\n{_WHAT_A_FACTORY_RETURNS}")
        train, evaluation = made if isinstance(made, tuple) else (made, None)
        if _check_made(train, f"the training set of {what}") == 0:
            raise DataError(f"{what} returned an empty training set\n  a run needs at least one sample")
        if evaluation is not None:
            _check_made(evaluation, f"the evaluation set of {what}")
        shape = _shape_of(train, what)
        if not isinstance(made, tuple):
            whole = _looked_at(train, shape, needs, f"the data set of {what}")
            return _parts(whole, whole, config, seed, shape)
        made = DataSplits(train=train, eval=evaluation, shape=shape)
    kept = None if made.eval is None else _looked_at(made.eval, made.shape, needs, f"the evaluation set of {what}")
    return replace(made, train=_looked_at(made.train, made.shape, needs, f"the training set of {what}"), eval=kept)


def _looked_at(dataset: MapDataset, shape: DataShape, needs: ModelNeeds, name: str) -> MapDataset:
    """Returns samples of the user's that are looked at; not where a loss of theirs says what targets are."""
    return dataset if needs.has_own_loss else CheckedSamples(dataset, needs.rules(shape), name)


def _check_made(dataset: Any, name: str) -> int:
    if isinstance(dataset, torch.Tensor | np.ndarray):
        rule = "wrap tensors: torch.utils.data.TensorDataset(inputs, targets)"
        raise DataError(f"{name} is a {type(dataset).__name__}\n{_WHAT_A_FACTORY_RETURNS}\n  {rule}")
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
        rule = f"the fields are {', '.join(DataShape.__dataclass_fields__)}"
        raise DataError(f"{what} returned a data set with shape = {dict(shape)}: {error}\n  {rule}") from error


_WHAT_A_FACTORY_RETURNS = "  a data factory returns a map-style data set, a tuple (train, eval), or DataSplits"
