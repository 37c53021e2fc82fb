"""Penalties of routers and biases of their choice on many ranks: those of one process that has the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from torch import Tensor
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config.sections import RouterConfig
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.models.balance import Balanced, take_loads
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout
from paceline.train.loss import IGNORED, CrossEntropy, LossValue
from paceline.train.step import StepPolicy, train_step

ROWS, TOKENS, VOCABULARY, EXPERTS, ACTIVE = 7, 8, 31, 4, 2
AUXILIARY = RouterConfig(balance_weight=0.3, z_weight=0.05)
BIASED = RouterConfig(balance="bias", balance_weight=0.01, scores="sigmoid")
LAYOUTS = {
    "ddp": (1, Layout()),
    "ddp 2": (2, Layout()),
    "zero2": (2, Layout(strategy="zero2")),
    "fsdp": (4, Layout(strategy="fsdp")),
    "checkpointed": (2, Layout(strategy="fsdp", checkpoint_activations="matmuls")),
    "pipeline": (2, Layout(pipeline=2)),
    "zero-bubble pipeline": (4, Layout(pipeline=2, schedule="zb-h1", checkpoint_activations="full")),
    "context": (2, Layout(context_ranks=2)),
    "tensor": (2, Layout(tensor=2)),
    "parts of the sequence": (2, Layout(tensor=2, sequence_parallel=True)),
    "experts over ranks": (2, Layout(expert=2)),
    "experts over ranks, fsdp": (4, Layout(expert=2, strategy="fsdp", checkpoint_activations="full")),
}


def make_model(router: RouterConfig = AUXILIARY) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "context": TOKENS, "tied": True}
    model = GPT(gpt_config(vocab_size=VOCABULARY, experts=EXPERTS, active=ACTIVE, router=router, **sizes)).double()
    with torch.no_grad():
        for each in routers(model):
            each.get_parameter("weight").mul_(30)  # experts differ in their scores
    return model


def routers(model: torch.nn.Module) -> list[Balanced]:
    return [each for each in model.modules() if isinstance(each, Balanced)]


def whole_batch(seed: int = 1, *, ragged: bool = False) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    targets = drawn[:, 1:].clone()
    if ragged:
        targets[0, :5] = IGNORED
    return drawn[:, :-1], targets


def objective_alone(model: GPT, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the whole objective, in the terms of the docs and by autograd alone."""
    seen: list[tuple[Any, Tensor]] = []
    hooks = [each.register_forward_hook(lambda m, _, routing: seen.append((m, routing))) for each in routers(model)]
    model.eval()  # where a layer has no penalties of its own
    inputs, targets = batch
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    for layer, routing in seen:
        scores = routing.logits.softmax(-1).view(ROWS, TOKENS, EXPERTS)
        for row, chosen in zip(scores, routing.experts.view(ROWS, -1), strict=True):
            f = torch.bincount(chosen, minlength=EXPERTS).double() / len(chosen)
            total = total + layer.rule.balance_weight * TOKENS * EXPERTS * (f * row.mean(0)).sum()
        total = total + layer.rule.z_weight * routing.logits.logsumexp(-1).square().sum()
    for hook in hooks:
        hook.remove()
    return total / (targets != IGNORED).sum()


def step_batch(engine: Engine, batch: tuple[Tensor, Tensor], accumulate: int) -> StepBatch:
    """Deals rows out to ranks and microbatches; some are left without."""
    shared = engine.batch_comm
    own = [each.tensor_split(shared.size)[shared.rank] for each in batch]
    pieces = list(zip(*(each.tensor_split(accumulate) for each in own), strict=True))
    microbatches = [piece if len(piece[0]) else None for piece in pieces]
    local = [len(piece[0]) for piece in pieces]
    return StepBatch(
        position=0, next_position=ROWS, epoch=0, global_samples=ROWS, microbatches=microbatches, local_samples=local
    )


def loss_of(*, ragged: bool) -> CrossEntropy:
    return CrossEntropy(None if ragged else float(TOKENS))


# By default each layout once, and in turn with both numbers of microbatches, with and without ragged rows.
OBJECTIVES = [
    pytest.param(name, accumulate, ragged, marks=pytest.mark.exhaustive if is_left else ())
    for place, name in enumerate(LAYOUTS)
    for accumulate in (1, 3)
    for ragged in (False, True)
    for is_left in [place % 4 != (accumulate == 3) + 2 * ragged]
]


@pytest.mark.parametrize(("name", "accumulate", "ragged"), OBJECTIVES)
def test_gradients_are_those_of_the_whole_objective(name: str, accumulate: int, ragged: bool) -> None:
    ranks, layout = LAYOUTS[name]
    batch, alone = whole_batch(ragged=ragged), make_model()
    objective_alone(alone, batch).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}

    def train(comm: Communicator) -> tuple[dict[str, Tensor | None], Tensor]:
        engine = parallelize(make_model(), comm, layout=layout)
        found: dict[str, Tensor | None] = {}
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: found.update(engine.full_gradients()))
        train_step(engine, optimizer, step_batch(engine, batch, accumulate), loss_of(ragged=ragged), StepPolicy())
        loads = take_loads(engine.module)
        is_first = engine.groups.tensor.rank == 0  # others route alike
        return found, torch.stack([each.choices.sum() for each in loads.values()]).sum() * is_first

    results = run_virtual(train, ranks=ranks)
    for found, _ in results:
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-13, msg=key)
    assert sum(int(count) for _, count in results) == 2 * ROWS * TOKENS * ACTIVE, "each choice is counted once"


