"""Small models that are hard on an engine, and one way to train them: the checklist that every engine passes.

    expected = run_single(case, recipe)                            # one plain process, no engine
    results = run_engine(make_engine, case, recipe)                # one outcome for each virtual rank
    for result in results: assert_same(result, expected)

``make_engine(module, comm)`` is all that an engine adds. On real ranks, a function at the top level of the test's file
calls ``train(comm, make_engine, case, recipe)``. A recipe says how the batch is cut: ``shares[rank][slot]`` samples,
where 0 means that the rank sits this microbatch out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.engine import Engine
from paceline.plan.layout import Layout
from paceline.units import MIB

BATCH = 12
TOLERANCE = 1e-10

MakeEngine = Callable[[nn.Module, Communicator], Engine]
Values = dict[str, torch.Tensor | None]
Case = str | type[nn.Module]  # a model of the list below, or one of a test's own


# Models: 5 numbers in, 3 out.


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.head(torch.tanh(self.embed(x))))


class Borrowed(Plain):
    """Reads a weight before the module that owns it has run: nothing but the attribute tells that it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(9, 9)  # large enough that every rank owns a part

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(F.linear(F.pad(x, (0, 4)), self.late.weight))
        return super().forward(self.late(hidden)[:, :5])


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(4, 4)


class Reused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.second(self.middle(torch.tanh(self.middle(hidden))))


class OddShapes(Plain):
    """A scalar, nothing at all, and fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.scale + self.one * x[:, :3] + self.empty.sum()


class Tiny(nn.Module):
    """Two numbers in all: with more ranks than that, some own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(x[:, :3] * self.scale) + self.shift * x[:, 2:]


class Reentrant(Reused):
    """A parameter inside two re-entrant checkpoints gets its gradient in two inner backward passes."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(self.middle, hidden, use_reentrant=True)
        hidden = checkpoint(self.middle, torch.tanh(hidden), use_reentrant=True)
        return self.second(hidden)


class Checkpointed(Reused):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(self.middle, hidden, use_reentrant=False)
        hidden = checkpoint(self.middle, torch.tanh(hidden), use_reentrant=False)
        return self.second(hidden)


class SeveralOutputs(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return {"logits": self.second(hidden), "extra": (hidden.mean(1, keepdim=True), None)}


class Convolutional(nn.Module):
    """Channels-last weights: gradients with the strides of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.out = nn.Linear(6, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> Any:
        image = x[:, :4].reshape(-1, 1, 2, 2)
        return self.out(self.conv2(torch.tanh(self.conv(image))).mean((2, 3)))


class Recurrent(nn.Module):
    """A recurrent layer keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, _ = self.lstm(self.first(x)[:, None].expand(-1, 2, -1))
        return self.out(hidden[:, -1])


class DefinedBackwards(nn.Module):
    """Modules that are used in another order than they are defined in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.middle = nn.Linear(6, 4)
        self.first = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Branches(Plain):
    """Which branch runs depends on the rank and the step; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, branch: str = "none") -> Any:
        hidden = super().forward(x)
        return {"left": self.left, "right": self.right}[branch](hidden) if branch != "none" else hidden


MODELS: dict[str, type[nn.Module]] = {
    "plain": Plain,
    "tied": Tied,
    "borrowed": Borrowed,
    "frozen": Frozen,
    "unused": Unused,
    "reused": Reused,
    "odd shapes": OddShapes,
    "tiny": Tiny,
    "reentrant": Reentrant,
    "checkpointed": Checkpointed,
    "several outputs": SeveralOutputs,
    "convolutional": Convolutional,
    "recurrent": Recurrent,
    "defined backwards": DefinedBackwards,
    "branches": Branches,
}

# By rank and microbatch; each adds up to the batch.
SHARES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one rank": ((12,),),
    "one rank, accumulated": ((4, 5, 3),),
    "two ranks": ((6,), (6,)),
    "accumulated": ((2, 2, 1), (2, 1, 1), (1, 1, 1)),
    "ragged": ((3, 2, 1), (0, 1, 0), (1, 0, 0), (2, 0, 2)),
    "a rank without samples": ((5,), (0,), (7,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained."""

    shares: Sequence[Sequence[int]]
    steps: int = 3
    clip: float | None = 0.5
    optimizer: str = "adamw"

    @property
    def ranks(self) -> int:
        """How many ranks share the batch."""
        return len(self.shares)

    def piece(self, rank: int, slot: int) -> slice:
        """Returns which samples of the batch a rank gets in a microbatch: microbatches one after another."""
        before = sum(share[past] for past in range(slot) for share in self.shares)
        start = before + sum(self.shares[other][slot] for other in range(rank))
        return slice(start, start + self.shares[rank][slot])


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What training came to: by step, the gradients before the update and their norm; then all that was trained."""

    gradients: list[Values] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def make(case: Case) -> nn.Module:
    """Builds a model in float64, the same everywhere."""
    return build(MODELS[case] if isinstance(case, str) else case)


def build(model: type[nn.Module]) -> nn.Module:
    """Builds a model of the list or of a test's own, in float64, the same everywhere."""
    torch.manual_seed(3)
    return model().double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (BATCH,), generator=generator)


