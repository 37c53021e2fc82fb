"""The capstone of lesson 5 and the data race of lesson 3: right answers pass, ten wrong ones each do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import words_of_right, words_of_wrong
from torch import nn
from torch.func import functional_call

from paceline_course.course import find, judge


class Whole(torch.autograd.Function):
    """A unit that is gathered in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, mine: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.unit = unit
        ctx.save_for_backward(mine, x)
        whole = unit.gather(mine)
        if unit.how == "keeps the whole":
            ctx.whole = whole
        if unit.how == "keeps it transposed":
            ctx.weight = unit.cut(whole)["weight"].T.contiguous()
        return unit.run(whole, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        unit, (mine, x) = ctx.unit, ctx.saved_tensors
        whole = (ctx.whole if unit.how == "keeps the whole" else unit.gather(mine)).requires_grad_()
        with torch.enable_grad():
            of = x.detach().requires_grad_(ctx.needs_input_grad[2])
            output = unit.run(whole, of)
        found = torch.autograd.grad(output, [whole, of] if of.requires_grad else [whole], gradient)
        of_x = found[1] if of.requires_grad else None
        return None, unit.reduce(found[0]), of_x


class Unit(nn.Module):
    def __init__(self, module: nn.Module, comm: Any, how: str) -> None:
        super().__init__()
        self.module, self.comm, self.how = module, comm, how
        flat = torch.cat([each.detach().flatten() for each in module.parameters()])
        short = -len(flat) % comm.size
        flat = nn.functional.pad(flat, (0, 0 if how == "does not pad" else short))
        mine = flat.chunk(comm.size)[comm.rank]
        self.mine = nn.Parameter(mine if how == "keeps a view" else mine.clone())
        self.shapes = {name: each.shape for name, each in module.named_parameters()}
        for each in [] if how == "keeps the originals" else module.parameters():
            each.data = each.data.new_empty(0)

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        whole = mine.new_empty(self.comm.size * len(mine))
        gathering = self.comm.all_gather(whole, mine.detach())
        if self.how != "does not wait":
            gathering.wait()
        return whole

    def cut(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = whole.split([*map(torch.Size.numel, self.shapes.values()), len(whole) - self.numel()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=False)}

    def numel(self) -> int:
        return sum(map(torch.Size.numel, self.shapes.values()))

    def run(self, whole: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = functional_call(self.module, self.cut(whole), (x,))
        return output

    def reduce(self, whole: torch.Tensor) -> torch.Tensor:
        mine = torch.empty_like(self.mine)
        if self.how == "own gradients":
            return whole.chunk(self.comm.size)[self.comm.rank]
        if self.how == "all-reduces":
            self.comm.all_reduce(whole, "avg").wait()
            return whole.chunk(self.comm.size)[self.comm.rank].clone()
        self.comm.reduce_scatter(mine, whole.detach(), "sum" if self.how == "sum" else "avg").wait()
        return mine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "no gradients":
            return self.run(self.gather(self.mine), x)
        output: torch.Tensor = Whole.apply(self, self.mine, x)
        return output


class Sharded(nn.Module):
    def __init__(self, module: nn.Module, comm: Any, how: str) -> None:
        super().__init__()
        has_some = [any(True for _ in child.parameters()) for child in module.children()]
        units = zip(module.children(), has_some, strict=True)
        self.units = nn.ModuleList(Unit(child, comm, how) if some else child for child, some in units)
        self.how = how

    def parameters(self, recurse: bool = True) -> Any:  # noqa: ARG002  # as a module's
        return (unit.mine for unit in self.units if isinstance(unit, Unit))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, unit in enumerate(self.units):
            if not (self.how == "leaves a unit out" and place == 1):
                x = unit(x)
        return x


def sharded(how: str = "") -> Callable[[nn.Module, Any], Any]:
    return lambda module, comm: Sharded(module, comm, how)


def test_a_module_that_is_sharded_passes() -> None:
    assert "You wrote FSDP" in words_of_right("5.4", sharded())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (sharded("keeps the whole"), "in memory from forward to backward"),
        (sharded("keeps it transposed"), "in memory from forward to backward"),
        (sharded("keeps a view"), "a view keeps the whole vector"),
        (sharded("keeps the originals"), "hold 95 numbers in memory"),
        (sharded("does not wait"), "never waits for"),
        (sharded("own gradients"), "the output of step 1 is not that of one process"),
        (sharded("sum"), "2 times too long"),
        (sharded("all-reduces"), "called 4 x all_gather, 2 x all_reduce"),
        (sharded("no gradients"), "the step changes nothing"),
        (sharded("leaves a unit out"), "the output of step 0 is not that of one process"),
        (lambda module, _: module, "hold 63 numbers in memory, and slices have 32"),
        (lambda module, _: module.forward, "raised AttributeError"),
        (lambda *_: None, "raised AttributeError"),
    ],
)
def test_a_module_that_is_not_gets_words_that_help(function: Callable[..., Any], words: str) -> None:
    assert words in words_of_wrong("5.4", function)


def average(comm: Any, gradients: list[torch.Tensor], how: str = "") -> torch.Tensor:
    """Averages through two buffers that take turns. ``how`` plants one mistake."""
    buffers = [torch.empty(4) for _ in range(1 if how == "one buffer" else 2)]
    under_way: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def end(place: int = 0) -> None:
        work, buffer, gradient = under_way.pop(place)
        if how == "reads first":
            gradient.copy_(buffer)
        if how != "never waits" and not (how == "forgets the last" and gradient is gradients[-1]):
            work.wait()
        if how not in ("reads first", "copies nothing"):
            gradient.copy_(buffer)

    for place, gradient in enumerate(gradients):
        buffer = buffers[place % len(buffers)]
        if len(under_way) == 2 and how != "waits for no buffer":
            end(1 if how == "waits for the wrong one" else 0)
        if how == "one after the other":
            while under_way:
                end()
        buffer.copy_(gradient)
        work = comm.all_reduce(buffer, "sum" if how == "sum" else "avg")
        if how == "clears what is sent":
            buffer.zero_()
        under_way.append((work, buffer, gradient))
    while under_way:
        end()
    return torch.stack(gradients)


def test_two_buffers_that_take_turns_pass() -> None:
    verdict = judge(find("3.6"), average)
    assert verdict.is_right, verdict.words


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("one buffer", "changes a tensor that is under way"),
        ("waits for no buffer", "changes a tensor that is under way"),
        ("waits for the wrong one", "changes a tensor that is under way"),
        ("clears what is sent", "changes a tensor that is under way"),
        ("never waits", "never waits for 3 x all_reduce"),
        ("forgets the last", "never waits for 1 x all_reduce"),
        ("reads first", "reads what an operation is still filling"),
        ("one after the other", "each operation waits before the next begins"),
        ("sum", "the sum over the ranks"),
        ("copies nothing", "what they were"),
    ],
)
def test_races_get_words_that_help(how: str, words: str) -> None:
    assert words in words_of_wrong("3.6", lambda *given: average(*given, how=how))


def test_a_clone_per_operation_that_comes_back_from_one_buffer_is_found() -> None:
    def last(comm: Any, gradients: list[torch.Tensor]) -> torch.Tensor:
        buffers = [each.clone() for each in gradients]
        for work in [comm.all_reduce(each, "avg") for each in buffers]:
            work.wait()
        return torch.stack([buffers[-1]] * 3)

    assert "the mean of the last one" in judge(find("3.6"), last).words
