"""Tokenizers: text there and back, the end between documents, folders that keep them, and damaged ones."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline.data.tokenizers import ByteTokenizer, CharTokenizer, FolderTokenizer, has_tokenizer, open_tokenizer
from paceline.errors import DataError

TEXT = "to be, or näht to be"


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), ByteTokenizer(has_end=True), CharTokenizer("".join(sorted(set(TEXT))), has_end=True)],
    ids=["bytes", "bytes with end", "char"],
)
def test_text_survives_a_tokenizer_and_its_folder(tokenizer: ByteTokenizer | CharTokenizer, tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    assert has_tokenizer(tmp_path)
    for each in (tokenizer, open_tokenizer(tmp_path)):
        tokens = each.encode(TEXT)
        assert each.decode(tokens) == TEXT
        assert max(tokens) < each.vocab_size
        assert np.array_equal(each.encode_many(["", TEXT])[1], tokens)
        assert (each.end_token, each.vocab_size) == (tokenizer.end_token, tokenizer.vocab_size)
        if each.end_token is not None:
            assert each.decode([*tokens, each.end_token, *tokens]) == TEXT + TEXT


def make_folder(folder: Path) -> Path:
    words = {"to": 0, "be": 1, ",": 2, "or": 3, "[UNK]": 4, "</s>": 5, "<|endoftext|>": 6}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["</s>", "<|endoftext|>"])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_of_hugging_face_is_read_and_copied(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "words")
    found = open_tokenizer(folder)
    assert (found.name, found.vocab_size, found.end_token) == ("words", 7, 6)
    assert found.encode("to be, or") == [0, 1, 2, 3]
    assert found.decode([0, 1, 5]) == "to be"
    assert [each.tolist() for each in found.encode_many(["to be", ""])] == [[0, 1], []]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    FolderTokenizer(folder).save(tmp_path / "copy")
    again: FolderTokenizer = pickle.loads(pickle.dumps(open_tokenizer(tmp_path / "copy")))
    assert (again.end_token, again.encode("or to")) == (5, [3, 0])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vocabulary.json", "{"),
        ("vocabulary.json", '{"kind": "words"}'),
        ("vocabulary.json", '{"kind": "char", "characters": "ba"}'),
        ("vocabulary.json", '{"kind": "bytes", "end_token": -1}'),
        ("tokenizer.json", "{}"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        open_tokenizer(tmp_path)


def test_what_a_tokenizer_does_not_know_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="character 'x' at place 2 is none of the 2"):
        CharTokenizer("ab").encode("abx")
    with pytest.raises(DataError, match="token 300 is beyond the vocabulary of bytes, which has 256"):
        ByteTokenizer().decode([1, 300])
    with pytest.raises(DataError, match=r"has no tokenizer\n.*tokenizer.json"):
        open_tokenizer(tmp_path)
    with pytest.raises(DataError, match="is no folder"):
        open_tokenizer(tmp_path / "missing")
