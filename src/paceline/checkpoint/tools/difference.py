"""What differs between two checkpoints: tensors and their values, settings, positions. However each of them is cut.

Reads both once, window by window. Numbers are compared in float64: the largest absolute difference, and the largest one
relative to the larger of the two. Two that are not a number at the same place are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint.manifest import OPTIMIZER, Manifest
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tensors import Progress, decode, ignore_progress
from paceline.checkpoint.tools.stream import stream_region, window_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How far one tensor is from the other. ``num_different`` counts elements of other bits."""

    name: str
    num_elements: int
    num_different: int
    max_absolute: float
    max_relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs. A setting is shown by its dotted name and both values."""

    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    other_shape: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    settings: Mapping[str, tuple[Any, Any]]
    values: Mapping[str, tuple[Any, Any]]
    num_compared: int

    @property
    def is_same_state(self) -> bool:
        """Whether a run that goes on from either does the same: tensors and values are alike to the last bit."""
        return not (self.only_left or self.only_right or self.other_shape or self.tensors or self.values)


def compare(left: Checkpoint, right: Checkpoint, progress: Progress = ignore_progress) -> Difference:
    ours, theirs = left.manifest.tensors, right.manifest.tensors
    shared = [name for name in ours if name in theirs]
    other = [
        name for name in shared if (ours[name].shape, ours[name].dtype) != (theirs[name].shape, theirs[name].dtype)
    ]
    alike = [name for name in shared if name not in set(other)]
    found = [_compare_tensor(left, right, name, progress) for name in alike]
    return Difference(
        only_left=tuple(name for name in ours if name not in theirs),
        only_right=tuple(name for name in theirs if name not in ours),
        other_shape=tuple(
            f"{name}: {ours[name].dtype} {list(ours[name].shape)} and {theirs[name].dtype} {list(theirs[name].shape)}"
            for name in other
        ),
        tensors=tuple(each for each in found if each.num_different),
        settings=_unequal(*_settings(left.manifest.about, right.manifest.about)),
        values=_unequal(_values(left.manifest), _values(right.manifest)),
        num_compared=len(alike),
    )


def _compare_tensor(left: Checkpoint, right: Checkpoint, name: str, progress: Progress) -> TensorDifference:
    different, absolute, relative = 0, 0.0, 0.0
    count = max(min(window_elements(left, name), window_elements(right, name)) // 2, 1)  # two, and what is between
    for ours, theirs in zip(
        stream_region(left, name, count=count), stream_region(right, name, count=count), strict=True
    ):
        progress(ours.numel() * ours.element_size())
        itemsize = ours.element_size()
        is_other = (ours.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, itemsize).any(dim=1)
        if not bool(is_other.any()):
            continue
        different += int(is_other.sum())
        a, b = _numbers(ours[is_other]), _numbers(theirs[is_other])
        gap = (a - b).abs()
        gap[(a == b) | (a.isnan() & b.isnan())] = 0.0
        scale = torch.maximum(a.abs(), b.abs())
        ratio = torch.where(gap > 0, gap / scale, torch.zeros_like(gap))
        absolute, relative = max(absolute, _largest(gap)), max(relative, _largest(ratio))
    return TensorDifference(
        name=name,
        num_elements=math.prod(left.manifest.tensors[name].shape),
        num_different=different,
        max_absolute=absolute,
        max_relative=relative,
    )


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return values.abs().double() if values.is_complex() else values.double()


def _largest(values: torch.Tensor) -> float:
    return math.inf if bool(values.isnan().any()) else float(values.max())


def _settings(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what both were written with, by dotted names; a config that one side alone has as one setting."""
    if bool(left.get("config")) != bool(right.get("config")):
        left, right = ({**each, "config": "there" if each.get("config") else None} for each in (left, right))
    return _flatten(left), _flatten(right)


def _values(manifest: Manifest) -> dict[str, Any]:
    """Returns what a run goes on from besides tensors, by dotted names."""
    named = {"step": manifest.step, "position": manifest.position, **manifest.values}
    plain = {name: decode(value) for name, value in {**named, **manifest.found}.items()}
    return _flatten(_by_members(plain))


def _by_members(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names groups of parameters by their first member: their labels are hashes of their settings, such as the rate."""
    names: dict[str, str] = {}
    for name, entry in values.items():
        if isinstance(entry, Mapping) and entry.get("group") in values:
            names.setdefault(entry["group"], f"group of {name.removeprefix(OPTIMIZER)}")
    found: dict[str, Any] = {}
    for name, entry in values.items():
        if isinstance(entry, Mapping) and entry.get("group") in names:
            entry = {**entry, "group": names[entry["group"]]}
        found[names.get(name, name)] = entry
    return found


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested dicts as one, by dotted names; a tensor as its list."""
    if isinstance(value, torch.Tensor):
        return {prefix: value.tolist()}
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for name, each in value.items():
        found |= _flatten(each, f"{prefix}.{name}" if prefix else str(name))
    return found


def _unequal(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*left, *(name for name in right if name not in left)]
    pairs = {name: (left.get(name), right.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}
