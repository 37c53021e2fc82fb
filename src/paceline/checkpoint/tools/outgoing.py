"""Exports: a checkpoint in a format that others read. Written under a temporary name, and there when it is whole.

    safetensors   one file; with --hf a folder with config.json, for ``AutoModelForCausalLM.from_pretrained``
    torch         one file, for ``torch.load(path, weights_only=True)`` and ``model.load_state_dict``
    dcp           a folder, for ``torch.distributed.checkpoint.load``
    peft          a folder with the low-rank adapters alone, for ``peft.PeftModel.from_pretrained(base, folder)``

With the optimizer, its state is under the parameters' names, as ``torch.distributed.checkpoint.state_dict`` has it.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.checkpoint.manifest import MALFORMED, MODEL, OPTIMIZER, Manifest, damaged
from paceline.checkpoint.read import HUGGING_FACE, LORA, TOKENIZER, Checkpoint, read_files, write_files
from paceline.checkpoint.storage import LocalFiles, cannot_write, put_in_place
from paceline.checkpoint.tensors import Progress, Stream, ignore_progress
from paceline.checkpoint.tools.hugging_face import shape_of, to_hugging_face
from paceline.checkpoint.tools.stream import check_parent, stream_saved, write_safetensors, write_torch
from paceline.config import peft_folder
from paceline.data.tokenizers import VOCABULARY
from paceline.errors import CheckpointError, UsageError
from paceline.models.lora import A, B, merged
from paceline.untrusted import is_count, parse_json_object

Format = Literal["safetensors", "torch", "dcp"]
Write = Callable[[Path], object]
METADATA = "paceline"
_END = "<|endoftext|>"
_NUM_BYTES = 256
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}  # of PEFT


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    format: Format = "safetensors"
    is_hugging_face: bool = False
    is_peft: bool = False
    with_optimizer: bool = False
    may_replace: bool = False

    def __post_init__(self) -> None:
        if self.is_hugging_face and (self.format != "safetensors" or self.with_optimizer):
            what = "--hf is for --format safetensors, without --optimizer"
            rule = "Hugging Face's layout has the weights and a config.json"
            raise UsageError(f"{what}\n  {rule}\n  leave one of them out")
        if self.is_peft and (self.is_hugging_face or self.with_optimizer):
            rule = "a folder of PEFT has the adapters alone"
            raise UsageError(f"--format peft with --hf or --optimizer\n  {rule}\n  leave one of them out")


def format_by_name(out: Path) -> Format:
    """Returns the format that a file's name asks for: .pt, .pth and .bin are torch's."""
    return "torch" if out.suffix in (".pt", ".pth", ".bin") else "safetensors"


def export(checkpoint: Checkpoint, out: Path, options: ExportOptions, progress: Progress = ignore_progress) -> Path:
    """Writes a checkpoint in another format; returns where. Raises CheckpointError if it cannot be written."""
    names = {name.removeprefix(MODEL): name for name in checkpoint.manifest.tensors if name.startswith(MODEL)}
    streams = {name: replace(stream_saved(checkpoint, saved), name=name) for name, saved in names.items()}
    if not options.with_optimizer and not options.is_peft:
        streams = merge_streams(streams, saved_adapters(checkpoint), checkpoint.path)
    if not streams:
        what = f"{checkpoint.path} has no tensors of a model"
        raise CheckpointError(f"{what}\n  their names begin with {MODEL}\n  try paceline checkpoint inspect")
    if options.is_peft:
        write = _peft_writer(checkpoint, streams, progress)
    elif options.is_hugging_face:
        write = _hugging_face_writer(checkpoint, streams, progress)
    else:
        write = _plain_writer(checkpoint, streams, options, progress)
    return write_whole(out, write, may_replace=options.may_replace)


def write_whole(out: Path, write: Write, *, may_replace: bool) -> Path:
    """Writes a file or folder that appears when it is whole. Raises CheckpointError if it is there, or cannot be."""
    if out.exists() and not may_replace:
        raise CheckpointError(f"{out} is there already\n  it would be replaced\n  name another, or add --force")
    check_parent(out)
    partial, files = out.with_name(f".{out.name}.{secrets.token_hex(4)}.new"), LocalFiles()
    try:
        write(partial)
        put_in_place(files, partial, out)  # what was there before is kept until then
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        files.remove(partial)
    return out


def optimizer_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the optimizer's state by parameters' names, with streams for tensors. Raises CheckpointError for none."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[str]] = {}
    for name, entry in checkpoint.found.items():
        if name.startswith(OPTIMIZER):
            parameter = name.removeprefix(OPTIMIZER)
            groups.setdefault(entry["group"], []).append(parameter)
            state[parameter] = dict(entry["values"])
    if not groups:
        raise CheckpointError(f"{checkpoint.path} has no optimizer\n  leave --optimizer out")
    for name in checkpoint.manifest.tensors:
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            if parameter not in state:
                raise damaged(f"{checkpoint.path} is damaged: it has {name}, and no group of {parameter}")
            state[parameter][key] = stream_saved(checkpoint, name)
    rows = [{**checkpoint.found[label], "params": members} for label, members in groups.items()]
    return {"state": {name: values for name, values in state.items() if values}, "param_groups": rows}


def exported_bytes(manifest: Manifest, options: ExportOptions) -> int:
    wanted = (MODEL, OPTIMIZER) if options.with_optimizer else (MODEL,)
    return sum(tensor.num_bytes for name, tensor in manifest.tensors.items() if name.startswith(wanted))


def _hugging_face_writer(checkpoint: Checkpoint, streams: dict[str, Stream], progress: Progress) -> Write:
    kept = read_files(checkpoint, HUGGING_FACE)
    if "config.json" in kept:
        made = list(streams.values())
    else:
        config, made = to_hugging_face(shape_of(checkpoint.manifest), streams)
        kept["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    kept |= read_files(checkpoint, TOKENIZER)
    if VOCABULARY in kept and "tokenizer.json" not in kept:
        kept |= as_tokenizer_json(kept[VOCABULARY])
    return folder_writer(kept, made, progress)


def folder_writer(
    kept: Mapping[str, bytes], streams: list[Stream], progress: Progress, name: str = "model.safetensors"
) -> Write:
    """Returns what writes a folder with one file of tensors, and small files beside it."""

    def write(path: Path) -> None:
        path.mkdir()
        write_files(kept, path)
        write_safetensors(path / name, streams, {"format": "pt"}, progress)

    return write


def _plain_writer(
    checkpoint: Checkpoint, streams: dict[str, Stream], options: ExportOptions, progress: Progress
) -> Write:
    manifest, metadata, wanted = checkpoint.manifest, {"format": "pt"}, list(streams.values())
    content: dict[str, Any] = {"model": streams}
    if options.with_optimizer:
        content["optim"] = optimizer_content(checkpoint)
        wanted += [stream_saved(checkpoint, name) for name in manifest.tensors if name.startswith(OPTIMIZER)]
        metadata[METADATA] = json.dumps({"found": manifest.found})
    if options.format == "safetensors":
        return lambda path: write_safetensors(path, wanted, metadata, progress)
    if options.format == "torch":
        return lambda path: write_torch(path, content if options.with_optimizer else streams, progress)
    from paceline.checkpoint.tools.distributed import write_distributed

    return lambda path: write_distributed(path, content, progress)


def merge_streams(streams: Mapping[str, Stream], layers: Mapping[str, Any], where: Path) -> dict[str, Stream]:
    """Returns the tensors of a model without adapters; each merged weight is in memory while it is read."""
    found = dict(streams)
    try:
        for name, adapter in layers.items():
            if "is_whole" not in adapter:
                weight = found[adapter.get("stack", f"{name}.weight")]
                a, b = found.pop(f"{name}.{A}"), found.pop(f"{name}.{B}")
                make = functools.partial(_merge, weight, a, b, adapter)
                found[weight.name] = Stream.made(weight.name, weight.shape, weight.dtype, make)
    except MALFORMED as error:
        raise damaged(f"the adapters of {where} are not those of its tensors: {error}") from error
    return found


def saved_adapters(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Returns what a checkpoint says of its adapters, as ``models/lora.py`` does."""
    try:
        found = parse_json_object(read_files(checkpoint, LORA).get("", b"{}"))
        return {name: dict(each) for name, each in found.items()}
    except MALFORMED as error:
        raise damaged(f"{checkpoint.path}: {LORA} is damaged: {error}") from error


