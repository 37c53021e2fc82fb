"""Checks of lessons 1 to 3, collectives and data parallelism, on virtual ranks that count what code sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.cluster.costs import Placement, Wire, host_link_bytes, sent_bytes
from paceline.comm.base import Communicator, Work
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.learn.exercise import RIGHT, Mistakes, Said, judge_number, says

_TIMEOUT_S = 20.0  # of a rank that computes without talking: a loop that does not end


class CountingCommunicator(TracedCommunicator):
    """Counts what passes through, and keeps the ranks to which messages go."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner, Trace(inner.device))
        self.receivers: set[int] = set()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        self.receivers.add(to)
        return super().send(tensor, to, tag)

    @property
    def calls(self) -> dict[str, int]:
        """How often each operation was called so far."""
        return dict(self.trace.num_operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the ranks returned, and the communicators that counted, by rank."""

    results: list[Any]
    comms: list[CountingCommunicator]

    @property
    def sent_bytes(self) -> list[int]:
        """The bytes that each rank sent by ``send``."""
        return [comm.trace.num_bytes["send"] for comm in self.comms]

    def calls_besides(self, *allowed: str) -> str:
        """Names the operations that any rank called besides those that are allowed; "" where there are none."""
        return ", ".join(sorted({kind for comm in self.comms for kind in comm.calls} - set(allowed)))


def run_counted(
    work: Callable[[Any], Any], ranks: int, counter: type[CountingCommunicator] = CountingCommunicator
) -> Counted:
    """Runs ``work(comm)`` on virtual ranks, each with a communicator that counts."""

    def counted(comm: Any) -> tuple[Any, CountingCommunicator]:
        counting = counter(comm)
        return work(counting), counting

    results, comms = zip(*run_virtual(counted, ranks=ranks, timeout_s=_TIMEOUT_S), strict=True)
    return Counted(results=list(results), comms=list(comms))


def shown_calls(calls: dict[str, int]) -> str:
    """Returns how often operations were called, as words."""
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(calls.items())) or "no collective"


def all_close(values: Sequence[torch.Tensor], expected: torch.Tensor) -> bool:
    """Says whether all ranks have what was expected."""
    return all(torch.allclose(value, expected) for value in values)


def compare(values: Sequence[Any], expected: torch.Tensor, usual: Mapping[str, torch.Tensor]) -> Said | None:
    """Compares what ranks returned with what was expected, and with what usual mistakes give; None: all is right."""
    ranks = len(values)
    for rank, value in enumerate(values):
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.shape != expected.shape:
            shape = tuple(value.shape) if is_tensor else type(value).__name__
            return says("shape", rank=rank, ranks=ranks, shape=shape, expected=expected.numel())
    if all_close(values, expected):
        return None
    name = next((name for name, value in usual.items() if all_close(values, value)), "otherwise")
    return says("differ" if name == "otherwise" and not all_close(values, values[0]) else name, ranks=ranks)


def _tensor_of(rank: int, elements: int) -> torch.Tensor:
    """Returns the tensor that a rank brings to a check: no two elements of all ranks are equal."""
    return torch.arange(elements, dtype=torch.float64) + 100.0 * (rank + 1)


# Lesson 1: ranks and collectives.

_ELEMENTS = 3
_COLLECTIVES = ("broadcast", "reduce_scatter", "all_gather", "all_to_all", "all_reduce")


def check_all_gather(function: Callable[[Any, torch.Tensor], Any]) -> Said:
    """Runs the reader's all-gather on one, two and four ranks, and compares with the tensors that the ranks brought."""
    for size in (1, 2, 4):
        found = run_counted(lambda comm: function(comm, _tensor_of(comm.rank, _ELEMENTS)), size)
        if called := found.calls_besides("send", "recv"):
            return says("calls", called=called)
        for rank, result in enumerate(found.results):
            if said := _gathered_wrong(result, size):
                return says(said.name, size=size, rank=rank, **said.gaps)
    own = 8 * _ELEMENTS
    return says("right", most=max(found.sent_bytes) / own, total=sum(found.sent_bytes) / own)


def _gathered_wrong(result: Any, size: int) -> Said | None:
    """Says what is wrong with the list that one rank returned; None if nothing is."""
    if not isinstance(result, list | tuple) or not all(isinstance(each, torch.Tensor) for each in result):
        return says("no_list", kind=type(result).__name__)
    if len(result) != size:
        return says("count", count=len(result))
    expected = [_tensor_of(each, _ELEMENTS) for each in range(size)]
    if any(each.shape != expected[0].shape for each in result):
        return says("shape", shape=tuple(result[0].shape))
    if all(map(torch.equal, result, expected)):
        return None
    if sorted(each.tolist() for each in result) == [each.tolist() for each in expected]:
        return says("order")
    return says("same" if size > 1 and all(torch.equal(each, result[0]) for each in result) else "otherwise")


def check_star_bytes(answer: float) -> Said:
    """Compares with what rank 0 really sends, counted on virtual ranks."""
    ranks, elements = 8, 1000

    def star(comm: Any) -> None:
        """The all-reduce of the lesson."""
        tensor = torch.ones(elements)
        if comm.rank:
            comm.send(tensor, to=0).wait()
            comm.recv(tensor, source=0).wait()
            return
        received = torch.empty_like(tensor)
        for other in range(1, comm.size):
            comm.recv(received, source=other).wait()
            tensor += received
        for other in range(1, comm.size):
            comm.send(tensor, to=other).wait()

    truth, one = run_counted(star, ranks).sent_bytes[0], 4 * elements
    mistakes = {"elements": truth / 4, "twice": truth * 2, "to_itself": one * ranks, "one_message": one}
    return judge_number(answer, truth, mistakes)


def check_first_half(answer: str) -> Said:
    """Calls the collective of that name on virtual ranks, then an all-gather, and compares with an all-reduce."""
    name = "_".join(answer.replace("-", " ").replace("_", " ").split())
    name = {"reducescatter": "reduce_scatter", "allgather": "all_gather", "allreduce": "all_reduce"}.get(name, name)
    if name not in _COLLECTIVES:
        return says("unknown", answer=answer, known=", ".join(_COLLECTIVES))
    if name == "all_reduce":
        return says("all_reduce")
    results = run_virtual(lambda comm: _followed_by_gather(comm, name), ranks=4)
    if all(gathered == reduced for gathered, reduced in results):
        return RIGHT
    gathered, reduced = results[0]
    return says("otherwise", name=name, gathered=gathered, reduced=reduced)


def _followed_by_gather(comm: Any, name: str) -> tuple[list[float], list[float]]:
    mine = torch.arange(4.0) + 10 * comm.rank
    part, whole, own = torch.empty(1), torch.empty(4), slice(comm.rank, comm.rank + 1)
    if name == "reduce_scatter":
        comm.reduce_scatter(part, mine).wait()
    elif name == "all_gather":
        comm.all_gather(whole, mine[:1].clone()).wait()
        part = whole[own].clone()
    elif name == "all_to_all":
        comm.all_to_all(whole, mine).wait()
        part = whole[:1].clone()
    else:
        copied = mine.clone()
        comm.broadcast(copied).wait()
        part = copied[own].clone()
    comm.all_gather(whole, part).wait()
    comm.all_reduce(mine).wait()
    return whole.tolist(), mine.tolist()


# Lesson 2: ring, tree, hierarchical.


def check_ring_bytes(answer: float) -> Said:
    ranks, size = 8, 4_000_000
    truth = sent_bytes("ring", size, Placement(ranks=ranks), 0)
    mistakes = {"elements": truth / 4, "half": truth / 2, "rounds": 2 * size, "all_ranks": truth * ranks}
    return judge_number(answer, truth, mistakes | {"star": (ranks - 1) * size})


def check_reduce_scatter(function: Callable[[Any, torch.Tensor], Any]) -> Said:
    """Runs the reader's reduce-scatter on two, three and four ranks: the values, then the bytes, then the ring."""
    for size in (2, 3, 4):
        elements = 2 * size
        found = run_counted(lambda comm, n=elements: function(comm, _tensor_of(comm.rank, n)), size)  # type: ignore[misc]
        if called := found.calls_besides("send", "recv"):
            return says("calls", called=called)
        if said := _slices_wrong(found.results, size) or _messages_wrong(found, size):
            return says(said.name, size=size, **said.gaps)
    return RIGHT


def _slices_wrong(results: list[Any], size: int) -> Said | None:
    """Says what is wrong with the slices that the ranks returned; None if nothing is."""
    expected = torch.stack([_tensor_of(rank, 2 * size) for rank in range(size)]).sum(0).chunk(size)
    for rank, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            return says("no_tensor", rank=rank, kind=type(result).__name__)
        shape = tuple(expected[rank].shape)
        if result.shape != shape:
            return says("shape", rank=rank, shape=tuple(result.shape), elements=2 * size, expected=shape)
    if all(map(torch.equal, results, expected)):
        return None
    for shift in range(1, size):
        if all(torch.equal(results[rank], expected[(rank + shift) % size]) for rank in range(size)):
            return says("shifted", shift=shift)
    own = [_tensor_of(rank, 2 * size).chunk(size)[rank] for rank in range(size)]
    if all(map(torch.equal, results, own)):
        return says("own")
    is_mean = any(torch.equal(result * size, whole) for result, whole in zip(results, expected, strict=True))
    return says("mean" if is_mean else "otherwise")


def _messages_wrong(found: Counted, size: int) -> Said | None:
    """Says what is wrong with what the ranks sent, and to whom. A slice has two float64 elements."""
    sent = max(found.sent_bytes)
    rank = found.sent_bytes.index(sent)
    if sent > 16 * (size - 1):
        sends = found.comms[rank].calls["send"]
        name = "whole_tensors" if sends <= size - 1 else "messages"
        return says(name, rank=rank, sent=sent, sends=sends, enough=size - 1)
    for rank, comm in enumerate(found.comms):
        if len(comm.receivers) > 1:
            return says("no_ring", rank=rank, named=" and ".join(map(str, sorted(comm.receivers))))
    return None


def check_host_bytes(answer: float) -> Said:
    """Compares with what the formula says leaves a host."""
    hosts, size = Placement(ranks=32, hosts=4), 100_000_000
    truth = host_link_bytes("hierarchical", size, hosts)
    mistakes = {"half": truth / 2, "ring": host_link_bytes("ring", size, hosts), "kept": 2 * size}
    mistakes |= {"one_rank": truth / hosts.node_ranks, "all_hosts": truth * hosts.hosts, "megabytes": truth / 1e6}
    return judge_number(answer, truth, mistakes)


# Lesson 3: data parallelism.

_RANKS = 4
_PARAMETERS = 1_000_000_000


def check_average(function: Callable[[nn.Module, Any], Any]) -> Said:
    """Runs the reader's function on four ranks: with all gradients there, and with one missing on two of them."""
    for some_missing in (False, True):

        def work(comm: Any, is_missing: bool = some_missing) -> list[torch.Tensor | None]:
            model = _model_with_gradients(comm.rank, is_missing)
            function(model, comm)
            return [parameter.grad for parameter in model.parameters()]

        found = run_counted(work, _RANKS)
        if said := _averages_wrong(found.results, some_missing):
            return said
        times = max(comm.calls.get("all_reduce", 0) for comm in found.comms)
        if called := found.calls_besides("all_reduce") or (f"all_reduce {times} times" if times > 1 else ""):
            return says("calls", called=called)
    return RIGHT


def _model_with_gradients(rank: int, is_missing: bool) -> nn.Module:
    """Returns a model whose gradients are known; with ``is_missing``, ranks 1 and 3 have none for the bias."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    model.weight.grad = torch.arange(6.0, dtype=torch.float64).view(2, 3) + 10 * rank
    model.bias.grad = None if is_missing and rank % 2 else torch.full((2,), 1.0 + rank, dtype=torch.float64)
    return model


def _averages_wrong(results: list[list[torch.Tensor | None]], is_missing: bool) -> Said | None:
    """Says what is wrong with the gradients that the function left; None if nothing is."""
    models = [_model_with_gradients(rank, is_missing) for rank in range(_RANKS)]
    names = [name for name, _ in models[0].named_parameters()]
    gradients = [
        [torch.zeros_like(each.detach()) if each.grad is None else each.grad for each in model.parameters()]
        for model in models
    ]
    sums = [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]
    for rank, found in enumerate(results):
        for name, gradient, total, own in zip(names, found, sums, gradients[rank], strict=True):
            if said := _gradient_wrong(gradient, total, own):
                return says(said.name, rank=rank, ranks=_RANKS, name=name, **said.gaps)
    return None


def _gradient_wrong(gradient: torch.Tensor | None, total: torch.Tensor, own: torch.Tensor) -> Said | None:
    if gradient is None:
        return says("none")
    if gradient.shape != total.shape:
        return says("shape", shape=tuple(gradient.shape), expected=tuple(total.shape))
    if torch.allclose(gradient, total / _RANKS):
        return None
    usual = {"sum": total, "unchanged": own, "divided_twice": total / _RANKS**2}
    return says(next((name for name, value in usual.items() if torch.allclose(gradient, value)), "otherwise"))


def check_gradient_bytes(answer: float) -> Said:
    """Compares with the bytes of a ring over gradients of 2 bytes."""
    ranks, size = 16, 2 * _PARAMETERS
    truth = sent_bytes("ring", size, Placement(ranks=ranks), 0)
    mistakes: Mistakes = {"half": truth / 2, "twice": truth * 2, "own_slice": 2 * size, "all_ranks": truth * ranks}
    return judge_number(answer, truth, mistakes | {"size": size, "unit": (truth / 1e9, truth / 1e6)})


def check_tokens(answer: float) -> Said:
    """Compares with the tokens whose backward takes as long as a ring over gradients in bf16."""
    flops, rate, ranks = 400e12, 50e9, 64
    sent = sent_bytes("ring", 2 * _PARAMETERS, Placement(ranks=ranks), 0)
    truth = Wire(alpha_s=0.0, bandwidth=rate).seconds(sent) * flops / (4 * _PARAMETERS)
    mistakes: Mistakes = {"own_slice": flops / rate, "twice": truth * 2, "half": truth / 2, "forward": truth * 4 / 6}
    mistakes |= {"all_ranks": truth * ranks, "unit": tuple(truth * 1000.0**power for power in (-2, -1, 1, 2))}
    return judge_number(answer, truth, mistakes, tolerance=0.005)  # a rounded answer is right


CHECKS = {
    "1.1": check_all_gather,
    "1.2": check_star_bytes,
    "1.3": check_first_half,
    "2.1": check_ring_bytes,
    "2.2": check_reduce_scatter,
    "2.3": check_host_bytes,
    "3.1": check_average,
    "3.2": check_gradient_bytes,
    "3.3": check_tokens,
}
