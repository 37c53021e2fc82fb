"""What the kernels of a program take on a cluster's device: from measured rates where there are any, else fitted ones.

    measured (memory_rates of the catalog's entry)    cluster/kernels.py: by family, shape and bytes
    fitted (predict/formulas/constants.py)            cluster/kernels.py: products, attention, bytes over bandwidth

A program of compiled blocks is fused first: neighbours within a block that only go through memory become one kernel,
which reads what was there before and writes what is read afterwards. What only such kernels of the backward would read
is not kept: they read what it was made of, and make it again. A result that is less than a quarter of what it was made
of is kept. Products and attention stay as they are. A kernel ends where it has reduced a whole tensor to one number:
what uses that number goes through the tensor once more. So does a batch norm, forward and backward.

Products of 8 bits ([Note: layouts] in engines/float8.py) have two more rules, in ``_recast``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.cluster import kernels
from paceline.cluster.devices import Cluster, Device
from paceline.cluster.kernels import Operation
from paceline.predict.formulas.constants import Constants
from paceline.predict.replay.program import LOSS, Event, Hold, Issue, Player, Program, Run, Wait

# In a graph the host launches nothing, and each kernel still has a start and an end in which the device is not full.
# Fitted to "paceline train" in bench/results/gpu-h200-10m.json: 5.15 ms a step of 312 kernels.
_GRAPHED_S = 5.7e-6
# Of the host's time for an operation: those of backward come from torch's own engine, and no Python is in between.
# Fitted to 22,500 operations of a Mamba in bench/results/foresight-models-h200.json.
_IN_BACKWARD = 0.5
_STATISTICS = "statistics"
# Torch's partitioner keeps an operator's result that is smaller than its inputs by this factor
# (torch/_functorch/partitioners.py: ban_if_reduction): a mean, a maximum, the statistics of a norm.
_SMALLER = 4
# What a kernel that writes casts of 8 bits and their transposed copies reaches of the rate of strided copies. Fitted to
# "paceline train fp8" of GPT-1.1B on an H200 when layers shared no casts (168.0 ms a step); today it takes 163.6 ms,
# and 162.1 are predicted (bench/results/gpu-h200-1b.json).
_TRANSPOSED = 0.55
_RECAST = "recast"
_SCALAR_BYTES = 8  # what a reduction of a whole tensor writes at most: one number


class KernelCosts:
    def __init__(self, device: Device, constants: Constants, *, is_compiled: bool, is_graphed: bool = False) -> None:
        self._device, self._constants = device, constants
        self._is_compiled, self._is_graphed = is_compiled, is_graphed
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def __call__(self, run: Run) -> tuple[float, float]:
        """Returns seconds of the device, and of the host that launches the kernel."""
        kernel = run.operation
        if kernel.name == _STATISTICS and self._device.is_cpu:  # compiled batch norms were not measured there
            return 0.0, 0.0
        in_block = bool(run.block) and self._is_compiled
        shape = (kernel.sizes, kernel.batch, kernel.layout, kernel.is_causal, kernel.num_bytes, kernel.tensors)
        key = (kernel.name, kernel.dtype, in_block, kernel.phase == "backward", *shape)
        found = self._known.get(key)
        if found is None:
            # No figure of an entry makes a kernel faster than the peak, so that no MFU is above 100 %.
            fastest = kernel.flops / self._device.peak(kernel.dtype) if kernel.flops else 0.0
            work = max(self._work(kernel) * self._device.factor, fastest)
            launch = 0.0 if self._is_graphed else kernels.host_seconds(self._device, kernel, is_compiled=in_block)
            if kernel.phase == "backward" and self._device.operation_s and not (self._device.is_cpu or in_block):
                launch *= _IN_BACKWARD
            found = self._known[key] = (work + _GRAPHED_S if self._is_graphed else work, launch)
        return found

    def _work(self, kernel: kernels.Operation) -> float:
        if self._device.memory_rates:  # measured
            if self._is_compiled and kernel.is_convolution:  # a compiler has channels innermost
                kernel = replace(kernel, layout="")
            return kernels.work_seconds(self._device, kernel) / (_TRANSPOSED if kernel.name == _RECAST else 1.0)
        rates, device = self._constants, self._device
        if kernel.family == "matmul":
            if kernel.is_convolution:
                return kernel.flops / (kernels.ceiling(device, kernel.dtype) * rates.convolution)
            rows, inner, columns = kernel.sizes
            return kernels.matmul_seconds(device, rates, rows, columns, inner, kernel.dtype, kernel.batch)
        if kernel.family in ("attention", "attention_backward"):
            least = kernels.memory_seconds(device, rates, kernel.num_bytes)
            is_back = kernel.family == "attention_backward"
            known = (device, rates, kernel.flops, kernel.sizes[2], kernel.dtype)
            return max(kernels.long_attention_seconds(*known, is_back=is_back), least)
        again = sum(size for _, size in kernel.reads) if kernel.is_batch_norm and not device.is_cpu else 0
        return kernels.memory_seconds(device, rates, kernel.num_bytes + again)


def kernel_seconds(program: Program, cluster: Cluster) -> dict[Operation, tuple[int, float]]:
    """Returns how often each kernel of a rank's step runs, and its seconds of the device in all, by what it is.

    Kernels that differ in their tensors and phase alone are one; of those that a compiler puts together, the result.
    """
    costs = KernelCosts(cluster.device, Constants(), is_compiled=program.is_compiled)
    recorded = fuse_blocks(program.events) if program.is_compiled else program.events
    found: dict[str, tuple[Operation, int, float]] = {}
    for event in Player(recorded, program.order).run() if program.order else recorded:  # of all microbatches
        if isinstance(event, Run):
            label = event.operation.label
            _, count, seconds = found.get(label, (None, 0, 0.0))
            found[label] = (event.operation, count + 1, seconds + costs(event)[0])
    return {operation: (count, seconds) for operation, count, seconds in found.values()}


def fuse_blocks(events: Sequence[Event]) -> list[Event]:
    """Puts the kernels of compiled blocks together as a compiler does; everything else stays where it is."""
    events = _delayed(_recast(_without_copies(events)))
    groups = _groups(events)
    readers: dict[int, set[int]] = {}
    for place, event in enumerate(events):
        if isinstance(event, Run):
            for tensor, _ in event.operation.reads:
                readers.setdefault(tensor, set()).add(groups.get(place, -1 - place))
    members: dict[int, list[Run]] = {}
    for place, group in groups.items():
        event = events[place]
        assert isinstance(event, Run)
        members.setdefault(group, []).append(event)
    again = {group for group, runs in members.items() if runs[0].operation.phase == "backward"}
    made_of: dict[int, dict[int, int]] = {}
    found: list[Event] = []
    for place, event in enumerate(events):
        if place not in groups:
            found.append(event)
        elif groups[place] == place:  # a group is known by its first kernel
            found.extend(_fused(members[place], place, readers, again, made_of))
    return found


def without_what_is_made_again(events: Sequence[Event]) -> tuple[Event, ...]:
    """Leaves out memory that eager blocks keep for their backward, and an eager loss works in, where they are compiled.

    What an eager loss keeps stays counted: on GPUs compiled blocks were measured to keep more than is found here, by
    about as much for a GPT-124M, and a run that was said to fit must fit.
    """
    fused = fuse_blocks(events)
    kept, of_loss = _kept(fused).keys(), _written(events)
    gone = {"activations": _kept(events).keys() - kept - of_loss, "temporary": of_loss - _written(fused)}

    def is_held(event: Event) -> bool:
        if not isinstance(event, Hold) or event.category not in gone:
            return True
        return gone[event.category].isdisjoint(event.tensors) or not kept.isdisjoint(event.tensors)

    return tuple(event for event in events if is_held(event))


def _written(events: Sequence[Event]) -> set[int]:
    runs = (event for event in events if isinstance(event, Run) and event.block == LOSS)
    return {tensor for run in runs for tensor, _ in run.operation.writes}


def _kept(events: Sequence[Event]) -> dict[int, int]:
    """Tensors, and their bytes, that the forward of blocks writes and something of the backward reads."""
    made, kept = dict[int, int](), dict[int, int]()
    for event in events:
        if isinstance(event, Run) and event.operation.phase != "forward":
            kept |= {tensor: made[tensor] for tensor, _ in event.operation.reads if tensor in made}
        elif isinstance(event, Run) and event.block:
            made |= dict(event.operation.writes)
    return kept


def _without_copies(events: Sequence[Event]) -> list[Event]:
    """Leaves out what a block computes a second time in its forward: the same operator of the same tensors.

    Autocast converts a tensor for each layer that reads it. A compiler does that once, and stores no tensor in a wider
    dtype: every kernel that reads it converts as it reads.
    """
    known: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}
    same: dict[int, tuple[int, int]] = {}
    found: list[Event] = []
    for event in events:
        if not isinstance(event, Run):
            found.append(event)
            continue
        kernel = event.operation
        if same:
            kernel = replace(kernel, reads=tuple(same.get(tensor, (tensor, size)) for tensor, size in kernel.reads))
        is_widened = len(kernel.reads) == len(kernel.writes) == 1 and kernel.writes[0][1] > kernel.reads[0][1]
        if kernel.family == "convert" and is_widened and event.block not in ("", LOSS):  # that stays as it was measured
            same[kernel.writes[0][0]] = kernel.reads[0]
            continue
        # An operator gives the same result each time if it draws no numbers, and changes nothing in place.
        is_in_place = not dict(kernel.reads).keys().isdisjoint(dict(kernel.writes))
        is_made = bool(kernel.reads) or all(size <= _SCALAR_BYTES for _, size in kernel.writes)  # at least a constant
        is_drawn = kernel.family not in kernels.FUSED or kernel.family in ("random", "strided")
        is_repeatable = (is_made and not is_in_place and not is_drawn) or _is_transposed_cast(event)
        if event.block and kernel.phase == "forward" and is_repeatable:
            sizes = tuple(size for _, size in kernel.writes)
            first = known.setdefault((event.block, kernel.name, kernel.reads, sizes), kernel.writes)
            if first is not kernel.writes:
                same |= {copy: one for (copy, _), one in zip(kernel.writes, first, strict=True)}
                continue
        found.append(Run(kernel, event.block))
    return found


def _recast(events: Sequence[Event]) -> list[Event]:
    """Moves transposed copies of 8 bits to the backward, as torch's partitioner does: it keeps their sources."""
    if not any(isinstance(event, Run) and _is_transposed_cast(event) for event in events):
        return list(events)
    made_of: dict[int, dict[int, int]] = {}  # of what the forward computes number by number: the tensors behind it
    moved: dict[int, Run] = {}
    found: list[Event] = []
    for event in events:
        if not isinstance(event, Run):
            found.append(event)
            continue
        kernel = event.operation
        sources = dict(source for each in kernel.reads for source in made_of.get(each[0], dict([each])).items())
        if _is_transposed_cast(event) and kernel.phase == "forward":
            again = replace(kernel, reads=tuple(sources.items()), phase="backward")
            moved[kernel.writes[0][0]] = Run(again, event.block)
            continue
        if kernel.phase != "forward":
            found.extend(moved.pop(tensor) for tensor, _ in kernel.reads if tensor in moved)
        is_by_number = kernel.family in ("pointwise", "curve", "convert") and kernel.phase == "forward"
        for each in kernel.writes:
            made_of[each[0]] = sources if is_by_number else dict([each])
        found.append(event)
    return found


