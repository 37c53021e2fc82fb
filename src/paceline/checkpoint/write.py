"""Writing: every rank its own files, under a temporary name, and one rename when all are there.

    .step-00000100.<token>/            made by whoever comes first; no other attempt has the token
      rank-00000.f32.safetensors       a rank's share of what it holds, one file for each dtype; of a large share
                                       several, f32-0 and so on: one thread writes about a gigabyte a second
      rank-00000.json                  when these are there: what is in them, their hashes, and the rank's own values
      manifest.json                    when all ranks' are there: rank 0 merges them
    step-00000100/                     the rename that makes it a checkpoint

A rank knows by itself what it writes: its shards, and of those that n ranks hold alike the n-th part. Nothing is sent.
Memory: one chunk of 16 MiB beside the tensors. Written once over all ranks: parameters + optimizer state.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint import manifest
from paceline.checkpoint.formats import coverage_problems
from paceline.checkpoint.storage import FileStore, LocalFiles, num_threads, put_in_place
from paceline.checkpoint.tensors import Progress, Stream, dtype_code, encode, file_chunks, flat_view, ignore_progress
from paceline.errors import CheckpointError
from paceline.shards import Region, Shard

_SMALL_BYTES = 2**16  # what several ranks hold is cut among them, unless it is small
_LARGE_BYTES = 2**26  # of a file, beyond which several threads write one each


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Where a checkpoint goes, for one rank of the attempt that ``token`` names."""

    folder: Path
    step: int
    rank: int
    world: int
    token: str
    storage: FileStore = field(default_factory=LocalFiles)

    @property
    def stem(self) -> str:  # of the names of this rank's files
        return f"rank-{self.rank:05d}"

    @property
    def final(self) -> Path:
        return self.folder / f"step-{self.step:08d}"

    @property
    def partial(self) -> Path:
        return self.folder / f".{self.final.name}.{self.token}"


def own_shares(shards: Iterable[Shard]) -> list[Shard]:
    """Returns what this rank writes, as flat tensors: of what several hold alike, its part of it."""
    shares: dict[str, Shard] = {}
    for shard in shards:
        if shard.copy is None or shard.name in shares:
            continue
        interval = own_interval(shard.name, shard.region, shard.tensor.element_size(), shard.copy, shard.copies)
        if interval is not None:
            region, flat = shard.region.narrow(*interval), flat_view(shard.tensor, shard.region)[slice(*interval)]
            shares[shard.name] = Shard(name=shard.name, region=region, tensor=flat)
    return list(shares.values())


def own_interval(name: str, region: Region, itemsize: int, copy: int, copies: int) -> tuple[int, int] | None:
    """Returns which elements one of some ranks writes of a region that all of them hold; None: another has them."""
    size = region.size
    if 0 in region.shape:
        return 0, 0
    if size * itemsize < _SMALL_BYTES:
        return (0, size) if size and zlib.crc32(name.encode()) % copies == copy else None
    first, last = copy * size // copies, (copy + 1) * size // copies
    return (first, last) if first < last else None


def plain_state(state: manifest.State) -> manifest.State:
    """Copies all of a state but its tensors, as JSON values. Raises CheckpointError for what cannot be saved."""
    return replace(
        state,
        shards=(),
        values={name: encode(value, name) for name, value in state.values.items()},
        own=encode(dict(state.own), "this rank's state"),
        found={name: encode(value, name) for name, value in state.found.items()},
        about=json.loads(json.dumps(dict(state.about))),
    )


def write_part(target: SaveTarget, shares: Iterable[Shard], plain: manifest.State) -> int:
    """Writes this rank's files as ``write_rank`` does. Raises CheckpointError, naming the cause, if it cannot."""
    try:
        return write_rank(target, map(Stream.of, shares), plain, ignore_progress, writers=num_threads())
    except OSError as error:
        raise unwritten(target, error) from error


def write_rank(
    target: SaveTarget, streams: Iterable[Stream], plain: manifest.State, progress: Progress, *, writers: int = 1
) -> int:
    """Writes one rank's files, and last the one that says what is in them; returns their size.

    At most ``writers`` threads read the streams, each of them from its first to its last byte.
    """
    storage, stem = target.storage, target.stem
    storage.make_folder(target.partial)
    groups: dict[str, list[Stream]] = {}
    for stream in streams:
        groups.setdefault(dtype_code(stream.dtype), []).append(stream)
    named: dict[str, Sequence[Stream]] = {}
    for code, group in groups.items():
        parts = _parts(group, writers)
        for number, part in enumerate(parts):
            named[f"{stem}.{code.lower()}{f'-{number}' if len(parts) > 1 else ''}.safetensors"] = part

    def write(name: str) -> manifest.SavedFile:
        return storage.write(target.partial / name, file_chunks(named[name], progress=progress))

    with ThreadPoolExecutor(writers) as pool:
        files = dict(zip(named, (pool.map if writers > 1 else map)(write, named), strict=True))
    tensors: dict[str, Any] = {}
    for name, part in named.items():
        for each in part:
            saved = (manifest.SavedPiece(file=name, region=each.region),)
            tensors[each.name] = manifest.tensor_entry(
                manifest.SavedTensor(shape=each.region.shape, dtype=dtype_code(each.dtype), pieces=saved)
            )
    told = {"rank": target.rank, "values": plain.own, "found": plain.found, "files": manifest.files_entry(files)}
    told |= {"tensors": tensors, "step": plain.step}
    written = storage.write(target.partial / f".{stem}.json", [json.dumps(told, allow_nan=False).encode()])
    storage.rename(target.partial / f".{stem}.json", target.partial / f"{stem}.json")
    return sum(file.num_bytes for file in files.values()) + written.num_bytes


def _parts(streams: Sequence[Stream], most: int) -> list[Sequence[Stream]]:
    """Returns the streams in order, in parts of about as many bytes each, where they are large."""
    total = sum(each.num_bytes for each in streams)
    number = max(1, min(most, len(streams), -(-total // _LARGE_BYTES)))
    parts: list[list[Stream]] = [[] for _ in range(number)]
    before = 0
    for each in streams:
        middle = before + each.num_bytes // 2
        parts[min(middle * number // max(total, 1), number - 1)].append(each)
        before += each.num_bytes
    return [part for part in parts if part]


def commit(target: SaveTarget, plain: manifest.State) -> None:
    """Merges the parts of all ranks into the manifest, and gives the checkpoint its name. Rank 0 calls it."""
    storage = target.storage
    try:
        names = [f"rank-{rank:05d}.json" for rank in range(target.world)]
        merged = manifest.merge_parts({name: storage.read(target.partial / name) for name in names}, plain)
        for each, tensor in merged.tensors.items():
            for problem in coverage_problems(each, tensor):  # a bug of who made the shards
                raise CheckpointError(f"cannot write a checkpoint to {target.final}: {each}: {problem}")
        storage.write(target.partial / manifest.MANIFEST, [manifest.manifest_text(merged).encode()])
        storage.sync_folder(target.partial)
        put_in_place(storage, target.partial, target.final)
    except OSError as error:
        raise unwritten(target, error) from error


def discard(target: SaveTarget) -> None:
    """Removes what was written of a checkpoint that will not be, as far as that works: the next start removes it."""
    with contextlib.suppress(OSError):
        target.storage.remove(target.partial)


def unwritten(target: SaveTarget, error: object) -> CheckpointError:
    return CheckpointError(f"cannot write a checkpoint to {target.final}: {error}\n  older checkpoints are intact")
