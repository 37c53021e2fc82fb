"""Optimizers that can work on flat slices, and those that cannot: found out by trying."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.engines.flat import optimizer_state as matrixwise
from paceline.engines.flat.optimizer_state import check_updates
from paceline.errors import UsageError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "AdamW rate as a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p),
    "SGD nesterov": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True),
}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every test try out its optimizers itself."""
    monkeypatch.setattr(matrixwise, "_found", {})


class Lars(torch.optim.Optimizer):
    """Scales a tensor's update by the norms of the tensor and its gradient."""

    def __init__(self, params: Any, lr: float = 0.1, trust: float = 0.001) -> None:
        super().__init__(params, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                ratio = group["trust"] * p.norm() / (p.grad.norm() + 1e-9)
                p.sub_(group["lr"] * ratio * p.grad)


class ClipsTogether(torch.optim.SGD):
    """Clips by the norm of all the gradients that it sees: on a rank, those of the rank's slices."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class MatrixByName(torch.optim.SGD):
    """Orthogonalises the updates of groups that are marked so, as Muon's users write it."""

    def __init__(self, params: Any, lr: float = 0.1, use_muon: bool = False) -> None:
        super().__init__(params, lr)
        self.defaults["use_muon"] = use_muon

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"] if group.get("use_muon") else []:
                u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                p.grad = u @ v
        return super().step(closure)


class NeedsElements(torch.optim.SGD):
    """Looks for the largest gradient, which a slice without elements does not have."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad.max() < 1e9
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise to every element: elementwise, but never twice the same."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3 * random.random())
        return result


class OtherArguments(torch.optim.SGD):
    """Cannot be built from its settings alone."""

    def __init__(self, model: nn.Module, recipe: str) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.recipe = recipe


class WarnsAndPrefersFloat32(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        warnings.warn("a matter of taste", stacklevel=2)
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> Any:
        if any(p.dtype == torch.float64 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("no kernel for float64")
        return super().step(closure)


class LarsInFloat32(WarnsAndPrefersFloat32):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


def pieces() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(40)), nn.Parameter(torch.randn(0))]


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Lets it update pieces as they are."""
    check_updates(optimizer, [], are_whole=True)
    assert not hasattr(optimizer, "updates_whole")


def check_whole(make: Callable[[], torch.optim.Optimizer], reason: str) -> None:
    """Sees that it gets whole parameters, and is refused where there are none."""
    check_refused(make(), reason, are_whole=False)
    optimizer = make()
    check_updates(optimizer, [], are_whole=True)
    assert hasattr(optimizer, "updates_whole")


def check_refused(optimizer: torch.optim.Optimizer, reason: str, *, are_whole: bool = True) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        check_updates(optimizer, [], are_whole=are_whole)
    assert not hasattr(optimizer, "updates_whole")
    assert type(optimizer).__name__ in str(caught.value)
    assert "strategy = 'ddp'" in str(caught.value)


def test_every_optimizer_of_torch_is_judged_here() -> None:
    ours = {name.split()[0] for name in ELEMENTWISE} | {"Adafactor", "LBFGS", "Muon", "SparseAdam", "Optimizer"}
    theirs = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    assert theirs <= ours


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(name: str) -> None:
    check_elementwise(ELEMENTWISE[name](pieces()))


def test_optimizers_that_look_at_all_parameters_together_are_refused() -> None:
    check_refused(torch.optim.LBFGS(pieces()), "closure")
    check_refused(torch.optim.SparseAdam(pieces()), "sparse")
    check_refused(ClipsTogether(pieces(), lr=0.1), "all parameters together")


def test_optimizers_that_look_at_a_parameter_get_it_whole() -> None:
    check_whole(lambda: torch.optim.Adafactor(pieces()), "another update")
    check_whole(lambda: Lars(pieces()), "another update")
    check_whole(lambda: NeedsElements(pieces(), lr=0.1), "without elements")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_whole(lambda: LarsInFloat32(pieces()), "another update")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_gets_whole_matrices_whether_it_takes_slices_or_not() -> None:
    check_whole(lambda: torch.optim.Muon([nn.Parameter(torch.randn(4, 4))]), "refuses flat slices")


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_one_group_of_many_is_enough(rate: float) -> None:
    first, second = pieces()
    plain = [{"params": [first]}, {"params": [second], "weight_decay": 0.1}]
    check_elementwise(MatrixByName(plain))
    marked = [{"params": [first]}, {"params": [second], "use_muon": True}]
    check_whole(lambda: MatrixByName(marked, lr=rate), "refuses flat slices")


@pytest.mark.parametrize("rate", [1e-9, 0.0])
def test_a_rate_of_zero_hides_nothing(rate: float) -> None:
    check_whole(lambda: Lars(pieces(), lr=rate), "another update")


def test_what_cannot_be_tried_out_is_accepted_in_silence() -> None:
    check_elementwise(OtherArguments(nn.Linear(3, 3), "secret"))
    check_elementwise(Noisy(pieces(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = WarnsAndPrefersFloat32(pieces())
    check_elementwise(optimizer)  # here a warning is an error


def test_schedulers_do_not_hide_the_step() -> None:
    optimizer = torch.optim.AdamW(pieces(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    check_elementwise(optimizer)
    bad = ClipsTogether(pieces(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(bad, lambda step: step / 10)
    check_refused(bad, "all parameters together")


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    tensors: Iterable[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        [p.detach().clone() for p in tensors],
        [p.grad for p in tensors],
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        dict(optimizer.state),
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


@pytest.mark.parametrize("make", [torch.optim.AdamW, Noisy, ClipsTogether])
def test_a_trial_leaves_no_trace(make: Any) -> None:
    optimizer = make(pieces(), lr=0.1)
    before = snapshot(optimizer)
    try:
        check_elementwise(optimizer)
    except UsageError:
        assert make is ClipsTogether
    for one, other in zip(snapshot(optimizer), before, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
        elif isinstance(other, list) and other and isinstance(other[0], torch.Tensor):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        else:
            assert one == other


def test_a_class_is_tried_out_once_for_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, trial = [], matrixwise._reasons_against

    def count(optimizer: torch.optim.Optimizer) -> matrixwise.Reasons:
        tried.append(optimizer)
        return trial(optimizer)

    monkeypatch.setattr(matrixwise, "_reasons_against", count)
    for _ in range(2):
        check_elementwise(torch.optim.SGD(pieces(), lr=0.1, momentum=0.9))
        check_elementwise(torch.optim.AdamW(pieces(), lr=torch.tensor(0.1), betas=(0.9, 0.99)))
        check_refused(ClipsTogether(pieces(), lr=0.1, momentum=0.9), "all parameters together")
    assert len(tried) == 3
    check_elementwise(torch.optim.SGD(pieces(), lr=0.1, momentum=0.9, nesterov=True))
    check_elementwise(torch.optim.SGD([piece.detach().half() for piece in pieces()], lr=0.1, momentum=0.9))
    assert len(tried) == 5
    for _ in range(2):  # a tensor can be changed in place
        check_elementwise(torch.optim.AdamW(pieces(), eps=torch.tensor(1e-8)))  # type: ignore[arg-type]
    assert len(tried) == 7
