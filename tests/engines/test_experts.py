"""Parameters of one model that are averaged over different ranks: half over all, half over those with the same experts.

A sample goes through one of four experts. One process has all of them; of two neighbours each has two, and reads the
samples that need these. Gradients, the global norm and updates must be those of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.tools.audit import audit
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.engines.groups import mark_expert
from paceline.errors import UsageError
from paceline.plan.layout import Compression, Layout, groups_of

EXPERTS, WIDTH, STEPS, SAMPLES = 4, 6, 4, 16
ZERO = 1e-12


class Block(nn.Module):
    """A dense layer, and a layer of experts; the last feature says which expert a sample takes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, which = x[:, :WIDTH], x[:, WIDTH:]
        mixed = torch.einsum("bi,bij->bj", inner, self.experts[which[:, 0].long()])
        return torch.cat([torch.tanh(self.dense(inner) + mixed), which], 1)


class Head(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, :WIDTH])


def whole_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Block(), Block(), Block(), Head(WIDTH, 3)).double()


def own_model(part: int, parts: int) -> nn.Sequential:
    """The model with one of ``parts`` equal parts of the experts."""
    model = whole_model()
    for block in model:
        if isinstance(block, Block):
            mine = block.experts.data.chunk(parts)[part].clone()
            block.experts = nn.Parameter(mine)
            mark_expert(block.experts)
    return model


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, experts and targets; the samples of a step are dealt out by their experts."""
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    which = torch.arange(SAMPLES) % EXPERTS
    return features, which, torch.randint(3, (SAMPLES,), generator=generator)


def loss_of(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


@dataclass(slots=True)
class Trained:
    gradients: list[dict[str, torch.Tensor | None]]
    norms: list[float]
    state: dict[str, torch.Tensor]
    moments: dict[str, Any]


def train_alone(steps: range = range(STEPS), kind: float = 2.0) -> Trained:
    model = whole_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = Trained([], [], {}, {})
    for step in steps:
        features, which, targets = samples(step)
        inputs = torch.cat([features, which[:, None].double()], 1)
        (F.cross_entropy(model(inputs), targets, reduction="sum") / SAMPLES).backward()
        found.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind)))
        optimizer.step()
        optimizer.zero_grad()
    found.state = {name: value.clone() for name, value in model.state_dict().items()}
    found.moments = optimizer.state_dict()
    return found


def make_engine(comm: Communicator, layout: Layout) -> Engine:
    groups = groups_of(layout.for_ranks(comm.size), comm.rank)
    return parallelize(own_model(groups.expert.index(comm.rank), layout.expert), comm, layout=layout)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline"])
def test_all_experts_count_as_parameters(name: str) -> None:
    count = sum(parameter.numel() for parameter in whole_model().parameters())
    assert run_virtual(lambda comm: make_engine(comm, LAYOUTS[name]).num_parameters, ranks=4) == [count] * 4


def train_shared(
    comm: Communicator, layout: Layout, steps: range = range(STEPS), folder: Path | None = None, kind: float = 2.0
) -> Trained:
    engine = make_engine(comm, layout)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    if steps.start and folder is not None:
        paceline.load(folder, engine, optimizer)
    found = Trained([], [], {}, {})
    part, batch = engine.groups.expert, engine.groups.batch
    local = EXPERTS // layout.expert
    for step in steps:
        features, which, targets = samples(step)
        own = torch.nonzero(which // local == part.rank).flatten()  # what its experts take, dealt out to their copies
        own = own[batch.rank // part.size :: batch.size // part.size]
        inputs = torch.cat([features, (which % local)[:, None].double()], 1)
        microbatches = [(inputs[each], targets[each]) for each in own.tensor_split(2)]
        engine.run_microbatches(microbatches, loss_of, engine.loss_scale(len(own)))
        found.gradients.append(engine.full_gradients())
        found.norms.append(float(engine.clip_grad_norm_(0.1, kind)))
        optimizer.step()
        optimizer.zero_grad()
    if not steps.start and folder is not None:
        paceline.save(folder, engine, optimizer, step=steps.stop)
    found.state, found.moments = engine.full_state_dict(), engine.full_optimizer_state(optimizer)
    return found


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.norms == pytest.approx(expected.norms, rel=ZERO)
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ZERO, atol=ZERO)
    torch.testing.assert_close(found.state, expected.state, rtol=ZERO, atol=ZERO)
    torch.testing.assert_close(found.moments["state"], expected.moments["state"], rtol=ZERO, atol=ZERO)


LAYOUTS = {
    "ddp": Layout(strategy="ddp", expert=2),
    "small buckets": Layout(strategy="ddp", expert=2, bucket_mb=1e-4, first_bucket_mb=1e-4),
    "four groups": Layout(strategy="ddp", expert=4),
    "zero1": Layout(strategy="zero1", expert=2),
    "zero2": Layout(strategy="zero2", expert=2, bucket_mb=1e-4, first_bucket_mb=1e-4),
    "fsdp": Layout(strategy="fsdp", expert=2),
    "fsdp, an expert a rank": Layout(strategy="fsdp", expert=4),
    "hybrid": Layout(strategy="hybrid", shard_ranks=2, expert=2),
    "pipeline": Layout(strategy="ddp", pipeline=2, expert=2),
    "pipeline of shards": Layout(strategy="fsdp", pipeline=2, expert=2),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_learn_as_in_one_process(name: str) -> None:
    expected = train_alone()
    for found in run_virtual(lambda comm: train_shared(comm, LAYOUTS[name]), ranks=4):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", [1.0, float("inf")])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline"])
def test_other_norms_are_those_of_one_process(name: str, kind: float) -> None:
    expected = train_alone(range(2), kind)
    for found in run_virtual(lambda comm: train_shared(comm, LAYOUTS[name], range(2), kind=kind), ranks=4):
        assert found.norms == pytest.approx(expected.norms, rel=ZERO)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    [("ddp", "fsdp", 4), ("fsdp", "four groups", 4), ("zero2", "ddp", 2), ("pipeline", "hybrid", 4), ("hybrid", "", 1)],
)
def test_a_run_goes_on_under_another_layout(first: str, second: str, ranks: int, tmp_path: Path) -> None:
    """Its checkpoint has whole tensors, whoever held which expert."""
    run_virtual(lambda comm: train_shared(comm, LAYOUTS[first], range(2), tmp_path), ranks=4)
    (saved,) = tmp_path.glob("step-*")
    assert audit(saved).is_good
    checkpoint = open_checkpoint(saved)
    assert checkpoint.manifest.tensors["model/1.experts"].shape == (EXPERTS, WIDTH, WIDTH)
    layout, expected = LAYOUTS.get(second, Layout()), train_alone()
    for found in run_virtual(lambda comm: train_shared(comm, layout, range(2, STEPS), tmp_path), ranks=ranks):
        torch.testing.assert_close(found.state, expected.state, rtol=ZERO, atol=ZERO)


def test_whole_states_move_between_layouts() -> None:
    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        first, second = make_engine(comm, LAYOUTS["zero1"]), make_engine(comm, LAYOUTS["fsdp"])
        state = {name: value + 1 for name, value in first.full_state_dict().items()}
        second.load_full_state_dict(state)
        kept = second.full_state_dict(rank0_only=True)
        assert bool(kept) == (comm.rank == 0)
        return kept

    expected = {name: value + 1 for name, value in whole_model().state_dict().items()}
    torch.testing.assert_close(run_virtual(work, ranks=4)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(expert=3), "expert = 3 does not divide data = 4"),
        (Layout(strategy="hybrid", shard_ranks=2, expert=4), "expert = 4 does not divide shard_ranks = 2"),
        (Layout(expert=2, compression=Compression(policy="topk")), "expert = 2 with compression"),
    ],
)
def test_experts_that_do_not_fit_are_refused(layout: Layout, words: str) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=words):
            parallelize(own_model(0, 2), comm, layout=layout)

    run_virtual(work, ranks=4)


def test_experts_over_ranks_need_parameters_that_are_spread() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="no parameter of the model is marked"):
            parallelize(whole_model(), comm, layout=Layout(expert=2))

    run_virtual(work, ranks=2)
