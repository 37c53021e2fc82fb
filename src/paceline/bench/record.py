"""One JSON record per benchmark: what ran where, on which versions, and what came out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import gmtime, strftime
from typing import Any

import torch

from paceline import __version__


def describe_hardware() -> dict[str, Any]:
    """Names the processor, its cores, and the GPU if there is one."""
    found: dict[str, Any] = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)  # nosec B607  # git of the PATH, as in a shell
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """A benchmark's result, with the machine and the versions it was measured on: what is needed to repeat it."""

    name: str
    command: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    hardware: dict[str, Any] = field(default_factory=describe_hardware)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "paceline": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    )
    commit: str = field(default_factory=_commit)
    time: str = field(default_factory=lambda: strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()))

    def write(self, path: Path) -> None:
        """Writes the record as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """Returns the record as JSON text."""
        return json.dumps(asdict(self), indent=2)
