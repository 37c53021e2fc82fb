"""Models by name: the shapes of those that tables name without printing their sizes (known_models.yaml)."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

import yaml

from paceline.plan.workload import ModelShape, SampleModel


def known_transformer(name: str) -> ModelShape | None:
    """Returns a transformer's shape by the name that a table gives it; None where it is not known."""
    entry = _find(name, "transformers")
    if entry is None:
        return None
    fields = {key: value for key, value in entry.items() if key != "total"}
    return ModelShape(**fields, total_params=float(entry.get("total", 0.0)))


def known_samples(name: str) -> SampleModel | None:
    """Returns a convolutional, recurrent or translation model by name; None where it is not known."""
    entry = _find(name, "samples")
    if entry is None:
        return None
    return SampleModel(
        name=_key(name),
        params=float(entry["params"]),
        flops=float(entry["flops"]),
        activations=float(entry["activations"]),
        kernels=int(entry["kernels"]),
        unit=entry.get("unit", "image"),
        kind=entry.get("kind", "convolution"),
        samples_each=float(entry.get("each", 1.0)),
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)", "", name.lower()))


def _find(name: str, section: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = _catalog()[section].get(_key(name))
    return found


@cache
def _catalog() -> dict[str, Any]:
    text = resources.files("paceline.predict.scored").joinpath("known_models.yaml").read_text()
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded
