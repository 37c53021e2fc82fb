"""A vocabulary of characters or of bytes as a ``tokenizer.json``, which tokenizers of Hugging Face load."""

from __future__ import annotations

import json
from typing import Any

from paceline.checkpoint.manifest import MALFORMED
from paceline.untrusted import is_count, parse_json_object

VOCABULARY = "vocabulary.json"
_END = "<|endoftext|>"
_NUM_BYTES = 256


def as_tokenizer_json(vocabulary: bytes) -> dict[str, bytes]:
    """Returns the files of a fast tokenizer with the same tokens; none for what is no vocabulary."""
    try:
        values = parse_json_object(vocabulary)
        end = values.get("end_token")
        if values.get("kind") == "bytes":
            content = _of_bytes()
        elif values.get("kind") == "char" and values["characters"]:
            content = _of_characters(str(values["characters"]))
        else:
            return {}
    except MALFORMED:
        return {}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    added = []
    if is_count(end):
        kinds = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": end, "content": _END, **kinds, "special": True})
        settings["eos_token"] = _END
    whole = {"version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None, **content}
    return {
        "tokenizer.json": json.dumps(whole, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


def _of_characters(characters: str) -> dict[str, Any]:
    tokens = {character: number for number, character in enumerate(characters)}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "<unknown>"}
    return {"pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model}


def _of_bytes() -> dict[str, Any]:
    """Pieces of bytes that nothing merges. Bytes that are no printable character stand for others there."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {
        byte: chr(_NUM_BYTES + place) for place, byte in enumerate(others)
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {shown[byte]: byte for byte in range(_NUM_BYTES)}, "merges": []}
    return {"pre_tokenizer": level, "decoder": level, "model": model}
