"""A GPT with experts over ranks computes what one process does, however else it is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from expert_gpt import EXPERTS, case_of, make_batch, make_model, make_one_sided, mixtures, summed
from gloo_pool import GlooPool

import paceline
from paceline.comm.base import Communicator
from paceline.comm.dry.communicator import DryWorld
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.engines.experts import ExpertExchange
from paceline.engines.groups import expert_dim
from paceline.errors import UsageError
from paceline.plan.layout import Layout, groups_of, names_of
from paceline.verify.case import Settings
from paceline.verify.certificate import Certificate, certify
from paceline.verify.measure import absolute, errors_by_step, merge
from paceline.verify.runs import run_distributed, run_reference

LIMIT = 1e-10


def certificate(samples: int = 7, make: Any = make_model, **options: Any) -> Certificate:
    found = certify(case_of(samples, make), Settings.of(**{"steps": 2, **options}))
    assert found.passed, found.divergence
    return found


@covering(expert=[2, 4, 1], tensor=[1, 2], accumulate=[1, 3], strategy=["ddp", "zero2", "fsdp"], pipeline=[1, 2])
def test_ranks_compute_what_one_process_does(
    expert: int, tensor: int, accumulate: int, strategy: str, pipeline: int
) -> None:
    ranks = max(expert, 2) * tensor * pipeline
    found = certificate(
        ranks=ranks, expert=expert, tensor=tensor, accumulate=accumulate, strategy=strategy, pipeline=pipeline
    )
    assert found.tolerance <= LIMIT


OTHERS: dict[str, dict[str, Any]] = {
    "two copies of the experts": {"strategy": "zero1", "ranks": 4, "expert": 2},
    "replicas of shards": {"strategy": "hybrid", "shard_ranks": 2, "ranks": 4, "expert": 2},
    "parts of sequences": {"ranks": 4, "expert": 4, "context_ranks": 2},
    "parts of sequences and of layers": {"ranks": 4, "expert": 2, "context_ranks": 2, "tensor": 2},
    "between layers, parts of sequences": {"ranks": 4, "expert": 2, "tensor": 2, "sequence_parallel": True},
    "blocks that run again": {"strategy": "fsdp", "ranks": 4, "expert": 4, "checkpoint_activations": "full"},
    "all but products again": {"ranks": 2, "expert": 2, "checkpoint_activations": "matmuls"},
    "backward in two parts": {"ranks": 4, "expert": 2, "pipeline": 2, "schedule": "zb-h1", "accumulate": 3},
    "several stages a rank": {"ranks": 4, "expert": 2, "pipeline": 2, "schedule": "interleaved", "accumulate": 2},
    "states on the host": {"strategy": "fsdp", "ranks": 4, "expert": 2, "offload": "optimizer"},
    "one unit": {"strategy": "fsdp", "ranks": 4, "expert": 2, "units": ()},
    "masters": {"strategy": "fsdp", "ranks": 4, "expert": 2, "precision": "bf16_master"},
    "casts": {"strategy": "zero2", "ranks": 4, "expert": 4, "precision": "bf16"},
}


IN_FEWER_DIGITS = {"masters", "casts"}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", OTHERS)
def test_ranks_compute_the_same_with_everything_else(name: str) -> None:
    found = certificate(**OTHERS[name])
    assert found.divergence is None
    assert (found.tolerance <= LIMIT) is (name not in IN_FEWER_DIGITS)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp", "samples": 3},
        {"strategy": "fsdp", "samples": 3},
        {"strategy": "zero2", "samples": 2, "accumulate": 2},
        {"strategy": "ddp", "samples": 1, "pipeline": 2, "ranks": 8, "accumulate": 2},
        {"strategy": "fsdp", "samples": 3, "checkpoint_activations": "full"},
    ],
    ids=lambda options: f"{options['strategy']}, {options['samples']} samples",
)
def test_ranks_without_samples_take_part(options: dict[str, Any]) -> None:
    found = certificate(**{"ranks": 4, "expert": 4, **options})
    assert found.divergence is None
    assert found.tolerance <= LIMIT


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_whose_experts_nobody_chose_takes_part(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    arrive = ExpertExchange._arrive

    def count(self: ExpertExchange, moving: torch.Tensor, *way: Any) -> torch.Tensor:
        rows.append(len(moving))
        return arrive(self, moving, *way)

    monkeypatch.setattr(ExpertExchange, "_arrive", count)
    certificate(make=make_one_sided, ranks=4, expert=4, strategy=strategy, steps=1)
    assert 0 in rows
    assert max(rows) > 0


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_gloo_ranks_compute_what_one_process_does(gloo_pool: GlooPool, ranks: int) -> None:
    settings = Settings.of(ranks=ranks, expert=ranks, steps=2, backend="gloo", strategy="zero2", accumulate=2)
    case = case_of(3)  # a rank of four has no samples
    per_rank = gloo_pool.run(run_distributed, case, settings, ranks=ranks)
    assert merge(errors_by_step(run_reference(case, settings, None), per_rank, absolute)).largest < LIMIT


# What a rank holds.


def test_ranks_draw_the_values_of_one_process() -> None:
    """From meta: a rank draws all experts, as one process would, and keeps its own."""

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = make_model()
        torch.manual_seed(5)
        return parallelize(model, comm, strategy="fsdp", expert=2).full_state_dict()

    torch.manual_seed(5)
    with torch.device("meta"):
        whole = make_model()
    torch.manual_seed(5)
    whole.to_empty(device="cpu")
    for module in whole.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for found in run_virtual(work, ranks=4):
        torch.testing.assert_close(found, whole.state_dict(), rtol=0, atol=0)


def test_all_take_the_values_of_the_first_rank() -> None:
    def work(comm: Communicator) -> Any:
        model = make_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(comm.rank)
        engine = parallelize(model, comm, expert=2)
        held = {name: tuple(p.shape) for name, p in engine.named_parameters() if expert_dim(p) is not None}
        return held, engine.num_parameters, engine.full_state_dict()

    expected = make_model()
    for held, count, state in run_virtual(work, ranks=4):
        assert {name.rpartition(".")[2]: shape[0] for name, shape in held.items()} == {"first": 2, "last": 2}
        assert len(held) == 4
        assert count == sum(p.numel() for p in expected.parameters())
        torch.testing.assert_close(state, expected.state_dict(), rtol=0, atol=0)


def test_engines_know_no_more_of_others_experts() -> None:
    """A rank's memory has its own experts alone."""

    def work(comm: Communicator) -> list[int]:
        engine = parallelize(make_model(), comm, expert=4)
        return [len(mixed.experts.first) for mixed in mixtures(engine.module)]

    assert run_virtual(work, ranks=4) == [[EXPERTS // 4] * 2] * 4


def train(engine: Engine, optimizer: torch.optim.Optimizer, steps: range, samples: int = 8) -> None:
    for step in steps:
        inputs, targets = make_batch(step, samples)
        ranks = engine.batch_comm
        own = list(zip(inputs.chunk(ranks.size), targets.chunk(ranks.size), strict=True))
        mine = own[ranks.rank] if ranks.rank < len(own) else None
        engine.run_microbatches(
            [mine], lambda model, batch: summed(model(batch[0]), batch[1]), ranks.size / targets.numel()
        )
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(strategy="ddp", expert=2),
        Layout(strategy="zero2", expert=4),
        Layout(strategy="fsdp", expert=2),
        Layout(strategy="zero1", expert=2, tensor=2),
        Layout(strategy="fsdp", expert=2, pipeline=2),
    ],
    ids=lambda layout: f"{layout.strategy}-{layout.expert}-{layout.tensor}-{layout.pipeline}",
)
def test_a_run_goes_on_from_its_checkpoint(layout: Layout, tmp_path: Path) -> None:
    def work(comm: Communicator) -> Any:
        engine = parallelize(make_model().double(), comm, layout=layout)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        train(engine, optimizer, range(2))
        paceline.save(tmp_path, engine, optimizer, step=2)
        whole = engine.full_optimizer_state(optimizer)
        train(engine, optimizer, range(2, 4))
        again = parallelize(make_model().double(), comm, layout=layout)
        resumed = torch.optim.AdamW(again.parameters(), lr=0.01)
        paceline.load(tmp_path, again, resumed)
        train(again, resumed, range(2, 4))
        third = parallelize(make_model().double(), comm, layout=layout)
        loaded = torch.optim.AdamW(third.parameters(), lr=0.01)
        third.load_full_optimizer_state(loaded, whole)
        torch.testing.assert_close(third.full_optimizer_state(loaded), whole, rtol=0, atol=0)
        return engine.full_state_dict(), again.full_state_dict()

    for went_on, resumed in run_virtual(work, ranks=4):
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)


