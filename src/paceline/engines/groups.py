"""Who a rank talks to, one communicator for each question (see ``plan/layout.py``), and how ranks train one model.

A parameter knows its own groups. Most are *dense*: every rank that shares the batch has the same one, in slices or
whole. Of a parameter that ``mark_expert`` has marked, the ranks of ``expert`` hold different parts along one dim. Its
gradient is summed over the ranks that hold the same part, and divided by all that share the batch, as the gradient of
the mean loss is in one process.

Two mistakes train on without a word. All ranks read the same batches, and do the same work. Or replicas drift apart. In
a loop of the user's own, ranks compare at the end of backward passes, where they meet anyway: in step 2, 4, 8, ... 64,
then in every hundredth. Each sends three numbers: a fingerprint of its first inputs, one of its learning rates, and,
where it holds the whole model, a sum over the bits of its parameters. More is sent only where these differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.comm.base import Communicator, ReduceOp, Work, control_device
from paceline.comm.objects import gather_objects
from paceline.errors import UsageError
from paceline.plan.layout import GROUP_NAMES, Layout, RankGroups, groups_of


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Who shares a parameter: averages its gradient, holds other slices of it, holds the same slice."""

    gradients: Communicator
    shard: Communicator
    replicate: Communicator
    averaged_over: int  # by how many ranks the sum of gradients is divided

    @property
    def scale(self) -> float:
        """The factor of a gradient as it is brought into a buffer; ``reduction`` makes the mean with it."""
        if self.gradients.device_kind == "cpu":
            return 1.0 / self.averaged_over
        return self.gradients.size / self.averaged_over


NO_BLANK = (
    "the first batch has no samples on this rank, where ranks hold different experts\n"
    "  such a rank takes part in each pass with a batch of zero rows, which looks as others do\n"
    "  give every rank a sample of the first batch, or call engine.show_batch(lambda: batch) with any"
)


