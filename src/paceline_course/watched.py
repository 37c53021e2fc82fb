"""Runs the reader's functions on virtual ranks that count what is sent and show what a missing ``wait()`` does.

On virtual ranks an operation may have ended when it is issued, so that code without ``wait()`` would pass. Here results
come with ``wait()`` and no earlier: until then a tensor that is being filled holds NaN, or -1. What a rank brings to an
operation travels as it was when it was issued, and must be the same when the rank waits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm.base import Call, Communicator, Work, WrappedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import PacelineError, RankFailedError
from paceline_course.exercise import MistakeError, Said, says

_TIMEOUT_S = 20.0  # of a rank that computes without talking: a loop that does not end
_VERBS = "A verb starts an operation, and wait() of what it returns ends it."
_NO_WAIT = (
    "Rank {rank} never waits for {kinds}. {verbs} In between, the tensor may hold anything: on hardware that is "
    "corrupted data. Keep what each verb returns, and wait for it."
)
_CHANGED = (
    "Rank {rank} changes a tensor that is under way ({kind}), before wait(). {verbs} On hardware, old and new numbers "
    "would be mixed: wait first, or change a copy."
)
_EARLY = (
    "A rank reads what an operation is still filling. {verbs} Until then, the tensor may hold anything, and the check "
    "puts NaN or -1 there: wait first, then read."
)


class WatchedCommunicator(WrappedCommunicator):
    """Counts what passes through, keeps what was brought to it, and delivers with ``wait()`` where ``is_late``."""

    def __init__(self, inner: Communicator, *, is_late: bool = True) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.brought: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.receivers: set[int] = set()
        self.under_way: list[str] = []
        self.most_under_way = 0
        self._is_late = is_late

    def barrier(self) -> None:
        self.calls["barrier"] += 1
        self.inner.barrier()

    def split(self, ranks: Sequence[int]) -> Communicator:
        self.calls["split"] += 1
        return self.inner.split(ranks)

    def issue(self, call: Call) -> Work:
        self.calls[call.kind] += 1
        if call.kind == "send":
            self.receivers.add(call.peer)
        brought = call.tensor.detach().clone()
        self.brought[call.kind].append(brought)
        if not self._is_late:
            work = self.inner.issue(call)
            if call.kind not in ("send", "recv"):
                work.wait()
            return work
        self.under_way.append(call.kind)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        sent = brought.clone()
        hidden = sent if call.output is call.tensor else torch.empty_like(call.output)
        return _LateWork(self, call, self.inner.issue(call._replace(output=hidden, tensor=sent)), hidden, brought)


class _LateWork:
    """An operation whose result comes with ``wait()``."""

    def __init__(
        self, comm: WatchedCommunicator, call: Call, inner: Work, hidden: torch.Tensor, brought: torch.Tensor
    ) -> None:
        self._comm, self._call, self._inner, self._hidden, self._brought = comm, call, inner, hidden, brought
        self._is_done = False
        self._fills = call.kind != "send"
        if self._fills:  # whole numbers have no NaN: a count below 0 is refused by whoever uses it
            call.output.data.fill_(math.nan if call.output.is_floating_point() else -1)

    def wait(self) -> None:
        """Waits, and puts the result where it belongs. Raises MistakeError where the tensors were changed meanwhile."""
        if self._is_done:
            return
        call, self._is_done = self._call, True
        self._comm.under_way.remove(call.kind)
        self._inner.wait()
        if self._was_changed():
            raise MistakeError(_CHANGED.format(rank=self._comm.rank, kind=call.kind, verbs=_VERBS))
        if self._fills:
            call.output.data.copy_(self._hidden)

    def _was_changed(self) -> bool:
        output, tensor = self._call.output, self._call.tensor
        if self._fills and output.is_floating_point() and not bool(output.detach().isnan().all()):
            return True
        is_shared = self._fills and output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return not is_shared and not torch.allclose(tensor.detach(), self._brought, rtol=0.0, atol=0.0, equal_nan=True)


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory of every tensor that is made, and does not keep it alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        each = found if isinstance(found, tuple | list) else (found,)
        storages = [one.untyped_storage() for one in each if isinstance(one, torch.Tensor)]
        self.made += [StorageWeakRef(storage) for storage in storages]  # type: ignore[no-untyped-call]
        return found

    def alive(self) -> torch.Tensor:
        """Returns the numbers that are still in the memory of what was made."""
        found = [torch.empty(0, dtype=torch.float64)]
        for made in self.made:
            storage = torch.UntypedStorage._new_with_weak_ptr(made.cdata)  # None where it is gone
            if storage is not None and storage.nbytes() % 8 == 0:
                found.append(torch.empty(0, dtype=torch.float64).set_(storage))
        return torch.cat(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What the ranks returned, and the communicators that counted, by rank."""

    results: list[Any]
    comms: list[WatchedCommunicator]

    @property
    def sent_bytes(self) -> list[int]:
        """The bytes that each rank sent by ``send``."""
        return [sum(each.nbytes for each in comm.brought["send"]) for comm in self.comms]

    def calls_besides(self, *allowed: str) -> str:
        """Names the operations that any rank called besides those that are allowed; "" where there are none."""
        return ", ".join(sorted({kind for comm in self.comms for kind in comm.calls} - set(allowed)))


