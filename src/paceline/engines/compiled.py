"""``torch.compile`` for a model, block by block or whole, and a note of what it did.

    blocks   a graph for each block: gradients arrive block by block, and communication overlaps with backward
    whole    one graph for the model: somewhat faster where there is nothing to overlap

Training and evaluation have a graph each. The first dim of every input is marked as one that may change: a last, ragged
batch then takes the graph that is there. Where all batches are known to be alike (``fix_sizes``) the graph is made for
that size: it is compiled in less time, and convolutions find better layouts.

What torch cannot compile runs as it is, and ``notes`` says so: a run is never slow without a word.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.models.registry import model_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileNote:
    """One function that was compiled, and how long that took; or why it runs as it is."""

    what: str
    seconds: float
    problem: str = ""


_loading: list[threading.Thread] = []  # one at most


def load_compiler() -> None:
    """Starts to load torch's compiler, which takes seconds, in a thread; what is compiled next waits for it."""

    def load() -> None:
        with contextlib.suppress(Exception):  # whoever compiles says what is missing
            importlib.import_module("torch._inductor.compile_fx")

    if not _loading:
        _loading.append(threading.Thread(target=load, name="compiler", daemon=True))
        _loading[0].start()


class Compiled:
    """A function whose first call compiles it; later calls of other sizes take the same graph."""

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        for thread in _loading:
            thread.join()
        self.notes: list[CompileNote] = []
        self._function = function
        self._graph = torch.compile(function)
        self._what = what
        self._modes: set[bool] = set()  # with and without gradients: each has a graph
        self.fixed: Collection[bool] = ()  # modes whose batches are all of one size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = torch.is_grad_enabled()
        for each in () if mode in self.fixed else tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.dim():
                torch._dynamo.maybe_mark_dynamic(each, 0)
        if mode in self._modes:
            return self._graph(*args, **kwargs)
        self._modes.add(mode)
        start = time.monotonic()
        try:
            result = self._graph(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"
            self._graph = self._function
            result = self._function(*args, **kwargs)
            self.notes.append(CompileNote(what=self._what, seconds=time.monotonic() - start, problem=problem))
            return result
        what = self._what if mode else f"{self._what}, for evaluation"
        self.notes.append(CompileNote(what=what, seconds=time.monotonic() - start))
        return result


def compile_model(model: nn.Module, *, whole: bool, units: Sequence[nn.Module] = ()) -> Sequence[nn.Module]:
    """Compiles each block in place, or the whole model where it has none; names stay as they are.

    The forward function is compiled, not the call: hooks on the module run outside of the graph. So must those of
    ``units``, which are gathered when they are called: where they lie inside, they are compiled one by one.
    """
    found = [] if whole else model_blocks(model)
    if any(_has_inside(part, units) for part in found or [model]):
        found = [unit for unit in units if not _has_inside(unit, units)]
    # Blocks of one class share their code. Where their sizes differ, as in a ResNet, each needs a graph; beyond torch's
    # limit the rest would run as they are, without a word.
    config: Any = torch._dynamo.config
    config.cache_size_limit = max(config.cache_size_limit, 4 * len(found))
    for number, block in enumerate(found or [model], start=1):
        what = f"block {number} of {len(found)}" if found else "the whole model"
        block.forward = Compiled(block.forward, what)
    return found or [model]


def _has_inside(module: nn.Module, others: Sequence[nn.Module]) -> bool:
    inside = {id(each) for each in module.modules()} - {id(module)}
    return any(id(each) in inside for each in others)


def fix_sizes(*places: Any, training: bool, evaluation: bool) -> None:
    """Says that all batches have one size, in training, in evaluation or in both."""
    for each in _compiled(places):
        each.fixed = {mode for mode, is_fixed in ((True, training), (False, evaluation)) if is_fixed}


def take_notes(*places: Any) -> list[CompileNote]:
    """Returns what was compiled since the last call, in modules and functions."""
    notes: list[CompileNote] = []
    for each in _compiled(places):
        notes += each.notes
        each.notes = []
    return notes


def _compiled(places: Sequence[Any]) -> list[Compiled]:
    functions = [each.forward for place in places if isinstance(place, nn.Module) for each in place.modules()]
    return [each for each in (*functions, *places) if isinstance(each, Compiled)]
