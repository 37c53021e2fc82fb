"""Averages of single tensors, compressed or over two groups: for training loops that reduce by hand.

    optimizer = CommunicationOptimizer(compression_ratio=0.01, bucket_size_mb=25, enable_overlap=True)
    average = optimizer.all_reduce_compressed(parameter.grad)
    average = optimizer.hierarchical_all_reduce(gradient, intra_node_group=inside, inter_node_group=across)

A thin face over ``single_tensors.py`` (two groups; top-k with error feedback: ratio r sends 6 r bytes an element
in place of 4). Results are new tensors, the same bits on every rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.algorithms.rounds import detect_topology
from paceline.comm.base import Communicator
from paceline.comm.compress.policies import num_kept
from paceline.comm.solo import SoloCommunicator
from paceline.comm.torch_dist import Group, communicator_of, disconnect, is_outside
from paceline.errors import Problem, UsageError
from paceline_classic.config import check_count, expect, plain_number, refuse
from paceline_classic.single_tensors import GradientOwners, OwedTensor, Way, connect_groups, once

T = TypeVar("T")


class Reduction:
    """An average on its way, which owns its tensor until it is there; without pieces it is there already."""

    def __init__(self, tensor: torch.Tensor, pieces: Iterable[Way] = (), slot: OwedTensor | None = None) -> None:
        self._tensor, self._pieces, self._slot = tensor, list(pieces), slot

    def advance(self) -> None:
        """Takes all pieces one stage further."""
        pieces, self._pieces, is_there = self._pieces, [], False
        try:
            self._pieces = [piece for piece in pieces if next(piece, piece) is None]
            is_there = True
        finally:
            if self._slot is not None and not self._pieces:
                self._slot.end(is_there=is_there)

    def wait(self) -> None:
        """Returns when the average may be used. Safe to call twice."""
        while self._pieces:
            self.advance()

    def result(self) -> torch.Tensor:
        self.wait()
        return self._tensor


class CommunicationOptimizer:
    """Averages tensors over ranks with fewer bytes, or over two groups. All ranks make the same calls in order.

    ``compression_ratio`` is the share of elements that is sent, the largest in magnitude; 1 sends all of them.
    A tensor travels in pieces of ``bucket_size_mb``. With ``enable_overlap`` all pieces are under way at once, and the
    ``start_`` methods return before they have arrived; without it one piece follows another, and they return when all
    is done. ``comm`` is the group where none is given: by default all ranks that a launcher started.
    """

    def __init__(
        self,
        compression_ratio: float = 0.01,
        bucket_size_mb: float = 25.0,
        enable_overlap: bool = True,
        comm: Group | None = None,
    ) -> None:
        piece, rule = plain_number(bucket_size_mb), "it is the size in MiB of the pieces in which a tensor travels"
        is_piece = type(piece) in (int, float) and 0 < piece < math.inf
        problems = [
            *_check_ratio(compression_ratio, "try 0.01; 1 sends all"),
            *expect(is_piece, f"bucket_size_mb = {bucket_size_mb!r}", f"{rule}, above 0", "try 25"),
            *expect(isinstance(enable_overlap, bool), f"enable_overlap = {enable_overlap!r}", "it is True or False"),
        ]
        refuse("CommunicationOptimizer", problems)
        self.compression_ratio, self.bucket_size_mb = float(compression_ratio), float(bucket_size_mb)
        self.enable_overlap, self._comm = enable_overlap, comm
        self._made: dict[Any, tuple[Any, Any]] = {}  # of groups, beside them: their ids must not be given to others
        self._named: dict[str, OwedTensor] = {}
        # By parameter, and then as by name.
        self._owned: MutableMapping[torch.Tensor, dict[str, OwedTensor]] = WeakTensorKeyDictionary()
        self._owners = GradientOwners()
        self._has_warned = False

    def all_reduce_compressed(
        self, tensor: torch.Tensor, group: Group | None = None, *, name: str | None = None
    ) -> torch.Tensor:
        """Returns the average over the group, of each rank's largest elements.

        What a rank did not send is added to the next gradient of the same parameter, or to the next tensor of the same
        ``name``. Of a tensor without a name that is no parameter's ``.grad`` it is dropped, with one warning.
        """
        return self.start_compressed(tensor, group, name=name).result()

    def start_compressed(
        self, tensor: torch.Tensor, group: Group | None = None, *, name: str | None = None
    ) -> Reduction:
        """Sends a tensor on its way, as ``all_reduce_compressed`` does; other work may run until it is waited for."""
        average, pieces = self._cut(tensor)
        comm = self._find(self._comm if group is None else group, tensor.device)
        if comm.size == 1 or not pieces:
            return Reduction(average)
        if self.compression_ratio == 1.0:
            return self._begin(average, _plainly(comm, pieces))
        slot = self._slot(name, tensor, comm, [piece.numel() for piece in pieces])
        return self._begin(average, slot.pieces(average.view(-1), comm), slot)

    def hierarchical_all_reduce(
        self, tensor: torch.Tensor, intra_node_group: Group | None = None, inter_node_group: Group | None = None
    ) -> torch.Tensor:
        """Returns the average over all ranks of all hosts: inside each host, across hosts, and inside again.

        ``intra_node_group`` has the ranks of this rank's host. ``inter_node_group`` has one rank of every host, this
        one among them; None, or what torch gives to ranks outside a group, for a rank that another one of its host
        stands for. Without either the hosts are asked for.
        """
        return self.start_hierarchical(tensor, intra_node_group, inter_node_group).result()

    def start_hierarchical(
        self, tensor: torch.Tensor, intra_node_group: Group | None = None, inter_node_group: Group | None = None
    ) -> Reduction:
        """Sends a tensor on its way, as ``hierarchical_all_reduce`` does."""
        average, pieces = self._cut(tensor)
        if not pieces:
            return Reduction(average)
        if intra_node_group is None and inter_node_group is None:
            comm = self._by_hosts(self._find(self._comm, tensor.device))
            return self._begin(average, _plainly(comm, pieces))
        go = self._pair(intra_node_group, inter_node_group, tensor.device)
        return self._begin(average, [go(piece) for piece in pieces])

    def _begin(self, average: torch.Tensor, pieces: Sequence[Way], slot: OwedTensor | None = None) -> Reduction:
        """Starts the pieces: side by side, the first stage of each now; or one after another, to the end."""
        if self.enable_overlap:
            reduction = Reduction(average, pieces, slot)
            reduction.advance()
        else:
            reduction = Reduction(average, [chain.from_iterable(pieces)], slot)
            reduction.wait()
        return reduction

    def _find(self, group: Group | None, device: torch.device) -> Communicator:
        """Returns a group as a communicator. Raises UsageError on a rank that is not in it."""
        return self._once((id(group), device), group, lambda: communicator_of(group, device))

    def _pair(self, inside: Group | None, across: Group | None, device: torch.device) -> Callable[[torch.Tensor], Way]:
        """Returns how two groups average, which their ranks connect on the first call."""
        outer = None if across is None or is_outside(across) else self._find(across, device)
        key = ("pair", None if inside is None else id(inside), id(outer), device)
        rank = 0 if outer is None else outer.ranks[outer.rank]
        inner = SoloCommunicator(device, world_rank=rank) if inside is None else self._find(inside, device)
        return self._once(key, (inside, outer), lambda: connect_groups(inner, outer))

    def _by_hosts(self, comm: Communicator) -> Communicator:
        """Returns a communicator that reduces inside hosts and then across them, where there are several."""

        def make() -> Communicator:
            topology = detect_topology(comm)
            return comm if len(topology.hosts) == 1 else AlgorithmCommunicator(comm, "hierarchical", topology)

        return self._once(("by hosts", id(comm)), comm, make)

    def _once(self, key: Any, owners: Any, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = (owners, make())
        return cast(T, self._made[key][1])

    def _cut(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns a copy of a tensor, and its pieces. Raises UsageError for what cannot be averaged."""
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a {type(tensor).__name__} cannot be reduced\n  give a tensor, a gradient for instance")
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            raise UsageError(
                f"a tensor of {tensor.dtype}, {tensor.layout}, cannot be averaged here\n"
                "  averages are of dense floating-point tensors\n  convert it first: tensor.float(), tensor.to_dense()"
            )
        average = tensor.detach().clone(memory_format=torch.contiguous_format)
        length = max(1, int(self.bucket_size_mb * 2**20) // tensor.element_size())
        return average, list(torch.split(average.view(-1), length)) if tensor.numel() else []

    def _slot(self, name: str | None, tensor: torch.Tensor, comm: Communicator, lengths: list[int]) -> OwedTensor:
        """Returns what is kept for a tensor, by its name or parameter and its group; a new one where it has neither."""
        known_as = repr(name) if name is not None else f"of shape {list(tensor.shape)} and {tensor.dtype}"
        owner = self._owners.find(tensor) if name is None else None
        if name is None and owner is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a tensor {known_as} without a name is the .grad of no parameter: what it does not send is dropped\n"
                "  what is owed is kept for gradients and names\n"
                "  give each a name of its own: all_reduce_compressed(gradient, name='layer.weight')",
                stacklevel=4,
            )
        kept = self._named if name is not None else {} if owner is None else self._owned.setdefault(owner, {})
        key = f"{known_as} on ranks {list(comm.ranks)}"
        if key not in kept:
            kept[key] = OwedTensor(key, lengths, tensor.dtype, self.compression_ratio)
        kept[key].begin(tensor)
        return kept[key]


