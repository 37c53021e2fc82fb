"""Finding: the newest checkpoint that is whole, and what is wrong with those that are not.

Every check reads the manifest and whether the pieces in it make up each tensor (``coverage.py``). A *fast* one compares
the sizes of the files, too; a *full* one reads them all and compares their hashes, in a few threads, and sees that the
pieces and values in them can be read. No torch: it runs before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from yaml import YAMLError

from paceline.bounded_yaml import load_yaml
from paceline.checkpoint.coverage import check_coverage, piece_problems
from paceline.checkpoint.manifest import MANIFEST, Line, Manifest, Spot, damaged, head_line, newest_line, parse_manifest
from paceline.checkpoint.storage import FileStore, cannot_read, file_in, nothing_there, storage_of
from paceline.checkpoint.values import check_values, decode_with
from paceline.errors import CheckpointError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCheckpoint:
    """The checkpoint that was taken, and newer ones that were not."""

    path: Path
    passed_over: tuple[PassedOver, ...] = ()


def list_checkpoints(folder: Path, storage: FileStore | None = None, own: Line | None = None) -> list[Path]:
    """Returns the checkpoints in ``folder``, oldest first. Whether they are whole, ``verify_checkpoint`` says.

    Those that the run has gone back from come before all others: see ``manifest.py``. ``own`` is the line that a run
    is on, where it may have saved nothing yet.
    """
    spots = spots_in(folder, storage)
    current = newest_line(spots.values(), own)
    ages = {path: (current.has(spot.line, spot.step), spot.age, path.name) for path, spot in spots.items()}
    return sorted(ages, key=lambda path: ages[path])


def spots_in(folder: Path, storage: FileStore | None = None) -> dict[Path, Spot]:
    """Returns where the checkpoints of a folder lie. Reads the head of each manifest.

    One whose head cannot be read counts as of the newest line, so that whoever looks for the newest hears of it.
    """
    storage = storage or storage_of(folder)
    lines: dict[Path, Line | None] = {}
    for path in _step_folders(folder, storage):
        try:
            size = storage.size(path / MANIFEST)
            if size is not None:
                lines[path] = _read_line(file_in(path, MANIFEST), size, storage)
        except (OSError, CheckpointError):  # such as one that nobody may look into: whoever takes it hears why
            lines[path] = None
    known = max((line for line in lines.values() if line is not None), key=lambda line: line.number, default=Line())
    return {path: Spot(line=line or known, step=_step(path)) for path, line in lines.items()}


def _step_folders(folder: Path, storage: FileStore) -> list[Path]:
    return [folder / name for name in storage.names(folder) if step_of(Path(name)) is not None]


def _read_line(path: Path, size: int, storage: FileStore) -> Line | None:
    head = bytearray(min(size, _HEAD_BYTES))
    try:
        storage.read_into(path, [(0, memoryview(head))])
    except (OSError, EOFError):
        return None
    return head_line(bytes(head)) or (None if b'"line"' in head else Line())  # those of before had none


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
    manifest = read_manifest(path, storage)
    check_coverage(path, manifest)
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
        check_values([*manifest.values.values(), *manifest.found.values()])
    except CheckpointError as error:
        yield f"{MANIFEST}: {error.headline}"
    for rank in range(manifest.world):
        name = f"rank-{rank:05d}.json"
        try:
            check_values(parse_json_object(storage.read(file_in(path, name)))["values"])
        except (OSError, ValueError, KeyError, CheckpointError) as error:
            yield f"{name} cannot be read: {str(error).splitlines()[0]}"


def is_whole(path: Path, depth: Depth) -> bool:
    """Says whether a checkpoint can be started from."""
    try:
        verify_checkpoint(path, depth)
    except CheckpointError:
        return False
    return True


def choose_checkpoint(candidates: Sequence[Path], depth: Depth = "full") -> ChosenCheckpoint | None:
    """Returns the newest of some checkpoints, oldest first, that is whole; None without any.

    Raises CheckpointError, with all reasons, if there are some and none is whole.
    """
    passed: list[PassedOver] = []
    for path in reversed(candidates):
        try:
            verify_checkpoint(path, depth)
        except (CheckpointError, OSError) as error:
            passed.append(PassedOver(path=path, reason=str(error).splitlines()[0]))
            continue
        return ChosenCheckpoint(path=path, passed_over=tuple(passed))
    if passed:
        raise CheckpointError("\n  ".join(["no checkpoint is whole", *map(str, passed)]))
    return None


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
    it. ``own`` is the line that the run is on (``manifest.py``), if it is known. Raises CheckpointError if there is
    none, with ``fix`` as what to do, or if the one that is named is damaged. Of several, one whose files are missing
    is never taken, whatever ``depth`` is.
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
    """Returns the best checkpoint of a run, by the metric that its newest one names.

    Raises CheckpointError if nothing was evaluated, if the best one was not kept, or if it is damaged.
    """
    newest = find_checkpoint("auto", run_folder, "fast")
    best = decode_with(read_manifest(newest).values.get("best"), lambda raw, dtype, shape: (len(raw), dtype, shape))
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
    if storage_of(path).size(path / MANIFEST) is not None:
        verify_checkpoint(path, depth)
        return path
    for folder in places_of(path):
        candidates = list_checkpoints(folder, own=own)
        choice = choose_checkpoint(candidates, "fast" if depth == "none" else depth)
        if choice is None:
            continue
        if tell is not None:
            above = [each for each in _step_folders(folder, storage_of(folder)) if _step(each) > _step(choice.path)]
            unfinished = [PassedOver(path=each, reason=_UNFINISHED) for each in above if each not in candidates]
            older = candidates[: candidates.index(choice.path)]
            reason = f"the run has gone back from it, and {choice.path.name} is on its line"
            left = [PassedOver(path=each, reason=reason) for each in older if _step(each) > _step(choice.path)]
            for passed in (*choice.passed_over, *unfinished, *left):
                tell(passed)
        return choice.path
    return None


def _step(path: Path) -> int:
    return step_of(path) or 0
