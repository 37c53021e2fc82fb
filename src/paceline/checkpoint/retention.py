"""Retention: which checkpoints are kept. A pure policy, and the removal that leaves none half there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.find import is_whole, spots_in, step_of, verify_checkpoint
from paceline.checkpoint.manifest import Line, newest_line
from paceline.checkpoint.storage import FileStore, is_remote, storage_of
from paceline.errors import CheckpointError
from paceline.untrusted import is_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept: the newest ``last``, those of every ``every``-th step, and the ``best`` by a metric.

    Those that the run has gone back from are older than all others, and neither of a step to keep nor among the best.
    """

    last: int | None = None
    every: int | None = None
    best: int = 0
    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"


def best_mode(metric: str) -> Literal["min", "max"]:
    """Returns whether less or more of a metric is better, where nothing is said."""
    return "min" if metric in ("eval_loss", "eval_perplexity") else "max"


def retention_of(settings: Mapping[str, Any]) -> Retention:
    """Returns the policy that a config's ``checkpoint`` section asks for; a saved one may have other values."""
    metric = str(settings.get("best_metric", "eval_loss"))
    mode = settings.get("best_mode") or best_mode(metric)
    last, every, best = (settings.get(name) for name in ("keep", "keep_every", "keep_best"))
    return Retention(
        last=last if is_count(last) else None,
        every=every if is_count(every) and every else None,
        best=best if is_count(best) else 0,
        metric=metric,
        mode="max" if mode == "max" else "min",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint as retention sees it, with its metric, if any; ``is_left``: the run went back from it."""

    step: int
    value: float | None = None
    is_left: bool = False
    is_damaged: bool = False


def steps_to_remove(saved: Sequence[Saved], newest: int, policy: Retention) -> list[int]:
    """Returns the steps that are no longer kept, oldest first. ``newest``, the one just written, always is.

    A damaged one takes no other's place, and goes when it is older than those. A value that is not a number is worse
    than every number.
    """
    return sorted(step for step, reasons in why_kept(saved, newest, policy).items() if not reasons)


def why_kept(saved: Sequence[Saved], newest: int, policy: Retention) -> dict[int, list[str]]:
    """Returns by step the reasons for which checkpoints are kept; of equally good ones the newer is the best."""
    others = sorted((each for each in saved if each.step != newest), key=lambda each: (not each.is_left, each.step))
    good = [place for place, each in enumerate(others) if not each.is_damaged]
    wanted = len(others) + 1 if policy.last is None else max(policy.last - 1, 0)
    first = len(others) if wanted == 0 else 0 if len(good) <= wanted else good[-wanted]
    reasons: dict[int, list[str]] = {newest: ["newest"], **{each.step: [] for each in others}}
    for each in others[first:]:
        reasons[each.step].append("one of the last")
    own = {each.step: each.value for each in saved if not (each.is_left or each.is_damaged)}
    for step in own:
        if policy.every is not None and step % policy.every == 0:
            reasons[step].append(f"every {policy.every} steps")
    sign = 1.0 if policy.mode == "min" else -1.0
    measured = [(sign * value, -step) for step, value in own.items() if value is not None and value == value]
    for _, step in sorted(measured)[: policy.best]:
        reasons[-step].append(f"best {policy.metric}")
    return reasons


def apply_retention(
    folder: Path, newest: int, policy: Retention, storage: FileStore | None = None, own: Line | None = None
) -> list[int]:
    """Removes the checkpoints of a folder that a policy does not keep; returns their steps. ``own``: the run's line."""
    if policy.last is None:
        return []
    spots = spots_in(folder, storage)
    current = newest_line(spots.values(), own)
    found = {spot.step: path for path, spot in spots.items()}
    saved = []
    for step, path in found.items():
        known = Saved(step=step, is_left=not current.has(spots[path].line, step))
        try:
            saved.append(replace(known, value=verify_checkpoint(path, "fast").metrics.get(policy.metric)))
        except (CheckpointError, OSError):
            saved.append(replace(known, is_damaged=True))
    removed = steps_to_remove(saved, newest, policy)
    files = storage or storage_of(folder)
    for path in (found[step] for step in removed):
        hidden = path.parent / f".{path.name}.old"
        try:
            if not is_remote(path):  # it loses its name first, so that none is ever half there
                files.remove(hidden)
                files.rename(path, hidden)
            files.remove(path if is_remote(path) else hidden)  # of a remote one the manifest goes first
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}, which is no longer kept: {error}") from error
    return removed


def clear_leftovers(folder: Path, storage: FileStore | None = None) -> None:
    """Removes what killed saves have left. One that stepped aside for one that did not come gets its name back."""
    storage = storage or storage_of(folder)
    for name in storage.names(folder):
        base = name.removeprefix(".").rpartition(".")[0]
        if not name.startswith(".") or step_of(Path(base)) is None:
            continue
        if name.endswith(".old") and not storage.names(folder / base) and is_whole(folder / name, "fast"):
            storage.rename(folder / name, folder / base)
        else:
            storage.remove(folder / name)