def _peft_writer(checkpoint: Checkpoint, streams: Mapping[str, Stream], progress: Progress) -> Write:
    found = saved_adapters(checkpoint)
    layers = {name: each for name, each in found.items() if "is_whole" not in each}
    if not layers:
        rule = "a folder of PEFT has low-rank adapters alone: model.lora of a config, or add_lora in your own loop"
        raise UsageError(f"{checkpoint.path} has no adapters\n  {rule}\n  take --format hf")
    whole = sorted({name.rpartition(".")[0] for name in found if name not in layers})
    made = {name: stream for name, stream in streams.items() if name.rpartition(".")[0] in whole}
    try:
        places = peft_folder.stack_places(layers)
        for name in layers:
            a, b, at = streams[f"{name}.{A}"], streams[f"{name}.{B}"], places.get(name, name)
            if name in places:
                a = Stream.made(a.name, (a.shape[0] * a.shape[1], a.shape[2]), a.dtype, functools.partial(_flat_a, a))
                b = Stream.made(b.name, (b.shape[1], b.shape[0] * b.shape[2]), b.dtype, functools.partial(_flat_b, b))
            made |= {at + peft_folder.A: a, at + peft_folder.B: b}
        settings = parse_json_object(read_files(checkpoint, HUGGING_FACE).get("config.json", b"{}"))
        kind = str((settings.get("architectures") or [""])[0])
        rank = streams[f"{next(iter(layers))}.{A}"].shape[-2]
        known: dict[str, Any] = {"base_model_name_or_path": checkpoint.manifest.setting("model", "path")}
        known["task_type"] = next((task for ending, task in _TASKS.items() if kind.endswith(ending)), None)
        config = peft_folder.peft_config(layers, rank, list(streams), **known, modules_to_save=whole or None)
    except MALFORMED as error:
        raise damaged(f"the adapters of {checkpoint.path} are not those of its tensors: {error}") from error
    named = [replace(stream, name=peft_folder.PREFIX + name) for name, stream in made.items()]
    return folder_writer({peft_folder.CONFIG: config}, named, progress, peft_folder.WEIGHTS)


