"""Engines whose ranks share each sequence: parity with one process, what the engine cuts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import RankFailedError
from paceline.models.gpt import GPT, gpt_config
from paceline.train.loss import IGNORED

TOKENS, VOCABULARY, END = 21, 31, 4
Grads = dict[str, Tensor]


def make_model(*, documents: bool = False, **changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "tied": True}
    shape = gpt_config(**{**sizes, "context": TOKENS, "vocab_size": VOCABULARY, **changes})
    return GPT(shape, end_token=END if documents else None).double()


def make_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    targets = drawn[:, 1:].clone()
    targets[0, :8] = IGNORED
    return drawn[:, :-1], targets


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def counted(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


def one_process(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Grads:
    inputs, targets = batch
    (summed(model(inputs), targets) / counted(targets)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def own_loop(engine: Engine[Any], batch: tuple[Tensor, Tensor]) -> Grads:
    inputs, targets = engine.cut(*batch)
    (summed(engine(inputs), targets) * engine.loss_scale(counted(targets))).backward()
    return {name: value for name, value in engine.full_gradients().items() if value is not None}


def through_microbatches(engine: Engine[Any], batch: tuple[Tensor, Tensor]) -> Grads:
    def loss(model: Any, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(part[0])
        total = logits.cross_entropy(part[1], IGNORED) if hasattr(logits, "cross_entropy") else summed(logits, part[1])
        return total, counted(part[1])

    halves = [tuple(each[first : first + 2] for each in batch) for first in (0, 2)]
    engine.run_microbatches(halves, loss, engine.groups.context.size / counted(batch[1]).item())  # all read the same
    return {name: value for name, value in engine.full_gradients().items() if value is not None}


def check(expected: Grads, found: list[Grads]) -> None:
    for gradients in found:
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-10)


SPREAD: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp", "checkpoint_activations": "full"},
    "matmuls": {"checkpoint_activations": "matmuls"},
}


@covering(
    spread=SPREAD, ranks=[2, 3, 4, 8], method=["ring", "both", "gather", "auto", "ulysses"], documents=[False, True]
)
def test_gradients_are_those_of_one_process(spread: Any, ranks: int, method: str, documents: bool) -> None:
    if method == "ulysses" and ranks in (3, 8):  # of four heads
        ranks = 4
    batch = make_batch()

    def work(comm: Communicator) -> Grads:
        model = make_model(documents=documents)
        return own_loop(parallelize(model, comm, context_ranks=ranks, context_method=method, **spread), batch)

    check(one_process(make_model(documents=documents), batch), run_virtual(work, ranks))


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, {"tensor": 2}),
        (4, {"pipeline": 2, "strategy": "zero1"}),
        (8, {"pipeline": 2, "tensor": 2, "checkpoint_activations": "full"}),
        (4, {"pipeline": 2, "schedule": "zb-h1"}),
        (4, {"strategy": "hybrid", "shard_ranks": 2}),
    ],
    ids=["tensor", "pipeline", "both", "two halves", "hybrid"],
)
def test_layers_are_spread_besides(ranks: int, changes: dict[str, Any]) -> None:
    batch = make_batch()

    def work(comm: Communicator) -> Grads:
        return through_microbatches(parallelize(make_model(), comm, context_ranks=2, **changes), batch)

    check(one_process(make_model(), batch), run_virtual(work, ranks))


def test_sequence_parallelism_cuts_parts_again() -> None:
    inputs, targets = (each[:, :20] for each in make_batch())
    batch = inputs, targets

    def work(comm: Communicator) -> Grads:
        engine = parallelize(make_model(), comm, context_ranks=2, tensor=2, sequence_parallel=True)
        return through_microbatches(engine, batch)

    check(one_process(make_model(), batch), run_virtual(work, 4))


class Own(nn.Module):
    """A model of a user's: encoder and decoder, with attention across, and a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.inner, self.across, self.head = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        first = checkpoint(self._mix, self.embedding(source), self.embedding(source), False, use_reentrant=False)
        second = self._mix(self.embedding(target), self.embedding(target), True)
        return self.head(second + self._mix(second, first, False, self.across))

    def _mix(self, x: Tensor, of: Tensor, is_causal: bool, layer: nn.Linear | None = None) -> Tensor:
        layer = self.inner if layer is None else layer
        query, _, _ = layer(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        _, key, value = layer(of).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return paceline.attention(query, key, value, is_causal=is_causal).transpose(1, 2).flatten(2)


def test_a_model_of_ones_own_attends_across_two_sequences() -> None:
    source, (target, targets) = make_batch(2)[0][:, :13], make_batch()
    plain = Own()
    (summed(plain(source, target), targets) / counted(targets)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def work(comm: Communicator) -> Grads:
        engine = parallelize(Own(), comm, context_ranks=2)
        (own_source, own_target), own_targets = engine.cut((source, target), targets)
        loss = summed(engine(own_source, own_target), own_targets)
        (loss * engine.loss_scale(counted(own_targets))).backward()
        return {name: value for name, value in engine.full_gradients().items() if value is not None}

    check(expected, run_virtual(work, 2))


def test_a_backward_that_comes_late_is_about_its_own_rows() -> None:
    batches = make_batch(), make_batch(2)
    model = make_model(documents=True)
    sum(summed(model(inputs), targets) for inputs, targets in batches).backward()  # type: ignore[union-attr]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def work(comm: Communicator) -> Grads:
        engine = parallelize(
            make_model(documents=True), comm, context_ranks=2, strategy="zero1", checkpoint_activations="full"
        )
        losses = []
        for each in batches:
            inputs, targets = engine.cut(*each)
            losses.append(summed(engine(inputs), targets) * comm.size)
        sum(losses).backward()  # type: ignore[union-attr]
        return {name: value for name, value in engine.full_gradients().items() if value is not None}

    check(expected, run_virtual(work, 2))


def test_ranks_that_share_a_sequence_draw_the_numbers_of_one_process() -> None:
    batch = make_batch()

    def make() -> nn.Module:
        model = make_model(dropout=0.2)
        for block in model.layers:
            block.attention.dropout = 0.0  # of weights, ranks draw others than one process
        return model

    model = make()
    torch.manual_seed(5)
    expected = one_process(model, batch)

    def work(comm: Communicator) -> Grads:
        engine = parallelize(make(), comm, context_ranks=2, checkpoint_activations="full")
        torch.manual_seed(5)
        return own_loop(engine, batch)

    check(expected, run_virtual(work, 2))

    def streams(comm: Communicator) -> tuple[int, bool]:
        engine = parallelize(make(), comm, context_ranks=2)
        return engine.random_stream, engine.reports_samples

    assert run_virtual(streams, 4) == [(0, True), (0, False), (1, True), (1, False)]


def test_dropout_of_attention_is_the_same_for_any_number_of_ranks() -> None:
    batch = make_batch()

    def gradients(ranks: int) -> list[Grads]:
        def work(comm: Communicator) -> Grads:
            engine = parallelize(make_model(dropout=0.2), comm, context_ranks=ranks)
            torch.manual_seed(5)
            return own_loop(engine, batch)

        return run_virtual(work, ranks)

    check(gradients(2)[0], gradients(3))


def test_nothing_is_cut_where_nothing_is_shared() -> None:
    engine = parallelize(make_model(), paceline.connect())
    inputs, targets = make_batch()
    assert engine.cut(inputs) is inputs
    assert engine.cut(inputs, targets) == (inputs, targets)


def test_evaluation_needs_no_more_than_a_part_and_leaves_none() -> None:
    inputs, _ = make_batch()
    expected = make_model()(inputs)

    def work(comm: Communicator) -> Tensor:
        engine = parallelize(make_model(), comm, context_ranks=2, context_method="ring")
        with torch.no_grad():
            logits = engine(engine.cut(inputs))
            assert torch.equal(engine.module(inputs), make_model()(inputs))  # which has whole rows again
        sequences = engine.groups.sequences
        assert sequences is not None
        return sequences._begin(inputs, (TOKENS,)).join(logits)

    for whole in run_virtual(work, 2):
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


class Plain(nn.Module):
    """Attends with torch's own function, to the tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        x = self.embedding(tokens).unsqueeze(1)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


def call_whole(engine: Engine[Any]) -> None:
    engine(make_batch()[0])


def call_cut(engine: Engine[Any]) -> None:
    engine(engine.cut(make_batch()[0]))


def shift_later(engine: Engine[Any]) -> None:
    inputs = engine.cut(make_batch()[0])
    engine(inputs, labels=inputs)


def cut_classes(engine: Engine[Any]) -> None:
    engine.cut(make_batch()[0], torch.zeros(4, dtype=torch.int64))


def cut_others(engine: Engine[Any]) -> None:
    engine.cut(*make_batch(engine.world.rank))


def cut_unshifted(engine: Engine[Any]) -> None:
    engine.cut(make_batch()[0], make_batch()[0])


def shift_twice(engine: Engine[Any]) -> None:
    rows = make_batch()[0]
    targets = rows[:, 1:].clone()  # the library's labels, shifted by a data set
    targets[0, :8] = IGNORED
    engine.cut(rows[:, :-2], targets[:, 1:])


def cut_short(engine: Engine[Any]) -> None:
    engine.cut(make_batch()[0][:, :1])


@pytest.mark.parametrize(
    ("make", "use", "told"),
    [
        (make_model, call_whole, r"called with tensors of shape \(4, 21\), which were not cut"),
        (make_model, cut_classes, r"tensors of shape \(4, 21\), \(4,\), where 2 ranks share each sequence"),
        (make_model, cut_short, "a sequence of 1 tokens on 2 ranks"),
        (make_model, cut_unshifted, r"targets \[4, 21\] that are the tokens 0 places further on in their rows"),
        (make_model, shift_twice, r"targets \[4, 19\] that are the tokens 2 places further on in their rows"),
        (make_model, cut_others, "ranks 0 and 1 share each sequence, and read different batches"),
        (Plain, call_cut, "attention is not ours: its forward pass has called no attention of several ranks"),
        (Plain, shift_later, "called with labels, and without shift_labels"),
        (lambda: nn.TransformerEncoderLayer(16, 2), call_cut, "a MultiheadAttention sees the tokens of its own rank"),
        (lambda: nn.Conv1d(16, 16, 4), call_cut, "a Conv1d sees the tokens of its own rank alone"),
        (lambda: nn.GRU(16, 16), call_cut, "a GRU sees the tokens of its own rank alone"),
    ],
    ids=[
        *("whole", "classes", "short", "unshifted", "shifted twice", "others", "other attention", "labels"),
        *("of torch", "convolution", "recurrence"),
    ],
)
def test_what_cannot_be_is_told(make: Any, use: Any, told: str) -> None:
    with pytest.raises(RankFailedError, match=told):
        run_virtual(lambda comm: use(parallelize(make(), comm, context_ranks=2)), 2)


class Placed(nn.Module):
    """A model of a user's, with positions of its own or of ours."""

    def __init__(self, count: Callable[[int, Any], Tensor]) -> None:
        super().__init__()
        self.count, self.embedding = count, nn.Embedding(VOCABULARY, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.count(tokens.shape[1], tokens.device)[:, None]
        heads = x.unflatten(2, (4, 4)).transpose(1, 2)
        return paceline.attention(heads, heads, heads, is_causal=True)


def test_a_model_that_asks_for_no_positions_is_told_once() -> None:
    def work(comm: Communicator, count: Callable[[int, Any], Tensor]) -> list[str]:
        engine = parallelize(Placed(count), comm, context_ranks=2)
        for _ in range(2):
            engine(engine.cut(make_batch()[0]))
        return []

    with pytest.warns(UserWarning, match="asked for no positions, where 2 ranks share") as caught:
        run_virtual(lambda comm: work(comm, lambda length, _: torch.arange(length)), 2)
    assert len(caught) <= 2  # one of each rank
    run_virtual(lambda comm: work(comm, paceline.positions), 2)  # warnings are errors here


def test_targets_that_are_alike_by_chance_are_taken() -> None:
    """A row of one token says nothing of a shift; nor do few targets, or a convolution of single tokens."""
    same, few = torch.zeros(4, TOKENS, dtype=torch.int64), torch.full((4, TOKENS), IGNORED)
    few[:, 3] = make_batch()[0][:, 3]

    def work(comm: Communicator) -> list[int]:
        engine = parallelize(nn.Sequential(make_model(), nn.Conv1d(2, 2, 1)), comm, context_ranks=2)
        return [engine.cut(*batch)[1].shape[1] for batch in ((same, same), (make_batch()[0], few))]

    shares = torch.tensor(run_virtual(work, 2))
    assert shares.sum(0).tolist() == [TOKENS, TOKENS]


def test_ranks_of_other_sequences_read_other_samples() -> None:
    def work(comm: Communicator) -> list[tuple[int, ...]]:
        groups = parallelize(make_model(), comm, context_ranks=2, strategy="fsdp").groups
        return [tuple(each.ranks) for each in (groups.batch, groups.gradients, groups.shard, groups.context)]

    assert run_virtual(work, 4)[1] == [(1, 3), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1)]
