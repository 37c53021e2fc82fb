"""Text: vocabulary, blocks, the cut between training and evaluation, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.fetch import fetch_batch
from paceline.data.tokenizers import CharTokenizer
from paceline.data.windows import RandomWindows, TokenArray, TokenBlocks, load_text, split_tokens
from paceline.errors import DataError


def encoded(num_tokens: int) -> TokenArray:
    return TokenArray(np.arange(num_tokens))


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=300))
def test_characters_decode_to_the_text(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(text.encode())
    found = load_text(str(path), "char")
    assert isinstance(found.tokenizer, CharTokenizer)
    assert found.tokenizer.characters == "".join(sorted(set(text)))
    assert found.tokenizer.decode(found.tokens.tolist()) == text
    assert found.tokenizer.encode(text) == found.tokens.tolist()


def test_bytes_are_their_own_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(b"\x00\xff\r\n\x80")
    found = load_text(str(path), "bytes")
    assert found.tokens.tolist() == [0, 255, 13, 10, 128]
    assert found.tokenizer.vocab_size == 256


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)]
)
def test_tokens_take_the_smallest_type_that_holds_them(tmp_path: Path, vocab_size: int, dtype: type[Any]) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(map(chr, range(0x10000, 0x10000 + vocab_size))), encoding="utf-8")
    found = load_text(str(path), "char")
    assert found.tokens.dtype == dtype
    assert np.array_equal(found.tokens, np.arange(vocab_size))


def test_the_documentation_inside_python_is_a_text() -> None:
    found = load_text(None, "char")
    assert len(found.tokens) > 100_000
    assert isinstance(found.tokenizer, CharTokenizer)
    assert set("abc \n") <= set(found.tokenizer.characters)
    assert np.array_equal(found.tokens, load_text(None, "char").tokens)
    assert len(load_text(None, "bytes").tokens) >= len(found.tokens)


@settings(deadline=None)
@given(num_tokens=st.integers(2, 200), context=st.integers(1, 60), data=st.data())
def test_blocks_tile_the_text(num_tokens: int, context: int, data: st.DataObject) -> None:
    blocks = TokenBlocks(TokenArray(np.arange(num_tokens, dtype=np.uint16)), context)
    assert len(blocks) == (num_tokens - 1) // context
    if not len(blocks):
        return
    index = data.draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=8))
    inputs, targets = fetch_batch(blocks, np.array(index), 3)
    for row, number in enumerate(index):
        start = number * context
        assert inputs[row].tolist() == list(range(start, start + context))
        assert targets[row].tolist() == list(range(start + 1, start + context + 1))
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert inputs.dtype == targets.dtype == torch.int64
    assert blocks[-1][1][-1] == len(blocks) * context


@settings(deadline=None)
@given(num_tokens=st.integers(2, 400), context=st.integers(1, 60), epoch=st.integers(0, 9))
def test_random_windows_begin_in_order_and_inside(num_tokens: int, context: int, epoch: int) -> None:
    windows = RandomWindows(TokenArray(np.arange(num_tokens, dtype=np.uint16)), context, seed=3)
    if not len(windows):
        return
    everything = np.arange(len(windows))
    starts = windows.starts(everything, epoch)
    assert np.all(np.diff(starts) > 0)
    assert 0 <= starts[0] <= starts[-1] < num_tokens - context
    inputs, targets = windows.read(everything[-1:], epoch)
    assert inputs[0].tolist() == list(range(starts[-1], starts[-1] + context))
    assert targets[0].tolist() == list(range(starts[-1] + 1, starts[-1] + context + 1))


def test_random_windows_are_new_in_each_epoch_and_depend_on_seed_epoch_and_index_alone() -> None:
    tokens = TokenArray(np.arange(2_000, dtype=np.uint16))
    windows, other = RandomWindows(tokens, 10, seed=0), RandomWindows(tokens, 10, seed=1)
    some = np.array([7, 150, 3])
    epochs = np.stack([windows.starts(some, epoch) for epoch in range(50)])
    assert np.array_equal(windows.starts(some[::-1], 4)[::-1], epochs[4])
    assert not np.array_equal(other.starts(some, 4), epochs[4])
    assert all(len(set(column)) > 5 for column in epochs.T)  # of the ten places of a span
    counts = np.zeros(2_000)
    for epoch in range(200):
        for start in windows.starts(np.arange(len(windows)), epoch):
            counts[start : start + 10] += 1
    assert 150 < counts[20:-20].min() <= counts.max() < 250  # each token is expected once in an epoch


def test_the_last_part_of_a_text_is_for_evaluation() -> None:
    train, evaluation = split_tokens(encoded(1000), 10, 0.2, "a text")
    assert evaluation is not None
    assert (len(train), len(evaluation)) == (800, 200)
    assert train.read(np.array([0]), 800)[0].tolist() == list(range(800))
    assert evaluation.read(np.array([0]), 200)[0].tolist() == list(range(800, 1000))
    whole, none = split_tokens(encoded(1000), 10, 0.0, "a text")
    assert len(whole) == 1000
    assert none is None


def test_a_text_that_is_too_short_is_refused_with_its_sizes() -> None:
    split_tokens(encoded(11), 10, 0.0, "a text")
    with pytest.raises(DataError, match=r"training part of a text has 10 tokens.*context of 10\n  .* needs 11 tokens"):
        split_tokens(encoded(10), 10, 0.0, "a text")
    with pytest.raises(DataError, match=r"evaluation part of a text has 10 tokens"):
        split_tokens(encoded(100), 10, 0.1, "a text")
    with pytest.raises(DataError, match="context = 0"):
        split_tokens(encoded(100), 0, 0.1, "a text")


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
    with pytest.raises(DataError, match=r"not UTF-8: .* at byte 3, in line 1\n.*\n.*iconv -f LATIN1"):
        load_text(str(latin), "char")
    assert len(load_text(str(latin), "bytes").tokens) == 12
