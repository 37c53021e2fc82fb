"""Averages of single tensors, compressed or over two groups: for training loops that reduce by hand.

    optimizer = CommunicationOptimizer(compression_ratio=0.01, bucket_size_mb=25, enable_overlap=True)
    average = optimizer.all_reduce_compressed(parameter.grad)
    average = optimizer.hierarchical_all_reduce(gradient, intra_node_group=inside, inter_node_group=across)

A thin face over ``comm/compress`` (top-k with error feedback: ratio r sends 6 r bytes an element in place of 4) and
over averages on groups that are there already. Results are new tensors, the same bits on every rank. For B bytes and H
hosts of L ranks, what a rank sends inside a host, and what a host sends across:

    every rank has a group across    2 B (L-1)/L inside,  2 B (H-1)/H across, on the links of all its ranks
    one rank of a host has           3 B at most inside,  2 B (H-1)/H across, on the link of that rank
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.classic.config import check_count, expect, plain_number, refuse
from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.algorithms.rounds import detect_topology
from paceline.comm.base import BucketShape, Communicator, Work
from paceline.comm.compress import Compressor
from paceline.comm.compress.policies import num_kept
from paceline.comm.objects import gather_objects
from paceline.comm.solo import SoloCommunicator
from paceline.comm.torch_dist import Group, communicator_of, disconnect, is_outside
from paceline.errors import Problem, UsageError
from paceline.plan.layout import Compression
from paceline.shards import flat_layout, round_up

T = TypeVar("T")
Way = Iterator[None]
"""How a piece of a tensor becomes the average, stage by stage: pieces go side by side."""


def connect_groups(inside: Communicator, across: Communicator | None) -> Callable[[torch.Tensor], Way]:
    """Learns how the groups lie, and returns how they average a piece. All ranks of all hosts call it.

    Raises UsageError where a part of a host's ranks has a group across, or hosts of different sizes give all one.
    """
    has_group = gather_objects(inside, across is not None)
    if sum(has_group) != 1 and not all(has_group):
        raise UsageError(
            f"{sum(has_group)} of the {inside.size} ranks of a host have a group across hosts\n"
            "  one of them stands for its host, or every one does with a slice\n  give a group to one rank, or to each"
        )
    # Of a host: its ranks, and whether each of them has a group across. A host of one rank fits either way.
    mine = inside.size, inside.size > 1 and all(has_group)
    told = gather_objects(inside, None if across is None else gather_objects(across, mine))
    seen = [hosts for hosts in told if hosts is not None]
    is_even = all(hosts == seen[0] for hosts in seen) and len(set(seen[0])) == 1
    if any(is_sliced for hosts in seen for _, is_sliced in hosts) and not is_even:
        sizes = sorted({size for hosts in seen for size, _ in hosts})
        raise UsageError(
            f"hosts of {sizes} ranks, with a group across for every rank\n  slices need hosts of equal size"
            "\n  give one rank of each host a group across, and None to the others"
        )
    if mine[1] and across is not None:
        return partial(_by_slices, inside, across)
    weight = inside.size * len(seen[0]) / sum(size for size, _ in seen[0])  # hosts count by their ranks
    return partial(_by_leader, inside, across, has_group.index(True), weight)


def once(start: Callable[[], Work]) -> Way:
    """Goes the way of a piece that one operation brings there, in stages: it starts, and it is there."""
    work = start()
    yield
    work.wait()


def _by_leader(
    inside: Communicator, across: Communicator | None, leader: int, weight: float, piece: torch.Tensor
) -> Way:
    """Averages a piece inside the host, lets one rank average that across, and hands it round."""
    if weight != 1.0:
        piece.mul_(weight)
    yield from once(partial(inside.all_reduce, piece, "avg"))
    if across is not None:
        yield from once(partial(across.all_reduce, piece, "avg"))
    yield from once(partial(inside.broadcast, piece, leader))


def _by_slices(inside: Communicator, across: Communicator, piece: torch.Tensor) -> Way:
    """Averages a piece inside the host, a slice on each rank, and that across; then gathers the slices."""
    length = round_up(piece.numel(), inside.size)
    whole, own = piece, piece.new_empty(length // inside.size)
    if length != piece.numel():
        whole = piece.new_zeros(length)
        whole[: piece.numel()] = piece
    yield from once(partial(inside.reduce_scatter, own, whole, "avg"))
    yield from once(partial(across.all_reduce, own, "avg"))
    yield from once(partial(inside.all_gather, whole, own))
    if whole is not piece:
        piece.copy_(whole[: piece.numel()])


class Reduction:
    """An average on its way, which owns its tensor until it is there; without ``stages`` it is there already."""

    def __init__(self, tensor: torch.Tensor, stages: Iterable[None] = ()) -> None:
        self._tensor, self._stages = tensor, stages

    def wait(self) -> None:
        """Returns when the average may be used. Safe to call twice."""
        for _ in self._stages:
            pass

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
        self._named: dict[str, _OwedTensor] = {}
        # By parameter, and then as by name.
        self._owned: MutableMapping[torch.Tensor, dict[str, _OwedTensor]] = WeakTensorKeyDictionary()
        self._owners = _Owners()
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
        _check_tensor(tensor)
        comm = self._find(self._comm if group is None else group, tensor.device)
        average = tensor.detach().clone(memory_format=torch.contiguous_format)
        if comm.size == 1 or not tensor.numel():
            return Reduction(average)
        flat = average.view(-1)
        if self.compression_ratio == 1.0:
            return self._begin(average, [once(partial(comm.all_reduce, piece, "avg")) for piece in self._cut(flat)])
        slot = self._slot(name, tensor, comm)
        return self._begin(average, slot.pieces(flat, comm), slot)

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
        _check_tensor(tensor)
        average = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not tensor.numel():
            return Reduction(average)
        pieces = self._cut(average.view(-1))
        if intra_node_group is None and inter_node_group is None:
            comm = self._by_hosts(self._find(self._comm, tensor.device))
            return self._begin(average, [once(partial(comm.all_reduce, piece, "avg")) for piece in pieces])
        go = self._pair(intra_node_group, inter_node_group, tensor.device)
        return self._begin(average, [go(piece) for piece in pieces])

    def _begin(self, average: torch.Tensor, pieces: Sequence[Way], slot: _OwedTensor | None = None) -> Reduction:
        """Runs the stages of the pieces: side by side, the first of them now; or piece after piece."""

        def run() -> Way:
            try:
                for going in [list(pieces)] if self.enable_overlap else [[piece] for piece in pieces]:
                    while going:
                        going = [piece for piece in going if next(piece, piece) is None]
                        yield
            except BaseException as error:
                if slot is not None and not isinstance(error, GeneratorExit):  # nobody waits: it stays on its way
                    slot.end(is_there=False)
                raise
            if slot is not None:
                slot.end(is_there=True)

        stages = run()
        reduction = Reduction(average, stages)
        if self.enable_overlap:
            next(stages, None)
        else:
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

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(flat, max(1, int(self.bucket_size_mb * 2**20) // flat.element_size())))

    def _slot(self, name: str | None, tensor: torch.Tensor, comm: Communicator) -> _OwedTensor:
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
            lengths = [piece.numel() for piece in self._cut(tensor.detach().reshape(-1))]
            kept[key] = _OwedTensor(key, lengths, tensor.dtype, self.compression_ratio)
        kept[key].begin(tensor)
        return kept[key]


class _OwedTensor:
    """What one tensor owes, from call to call."""

    def __init__(self, name: str, lengths: list[int], dtype: torch.dtype, ratio: float) -> None:
        self._name, self._lengths, self._dtype = name, lengths, dtype
        # As a matrix of one row: tensors of one dim are biases and norms to an engine, and travel whole there.
        self._compressor = Compressor(Compression(policy="topk", ratio=ratio, min_size=0))
        shapes = [
            BucketShape(names=(f"{name} piece {number}",), layout=flat_layout([(1, length)]))
            for number, length in enumerate(lengths)
        ]
        self._reductions = self._compressor.bind(shapes)
        self._is_busy = False

    def begin(self, tensor: torch.Tensor) -> None:
        """Raises UsageError for a tensor that is not the one of this slot."""
        if self._is_busy:
            raise UsageError(f"tensor {self._name} is still on its way\n  wait for it, or give each a name")
        if tensor.numel() != sum(self._lengths) or tensor.dtype != self._dtype:
            raise UsageError(
                f"tensor {self._name} had {sum(self._lengths)} elements of {self._dtype}, and now has "
                f"{tensor.numel()} of {tensor.dtype}\n  give each tensor a name of its own"
            )
        self._is_busy = True

    def pieces(self, flat: torch.Tensor, comm: Communicator) -> list[Iterator[None]]:
        """Returns the way of each piece of a tensor, with what it owes."""
        parts = torch.split(flat, self._lengths)
        return [once(partial(each.start, part, comm)) for each, part in zip(self._reductions, parts, strict=True)]

    def end(self, *, is_there: bool) -> None:
        """Keeps what was not sent, if the rest arrived; after a failed call, the tensor owes what it owed before."""
        if is_there:
            self._compressor.end_pass()
        else:
            self._compressor.abandon_pass()
        self._is_busy = False


class _Owners:
    """Finds the parameter whose gradient a tensor without a name is: a tensor does not know it.

    Shape and order of calls do not tell tensors apart: equal layers have one shape, and a step may leave one out.
    The memory of a gradient does, while its parameter holds it. Finding new parameters looks at all of Python's
    objects, some 50 ms; so after one that found nothing, the next waits until there are twice as many misses.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._by_memory: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}
        self._misses = 0

    def find(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns the parameter, or None where no parameter that was found holds this gradient."""
        owner = self._held(gradient)
        if owner is None:
            self._note_gradients()
            owner = self._held(gradient)
        if owner is None:
            self._misses += 1
            if self._misses & (self._misses - 1) == 0:  # 1, 2, 4, 8, ...
                # Not isinstance, which asks for __class__: lazy objects of other libraries warn when they are asked.
                tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
                leaves = (each for each in tensors if each.is_leaf and each.requires_grad and not each.is_meta)
                self._known = [weakref.ref(each) for each in leaves]
                self._note_gradients()
                owner = self._held(gradient)
                self._misses = self._misses if owner is None else 0
        return owner

    def _held(self, gradient: torch.Tensor) -> torch.Tensor | None:
        found = self._by_memory.get(_memory_of(gradient))
        owner = None if found is None else found()
        is_held = owner is not None and owner.grad is not None and _memory_of(owner.grad) == _memory_of(gradient)
        return owner if is_held else None

    def _note_gradients(self) -> None:
        alive = [(each, parameter) for each in self._known if (parameter := each()) is not None]
        held = [(each, parameter.grad) for each, parameter in alive if parameter.grad is not None]
        self._known = [each for each, _ in alive]
        self._by_memory = {_memory_of(grad): each for each, grad in held if type(grad) is torch.Tensor}


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _check_tensor(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"a {type(tensor).__name__} cannot be reduced\n  give a tensor, a gradient for instance")
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        raise UsageError(
            f"a tensor of {tensor.dtype}, {tensor.layout}, cannot be averaged here\n"
            "  averages are of dense floating-point tensors\n  convert it first: tensor.float(), tensor.to_dense()"
        )


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

    def compress(gradient: Any) -> Any:
        if not isinstance(gradient, torch.Tensor):
            return gradient
        flat = gradient.detach().reshape(-1)
        kept = flat.abs().topk(num_kept(compression_ratio, flat.numel())).indices.sort().values
        places = torch.stack(torch.unravel_index(kept, gradient.shape)) if gradient.ndim else kept.new_zeros(0, 1)
        return torch.sparse_coo_tensor(places, flat[kept], gradient.shape, is_coalesced=True, check_invariants=True)

    return tree_map(compress, list(gradients) if isinstance(gradients, Iterator) else gradients)


def auto_scale_batch_size(world_size: int, base_batch_size: int) -> int:
    """Returns the global batch of ``world_size`` ranks that have ``base_batch_size`` samples each."""
    wrong = [*check_count("world_size", world_size), *check_count("base_batch_size", base_batch_size)]
    refuse("auto_scale_batch_size", wrong)
    return world_size * base_batch_size
