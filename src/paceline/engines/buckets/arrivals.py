"""Counting gradients in: which have arrived in this backward, and which buckets may leave.

A gradient is complete when it has arrived as often as in the first backward (twice under re-entrant checkpointing). A
bucket is complete when all its gradients are, and leaves when those before it have left: buckets leave in one order on
all ranks. What is missing when backward ends, such as parameters that this rank did not use, leaves then. Hooks call
this hundreds of times a step: nothing here allocates or communicates.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from paceline.engines.buckets.gradients import GradientBucket
from paceline.errors import UsageError

B = TypeVar("B", bound=GradientBucket)


class Arrivals(Generic[B]):
    """The gradients of one backward, by the number of their parameter, and the buckets that they fill."""

    def __init__(self, names: Sequence[str], *, overlap: bool, graph_fix: str) -> None:
        """``overlap``: buckets leave during backward. ``graph_fix``: what to do about gradients with a graph."""
        self.names = list(names)
        self.buckets: list[B] = []  # in the order in which they leave
        self.num_left = 0  # of the buckets, in this backward
        self.counts = [0] * len(self.names)
        self.seen: list[int] = []  # in the order of arrival, while the engine learns
        self.expected: list[int] | None = None  # how often each arrives; 0: never seen, so complete when backward ends
        self.is_open = False  # whether a backward is under way
        self.reduces = True  # that backward, or the last one: else it accumulates
        self._overlap = overlap
        self._graph_fix = graph_fix
        self._place_of: dict[int, tuple[B, int]] = {}
        self._complete: set[int] = set()
        self._task = -1  # autograd's number of the backward
        self._watched: set[int] = set()

    def watch(self, engine: object, arrive: Callable[..., None], parameters: Mapping[int, nn.Parameter]) -> None:
        """Lets autograd call ``arrive(engine, number, parameter)`` for each gradient; a parameter is watched once.

        The engine is held weakly: the garbage collector does not see what a parameter's hook refers to.
        """
        proxy: Any = weakref.proxy(engine)
        for index in parameters.keys() - self._watched:
            hook = functools.partial(arrive, proxy, index)
            parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._watched.add(index)

    def arrange(self, buckets: Sequence[B]) -> None:
        """Sets the buckets, in the order in which they leave. No backward may be under way."""
        self.buckets = list(buckets)
        self._place_of = {index: (b, place) for b in self.buckets for place, index in enumerate(b.members)}

    def place_of(self, index: int) -> tuple[B, int]:
        return self._place_of[index]

    def open(self, finish: Callable[[], None], *, reduces: bool = True) -> None:
        """Begins a backward, at whose end autograd calls ``finish``.

        Called when the gradient enters the module's outputs, not with the first gradient of a parameter: under
        re-entrant checkpointing that one belongs to an inner backward, which ends long before the outer one.
        """
        self.is_open, self.reduces = True, reduces
        self._task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Raises UsageError for a gradient that cannot be reduced."""
        if gradient.is_sparse:
            raise UsageError(
                f"{self.names[index]} has a sparse gradient\n  buckets are dense\n"
                "  build its nn.Embedding with sparse=False, or freeze it"
            )
        if gradient.requires_grad:
            raise UsageError(
                f"{self.names[index]} has a gradient with a graph (backward(create_graph=True))\n"
                f"  a reduced gradient cannot be differentiated again\n  {self._graph_fix}"
            )

    def count(self, index: int, *, may_leave: bool) -> tuple[B, int] | None:
        """Counts a gradient in; returns its bucket and place when it is complete, and buckets may leave.

        ``may_leave``: in a first backward, what arrives in the outer one is complete at once: autograd adds up all
        uses, and only a backward within the backward brings another one.
        """
        self.counts[index] += 1
        if self.expected is None:
            self.seen.append(index)
            is_complete = may_leave and self.counts[index] == 1 and torch._C._current_graph_task_id() == self._task
        else:
            is_complete = self.counts[index] == self.expected[index]
        if not self._overlap:
            return None
        if is_complete:
            self._complete.add(index)
            found = self._place_of[index]
            found[0].num_missing -= 1
            return found
        if index in self._complete:
            raise UsageError(
                f"{self.names[index]} got its gradient number {self.counts[index]} after it was counted in\n"
                "  with overlap, every backward must visit a parameter as often as the first one did, and re-entrant\n"
                "  checkpoints must not share parameters with the rest of the model\n"
                "  set comm.overlap = false (parallelize(..., overlap=False))"
            )
        return None

    def take_leaving(self, *, is_end: bool) -> Iterator[B]:
        """Yields the buckets that leave now: a complete one waits for those before it; at the end of backward all."""
        while self.num_left < len(self.buckets) and (is_end or self.buckets[self.num_left].num_missing == 0):
            self.num_left += 1
            yield self.buckets[self.num_left - 1]

    def learn(self) -> None:
        """Keeps how often gradients arrived, for those that had not been seen before."""
        before = self.expected or [0] * len(self.counts)
        if 0 in before:
            self.expected = [known or now for known, now in zip(before, self.counts, strict=True)]

    def forget_counts(self) -> None:
        self.seen, self.counts = [], [0] * len(self.names)

    def reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.forget_counts()
        self.num_left = 0
        self._complete.clear()
        self.is_open = False
