"""Documents in rows: every place of each once, best fit as its definition says, targets that stay in their document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import config_from_dict
from paceline.config.data_sections import Packing
from paceline.data.fetch import fetch_batch, is_in_memory
from paceline.data.order import DataOrder
from paceline.data.packing import PackedRows, fit_best, make_pieces, packing_details
from paceline.data.registry import DataSplits, build_data
from paceline.errors import BadSampleError, ConfigError, DataError

END, CONTEXT = 0, 8
PACKINGS: list[Packing] = ["none", "stream", "best_fit"]


def best_fit_by_definition(counts: Sequence[int], context: int) -> list[int]:
    """Returns what is left in each row: the longest first, each into the row with the least room that is enough."""
    rooms: list[int] = []
    for count in sorted(counts, reverse=True):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= count]
        row = min(fitting)[1] if fitting else len(rooms)
        rooms[row : row + 1] = [(rooms[row] if fitting else context) - count]
    return sorted(rooms)


@given(st.lists(st.integers(2, 30), min_size=1, max_size=60), st.integers(30, 40), st.integers(0, 5))
def test_best_fit_is_what_its_definition_says(counts: list[int], context: int, seed: int) -> None:
    rows = fit_best(np.array(counts), context, seed)
    used = np.bincount(rows, weights=counts)
    assert sorted((context - used).tolist()) == best_fit_by_definition(counts, context)
    assert np.array_equal(rows, fit_best(np.array(counts), context, seed))


def test_the_seed_chooses_among_documents_of_one_length() -> None:
    counts = np.full(64, 3)
    assert not np.array_equal(fit_best(counts, 6, 0), fit_best(counts, 6, 1))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(2, 12), st.sampled_from(PACKINGS))
def test_every_place_with_a_target_is_in_one_row(sizes: list[int], context: int, packing: Packing) -> None:
    pieces = make_pieces(np.array(sizes), context, packing, 0)
    found = []
    for document, first, count in zip(pieces.documents, pieces.firsts, pieces.counts, strict=True):
        found += [(document, place) for place in range(first, first + count) if place < sizes[document] - 1]
    assert sorted(found) == [(document, place) for document, size in enumerate(sizes) for place in range(size - 1)]
    rows = np.bincount(pieces.rows, weights=pieces.counts)
    assert not len(rows) or 0 < rows.min() <= rows.max() <= context
    assert np.array_equal(pieces.rows, np.sort(pieces.rows))
    if packing == "stream":
        assert (rows[:-1] == context).all()
    else:  # what lacks its end fills its row
        lacks = pieces.firsts + pieces.counts < np.array(sizes)[pieces.documents]
        assert (pieces.counts[lacks] == context).all()


LENGTHS = (5, 2, 1, 8, 9, 3, 20, 4, 17, 1, 6)  # with their ends: one fills a row, one has one more, two are longer


def make_documents(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [[*draw.integers(1, 11, size=length - 1).tolist(), END] for length in lengths]


def open_tokens(folder: Path, documents: Sequence[list[int]], **keys: Any) -> DataSplits:
    np.save(folder / "tokens.npy", np.concatenate(documents).astype(np.uint16))
    own = {"kind": "tokens", "path": str(folder / "tokens.npy"), "vocab_size": 11, "end_token": END, "eval_fraction": 0}
    return build_data(config_of(own | keys).data, CONTEXT, 0)


def open_rows(folder: Path, rows: Sequence[dict[str, Any]], **keys: Any) -> DataSplits:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"kind": "jsonl", "path": str(folder / "rows.jsonl"), "vocab_size": 11, "inputs": "tokens"}
    return build_data(config_of(own | {"end_token": END, "eval_fraction": 0} | keys).data, CONTEXT, 0)


def config_of(data: dict[str, Any], **sections: Any) -> Any:
    model = {"kind": "gpt", "layers": 1, "heads": 2, "width": 8, "context": CONTEXT}
    return config_from_dict({"model": model, "data": data, "train": {"steps": 1, "global_batch": 2}, **sections})


def transitions(dataset: Any) -> list[tuple[int, int]]:
    """Returns each input with its target, sorted."""
    inputs, targets = fetch_batch(dataset, np.arange(len(dataset)))
    counts = targets != -100
    return sorted(zip(inputs[counts].tolist(), targets[counts].tolist(), strict=True))


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_each_token_of_a_file_is_a_target_of_its_document_once(packing: Packing, tmp_path: Path) -> None:
    documents = make_documents()
    data = open_tokens(tmp_path, documents, packing=packing)
    expected = sorted(pair for each in documents for pair in pairwise(each))
    assert transitions(data.train) == expected
    assert data.shape.end_token == (END if packing == "best_fit" else None)
    assert is_in_memory(data.train)
    inputs, targets = fetch_batch(data.train, np.arange(len(data.train)))
    assert (targets[inputs == END] == -100).all()


def test_a_file_that_lacks_its_last_end_loses_nothing(tmp_path: Path) -> None:
    data = open_tokens(tmp_path, [[1, 2, 3, END], [4, 5]], packing="best_fit")
    inputs, targets = fetch_batch(data.train, np.arange(1))
    assert inputs.tolist() == [[1, 2, 3, END, 4, 5, END, END]]
    assert targets.tolist() == [[2, 3, END, -100, 5, -100, -100, -100]]


def test_rows_keep_the_masks_of_their_targets(tmp_path: Path) -> None:
    rows = [{"tokens": [1, 2, 3], "labels": [-100, 3, 4]}, {"tokens": [5, 6, END], "labels": [6, END, -100]}]
    data = open_rows(tmp_path, rows, targets="labels", packing="best_fit")
    inputs, targets = fetch_batch(data.train, np.arange(len(data.train)))
    assert inputs.tolist() == [[1, 2, 3, END, 5, 6, END, END]]
    assert targets.tolist() == [[-100, 3, 4, -100, 6, END, -100, -100]]
    assert data.shape.kind == "tokens"
    joined = open_rows(tmp_path, rows, targets="labels", packing="stream", end_token=None)
    inputs, targets = fetch_batch(joined.train, np.arange(len(joined.train)))
    assert inputs.tolist() == [[1, 2, 3, 5, 6, END, 0, 0]]
    assert targets.tolist() == [[-100, 3, 4, 6, END, -100, -100, -100]]
    assert joined.shape.end_token is None


def test_texts_are_encoded_cut_and_told(tmp_path: Path) -> None:
    texts = [{"text": "a" * number} for number in (1, 30, 2, 7)]
    data = open_rows(
        tmp_path, texts, inputs="text", tokenizer="bytes", vocab_size=None, end_token=None, packing="best_fit"
    )
    (detail,) = packing_details(data.train)
    # With their ends 31 places, 8, 3 and 2: three rows for the first, whose last 7 are packed like any other.
    assert detail.pop("padding") == pytest.approx(4 / 48)
    assert {"documents": 4, "rows": 6, "cut": 1, "left_out": 0}.items() <= detail.items()
    assert "4 documents in 6 rows of 8 tokens, 8.3 % padding; 1 are cut, into 4 pieces" in detail["note"]
    assert data.shape.end_token == 256


def test_documents_are_kept_for_evaluation_whole(tmp_path: Path) -> None:
    documents = make_documents((4, 4, 4, 4, 8))
    data = open_tokens(tmp_path, documents, packing="best_fit", eval_fraction=0.4)
    assert data.eval is not None
    assert transitions(data.train) == sorted(p for d in documents[:4] for p in pairwise(d))
    assert transitions(data.eval) == sorted(pairwise(documents[4]))
    rows = [{"tokens": each} for each in documents]
    data = open_rows(tmp_path, rows, packing="best_fit", eval_fraction=0.4)
    assert data.eval is not None
    expected = sorted(pair for each in documents for pair in pairwise(each))
    assert sorted(transitions(data.train) + transitions(data.eval)) == expected


def test_rows_that_cannot_be_used_are_refused_or_left_out(tmp_path: Path) -> None:
    rows = [{"tokens": [1, 2, 3]}, {"tokens": [4, END, 5]}, {"tokens": [99, 1]}, {"tokens": [6, 7]}]
    with pytest.raises(BadSampleError, match=r"line 2 cannot be used: 'tokens'\[1\] is the end token 0, and documents"):
        open_rows(tmp_path, rows, packing="best_fit")
    with pytest.warns(UserWarning, match=r"line 3 cannot be used: 'tokens'\[0\] is 99|line 2 cannot be used"):
        data = open_rows(tmp_path, rows, packing="best_fit", on_bad="skip")
    assert transitions(data.train) == [(1, 2), (2, 3), (6, 7)]
    (detail,) = packing_details(data.train)
    assert detail["left_out"] == 2
    with pytest.raises(BadSampleError, match="'labels' has 1 numbers, and 'tokens' has 2 tokens"):
        open_rows(tmp_path, [{"tokens": [1, 2], "labels": [3]}], targets="labels", packing="best_fit")
    same = [{"tokens": [1, 2, 3], "labels": [-100, 2, 3]}]
    with pytest.raises(BadSampleError, match="'labels' has the tokens of 'tokens' themselves"):
        open_rows(tmp_path, same, targets="labels", packing="best_fit")
    twice = [{"tokens": [1, 2, 3, 4], "labels": [3, 4, -100, -100]}]
    with pytest.raises(BadSampleError, match="'labels' has the tokens of 'tokens' two places on, and a target is"):
        open_rows(tmp_path, twice, targets="labels", packing="best_fit")
    with pytest.raises(DataError, match="has 1 documents, and none has two tokens"):
        open_tokens(tmp_path, [[END]], packing="none")
    with pytest.raises(DataError, match=r"has end token None, of 11 tokens\n  data.packing = best_fit needs a token"):
        open_rows(tmp_path, rows, packing="best_fit", end_token=None)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"packing": "best_fit", "documents": "joined"}, "documents in a batch without boundaries"),
        ({"packing": "none", "windows": "fixed"}, "data.windows = fixed has no effect with data.packing = none"),
        ({"packing": "stream"}, "data.end_token = 0 has no effect with data.documents = joined"),
        ({"kind": "jsonl", "documents": "apart"}, "data.documents = apart has no effect with data.packing = none"),
        ({"kind": "jsonl", "end_token": 0}, "has no effect with data.packing = none\n  it says where attention begins"),
        ({"kind": "jsonl", "packing": "stream", "classes": 2}, "data.classes with data.packing = stream"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(data: dict[str, Any], told: str) -> None:
    own = {"kind": "tokens", "path": "nothing", "vocab_size": 11, "end_token": END}
    with pytest.raises(ConfigError) as caught:
        config_of(own | data)
    assert told in str(caught.value)


@pytest.mark.parametrize("sections", [{"parallel": {"pipeline": 2}}, {"model": {"kind": "factory", "factory": "a:b"}}])
def test_best_fit_needs_a_model_that_keeps_documents_apart(sections: dict[str, Any]) -> None:
    own = {"kind": "tokens", "path": "nothing", "vocab_size": 11, "packing": "best_fit"}
    model = {"kind": "gpt", "layers": 2, "heads": 2, "width": 8, "context": CONTEXT}
    train = {"steps": 1, "global_batch": 2}
    with pytest.raises(ConfigError, match=r"data.packing = best_fit with "):
        config_from_dict({"model": model, "data": own, "train": train, **sections})


def test_an_epoch_has_every_row_once_at_any_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    data = open_tokens(tmp_path, make_documents(LENGTHS * 5), packing="best_fit")
    assert isinstance(data.train, PackedRows)
    order = DataOrder(length=len(data.train), global_batch=4, seed=3)
    for epoch in range(2):
        first = epoch * order.samples_per_epoch
        seen = [order.batch_at(first + 4 * step).indices for step in range(order.steps_per_epoch)]
        again = order.batch_at(first + 8).indices
        assert np.array_equal(again, seen[2])
        indices = np.concatenate(seen)
        assert sorted(indices.tolist()) == list(range(len(data.train)))
        one = fetch_batch(data.train, indices, epoch)
        parts = [fetch_batch(data.train, part, epoch) for part in np.array_split(indices, 3)]
        for number in range(2):
            assert torch.equal(one[number], torch.cat([part[number] for part in parts]))
