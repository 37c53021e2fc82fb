"""What a start would refuse: files, import paths and patterns that are not there, texts without a tokenizer, models.

``paceline config check`` asks, so that all of it is said at once, and not by the ranks, one after another. It calls the
functions that a start calls. Files of rows are opened, and no other data. Modules are imported, and a model is made
without values where something depends on it: a folder of Hugging Face, whose weights are matched by name and shape;
``optim.groups``; tensor and pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.config.checks import no_file
from paceline.config.data_sections import DataShape, RowsDataConfig, is_packed, known_shape, sources_of
from paceline.config.sections import HFModelConfig
from paceline.errors import ConfigError, PacelineError, Problem, UsageError
from paceline.imports import import_from_path


def find_unreachable(config: Config) -> list[Problem]:
    """Returns a problem for each thing that a config names and that is not there, or that a start cannot do."""
    return [*_paths(config), *_imports(config), *_tokenizers(config), *_model(config)]


def _paths(config: Config) -> Iterator[Problem]:
    for place, data in sources_of(config.data).items():
        if data.kind == "text":  # every command looks for it
            continue
        for key in ("path", "eval_path", "tokenizer"):
            value = getattr(data, key, None)
            if isinstance(value, str) and not _is_there(value) and (key, value) != ("tokenizer", "bytes"):
                yield no_file(f"{place}.{key}", value, "a file or a folder", "check the path")


def _is_there(value: str) -> bool:
    path = Path(value).expanduser()
    return path.exists() or any(path.parent.glob(path.name))  # tokens are named by a pattern, too


def _imports(config: Config) -> Iterator[Problem]:
    named: dict[str, str] = {f"train.metrics.{name}": path for name, path in config.train.metrics.items()}
    named |= {f"train.hooks[{number}]": path for number, path in enumerate(config.train.hooks)}
    sections: dict[str, Any] = {"model": config.model, **sources_of(config.data)}
    named |= {f"{name}.factory": found.factory for name, found in sections.items() if hasattr(found, "factory")}
    named |= {"train.loss": config.train.loss, "optim.kind": config.optim.kind}
    for key, path in named.items():
        if ":" in path:
            try:
                import_from_path(path, key)
            except PacelineError as error:
                yield _problem(error)


def _tokenizers(config: Config) -> Iterator[Problem]:
    for source in sources_of(config.data).values():
        if isinstance(source, RowsDataConfig) and Path(source.path).expanduser().exists():
            from paceline.data.checked import needs_of
            from paceline.data.registry import open_rows, rows_tokenizer

            try:
                rows_tokenizer(source, needs_of(config), open_rows(source, source.path))
            except PacelineError as error:
                yield _problem(error)


def packing_notes(config: Config) -> list[str]:
    """Returns how full the rows of packed documents are. Reads their files, once. Raises DataError as a start does."""
    if not any(map(is_packed, sources_of(config.data).values())):
        return []
    from paceline.data.packing import packing_details
    from paceline.data.registry import data_of

    return [detail["note"] for detail in packing_details(data_of(config).train)]


def _model(config: Config) -> Iterator[Problem]:
    parallel, known = config.parallel, config.model
    if not (config.optim.groups or known.kind == "hf" or parallel.tensor > 1 or parallel.pipeline > 1):
        return
    if isinstance(known, HFModelConfig) and not (Path(known.path).expanduser() / "config.json").is_file():
        return  # whoever read the config tells of it
    import torch

    from paceline.checkpoint.tools.pretrained import read_later
    from paceline.engines.tensor.apply import fit_plan
    from paceline.models.layers import model_layers
    from paceline.models.registry import build_model
    from paceline.train.optim import unmatched_patterns

    try:
        with torch.device("meta"):
            model = build_model(known, _shape(config), is_unfilled=True)
        if isinstance(known, HFModelConfig) and known.pretrained:
            read_later(model, known)
    except Exception as error:  # code of the user's that needs values, or sizes that only the data tell
        if known.kind == "hf" and isinstance(error, PacelineError):
            yield from error.problems if isinstance(error, ConfigError) else [_problem(error)]
        return
    yield from map(_problem, unmatched_patterns([name for name, _ in model.named_parameters()], config.optim.groups))
    for degree, split in (
        (parallel.tensor, lambda: fit_plan(model, parallel.tensor, sequence=parallel.sequence_parallel)),
        (parallel.pipeline, lambda: model_layers(model)),
    ):
        try:
            if degree > 1:
                split()
        except UsageError as error:
            yield _problem(error)


def _shape(config: Config) -> DataShape:
    """Returns the sizes of the data. What only they would tell is any number; for a folder of a model, it is open."""
    known, fields = known_shape(config.data), ("features", "channels", "classes", "vocab_size", "context")
    if config.model.kind != "hf":
        sizes: dict[str, Any] = {name: getattr(known, name) or 8 * config.parallel.tensor for name in fields}
        return replace(known, kind="tokens" if config.model.kind == "gpt" else "classes", **sizes)
    from paceline.data.checked import needs_of

    tokenizer = needs_of(config).tokenizer() if known.kind == "tokens" else None
    vocabulary = known.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    has_classes = any(getattr(each, "targets", None) for each in sources_of(config.data).values())
    return replace(known, kind="classes" if has_classes else known.kind, vocab_size=vocabulary)


def _problem(error: PacelineError) -> Problem:
    what, _, rest = str(error).partition("\n")
    rule, _, fix = rest.strip().partition("\n")
    return Problem(what=what, rule=rule, fix=fix.strip())
