"""Checkpoints: the whole state of a run, saved so that it is either there whole or not at all, and read by any ranks.

``write.py`` shows the files of one. This package knows shards (``shards.py``), and no engines. Names that need torch
are loaded on first use, so that a checkpoint can be looked for before anything is started.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.find import PassedOver as PassedOver
from paceline.checkpoint.find import find_best as find_best
from paceline.checkpoint.find import find_checkpoint as find_checkpoint
from paceline.checkpoint.find import list_checkpoints as list_checkpoints
from paceline.checkpoint.find import read_manifest as read_manifest
from paceline.checkpoint.find import verify_checkpoint as verify_checkpoint
from paceline.checkpoint.manifest import State as State
from paceline.checkpoint.retention import Retention as Retention

if TYPE_CHECKING:
    from paceline.checkpoint.loops import load as load
    from paceline.checkpoint.loops import save as save
    from paceline.checkpoint.read import Checkpoint as Checkpoint
    from paceline.checkpoint.read import open_checkpoint as open_checkpoint
    from paceline.checkpoint.writer import CheckpointWriter as CheckpointWriter

_NAMES = {"loops": ("load", "save"), "read": ("Checkpoint", "open_checkpoint"), "writer": ("CheckpointWriter",)}


def __getattr__(name: str) -> Any:
    for home, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"paceline.checkpoint.{home}"), name)
    raise AttributeError(f"module 'paceline.checkpoint' has no attribute {name!r}")
