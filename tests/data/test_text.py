"""Text: vocabulary, blocks, the cut between training and evaluation, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.registry import EncodedText, TokenBlocks, load_text, split_blocks
from paceline.errors import DataError


def encoded(num_tokens: int) -> EncodedText:
    return EncodedText(
        tokens=torch.arange(num_tokens, dtype=torch.int32), vocab_size=num_tokens, characters=None, source="a text"
    )


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=300))
def test_characters_decode_to_the_text(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(text.encode())
    found = load_text(str(path), "char")
    assert found.characters == "".join(sorted(set(text)))
    assert found.vocab_size == len(found.characters)
    assert "".join(found.characters[token] for token in found.tokens.tolist()) == text


def test_bytes_are_their_own_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(b"\x00\xff\r\n\x80")
    found = load_text(str(path), "byte")
    assert found.tokens.tolist() == [0, 255, 13, 10, 128]
    assert (found.vocab_size, found.characters) == (256, None)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, torch.uint8), (257, torch.int16), (32_768, torch.int16), (32_769, torch.int32)]
)
def test_tokens_take_the_smallest_type_that_holds_them(tmp_path: Path, vocab_size: int, dtype: torch.dtype) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(map(chr, range(0x10000, 0x10000 + vocab_size))), encoding="utf-8")
    found = load_text(str(path), "char")
    assert found.tokens.dtype == dtype
    assert torch.equal(found.tokens.long(), torch.arange(vocab_size))


def test_the_documentation_inside_python_is_a_text() -> None:
    found = load_text(None, "char")
    assert len(found.tokens) > 100_000
    assert found.characters is not None
    assert set("abc \n") <= set(found.characters)
    assert torch.equal(found.tokens, load_text(None, "char").tokens)
    assert len(load_text(None, "byte").tokens) >= len(found.tokens)


@settings(deadline=None)
@given(num_tokens=st.integers(2, 200), context=st.integers(1, 60), data=st.data())
def test_blocks_tile_the_text(num_tokens: int, context: int, data: st.DataObject) -> None:
    tokens = torch.arange(num_tokens, dtype=torch.int16)
    blocks = TokenBlocks(tokens, context)
    assert len(blocks) == (num_tokens - 1) // context
    if not len(blocks):
        return
    index = data.draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=8))
    inputs, targets = blocks.__getitems__(index)
    for row, number in enumerate(index):
        start = number * context
        assert inputs[row].tolist() == list(range(start, start + context))
        assert targets[row].tolist() == list(range(start + 1, start + context + 1))
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert inputs.dtype == targets.dtype == torch.int64
    assert blocks[-1][1][-1] == len(blocks) * context


def test_the_last_part_of_a_text_is_for_evaluation() -> None:
    train, evaluation = split_blocks(encoded(1000), context=10, eval_fraction=0.2)
    assert evaluation is not None
    assert train.tokens.tolist() == list(range(800))
    assert evaluation.tokens.tolist() == list(range(800, 1000))
    whole, none = split_blocks(encoded(1000), context=10, eval_fraction=0.0)
    assert len(whole.tokens) == 1000
    assert none is None


def test_a_text_that_is_too_short_is_refused_with_its_sizes() -> None:
    split_blocks(encoded(11), context=10, eval_fraction=0.0)
    with pytest.raises(DataError, match=r"training part of a text has 10 tokens.*context of 10\n  .* needs 11 tokens"):
        split_blocks(encoded(10), context=10, eval_fraction=0.0)
    with pytest.raises(DataError, match=r"evaluation part of a text has 10 tokens, of 100 in all"):
        split_blocks(encoded(100), context=10, eval_fraction=0.1)
    with pytest.raises(DataError, match="context = 0"):
        split_blocks(encoded(100), context=0, eval_fraction=0.1)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.path = '.*missing.txt' cannot be read: No such file"):
        load_text(str(tmp_path / "missing.txt"), "char")
    with pytest.raises(DataError, match="cannot be read"):
        load_text(str(tmp_path), "char")
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DataError, match="is an empty file"):
        load_text(str(empty), "char")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r'not UTF-8: .* at byte 3\n.*\n.*data.tokens = "byte"'):
        load_text(str(latin), "char")
    assert len(load_text(str(latin), "byte").tokens) == 12
