"""AdamW over masters is torch's fused AdamW on cast gradients; the kernel, and its likeness in plain operators."""

from __future__ import annotations

import copy
import importlib
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.solo import SoloCommunicator
from paceline.config import OptimConfig
from paceline.data.loader import StepBatch
from paceline.engines.ddp import DataParallel
from paceline.engines.groups import make_groups
from paceline.engines.precision import PRECISIONS
from paceline.train.loss import CrossEntropy
from paceline.train.master_adamw import MasterAdamW, Scaling, can_update, has_kernel
from paceline.train.optim import build_optimizer, set_learning_rate
from paceline.train.step import StepPolicy, scale_gradients, train_step

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
BF16 = torch.bfloat16
SHAPES = ((4097,), (64, 33), (8, 3, 3, 3), (2048,), (7,), (1,))  # of more than a block, of one, of less
FEW = 2  # of them get no weight decay


@dataclass
class Case:
    """How gradients come, and what is done to them on the way; by step: the norm that is told."""

    gradients: str = "at the copies"
    norms: tuple[float, ...] = (0.0, 0.0, 0.0)
    max_norm: float | None = None
    weight: float | None = None
    steps: int = 3

    def factor(self, step: int) -> float | None:
        """What the gradients of a step are multiplied by; None: the step is left out."""
        factor = 1.0 if self.weight is None else self.weight
        if self.norms[step] == 0.0:
            return factor
        if not math.isfinite(self.norms[step]):
            return None
        return factor if self.max_norm is None else factor * min(1.0, self.max_norm / (self.norms[step] + 1e-6))


CASES = {
    "bf16 at the copies": Case(),
    "fp32 at the masters": Case(gradients="at the masters"),
    "some here, some there": Case(gradients="mixed"),
    "no copies": Case(gradients="no copies"),
    "clipped, and not": Case(norms=(3.0, 0.01, 7.0), max_norm=1.0),
    "measured only": Case(norms=(3.0, 2.0, 1.0)),
    "weighed": Case(weight=0.25, norms=(3.0, 0.5, 1.5), max_norm=1.0),
    "left out": Case(norms=(3.0, math.nan, math.inf), max_norm=1.0),
    "left out first": Case(norms=(math.inf, 2.0, -math.inf)),
}


