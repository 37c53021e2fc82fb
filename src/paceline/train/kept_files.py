"""What a run keeps beside its weights, so that a checkpoint alone is enough to write text, or to export."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.files import HUGGING_FACE, LORA, TOKENIZER
from paceline.config.hf_folder import BYTE, PREPROCESSOR
from paceline.data.datasets import DataShape
from paceline.data.registry import DataSplits
from paceline.models.lora import adapters

# What folders of Hugging Face have for tokens, images and generation, apart from the weights.
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
    PREPROCESSOR,
)


def kept_files(model: nn.Module, data: DataSplits, folder: Path | None = None) -> dict[str, bytes]:
    """Returns the files of a model before an engine has it; ``folder`` is the one that it was built from, if any."""
    files: dict[str, bytes] = {}
    if data.tokenizer is not None:
        with tempfile.TemporaryDirectory() as name:
            data.tokenizer.save(Path(name))
            files |= {TOKENIZER + each.name: each.read_bytes() for each in sorted(Path(name).iterdir())}
    settings: Any = getattr(model, "config", None)
    if callable(getattr(settings, "to_json_string", None)) and hasattr(model, "save_pretrained"):
        settings = copy.deepcopy(settings)
        settings.architectures = [type(model).__name__]
        if hasattr(settings, "use_cache"):
            settings.use_cache = True  # off while it trains
        files[HUGGING_FACE + "config.json"] = settings.to_json_string().encode()
        beside = [] if folder is None else [folder / name for name in _BESIDE]
        files |= {HUGGING_FACE + path.name: path.read_bytes() for path in beside if path.is_file()}
        if data.shape.mean is not None and HUGGING_FACE + PREPROCESSOR not in files:
            files[HUGGING_FACE + PREPROCESSOR] = _preprocessor(data.shape)
    if found := adapters(model):
        files[LORA] = json.dumps(found).encode()
    return files


def _preprocessor(shape: DataShape) -> bytes:
    """Says how images of bytes became what the model was trained on, in the library's words."""
    values = {
        "do_resize": True,
        "size": {"shortest_edge": shape.size},
        "do_center_crop": True,
        "crop_size": {"height": shape.size, "width": shape.size},
        "do_rescale": True,
        "rescale_factor": 1 / BYTE,
        "do_normalize": True,
        "image_mean": [each / BYTE for each in shape.mean or ()],
        "image_std": [each / BYTE for each in shape.std or ()],
    }
    return json.dumps(values, indent=2).encode()
