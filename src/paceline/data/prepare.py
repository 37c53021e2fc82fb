"""From text to files of tokens, in parallel: ``paceline data prepare``.

Each piece of the sources becomes one shard, made by one process: read, encode, hash, write. What is done is noted in
``.progress``, so that a second call goes on where the first was ended. A call with other sources or options begins anew
what has failed, and is refused where the first was ended from outside. The manifest comes last.

    memory   of each process: a few MiB of text and its tokens, whatever the sources have
    order    that of the sources and the documents in them, for any number of processes
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.data import tokenizers
from paceline.data.documents import Piece, Text, cut_pieces, find_sources, read_piece
from paceline.data.token_files import MANIFEST, DataManifest, TokenShard, file_dtype
from paceline.errors import DataError, UsageError
from paceline.untrusted import parse_json_object, read_regular

_PROGRESS, _PLAN = ".progress", "plan.json"
_FAILED = "failed"  # what it stopped at is in the sources or the options, and another call may differ in them
_LEAST_PIECE, _MOST_PIECE = 2**20, 2**26
_PIECES_A_WORKER = 16  # the last ones leave a core without work for at most a piece
_AT_ONCE = 2**20  # characters that are encoded in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What is asked for. ``tokenizer`` is bytes, char, or a folder."""

    sources: tuple[Path, ...]
    output: Path
    tokenizer: str
    field: str = "text"
    workers: int = 1
    on_error: Literal["stop", "skip"] = "stop"
    may_replace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDone:
    shard: TokenShard
    bytes: int
    skipped: int


def total_bytes(options: PrepareOptions) -> int:
    return sum(piece.bytes for piece in cut_pieces(find_sources(list(options.sources)), _MOST_PIECE))


def prepare(options: PrepareOptions, progress: Callable[[int], None] = lambda _: None) -> DataManifest:
    """Makes the files of tokens. ``progress`` hears of bytes of text that are done. Raises ``DataError``."""
    if options.workers < 1:
        raise UsageError(f"--workers {options.workers}\n  at least one process reads")
    sources = find_sources(list(options.sources))
    total = sum(path.stat().st_size for path in sources)
    if not total:
        raise DataError(f"{sources[0]} is empty\n  there is no text to prepare\n  give other sources")
    wanted = total // (_PIECES_A_WORKER * options.workers)
    plan = _plan(options, sources, min(max(wanted, _LEAST_PIECE), _MOST_PIECE))
    notes = _begin(options, plan)
    pieces = cut_pieces(sources, plan["piece_bytes"])
    done = {number: known for number in range(len(pieces)) if (known := _noted(notes, options.output, number))}
    for each in done.values():
        progress(each.bytes)
    try:
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
            tokenizer = _tokenizer(options, pieces, partial(_run, pool), notes)
            work = partial(_encode_piece, tokenizer=tokenizer, options=options)
            for number, found in _run(pool, work, set(range(len(pieces))) - done.keys(), pieces):
                done[number] = found
                progress(found.bytes)
    except BrokenProcessPool as error:
        what = f"one of {options.workers} processes that encode text ended before its work"
        rule = "each imports the script that it was started from, and has memory for some MiB of text and its tokens"
        fix = 'call it under if __name__ == "__main__":, or take fewer workers'
        raise DataError(f"{what}\n  {rule}\n  {fix}; the same call goes on where this one was") from error
    except DataError:
        (notes / _FAILED).touch()
        raise
    manifest = DataManifest(
        dtype=file_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        end_token=tokenizer.end_token,
        tokenizer=tokenizer.name,
        skipped=sum(each.skipped for each in done.values()),
        source=tuple(map(str, sources)),
        shards=tuple(done[number].shard for number in range(len(pieces))),
    )
    tokenizer.save(options.output)
    manifest.write(options.output)
    shutil.rmtree(notes)
    return manifest


def _run(
    pool: ProcessPoolExecutor, work: Callable[..., Any], numbers: Iterable[int], pieces: list[Piece]
) -> Iterator[tuple[int, Any]]:
    """Yields what a piece of work gave for each piece, as they come; at the first error, or Ctrl-C, begins no more."""
    waiting = {pool.submit(work, number, pieces[number]): number for number in numbers}
    try:
        for future in as_completed(waiting):
            yield waiting.pop(future), future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _plan(options: PrepareOptions, sources: list[Path], piece_bytes: int) -> dict[str, Any]:
    """Returns what decides the shards; another plan makes others. Of one that was begun, the pieces are kept."""
    is_folder = options.tokenizer not in ("bytes", "char")
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in sources]
    tokenizer = str(Path(options.tokenizer).absolute()) if is_folder else options.tokenizer
    plan: dict[str, Any] = {"sources": files, "tokenizer": tokenizer, "field": options.field}
    plan |= {"on_error": options.on_error, "piece_bytes": piece_bytes}
    try:
        begun = parse_json_object(read_regular(options.output / _PROGRESS / _PLAN))
    except (OSError, ValueError):
        return plan
    return begun if {**begun, "piece_bytes": piece_bytes} == plan else plan


