"""Tokens in files: windows over shards, prepared folders, and files that are cut off, or changed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.data_sections import TokensDataConfig
from paceline.data.datasets import EpochDataset
from paceline.data.fetch import BatchRequest, LoaderOptions, LoaderSource, is_in_memory
from paceline.data.registry import DataSplits, build_data
from paceline.data.token_files import DataManifest, TokenShard, hash_file, open_tokens
from paceline.data.tokenizers import ByteTokenizer
from paceline.errors import BadSampleError, DataError


def write_shards(folder: Path, sizes: tuple[int, ...] = (7, 1, 12), dtype: str = "uint16") -> np.ndarray[Any, Any]:
    """Writes tokens 0, 1, 2, ... into files one after another; some are numpy's."""
    tokens = np.arange(sum(sizes)).astype(dtype)
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        if number == 1:
            np.save(folder / f"part-{number}.npy", part)
        else:
            part.tofile(folder / f"part-{number}.bin")
    return tokens


def write_prepared(folder: Path) -> None:
    tokens = np.arange(40).astype("uint16")
    tokens.tofile(folder / "tokens-0.bin")
    shard = TokenShard(file="tokens-0.bin", tokens=40, documents=1, sha256=hash_file(folder / "tokens-0.bin"))
    ByteTokenizer(has_end=True).save(folder)
    DataManifest(
        dtype="uint16", vocab_size=257, end_token=256, tokenizer="bytes", skipped=0, source=("a.txt",), shards=(shard,)
    ).write(folder)


def build(path: Path, **keys: Any) -> DataSplits:
    given = {"context": 4, "eval_fraction": 0.0, **keys}
    return build_data(TokensDataConfig(kind="tokens", path=str(path), **given), None, 0)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_reach_over_files(tmp_path: Path, dtype: Any) -> None:
    tokens = write_shards(tmp_path, dtype=dtype)
    opened = open_tokens(str(tmp_path), dtype=dtype, vocab_size=20).tokens
    again = pickle.loads(pickle.dumps(opened))
    starts = np.array([0, 5, 6, 7, 15])
    for each in (opened, again):
        assert len(each) == 20
        assert each.read(starts, 5).tolist() == [tokens[start : start + 5].tolist() for start in starts]
    assert len(open_tokens(str(tmp_path / "part-*.bin"), dtype=dtype, vocab_size=20).tokens) == 19


def test_tokens_become_samples_with_an_evaluation_of_their_end(tmp_path: Path) -> None:
    write_shards(tmp_path, (30, 10, 10))
    splits = build(tmp_path, vocab_size=64, eval_fraction=0.2)
    assert (len(splits.train), splits.eval and len(splits.eval)) == (9, 2)
    assert isinstance(splits.train, EpochDataset)
    assert is_in_memory(splits.train)
    inputs, targets = splits.train.read(np.arange(9), 1)
    assert np.array_equal(targets - 1, inputs)
    assert int(inputs.max()) < 40
    assert splits.eval is not None
    assert splits.eval[1][0].tolist() == [44, 45, 46, 47]
    other = build(tmp_path / "part-0.bin", vocab_size=64, eval_path=str(tmp_path / "part-2.bin"))
    assert other.eval is not None
    assert other.eval[0][0].tolist() == [40, 41, 42, 43]


