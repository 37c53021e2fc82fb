"""Classic bugs of ranks that share each sequence, planted one by one, are all found by the certificate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted_bugs import Bug, check_found, replacing
from torch import Tensor, nn

import paceline
from paceline.comm.base import Communicator
from paceline.engines.ddp import DataParallel
from paceline.engines.fsdp import FullySharded
from paceline.engines.sequence.part import SequenceRank
from paceline.engines.sequence.ring import RingAttention
from paceline.engines.sequences import Sequences
from paceline.errors import UsageError
from paceline.models import dropout as dropouts
from paceline.models.attention import current_part
from paceline.models.gpt import GPT, document_starts, gpt_config
from paceline.train.loss import IGNORED
from paceline.verify.case import FunctionCase, Settings
from paceline.verify.certificate import certify

TOKENS, VOCABULARY, END = 26, 29, 5  # 26 tokens: no two of the ranks have as many
SETTINGS = Settings.of(ranks=2, steps=2, context_ranks=2, context_method="ring", clip=None)
FSDP = Settings.of(ranks=2, steps=2, strategy="fsdp", context_ranks=2, context_method="ring", clip=None)


def make_model(**changes: Any) -> GPT:
    sizes: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "context": TOKENS, "vocab_size": VOCABULARY}
    return GPT(gpt_config(**sizes, **changes), end_token=END if changes.get("positions") == "learned" else None)


def make_apart() -> GPT:
    return make_model(positions="learned", tied=True)


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Two rows with documents, of which one counts at its beginning alone: ranks have different numbers of targets."""
    drawn = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    drawn[:, 9] = drawn[0, 17] = END
    targets = drawn[:, 1:].clone()
    targets[1, 8:] = IGNORED
    return drawn[:, :-1], targets


def summed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()


class Dropping(nn.Module):
    """A model that draws random numbers, in the same order on any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mixing = nn.Linear(16, 48)
        self.head = nn.Linear(16, VOCABULARY)
        self.dropout = nn.Dropout(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        places = paceline.positions(tokens.shape[1], tokens.device)
        x = self.dropout(self.embedding(tokens) + places.unsqueeze(-1) / TOKENS)
        query, key, value = self.mixing(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = paceline.attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.dropout(mixed))


CASES = {make: FunctionCase(model=make, batch=make_batch, loss=summed) for make in (make_model, make_apart, Dropping)}


def counted_twice(_: Any) -> Any:
    """Counts are added over the ranks that read other samples alone: the loss is that of one rank's tokens."""

    def loss_scale(self: DataParallel, count: Any) -> Tensor:
        total = torch.as_tensor(count, dtype=torch.float64).clone()
        self.batch_comm.all_reduce(total).wait()
        return self.gradient_comm.size / total

    return loss_scale


def over_the_ranks(original: Any) -> Any:
    """The mean over all tokens is divided by the ranks once more."""
    return lambda self, count: original(self, count) / self.groups.context.size


def mean_of_each(_: Any) -> Any:
    """Each rank takes the mean of its own tokens, of which they have different numbers."""
    return lambda _, count: 1.0 / torch.as_tensor(count, dtype=torch.float64).clamp(min=1)


def shifted_inside(original: Any) -> Any:
    """Rows are cut first, and then each rank takes the next of its own tokens as the target."""

    def cut(self: Sequences, batch: Any) -> Any:
        inputs, targets = original(self, batch)
        inside = torch.cat((inputs[:, 1:], torch.full_like(inputs[:, :1], IGNORED)), 1)
        return inputs, torch.where(targets == IGNORED, targets, inside)

    return cut


def in_order_of_ranks(original: Any) -> Any:
    """Positions are those of a row that is cut into one piece for each rank."""

    def positions(self: SequenceRank, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=original(self, length, device).device) + self.comm.rank * length

    return positions


def from_zero(original: Any) -> Any:
    return lambda *asked: torch.arange(asked[1], device=original(*asked).device)


def of_own_tokens(original: Any) -> Any:
    """Documents begin where they do among this rank's tokens."""

    def documents(self: GPT, tokens: Tensor) -> Tensor | None:
        is_whole = current_part() is None
        return original(self, tokens) if is_whole or self.end_token is None else document_starts(tokens, self.end_token)

    return documents


def none_known(original: Any) -> Any:
    """Rows are cut, and attention asked, as if each were one document."""

    def begin(self: Sequences, tokens: Tensor, lengths: Any) -> SequenceRank:
        del self._documents
        self._documents = None
        return original(self, tokens, lengths)

    return begin


def drawn_by_rank(_: Any) -> Any:
    """Each rank draws as many numbers as it has tokens."""
    return lambda x, probability, is_training: F.dropout(x, probability, is_training)


def wrong_but_on_the_last(original: Any) -> Any:
    """The ring loses half of the gradients of keys and values, unless the rank is the last."""

    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, rest = original(ctx, gradient)
        comm: Communicator = ctx.call.comm
        factor = 1.0 if comm.rank == comm.size - 1 else 0.5
        return query, key * factor, value * factor, rest

    return staticmethod(backward)


def bug(plant: Callable[..., Any], make: Callable[[], nn.Module] = make_model, **fields: Any) -> Bug:
    return Bug(**{"plant": plant, "case": CASES[make], "shows": "gradient", "settings": SETTINGS, **fields})


BUGS = {
    "loss counted once for each rank": bug(replacing(DataParallel, "loss_scale", counted_twice)),
    "loss divided by the ranks": bug(replacing(DataParallel, "loss_scale", over_the_ranks)),
    "labels shifted inside a shard": bug(replacing(Sequences, "cut", shifted_inside)),
    "positions in the order of ranks": bug(replacing(SequenceRank, "positions", in_order_of_ranks)),
    "positions from zero": bug(replacing(SequenceRank, "positions", from_zero)),
    "documents of a rank's own tokens": bug(replacing(GPT, "documents", of_own_tokens), make_apart, verdict=UsageError),
    "documents not known where rows are cut": bug(replacing(Sequences, "_begin", none_known), make_apart),
    "mean of means under fsdp": bug(replacing(FullySharded, "loss_scale", mean_of_each), settings=FSDP),
    "dropout drawn by rank": bug(replacing(dropouts, "dropout", drawn_by_rank), Dropping),
    "gradients of the ring": bug(replacing(RingAttention, "backward", wrong_but_on_the_last)),
}


@pytest.mark.some(8)
@pytest.mark.parametrize("planted", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_found(planted: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(planted, monkeypatch)


@pytest.mark.some(2)
@pytest.mark.parametrize("method", ["ring", "ulysses", "both", "gather"])
def test_dropout_is_that_of_one_process(method: str) -> None:
    settings = Settings.of(ranks=2, steps=2, context_ranks=2, context_method=method)
    assert settings.draws_alike
    certificate = certify(CASES[Dropping], settings)
    assert certificate.passed, certificate.divergence
    with pytest.raises(UsageError, match="draws"):  # nothing is compared that differs by itself
        certify(FunctionCase(model=lambda: make_model(dropout=0.1), batch=make_batch, loss=summed), settings)
    assert not dataclasses.replace(settings, ranks=4).draws_alike  # two groups read other samples
