"""The checkpoints of a folder, one of them in words, and what differs between two.

The list says how old and large they are, who wrote them, whether they are whole, and why they are kept: by manifests
and sizes alone (or all files, where hashes are asked for). The summary of one has what its manifest says of the run,
its values, and its tensors one by one.

To compare reads both once, window by window, however each of them is cut. Numbers are compared in float64: the largest
absolute difference, and the largest one relative to the larger of the two. Two that are not a number at the same place
are alike.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.find import Saved, list_checkpoints, places_of, read_manifest, retention_of, step_of, why_kept
from paceline.checkpoint.formats import GROUP
from paceline.checkpoint.manifest import MANIFEST, MODEL, OPTIMIZER, Manifest, SavedTensor, newest_line
from paceline.checkpoint.read import Checkpoint, decode_found
from paceline.checkpoint.storage import nothing_there, storage_of
from paceline.checkpoint.tensors import Progress, decode, ignore_progress
from paceline.checkpoint.tools.audit import Depth, check_files, check_tensors
from paceline.checkpoint.tools.stream import stream_region, window_elements
from paceline.errors import CheckpointError, UsageError
from paceline.shards import whole_region


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint of a folder. ``problem`` says why it is not whole; ``kept`` why it is still there."""

    path: Path
    step: int
    num_bytes: int
    age_s: float | None
    problem: str = ""
    kept: tuple[str, ...] = ()
    world: int = 0
    strategy: str = ""
    mesh: Mapping[str, int] | None = None
    reason: str = ""
    metrics: Mapping[str, float] | None = None


def folder_of(where: Path) -> Path:
    """Returns the folder with checkpoints that a run, folder or checkpoint names. Raises CheckpointError for none."""
    if storage_of(where).size(where / MANIFEST) is not None:
        return where.parent
    for folder in places_of(where):
        if list_checkpoints(folder) or any(map(_is_rest, storage_of(folder).names(folder))):
            return folder
    raise nothing_there(where, "name a run's folder, or one with checkpoints")


def list_folder(where: Path, now: float, depth: Depth = "fast", progress: Progress = ignore_progress) -> list[Listed]:
    """Returns the checkpoints of a run or folder, oldest first, those that are not whole among them."""
    folder = folder_of(where)
    names = [name for name in storage_of(folder).names(folder) if _step(name) is not None]
    names.sort(key=lambda name: (_step(name) or 0, name))
    looked = [_look(folder / name, now, depth, progress) for name in names]
    reasons = kept_because([manifest for each, manifest in looked if manifest and not each.problem])
    return [replace(each, kept=() if each.problem else reasons[each.step]) for each, _ in looked]


def kept_because(found: Sequence[Manifest]) -> dict[int, tuple[str, ...]]:
    """Returns by step why some whole checkpoints are kept, by the settings of the newest one's run."""
    if not found:
        return {}
    current = newest_line(each.spot for each in found)
    is_left = {each.step: not current.has(each.line, each.step) for each in found}
    newest = max(found, key=lambda each: (not is_left[each.step], each.step))
    settings = newest.setting("checkpoint")
    policy = retention_of(settings if isinstance(settings, dict) else {})
    values = {each.step: each.metrics.get(policy.metric) for each in found}
    saved = [Saved(step=step, value=value, is_left=is_left[step]) for step, value in values.items()]
    reasons = why_kept(saved, newest.step, policy)
    for step in values:
        reasons[step] += ["the run has gone back from it"] if is_left[step] else []
    return {step: tuple(reasons[step]) or ("not by the policy: goes with the next save",) for step in values}


def _look(path: Path, now: float, depth: Depth, progress: Progress) -> tuple[Listed, Manifest | None]:
    storage = storage_of(path)
    if _is_rest(path.name):
        return _broken(path, "left by a save that was cut short; the next start removes it"), None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return _broken(path, str(error).splitlines()[0].replace(f"{path} ", "")), None
    checks = [check_files(path, manifest, storage, depth, progress)]
    if checks[0].is_good:
        checks.append(check_tensors(path, manifest, storage))
    problems = [problem for check in checks for problem in check.problems]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    try:
        age = max(now - (path / MANIFEST).stat().st_mtime, 0.0)
    except OSError:  # remote, where times are the store's
        age = None
    listed = Listed(
        path=path,
        step=manifest.step,
        num_bytes=manifest.num_bytes,
        age_s=age,
        problem=problems[0] + more if problems else "",
        world=manifest.world,
        strategy=str(manifest.about.get("strategy", "")),
        mesh=manifest.mesh,
        reason=str(manifest.about.get("reason", "")),
        metrics={name: value for name, value in manifest.metrics.items() if name != "step"},
    )
    return listed, manifest


def _broken(path: Path, problem: str) -> Listed:
    storage = storage_of(path)
    num_bytes = sum(storage.size(path / name) or 0 for name in storage.names(path))
    return Listed(path=path, step=_step(path.name) or 0, num_bytes=num_bytes, age_s=None, problem=problem)


def _is_rest(name: str) -> bool:
    return name.startswith(".") and _step(name) is not None