def train_biased(comm: Communicator, layout: Layout, accumulate: int, steps: int = 4, bad: int = -1) -> list[Tensor]:
    """Returns the biases after each step; the gradients of step ``bad`` are not finite."""
    engine = parallelize(make_model(BIASED), comm, layout=layout)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
    history = []
    for step in range(steps):
        loss: Any = loss_of(ragged=False) if step != bad else Spoiled(float(TOKENS))
        train_step(engine, optimizer, step_batch(engine, whole_batch(step), accumulate), loss, StepPolicy())
        state = engine.full_state_dict()
        history.append(torch.stack([value for name, value in state.items() if name.endswith("router.bias")]))
    return history


class Spoiled(CrossEntropy):
    def __call__(self, model: Any, batch: Any) -> LossValue:
        value = super().__call__(model, batch)
        return LossValue(value.total * float("inf"), value.count)


@covering(name=["ddp", "fsdp", "pipeline", "context", "tensor", "experts over ranks"], accumulate=[1, 3])
def test_biases_move_by_the_load_of_the_whole_batch(name: str, accumulate: int) -> None:
    ranks, layout = LAYOUTS[name]
    model = make_model(BIASED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(4):  # one process, written out
        inputs, targets = whole_batch(step)
        before = [each.bias.clone() for each in routers(model) if each.bias is not None]
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        loads = [each.choices for each in take_loads(model).values()]
        moved = [bias + 0.01 * (load.double().mean() - load).sign() for bias, load in zip(before, loads, strict=True)]
        for each, bias in zip(routers(model), moved, strict=True):
            each.bias = bias
        expected.append(torch.stack(moved))
    assert len({value.item() for value in expected[-1].flatten()}) > 2, "experts have different biases"
    for found in run_virtual(lambda comm: train_biased(comm, layout, accumulate), ranks=ranks):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_step_that_is_left_out_moves_no_bias() -> None:
    whole = run_virtual(lambda comm: train_biased(comm, Layout(), 2, steps=2, bad=1), ranks=2)
    for first, second in whole:
        assert first.any()
        assert torch.equal(first, second)


def test_loads_of_a_step_that_was_left_out_do_not_count_later() -> None:
    ((_, first),) = run_virtual(lambda comm: train_biased(comm, Layout(), 1, steps=2, bad=0), ranks=1)
    model = make_model(BIASED)
    inputs, targets = whole_batch(1)
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    expected = []
    for each in routers(model):
        each.move_bias(each.arrived)
        expected.append(each.bias)
    torch.testing.assert_close(first, torch.stack([each for each in expected if each is not None]), rtol=0, atol=0)


def test_biases_resume_to_the_bit_on_other_ranks(tmp_path: Path) -> None:
    def train(comm: Communicator, strategy: Any, steps: range, *, saves: bool) -> dict[str, Tensor]:
        engine = parallelize(make_model(BIASED), comm, strategy)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        if steps.start:
            paceline.load(tmp_path / "saved", engine, optimizer)
        for step in steps:
            train_step(engine, optimizer, step_batch(engine, whole_batch(step), 2), loss_of(ragged=False), StepPolicy())
        if saves:
            paceline.save(tmp_path / "saved", engine, optimizer, step=steps.stop)
        return engine.full_state_dict()

    (straight,) = run_virtual(lambda comm: train(comm, "ddp", range(4), saves=False), ranks=1)
    run_virtual(lambda comm: train(comm, "fsdp", range(2), saves=True), ranks=2)
    for resumed in run_virtual(lambda comm: train(comm, "ddp", range(2, 4), saves=False), ranks=4):
        for name, value in straight.items():
            exact = name.endswith("router.bias")
            torch.testing.assert_close(resumed[name], value, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)


def test_accumulated_passes_of_ones_own_loop_are_weighed_and_move_biases() -> None:
    def train(comm: Communicator, batches: int) -> tuple[dict[str, Any], Tensor]:
        both = RouterConfig(balance="bias", balance_weight=0.01, z_weight=0.05)
        engine = parallelize(make_model(both), comm)
        inputs, targets = whole_batch()
        pairs = TensorDataset(inputs[:6], targets[:6])
        loader = paceline.loader(pairs, comm, batch_size=6 // batches, shuffle=False)
        found = {}
        for x, y in loader:
            with engine.accumulate(batches, loader) as turn:
                loss = F.cross_entropy(engine(x).flatten(0, 1), y.flatten(), reduction="sum") / TOKENS
                with engine.loss_factor(turn.scale / TOKENS):
                    (loss * turn.scale).backward()
                if turn.is_last:
                    found = engine.full_gradients()
        return found, torch.stack([each.bias for each in routers(engine.module) if each.bias is not None])

    ((gradients, biases),) = run_virtual(lambda comm: train(comm, 1), ranks=1)
    assert biases.any()
    for found, moved in run_virtual(lambda comm: train(comm, 3), ranks=2):
        torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-13)
        assert torch.equal(moved, biases)


@pytest.mark.parametrize("name", ["ddp 2", "pipeline", "context", "experts over ranks"])
def test_what_is_dropped_is_that_of_one_process(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    rule = RouterConfig(balance_weight=0.3, capacity=1.0)

    def train(comm: Communicator, layout: Layout) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        engine = parallelize(make_model(rule), comm, layout=layout)
        engine.run_microbatches(
            step_batch(engine, whole_batch(), 3).microbatches,
            loss_of(ragged=False),
            engine.gradient_comm.size / (ROWS * TOKENS),
        )
        return engine.full_gradients(), {key: each.dropped for key, each in take_loads(engine.module).items()}

    ((expected, dropped),) = run_virtual(lambda comm: train(comm, Layout()), ranks=1)
    results = run_virtual(lambda comm: train(comm, layout), ranks=ranks)
    for found, _ in results:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    total = sum(each.sum() for each in dropped.values())
    assert total > 10
    assert sum(each.sum() for _, found in results for each in found.values()) == total
