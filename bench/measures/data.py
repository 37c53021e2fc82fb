"""What it takes to make tokens and to read them: ``paceline data prepare``, and a run's wait for its data.

The text is that of Python's own library, again and again. Preparing it is timed in turns, each in fresh processes:

    tokenizer   its own speed on all cores: the text is in memory, is encoded, and is dropped. Hugging Face's encodes
                batches with threads of its own; bytes and characters are encoded by one process for each core
    paceline    the command from its start to its end: it reads, encodes, hashes and writes

    ratio       speed of the command, as a share of the tokenizer's in the same round; at least 0.8 is the goal for
                tokenizers of Hugging Face. Bytes and characters are copied rather than encoded: there the start counts
    on cores    the same of processor time, which other work on the machine disturbs less
    memory      the most that one process of the command held

Reading is measured in the records of a training run: the share of its steps that it waits for data.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.config import config_from_dict
from paceline.data.prepare import PrepareOptions, prepare
from paceline.data.tokenizers import TOKENIZER, ByteTokenizer, CharTokenizer
from paceline.errors import UsageError
from paceline.records.records import Record, StepRecord
from paceline.run.function_ranks import run_processes
from paceline.train.assemble import build_trainer
from paceline.units import MIB
from paceline.untrusted import parse_json_object
from paceline_bench.timing import ratios_to, rotate

OWN, COMMAND = "tokenizer", "paceline"
GOALS = {"ratio": 0.8, "data_share": 0.01}
_BLOCK = 2**16
_BLOCKS_AT_ONCE = 32
_TRAINED_ON, _VOCABULARY = 4 * MIB, 16384
_WARM_UP = 5
_COPIED = ("bytes", "char")
_TIMEOUT_S = 3600.0

# A process of its own counts only the command and its processes; memory is that of the largest of them.
_TIMED = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE)
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
if done.returncode:
    sys.exit(done.returncode)
values = {"seconds": seconds, "processor_s": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss}
print(json.dumps(values), done.stdout.decode(), sep="\\n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareWorkload:
    """How much text is prepared, how often, and by which tokenizers: bytes, char, bpe, or a folder."""

    mib: int = 64
    rounds: int = 3
    tokenizers: tuple[str, ...] = ("bpe", "char", "bytes")
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTurn:
    """What one turn took, by the clock and on all cores, and the tokens that it made."""

    seconds: float
    processor_s: float
    tokens: int
    memory_bytes: int | None = None


def bench_prepare(work: PrepareWorkload, tell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Prepares the text with each tokenizer in turns; returns a row for each arm."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="prepare-", dir=work.folder) as name:
        folder = Path(name)
        text = write_library_text(folder / "library.txt", work.mib * MIB)
        for tokenizer in work.tokenizers:
            chosen = train_bpe(folder / "bpe", text) if tokenizer == "bpe" else tokenizer
            turns: dict[str, list[LoaderTurn]] = {OWN: [], COMMAND: []}
            for arm in rotate([OWN, COMMAND], work.rounds):
                turn = time_own(text, chosen) if arm == OWN else time_command(text, chosen, folder / "tokens")
                turns[arm].append(turn)
                tell(f"{tokenizer}, {arm}: {turn.seconds:.2f} s")
            rows += make_rows(tokenizer, text.stat().st_size, turns)
    return rows


def make_rows(tokenizer: str, num_bytes: int, turns: Mapping[str, Sequence[LoaderTurn]]) -> list[dict[str, Any]]:
    """Returns a row for each arm. A ratio is that of speeds: more is faster."""
    rows = []
    for arm, found in turns.items():
        shares = ratios_to([turn.seconds for turn in turns[OWN]], [turn.seconds for turn in found])
        on_cores = ratios_to([turn.processor_s for turn in turns[OWN]], [turn.processor_s for turn in found])
        seconds = statistics.median(turn.seconds for turn in found)
        row: dict[str, Any] = {
            "tokenizer": tokenizer,
            "arm": arm,
            "peer": OWN,
            "median_s": round(seconds, 3),
            "mb_per_s": round(num_bytes / 1e6 / seconds, 3),
            **{key: round(value, 4) for key, value in shares.items()},
            "processor_s": round(statistics.median(turn.processor_s for turn in found), 3),
            "processor_ratio": round(on_cores["ratio"], 4),
            "tokens": found[0].tokens,
            "memory_bytes": max((turn.memory_bytes for turn in found if turn.memory_bytes is not None), default=None),
        }
        rows.append({**row, "goal": GOALS["ratio"] if arm == COMMAND and tokenizer not in _COPIED else None})
    return rows


def write_library_text(path: Path, num_bytes: int) -> Path:
    """Writes about so many bytes of the sources of Python's library, again and again."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    texts = [each for each in sources if "site-packages" not in each.parts and each.stat().st_size]
    with path.open("wb") as file:
        for source in cycle(texts):
            content = source.read_bytes()
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:  # a few are there to test other encodings
                continue
            file.write(content[: num_bytes - file.tell()].decode("utf-8", "ignore").encode())
            if num_bytes - file.tell() < len("\U0010ffff".encode()):
                return path
    return path


def train_bpe(folder: Path, text: Path) -> str:
    """Trains a tokenizer of GPT-2's kind on the text's first megabytes; returns its folder."""
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UsageError(
            "bpe needs the package tokenizers, which is not installed\n  it is the tokenizer that is timed\n"
            "  pip install 'paceline[data]', or time the others: --tokenizers char,bytes"
        ) from error
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(_blocks(text, 0, _TRAINED_ON), trainer)
    folder.mkdir()
    model.save(str(folder / TOKENIZER))
    return str(folder)


