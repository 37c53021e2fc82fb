"""The checkpoints of a folder, and one of them in words. No tensor is read.

The list says how old and large they are, who wrote them, whether they are whole, and why they are kept: by manifests
and sizes alone (or all files, where hashes are asked for). The summary of one has what its manifest says of the run,
its values, and its tensors one by one.
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

from paceline.checkpoint.find import list_checkpoints, places_of, read_manifest, step_of
from paceline.checkpoint.manifest import MANIFEST, MODEL, OPTIMIZER, Manifest, SavedTensor, newest_line
from paceline.checkpoint.read import decode_found
from paceline.checkpoint.retention import Saved, retention_of, why_kept
from paceline.checkpoint.storage import nothing_there, storage_of
from paceline.checkpoint.tensors import Progress, ignore_progress
from paceline.checkpoint.tools.audit import Depth, check_files, check_tensors
from paceline.checkpoint.values import GROUP
from paceline.errors import CheckpointError, UsageError


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
    storage = storage_of(where)
    if storage.size(where / MANIFEST) is not None:
        return where.parent
    for folder in places_of(where):
        storage = storage_of(folder)
        if list_checkpoints(folder, storage) or any(_is_rest(name) for name in storage.names(folder)):
            return folder
    raise nothing_there(where, "name a run's folder, or one with checkpoints")


def list_folder(where: Path, now: float, depth: Depth = "fast", progress: Progress = ignore_progress) -> list[Listed]:
    """Returns the checkpoints of a run or folder, oldest first, those that are not whole among them."""
    folder = folder_of(where)
    storage = storage_of(folder)
    paths = [folder / name for name in storage.names(folder) if _step(name) is not None]
    paths.sort(key=lambda path: (_step(path.name) or 0, path.name))
    looked = [_look(path, now, depth, progress) for path in paths]
    reasons = kept_because([(each, manifest) for each, manifest in looked if manifest and not each.problem])
    return [replace(each, kept=reasons.get(each.path, ())) for each, _ in looked]


def kept_because(found: Sequence[tuple[Listed, Manifest]]) -> dict[Path, tuple[str, ...]]:
    """Returns why each of some whole checkpoints is kept, by the settings of the newest one's run."""
    if not found:
        return {}
    current = newest_line(manifest.spot for _, manifest in found)
    left = {each.path for each, manifest in found if not current.has(manifest.line, manifest.step)}
    newest = max((manifest for _, manifest in found), key=lambda each: (current.has(each.line, each.step), each.step))
    settings = newest.setting("checkpoint")
    policy = retention_of(settings if isinstance(settings, dict) else {})
    saved = [
        Saved(step=each.step, value=manifest.metrics.get(policy.metric), is_left=each.path in left)
        for each, manifest in found
    ]
    reasons = why_kept(saved, newest.step, policy)
    for each, _ in found:
        reasons[each.step] += ["the run has gone back from it"] if each.path in left else []
    return {
        each.path: tuple(reasons[each.step]) or ("not by the policy: goes with the next save",) for each, _ in found
    }


def _look(path: Path, now: float, depth: Depth, progress: Progress) -> tuple[Listed, Manifest | None]:
    storage = storage_of(path)
    if _is_rest(path.name):
        return _broken(path, "left by a save that was cut short; the next start removes it"), None
    try:
        manifest = read_manifest(path, storage)
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
        tensors=tuple(_tensor_line(name, manifest.tensors[name]) for name in chosen),
    )


def _tensor_line(name: str, tensor: SavedTensor) -> TensorLine:
    dims = {dim for piece in tensor.pieces for dim, _ in piece.region.cuts}
    cut = f"dim {', '.join(map(str, sorted(dims)))}" if dims else "flat" if len(tensor.pieces) > 1 else "whole"
    return TensorLine(
        name=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        num_bytes=tensor.num_bytes,
        files=tuple(piece.file for piece in tensor.pieces),
        cut=cut,
    )