def test_a_loop_of_the_users_own_joins_passes() -> None:
    """A rank without samples calls ``join_pass``, before it has seen a batch too: the model says what it takes."""

    def work(comm: Communicator) -> Any:
        engine = parallelize(make_model().double(), comm, expert=2)
        inputs, targets = make_batch(0, 2)
        if comm.rank:
            engine.join_pass()
        else:
            with engine.loss_factor(comm.size / targets.numel()):  # not the mean over this rank's tokens
                (summed(engine(inputs), targets)[0] * comm.size / targets.numel()).backward()
        with torch.no_grad():
            engine(inputs) if comm.rank else engine.join_pass()
        return engine.full_gradients()

    model = make_model().double()
    inputs, targets = make_batch(0, 2)
    (summed(model(inputs), targets)[0] / targets.numel()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found in run_virtual(work, ranks=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_dry_run_sees_the_ways_there_and_back() -> None:
    """Counts, rows there and back in forward, gradients there and back in backward, for each of two mixtures."""
    comm = DryWorld(4).rank(1)
    with torch.device("meta"):
        model = make_model()
    engine = parallelize(model, comm, strategy="fsdp", expert=2)
    inputs, targets = (each.to("meta") for each in make_batch(0, 4))
    engine.run_microbatches([(inputs, targets)], lambda model, batch: summed(model(batch[0]), batch[1]), 1.0)
    sent = [each.num_bytes for each in comm.own.journal.operations if each.kind == "all_to_all"]
    rows = 4 * inputs.shape[1] * 2 * 16 * 4  # samples, tokens, experts of each, width, bytes
    assert sent == [EXPERTS * 8, rows, rows] * 2 + [rows] * 4


# What is refused.


def test_experts_that_do_not_divide_are_refused() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r"expert = 3 does not divide the 4 experts of layers\.1\.mlp"):
            parallelize(make_model(), comm, expert=3)

    run_virtual(work, ranks=3)


def test_a_rank_that_never_saw_a_batch_is_told() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm, expert=2)
        with pytest.raises(UsageError, match="the first batch has no samples on this rank"):
            engine.run_microbatches([None], summed)

    run_virtual(work, ranks=2)


def test_the_groups_have_names() -> None:
    layout = Layout(expert=2, strategy="fsdp", tensor=2).for_ranks(8)
    names = names_of(groups_of(layout, 0))
    assert names[(0, 2)] == "expert"
    assert names[(0, 4)] == "expert data"