def time_command(text: Path, tokenizer: str, output: Path) -> LoaderTurn:
    """Runs ``paceline data prepare`` in a process of its own."""
    command = [sys.executable, "-m", "paceline", "data", "prepare", str(text), "--tokenizer", tokenizer]
    done = subprocess.run(
        [sys.executable, "-c", _TIMED, *command, "--output", str(output), "--force", "--json"],
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise UsageError(f"paceline data prepare has ended with code {done.returncode}\n  its message is above")
    first, _, printed = done.stdout.partition(b"\n")
    found = parse_json_object(first)
    return LoaderTurn(
        seconds=found["seconds"],
        processor_s=found["processor_s"],
        tokens=parse_json_object(printed)["tokens"] - 1,  # less the end token
        memory_bytes=found["memory"] * (1 if sys.platform == "darwin" else 1024),
    )


def time_own(text: Path, tokenizer: str) -> LoaderTurn:
    """Times the tokenizer alone, on all cores: of one process with threads, or of one process for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes, threads = (cores, 1) if tokenizer in _COPIED else (1, cores)
    found = run_processes(_encode_alone, processes, args=(text, tokenizer), threads=threads, timeout_s=_TIMEOUT_S)
    return LoaderTurn(
        seconds=max(each.seconds for each in found),
        processor_s=math.fsum(each.processor_s for each in found),
        tokens=sum(each.tokens for each in found),
    )


def _encode_alone(comm: Communicator, path: Path, name: str) -> LoaderTurn:
    size = path.stat().st_size
    blocks = list(_blocks(path, size * comm.rank // comm.size, size * (comm.rank + 1) // comm.size))
    encode = _own_encoder(name, blocks)
    encode(blocks[:1])
    comm.barrier()
    tokens, start, processor = 0, time.perf_counter(), time.process_time()
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        tokens += sum(map(len, encode(blocks[first : first + _BLOCKS_AT_ONCE])))
    return LoaderTurn(seconds=time.perf_counter() - start, processor_s=time.process_time() - processor, tokens=tokens)


def _own_encoder(name: str, blocks: list[str]) -> Callable[[list[str]], Sequence[Any]]:
    if name == "bytes":
        return ByteTokenizer().encode_many
    if name == "char":
        return CharTokenizer("".join(sorted(set().union(*blocks)))).encode_many
    library = importlib.import_module("tokenizers")
    batch: Callable[..., Sequence[Any]] = library.Tokenizer.from_file(str(Path(name) / TOKENIZER)).encode_batch_fast
    return partial(batch, add_special_tokens=False)  # the faster of its two: it keeps no offsets


def _blocks(path: Path, first: int, last: int) -> Iterator[str]:
    """Yields the text between two bytes of a file in blocks of some lines."""
    with path.open("rb") as file:
        file.seek(first)
        while (place := file.tell()) < last and (content := file.read(min(_BLOCK, last - place))):
            yield (content + file.readline()).decode("utf-8", "ignore")


# Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensWorkload:
    """Which GPT reads prepared tokens, with how many loader workers, and for how many steps."""

    model: str = "gpt-11m"
    batch: int = 4
    context: int = 128
    steps: int = 30
    workers: tuple[int, ...] = (0, 1)
    mib: int = 16


def bench_tokens(work: TokensWorkload, tell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Trains on prepared tokens, on one rank of one thread; returns a row for each number of workers."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="tokens-") as name:
        text = write_library_text(Path(name) / "library.txt", work.mib * MIB)
        prepare(PrepareOptions(sources=(text,), output=Path(name) / "tokens", tokenizer="bytes"))
        for workers in work.workers:
            tell(f"{work.model}, {workers} workers ...")
            rows.append(_time_reading(work, workers, Path(name) / "tokens"))
    return rows


def _time_reading(work: TokensWorkload, workers: int, folder: Path) -> dict[str, Any]:
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "size": work.model, "context": work.context},
            "data": {"kind": "tokens", "path": str(folder), "workers": workers, "eval_fraction": 0.0},
            "train": {"steps": _WARM_UP + work.steps, "global_batch": work.batch},
        }
    )
    kept, threads = _Kept(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        build_trainer(config, SoloCommunicator(torch.device("cpu")), sink=kept).run()
    finally:
        torch.set_num_threads(threads)
    return {"model": work.model, "workers": workers, **data_share(kept.steps[_WARM_UP:])}


def data_share(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Returns what steps took, and which part of all that time they waited for data."""
    waited = [step.data_s for step in steps]
    return {
        "median_ms": round(1e3 * statistics.median(step.step_s for step in steps), 3),
        "data_ms": round(1e3 * statistics.median(waited), 4),
        "most_data_ms": round(1e3 * max(waited), 4),
        "data_share": round(math.fsum(waited) / math.fsum(step.step_s for step in steps), 6),
        "goal": GOALS["data_share"],
        "num_steps": len(steps),
    }


class _Kept:
    """Keeps the records of steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def write(self, *records: Record) -> None:
        self.steps += [record for record in records if isinstance(record, StepRecord)]

    def flush(self) -> None:
        """Has nothing to hand over."""

    def close(self) -> None:
        """Has nothing to let go of."""