def _is_transposed_cast(event: Run) -> bool:
    kernel = event.operation
    return bool(event.block) and kernel.family == "strided" and kernel.dtype == "fp8" and len(kernel.writes) == 1


def _delayed(events: Sequence[Event]) -> list[Event]:
    """Moves kernels that go through memory to the first one that reads their results, where both may be fused."""
    first: dict[int, int] = {}
    for place, event in enumerate(events):
        for tensor, _ in event.operation.reads if isinstance(event, Run) else ():
            first.setdefault(tensor, place)
    later: dict[int, list[Event]] = {}
    found: list[Event] = []
    for place, event in enumerate(events):
        written = {tensor for tensor, _ in event.operation.writes} if isinstance(event, Run) else set()
        target = min((first[tensor] for tensor in written if tensor in first), default=-1)
        reader = events[target] if target > place else None
        here = [*later.pop(place, ()), event]
        if isinstance(event, Run) and isinstance(reader, Run) and _can_fuse(event) and _can_fuse(reader):
            is_in_place = any(tensor in written for tensor, _ in event.operation.reads)
            is_same = reader.block == event.block and reader.operation.phase == event.operation.phase
            if is_same and not is_in_place:
                later.setdefault(target, []).extend(here)
                continue
        found.extend(here)
    return found


