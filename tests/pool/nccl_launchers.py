"""Launchers of one run on this machine that NCCL takes for hosts, on one GPU; or on Gloo."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import plain_popen
from free_ports import free_port
from nccl_cases import NCCL, mean_losses
from nccl_pool import own_host

from paceline.records.records import StepRecord, read_records
from paceline.run.seen_ranks import STACK_SIGNAL

PATIENCE_S = {"nccl": 55.0, "gloo": 400.0}
LAUNCHER_BACKENDS = [pytest.param("gloo", marks=[pytest.mark.soak, pytest.mark.timeout(600)]), NCCL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How the launchers of a run left, and what they said, in the order of their start."""

    folder: Path
    codes: list[int | None]
    said: list[str]

    @property
    def run(self) -> Path:
        return next(path.parent for path in self.folder.glob("runs/*/config.yaml"))

    def losses(self) -> list[float]:
        paths = sorted((self.run / "records").glob("rank-*.jsonl"))
        return mean_losses([[each for each in read_records(path) if isinstance(each, StepRecord)] for path in paths])

    def told(self) -> str:
        """Returns what is known, for a test that fails."""
        logs = [f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in _logs(self.folder)]
        return "\n".join([f"codes {self.codes}", *self.said, *logs])


class Launchers:
    """The launchers of one run, which is under way."""

    def __init__(self, folder: Path, backend: str, config: str, hosts: int, *, code: str = "", fault: str = "") -> None:
        """``code`` is the module ``user_code`` of the ranks, which find ``fault`` in their environment."""
        folder.mkdir()
        (folder / "run.yaml").write_text(config)
        (folder / "user_code.py").write_text(code)
        self.folder = folder
        command = [sys.executable, "-m", "paceline", "train", "run.yaml"]
        command += ["parallel.device=cpu", "parallel.threads=1"] if backend == "gloo" else []
        if hosts > 1:
            command += ["--nnodes", str(hosts), "--node-ranks", "1", "--rdzv", f"127.0.0.1:{free_port()}"]
        else:
            command += ["parallel.ranks=1"]
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        told = {name: value for name, value in os.environ.items() if name != "RANK"}
        told |= {"FAULT": fault, "PYTHONPATH": path}
        self._outputs = [(folder / f"launcher-{number}.txt").open("wb") for number in range(hosts)]
        self.processes = [
            plain_popen(command, cwd=folder, env={**told, **own_host(number)}, stdout=output, stderr=output)
            for number, output in enumerate(self._outputs)
        ]

    def wait(self, deadline: float) -> Left:
        """Waits until all have left; those that have not by the deadline are asked where they stand, and ended."""
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        if None in codes:
            _ask_for_stacks(self.folder)
        self.close()
        said = [Path(output.name).read_text(errors="replace") for output in self._outputs]
        return Left(folder=self.folder, codes=codes, said=said)

    def close(self) -> None:
        for process, output in zip(self.processes, self._outputs, strict=True):
            process.kill()
            process.wait()
            output.close()


@contextlib.contextmanager
def until_left(started: dict[str, Launchers], backend: str) -> Iterator[dict[str, Left]]:
    """Yields what all of these runs have left; none of their launchers outlives this."""
    try:
        deadline = time.monotonic() + PATIENCE_S[backend]
        yield {name: each.wait(deadline) for name, each in started.items()}
    finally:
        for each in started.values():
            each.close()


def _logs(folder: Path) -> list[Path]:
    return sorted([*folder.glob("runs/*/logs/rank-*.log"), *folder.glob("runs/*/health/process-*.stack")])


def _ask_for_stacks(folder: Path) -> None:
    for path in folder.glob("runs/*/health/process-*.stack"):
        try:
            os.kill(int(path.stem.removeprefix("process-")), STACK_SIGNAL)
        except OSError:
            continue
    time.sleep(0.5)