class Model:
    """Masters with copies, and gradients that are the same for all who ask."""

    def __init__(self, device: str, has_copies: bool = True) -> None:
        self.random = torch.Generator().manual_seed(5)
        values = [torch.randn(shape, generator=self.random).to(device) for shape in SHAPES]
        values[2] = values[2].to(memory_format=torch.channels_last)
        self.masters = [nn.Parameter(value) for value in values]
        self.copies = {m: nn.Parameter(m.detach().to(BF16)) for m in self.masters} if has_copies else {}
        self.groups = [
            {"params": self.masters[:-FEW], "weight_decay": 0.3},
            {"params": self.masters[-FEW:], "weight_decay": 0.0},
        ]

    def draw(self) -> list[torch.Tensor]:
        """Returns the gradients of the next step, in bf16; the third in another memory format than its master."""
        return [torch.randn(m.shape, generator=self.random).to(m.device, BF16) for m in self.masters]

    def ours(self) -> MasterAdamW:
        return MasterAdamW(self.groups, self.copies, lr=0.01, betas=(0.9, 0.95), eps=1e-8)

    def torchs(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def give(self, where: str) -> None:
        for number, (master, gradient) in enumerate(zip(self.masters, self.draw(), strict=True)):
            if where == "at the copies" or (where == "mixed" and number % 2):
                self.copies[master].grad = gradient
            else:
                master.grad = gradient.float()

    def step_plainly(self, optimizer: torch.optim.Optimizer, factor: float | None = 1.0) -> None:
        gradients = self.draw()
        if factor is None:
            return
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = torch.empty_like(master).copy_(gradient) * factor
        optimizer.step()
        optimizer.zero_grad()


def states(optimizer: torch.optim.Optimizer, model: Model) -> list[torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq", "step")
    moments = [optimizer.state[m][name] for m in model.masters for name in names if optimizer.state[m]]
    return [t.detach().clone() for t in [*model.masters, *moments]]


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_update_is_that_of_torch_on_cast_gradients(case: Case, device: str) -> None:
    model, other = Model(device, case.gradients != "no copies"), Model(device)
    optimizer, torchs = model.ours(), other.torchs()
    for step in range(case.steps):
        model.give(case.gradients)
        norm = None if case.norms[step] == 0.0 else torch.tensor(case.norms[step], device=device)
        weight = None if case.weight is None else torch.tensor(case.weight, device=device)
        before = states(optimizer, model)
        optimizer.step_scaled(Scaling(norm=norm, max_norm=case.max_norm, weight=weight))
        optimizer.zero_grad()
        factor = case.factor(step)
        if factor is None:  # bit by bit
            after = states(optimizer, model)
            assert all(torch.equal(a, b) for a, b in zip(before, after[: len(before)], strict=True))
        other.step_plainly(torchs, factor)
        assert_close([m.detach() for m in model.masters], [m.detach() for m in other.masters])
        for master, held in model.copies.items():
            assert torch.equal(held, master.to(BF16))
    assert_close(states(optimizer, model), states(torchs, other))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_first_ours", [True, False])
def test_a_run_goes_on_from_torchs_adamw_and_back(is_first_ours: bool, device: str) -> None:
    expected = Model(device)
    alone = expected.torchs()
    for _ in range(4):
        expected.step_plainly(alone)
    model = Model(device)
    first, second = (model.ours(), model.torchs()) if is_first_ours else (model.torchs(), model.ours())
    for optimizer in (first, second):
        if optimizer is second:
            second.load_state_dict(first.state_dict())
        for _ in range(2):
            if isinstance(optimizer, MasterAdamW):
                model.give("at the copies")
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.step_plainly(optimizer)
    assert_close(states(second, model), states(alone, expected))
    assert {key for state in second.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert first.state_dict()["param_groups"] == alone.state_dict()["param_groups"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_goes_on_from_an_adamw_that_was_not_fused(device: str) -> None:
    """Which counts its steps on the host."""
    model, other = Model(device), Model(device)
    torchs = other.torchs()
    for group in torchs.param_groups:
        group["fused"] = False
    other.step_plainly(torchs)
    model.draw()
    optimizer = model.ours()
    with torch.no_grad():
        for mine, theirs in zip(model.masters, other.masters, strict=True):
            mine.copy_(theirs)
    optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
    model.give("at the copies")
    optimizer.step()
    other.step_plainly(torchs)
    assert_close([m.detach() for m in model.masters], [m.detach() for m in other.masters])


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_in_another_memory_format_is_written_too(device: str) -> None:
    model, other = Model(device), Model(device)
    optimizer, torchs = model.ours(), other.torchs()
    changed = model.copies[model.masters[2]]
    changed.data = changed.data.contiguous()
    assert changed.stride() != model.masters[2].stride()
    model.give("at the copies")
    optimizer.step()
    other.step_plainly(torchs)
    assert_close([m.detach() for m in model.masters], [m.detach() for m in other.masters])
    assert torch.equal(changed, model.masters[2].to(BF16))


def test_gradients_are_dropped_wherever_they_are() -> None:
    model = Model("cpu")
    optimizer = model.ours()
    model.give("mixed")
    optimizer.zero_grad(set_to_none=False)
    assert all(
        float(gradient.abs().sum()) == 0 for m in model.masters if (gradient := optimizer.gradient(m)) is not None
    )
    model.give("mixed")
    optimizer.zero_grad()
    assert [p.grad for p in [*model.masters, *model.copies.values()]] == [None] * (2 * len(SHAPES))
    before = states(optimizer, model)
    optimizer.step()  # of nothing
    assert all(torch.equal(a, b) for a, b in zip(before, states(optimizer, model), strict=True))


def test_a_hook_of_the_step_and_a_closure_are_called() -> None:
    model = Model("cpu")
    optimizer, told = model.ours(), []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    model.give("mixed")
    optimizer.step_scaled(Scaling())
    assert told == ["before"]
    assert optimizer.step(lambda: 3.5) == 3.5


# With the engine.


def make_engine(device: str = "cpu") -> DataParallel:
    torch.manual_seed(1)
    layers = [nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 11)]
    return DataParallel(
        nn.Sequential(*layers).to(device),
        make_groups(SoloCommunicator(torch.device(device))),
        None,
        PRECISIONS["bf16_master"],
    )


def make_batch(microbatches: int = 1) -> StepBatch:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(11, (12, 3), generator=random)
    targets = torch.randint(11, (12,), generator=random)
    targets[2] = -100
    parts = zip(tokens.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True)
    return StepBatch(
        microbatches=list(parts), local_samples=[12 // microbatches] * microbatches, global_samples=12,
        position=0, next_position=12,
    )  # fmt: skip


def master_adamw(engine: DataParallel) -> MasterAdamW:
    return MasterAdamW([{"params": list(engine.parameters())}], engine.fuse_cast(), lr=0.02)


def train(
    device: str, *, is_lent: bool, microbatches: int = 1, elements: float | None = 1.0, clip: float | None = 0.5
) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = make_engine(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(engine.parameters(), lr=0.02, fused=True)
    if is_lent:
        optimizer = master_adamw(engine)
    norms = []
    for _ in range(4):
        outcome = train_step(
            engine, optimizer, make_batch(microbatches), CrossEntropy(elements), StepPolicy(clip_norm=clip)
        )
        norms.append(float(outcome.grad_norm))
    with torch.no_grad():
        engine(make_batch().microbatches[0][0].to(device))
    copies = {f"{name} of the module": p.detach().float() for name, p in engine.module.named_parameters()}
    return {**engine.full_state_dict(), **{name: value.cpu() for name, value in copies.items()}}, norms


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("elements", [1.0, None])
def test_training_with_lent_copies_is_training_with_masters(
    elements: float | None, microbatches: int, device: str
) -> None:
    """Also where gradients are weighed by a count that is known after backward."""
    options: dict[str, Any] = {"microbatches": microbatches, "elements": elements}
    (ours, our_norms), (theirs, their_norms) = (train(device, is_lent=each, **options) for each in (True, False))
    assert our_norms == pytest.approx(their_norms, rel=1e-2)
    for name, value in theirs.items():  # of four steps of 0.02 each; a copy may round to the next number
        torch.testing.assert_close(ours[name], value, rtol=2**-7 if "module" in name else 0, atol=2e-3, msg=name)


def test_a_gradient_of_one_pass_stays_at_the_module_and_one_of_several_does_not() -> None:
    engine = make_engine()
    optimizer = master_adamw(engine)
    tokens, targets = make_batch().microbatches[0]

    def backward() -> None:
        nn.functional.cross_entropy(engine(tokens).float(), targets).backward()

    def held() -> tuple[set[torch.dtype], int]:
        module, masters = engine.module.parameters(), set(engine.parameters())
        found = [p.grad.dtype for p in module if p.grad is not None and p not in masters]
        return set(found), sum(master.grad is not None for master in masters)

    backward()
    assert held() == ({BF16}, 2)  # the norm's weight and bias are their own masters
    optimizer.zero_grad()
    with engine.no_sync():
        backward()
    backward()
    assert held() == (set(), 7)
    engine.zero_grad()
    assert held() == (set(), 0)


def test_whoever_asks_for_gradients_gets_those_of_the_masters() -> None:
    lent, plain = make_engine(), make_engine()
    lent.fuse_cast()
    tokens, targets = make_batch().microbatches[0]
    for act in ("full_gradients", "gradients", "clip", "scale"):
        for engine in (lent, plain):
            engine.zero_grad()
            nn.functional.cross_entropy(engine(tokens).float(), targets).backward()
            if act == "clip":
                engine.clip_grad_norm_(0.1)
            elif act == "scale":
                scale_gradients(engine, torch.tensor(1 / 3))
            else:
                getattr(engine, act)()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in lent.parameters())
        for name, gradient in plain.full_gradients().items():
            assert torch.equal(gradient, lent.full_gradients()[name]), (act, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_gradients_in_bf16_is_as_exact_as_in_fp32(norm_type: float) -> None:
    lent, plain = make_engine(), make_engine()
    lent.fuse_cast()
    tokens, targets = make_batch().microbatches[0]
    norms = []
    for engine in (lent, plain):
        nn.functional.cross_entropy(engine(tokens).float(), targets).backward()
        norms.append(engine.clip_grad_norm_(math.inf, norm_type))
    assert norms[0].dtype is torch.float32
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)


def test_masters_that_somebody_writes_reach_copies_that_are_lent() -> None:
    engine = make_engine()
    engine.fuse_cast()
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(0.25)
    engine(make_batch().microbatches[0][0])
    assert all(bool((p == 0.25).all()) for p in engine.module.parameters())


def test_an_engine_without_copies_in_bf16_lends_nothing() -> None:
    comm = SoloCommunicator(torch.device("cpu"))
    assert DataParallel(nn.Linear(2, 2), make_groups(comm)).fuse_cast() == {}
    wide = DataParallel(nn.Linear(2, 2).double(), make_groups(comm), None, PRECISIONS["bf16_master"])
    assert wide.fuse_cast() == {}
    wide(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in wide.parameters())


def test_on_a_cpu_the_optimizer_of_a_config_is_torchs() -> None:
    engine = make_engine()
    optimizer = build_optimizer(OptimConfig(kind="adamw"), engine.named_parameters(), engine)
    assert type(optimizer) is torch.optim.AdamW
    assert not can_update(list(engine.parameters()))
    nn.functional.cross_entropy(engine(make_batch().microbatches[0][0]).float(), torch.zeros(12).long()).backward()
    assert all(p.grad is not None for p in engine.parameters())  # nothing was lent


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module("importlib.util")
    monkeypatch.setattr(found, "find_spec", lambda _: None)
    has_kernel.cache_clear()
    assert not has_kernel(torch.device("cpu"))
    has_kernel.cache_clear()


def test_a_kernel_that_cannot_be_built_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module("importlib.util")
    monkeypatch.setattr(found, "find_spec", lambda _: object())

    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(MasterAdamW, "step", fail)
    has_kernel.cache_clear()
    with pytest.warns(UserWarning, match=r"\(RuntimeError: Failed to find C compiler\.\): torch's fused AdamW"):
        assert not has_kernel(torch.device("cpu"))
    has_kernel.cache_clear()


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_the_optimizer_of_a_config_updates_masters_and_copies_in_one_pass() -> None:
    engine = make_engine("cuda")
    optimizer = build_optimizer(OptimConfig(kind="adamw"), engine.named_parameters(), engine)
    assert isinstance(optimizer, MasterAdamW)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_steps_of_a_graph_are_those_without_one() -> None:
    """Rates that change, a step that is left out, gradients that are written in place; and eager steps in between."""

    def run(has_graph: bool) -> list[torch.Tensor]:
        model = Model("cuda")
        optimizer = model.ours()
        norm, factor = torch.ones((), device="cuda"), torch.ones((), device="cuda")
        fixed = {m: torch.zeros_like(held) for m, held in model.copies.items()}

        def step() -> None:
            for master, held in model.copies.items():
                held.grad = fixed[master] * factor.to(BF16)  # at an address of the graph's own
            optimizer.step_scaled(Scaling(norm=norm, max_norm=1.0))

        graph: torch.cuda.CUDAGraph | None = None
        for number, told in enumerate((1.0, 3.0, math.nan, 0.5, 2.0, math.inf, 4.0)):
            for into, gradient in zip(fixed.values(), model.draw(), strict=True):
                into.copy_(gradient)
            norm.fill_(told)
            set_learning_rate(optimizer, 1.0 / (1 + number))
            if has_graph and number == 1:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
            if graph is None or number == 4:
                step()
                optimizer.zero_grad()
            else:
                optimizer.upload_rates()
                graph.replay()
        torch.cuda.synchronize()
        return states(optimizer, model)

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_an_update_does_not_wait_for_the_device() -> None:
    model = Model("cuda")
    optimizer = model.ours()
    norm = torch.ones((), device="cuda")
    for number in range(4):
        model.give("mixed")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            set_learning_rate(optimizer, 1.0 / (1 + number))
            optimizer.step_scaled(Scaling(norm=norm, max_norm=0.5))
        finally:
            torch.cuda.set_sync_debug_mode(before)
