"""The checkpoints of a folder: which is the newest that is whole, what is wrong with others, and which are kept.

Every check reads the manifest, and whether the pieces in it make up each tensor. A *fast* one compares the sizes of the
files, too; a *full* one reads them all and compares their hashes, in a few threads, and sees that the pieces and values
in them can be read. Retention is a pure policy, and a removal that leaves none half there.

No torch: it runs before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from yaml import YAMLError

from paceline.bounded_yaml import load_yaml
from paceline.checkpoint.formats import coverage_problems, decode_with, piece_problems
from paceline.checkpoint.manifest import MANIFEST, Line, Manifest, Spot, damaged, head_line, newest_line, parse_manifest
from paceline.checkpoint.storage import (
    FileStore,
    cannot_read,
    file_in,
    is_remote,
    is_snapshot,
    nothing_there,
    storage_of,
)
from paceline.errors import CheckpointError
from paceline.untrusted import MOST_JSON_BYTES, is_count, parse_json_object, read_regular

Depth = Literal["none", "fast", "full"]

_PREFIX = "step-"
_THREADS = 4
_HEAD_BYTES = 2**14
_MOST_DIGITS = 18
_UNFINISHED = f"it has no {MANIFEST}, which a save writes last: it did not end"
_IN_PARTS = "parts of it are missing in the memory of hosts: it was not kept to its end, or a host is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that was not taken, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"passed over {self.path.name}: {self.reason}"


def list_checkpoints(folder: Path, own: Line | None = None) -> list[Path]:
    """Returns the checkpoints in ``folder``, oldest first. Those that a run on line ``own`` has left come before."""
    spots = spots_in(folder)
    current = newest_line(spots.values(), own)
    ages = {path: (current.has(spot.line, spot.step), spot.age, path.name) for path, spot in spots.items()}
    return sorted(ages, key=lambda path: ages[path])


def spots_in(folder: Path) -> dict[Path, Spot]:
    """Returns where checkpoints lie. One whose head is unreadable counts as of the newest line: it must be heard of."""
    storage, lines = storage_of(folder), dict[Path, Line | None]()
    for path in [folder / name for name in storage.names(folder) if step_of(Path(name)) is not None]:
        try:
            size = storage.size(path / MANIFEST)
            if size is not None:
                head = bytearray(min(size, _HEAD_BYTES))
                storage.read_into(file_in(path, MANIFEST), [(0, memoryview(head))])
                lines[path] = head_line(bytes(head)) or (None if b'"line"' in head else Line())  # old ones have none
        except (OSError, EOFError, CheckpointError):  # one that nobody may look into: whoever takes it hears why
            lines[path] = None
    known = max((line for line in lines.values() if line is not None), key=lambda line: line.number, default=Line())
    return {path: Spot(line=line or known, step=step_of(path) or 0) for path, line in lines.items()}


def step_of(path: Path) -> int | None:
    """Returns the step that a folder's name tells; None if it is not the name of a checkpoint."""
    number = path.name.removeprefix(_PREFIX)
    is_step = path.name.startswith(_PREFIX) and number.isdecimal() and len(number) <= _MOST_DIGITS
    return int(number) if is_step else None


def read_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest. Raises CheckpointError when there is none."""
    storage = storage_of(path)
    try:
        size = storage.size(file_in(path, MANIFEST))
        if size is None:
            raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}\n  one is a folder step-<number>")
        if size > MOST_JSON_BYTES:
            raise damaged(f"{path / MANIFEST} is damaged: it has {size:,} bytes, and is read up to {MOST_JSON_BYTES:,}")
        return parse_manifest(storage.read(path / MANIFEST).decode(), path)
    except OSError as error:
        raise cannot_read(path / MANIFEST, error) from error
    except UnicodeDecodeError as error:
        raise damaged(f"{path / MANIFEST} cannot be read: {error}") from error


def verify_checkpoint(path: Path, depth: Depth = "full") -> Manifest:
    """Returns the manifest of a checkpoint that is whole. Raises CheckpointError, naming the file, if it is not."""
    storage, manifest = storage_of(path), read_manifest(path)
    for name, tensor in manifest.tensors.items():
        for problem in coverage_problems(name, tensor):
            raise damaged(f"{path} is damaged: {name}: {problem}")
    for level in {"none": (), "fast": ("fast",), "full": ("fast", "full")}[depth]:  # sizes take no time
        with ThreadPoolExecutor(_THREADS) as pool:
            for problem in pool.map(partial(file_problem, path, manifest, storage, level), manifest.files):
                if problem:
                    raise damaged(f"{path}/{problem}")
    if depth == "full":
        # Files with the right hashes may still not hold what a run goes on from.
        for problem in (*piece_problems(path, manifest, storage), *value_problems(path, manifest, storage)):
            raise damaged(f"{path} is damaged: {problem}")
    return manifest


def file_problem(path: Path, manifest: Manifest, storage: FileStore, depth: str, name: str) -> str:
    """Returns what is wrong with a file, by its size and, if ``depth`` is full, its hash; empty: nothing."""
    file, place = manifest.files[name], file_in(path, name)
    size = storage.size(place)
    if size is None:
        return f"{name} is missing"
    if size != file.num_bytes:
        return f"{name} is damaged: it has {size:,} bytes, not {file.num_bytes:,}"
    is_same = depth != "full" or storage.digest(place) == file.sha256
    return "" if is_same else f"{name} is damaged: its hash is not the manifest's"


def value_problems(path: Path, manifest: Manifest, storage: FileStore) -> Iterator[str]:
    """Yields which plain values of a checkpoint cannot be read: those of the manifest, and each rank's own."""
    try:
        decode_with([*manifest.values.values(), *manifest.found.values()])
    except CheckpointError as error:
        yield f"{MANIFEST}: {error.headline}"
    for rank in range(manifest.world):
        name = f"rank-{rank:05d}.json"
        try:
            decode_with(parse_json_object(storage.read(file_in(path, name)))["values"])
        except (OSError, ValueError, KeyError, CheckpointError) as error:
            yield f"{name} cannot be read: {str(error).splitlines()[0]}"


