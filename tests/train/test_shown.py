"""Samples of evaluations: what is shown of them, by one rank, at no cost to the run."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kept_records import Kept
from PIL import Image

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.data.datasets import IGNORED, DataShape, TensorPairs, load_digits
from paceline.data.registry import DataSplits
from paceline.data.tokenizers import ByteTokenizer
from paceline.engines.apply import parallelize
from paceline.records.records import EvalRecord, EventRecord, Record, StepRecord
from paceline.train.assemble import build_trainer
from paceline.train.loss import LossValue
from paceline.train.randomness import capture_random_states
from paceline.train.shown import ShownSamples

DIGITS: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden_dim": 8, "dropout": 0.5},
    "data": {"kind": "digits", "eval_fraction": 0.2},
    "train": {"steps": 4, "global_batch": 32, "eval_every": 2},
    "monitor": {"samples": 3},
}
TEXT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 8, "context": 16},
    "train": {"steps": 2, "global_batch": 8, "dtype": "float64"},
    "monitor": {"samples": 2},
}


def train(comm: Communicator, values: dict[str, Any]) -> tuple[list[Record], Any]:
    """Returns the records of a rank, and its random states at the end."""
    sink = Kept()
    trainer = build_trainer(config_from_dict(values), comm, sink=sink)
    for _ in trainer.steps():
        if trainer.step % 2 == 0:
            trainer.evaluate()
    trainer.flush(wait=True)
    return sink.records, capture_random_states(comm.device)


def shown(records: list[Record]) -> list[tuple[int, Any]]:
    return [(each.step, each.detail["items"]) for each in records if getattr(each, "name", "") == "samples"]


def picture(encoded: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))


def test_one_rank_shows_digits_and_the_run_is_the_same_to_the_bit() -> None:
    with_samples = run_virtual(lambda comm: train(comm, DIGITS), ranks=2)
    without = run_virtual(lambda comm: train(comm, DIGITS | {"monitor": {"samples": 0}}), ranks=2)
    assert [shown(records) for records, _ in without] == [[], []]
    assert shown(with_samples[1][0]) == []
    ((first, items), (second, _)) = shown(with_samples[0][0])
    assert (first, second, len(items)) == (2, 4, 3)

    def figures(records: list[Record], kind: type[StepRecord | EvalRecord]) -> list[float | None]:
        return [each.loss for each in records if isinstance(each, kind)]

    for (records, states), (plain, plain_states) in zip(with_samples, without, strict=True):
        assert figures(records, StepRecord) == figures(plain, StepRecord)
        assert figures(records, EvalRecord) == figures(plain, EvalRecord)
        assert len(figures(records, StepRecord)) == 4
        assert states["torch"].equal(plain_states["torch"])
        assert states["python"] == plain_states["python"]


def test_digits_look_as_they_were_written() -> None:
    raw = load_digits()
    ((_, items), *_) = shown(train(SoloCommunicator(torch.device("cpu")), DIGITS)[0])
    images = (raw.inputs.view(-1, 8, 8) / 16 * 255).to(torch.uint8).numpy().astype(int)
    for text, encoded in items:
        place = int(np.abs(images - picture(encoded)).reshape(len(images), -1).max(1).argmin())
        assert np.abs(images[place] - picture(encoded)).max() <= 1
        assert int(text[0]) == raw.targets[place]


@pytest.mark.parametrize(("parallel", "rank"), [({"pipeline": 2}, 1), ({"tensor": 2}, 0), ({"context": 2}, 0)])
def test_one_rank_of_a_model_that_is_spread_shows_its_text(parallel: dict[str, int], rank: int, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 30)
    data = {"kind": "text", "path": str(tmp_path / "book.txt"), "tokens": "byte", "eval_fraction": 0.1}
    values = TEXT | {"data": data, "parallel": {"ranks": 2, **parallel}}
    found = [shown(records) for records, _ in run_virtual(lambda comm: train(comm, values), ranks=2)]
    assert [len(each) for each in found] == [int(number == rank) for number in range(2)]
    ((step, items),) = found[rank]
    assert (step, len(items)) == (2, 2)
    assert all([line.split(" ")[0] for line in text.splitlines()] == ["text", "goes", "answers"] for text, _ in items)


def see(
    data: DataSplits, inputs: torch.Tensor, targets: torch.Tensor, answers: torch.Tensor | None, count: int = 4
) -> Any:
    kept = ShownSamples(data, count)
    kept.begin(is_last=False)
    engine = parallelize(torch.nn.Linear(1, 1), SoloCommunicator(torch.device("cpu")))
    kept.see(engine, (inputs, targets), LossValue(torch.zeros(()), 1.0, answers=answers))
    kept.see(engine, (inputs + 1, targets), LossValue(torch.zeros(()), 1.0, answers=answers))  # a later batch
    found = kept.detail()
    assert kept.detail() is None
    return None if found is None else found["items"]


def splits(tokenizer: ByteTokenizer | None = None, **shape: Any) -> DataSplits:
    nothing = TensorPairs(torch.zeros(1, 1), torch.zeros(1))
    return DataSplits(train=nothing, eval=None, shape=DataShape(kind="classes", **shape), tokenizer=tokenizer)


def row(text: str) -> list[int]:
    return list(text.encode())


def test_a_row_of_text_goes_on_and_is_answered() -> None:
    inputs, targets = torch.tensor([row("a large cat")]), torch.tensor([row(" large cats")])
    answers = torch.tensor([[*row(" lerge cat"), 256]])  # one that the tokenizer does not have
    ((text, image),) = see(splits(ByteTokenizer()), inputs, targets, answers)
    assert text.splitlines() == ["text    'a lar'", "goes on 'ge cat'", "answers 'ge cat'"]
    assert image == ""
    targets[0, 6:] = IGNORED
    ((text, _),) = see(splits(ByteTokenizer()), inputs, targets, None)
    assert text.splitlines() == ["text    'a lar'", "goes on 'ge'"]


def test_texts_have_their_class_and_the_answer() -> None:
    names, pad = ("bad", "good"), ord("_")
    inputs = torch.tensor([row("fine_"), row("awful"), row("what?")])
    found = see(
        splits(ByteTokenizer(), class_names=names, pad_token=pad),
        inputs,
        torch.tensor([1, 0, IGNORED]),
        torch.tensor([1, 1, 0]),
    )
    assert [text for text, _ in found] == ["fine\ngood, right", "awful\nbad, taken for good", "what?\nno target"]
    pairs = torch.stack([inputs, torch.zeros_like(inputs)], 1)
    found = see(splits(ByteTokenizer(), pad_token=pad), pairs, torch.tensor([1, 0, 7]), None, count=2)
    assert [text for text, _ in found] == ["fine\n1", "awful\n0"]


def test_pictures_keep_their_colours_and_are_small() -> None:
    plain = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
    found = see(splits(), plain, torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert [text for text, _ in found] == ["0, right", "1, taken for 0"]
    assert picture(found[1][1]).tolist() == plain[1].permute(1, 2, 0).tolist()
    unit = torch.linspace(0.25, 0.5, 64).view(1, 8, 8)  # from 0 to 1: as they are
    ((_, encoded),) = see(splits(), unit, torch.tensor([0]), None)
    assert (picture(encoded).min(), picture(encoded).max()) == (63, 127)
    wide = torch.linspace(-3, 5, 200 * 100).view(1, 1, 200, 100)  # others: from the darkest to the lightest
    ((_, encoded),) = see(splits(), wide, torch.tensor([0]), None)
    assert picture(encoded).shape == (50, 25)
    assert picture(encoded).min() == 0
    assert picture(encoded).max() >= 253


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.zeros(2, 5), torch.tensor([0, 1])),  # features
        (torch.zeros(2, 3, 8, 8), torch.zeros(2)),  # a number for each
        (torch.zeros(2, 7, 8, 8), torch.tensor([0, 1])),  # no colours
        (torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64)),
    ],
)
def test_what_is_neither_text_nor_picture_is_not_shown(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    assert not see(splits(), inputs, targets, None)


def test_a_batch_that_is_no_pair_is_left_alone() -> None:
    kept = ShownSamples(splits(), 4)
    kept.begin(is_last=True)
    engine = parallelize(torch.nn.Linear(1, 1), SoloCommunicator(torch.device("cpu")))
    for batch in ({"x": torch.zeros(1)}, (torch.zeros(1, 8, 8),), torch.zeros(2, 3)):
        kept.see(engine, batch, LossValue(torch.zeros(()), 1.0))
    assert kept.detail() is None


def test_a_long_run_keeps_the_samples_of_ever_fewer_evaluations() -> None:
    engine = parallelize(torch.nn.Linear(1, 1), SoloCommunicator(torch.device("cpu")))
    kept, steps = ShownSamples(splits(), 1), []
    for number in range(1, 201):
        kept.begin(is_last=number == 199)
        kept.see(engine, (torch.zeros(1, 8, 8), torch.tensor([0])), LossValue(torch.zeros(()), 1.0))
        if kept.detail() is not None:
            steps.append(number)
    assert steps == [*range(1, 32), *range(32, 64, 2), *range(64, 128, 4), *range(128, 199, 8), 199, 200]


def test_the_event_is_told_in_the_records() -> None:
    records, _ = train(SoloCommunicator(torch.device("cpu")), DIGITS)
    places = [type(each).__name__ for each in records if isinstance(each, EvalRecord | EventRecord)]
    assert places == ["EvalRecord", "EventRecord"] * 2