def _step(name: str) -> int | None:
    """Returns the step of a checkpoint, or of what a save that was cut short has left."""
    return step_of(Path(name[1:].rpartition(".")[0] if name.startswith(".") else name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLine:
    """One tensor: its shape and size, and who has a piece of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    files: tuple[str, ...]
    cut: str

    @classmethod
    def of(cls, name: str, tensor: SavedTensor) -> TensorLine:
        dims = {dim for piece in tensor.pieces for dim, _ in piece.region.cuts}
        cut = f"dim {', '.join(map(str, sorted(dims)))}" if dims else "flat" if len(tensor.pieces) > 1 else "whole"
        files = tuple(piece.file for piece in tensor.pieces)
        shape, dtype, num_bytes = tensor.shape, tensor.dtype, tensor.num_bytes
        return cls(name=name, shape=shape, dtype=dtype, num_bytes=num_bytes, files=files, cut=cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is known of a checkpoint without reading a tensor."""

    path: Path
    manifest: Manifest
    num_parameters: int
    bytes_by_kind: Mapping[str, int]
    bytes_by_dtype: Mapping[str, int]
    optimizer: Mapping[str, Any]
    tensors: tuple[TensorLine, ...]


def summarize(path: Path, pattern: str | None = None) -> Summary:
    """Reads a manifest; ``pattern`` (with ``*`` and ``?``) picks tensors. Raises UsageError if it fits none."""
    manifest = read_manifest(path)
    kinds, dtypes, num_parameters = Counter[str](), Counter[str](), 0
    for name, tensor in manifest.tensors.items():
        kinds[name.partition("/")[0]] += tensor.num_bytes
        dtypes[tensor.dtype] += tensor.num_bytes
        num_parameters += math.prod(tensor.shape) if name.startswith(MODEL) else 0
    fits = re.compile(fnmatch.translate("*" if pattern is None else pattern)).match
    chosen = [name for name in manifest.tensors if fits(name) or fits(name.partition("/")[2])]
    if pattern is not None and not chosen:
        some = ", ".join(list(manifest.tensors)[:3])
        raise UsageError(f"no tensor fits {pattern!r}\n  names are such as {some}\n  * stands for any text")
    known = decode_found(manifest)
    members = Counter(value["group"] for name, value in known.items() if name.startswith(OPTIMIZER))
    groups = {name: value for name, value in known.items() if name.startswith(GROUP)}
    return Summary(
        path=path,
        manifest=manifest,
        num_parameters=num_parameters,
        bytes_by_kind=kinds,
        bytes_by_dtype=dtypes,
        optimizer={label: {"parameters": members[label], **settings} for label, settings in groups.items()},
        tensors=tuple(TensorLine.of(name, manifest.tensors[name]) for name in chosen),
    )


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
    kinds = {name: [f"{each[name].dtype} {list(each[name].shape)}" for each in (ours, theirs)] for name in shared}
    alike = [name for name, (a, b) in kinds.items() if a == b]
    found = [_compare_tensor(left, right, name, progress) for name in alike]
    return Difference(
        only_left=tuple(name for name in ours if name not in theirs),
        only_right=tuple(name for name in theirs if name not in ours),
        other_shape=tuple(f"{name}: {a} and {b}" for name, (a, b) in kinds.items() if a != b),
        tensors=tuple(each for each in found if each.num_different),
        settings=_unequal(*map(_flatten, _settings(left.manifest.about, right.manifest.about))),
        values=_unequal(_values(left.manifest), _values(right.manifest)),
        num_compared=len(alike),
    )


def _compare_tensor(left: Checkpoint, right: Checkpoint, name: str, progress: Progress) -> TensorDifference:
    different, absolute, relative = 0, 0.0, 0.0
    whole = whole_region(left.manifest.tensors[name].shape)
    step = max(min(window_elements(each, name, whole) for each in (left, right)) // 2, 1)  # two, and what is between
    for ours, theirs in zip(*(stream_region(each, name, whole, step) for each in (left, right)), strict=True):
        progress(ours.nbytes)
        is_other = (ours.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, ours.element_size()).any(dim=1)
        if not bool(is_other.any()):
            continue
        different += int(is_other.sum())
        both = [values[is_other] for values in (ours, theirs)]
        a, b = (values.abs().double() if values.is_complex() else values.double() for values in both)
        gap = (a - b).abs()
        gap[(a == b) | (a.isnan() & b.isnan())] = 0.0
        ratio = torch.where(gap > 0, gap / torch.maximum(a.abs(), b.abs()), torch.zeros_like(gap))
        absolute, relative = max(absolute, _largest(gap)), max(relative, _largest(ratio))
    return TensorDifference(
        name=name, num_elements=whole.size, num_different=different, max_absolute=absolute, max_relative=relative
    )


def _largest(values: torch.Tensor) -> float:
    return math.inf if bool(values.isnan().any()) else float(values.max())


def _settings(*about: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns what both were written with; a config that one side alone has as one setting."""
    if len({bool(each.get("config")) for each in about}) == 1:
        return about
    return [{**each, "config": "there" if each.get("config") else None} for each in about]


def _values(manifest: Manifest) -> dict[str, Any]:
    named = {"step": manifest.step, "position": manifest.position, **manifest.values, **manifest.found}
    values = {name: decode(value) for name, value in named.items()}
    names: dict[str, str] = {}  # groups by their first member: their labels are hashes of settings, such as the rate
    for name, entry in values.items():
        if isinstance(entry, Mapping) and entry.get("group") in values:
            names.setdefault(entry["group"], f"group of {name.removeprefix(OPTIMIZER)}")
    found: dict[str, Any] = {}
    for name, entry in values.items():
        if isinstance(entry, Mapping) and entry.get("group") in names:
            entry = {**entry, "group": names[entry["group"]]}
        found[names.get(name, name)] = entry
    return _flatten(found)


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
