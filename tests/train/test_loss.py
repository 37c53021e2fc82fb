"""Losses as a sum and a count: ragged, with ignored targets, and the user's own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kept_records import Kept
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.data.datasets import DataShape, TensorPairs
from paceline.data.registry import DataSplits
from paceline.engines.tensor.layers import SplitLogits
from paceline.errors import UsageError
from paceline.train.assemble import build_trainer
from paceline.train.loss import IGNORED, CrossEntropy, CustomLoss, LossValue, build_loss
from paceline.verify.case import ConfigCase

DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CLASSES = DataShape(kind="classes", features=4, classes=3)
TOKENS = DataShape(kind="tokens", vocab_size=5, context=6)


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def pass_through(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


def mean(value: LossValue) -> torch.Tensor:
    return value.total / value.count


@pytest.mark.parametrize("elements", [1.0, None])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_classes_in_batches_of_any_size(size: int, elements: float | None) -> None:
    outputs, targets = logits(size, 3), torch.arange(size) % 3
    value = CrossEntropy(elements)(pass_through, (outputs, targets))
    torch.testing.assert_close(mean(value), F.cross_entropy(outputs, targets), rtol=0, atol=1e-12)
    assert float(value.count) == size
    assert value.correct is None


def test_tokens_count_one_by_one() -> None:
    outputs, targets = logits(3, 6, 5), torch.arange(18).reshape(3, 6) % 5
    value = CrossEntropy(6.0)(pass_through, (outputs, targets))
    expected = F.cross_entropy(outputs.reshape(-1, 5), targets.reshape(-1))
    torch.testing.assert_close(mean(value), expected, rtol=0, atol=1e-12)
    assert value.count == 18.0


def test_logits_that_are_split_by_vocabulary_give_the_same() -> None:
    outputs, targets = logits(3, 6, 5), torch.arange(18).reshape(3, 6) % 5
    targets[1, 3:] = IGNORED
    expected = CrossEntropy(None).score(pass_through, (outputs, targets))
    assert expected.correct is not None

    def work(comm: VirtualCommunicator) -> LossValue:
        local = outputs.tensor_split(2, -1)[comm.rank]
        split = SplitLogits(local, comm, 3 * comm.rank, 5)
        return CrossEntropy(None).score(lambda _: split, (outputs, targets))

    for value in run_virtual(work, 2):
        torch.testing.assert_close(value.total, expected.total, rtol=0, atol=1e-12)
        assert value.count == expected.count
        assert value.correct is not None
        assert torch.equal(value.correct, expected.correct)


def test_ignored_tokens_do_not_count() -> None:
    outputs, targets = logits(3, 6, 5), torch.arange(18).reshape(3, 6) % 5
    targets[0, 2:] = IGNORED
    targets[2] = IGNORED
    value = CrossEntropy(None)(pass_through, (outputs, targets))
    expected = F.cross_entropy(outputs.reshape(-1, 5), targets.reshape(-1), ignore_index=IGNORED)
    torch.testing.assert_close(mean(value), expected, rtol=0, atol=1e-12)
    assert int(value.count) == 8


def test_a_batch_in_which_everything_is_ignored_sums_nothing() -> None:
    value = CrossEntropy(None)(pass_through, (logits(2, 3), torch.full((2,), IGNORED)))
    assert (float(value.total), float(value.count)) == (0.0, 0.0)


def test_pieces_add_up_to_the_whole() -> None:
    """The sum over ragged pieces is the sum over the batch; a mean of their means is not its mean."""
    outputs, targets = logits(9, 3), torch.arange(9) % 3
    loss = CrossEntropy(None)
    pieces = [
        loss(pass_through, (o, t)) for o, t in zip(outputs.split([1, 5, 3]), targets.split([1, 5, 3]), strict=True)
    ]
    whole = loss(pass_through, (outputs, targets))
    total, count = sum(piece.total for piece in pieces), sum(piece.count for piece in pieces)
    torch.testing.assert_close(total / count, mean(whole), rtol=0, atol=1e-12)
    mean_of_means = torch.stack([mean(piece) for piece in pieces]).mean()
    assert abs(mean_of_means - mean(whole)) > 1e-3


def test_score_counts_right_answers_and_no_ignored_ones() -> None:
    outputs = torch.eye(3)[[0, 1, 2, 0]]
    targets = torch.tensor([0, 1, 0, IGNORED])
    value = CrossEntropy(None).score(pass_through, (outputs, targets))
    assert value.correct is not None
    assert (int(value.correct), int(value.count)) == (2, 3)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [(CLASSES, 1.0), (TOKENS, 6.0), (DataShape(kind="tokens"), None), (DataShape(kind="custom"), None)],
)
def test_auto_knows_the_count_where_every_sample_counts_alike(shape: DataShape, expected: float | None) -> None:
    loss = build_loss("auto", shape)
    assert isinstance(loss, CrossEntropy)
    assert loss.elements_per_sample == expected


@pytest.mark.parametrize("shape", [CLASSES, TOKENS])
def test_where_targets_may_be_ignored_they_are_counted(shape: DataShape) -> None:
    assert build_loss("auto", shape, may_ignore=True).elements_per_sample is None


def padded_data() -> DataSplits:
    inputs = torch.arange(48).reshape(8, 6) % 5
    targets = (inputs + 1) % 5
    targets[:, 4:] = IGNORED
    return DataSplits(train=TensorPairs(inputs, targets), eval=None, shape=TOKENS)


def test_padding_in_the_data_of_a_user_does_not_dilute_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set may state its shape and still pad: only the targets that are there count."""
    monkeypatch.setattr("paceline.imports.import_from_path", lambda *_: padded_data)
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "layers": 1, "heads": 1, "width": 8, "context": 6},
            "data": {"kind": "factory", "factory": "mine:padded_data"},
            "train": {"dtype": "float64"},
        }
    )
    case = ConfigCase(config, batch=8)
    value = case.make_loss()(case.make_model(), case.make_batch(0))
    assert int(value.count) == 8 * 4