def _flat_a(a: Stream) -> torch.Tensor:
    return a.whole().flatten(0, 1)


def _flat_b(b: Stream) -> torch.Tensor:
    return b.whole().permute(1, 2, 0).flatten(1)


def _merge(weight: Stream, a: Stream, b: Stream, adapter: Mapping[str, Any]) -> torch.Tensor:
    scale, is_transposed = float(adapter["scale"]), bool(adapter["is_transposed"])
    return merged(weight.whole(), a.whole(), b.whole(), scale, is_transposed=is_transposed)


def as_tokenizer_json(vocabulary: bytes) -> dict[str, bytes]:
    """Returns the files of a fast tokenizer with the same tokens; none for what is no vocabulary."""
    try:
        values = parse_json_object(vocabulary)
    except MALFORMED:
        return {}
    kind, characters, end = values.get("kind"), str(values.get("characters") or ""), values.get("end_token")
    if kind != "bytes" and (kind != "char" or not characters):
        return {}
    content = _of_bytes() if kind == "bytes" else _of_characters(characters)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    added = []
    if is_count(end):
        kinds = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": end, "content": _END, **kinds, "special": True})
        settings["eos_token"] = _END
    whole = {"version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None, **content}
    text = json.dumps(whole, ensure_ascii=False)
    return {"tokenizer.json": text.encode(), "tokenizer_config.json": json.dumps(settings).encode()}


def _of_characters(characters: str) -> dict[str, Any]:
    tokens = {character: number for number, character in enumerate(characters)}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "<unknown>"}
    return {"pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model}


def _of_bytes() -> dict[str, Any]:
    """Pieces of bytes that nothing merges. Bytes that are no printable character stand for others there."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable}
    shown |= {byte: chr(_NUM_BYTES + place) for place, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {shown[byte]: byte for byte in range(_NUM_BYTES)}, "merges": []}
    return {"pre_tokenizer": level, "decoder": level, "model": model}
