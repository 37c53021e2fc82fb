"""``paceline`` again and again, each in a process of its own, forked from one that has torch and more loaded.

    with warm_runs(["transformers"]) as runs:
        done = runs.run(["train", "config.yaml"], is_rank=True)

A process holds a GPU's memory until it ends, so that what one run leaves is not in the way of the next. As
``paceline train`` does, one server loads the libraries, and forks (``paceline/run/warm.py``). ``is_rank`` gives the run
the environment that ``torchrun --nproc-per-node 1`` would: it is the rank itself, and starts no server of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import PIPE
from typing import Any

from paceline.cli.app import run_command
from paceline.records.records import StepRecord, read_records
from paceline.run.warm import WarmRanks, warm_ranks
from paceline.search.expectation import read_expectation
from paceline.units import GIB
from paceline_bench.timing import BenchRecord

FOLDER = Path(__file__).parent
LIBRARIES = ("warm_runs", "paceline.run.worker", "paceline.rehearse.prediction", "torch._dynamo")
LONGEST_S = 120.0  # that one of them takes
_TOLD = 600  # characters of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    out: str
    errors: str
    took_s: float

    @property
    def told(self) -> str:
        """The end of what it said; of a run that broke down, from the last error on."""
        text = self.errors or self.out
        found = list(re.finditer(r"^(?:torch\.|paceline: |\w+Error)", text, re.MULTILINE))
        return text[found[-1].start() :][:_TOLD] if found else text[-_TOLD:]

    @property
    def ran_out(self) -> bool:
        """Whether the memory of a GPU was not enough, or the run was refused because it would not be."""
        return bool(self.code) and bool(re.search("out ?of ?memory", self.errors + self.out, re.IGNORECASE))


@dataclass(frozen=True, slots=True)
class WarmRuns:
    server: WarmRanks | None

    def run(self, arguments: Sequence[str], *, is_rank: bool = False) -> Done:
        """Runs ``paceline`` with arguments; without a server (another system than Linux) in a new process."""
        command = [Path(__file__).stem, *arguments]
        own = ["-m", *command] if self.server is None else self.server.arguments(command)
        started = time.monotonic()
        environment = _environment(is_rank)
        with subprocess.Popen([sys.executable, *own], env=environment, stdout=PIPE, stderr=PIPE, text=True) as process:
            try:
                out, errors = process.communicate(timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # which ends the forked one as well
                out, errors = process.communicate()
                errors += f"\nTimeoutError: it had not ended after {LONGEST_S:g} s"
        took_s = round(time.monotonic() - started, 2)
        return Done(code=process.returncode, out=out, errors=errors, took_s=took_s)

    def predict(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Returns what ``paceline predict --json`` says; that a step does not fit is a prediction as well."""
        done = self.run(["predict", *arguments, "--json"])
        try:
            found: dict[str, Any] = json.loads(done.out)
        except ValueError:
            raise RuntimeError(f"paceline predict {' '.join(arguments)}: {done.told}") from None
        return found | {"took_s": done.took_s}


@contextlib.contextmanager
def warm_runs(libraries: Sequence[str] = ()) -> Iterator[WarmRuns]:
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path  # so that runs find this module, and the models beside it
    with warm_ranks([*LIBRARIES, *libraries]) as server:
        yield WarmRuns(server)


def _environment(is_rank: bool) -> dict[str, str]:
    if not is_rank:
        return dict(os.environ)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**os.environ, **alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of works that wait for processes, as many at a time as there are cores; errors as values."""

    def guarded(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # its row says so, and the others go on
            return error

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        return list(pool.map(guarded, works))


def found_in(folder: Path) -> dict[str, Any]:
    """Returns what a run's folder tells: measured, and predicted before the start. The first step is left out."""
    row: dict[str, Any] = {}
    expected = read_expectation(folder) if folder.exists() else None
    if expected is not None and expected.step_s and expected.memory_bytes:
        row["predicted_step_s"] = round(expected.step_s, 4)
        row["predicted_gib"] = round(expected.memory_bytes / GIB, 2)
    path = folder / "records" / "rank-0.jsonl"
    steps = [each for each in read_records(path) if isinstance(each, StepRecord)] if path.exists() else []
    if not steps:
        return row
    timed = steps[1:] or steps
    row |= {"steps": len(steps), "first_step_s": round(steps[0].step_s, 3)}
    row["step_s"] = round(median(each.step_s for each in timed), 4)
    row["data_s"] = round(median(each.data_s for each in timed), 4)  # of it waited for the batch
    row["peak_gib"] = round(max(each.peak_bytes or 0 for each in steps) / GIB, 3)
    row["reserved_gib"] = round(max(each.reserved_bytes or 0 for each in steps) / GIB, 3)
    row["mfu"] = None if timed[-1].mfu is None else round(timed[-1].mfu, 4)
    row["losses"] = [each.loss for each in steps]
    return row


def with_errors(row: dict[str, Any]) -> dict[str, Any]:
    """Adds by how much predictions are off, where both are there; of a run of one step, that is not known."""
    if row.get("steps", 0) > 1 and "predicted_step_s" in row:
        row["step_error"] = round(row["predicted_step_s"] / row["step_s"] - 1, 4)
        if row["peak_gib"]:
            row["memory_error"] = round(row["predicted_gib"] / row["peak_gib"] - 1, 4)
    return row


def write_row(path: Path, row: dict[str, Any], *, name: str, config: dict[str, Any]) -> None:
    """Puts a row in the place of the one of its case, or at the end; a run that is cut off keeps what it has."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [each for each in rows if each["case"] != row["case"]] + [row]
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    BenchRecord(name=name, command=command, rows=rows, config=config).write(path)


def main() -> None:
    run_command()


if __name__ == "__main__":
    main()