def test_a_prepared_folder_says_its_vocabulary_and_tokenizer(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    splits = build(tmp_path)
    assert splits.shape.vocab_size == 257
    assert splits.tokenizer is not None
    assert splits.tokenizer.end_token == 256


def test_a_shard_that_changed_is_named(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    shard = tmp_path / "tokens-0.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b"\1\0")
    written = (tmp_path / "manifest.json").stat().st_mtime_ns
    os.utime(shard, ns=(written + 10**9, written + 10**9))
    with pytest.raises(DataError, match=r"tokens-0.bin has changed since it was prepared"):
        build(tmp_path)
    os.utime(shard, ns=(written - 10**9, written - 10**9))
    build(tmp_path)
    with pytest.raises(DataError, match="has changed since it was prepared"):
        build(tmp_path, verify="full")
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match="has 78 bytes, and had 80 when it was prepared"):
        build(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        build(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "paceline-tokens-1", "shards": [{"file": "../x"}]}')
    with pytest.raises(DataError, match=r"manifest.json cannot be read"):
        build(tmp_path)


def test_bad_files_are_told_with_their_place(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with pytest.raises(BadSampleError, match=r"part-2.bin: token 3 is 11, beyond a vocabulary of 11"):
        open_tokens(str(tmp_path), dtype=None, vocab_size=11).tokens.read(np.array([2, 9]), 4)
    # What a loader worker finds is no less permanent.
    beyond = LoaderSource(build(tmp_path, vocab_size=11, context=4).train, LoaderOptions(workers=1), 0)
    with pytest.raises(BadSampleError, match="beyond a vocabulary of 11"):
        list(beyond.stream(iter([BatchRequest(np.arange(4), 0)])))
    cut_off = open_tokens(str(tmp_path), dtype=None, vocab_size=20).tokens
    (tmp_path / "part-2.bin").write_bytes(b"cut!")
    with pytest.raises(BadSampleError, match=r"part-2.bin was cut off: it has 4 bytes, and had [\d,]+ tokens"):
        cut_off.read(np.array([9]), 4)
    write_shards(tmp_path)
    with pytest.raises(DataError, match=r"data.vocab_size is not set"):
        build(tmp_path)
    with pytest.raises(DataError, match=r"training part of .* has 20 tokens .* for a context of 20"):
        build(tmp_path, vocab_size=20, context=20)
    (tmp_path / "part-2.bin").write_bytes(b"odd")
    with pytest.raises(DataError, match=r"part-2.bin has 3 bytes, which is no whole number of uint16 tokens"):
        build(tmp_path, vocab_size=20)
    with pytest.raises(DataError, match="holds no tokens"):
        build(tmp_path / "nothing-*", vocab_size=20)
    cut = tmp_path / "cut.npy"
    np.save(cut, np.arange(100, dtype="uint16"))
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"cut.npy cannot be read: it has 190 bytes of tokens, and its header says 200"):
        build(cut, vocab_size=100)
    np.save(cut, np.zeros((2, 2)))
    with pytest.raises(DataError, match="float64 of shape"):
        build(cut, vocab_size=100)


def test_tokens_of_four_bytes_are_not_read_as_two(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 500, 4000)
    tokens.astype(np.uint32).tofile(tmp_path / "wide.bin")
    for dtype in (None, "uint16"):
        with pytest.raises(DataError, match=r"wide.bin: read as uint16, every second token is 0(.|\n)*dtype = uint32"):
            open_tokens(str(tmp_path / "wide.bin"), dtype=dtype, vocab_size=500)  # type: ignore[arg-type]
    assert len(open_tokens(str(tmp_path / "wide.bin"), dtype="uint32", vocab_size=500).tokens) == 4000
    assert len(open_tokens(str(tmp_path / "wide.bin"), dtype=None, vocab_size=128_000).tokens) == 4000
    tokens[1:2000:2] = 0  # a part of a file may look so
    tokens.astype(np.uint16).tofile(tmp_path / "short.bin")
    assert len(open_tokens(str(tmp_path / "short.bin"), dtype=None, vocab_size=500).tokens) == 4000


def test_a_negative_token_is_told_with_its_file_and_place(tmp_path: Path) -> None:
    tokens = np.arange(40)
    tokens[17] = -3
    np.save(tmp_path / "odd.npy", tokens)
    opened = open_tokens(str(tmp_path / "odd.npy"), dtype=None, vocab_size=40).tokens
    assert opened.read(np.array([0]), 8).tolist() == [list(range(8))]
    with pytest.raises(DataError, match=r"odd.npy: token 17 is -3, beyond a vocabulary of 40"):
        opened.read(np.array([0, 12]), 8)
