"""Small files that belong to a model, kept in its checkpoints: a tokenizer, the config of a Hugging Face model.

They are tensors of bytes under ``files/``, and so they are hashed, resharded and exported with the rest.

    files/tokenizer/...   what tokens stand for, as ``data/tokenizers.py`` writes it
    files/hf/...          config.json of a Hugging Face model, and what its folder has for tokens and images
    files/lora.json       adapters by the names of their layers
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tensors import host_bytes
from paceline.shards import Shard, whole_region
from paceline.untrusted import plain_name

FILES = "files/"
TOKENIZER, HUGGING_FACE, LORA = "tokenizer/", "hf/", "lora.json"


def file_shards(files: Mapping[str, bytes], rank: int) -> list[Shard]:
    """Returns files as what is saved, which rank 0 writes."""
    tensors = {name: torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()) for name, content in files.items()}
    return [
        Shard(name=FILES + name, region=whole_region(tuple(each.shape)), tensor=each, copy=None if rank else 0)
        for name, each in tensors.items()
    ]


def read_files(checkpoint: Checkpoint, below: str = "") -> dict[str, bytes]:
    """Returns the files whose names begin with ``below``, by what follows."""
    prefix = FILES + below
    names = [name for name in checkpoint.manifest.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): bytes(host_bytes(checkpoint.read(name))) for name in names}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes files into a folder that is there. Raises ValueError for a name that leads elsewhere."""
    for name, content in files.items():
        (folder / plain_name(name)).write_bytes(content)