# The user's own.

LOSSES = """
import torch

def summed(model, batch):
    inputs, targets = batch
    return (model(inputs).squeeze(-1) - targets).square().sum(), len(targets)

def weighted(model, batch):
    inputs, targets = batch
    return (model(inputs).squeeze(-1) - targets).abs().sum()[None], torch.tensor([2.5], requires_grad=True)

def averaged(model, batch):
    return model(batch[0]).mean()

def unsummed(model, batch):
    return model(batch[0]), len(batch[0])

def uncounted(model, batch):
    return model(batch[0]).sum(), "many"

def counted_each(model, batch):
    return model(batch[0]).sum(), torch.ones(len(batch[0]))

number = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "losses_of_a_user.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "losses_of_a_user"


def call(path: str) -> LossValue:
    torch.manual_seed(0)
    batch = torch.ones(4, 2), torch.arange(4.0)
    return build_loss(path, DataShape(kind="custom"))(nn.Linear(2, 1), batch)


def test_a_custom_loss_by_its_path(user_module: str) -> None:
    loss = build_loss(f"{user_module}:summed", CLASSES)
    assert isinstance(loss, CustomLoss)
    assert loss.elements_per_sample is None
    value = call(f"{user_module}:summed")
    assert value.count == 4
    assert value.total.shape == ()
    assert value.total.requires_grad


def test_a_sum_and_a_count_of_one_element_become_scalars(user_module: str) -> None:
    value = call(f"{user_module}:weighted")
    assert isinstance(value.count, torch.Tensor)
    assert value.total.shape == value.count.shape == ()
    assert not value.count.requires_grad


def test_a_custom_loss_scores_without_right_answers(user_module: str) -> None:
    loss = build_loss(f"{user_module}:summed", CLASSES)
    value = loss.score(nn.Linear(2, 1), (torch.ones(4, 2), torch.arange(4.0)))
    assert value.correct is None


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("averaged", ["returned Tensor", "a mean would weigh ragged batches wrongly", "return loss.sum(), count"]),
        ("unsummed", ["returned a sum of shape [4, 1]"]),
        ("uncounted", ["returned a count of type str"]),
        ("counted_each", ["returned a count of shape [4]"]),
    ],
)
def test_a_custom_loss_of_another_form_is_refused(user_module: str, name: str, messages: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        call(f"{user_module}:{name}")
    for message in [f"train.loss = {user_module}:{name}", *messages]:
        assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}:sumed", "did you mean summed"),
        ("{}:number", "cannot be called"),
        ("no_such_module_here:loss", "no module 'no_such_module_here'"),
        ("{}.summed", "did you mean {}:summed"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(user_module: str, path: Any, message: str) -> None:
    with pytest.raises(UsageError, match=r"train\.loss") as refusal:
        build_loss(path.format(user_module), CLASSES)
    assert message.format(user_module) in str(refusal.value)


@DYNAMO_WARNS
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.exhaustive)])
def test_a_compiled_loss_is_the_same_and_takes_ragged_batches_in_one_graph(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounterWithBackend(backend)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    compiled = CrossEntropy(None, compiles=True)
    for samples in (7, 5, 6):
        logits = torch.randn(samples, 3, 11, dtype=torch.float64)
        targets = torch.randint(11, (samples, 3))
        targets[0, 0] = IGNORED
        found = []
        for loss in (compiled, CrossEntropy(None)):
            own = logits.clone().requires_grad_()
            value = loss(lambda _, own=own: own, (None, targets))
            value.total.backward()
            assert own.grad is not None
            found.append((value.total.detach(), own.grad, value.count))
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-10)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@DYNAMO_WARNS
@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16_master", "fp32"])
def test_a_run_of_a_compiled_model_compiles_its_loss(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(*, compiles: bool) -> list[float]:
        values = {
            "model": {"kind": "gpt", "layers": 1, "heads": 2, "width": 16, "context": 8, "compile": compiles},
            "data": {"kind": "synthetic_tokens", "samples": 32, "context": 8, "vocab_size": 16},
            "train": {"steps": 3, "global_batch": 8, "precision": precision},
        }
        sink = Kept()
        build_trainer(config_from_dict(values), SoloCommunicator(torch.device("cpu")), sink=sink).run()
        return [record.loss_sum for record in sink.steps]

    plain = losses(compiles=False)
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    assert losses(compiles=True) == pytest.approx(plain, rel=1e-2)
    assert counter.frame_count == 2  # the model and its loss, both whole
    torch._dynamo.reset()
