"""Vocabularies of ours as tokenizers of Hugging Face: the same tokens, and back to the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.tools.outgoing import as_tokenizer_json
from paceline.data.tokenizers import ByteTokenizer, CharTokenizer

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "char"])
def test_a_vocabulary_is_a_fast_tokenizer_with_the_same_tokens(tmp_path: Path, kind: str, has_end: bool) -> None:
    text = "A bee,\n\x00 日本 é cat"
    ours: Any = ByteTokenizer(has_end=has_end)
    if kind == "char":
        ours = CharTokenizer("".join(sorted(set(text))), has_end=has_end)
    ours.save(tmp_path)
    for name, content in as_tokenizer_json((tmp_path / "vocabulary.json").read_bytes()).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokens = theirs.encode(text)
    assert tokens == ours.encode(text)
    assert theirs.decode(tokens) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.end_token, ours.vocab_size)


@pytest.mark.parametrize("values", [{"kind": "other"}, {"kind": "char", "characters": ""}, {"kind": "char"}, []])
def test_what_is_no_vocabulary_gives_no_tokenizer(values: Any) -> None:
    assert as_tokenizer_json(json.dumps(values).encode()) == {}