def _can_fuse(event: Run) -> bool:
    """Whether a compiler puts a kernel together with its neighbours; a softmax only in a loss, beside no product."""
    family = event.operation.family
    return bool(event.block) and (family in kernels.FUSED or (event.block == LOSS and family == "softmax"))


def _groups(events: Sequence[Event]) -> dict[int, int]:
    """Returns for the kernels that can be fused the place of the first one of their group."""
    found: dict[int, int] = {}
    first: int | None = None
    last: Run | None = None
    reduced: set[int] = set()  # numbers that the group takes of whole tensors, and what it makes of them
    for place, event in enumerate(events):
        if not isinstance(event, Run):
            if isinstance(event, Issue | Wait):
                first = None
            continue
        if not _can_fuse(event):
            first = None
            continue
        kernel = event.operation
        is_same = last is not None and last.block == event.block and last.operation.phase == kernel.phase
        is_scalar = all(size <= _SCALAR_BYTES for _, size in kernel.writes)
        uses = any(tensor in reduced for tensor, _ in kernel.reads)
        if first is None or not is_same or (uses and not is_scalar):
            first, reduced, uses = place, set(), False
        is_reduction = kernel.family == "reduction" and any(size > _SCALAR_BYTES for _, size in kernel.reads)
        if is_scalar and (uses or is_reduction):
            reduced |= {tensor for tensor, _ in kernel.writes}
        found[place] = first
        last = event
    return found