def run_watched(work: Callable[[Any], Any], ranks: int) -> Watched:
    """Runs ``work(comm)`` on virtual ranks. Raises MistakeError where one does not wait as it should."""
    try:
        found = _run(work, ranks, is_late=True)
    except RankFailedError as error:
        if not isinstance(error.error, MistakeError) and _is_right_at_once(work, ranks):
            raise MistakeError(_EARLY.format(verbs=_VERBS)) from error
        raise
    for rank, comm in enumerate(found.comms):
        if comm.under_way:
            kinds = " and ".join(f"{count} x {kind}" for kind, count in sorted(Counter(comm.under_way).items()))
            raise MistakeError(_NO_WAIT.format(rank=rank, kinds=kinds, verbs=_VERBS))
    if _has_nan(found.results) and _is_right_at_once(work, ranks):
        raise MistakeError(_EARLY.format(verbs=_VERBS))
    return found


def run_with(function: Callable[..., Any], brings: Sequence[Sequence[Any]]) -> Watched:
    """Runs ``function(comm, *own)`` on a rank for each of ``brings``, with copies of the tensors that it brings."""

    return run_watched(lambda comm: function(comm, *deepcopy(brings[comm.rank])), len(brings))


def _run(work: Callable[[Any], Any], ranks: int, *, is_late: bool) -> Watched:
    def watched(comm: Any) -> tuple[Any, WatchedCommunicator]:
        watching = WatchedCommunicator(comm, is_late=is_late)
        return work(watching), watching

    results, comms = zip(*run_virtual(watched, ranks=ranks, timeout_s=_TIMEOUT_S), strict=True)
    return Watched(results=list(results), comms=list(comms))


def _is_right_at_once(work: Callable[[Any], Any], ranks: int) -> bool:
    """Says whether ranks neither fail nor return NaN where the results of operations come at once."""
    try:
        return not _has_nan(_run(work, ranks, is_late=False).results)
    except PacelineError:
        return False


def _has_nan(found: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return bool(found.detach().isnan().any())
    return isinstance(found, list | tuple) and any(map(_has_nan, found))


def shown_calls(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(calls.items())) or "no collective"


Expected: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # the same on all ranks, or by rank


def all_close(values: Sequence[torch.Tensor], expected: Expected) -> bool:
    """Says whether all ranks have what was expected."""
    wanted = [expected] * len(values) if isinstance(expected, torch.Tensor) else expected
    return all(map(torch.allclose, values, wanted))


def compare(values: Sequence[Any], expected: Expected, usual: Mapping[str, Expected]) -> Said | None:
    """Compares what ranks returned with what was expected, and with what usual mistakes give; None: all is right."""
    ranks = len(values)
    for rank, value in enumerate(values):
        wanted = expected if isinstance(expected, torch.Tensor) else expected[rank]
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.shape != wanted.shape:
            shape = tuple(value.shape) if is_tensor else type(value).__name__
            return says("shape", rank=rank, ranks=ranks, shape=shape, expected=wanted.numel())
    if all_close(values, expected):
        return None
    name = next((name for name, value in usual.items() if all_close(values, value)), "otherwise")
    may_differ = name != "otherwise" or not isinstance(expected, torch.Tensor) or all_close(values, values[0])
    return says(name if may_differ else "differ", ranks=ranks)
