"""Checks of ``model: {kind: hf}`` that need no library: a folder with a config, and weights where they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.config.schema import Config
from paceline.config.sections import HFModelConfig, LoraConfig
from paceline.config.suggest import near_files
from paceline.errors import Problem
from paceline.untrusted import parse_json_object, read_regular

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def check_hf_folder(config: Config) -> Iterator[Problem]:
    """Checks the folder of a Hugging Face model, and what its adapters and degrees exclude."""
    model = config.model
    if not isinstance(model, HFModelConfig):
        return
    folder = Path(model.path)
    if not (folder / "config.json").is_file():
        near = near_files(folder)
        fix = "name a folder that save_pretrained wrote, or that was downloaded; nothing is fetched from a network"
        yield Problem(
            what=f"model.path = {model.path!r} {'has no config.json' if folder.is_dir() else 'is no folder'}",
            rule=f"a model of Hugging Face is a local folder with config.json; a relative path starts at {Path.cwd()}",
            fix=f"did you mean {' or '.join(near)}?" if near and not folder.is_dir() else fix,
        )
        return
    try:
        parse_json_object(read_regular(folder / "config.json"))
    except (OSError, ValueError) as error:
        yield Problem(
            what=f"model.path = {model.path!r}: config.json cannot be read: {error}",
            rule="it is a JSON object that says which model it is",
            fix="copy or download the folder again",
        )
    if model.pretrained and not any((folder / name).is_file() for name in WEIGHTS):
        yield Problem(
            what=f"model.path = {model.path!r} has no weights in safetensors",
            rule=f"a pretrained model has {' or '.join(WEIGHTS)}; pickles (.bin) are not read",
            fix="save it again with save_pretrained(..., safe_serialization=True), or set model.pretrained = false",
        )
    if model.fresh and not model.pretrained:
        yield Problem(
            what="model.fresh with model.pretrained = false",
            rule="it names what the folder's weights lack, and without them all values are random",
            fix="leave model.fresh out",
        )
    if model.lora.rank == 0 and model.lora != LoraConfig():
        yield Problem(
            what="keys of model.lora with model.lora.rank = 0",
            rule="without a rank there are no adapters",
            fix="set model.lora.rank = 8, or leave model.lora out",
        )
