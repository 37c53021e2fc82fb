"""Finding: the newest checkpoint that is whole, and what is wrong with those that are not.

Every check reads the manifest, and whether every element of a tensor is in exactly one piece: what is missing would
be read as zeros, and written on with good hashes. Pieces that are cut alike (the same spans of the same dims) are
intervals of one part of the tensor: these must not overlap, nor may the spans of the parts; then the number of elements
says whether something is missing. Cost: one sort of the pieces of each tensor.

A *fast* check compares the sizes of the files, too; a *full* one reads them all and compares their hashes, in a few
threads, and sees that the pieces and values in them can be read. No torch: it runs before anything is started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from yaml import YAMLError

from paceline.bounded_yaml import load_yaml
from paceline.checkpoint.formats import Header, decode_with, read_header
from paceline.checkpoint.manifest import (
    COMPRESSION,
    ITEM_BYTES,
    MANIFEST,
    Line,
    Manifest,
    SavedTensor,
    Spot,
    damaged,
    head_line,
    newest_line,
    overlaps,
    parse_manifest,
)
from paceline.checkpoint.storage import FileStore, cannot_read, file_in, nothing_there, storage_of
from paceline.errors import CheckpointError
from paceline.shards import Region, Spans
from paceline.untrusted import MOST_JSON_BYTES, is_count, parse_json_object, read_regular

Depth = Literal["none", "fast", "full"]

_PREFIX = "step-"
_THREADS = 4
_HEAD_BYTES = 2**14
_MOST_DIGITS = 18
_UNFINISHED = f"it has no {MANIFEST}, which a save writes last: it did not end"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that was not taken, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"passed over {self.path.name}: {self.reason}"


def list_checkpoints(folder: Path, storage: FileStore | None = None, own: Line | None = None) -> list[Path]:
    """Returns the checkpoints in ``folder``, oldest first. Those that a run on line ``own`` has left come before."""
    spots = spots_in(folder, storage)
    current = newest_line(spots.values(), own)
    ages = {path: (current.has(spot.line, spot.step), spot.age, path.name) for path, spot in spots.items()}
    return sorted(ages, key=lambda path: ages[path])


def spots_in(folder: Path, storage: FileStore | None = None) -> dict[Path, Spot]:
    """Returns where checkpoints lie. One whose head is unreadable counts as of the newest line: it must be heard of."""
    storage = storage or storage_of(folder)
    lines: dict[Path, Line | None] = {}
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


def read_manifest(path: Path, storage: FileStore | None = None) -> Manifest:
    """Reads a checkpoint's manifest. Raises CheckpointError when there is none."""
    storage = storage or storage_of(path)
    try:
        size = storage.size(file_in(path, MANIFEST))
        if size is None:
            raise CheckpointError(
                f"{path} is not a checkpoint: it has no {MANIFEST}\n  a complete checkpoint is a folder step-<number>"
            )
        if size > MOST_JSON_BYTES:
            raise damaged(f"{path / MANIFEST} is damaged: it has {size:,} bytes, and is read up to {MOST_JSON_BYTES:,}")
        return parse_manifest(storage.read(path / MANIFEST).decode(), path)
    except OSError as error:
        raise cannot_read(path / MANIFEST, error) from error
    except UnicodeDecodeError as error:
        raise damaged(f"{path / MANIFEST} cannot be read: {error}") from error


def verify_checkpoint(path: Path, depth: Depth = "full", storage: FileStore | None = None) -> Manifest:
    """Returns the manifest of a checkpoint that is whole. Raises CheckpointError, naming the file, if it is not."""
    storage = storage or storage_of(path)
    manifest = check_coverage(path, read_manifest(path, storage))
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
        raise CheckpointError(
            f"{newest.parent} has no best checkpoint\n  the best is told by evaluations on the way\n"
            "  set train.eval_every and checkpoint.keep_best = 1, or take --resume auto"
        )
    path = newest.with_name(f"{_PREFIX}{best['step']:08d}")
    if storage_of(path).size(path / MANIFEST) is None:
        raise CheckpointError(
            f"the best checkpoint of {newest.parent}, of step {best['step']}, was not kept\n"
            "  checkpoint.keep newest ones are, and checkpoint.keep_best of the best\n"
            "  set checkpoint.keep_best = 1 for the next run; --resume auto takes the newest"
        )
    verify_checkpoint(path, depth)
    return path


