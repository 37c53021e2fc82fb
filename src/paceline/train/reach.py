"""Whether what a config names can be reached: files and folders, import paths, parameters by their patterns.

``paceline config check`` asks, so that all of it is said at once, and not by the ranks, one after another. No data are
read. Modules are imported, and a model is made without values where ``optim.groups`` has patterns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.config.checks import no_file
from paceline.config.data_sections import known_shape, sources_of
from paceline.errors import PacelineError, Problem
from paceline.imports import import_from_path


def find_unreachable(config: Config) -> list[Problem]:
    """Returns a problem for each thing that a config names and that is not there."""
    return [*_paths(config), *_imports(config), *_patterns(config)]


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


def _patterns(config: Config) -> Iterator[Problem]:
    if not config.optim.groups:
        return
    import torch

    from paceline.models.registry import build_model
    from paceline.train.optim import unmatched_patterns

    known = known_shape(config.data)
    # What only the data would tell has no part in the names of parameters.
    fields = ("features", "channels", "classes", "vocab_size", "context")
    sizes: dict[str, Any] = {name: getattr(known, name) or 8 for name in fields}
    shape = replace(known, kind="tokens" if config.model.kind in ("gpt", "hf") else "classes", **sizes)
    try:
        with torch.device("meta"):
            model = build_model(config.model, shape)
    except Exception:  # code of the user's that needs values, or another problem, which has a message of its own
        return
    yield from map(_problem, unmatched_patterns([name for name, _ in model.named_parameters()], config.optim.groups))


def _problem(error: PacelineError) -> Problem:
    what, _, rest = str(error).partition("\n")
    rule, _, fix = rest.strip().partition("\n")
    return Problem(what=what, rule=rule, fix=fix.strip())
