"""The full state of a run, saved so that it is either there whole or not at all.

    checkpoints/step-00000100/
      state.pt          model, optimizer, position in the data, random states of every rank
      manifest.json     written last; names the schema, the step, and the size and hash of state.pt

A checkpoint is written under a temporary name and renamed when it is complete, so a kill at any moment leaves the older
ones intact. A folder without a valid manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from paceline.errors import CheckpointError

SCHEMA_VERSION = 1
_PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Everything that training continues from. ``random`` has one entry a rank.

    ``extra`` is for whoever saves: plain values that training itself does not need, such as an epoch's loss.
    """

    step: int
    position: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    random: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(folder: Path, state: TrainingState, *, keep: int | None = None) -> Path:
    """Writes a checkpoint atomically into ``folder``, then removes others until the newest ``keep`` are left.

    The one just written always stays, also in a folder with later steps of a run that was taken up further back.
    Raises CheckpointError when it cannot be written, whatever the cause; what was there before is then still there.
    """
    final = folder / f"{_PREFIX}{state.step:08d}"
    partial = folder / f".{final.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed: containers count pids from 1
        partial.mkdir()
        payload = {name: getattr(state, name) for name in TrainingState.__slots__}
        _write(partial / "state.pt", payload)
        manifest = {
            "schema": SCHEMA_VERSION,
            "step": state.step,
            "position": state.position,
            "world_size": len(state.random),
            "bytes": (partial / "state.pt").stat().st_size,
            "sha256": _digest(partial / "state.pt"),
        }
        _write_text(partial / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        _replace(final, partial)
    except Exception as error:  # torch raises RuntimeError for a full disk, and pickle what it likes
        shutil.rmtree(partial, ignore_errors=True)
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"cannot write a checkpoint to {final}: {cause}\n  older checkpoints are intact"
        ) from error
    if keep:
        _remove([path for path in list_checkpoints(folder) if path != final][: 1 - keep or None])
    return final


def copy_checkpoint(path: Path, name: str) -> Path:
    """Copies a checkpoint to the folder ``name`` beside it, which retention leaves alone; replaces an older copy.

    The copy is made under a temporary name, so a kill while it is made leaves the older one. A kill between the two
    renames leaves the older one under the name ``.<name>.old``.
    """
    final = path.parent / name
    partial = path.parent / f".{name}.{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(path, partial)
        _replace(final, partial)
    except OSError as error:  # shutil.Error is one
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot copy {path} to {final}: {error}\n  {path} itself is complete") from error
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / "manifest.json").is_file())


def load_checkpoint(path: Path) -> TrainingState:
    """Reads a checkpoint and checks it against its manifest. Raises CheckpointError when it is missing or damaged."""
    manifest_path = path / "manifest.json"
    if not manifest_path.is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no manifest.json\n  a complete checkpoint is a folder step-<number>"
        )
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA_VERSION:
            raise CheckpointError(f"{path} has schema {manifest['schema']}; this version reads {SCHEMA_VERSION}")
        if _digest(path / "state.pt") != manifest["sha256"]:
            raise CheckpointError(f"{path}/state.pt is damaged: its hash is not the manifest's\n  use an older one")
        payload = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        return TrainingState(**payload)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}\n  use an older checkpoint") from error


def find_checkpoint(where: str, run_folder: Path) -> Path:
    """Returns the checkpoint that ``where`` names: ``auto`` (the run's newest), a checkpoint, or a run folder."""
    path = run_folder if where == "auto" else Path(where)
    if (path / "manifest.json").is_file():
        return path
    for folder in (path / "checkpoints", path):
        found = list_checkpoints(folder)
        if found:
            return found[-1]
    raise CheckpointError(
        f"no checkpoint in {path}\n  a run saves into <run folder>/checkpoints/step-<number>\n"
        "  check the path, or start without --resume"
    )


def _replace(final: Path, partial: Path) -> None:
    """Gives ``partial`` its final name; a folder that has it steps aside first, and is deleted when that is done."""
    old = final.parent / f".{final.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    try:
        partial.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove(checkpoints: list[Path]) -> None:
    """Deletes checkpoints. Each loses its name first, so that none is ever half there."""
    for path in checkpoints:
        hidden = path.parent / f".{path.name}.old"
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.rmtree(path.rename(hidden))
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}, which is no longer kept: {error}") from error


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, payload: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(payload, file)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
