"""Planted data races and fakes: code that gives right numbers on ranks that take turns, and that no check may pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from judged import words_of_wrong

from paceline_course.course import find, judge

NO_WAIT = "never waits for"
EARLY = "reads what an operation is still filling"
CHANGED = "changes a tensor that is under way"


def gather(comm: Any, tensor: torch.Tensor, waits: str = "send recv") -> list[torch.Tensor]:
    """An all-gather that waits for these kinds alone."""
    found = [torch.empty_like(tensor) for _ in range(comm.size)]
    found[comm.rank] = tensor
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    works = {"send": [comm.send(tensor, to=rank) for rank in others]}
    works["recv"] = [comm.recv(found[rank], source=rank) for rank in others]
    for kind in waits.split():
        for work in works[kind]:
            work.wait()
    return found


def gather_into_one_buffer(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Receives all tensors into one buffer at once."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    buffer, found = torch.empty_like(tensor), {comm.rank: tensor}
    works = [comm.send(tensor, to=rank) for rank in others] + [comm.recv(buffer, source=rank) for rank in others]
    for work in works:
        work.wait()
    return [found.get(rank, buffer.clone()) for rank in range(comm.size)]


def scatter(comm: Any, tensor: torch.Tensor, how: str = "") -> torch.Tensor:
    slices, after, before = tensor.chunk(comm.size), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = torch.empty_like(slices[0])
    for step in range(comm.size - 1):
        mine, theirs = slices[(comm.rank - 1 - step) % comm.size], slices[(comm.rank - 2 - step) % comm.size]
        sending, receiving = comm.send(mine, to=after), comm.recv(received, source=before)
        if how == "adds before it waits":
            theirs.add_(received)
        if how == "clears what it sends":
            mine.zero_()
        if how != "waits for nothing":
            receiving.wait()
        if how == "" or how in ("adds before it waits", "clears what it sends"):
            sending.wait()
        if how != "adds before it waits":
            theirs.add_(received)
    return slices[comm.rank]


def average(how: str) -> Callable[[Any, Any], None]:
    def average_gradients(model: Any, comm: Any) -> None:
        parameters = list(model.parameters())
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        flat = torch.cat([part.detach().flatten() for part in parts])
        work = comm.all_reduce(flat, "sum" if how == "divides first" else "avg")
        if how == "divides first":
            flat /= comm.size
        if how == "waits too late":
            flat = flat.clone()
        if how != "waits for nothing":
            work.wait()
        for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    return average_gradients


def update(comm: Any, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float, how: str) -> torch.Tensor:
    before, mine = parameters.clone(), parameters.chunk(comm.size)[comm.rank].clone()
    mean = torch.empty_like(mine)
    reducing = comm.reduce_scatter(mean, gradients, "avg")
    if how != "does not wait for the mean":
        reducing.wait()
    if how in ("gathers gradients", "gathers steps"):  # and updates everything everywhere
        whole = torch.empty_like(gradients)
        comm.all_gather(whole, mean if how == "gathers gradients" else -step_size * mean).wait()
        return before - step_size * whole if how == "gathers gradients" else before + whole
    mine -= step_size * mean
    gathering = comm.all_gather(parameters, mine)
    if how == "goes on with its slice":
        mine *= 1.0001
    if how != "does not wait for the gather":
        gathering.wait()
    return parameters


class Layer(torch.autograd.Function):
    """A linear layer whose weight is gathered, and kept in another way than the check once looked for."""

    @staticmethod
    def forward(ctx: Any, comm: Any, x: torch.Tensor, mine: torch.Tensor, shape: Any, how: str) -> torch.Tensor:  # type: ignore[override]
        ctx.comm, ctx.shape, ctx.how = comm, shape, how
        whole = Layer.gather(ctx, mine)
        ctx.save_for_backward(x, mine, *((whole,) if how == "saves it too" else ()))
        if how == "keeps its pieces":
            ctx.pieces = [piece.clone() for piece in whole.chunk(3)]
        if how == "keeps it transposed":
            ctx.transposed = whole.T.contiguous()
        return x @ whole.T

    @staticmethod
    def gather(ctx: Any, mine: torch.Tensor) -> torch.Tensor:
        whole = mine.new_empty(ctx.comm.size * mine.numel())
        gathering = ctx.comm.all_gather(whole, mine.detach())
        if ctx.how != "does not wait":
            gathering.wait()
        return whole.view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mine, *_ = ctx.saved_tensors
        whole = Layer.gather(ctx, mine)
        of_slice = torch.empty_like(mine)
        ctx.comm.reduce_scatter(of_slice, (gradients[0].T @ x).flatten(), "avg").wait()
        return None, gradients[0] @ whole, of_slice, None, None


def layer(how: str) -> Callable[..., Any]:
    return lambda comm, x, mine, shape: Layer.apply(comm, x, mine, shape, how)


def mlp_without_wait(comm: Any, x: torch.Tensor, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = F.gelu(x @ up.chunk(comm.size, 0)[comm.rank].T) @ down.chunk(comm.size, 1)[comm.rank].T
    comm.all_reduce(y)
    return y + bias


def moves_by_torch(weight: float, update: float) -> bool:
    return float(torch.tensor(weight + update, dtype=torch.float64).to(torch.bfloat16)) != weight


def moves_by_torch_within(weight: float, update: float) -> bool:
    import torch as library

    return bool(library.tensor([weight], dtype=library.bfloat16).add_(update).item() != weight)


PLANTED: list[tuple[str, Any, str]] = [
    ("1.1", lambda comm, tensor: gather(comm, tensor, ""), NO_WAIT),
    ("1.1", lambda comm, tensor: gather(comm, tensor, "send"), "never waits for 1 x recv"),
    ("1.1", lambda comm, tensor: gather(comm, tensor, "recv"), "never waits for 1 x send"),
    ("1.1", gather_into_one_buffer, CHANGED),
    ("2.2", lambda comm, tensor: scatter(comm, tensor, "waits for nothing"), NO_WAIT),
    ("2.2", lambda comm, tensor: scatter(comm, tensor, "waits for what comes"), "never waits for 1 x send"),
    ("2.2", lambda comm, tensor: scatter(comm, tensor, "adds before it waits"), EARLY),
    ("2.2", lambda comm, tensor: scatter(comm, tensor, "clears what it sends"), CHANGED),
    ("3.1", average("waits for nothing"), NO_WAIT),
    ("3.1", average("waits too late"), EARLY),
    ("3.1", average("divides first"), "weight.grad is the sum over the ranks"),
    ("4.2", lambda *given: update(*given, how="gathers gradients"), "each rank updates its slice alone"),
    ("4.2", lambda *given: update(*given, how="gathers steps"), "each rank updates its slice alone"),
    ("4.2", lambda *given: update(*given, how="does not wait for the mean"), NO_WAIT),
    ("4.2", lambda *given: update(*given, how="does not wait for the gather"), NO_WAIT),
    ("4.2", lambda *given: update(*given, how="goes on with its slice"), CHANGED),
    ("5.2", layer("saves it too"), "in memory from forward to backward"),
    ("5.2", layer("keeps its pieces"), "in memory from forward to backward"),
    ("5.2", layer("keeps it transposed"), "in memory from forward to backward"),
    ("5.2", layer("does not wait"), NO_WAIT),
    ("6.2", mlp_without_wait, NO_WAIT),
    ("8.2", moves_by_torch, "calls torch"),
    ("8.2", moves_by_torch_within, "calls torch"),
]


@pytest.mark.parametrize(("number", "function", "words"), PLANTED)
def test_what_was_planted_is_found(number: str, function: Any, words: str) -> None:
    assert words in words_of_wrong(number, function)


@pytest.mark.parametrize(
    ("number", "function"),
    [("1.1", gather), ("2.2", scatter), ("4.2", lambda *given: update(*given, how="")), ("5.2", layer(""))],
)
def test_the_same_code_without_the_fault_passes(number: str, function: Any) -> None:
    verdict = judge(find(number), function)
    assert verdict.is_right, verdict.words
