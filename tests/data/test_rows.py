"""Rows of JSON lines, parquet and saved data sets: the same samples of each, text with padding, and bad rows."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from paceline.config.data_sections import RowsDataConfig
from paceline.data.checked import ModelNeeds
from paceline.data.fetch import fetch_batch
from paceline.data.registry import DataSplits, build_data
from paceline.data.rows import ArrowRows
from paceline.errors import BadSampleError, DataError

ROWS = [{"x": [n * 1.0, n + 0.5], "y": n % 3, "text": "ab" * (n % 4 + 1), "other": None} for n in range(10)]


def write_rows(folder: Path, kind: str, *, order: list[int] | None = None) -> Path:
    """Writes the rows as one of the kinds; as ``datasets`` does with save_to_disk, in two files."""
    if kind == "jsonl":
        path = folder / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, ROWS)))
        return path
    table = pyarrow.Table.from_pylist(ROWS)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "rows.parquet")
        return folder / "rows.parquet"
    state: dict[str, Any] = {"_data_files": [], "_fingerprint": "x", "_indices_data_files": None, "_split": "train"}
    tables = {"data-00000-of-00002.arrow": table[:6], "data-00001-of-00002.arrow": table[6:]}
    state["_data_files"] = [{"filename": name} for name in tables]
    if order is not None:
        tables["indices.arrow"] = pyarrow.table({"indices": pyarrow.array(order, pyarrow.uint64())})
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    for name, part in tables.items():
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, part.schema) as stream:
            stream.write_table(part)
    (folder / "state.json").write_text(json.dumps(state))
    info = {"features": {"y": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def build(path: Path, kind: Any, **keys: Any) -> DataSplits:
    given = {"eval_fraction": 0.0, **keys}
    return build_data(RowsDataConfig(kind=kind, path=str(path), **given), None, 0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf_dataset"])
def test_every_kind_gives_the_same_samples(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path, kind)
    splits = build(path, kind, inputs="x", targets="y", classes=None if kind == "hf_dataset" else 3)
    assert (splits.shape.kind, splits.shape.features, splits.shape.classes) == ("classes", 2, 3)
    for train in (splits.train, pickle.loads(pickle.dumps(splits.train))):
        inputs, targets = fetch_batch(train, np.array([7, 0, 3]))
        assert inputs.tolist() == [[7.0, 7.5], [0.0, 0.5], [3.0, 3.5]]
        assert targets.tolist() == [1, 0, 0]
    text = build(path, kind, tokenizer="bytes", context=4, eval_fraction=0.2)
    assert (text.shape.vocab_size, len(text.train), text.eval and len(text.eval)) == (257, 8, 2)
    inputs, targets = text.train.dataset.read(np.array([0, 3]), 0)  # type: ignore[attr-defined]
    assert inputs.tolist() == [[97, 98, 0, 0], [97, 98, 97, 98]]
    assert targets.tolist() == [[98, 256, -100, -100], [98, 97, 98, 97]]


def test_a_saved_data_set_keeps_the_order_of_its_indices(tmp_path: Path) -> None:
    rows = ArrowRows(write_rows(tmp_path, "hf_dataset", order=[9, 2, 4]), "hf_dataset", ("y",))
    for each in (rows, pickle.loads(pickle.dumps(rows))):
        assert len(each) == 3
        assert each.read(np.array([0, 2])) == [{"y": 0}, {"y": 1}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf_dataset"])
def test_what_is_missing_is_told(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path, kind)
    with pytest.raises(DataError, match=r"no (column )?'z'|= 'z', and no row"):
        fetch_batch(build(path, kind, inputs="x", targets="z", classes=3).train, np.arange(2))
    with pytest.raises(DataError, match="cannot be read"):
        build(tmp_path / "missing", kind, inputs="x", targets="y")
    with pytest.raises(DataError, match=r"'text' of data.path = .* is text, and there is no tokenizer"):
        fetch_batch(build(path, kind, context=4).train, np.arange(2))


def test_bad_rows_are_told_with_their_line_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": [1, 2], "y": 0}\n{"x": [3\n\n{"x": [5, 6], "y": 1}\n')
    with pytest.raises(DataError, match=r"rows.jsonl: line 2 cannot be used: Expecting ',' delimiter at column 9\n"):
        fetch_batch(build(path, "jsonl", inputs="x", targets="y", classes=2).train, np.arange(2))
    splits = build(path, "jsonl", inputs="x", targets="y", classes=2, on_bad="skip")
    with pytest.warns(UserWarning, match="it does not count"):
        inputs, targets = fetch_batch(splits.train, np.arange(4))
    assert inputs.tolist() == [[1, 2], [0, 0], [0, 0], [5, 6]]
    assert torch.equal(targets, torch.tensor([0, -100, -100, 1]))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"x": [1.0, 2.0, 3.0], "y": 0}, "'x' has 3 numbers, and 2 numbers in .*rows.jsonl: line 1"),
        ({"x": [1.0, float("nan")], "y": 0}, r"'x'\[1\] is nan"),
        ({"x": [float("-inf"), 1.0], "y": 0}, r"'x'\[0\] is -inf"),
        ({"x": [1.0, 2.0], "y": 1.5}, "'y' is 1.5, and a class is a whole number"),
        ({"x": [1.0, 2.0], "y": -1}, "'y' is -1, and there are 2 classes, from 0"),
        ({"x": [1.0, 2.0], "y": float("nan")}, "'y' is nan, and a class is a whole number"),
    ],
)
def test_the_line_that_is_wrong_is_named_whatever_its_batch(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[Any] = [{"x": [0.5, n], "y": n % 2} for n in range(60)]
    rows[50] = row
    path.write_text("\n".join(map(json.dumps, rows)))
    batch = np.array([8, 50, 3])
    with pytest.raises(BadSampleError, match=f"rows.jsonl: line 51 cannot be used: {reason}"):
        fetch_batch(build(path, "jsonl", inputs="x", targets="y", classes=2).train, batch)
    skipping = build(path, "jsonl", inputs="x", targets="y", classes=2, on_bad="skip")
    with pytest.warns(UserWarning, match=r"line 51 .*it does not count"):
        inputs, targets = fetch_batch(skipping.train, batch)
    assert inputs.tolist() == [[0.5, 8.0], [0.0, 0.0], [0.5, 3.0]]
    assert targets.tolist() == [0, -100, 1]


def test_tokens_that_the_vocabulary_lacks_are_told_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": [1, 2, 3]}\n{"text": [1, -4, 3]}\n{"text": [1, 2, 16]}\n{"text": [1.5, 2]}\n')
    train = build(path, "jsonl", context=4, vocab_size=16).train
    for row, reason in ((1, r"'text'\[1\] is -4, and there are 16 tokens"), (2, "is 16, and"), (3, "whole numbers")):
        with pytest.raises(BadSampleError, match=rf"line {row + 1} cannot be used: .*{reason}"):
            fetch_batch(train, np.array([0, row]))


def test_whole_numbers_are_features_of_a_model_that_reads_floats(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": [1, 2], "y": 0.0}\n{"x": [3, 4.5], "y": 1.0}\n')
    config = RowsDataConfig(kind="jsonl", path=str(path), inputs="x", targets="y", classes=2, eval_fraction=0.0)
    inputs, targets = fetch_batch(build_data(config, None, 0, ModelNeeds(has_features=True)).train, np.arange(2))
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    with pytest.raises(
        BadSampleError, match=r"line 2 cannot be used: 'x' has fractions, and whole numbers in .*line 1"
    ):
        fetch_batch(build_data(config, None, 0).train, np.arange(2))


def test_a_class_beyond_the_last_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": [1, 2], "y": 0}\n{"x": [3, 4], "y": 9}\n')
    with pytest.raises(DataError, match=r"rows.jsonl: line 2 cannot be used: 'y' is 9, and there are 3 classes"):
        fetch_batch(build(path, "jsonl", inputs="x", targets="y", classes=3).train, np.arange(2))
