"""A vocabulary of characters as a ``tokenizer.json``, which tokenizers of Hugging Face load. Bytes have none there."""

from __future__ import annotations

import json
from typing import Any

from paceline.checkpoint.manifest import MALFORMED
from paceline.untrusted import parse_json_object

VOCABULARY = "vocabulary.json"


def as_tokenizer_json(vocabulary: bytes) -> dict[str, bytes]:
    """Returns the files of a fast tokenizer with the same tokens; none for bytes, or for what is no vocabulary."""
    try:
        values = parse_json_object(vocabulary)
        characters = str(values["characters"]) if values.get("kind") == "char" else ""
    except MALFORMED:
        return {}
    if not characters:
        return {}
    tokens = {character: number for number, character in enumerate(characters)}
    model: dict[str, Any] = {"type": "WordLevel", "vocab": tokens, "unk_token": "<unknown>"}
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": model,
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