def _plainly(comm: Communicator, pieces: Iterable[torch.Tensor]) -> list[Way]:
    return [once(partial(comm.all_reduce, piece, "avg")) for piece in pieces]


def _check_ratio(ratio: Any, fix: str) -> list[Problem]:
    number, rule = plain_number(ratio), "it is the share of elements that is kept, above 0 and at most 1"
    return expect(type(number) in (int, float) and 0 < number <= 1, f"compression_ratio = {ratio!r}", rule, fix)


# Single functions of scripts around torch's own data parallelism.

cleanup_distributed = disconnect


def compress_gradients(gradients: Any, compression_ratio: float = 0.1) -> Any:
    """Keeps the largest elements of each gradient, by magnitude: sparse tensors of indices and values.

    ``gradients`` is a tensor, or several in a list, tuple, dict or generator; None stays None, and ``.to_dense()``
    fills up with zeros. What is left out is dropped; ``CommunicationOptimizer`` keeps it for the next step.
    """
    refuse("compress_gradients", _check_ratio(compression_ratio, "try 0.1"))
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    (checks.enable if checks.is_enabled() else checks.disable)()  # as it is; torch 2.11 warns until somebody says so

    def compress(gradient: torch.Tensor) -> torch.Tensor:
        flat = gradient.detach().reshape(-1)
        kept = flat.abs().topk(num_kept(compression_ratio, flat.numel())).indices.sort().values
        places = torch.stack(torch.unravel_index(kept, gradient.shape)) if gradient.ndim else kept.new_zeros(0, 1)
        return torch.sparse_coo_tensor(places, flat[kept], gradient.shape, is_coalesced=True, check_invariants=True)

    return tree_map_only(torch.Tensor, compress, list(gradients) if isinstance(gradients, Iterator) else gradients)


def auto_scale_batch_size(world_size: int, base_batch_size: int) -> int:
    """Returns the global batch of ``world_size`` ranks that have ``base_batch_size`` samples each."""
    wrong = [*check_count("world_size", world_size), *check_count("base_batch_size", base_batch_size)]
    refuse("auto_scale_batch_size", wrong)
    return world_size * base_batch_size