def make_optimizer(kind: str, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Builds an optimizer over named parameters, which may be pieces."""
    named = list(named)
    everything = [parameter for _, parameter in named]
    if kind == "sgd":
        return torch.optim.SGD(everything, lr=0.1, momentum=0.9)
    if kind == "groups":  # no decay on biases: told apart by name
        biases = [parameter for name, parameter in named if name.endswith("bias")]
        others = [parameter for name, parameter in named if not name.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    options: dict[str, Any] = {"adamw": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind]
    return torch.optim.AdamW(everything, lr=0.05, weight_decay=0.1, **options)


def run_single(case: Case, recipe: Recipe) -> Outcome:
    """Trains in one plain process: a microbatch's samples at once, unless the model treats ranks differently."""
    module = make(case)
    optimizer = make_optimizer(recipe.optimizer, module.named_parameters())
    outcome = Outcome()
    for step in range(recipe.steps):
        inputs, targets = data(step)
        for slot in range(len(recipe.shares[0])):
            pieces = [recipe.piece(rank, slot) for rank in range(recipe.ranks)]
            if case != "branches":
                pieces = [slice(pieces[0].start, pieces[-1].stop)]
            for rank, piece in enumerate(pieces):
                if piece.stop > piece.start:
                    (_loss(module, case, inputs[piece], targets[piece], step, rank) / BATCH).backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        outcome.gradients.append(gradients)
        if recipe.clip:
            outcome.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.state = {name: value.clone() for name, value in module.state_dict().items()}
    return outcome


def run_engine(make_engine: MakeEngine, case: Case, recipe: Recipe, device: str = "cpu") -> list[Outcome]:
    """Trains on virtual ranks."""
    return run_virtual(lambda comm: train(comm, make_engine, case, recipe), ranks=recipe.ranks, device=device)


def train(comm: Communicator, make_engine: MakeEngine, case: Case, recipe: Recipe) -> Outcome:
    """Trains one rank's share."""
    engine = make_engine(make(case).to(comm.device), comm)
    optimizer = make_optimizer(recipe.optimizer, engine.named_parameters())
    engine.check_optimizer(optimizer)
    outcome = Outcome()
    for step in range(recipe.steps):
        backward(engine, case, recipe, step)
        outcome.gradients.append(engine.full_gradients())
        if recipe.clip:
            outcome.norms.append(float(engine.clip_grad_norm_(recipe.clip)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.state = engine.full_state_dict()
    return outcome


def backward(engine: Engine, case: Case, recipe: Recipe, step: int) -> None:
    """Runs one step's forward and backward passes, sitting out where this rank has no samples."""
    rank, num_slots = engine.comm.rank, len(recipe.shares[0])
    inputs, targets = (tensor.to(engine.comm.device) for tensor in data(step))
    scale = engine.loss_scale(sum(recipe.shares[rank]))
    for slot in range(num_slots):
        if slot < num_slots - 1:
            with engine.no_sync():
                _run_slot(engine, case, recipe.piece(rank, slot), inputs, targets, scale, step)
        else:
            _run_slot(engine, case, recipe.piece(rank, slot), inputs, targets, scale, step)


def _run_slot(
    engine: Engine,
    case: Case,
    piece: slice,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    step: int,
) -> None:
    if piece.stop == piece.start:
        engine.join_pass()
    else:
        (_loss(engine, case, inputs[piece], targets[piece], step, engine.comm.rank) * scale).backward()


def _loss(model: Any, case: Case, x: torch.Tensor, y: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    x = x.detach().clone().requires_grad_(case == "reentrant")
    return summed_loss(model(x, branch_of(step, rank)) if case == "branches" else model(x), y)


def summed_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Adds up the losses of a microbatch; what else a model returns counts too."""
    if isinstance(output, dict):
        return F.cross_entropy(output["logits"], target, reduction="sum") + output["extra"][0].sum()
    return F.cross_entropy(output, target, reduction="sum")


def branch_of(step: int, rank: int) -> str:
    """Says which branch a rank takes in a step: different ones, the same one, or none at all."""
    return (("left", "right"), ("left", "none"), ("none", "none"), ("right", "right"))[step % 4][rank % 2]


def assert_same(ours: Outcome, theirs: Outcome, tolerance: float = TOLERANCE) -> None:
    """Compares every step's gradients and norms, and the state at the end."""
    assert len(ours.gradients) == len(theirs.gradients)
    for step, (mine, expected) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        assert list(mine) == list(expected)
        for name, gradient in expected.items():
            if gradient is None:
                assert mine[name] is None, f"step {step}: {name} must have no gradient"
            else:
                assert_near(mine[name], gradient, tolerance, f"step {step}: gradient of {name}")
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(theirs.norms), rtol=0, atol=tolerance)
    assert list(ours.state) == list(theirs.state)
    for name, value in theirs.state.items():
        assert_near(ours.state[name], value, tolerance, name)


def assert_near(found: torch.Tensor | None, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Does what torch's assertion does, which takes ten times as long and so is asked only where something is odd."""
    if found is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        is_near = False
    else:
        numbers = found.is_floating_point() and found.numel() > 0
        is_near = numbers and float((found - expected).abs().max()) <= tolerance
    if not is_near:
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}")


def sized(bucket_bytes: int, first_bucket_bytes: int, **options: Any) -> Layout:
    """Returns a layout with buckets of so many bytes: far smaller than real ones, so that small models have several."""
    return Layout(bucket_mb=bucket_bytes / MIB, first_bucket_mb=first_bucket_bytes / MIB, **options)


# Language models.


def token_losses(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    max_norm: float | None = None,
) -> list[float]:
    """Trains on tokens and targets, of which each rank takes its part; returns the means over all ranks."""
    found = []
    for batch in batches:
        tokens, targets = (each.to(comm.device).chunk(comm.size)[comm.rank] for each in batch)
        loss = F.cross_entropy(engine(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        if max_norm is not None:
            engine.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().reshape(1).clone()
        comm.all_reduce(mean, "avg").wait()
        found.append(mean.item())
    return found
