"""The hierarchical algorithm with a communicator of its own inside every host: for CPUs, shared memory.

    with hosts of L ranks, H of them, and a tensor of B bytes:
    reduce-scatter inside    B (L-1)/L bytes per rank, through memory
    all-reduce across        2 B/L (H-1)/H bytes per rank, as a ring: every rank's share of its host's link
    all-gather inside        B (L-1)/L bytes per rank, through memory

The three follow one another, and operations are finished in the order of issue, so that no two ranks ever wait for each
other on different levels. Every element is summed by one rank of each host, in rank order: the same bits on every rank.
"""

from __future__ import annotations

import torch

from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.algorithms.topology import Topology
from paceline.comm.base import DONE, Communicator, ReduceOp, Work
from paceline.comm.group import check_reduction
from paceline.comm.objects import reduce_number
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.errors import CommunicationError, UsageError


def join_hosts(comm: Communicator, topology: Topology, *, timeout_s: float = 300.0) -> Communicator | None:
    """Returns this rank's host as a group that shares memory; None where some host's ranks cannot.

    Called by every rank. Virtual ranks, ranks on GPUs, one rank to a host and hosts of different sizes have none.
    """
    sizes = {len(host) for host in topology.hosts}
    if comm.device.type != "cpu" or not comm.takes_real_time or len(sizes) != 1 or sizes == {1}:
        return None
    host = next(host for host in topology.hosts if comm.rank in host)
    local: Communicator | None
    try:
        local = SharedMemoryCommunicator.join(comm.split(host), timeout_s=timeout_s)
    except CommunicationError:
        local = None
    return local if reduce_number(comm, local is not None, "min") else None


class TwoLevelCommunicator(AlgorithmCommunicator):
    """Reduces inside hosts through ``local``, and across them by messages of ``inner``.

    All other verbs, and the groups that are split off, are those of the hierarchical algorithm on messages alone.
    """

    def __init__(self, inner: Communicator, topology: Topology, local: Communicator) -> None:
        super().__init__(inner, "hierarchical", topology)
        if {len(host) for host in topology.hosts} != {local.size}:
            raise UsageError(
                f"hosts {topology.hosts} and a group of {local.size} ranks on this one: every host has as many ranks"
            )
        self._local = local
        peers = [host[local.rank] for host in topology.hosts]
        self._across = AlgorithmCommunicator(inner.split(peers), "ring")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_reduction("all_reduce", tensor.dtype, op)
        if not tensor.numel():
            return DONE
        whole = self._whole(tensor)
        piece = torch.empty(whole.numel() // self._local.size, dtype=whole.dtype)
        first = self._local.reduce_scatter(piece, whole, "sum" if op == "avg" else op)
        return self._in_flight.issue([], lambda: self._go_on(tensor, whole, piece, op, first))

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements one after another, so many that every rank of a host has as large a piece."""
        flat = tensor.detach().contiguous().view(-1)
        short = -flat.numel() % self._local.size
        if not short:
            return flat
        return torch.cat([flat, flat[-1:].expand(short)])  # the last again: also for the smallest and the largest

    def _go_on(self, tensor: torch.Tensor, whole: torch.Tensor, piece: torch.Tensor, op: ReduceOp, first: Work) -> None:
        first.wait()
        self._across.all_reduce(piece, "sum" if op == "avg" else op).wait()
        if op == "avg":
            piece.div_(self.size)
        self._local.all_gather(whole, piece).wait()
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole[: tensor.numel()].view(tensor.shape))
