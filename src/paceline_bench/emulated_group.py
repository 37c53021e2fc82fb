"""A process group of torch whose collectives are those of an emulated communicator: for the peers of our engines.

torch's names of a few methods changed between 2.11 and 2.13; both are here. A result is a future that streams wait for,
as that of NCCL is: nobody blocks the host.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.futures import Future

from paceline.comm.base import Communicator, ReduceOp, Work

NAME = "emulated"


_Group: Any = dist.ProcessGroup
_work_of: Any = vars(_distributed_c10d)["_create_work_from_future"]


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what a call takes of the host to ``host_s``: a group written in C++ would take less."""

    @functools.wraps(method)
    def run(self: EmulatedGroup, *args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return method(self, *args, **options)
        finally:
            self.host_s += time.perf_counter() - begun

    return run


class EmulatedGroup(_Group):  # type: ignore[misc]
    """Passes what DDP, FSDP2 and DTensor ask of a group on to ``comm``."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.host_s = 0.0
        self._comm = comm
        self._devices = [comm.device] if comm.device.type == "cuda" else []
        self._stream = torch.cuda.Stream() if self._devices else None  # type: ignore[no-untyped-call]

    def _done(self, result: Any, *works: Work) -> Any:
        future: Future[Any] = Future(devices=self._devices)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream):  # which notes when the result is there; None: no stream
            for work in works:
                work.wait()
            future.set_result(result)
        return _work_of(future)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._get_process_group_name(self)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME

    @_counted
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._done(tensors, *(self._comm.all_reduce(each, _op_of(opts)) for each in tensors))

    allreduce_coalesced = allreduce

    @_counted
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._done(tensors, *(self._comm.broadcast(each, opts.rootRank) for each in tensors))

    def barrier(self, opts: Any = None) -> Any:
        del opts
        self._comm.barrier()
        return self._done([])

    @_counted
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        del opts
        works = []
        for pieces, tensor in zip(outputs, inputs, strict=True):
            whole = torch.empty(len(pieces), *tensor.shape, dtype=tensor.dtype, device=tensor.device)
            works.append(self._comm.all_gather(whole, tensor))
            works[-1].wait()
            for piece, found in zip(pieces, whole, strict=True):
                piece.copy_(found)
        return self._done(outputs)

    @_counted
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        del opts
        return self._done([output], self._comm.all_gather(output, tensor))

    @_counted
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._done([output], self._comm.reduce_scatter(output, tensor, _op_of(opts)))

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def _op_of(opts: Any) -> ReduceOp:
    """Returns the reduction that torch asks for; what is none of ours is treated as a sum, which takes as long."""
    names: dict[ReduceOp, Any] = {"avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    return next((name for name, op in names.items() if opts is not None and opts.reduceOp == op), "sum")


@contextmanager
def emulated_group(comm: Communicator) -> Iterator[EmulatedGroup]:
    """Makes torch's default process group one of ``comm``, for a while."""
    group = EmulatedGroup(comm)
    dist.Backend.register_backend(NAME, lambda *_: group, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=comm.rank, world_size=comm.size)  # type: ignore[attr-defined]
    try:
        yield group
    finally:
        dist.destroy_process_group()
