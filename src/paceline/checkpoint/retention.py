"""Retention: which checkpoints are kept. A pure policy, and the removal that leaves none half there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.checkpoint.find import list_checkpoints, read_manifest, step_of, verify_checkpoint
from paceline.checkpoint.remote import is_remote, storage_of
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept: the newest ``last``, those of every ``every``-th step, and the ``best`` by a metric."""

    last: int | None = None
    every: int | None = None
    best: int = 0
    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint as retention sees it. ``value`` is its metric; None where nothing was measured at its step."""

    step: int
    value: float | None = None


def steps_to_remove(saved: Sequence[Saved], newest: int, policy: Retention) -> list[int]:
    """Returns the steps that are no longer kept, oldest first. ``newest``, the one just written, always is.

    A value that is not a number is worse than every number.
    """
    if policy.last is None:
        return []
    others = sorted({each.step for each in saved} - {newest})
    kept = {newest, *others[len(others) - max(policy.last - 1, 0) :]}
    if policy.every is not None:
        kept |= {step for step in others if step % policy.every == 0}
    sign = 1.0 if policy.mode == "min" else -1.0
    measured = [
        (sign * each.value, -each.step) for each in saved if each.value is not None and each.value == each.value
    ]
    kept |= {-step for _, step in sorted(measured)[: policy.best]}
    return [step for step in others if step not in kept]


def apply_retention(folder: Path, newest: int, policy: Retention, storage: Storage | None = None) -> list[int]:
    """Removes the checkpoints of a folder that a policy does not keep; returns their steps."""
    found = {step: path for path in list_checkpoints(folder) if (step := step_of(path)) is not None}
    values = {step: _value(path, policy) for step, path in found.items()} if policy.best else dict.fromkeys(found)
    saved = [Saved(step=step, value=values[step]) for step in found]
    removed = steps_to_remove(saved, newest, policy)
    for step in removed:
        remove_checkpoint(found[step], storage)
    return removed


def remove_checkpoint(path: Path, storage: Storage | None = None) -> None:
    """Removes a checkpoint. It loses its name first, so that none is ever half there."""
    storage = storage or storage_of(path)
    hidden = path.parent / f".{path.name}.old"
    try:
        if is_remote(path):  # there its manifest goes first, and nothing is copied
            storage.remove(path)
            return
        storage.remove(hidden)
        storage.rename(path, hidden)
        storage.remove(hidden)
    except OSError as error:
        raise CheckpointError(f"cannot remove {path}, which is no longer kept: {error}") from error


def clear_leftovers(folder: Path, keep: Collection[str] = (), storage: Storage | None = None) -> list[str]:
    """Removes what killed saves and removals have left in a folder; returns their names.

    A checkpoint that had stepped aside for one of its step that did not come gets its name back.
    """
    storage = storage or storage_of(folder)
    cleared = []
    for name in storage.names(folder):
        base = name.removeprefix(".").rpartition(".")[0]
        if not name.startswith(".") or name in keep or step_of(Path(base)) is None:
            continue
        if name.endswith(".old") and not storage.names(folder / base) and _is_whole(folder / name):
            storage.rename(folder / name, folder / base)
        else:
            storage.remove(folder / name)
        cleared.append(name)
    return cleared


def _is_whole(path: Path) -> bool:
    try:
        verify_checkpoint(path, "fast")
    except CheckpointError:
        return False
    return True


def _value(path: Path, policy: Retention) -> float | None:
    try:
        return read_manifest(path).metrics.get(policy.metric)
    except CheckpointError:
        return None
