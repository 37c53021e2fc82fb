"""Twelve ordinary mistakes in loops of one's own: ours are right or an error, and none hangs (docs/mistakes.md)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import PacelineError

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.second(self.first(inputs).tanh())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 3


def mine(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(each.chunk(comm.size)[comm.rank] for each in batch())  # type: ignore[return-value]


def backward(engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    F.cross_entropy(engine(inputs), targets).backward()


def alone() -> nn.Module:
    model = Net()
    backward(model, *batch())
    return model


def same_gradients(engine: Engine, model: nn.Module) -> bool:
    found = engine.full_gradients()
    return all(torch.allclose(found[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


def optimizer_built_before(comm: Communicator, strategy: str) -> bool:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = parallelize(model, comm, strategy)
    before = engine.state_dict()
    backward(engine, *mine(comm))
    optimizer.step()
    return not torch.equal(before["first.weight"], engine.state_dict()["first.weight"])


def clipped_by_torch(comm: Communicator, strategy: str) -> bool:
    engine = parallelize(Net(), comm, strategy)
    backward(engine, *mine(comm))
    true = get_total_norm([p.grad for p in alone().parameters() if p.grad is not None])
    return math.isclose(float(clip_grad_norm_(engine.parameters(), 1.0)), float(true))


def run_twice(comm: Communicator, strategy: str) -> bool:
    engine, model = parallelize(Net(), comm, strategy), Net()
    for each, (inputs, targets) in ((engine, mine(comm)), (model, batch())):
        F.cross_entropy(each(inputs) + each(-inputs), targets).backward()
    return same_gradients(engine, model)


def accumulated(comm: Communicator, strategy: str) -> bool:
    """Microbatches of three samples and one."""
    engine, (inputs, targets) = parallelize(Net(), comm, strategy), mine(comm)
    parts = [(inputs[part], targets[part]) for part in (slice(0, 3), slice(3, 4))]

    def loss(model: Any, part: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(part[0]), part[1], reduction="sum"), len(part[1])

    engine.run_microbatches(parts, loss, engine.loss_scale(len(inputs)))
    return same_gradients(engine, alone())


def validates_alone(comm: Communicator, strategy: str) -> bool:
    engine = parallelize(Net(), comm, strategy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    for _ in range(3):
        backward(engine, *mine(comm))
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0:
            with torch.no_grad():
                engine(batch()[0])
    return True


def breaks_early(comm: Communicator, strategy: str) -> bool:
    engine = parallelize(Net(), comm, strategy)
    for step in range(4):
        if comm.rank == 1 and step == 2:
            break
        backward(engine, *mine(comm))
    return False


def saves_alone(comm: Communicator, strategy: str) -> bool:
    engine = parallelize(Net(), comm, strategy)
    backward(engine, *mine(comm))
    state = engine.state_dict() if comm.rank == 0 else {}
    backward(engine, *mine(comm))
    return comm.rank == 1 or {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in Net().state_dict().items()
    }


def other_seeds(comm: Communicator, strategy: str) -> bool:
    state = parallelize(Net(seed=comm.rank), comm, strategy).state_dict()
    return all(torch.equal(value, state[name]) for name, value in Net().state_dict().items())


def averages(comm: Communicator, strategy: str) -> bool:
    model = Net()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    engine = parallelize(model, comm, strategy)
    averaged.update_parameters(engine)  # type: ignore[arg-type]
    return all(torch.equal(a, b) for a, b in zip(averaged.parameters(), Net().parameters(), strict=True))


def not_finite_on_one_rank(comm: Communicator, strategy: str) -> bool:
    engine = parallelize(Net().float(), comm, strategy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    inputs, targets = mine(comm)
    scaler.scale(F.cross_entropy(engine(inputs.float()), targets)).backward()
    if comm.rank == 1 and strategy != "ddp":  # there all ranks have the same gradients
        next(p.grad for p in engine.parameters() if p.grad is not None and p.numel())[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() == (4.0 if strategy == "ddp" else 2.0)


def copies(comm: Communicator, strategy: str) -> bool:
    engine = parallelize(Net(), comm, strategy)
    return bool(torch.allclose(copy.deepcopy(engine)(batch()[0]), Net()(batch()[0])))


def updates_by_matrix(comm: Communicator, strategy: str) -> bool:
    engine, model = parallelize(Net(), comm, strategy), alone()
    backward(engine, *mine(comm))
    for parameters in (engine.parameters(), model.parameters()):
        torch.optim.Adafactor(parameters, lr=0.1).step()
    return all(torch.allclose(engine.state_dict()[name], value) for name, value in model.state_dict().items())


MISTAKES: list[Callable[[Communicator, str], bool]] = [
    optimizer_built_before,
    clipped_by_torch,
    run_twice,
    accumulated,
    validates_alone,
    breaks_early,
    saves_alone,
    other_seeds,
    averages,
    not_finite_on_one_rank,
    copies,
    updates_by_matrix,
]


def outcome(mistake: Callable[[Communicator, str], bool], strategy: str) -> str:
    try:
        found = run_virtual(lambda comm: mistake(comm, strategy), ranks=2)
    except PacelineError as error:
        return "error" if str(error).strip() else "silent"
    return "right" if all(found) else "silent"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda number: MISTAKES[number].__name__)
def test_a_mistake_is_right_or_an_error_as_the_page_says(number: int, strategy: str) -> None:
    found = outcome(MISTAKES[number], strategy)
    assert found in ("right", "error")
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith(f"| {number + 1} |")]
    cells = [cell.strip() for cell in rows[0].split("|")[3:5]]
    assert found == cells[0 if strategy == "ddp" else 1].split(",")[0].strip("*"), (found, cells)
