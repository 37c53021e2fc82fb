"""Checkpoints: the whole state of a run, saved so that it is either there whole or not at all, and read by any ranks.

``write.py`` shows the files of one. This package knows shards (``shards.py``), and no engines. Names that need torch
are loaded on first use, so that a checkpoint can be looked for before anything is started.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.find import (
    Retention,
    find_best,
    find_checkpoint,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
)
from paceline.checkpoint.manifest import State

if TYPE_CHECKING:
    from paceline.checkpoint.read import Checkpoint, open_checkpoint
    from paceline.checkpoint.writer import CheckpointWriter, load, save

__all__ = ["find_best", "find_checkpoint", "list_checkpoints", "read_manifest", "verify_checkpoint"]
__all__ += ["Checkpoint", "CheckpointWriter", "Retention", "State", "load", "open_checkpoint", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.checkpoint' has no attribute {name!r}")
    home = "read" if name in ("Checkpoint", "open_checkpoint") else "writer"
    return getattr(importlib.import_module(f"paceline.checkpoint.{home}"), name)