@dataclass(slots=True)
class Blanks:
    """Zero rows: what a rank without samples runs where ranks meet inside of passes, those with other experts."""

    batch: Any = None  # once one with samples was seen
    inputs: dict[nn.Module, Any] = field(default_factory=dict)  # what modules are called with

    def fill(self, batches: Sequence[Any]) -> list[Any]:
        """Returns batches with one of zero rows for each None.

        Raises UsageError where no batch has been seen that tells what one looks like.
        """
        for batch in batches:
            self.batch = self.batch if batch is None else without_samples(batch)
        if self.batch is None and None in batches:
            raise UsageError(NO_BLANK)
        return [self.batch if batch is None else batch for batch in batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups(RankGroups[Communicator]):
    """Who a rank talks to. Groups of the same ranks are one communicator."""

    sequences: Any = None  # the ``Sequences`` that cuts batches, where those of ``context`` share each sequence
    blanks: Blanks | None = None  # where ranks meet inside of passes
    regather: Communicator | None = None  # the part of ``shard`` that keeps a unit between forward and backward

    def filled(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Returns batches as they are; where ranks meet inside of passes, with one of zero rows for each None."""
        return batches if self.blanks is None else self.blanks.fill(batches)

    def of(self, parameter: nn.Parameter) -> ParameterGroups:
        if expert_dim(parameter) is None or self.expert.size == 1:
            gradients, shard, replicate = self.gradients, self.shard, self.replicate
        else:
            gradients, shard, replicate = self.expert_gradients, self.expert_shard, self.expert_replicate
        return ParameterGroups(gradients, shard, replicate, averaged_over=self.gradients.size)


def mark_expert(parameter: nn.Parameter, dim: int = 0) -> None:
    """Says that a rank has a part of a parameter along ``dim``, as one of the ranks that hold different experts."""
    parameter._paceline_expert_dim = dim  # type: ignore[attr-defined]


def expert_dim(parameter: nn.Parameter) -> int | None:
    """Returns along which dim a parameter is spread over experts' ranks; None: it is dense."""
    return getattr(parameter, "_paceline_expert_dim", None)


def make_groups(comm: Communicator, layout: Layout | None = None) -> Groups:
    """Splits the ranks of ``comm`` as the layout says; without one, each holds the whole model. All ranks call it."""
    layout = (layout or Layout()).for_ranks(comm.size)
    wanted = groups_of(layout, comm.rank)
    made = {wanted.world: comm}
    for name in ("pipeline", "gradients", "tensor", *GROUP_NAMES):  # those of a split model first
        ranks = getattr(wanted, name)
        if ranks not in made:
            made[ranks] = comm.split(ranks)
    found: dict[str, Any] = {name: made[getattr(wanted, name)] for name in GROUP_NAMES}
    regather, shard, reshard = None, found["shard"], layout.reshard_after_forward
    if not isinstance(reshard, bool):  # a number of ranks
        first = shard.rank - shard.rank % reshard
        regather = shard.split(range(first, first + reshard))
    return Groups(**found, regather=regather, blanks=Blanks() if layout.expert > 1 else None)


def without_samples(batch: Any) -> Any:
    """Returns a batch of zero rows that otherwise looks like this one."""

    def cut(tensor: Tensor) -> Tensor:
        made = tensor.new_empty((0, *tensor.shape[1:])) if tensor.ndim else tensor.clone()
        vars(made).update(vars(tensor))  # of which rows it is a part
        return made

    return tree_map_only(Tensor, cut, batch)


def reduction(comm: Communicator) -> ReduceOp:
    """Returns how gradients are reduced: NCCL averages as it adds; for Gloo the division is part of a copy before."""
    return "sum" if comm.device_kind == "cpu" else "avg"


_SMALL_BYTES = 2**20


def check_same_model(module: nn.Module, comm: Communicator) -> None:
    """Raises UsageError on every rank if the ranks built different models, naming the first difference."""
    if comm.size == 1:
        return
    rows = [f"{name} {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}" for name, p in module.named_parameters()]
    rows += [f"{name} {tuple(b.shape)} {b.dtype} buffer" for name, b in module.named_buffers()]
    if len(set(gather_objects(comm, hashlib.sha256("\n".join(rows).encode()).hexdigest()))) == 1:
        return
    everyone = gather_objects(comm, rows)
    for rank, theirs in enumerate(everyone):
        for ours, other in zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise UsageError(
                    f"rank 0 and rank {rank} built different models: rank 0 has {ours}, rank {rank} has {other}\n"
                    "  every rank trains a replica of one model\n"
                    "  build it from the same config on all ranks, without branches on the rank"
                )


def broadcast_tensors(comm: Communicator, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Replaces tensors by those of rank ``source``: large ones in place, small ones together by dtype."""
    works: list[Work] = []
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        value = tensor.detach()
        if value.numel() * value.element_size() >= _SMALL_BYTES and value.is_contiguous():
            works.append(comm.broadcast(value, source))
        elif value.numel():
            together.setdefault(value.dtype, []).append(value)
    flats = [(torch.cat([v.reshape(-1) for v in values]), values) for values in together.values()]
    works += [comm.broadcast(flat, source) for flat, _ in flats]
    wait_for_all(works)
    for flat, values in flats:
        for value, piece in zip(values, torch.split(flat, [v.numel() for v in values]), strict=True):
            value.copy_(piece.view(value.shape))


def wait_for_all(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Iterates over the tensors of a module's output: in tuples, lists, dicts and dataclasses."""
    if isinstance(output, Tensor):
        yield output
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))


def differentiable_in(output: Any) -> list[Tensor]:
    """Returns those of the tensors that require a gradient."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def forget_gradients(parameters: Iterable[Tensor], set_to_none: bool = True) -> None:
    """Does what ``zero_grad`` does, to any tensors. Gradients may be views of a bucket."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            if parameter.grad.grad_fn is not None:  # of create_graph; views cannot be detached in place
                parameter.grad = parameter.grad.detach()
            parameter.grad.requires_grad_(False).zero_()


def set_flags(flags: Tensor, used: Sequence[bool]) -> None:
    """Writes which parameters were used here, as ones and zeros, without waiting for the device."""
    if all(used):
        flags.fill_(1)
    else:  # staged by the driver at once, so the host need not wait
        flags.copy_(torch.tensor(used, dtype=flags.dtype), non_blocking=True)


T = TypeVar("T")
_FIRST = 2  # the pass after which inputs are compared
_MAX_INPUTS = 8  # forward passes before it, with microbatches
_SAMPLE = 4096  # elements of each tensor
_EVERY = 100
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaWatch:
    """Compares a rank's inputs, learning rates and parameters with those of the others that share the batch out."""

    optimizer: weakref.ref[Optimizer] | None = None  # whose rates are compared, once it has made a step

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._num_passes = self._alike = 0
        self._inputs: list[int] = []
        self._has_warned = False

    def see(self, inputs: Any) -> None:
        """Takes note of what the module is given in a forward pass of training."""
        if self._num_passes < _FIRST and len(self._inputs) < _MAX_INPUTS and self._may_read():
            self._inputs.append(fingerprint(inputs))

    @torch.no_grad()
    def end_pass(self, replicated: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Ends a backward pass that all ranks have made; ``replicated`` is what each of them holds alike."""
        self._num_passes += 1
        if not is_due(self._num_passes) or self._has_warned or not self._may_read():  # alike on all ranks
            return
        named = {name: each for name, each in replicated if each.requires_grad}
        sums = [sum_of_bits(each).to(control_device(self._comm)) for each in named.values()]
        rates = self._rates()
        inputs = zlib.crc32(repr(self._inputs).encode()) if any(self._inputs) else 0
        own = torch.tensor([inputs, zlib.crc32(repr(rates).encode()), 0], device=control_device(self._comm))
        for place, each in enumerate(sums, start=1):
            own[2] += each * (2 * place + 1)
        everyone = torch.empty(self._comm.size, 3, dtype=own.dtype, device=own.device)
        self._comm.all_gather(everyone, own).wait()
        seen, all_rates, values = (list(column) for column in zip(*everyone.tolist(), strict=True))  # sync point
        same = first_equal(seen) if self._num_passes == _FIRST and self._comm.ranks[self._comm.rank] == 0 else None
        if same is not None:
            first, second = same
            warnings.warn(
                f"ranks {first} and {second} of {self._comm.size} got the same inputs in their first {_FIRST} passes\n"
                "  ranks share the batch out: with the same samples they do the same work, and are no faster than one\n"
                "  give paceline.shard(dataloader, comm), paceline.loader(dataset, comm, batch_size=...), or a "
                "DistributedSampler (docs/convert.md)",
                stacklevel=2,
            )
        rank = first_other(values)
        if rank is not None:
            bits = gather_objects(self._comm, [int(each) for each in sums])
            different = [name for name, a, b in zip(named, bits[0], bits[rank], strict=True) if a != b]
            self._warn_of_drift(rank, different, gather_objects(self._comm, rates))
        elif (rank := first_other(all_rates)) is not None:
            self._warn_of_drift(rank, [], gather_objects(self._comm, rates))
        self._alike = self._num_passes

    def _may_read(self) -> bool:
        """Says whether no trainer of ours has taken the loop over, and no CUDA graph is recorded, which cannot wait."""
        ledger = self._comm.ledger
        is_recorded = self._comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return (ledger is None or ledger.is_own_loop) and not is_recorded

    def _rates(self) -> list[float]:
        optimizer = None if self.optimizer is None else self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [float(group["lr"]) for group in groups if "lr" in group]

    def _warn_of_drift(self, rank: int, names: Sequence[str], rates: Sequence[Sequence[float]]) -> None:
        self._has_warned = True
        if self._comm.rank != 0:
            return
        found = []
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            found.append(f"other values in {len(names)} parameters ({shown})")
        if rates[rank] != rates[0]:
            other, first = (", ".join(f"{rate:.6g}" for rate in each) for each in (rates[rank], rates[0]))
            found.append(f"the learning rates {other}, and rank 0 {first}")
        warnings.warn(
            f"in step {self._num_passes}, rank {rank} has {'; '.join(found)}; in step {max(self._alike, 1)} both were "
            "alike\n"
            "  ranks train one model: they update it with the same gradients and the same learning rate\n"
            "  decide by paceline.mean(loss, count, comm), which is the same on all ranks, not by a rank's own loss; "
            "and let the last backward pass before optimizer.step() be outside no_sync()",
            stacklevel=2,
        )


def is_due(number: int) -> bool:
    """Says whether ranks compare after so many passes: often at first, then at every hundredth."""
    is_power = number >= _FIRST and number & (number - 1) == 0
    return number % _EVERY == 0 or (is_power and number < _EVERY)


def first_equal(values: Sequence[int]) -> tuple[int, int] | None:
    """Returns the first two ranks with the same value; 0 is none."""
    seen: dict[int, int] = {}
    for rank, value in enumerate(values):
        if value and value in seen:
            return seen[value], rank
        seen[value] = rank
    return None


def first_other(values: Sequence[T]) -> int | None:
    """Returns the first rank whose value is not that of rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def fingerprint(inputs: Any) -> int:
    """Returns a number of what some of the elements are; 0 where all of each tensor are the same, as in a probe."""
    number, is_constant = 0, True
    for tensor in tensors_in(inputs):
        if tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].cpu()  # sync point
        is_constant &= bool((sample == sample[0]).all())
        number = zlib.crc32(repr(tuple(tensor.shape)).encode(), number)
        number = zlib.crc32(sample.contiguous().view(torch.uint8).numpy().tobytes(), number)
    return 0 if is_constant else number


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Adds up the elements' bits as whole numbers: the same for the same values, in any order of summing."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(_BITS[real.element_size()]).sum(dtype=torch.int64)