def _begin(options: PrepareOptions, plan: dict[str, Any]) -> Path:
    output, notes, text = options.output, options.output / _PROGRESS, json.dumps(plan)
    is_other = (notes / _PLAN).exists() and (notes / _PLAN).read_text(encoding="utf-8") != text
    is_asked = options.may_replace and ((output / MANIFEST).exists() or notes.is_dir())
    if is_asked or (is_other and (notes / _FAILED).exists()):
        for path in (
            *output.glob("tokens-*.bin*"),
            output / MANIFEST,
            *(output / name for name in tokenizers.TOKENIZER_FILES),
        ):
            path.unlink(missing_ok=True)
        shutil.rmtree(notes, ignore_errors=True)
        is_other = False
    if (output / MANIFEST).exists():
        what, fix = "holds tokens already", "give another --output, or --force to replace them"
    elif is_other:
        what, fix = ("was begun with other sources or options", "call it as before, or give --force to begin anew")
    elif output.is_dir() and any(output.iterdir()) and not notes.is_dir():
        what, fix = "is not empty", "give a new folder"
    else:
        notes.mkdir(parents=True, exist_ok=True)
        (notes / _PLAN).write_text(text, encoding="utf-8")
        (notes / _FAILED).unlink(missing_ok=True)
        return notes
    raise DataError(f"--output {output} {what}\n  a folder holds the tokens of one preparation\n  {fix}")


def _noted(notes: Path, output: Path, number: int) -> PieceDone | None:
    try:
        values = parse_json_object(read_regular(notes / f"{number}.json"))
        found = PieceDone(**{**values, "shard": TokenShard(**values["shard"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if (output / found.shard.file).is_file() else None


def _tokenizer(
    options: PrepareOptions, pieces: list[Piece], run: Callable[..., Any], notes: Path
) -> tokenizers.Tokenizer:
    if options.tokenizer == "bytes":
        return tokenizers.ByteTokenizer(has_end=True)
    if options.tokenizer != "char":
        return tokenizers.open_tokenizer(Path(options.tokenizer))
    if (notes / "vocabulary.json").is_file():
        return tokenizers.open_tokenizer(notes)
    characters: set[str] = set()
    for _, found in run(partial(_characters, options=options), range(len(pieces)), pieces):
        characters.update(found)
    tokenizer = tokenizers.CharTokenizer("".join(sorted(characters)), has_end=True)
    tokenizer.save(notes)
    return tokenizer


def _characters(_: int, piece: Piece, *, options: PrepareOptions) -> str:
    is_found = np.zeros(sys.maxunicode + 1, dtype=bool)
    for each in read_piece(piece, options.field, _Skipped(options.on_error)):
        is_found[tokenizers.code_points(each.text)] = True
    return "".join(map(chr, np.flatnonzero(is_found).tolist()))


def _encode_piece(number: int, piece: Piece, *, tokenizer: tokenizers.Tokenizer, options: PrepareOptions) -> PieceDone:
    name, skipped = f"tokens-{number:05d}.bin", _Skipped(options.on_error)
    part, known = options.output / f"{name}.part", hashlib.sha256()
    tokens = documents = 0
    end = np.array([] if tokenizer.end_token is None else [tokenizer.end_token], dtype=np.uint32)
    with part.open("wb") as file:
        for texts in _batches(read_piece(piece, options.field, skipped)):
            encoded = tokenizer.encode_many([each.text for each in texts])
            rows: list[Any] = []
            for row, each in zip(encoded, texts, strict=True):
                rows += [row, end] if each.ends else [row]
                documents += each.ends
            content = np.concatenate(rows, dtype=file_dtype(tokenizer.vocab_size), casting="unsafe")
            known.update(content.data)
            file.write(content.data)
            tokens += len(content)
    part.replace(options.output / name)
    shard = TokenShard(file=name, tokens=tokens, documents=documents, sha256=known.hexdigest())
    done = PieceDone(shard=shard, bytes=piece.bytes, skipped=skipped.count)
    note = options.output / _PROGRESS / f"{number}.json"
    note.with_suffix(".part").write_text(json.dumps(asdict(done)), encoding="utf-8")
    note.with_suffix(".part").replace(note)
    return done


def _batches(texts: Iterator[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text.text)
        if held >= _AT_ONCE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class _Skipped:
    def __init__(self, on_error: Literal["stop", "skip"]) -> None:
        self._on_error = on_error
        self.count = 0

    def __call__(self, what: Callable[[], str]) -> None:
        if self._on_error == "stop":
            rule = "every document is text"
            raise DataError(f"{what()}\n  {rule}\n  mend it, or leave such ones out with --on-error skip")
        self.count += 1
