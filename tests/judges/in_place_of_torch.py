"""Ours in the place of torch's: an engine as ``DistributedDataParallel``, a communicator as a backend of c10d.

For programs that build torch's class or start torch's process group themselves.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import share_memory
from paceline.comm.torch_dist import communicator_of
from paceline.engines.apply import parallelize

CPU = torch.device("cpu")
OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
OPS[dist.ReduceOp.PRODUCT] = "product"


class OurDataParallel(nn.Module):
    """Has the face of torch's class, and trains with an engine of ours."""

    def __init__(self, module: nn.Module, *_: Any, process_group: Any = None, **__: Any) -> None:
        super().__init__()
        self.module = module
        device = next((each.device for each in module.parameters()), CPU)
        engine = parallelize(module, communicator_of(process_group, device), "ddp")
        object.__setattr__(self, "engine", engine)  # not as a part: the module is one already
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.process_group = process_group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def train(self, mode: bool = True) -> OurDataParallel:
        super().train(mode)
        self.engine.train(mode)
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with self.engine.no_sync():
                yield
        finally:
            self.require_backward_grad_sync = before


def replace_data_parallel() -> None:
    """Lets whoever builds torch's class from now on get ours."""
    torch.nn.parallel.DistributedDataParallel = OurDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = OurDataParallel  # type: ignore[misc]


class OurWork(dist._Work):  # type: ignore[name-defined]
    """A collective of ours that torch waits for."""

    def __init__(self, waits: Sequence[Any], finish: Callable[[], object] = lambda: None, result: Any = ()) -> None:
        super().__init__()
        self._waits, self._finish, self._result = list(waits), finish, result

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:  # noqa: ARG002
        for each in self._waits:
            each.wait()
        if self._waits:
            self._waits.clear()
            self._finish()
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class OurGroup(dist.ProcessGroup):
    """A communicator of ours as a process group of torch."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm, self._name = comm, name

    def getBackendName(self) -> str:  # noqa: N802
        return "paceline"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def _get_backend(self, _: torch.device) -> OurGroup:  # torch 2.15 asks it how messages are batched
        return self

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> OurWork:
        op = _op(options)
        return OurWork([self.comm.all_reduce(each, op) for each in tensors], result=tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> OurWork:
        return OurWork([self.comm.broadcast(each, options.rootRank) for each in tensors], result=tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _: Any = None) -> OurWork:
        (tensor,), (pieces,) = inputs, outputs
        if any(piece.numel() != tensor.numel() for piece in pieces):
            pieces[self.comm.rank].copy_(tensor)
            works = [self.comm.broadcast(piece, source) for source, piece in enumerate(pieces)]
            return OurWork(works, result=outputs)
        whole = tensor.new_empty((self.comm.size, tensor.numel()))
        work = self.comm.all_gather(whole.view(-1), tensor.contiguous().view(-1))

        def spread() -> None:
            for piece, row in zip(pieces, whole, strict=True):
                piece.copy_(row.view(tensor.shape))

        return OurWork([work], spread, result=outputs)

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _: Any) -> OurWork:
        """Gathers a list of tensors; ``outputs`` has a list for each rank."""
        works = [self.allgather([[row[i] for row in outputs]], [tensor]) for i, tensor in enumerate(inputs)]
        return OurWork(works, result=outputs)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, _: Any = None) -> OurWork:
        return OurWork([self.comm.all_gather(output.view(-1), tensor.contiguous().view(-1))], result=[output])

    all_gather_single = _allgather_base  # as torch 2.13 names it

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> OurWork:
        (output,), (pieces,) = outputs, inputs
        if any(piece.numel() != output.numel() for piece in pieces):
            copies = [piece.clone() for piece in pieces]
            works = [self.comm.all_reduce(piece, _op(options)) for piece in copies]
            return OurWork(works, lambda: output.copy_(copies[self.comm.rank]), result=outputs)
        whole = torch.cat([piece.reshape(-1) for piece in pieces])
        return OurWork([self.comm.reduce_scatter(output.view(-1), whole, _op(options))], result=outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> OurWork:
        work = self.comm.reduce_scatter(output.view(-1), tensor.contiguous().view(-1), _op(options))
        return OurWork([work], result=[output])

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, to: list[int], source: list[int], _: Any = None
    ) -> OurWork:
        return OurWork([self.comm.all_to_all(output, tensor, to or None, source or None)], result=[output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], _: Any = None) -> OurWork:
        splits = [[each.numel() for each in tensors] for tensors in (outputs, inputs)]
        output, tensor = (torch.cat([each.reshape(-1) for each in tensors]) for tensors in (outputs, inputs))
        work = self.comm.all_to_all(output, tensor, *splits)

        def spread() -> None:
            for each, piece in zip(outputs, output.split(splits[0]), strict=True):
                each.copy_(piece.view(each.shape))

        return OurWork([work], spread, result=outputs)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> OurWork:
        copies = [each.clone() for each in tensors]
        works = [self.comm.all_reduce(each, _op(options)) for each in copies]

        def keep() -> None:
            if self.comm.rank == options.rootRank:
                for each, copy in zip(tensors, copies, strict=True):
                    each.copy_(copy)

        return OurWork(works, keep, result=tensors)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> OurWork:
        is_root = self.comm.rank == options.rootRank
        (tensor,) = inputs
        pieces = outputs[0] if is_root else [torch.empty_like(tensor) for _ in range(self.comm.size)]
        return self.allgather([pieces], inputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> OurWork:
        (output,), root, rank = outputs, options.rootRank, self.comm.rank
        if rank != root:
            return OurWork([self.comm.recv(output, root)], result=outputs)
        (pieces,) = inputs
        sends = [self.comm.send(piece.contiguous(), to) for to, piece in enumerate(pieces) if to != root]
        return OurWork(sends, lambda: output.copy_(pieces[root]), result=outputs)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> OurWork:
        return OurWork([self.comm.send(each, to, tag) for each in tensors])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> OurWork:
        return OurWork([self.comm.recv(each, source, tag) for each in tensors])

    def barrier(self, opts: Any = None) -> OurWork:  # noqa: ARG002
        self.comm.barrier()
        return OurWork([])


def _op(options: Any) -> Any:
    asked = dist.ReduceOp.SUM if options is None else options.reduceOp
    for op, name in OPS.items():
        if asked == op:
            return name
    raise RuntimeError(f"paceline has no {asked}")


def replace_process_groups(device: torch.device = CPU) -> None:
    """Lets groups that torch makes from now on be of our communicators, for CPUs through shared memory."""
    c10d: Any = dist.distributed_c10d
    start, add = dist.init_process_group, dist.new_group

    def wrap(group: Any) -> Any:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return group
        world = c10d._world
        comm = communicator_of(group, device)
        ours = OurGroup(share_memory(comm) if device == CPU else comm, world.pg_names[group])
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table[ours] = table[group]
        world.pg_to_tag[ours] = world.pg_to_tag[group]
        world.tags_to_pg.setdefault(world.pg_to_tag[group], []).append(ours)
        return ours

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        ours = wrap(dist.group.WORLD)
        c10d._update_default_pg(ours)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return wrap(add(*args, **kwargs))

    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group
