"""A step on packed rows is that of the documents one by one, in float64, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kept_records import Kept
from saved_runs import losses_until, save_now
from torch import Tensor

from paceline.checkpoint import open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.config.data_sections import Packing
from paceline.data.packing import PackedRows
from paceline.models import document_attention, gpt
from paceline.train.assemble import build_trainer, build_workload
from paceline.train.reach import packing_notes

END, CONTEXT, RATE = 0, 8, 0.5
LENGTHS = (5, 2, 1, 8, 9, 3, 20, 4, 17, 6, 6)  # with their ends: one fills a row, one has one more, two are longer
Trained = tuple[float, dict[str, Tensor]]


@pytest.fixture
def documents(tmp_path: Path) -> list[list[int]]:
    draw = np.random.default_rng(0)
    found = [[*draw.integers(1, 11, size=length - 1).tolist(), END] for length in LENGTHS]
    np.save(tmp_path / "tokens.npy", np.concatenate(found).astype(np.uint16))
    return found


def make_config(folder: Path, packing: Packing, steps: int = 1, rows: int = 99, **sections: Any) -> Any:
    data = {"kind": "tokens", "path": str(folder / "tokens.npy"), "vocab_size": 11, "end_token": END}
    data |= {"packing": packing, "documents": "apart", "eval_fraction": 0}
    data |= {"windows": "fixed"} if packing == "stream" else {}
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 16, "context": CONTEXT, "positions": "learned"}
    return config_from_dict(
        {
            "model": {"kind": "gpt", **sizes, "dropout": 0.0},
            "data": data,
            "optim": {"kind": "sgd", "lr": RATE, "momentum": 0, "weight_decay": 0, "clip_norm": None},
            "train": {"steps": steps, "global_batch": rows, "dtype": "float64"},
            **sections,
        }
    )


def pieces_of(documents: Sequence[list[int]], packing: Packing) -> Iterator[list[int]]:
    """Yields what the model sees of documents alone: inputs and, one later, targets; no more inputs than a row has."""
    if packing != "stream":
        for each in documents:
            yield from (each[first : first + CONTEXT + 1] for first in range(0, len(each) - 1, CONTEXT))
        return
    tokens = [token for each in documents for token in each]
    for first in range(0, len(tokens) - CONTEXT, CONTEXT):
        piece: list[int] = []
        for place in range(first, first + CONTEXT):
            piece.append(tokens[place])
            if tokens[place] == END:
                yield piece
                piece = []
        if piece:
            yield [*piece, tokens[first + CONTEXT]]


def one_by_one(documents: Sequence[list[int]], folder: Path, packing: Packing) -> Trained:
    """Returns the mean loss over the targets of documents that the model reads one by one, and the weights after it."""
    model = build_workload(make_config(folder, packing)).model
    model.end_token = None  # a row is a document
    total, count = torch.zeros((), dtype=torch.float64), 0
    for piece in pieces_of(documents, packing):
        if len(piece) > 1:
            tokens = torch.tensor(piece)
            total = total + F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="sum")
            count += len(piece) - 1
    (total / count).backward()
    weights = {
        name: each.detach() - RATE * each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    return total.item() / count, weights


def trained(comm: Communicator, folder: Path, packing: Packing, **sections: Any) -> Trained:
    rows = len(build_workload(make_config(folder, packing)).data.train)
    trainer = build_trainer(make_config(folder, packing, rows=rows + rows % 2, **sections), comm)
    (result,) = trainer.steps()
    sums = torch.tensor([float(result.outcome.loss_sum), float(result.outcome.count)], dtype=torch.float64)
    comm.all_reduce(sums).wait()
    return (sums[0] / sums[1]).item(), trainer.parts.engine.full_state_dict()


def check_same(found: Trained, expected: Trained) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-10, atol=1e-10)


SOLO = SoloCommunicator(torch.device("cpu"))


@pytest.mark.parametrize("packing", ["best_fit", "stream", "none"])
def test_a_step_is_that_of_the_documents_one_by_one(
    packing: Packing, documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packing == "best_fit":  # as rows beyond 512 tokens are computed
        monkeypatch.setattr(document_attention, "_SHORT", 0)
        monkeypatch.setattr(document_attention, "_TOGETHER", 4)
    expected = one_by_one(documents, tmp_path, packing)
    check_same(trained(SOLO, tmp_path, packing), expected)
    ways: dict[str, list[dict[str, Any]]] = {
        "best_fit": [{"strategy": "ddp"}, {"context": 2}],
        "stream": [{"strategy": "zero2"}],
        "none": [{"strategy": "fsdp"}],
    }
    for parallel in ways[packing]:
        for found in run_virtual(lambda comm, way=parallel: trained(comm, tmp_path, packing, parallel=way), 2):  # type: ignore[misc]
            check_same(found, expected)


def targets_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PackedRows.read

    def crossing(self: PackedRows, indices: Any, epoch: int) -> Any:
        inputs, targets = read(self, indices, epoch)
        followers = F.pad(inputs[:, 1:], (0, 1), value=-100)
        return inputs, torch.where(inputs == END, followers, targets)

    monkeypatch.setattr(PackedRows, "read", crossing)


def attention_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "document_starts", lambda tokens, _: torch.zeros_like(tokens))


@pytest.mark.parametrize("plant", [targets_cross, attention_crosses])
def test_what_crosses_a_boundary_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    documents: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = one_by_one(documents, tmp_path, "best_fit")
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_same(trained(SOLO, tmp_path, "best_fit"), expected)


def test_a_run_on_packed_rows_resumes_exactly_on_other_ranks(documents: list[list[int]], tmp_path: Path) -> None:
    def train(comm: Communicator, load: Path | None = None, **sections: Any) -> dict[str, Tensor]:
        trainer = build_trainer(make_config(tmp_path, "best_fit", steps=6, rows=4, **sections), comm)
        if load is not None:
            trainer.load_state(open_checkpoint(load))
        losses_until(trainer, 2 if load is None else 6)
        if load is None:
            save_now(trainer, tmp_path)
            losses_until(trainer, 6)
        return trainer.parts.engine.full_state_dict()

    whole = train(SOLO)
    assert len(documents) == len(LENGTHS)
    found = run_virtual(lambda comm: train(comm, tmp_path / "step-00000002", parallel={"strategy": "fsdp"}), 2)
    for name, weight in whole.items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-10, atol=1e-10)


def test_how_full_rows_are_is_recorded(documents: list[list[int]], tmp_path: Path) -> None:
    kept = Kept()
    trainer = build_trainer(make_config(tmp_path, "best_fit", rows=3), SOLO, sink=kept)
    trainer.run()
    (event,) = (each for each in kept.events if each.name == "packing")
    assert event.detail["documents"] + event.detail["left_out"] == len(documents)
    assert "2.5 % padding; 2 are cut, into 5 pieces" in event.detail["note"]
    assert packing_notes(config := make_config(tmp_path, "best_fit")) == [event.detail["note"]]
    assert packing_notes(config.with_values("data", packing="stream")) == []