def is_whole(path: Path, depth: Depth) -> bool:
    try:
        verify_checkpoint(path, depth)
    except CheckpointError:
        return False
    return True


def find_checkpoint(
    where: str,
    run_folder: Path,
    depth: Depth = "full",
    tell: Callable[[PassedOver], None] | None = None,
    own: Line | None = None,
    fix: str = "check the path, or start without --resume",
) -> Path:
    """Returns the checkpoint that ``where`` names: ``auto`` (the run's newest whole one), a checkpoint, a run folder.

    ``tell`` hears of each newer one that was passed over: it is damaged, has no manifest, or the run has gone back from
    it. ``own`` is the line that the run is on, if known. Raises CheckpointError if there is none, with ``fix`` as what
    to do, or if the one that is named is damaged. Of several, one whose files are missing is never taken.
    """
    path = run_folder if where == "auto" else Path(where)
    try:
        found = _find_in(path, depth, tell, own)
    except OSError as error:
        raise cannot_read(path, error) from error
    if found is None:
        raise nothing_there(path, fix)
    return found


def find_best(run_folder: Path, depth: Depth = "full") -> Path:
    """Returns a run's best checkpoint, by its newest one's metric. Raises CheckpointError if none is kept or whole."""
    newest = find_checkpoint("auto", run_folder, "fast")
    best = decode_with(read_manifest(newest).values.get("best"))
    if not isinstance(best, dict) or not is_count(best.get("step")):
        fix = "set train.eval_every and checkpoint.keep_best = 1, or take --resume auto"
        raise CheckpointError(f"{newest.parent} has no best checkpoint\n  evaluations on the way tell it\n  {fix}")
    path = newest.with_name(f"{_PREFIX}{best['step']:08d}")
    if storage_of(path).size(path / MANIFEST) is None:
        what = f"the best checkpoint of {newest.parent}, of step {best['step']}, was not kept"
        rule = "checkpoint.keep newest ones are, and checkpoint.keep_best of the best"
        fix = "set checkpoint.keep_best = 1 for the next run; --resume auto takes the newest"
        raise CheckpointError(f"{what}\n  {rule}\n  {fix}")
    verify_checkpoint(path, depth)
    return path


def places_of(path: Path) -> Iterator[Path]:
    """Yields the folders in which the checkpoints of a run may lie, or those of a folder of them."""
    yield from (path / "checkpoints", path)
    try:  # one that keeps them elsewhere says so in its config
        yield Path(load_yaml(read_regular(path / "config.yaml").decode("utf-8"))["checkpoint"]["folder"])
    except (OSError, ValueError, KeyError, TypeError, YAMLError):
        return


def _find_in(path: Path, depth: Depth, tell: Callable[[PassedOver], None] | None, own: Line | None) -> Path | None:
    """Raises CheckpointError, with all reasons, if there are checkpoints and none is whole."""
    if storage_of(path).size(path / MANIFEST) is not None:
        verify_checkpoint(path, depth)
        return path
    for folder in places_of(path):
        candidates, passed = list_checkpoints(folder, own=own), list[PassedOver]()
        for place in reversed(range(len(candidates))):
            chosen = candidates[place]
            try:
                verify_checkpoint(chosen, "fast" if depth == "none" else depth)
            except (CheckpointError, OSError) as error:
                passed.append(PassedOver(path=chosen, reason=str(error).splitlines()[0]))
                continue
            above = [folder / name for name in storage_of(folder).names(folder)]
            above = [each for each in above if (step_of(each) or 0) > (step_of(chosen) or 0)]
            reason = _IN_PARTS if is_snapshot(folder) else _UNFINISHED
            passed += [PassedOver(path=each, reason=reason) for each in above if each not in candidates]
            reason = f"the run has gone back from it, and {chosen.name} is on its line"
            passed += [PassedOver(path=each, reason=reason) for each in above if each in candidates[:place]]
            if tell is not None:
                for each in passed:
                    tell(each)
            return chosen
        if passed:
            raise CheckpointError("\n  ".join(["no checkpoint is whole", *map(str, passed)]))
    return None


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
    spots = spots_in(folder)
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