def _fused(
    members: list[Run], group: int, readers: dict[int, set[int]], again: set[int], made_of: dict[int, dict[int, int]]
) -> Iterator[Run]:
    """Makes one kernel of a group; ``made_of`` learns what the groups in ``again`` read in the place of its results.

    Beside a batch norm it makes two: the first reads the whole batch for statistics, which the second one needs.
    """
    reads: dict[int, int] = {}
    averaged: dict[int, int] = {}
    writes: dict[int, int] = {}
    written: set[int] = set()
    for run in members:
        for tensor, size in run.operation.reads:
            for source, own in made_of.get(tensor, {tensor: size}).items():
                if source not in written:
                    reads[source] = max(own, reads.get(source, 0))
        if run.operation.is_batch_norm:
            averaged |= reads
        for tensor, size in run.operation.writes:
            written.add(tensor)
            others = readers.get(tensor, set()) - {group}
            is_small = size <= _SCALAR_BYTES or _SMALLER * size < sum(own for _, own in run.operation.reads)
            if others and others <= again and group not in again and not is_small:
                made_of[tensor] = dict(reads)
            elif others or tensor not in readers:
                writes[tensor] = size
    first = members[0].operation
    merged = replace(
        first, name="fused", family="pointwise" if len(members) > 1 else first.family, tensors=1, layout=""
    )
    if any(_is_transposed_cast(run) for run in members):  # it writes across the rows that it reads
        merged = replace(merged, name=_RECAST, family="strided")
    if averaged:  # a mean and a variance at the rate of a norm; the two sums of its gradient are a reduction
        statistics = replace(merged, name=_STATISTICS, family="reduction" if group in again else "norm")
        yield Run(replace(statistics, reads=tuple(averaged.items()), writes=()), members[0].block)
    operation = replace(merged, reads=tuple(reads.items()), writes=tuple(writes.items()))
    yield Run(operation, members[0].block)
