"""Documents that are kept apart in one row: each gives the loss and the gradients that it gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from saved_runs import losses_until

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.config.sections import FactoryModelConfig
from paceline.data.datasets import DataShape
from paceline.data.fetch import fetch_batch
from paceline.data.registry import build_data
from paceline.errors import ConfigError, DataError, UsageError
from paceline.models.gpt import GPT, document_starts, gpt_config
from paceline.models.registry import build_model
from paceline.train.assemble import build_trainer

END = 0
LENGTHS = (1, 5, 2, 9, 3)


def make_model(end_token: int | None = END, **overrides: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 16, "context": 20, "vocab_size": 11, "dropout": 0.0}
    torch.set_default_dtype(torch.float64)  # for the tables of rotary positions, which are made but once
    try:
        return GPT(gpt_config(None, **sizes | overrides), end_token=end_token)
    finally:
        torch.set_default_dtype(torch.float32)


def make_documents() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.cat([torch.randint(1, 11, (length - 1,)), torch.tensor([END])]) for length in LENGTHS]


def gradients(model: GPT, rows: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Returns the summed loss of rows, without what follows an end, and its gradients."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        targets = torch.where(row[:-1] == END, -100, row[1:])
        if len(targets):
            total = total + F.cross_entropy(model(row[None, :-1])[0], targets, reduction="sum")
    total.backward()
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return total.item(), [each.clone() for each in found]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_packed_row_gives_the_loss_and_gradients_of_its_documents(positions: str) -> None:
    documents = make_documents()
    packed = [torch.cat(documents)]
    alone = gradients(make_model(None, positions=positions), documents)
    together = gradients(make_model(positions=positions), packed)
    assert together[0] == pytest.approx(alone[0], rel=1e-12)
    for ours, theirs in zip(together[1], alone[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    joined = gradients(make_model(None, positions=positions), packed)  # the test can fail
    assert joined[0] != pytest.approx(alone[0], rel=1e-6)


def test_a_document_begins_behind_each_end_and_at_the_row() -> None:
    tokens = torch.tensor([[5, END, 6, 7, END, END, 8], [END, 1, 2, 3, 4, 5, 6]])
    assert document_starts(tokens, END).tolist() == [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    padded = torch.tensor([[5, END, END, END, END, 6], [END, END, END, 7, END, END]])
    assert document_starts(padded, END).tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 1, 3, 3, 5]]


def test_what_cannot_keep_documents_apart_refuses() -> None:
    with pytest.raises(UsageError, match="stages cannot keep documents apart"):
        make_model().pipeline_layers()
    factory = FactoryModelConfig(kind="factory", factory="torch.nn:Identity")
    with pytest.raises(ConfigError, match=r"model.kind = factory cannot keep documents apart at token 7"):
        build_model(factory, DataShape(kind="tokens", vocab_size=11, context=4, end_token=7))


def make_config(path: str, *, data: Any = None, **sections: Any) -> Any:
    own = {"kind": "tokens", "path": path, "vocab_size": 11, "documents": "apart", "end_token": END, "verify": "none"}
    sizes = {"layers": 2, "heads": 2, "width": 8, "context": 12, "positions": "learned", "dropout": 0.0}
    return config_from_dict(
        {
            "model": {"kind": "gpt", **sizes},
            "data": own | (data or {}),
            "train": {"steps": 3, "global_batch": 4, "dtype": "float64"},
            **sections,
        }
    )


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 11, size=400).astype(np.uint16))
    return str(tmp_path / "tokens.npy")


def test_what_follows_an_end_is_no_target(tokens: str) -> None:
    splits = build_data(make_config(tokens).data, 12, 0)
    for dataset in (splits.train, splits.eval):
        assert dataset is not None
        inputs, targets = fetch_batch(dataset, np.arange(len(dataset)))
        assert torch.equal(targets == -100, inputs == END)
        assert (inputs == END).any()
    assert splits.shape.end_token == END


def test_sharded_and_checkpointed_blocks_are_handed_the_ends(tokens: str) -> None:
    def train(comm: Communicator, **sections: Any) -> torch.Tensor:
        trainer = build_trainer(make_config(tokens, **sections), comm)
        losses_until(trainer, 3)
        weights = trainer.parts.engine.full_state_dict()
        return torch.cat([weights[name].flatten() for name in sorted(weights)])

    solo = SoloCommunicator(torch.device("cpu"))
    whole = train(solo)
    sections = {"parallel": {"strategy": "fsdp"}, "memory": {"checkpoint_activations": "full"}}
    for found in run_virtual(lambda comm: train(comm, **sections), 2):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
    joined = train(solo, data={"documents": "joined", "end_token": None})
    assert not torch.allclose(joined, whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"parallel": {"pipeline": 2}}, "data.documents = apart with parallel.pipeline = 2"),
        ({"parallel": {"tensor": 2}}, "data.documents = apart with parallel.pipeline = 1 and parallel.tensor = 2"),
        ({"model": {"kind": "factory", "factory": "a:b"}}, "data.documents = apart with model.kind = factory"),
        ({"data": {"documents": "joined"}}, "data.end_token = 0 has no effect"),
    ],
)
def test_a_config_that_cannot_keep_them_apart_is_refused(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config("nothing", **sections)
    assert told in str(caught.value)


@pytest.mark.parametrize("end_token", [None, 11])
def test_tokens_without_an_end_are_refused(end_token: int | None, tokens: str) -> None:
    with pytest.raises(DataError, match=f"has end token {end_token}, of 11 tokens"):
        build_data(make_config(tokens, data={"end_token": end_token}).data, 12, 0)
