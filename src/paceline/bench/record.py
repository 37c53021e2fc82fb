"""One JSON record per benchmark: what ran where, on which versions, and what came out."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """A benchmark's result with everything needed to repeat it."""

    name: str
    command: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    time: str

    def write(self, path: Path) -> None:
        """Writes the record as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """Returns the record as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def make_record(name: str, command: str, rows: list[dict[str, Any]], config: dict[str, Any]) -> BenchRecord:
    """Puts a result together with the machine and the versions it was measured on."""
    return BenchRecord(
        name=name,
        command=command,
        rows=rows,
        config=config,
        hardware=describe_hardware(),
        versions={"paceline": __version__, "torch": torch.__version__, "python": platform.python_version()},
        commit=_commit(),
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def describe_hardware() -> dict[str, Any]:
    """Names the processor, its cores, and the GPU if there is one."""
    found: dict[str, Any] = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
