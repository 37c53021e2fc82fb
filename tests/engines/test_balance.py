"""Penalties of routers and biases of their choice on many ranks: those of one process that has the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config.sections import RouterConfig
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.models.balance import Balanced, take_loads
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout
from paceline.train.loss import IGNORED, CrossEntropy
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


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
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
        return found, torch.stack([each.choices.sum() for each in loads.values()]).sum()

    results = run_virtual(train, ranks=ranks)
    for found, _ in results:
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-13, msg=key)
    assert sum(int(count) for _, count in results) == 2 * ROWS * TOKENS * ACTIVE, "each choice is counted once"
