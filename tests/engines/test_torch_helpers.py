"""Optimizers built before, and torch's helpers, on engines that hold parts of the parameters: right, or refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config

T = TypeVar("T")
SHARDED: list[dict[str, Any]] = [{"strategy": "zero1"}, {"strategy": "zero2"}, {"strategy": "fsdp"}]
HYBRID: dict[str, Any] = {"strategy": "hybrid", "shard_ranks": 2}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(gpt_config("gpt-nano", layers=2, context=8, vocab_size=32)).double()


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))


def mine(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(comm.size)[comm.rank]


def backward(engine: Any, comm: Communicator | None = None, step: int = 0) -> None:
    inputs, targets = batch(step)
    if comm is not None:
        inputs, targets = mine(comm, inputs), mine(comm, targets)
    F.cross_entropy(engine(inputs), targets).backward()


def on_ranks(work: Callable[[Communicator], T], options: dict[str, Any] | None = None) -> list[T]:
    ranks = 4 if options == HYBRID else 2
    return run_virtual(work, ranks=ranks)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    decayed = [parameter for parameter in named.values() if parameter.ndim > 1]
    others = [parameter for parameter in named.values() if parameter.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.05}], lr=0.01)


def alone(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(steps):
        backward(model, None, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("options", [{"strategy": "ddp"}, *SHARDED, HYBRID])
def test_an_optimizer_built_before_is_adopted_with_its_groups_and_state(options: dict[str, Any]) -> None:
    expected = alone(4)[0].state_dict()

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        model, optimizer = alone(2)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        engine = parallelize(model, comm, optimizer=optimizer, **options)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]
        for step in (2, 3):
            backward(engine, comm, step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    for state in on_ranks(work, options):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"tensor": 2, "gathers_logits": True}, {"strategy": "zero1", "pipeline": 2}])
def test_an_optimizer_is_adopted_where_ranks_have_other_layers(options: dict[str, Any]) -> None:
    tokens = torch.arange(8)[None] % 32

    def loss(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum"), tokens.numel()

    def train(engine: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            if isinstance(engine, Engine):
                engine.run_microbatches([tokens], loss, 1 / 8)
            else:
                (loss(engine, tokens)[0] / 8).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    half = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer)

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model.load_state_dict(half[0])
        optimizer.load_state_dict(copy.deepcopy(half[1]))
        engine = parallelize(model, comm, optimizer=optimizer, **options)
        train(engine, optimizer)
        return engine.full_state_dict()

    for state in run_virtual(work, ranks=2):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [*SHARDED, {"strategy": "ddp", "precision": "bf16_master"}])
def test_a_step_of_an_optimizer_that_was_not_adopted_raises_with_the_fix(options: dict[str, Any]) -> None:
    def work(comm: Communicator) -> None:
        model = make_model() if "precision" not in options else make_model().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        engine = parallelize(model, comm, **options)
        if "precision" not in options:
            backward(engine, comm)
        other.step()  # of another model
        for _ in range(2):
            with pytest.raises(UsageError, match=r"give parallelize\(\.\.\., optimizer=optimizer\)"):
                optimizer.step()

    on_ranks(work)


def test_what_cannot_be_adopted_is_refused() -> None:
    def work(comm: Communicator) -> None:
        extra = nn.Parameter(torch.zeros(1))
        model = make_model()
        with pytest.raises(UsageError, match="1 tensors of the optimizer are no parameters of the model"):
            parallelize(model, comm, optimizer=torch.optim.SGD([*model.parameters(), extra], lr=0.1))
        with pytest.raises(UsageError, match="it is an optimizer of the model's parameters"):
            parallelize(make_model(), comm, optimizer=torch.optim.SGD)  # type: ignore[arg-type]
        model, optimizer = alone(1 + comm.rank)
        with pytest.raises(UsageError, match="the optimizer's state of rank"):
            parallelize(model, comm, optimizer=optimizer)
        model = make_model()
        with pytest.raises(UsageError, match="LBFGS cannot update sharded parameters"):
            parallelize(model, comm, "fsdp", optimizer=torch.optim.LBFGS(model.parameters()))

    on_ranks(work)


def test_an_optimizer_that_looks_at_all_parameters_together_is_refused_at_its_first_step() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm, "zero1")
        backward(engine, comm)
        with pytest.raises(UsageError, match="LBFGS cannot update sharded parameters"):
            torch.optim.LBFGS(engine.parameters()).step(lambda: 0.0)

    on_ranks(work)


@pytest.mark.some(4)
@pytest.mark.parametrize("options", [{"strategy": "ddp"}, *SHARDED, HYBRID])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_torchs_clipping_takes_the_norm_over_all_ranks(options: dict[str, Any], norm_type: float) -> None:
    model = make_model()
    backward(model)
    truth = get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type)
    clip_grad_norm_(model.parameters(), 0.1, norm_type)
    expected = {name: p.grad for name, p in model.named_parameters()}

    def work(comm: Communicator) -> tuple[Any, Any, dict[str, Any]]:
        engine = parallelize(make_model(), comm, **options)
        backward(engine, comm)
        norm = get_total_norm([p.grad for p in engine.parameters() if p.grad is not None], norm_type)
        clipped = clip_grad_norm_(engine.parameters(), 0.1, norm_type)
        return norm, clipped, engine.full_gradients()

    for norm, clipped, gradients in on_ranks(work, options):
        torch.testing.assert_close(torch.stack([norm, clipped]), torch.stack([truth, truth]))
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value)


def test_the_norm_of_two_engines_together_and_a_part_of_one() -> None:
    def work(comm: Communicator) -> None:
        engines = [parallelize(make_model(), comm, strategy) for strategy in ("fsdp", "zero1")]
        for engine in engines:
            backward(engine, comm)
        norms = [float(engine.clip_grad_norm_(math.inf)) for engine in engines]
        both = clip_grad_norm_([p for engine in engines for p in engine.parameters()], 100.0)
        assert float(both) == pytest.approx(math.hypot(*norms))
        with pytest.raises(UsageError, match=r"call engine\.clip_grad_norm_"):
            clip_grad_norm_(list(engines[0].parameters())[:1], 1.0)
        with pytest.raises(UsageError, match=r"call engine\.clip_grad_norm_"):
            clip_grad_norm_(engines[1].module.parameters(), 1.0)  # zero's gradients are not there

    on_ranks(work)


@pytest.mark.parametrize("options", SHARDED)
def test_clipping_by_value_is_right_and_vectors_and_averages_of_parts_are_refused(options: dict[str, Any]) -> None:
    model = make_model()
    backward(model)
    clip_grad_value_(model.parameters(), 0.01)
    expected = {name: p.grad for name, p in model.named_parameters()}

    def work(comm: Communicator) -> dict[str, Any]:
        model = make_model()
        average = AveragedModel(model)
        engine = parallelize(model, comm, **options)
        backward(engine, comm)
        clip_grad_value_(engine.parameters(), 0.01)
        with pytest.raises(UsageError, match=r"take engine\.full_state_dict"):
            parameters_to_vector(engine.parameters())
        for given in (engine, engine.module):
            with pytest.raises(UsageError, match="WeightAverage"):
                average.update_parameters(given)  # type: ignore[arg-type]
        return engine.full_gradients()

    for gradients in on_ranks(work):
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value)


@pytest.mark.parametrize("options", SHARDED)
def test_a_loss_scaler_skips_the_step_on_all_ranks_or_none(options: dict[str, Any]) -> None:
    def work(comm: Communicator) -> tuple[float, bool]:
        engine = parallelize(make_model().float(), comm, **options)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = engine.full_state_dict()
        inputs, targets = (mine(comm, each) for each in batch())
        scaler.scale(F.cross_entropy(engine(inputs.float()), targets)).backward()
        first = next(p.grad for p in engine.parameters() if p.grad is not None and p.numel())
        if comm.rank == 1:
            first.flatten()[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        after = engine.full_state_dict()
        return scaler.get_scale(), all(torch.equal(before[name], after[name]) for name in before)

    assert on_ranks(work) == [(2.0, True)] * 2


def test_without_an_engine_torchs_helpers_are_as_they_were() -> None:
    def work(comm: Communicator) -> None:
        parallelize(make_model(), comm, "fsdp")

    on_ranks(work)
    model = make_model()
    backward(model)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(get_total_norm(gradients), norm)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), norm)
    assert parameters_to_vector(model.parameters()).shape == (83,)


@pytest.mark.parametrize("options", [*SHARDED, {"precision": "bf16_master"}, {"strategy": "ddp", "pipeline": 2}])
def test_states_of_the_module_itself_are_refused_and_the_engines_are_whole(options: dict[str, Any]) -> None:
    def work(comm: Communicator) -> None:
        model = make_model().float() if "pipeline" not in options else make_gpt()
        state = copy.deepcopy(model.state_dict())
        engine = parallelize(model, comm, **options)
        for call in (model.state_dict, engine.module.state_dict, next(model.children()).state_dict):
            with pytest.raises(UsageError, match=r"state_dict\(\) of a(.|\n)*call engine\.state_dict\(\) on all ranks"):
                call()
        with pytest.raises(UsageError, match=r"call engine\.load_state_dict\(state\)"):
            model.load_state_dict(state)
        engine.load_state_dict({name: value * 2 for name, value in state.items()})
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, state[name] * 2)

    on_ranks(work)


@pytest.mark.parametrize("options", [*SHARDED, {"precision": "bf16_master"}])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_modules_own_zero_grad_forgets_the_engines_gradients(options: dict[str, Any], set_to_none: bool) -> None:
    def work(comm: Communicator) -> None:
        model = make_model().float()
        engine = parallelize(model, comm, **options)
        engine(batch()[0].float()).square().mean().backward()
        assert any(gradient is not None and gradient.any() for gradient in engine.full_gradients().values())
        model.zero_grad(set_to_none)
        assert not any(gradient is not None and gradient.any() for gradient in engine.full_gradients().values())

    on_ranks(work)


@pytest.mark.parametrize("options", SHARDED)
def test_a_loss_may_have_a_term_of_the_parameters_themselves(options: dict[str, Any]) -> None:
    def train(engine: Any, inputs: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step in range(4):  # autograd runs first what was made last: the term comes before the gradients, or after
            parts = [
                lambda: 0.1 * sum(parameter.square().sum() for parameter in engine.parameters()),
                lambda: engine(inputs).square().mean(),
            ]
            sum(part() for part in (parts if step % 2 else reversed(parts))).backward()
            optimizer.step()
            optimizer.zero_grad()

    alone = make_model()
    train(alone, batch()[0])

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = parallelize(make_model(), comm, **options)
        train(engine, mine(comm, batch()[0]))
        return engine.state_dict()

    for state in on_ranks(work):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value)