def places_of(path: Path) -> Iterator[Path]:
    """Yields the folders in which the checkpoints of a run may lie, or those of a folder of them."""
    yield from (path / "checkpoints", path)
    try:  # one that keeps them elsewhere says so in its config
        values = load_yaml(read_regular(path / "config.yaml").decode("utf-8"))
        yield Path(values["checkpoint"]["folder"])
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
            passed += [PassedOver(path=each, reason=_UNFINISHED) for each in above if each not in candidates]
            reason = f"the run has gone back from it, and {chosen.name} is on its line"
            passed += [PassedOver(path=each, reason=reason) for each in above if each in candidates[:place]]
            if tell is not None:
                for each in passed:
                    tell(each)
            return chosen
        if passed:
            raise CheckpointError("\n  ".join(["no checkpoint is whole", *map(str, passed)]))
    return None


Cuts = tuple[tuple[int, Spans], ...]


def check_coverage(path: Path, manifest: Manifest) -> Manifest:
    """Raises CheckpointError where an element of a tensor is missing, or saved twice."""
    for name, tensor in manifest.tensors.items():
        for problem in coverage_problems(name, tensor):
            raise damaged(f"{path} is damaged: {name}: {problem}")
    return manifest


def coverage_problems(name: str, tensor: SavedTensor) -> list[str]:
    """Returns what is missing of a tensor, or there twice."""
    size, regions = math.prod(tensor.shape), [piece.region for piece in tensor.pieces if piece.region.size]
    found, problems = sum(region.size for region in regions), []
    if found != size and not name.startswith(COMPRESSION):  # a rank may have no residual of compression
        problems.append(f"{found:,} of {size:,} elements are saved")
    parts: dict[Cuts, list[Region]] = {}
    for region in regions:
        parts.setdefault(region.cuts, []).append(region)
    for part in parts.values():
        if len({region.order for region in part}) > 1:
            problems.append("its pieces lie in different orders of dims")
        shared = overlaps([(region.begin, region.end) for region in part])
        problems += [f"elements {first:,} to {last:,} are saved twice" for first, last in shared]
    if len({tuple(dim for dim, _ in cuts) for cuts in parts}) > 1:
        return [*problems, "its pieces are cut along different dims"]
    rows = _row_overlaps(list(parts))
    return problems + [f"rows {first:,} to {last:,} of the dim that is cut are saved twice" for first, last in rows]


def _row_overlaps(parts: Sequence[Cuts]) -> list[tuple[int, int]]:
    """Returns which rows several parts have, of the first dim that is cut; within the same rows, of the next one."""
    within: dict[Spans, list[Cuts]] = {}
    for cuts in parts:
        if cuts:
            within.setdefault(cuts[0][1], []).append(cuts[1:])
    found = overlaps([span for spans in within for span in spans])
    return found + [each for inner in within.values() for each in _row_overlaps(inner)]


def piece_problems(path: Path, manifest: Manifest, storage: FileStore, skip: Collection[str] = ()) -> list[str]:
    """Returns which pieces are not in their files at their full size. ``skip``: files that are damaged anyway."""
    problems: list[str] = []
    headers: dict[str, Header] = {}
    for file in sorted({piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces} - set(skip)):
        try:
            headers[file] = read_header(storage, file_in(path, file))
        except CheckpointError as error:
            problems.append(str(error).splitlines()[0])
    for name, tensor in manifest.tensors.items():
        for piece in (piece for piece in tensor.pieces if piece.file in headers):
            place, wanted = headers[piece.file].tensors.get(name), piece.region.size * ITEM_BYTES[tensor.dtype]
            if place is None:
                problems.append(f"{piece.file} has no {name}")
            elif place.dtype != tensor.dtype:
                problems.append(f"{piece.file} has {name} as {place.dtype}, not {tensor.dtype}")
            elif place.num_bytes != wanted:
                problems.append(f"{piece.file} has {place.num_bytes:,} bytes of {name}, not {wanted:,}")
    return problems
