"""Rules for the section ``data``, and for what a model can read of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.config import data_sections as sections
from paceline.config.data_sections import known_shape, sources_of
from paceline.config.schema import Config
from paceline.config.sections import GPTModelConfig, MLPModelConfig, ResNetModelConfig, gpt_shape
from paceline.config.suggest import near_files, nearest
from paceline.errors import Problem
from paceline.plan.rule_case import no_effect

_WITH_CONTEXT = (
    sections.TextDataConfig,
    sections.TokensDataConfig,
    sections.SyntheticTokensDataConfig,
    sections.RowsDataConfig,
)
_ROWS = ("jsonl", "parquet", "hf_dataset")
_OWN = ("factory", "stream")
_FITTING_DATA = {
    "mlp": ("digits", "synthetic_classification", "synthetic_images", "images", *_ROWS, *_OWN),
    "resnet": ("synthetic_images", "images", *_OWN),
    "gpt": ("text", "tokens", "synthetic_tokens", *_ROWS, *_OWN),
}
_OF_THE_WHOLE = ("shuffle", "last_batch", "workers", "prefetch", "worker_start")


def check_model_reads_data(config: Config) -> Iterator[Problem]:
    model = config.model.kind
    for place, source in sources_of(config.data).items():
        data = source.kind
        fitting = _FITTING_DATA.get(model, (data,))
        if data not in fitting:
            models = [each for each, kinds in _FITTING_DATA.items() if data in kinds]
            yield Problem(
                what=f"model.kind = {model} cannot read {place}.kind = {data}",
                rule=f"{model} reads {', '.join(fitting)}",
                fix=f"try {place} = {{kind: {fitting[0]}}}, or model = {' or '.join(map(_smallest, models))}",
            )


def _smallest(kind: str) -> str:
    """Returns a model of a kind as it is written in one line."""
    return f"{{kind: {kind}, size: gpt-micro}}" if kind == "gpt" else f"{{kind: {kind}}}"


def check_mixture(config: Config) -> Iterator[Problem]:
    data = config.data
    if not isinstance(data, sections.MixtureDataConfig):
        return
    for name in data.weights.keys() - data.sources.keys():
        near = nearest(name, tuple(data.sources))
        yield Problem(
            what=f"data.weights.{name} is the weight of no source",
            rule=f"the sources are {', '.join(data.sources)}",
            fix=f"did you mean data.weights.{near}?" if near else "remove it, or add the source",
        )
    for place, source in sources_of(data).items():
        for key in _OF_THE_WHOLE:
            value = getattr(source, key)
            if value != type(source).model_fields[key].default:
                rule = "batches of a mixture are read and ordered together"
                yield no_effect(f"{place}.{key}", value, "in a source of a mixture", rule, f"set data.{key}")


def check_documents(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    for place, source in sources_of(config.data).items():
        if not isinstance(source, sections.TokensDataConfig):
            continue
        if source.documents == "joined":
            if source.end_token is not None:
                where, rule = f"with {place}.documents = joined", "it says where attention begins anew"
                yield no_effect(f"{place}.end_token", source.end_token, where, rule, f"set {place}.documents = apart")
            continue
        with_what = ""
        if config.model.kind != "gpt":
            with_what = f"model.kind = {config.model.kind}"
        elif parallel.pipeline > 1 or parallel.tensor > 1:
            with_what = f"parallel.pipeline = {parallel.pipeline} and parallel.tensor = {parallel.tensor}"
        if with_what:
            yield Problem(
                what=f"{place}.documents = apart with {with_what}",
                rule="the blocks of a gpt are handed the ends of documents; other models, stages of a pipeline and "
                "tensor ranks are handed nothing but the stream",
                fix=f"set {place}.documents = joined, or shard a gpt with parallel.strategy = fsdp",
            )


def check_model_dimensions(config: Config) -> Iterator[Problem]:
    model, shape = config.model, known_shape(config.data)
    if any(check_model_reads_data(config)):
        return
    if isinstance(model, MLPModelConfig):
        yield from _exactly("input_dim", model.input_dim, shape.features, "features of a sample")
        yield from _at_least("num_classes", model.num_classes, shape.classes, "classes")
    elif isinstance(model, ResNetModelConfig):
        yield from _exactly("in_channels", model.in_channels, shape.channels, "channels of an image")
        yield from _at_least("num_classes", model.num_classes, shape.classes, "classes")
    elif isinstance(model, GPTModelConfig):
        yield from _at_least("vocab_size", model.vocab_size, shape.vocab_size, "tokens of the vocabulary")


def _exactly(key: str, given: int | None, known: int | None, meaning: str) -> Iterator[Problem]:
    if given is not None and known is not None and given != known:
        what = f"model.{key} = {given}, but the data has {known} {meaning}"
        yield Problem(what=what, rule="they are the same number", fix=f"set model.{key} = {known}, or leave it out")


def _at_least(key: str, given: int | None, known: int | None, meaning: str) -> Iterator[Problem]:
    if given is not None and known is not None and given < known:
        what = f"model.{key} = {given} is fewer than the data's {known} {meaning}"
        yield Problem(what=what, rule="each needs an output", fix=f"set model.{key} = {known}, or leave it out")


def check_context(config: Config) -> Iterator[Problem]:
    shape = gpt_shape(config.model) if isinstance(config.model, GPTModelConfig) else None
    for place, source in sources_of(config.data).items():
        if shape is None or not isinstance(source, _WITH_CONTEXT):
            continue
        context = source.context
        if not shape.context and context is None:
            yield Problem(
                what=f"neither model.context nor {place}.context is given",
                rule="the length of a sample comes from one of them, or from model.size",
                fix="try model.context = 128",
            )
        elif shape.context and context is not None and context > shape.context:
            yield Problem(
                what=f"model.context = {shape.context} is smaller than {place}.context = {context}",
                rule="a sample must fit into the model's context",
                fix=f"set model.context = {context}, or {place}.context = {shape.context}",
            )


def check_text_file(config: Config) -> Iterator[Problem]:
    for place, source in sources_of(config.data).items():
        if source.kind == "text" and source.path is not None and not Path(source.path).expanduser().is_file():
            otherwise = "leave it out to train on Python's documentation"
            yield no_file(f"{place}.path", source.path, "a text file", otherwise)


def no_file(key: str, path: str, kind: str, otherwise: str) -> Problem:
    """Returns the problem of a file that is not there, with names like it."""
    near = near_files(Path(path))
    return Problem(
        what=f"{key} = {path!r} {'is a folder' if Path(path).is_dir() else 'does not exist'}",
        rule=f"it is {kind}, and a relative path starts at {Path.cwd()}",
        fix=f"did you mean {' or '.join(near)}?" if near else otherwise,
    )
