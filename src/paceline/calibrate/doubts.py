"""``paceline calibrate --for CONFIG``: the fewest measurements that halve what is uncertain in one prediction.

A prediction's largest doubt (``doubts`` of a replayed step) decides what is measured, on the machine at hand:

    kernels          the very calls of the config's own step, the longest first, until half of the doubt is gone
    communication    all-reduces of the sizes that the step has most of, among CPU ranks
    the host         ten steps of the config: the entry is fitted to them, as ``calibrate --from`` does
                     communication between GPUs as well, which no table of sizes prices

A dry run keeps how each kernel was called: the operator, and shape, strides and dtype of each tensor. It is called so
again, with values, as often as it takes. What comes out belongs to this config: other shapes are priced as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from paceline.bounded_yaml import load_yaml
from paceline.calibrate.entry import changed_text, cluster_of, refit, rounded, text_of
from paceline.calibrate.machine import Wanted, measure_sizes
from paceline.calibrate.timing import Stopwatch
from paceline.cluster.detect import Machine, usable_cores
from paceline.cluster.kernels import Operation
from paceline.cluster.wires import wire_cost
from paceline.comm.base import Communicator
from paceline.config import Config
from paceline.errors import UsageError
from paceline.predict.replay.kernel_costs import kernel_seconds
from paceline.predict.replay.program import Issue, Player, Program
from paceline.predict.replay.replay import replay
from paceline.predict.replay.replayed import DoubtedPart, ReplayedStep
from paceline.rehearse.dryrun.operators import KnownCalls, OperatorCall
from paceline.rehearse.dryrun.record import record_stages
from paceline.run.function_ranks import run_processes
from paceline.units import MIB

Tell: TypeAlias = Callable[[str], None]
_MOST_KERNELS, _MOST_SIZES = 64, 6
_ENOUGH = 0.85  # of the time of kernels: what is then left of the doubt is less than half
_COLD_BYTES, _MOST_COPIES = 64 * MIB, 16
_TIMEOUT_S = 600.0
_STEPS = 12  # the first tenth of which is not counted
_ROOM = 0.4  # of a device's memory, that the tensors of a call may take


@dataclass(frozen=True, slots=True, eq=False)  # the same tensor twice is one
class TensorLike:
    """What a tensor of a call looks like; there is nothing in it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLike:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return self._span() * self.dtype.itemsize

    def _span(self) -> int:
        sides = zip(self.shape, self.stride, strict=True)
        return 0 if 0 in self.shape else 1 + sum((size - 1) * stride for size, stride in sides)

    def make(self, device: torch.device) -> torch.Tensor:
        """Returns numbers between 0 and 1; whole numbers are 0, which is a place in every table."""
        flat = torch.zeros(self._span(), dtype=self.dtype, device=device)
        if self.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            flat.uniform_()
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """How kernels were called: an operator by its name, or attention; ``labels``: the kernels, by share of the call."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: dict[str, float]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in set(_tensors((self.args, self.kwargs))))


class KeptCalls(KnownCalls):
    """Keeps of each kernel how it was called first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, KernelCall] = {}

    def kernels(self, func: Any, args: Any, kwargs: dict[str, Any], call: OperatorCall) -> tuple[Operation, ...]:
        found = super().kernels(func, args, kwargs, call)
        if not found or all(each.label in self.kept for each in found):
            return found
        if found[0].family == "attention":  # the recorder's own operator, which no device has
            self._keep("attention", args[:3], {"is_causal": bool(args[3])}, found)
        else:
            self._keep(str(func), args, kwargs, found)
        return found

    def attention(self, tensors: list[torch.Tensor], *, is_causal: bool, is_back: bool) -> Operation:
        found = super().attention(tensors, is_causal=is_causal, is_back=is_back)
        self._keep(found.family, tensors[:3], {"is_causal": is_causal}, (found,))
        return found

    def _keep(self, function: str, args: Any, kwargs: dict[str, Any], kernels: Sequence[Operation]) -> None:
        made: dict[int, TensorLike] = {}

        def described(tensor: torch.Tensor) -> TensorLike:
            return made.setdefault(id(tensor), TensorLike.of(tensor))

        total = sum(each.flops for each in kernels)
        shares = {each.label: each.flops / total if total else 1 / len(kernels) for each in kernels}
        own_args, own_kwargs = tree_map_only(torch.Tensor, described, (tuple(args), kwargs))
        call = KernelCall(function, own_args, own_kwargs, shares)
        self.kept |= {label: call for label in shares if label not in self.kept}


def _tensors(tree: Any) -> list[TensorLike]:
    return [each for each in tree_leaves(tree) if isinstance(each, TensorLike)]


def time_call(call: KernelCall, device: torch.device, watch: Stopwatch) -> float:
    """Returns the seconds of a call. On a CPU a product finds its second operand cold, as a step does."""
    with torch.no_grad():
        if call.function.startswith("attention"):
            return _time_attention(call, device, watch)
        operator: Any = reduce(getattr, call.function.split("."), torch.ops)
        last = _tensors(call.args)[-1] if call.function.startswith(("aten.mm", "aten.addmm", "aten.bmm")) else None
        copies = 1
        if last is not None and device.type == "cpu":
            copies = max(1, min(_MOST_COPIES, _COLD_BYTES // max(1, last.num_bytes)))
        made: dict[TensorLike, torch.Tensor] = {}
        sets = []
        for _ in range(copies):
            sets.append(tree_map(partial(_filled, made, device), (call.args, call.kwargs)))
            if last is not None:
                del made[last]
        turns = cycle(sets)

        def run() -> object:
            args, kwargs = next(turns)
            return operator(*args, **kwargs)

        return watch.time(run, "kernels")


def _filled(made: dict[TensorLike, torch.Tensor], device: torch.device, leaf: Any) -> Any:
    if isinstance(leaf, TensorLike):
        if leaf not in made:
            made[leaf] = leaf.make(device)
        return made[leaf]
    return device if isinstance(leaf, torch.device) else leaf


def _time_attention(call: KernelCall, device: torch.device, watch: Stopwatch) -> float:
    parts = [each.make(device) for each in call.args]
    attend = partial(F.scaled_dot_product_attention, *parts, **call.kwargs)
    if call.function == "attention":
        return watch.time(attend, "kernels")
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(*(each.requires_grad_() for each in parts), **call.kwargs)
    back = partial(torch.autograd.grad, out, parts, torch.ones_like(out), retain_graph=True)
    return watch.time(back, "kernels")


def _time_calls(comm: Communicator, calls: Sequence[KernelCall], is_cuda: bool) -> list[float]:
    """Times calls on one of the ranks that do so together; 0 for one that cannot be called again."""
    device = torch.device("cuda", comm.rank) if is_cuda else torch.device("cpu")
    watch = Stopwatch(samples=7, most_s=0.5, meet=comm.barrier)
    if is_cuda:
        torch.cuda.set_device(device)
        watch = replace(watch, finish=torch.cuda.synchronize, shortest_s=0.01)
    tiny = torch.ones(8, device=device)
    empty = 0.0 if is_cuda else watch.time(lambda: tiny + tiny)  # what a call costs the host, which is priced apart
    found = []
    for call in calls:
        try:
            seconds = time_call(call, device, watch)
        except (RuntimeError, TypeError, ValueError, IndexError):  # one that wants values of a kind
            found.append(0.0)
            comm.barrier()  # where the others time it; all ranks fail of the same call
            continue
        found.append(max(seconds - empty, 0.1 * seconds))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One thing that was measured: ``predicted_s`` and ``measured_s`` of one, and how many a step has."""

    name: str
    count: int
    predicted_s: float
    measured_s: float
    rate: float = 0.0  # FLOP per second, of products and attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Halved:
    """What came out: the part that was least certain, the step before and now, and the entry's text."""

    part: DoubtedPart
    before: ReplayedStep
    after: ReplayedStep
    text: str
    measured: tuple[Measured, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"part": self.part}
        for name, step in (("before", self.before), ("after", self.after)):
            found[name] = {"step_s": step.seconds, "doubt_s": step.doubts[self.part], "doubt": step.doubt}
        rows = [
            {name: getattr(each, name) for name in ("name", "count", "predicted_s", "measured_s")}
            for each in self.measured
        ]
        return found | {"measured": rows, "entry": self.text}


def halve_doubt(
    config: Config, machine: Machine, base: Path | None, tell: Tell, *, train: Callable[[Config, Path], Path]
) -> Halved:
    """Measures the fewest things that halve the largest doubt of a config's step here.

    ``config`` has its device and ranks. ``base``: an entry's file; None: that of the catalog. ``train`` runs a config
    below a folder, and returns the folder of the run. Raises UsageError for what has no prediction.
    """
    text, calls = text_of(base, config, machine), KeptCalls()
    programs = record_stages(config, ranks=config.parallel.decided_ranks, calls=calls)

    def predict(entry: str) -> ReplayedStep:
        return replay(programs, cluster_of(config, machine, entry), with_loop=True)

    before = predict(text)
    (part, seconds), *_ = before.doubts.items()
    tell(f"least certain: {part}, by {1e3 * seconds:.3g} of {1e3 * before.seconds:.4g} ms a step")
    measured: tuple[Measured, ...] = ()
    if part == "kernels":
        found = _measure_kernels(config, before, calls.kept, tell)
        text, measured = _with_kernels(text, before.cluster.device.name, found), tuple(found.values())
    elif part == "communication" and config.parallel.device == "cpu":
        sizes = _sizes(programs[0], config.parallel.decided_ranks)
        tell(f"measuring all-reduces of {', '.join(f'{size:,}' for size in sizes)} bytes")
        points = measure_sizes(Wanted(ranks=config.parallel.decided_ranks, sizes=sizes))
        text, measured = _with_sizes(text, before, points)
    else:
        tell(f"training {_STEPS} steps of it")
        with TemporaryDirectory() as folder:
            entry = Path(folder) / "entry.yaml"
            entry.write_text(text, encoding="utf-8")
            fitted = refit(train(config.with_values("train", steps=_STEPS, epochs=None), Path(folder)), machine, entry)
        text = fitted.text
        row = Measured(name="a step", count=1, predicted_s=fitted.before_s, measured_s=fitted.measured_s)
        measured = (row,)
    after = predict(text)
    if part == "kernels" and after.timed_share <= before.timed_share:
        raise UsageError(
            "the entry knows ranks of another number of cores than this config's, which single kernels do not tell of\n"
            "  kernels that were timed count for as many cores as they were timed on\n"
            "  measure such ranks first: paceline calibrate --ranks N --output mine.yaml, then --cluster mine.yaml"
        )
    return Halved(part=part, before=before, after=after, text=text, measured=measured)


@dataclass(slots=True)
class _Kernels:
    """The kernels of a config's step, of which the longest are timed; ``call`` times some of them on all ranks."""

    before: ReplayedStep
    kept: Mapping[str, KernelCall]
    time: Callable[[Sequence[KernelCall]], list[float]]
    tell: Tell
    measured: dict[str, Measured] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    def measure(self) -> None:
        """Times kernels until so few are left that half of the doubt is gone, or none is left that can be timed."""
        device = self.before.cluster.device
        rows = kernel_seconds(self.before.program, self.before.cluster)
        most = device.memory_bytes * _ROOM
        every = sum(seconds for _, seconds in rows.values())
        wanted = _ENOUGH * every * (1 - self.before.timed_share)
        possible = {
            operation: row
            for operation, row in sorted(rows.items(), key=lambda row: -row[1][1])
            if (call := self.kept.get(operation.label)) and call.num_bytes <= most
            if operation.label not in device.kernels
        }
        while len(self.measured) < _MOST_KERNELS:
            left = wanted - sum(each.count * each.predicted_s for each in self.measured.values())
            chosen: dict[Operation, tuple[int, float]] = {}
            for operation, row in possible.items():
                if left > 0 and operation.label not in {*self.measured, *self._failed}:
                    chosen[operation] = row
                    left -= row[1]
            if not chosen:
                return
            self.tell(f"timing {len(chosen)} of {len(rows)} kernels, those that take longest")
            self._time(chosen)

    def _time(self, chosen: Mapping[Operation, tuple[int, float]]) -> None:
        calls = list({id(call): call for call in (self.kept[each.label] for each in chosen)}.values())
        found = {id(call): seconds for call, seconds in zip(calls, self.time(calls), strict=True)}
        for operation, (count, seconds) in chosen.items():
            call = self.kept[operation.label]
            took = found[id(call)] * call.labels[operation.label]
            rate = operation.flops / took if took else 0.0
            row = Measured(name=operation.label, count=count, predicted_s=seconds / count, measured_s=took, rate=rate)
            if took:
                self.measured[operation.label] = row
            else:
                self._failed.add(operation.label)


def _measure_kernels(
    config: Config, before: ReplayedStep, kept: Mapping[str, KernelCall], tell: Tell
) -> dict[str, Measured]:
    ranks, is_cuda = config.parallel.decided_ranks, config.parallel.device == "cuda"
    threads = max(1, len(usable_cores()) // ranks) if not is_cuda else 1

    def time_on_ranks(calls: Sequence[KernelCall]) -> list[float]:
        found = run_processes(_time_calls, ranks, args=(calls, is_cuda), threads=threads, timeout_s=_TIMEOUT_S)
        return [median(by_rank) for by_rank in zip(*found, strict=True)]

    kernels = _Kernels(before, kept, time_on_ranks, tell)
    kernels.measure()
    if not kernels.measured:
        raise UsageError(
            "no kernel of this config can be timed by itself\n  a compiler has put those together that are left, or "
            "they are timed\n  fit the entry to a run: paceline train CONFIG train.steps=40, then paceline calibrate "
            "--from RUN"
        )
    return kernels.measured


def _with_kernels(text: str, device: str, found: Mapping[str, Measured]) -> str:
    content: dict[str, Any] = load_yaml(text)
    entry = content["devices"][device]
    times = entry.setdefault("kernels_us", {})
    times |= {label: rounded(each.measured_s * 1e6) for label, each in found.items()}
    for label, each in found.items():  # a peak that a kernel has passed is none
        dtype = label.split()[1]
        entry["peak_tflops"][dtype] = max(entry["peak_tflops"].get(dtype, 0.0), rounded(each.rate * 1.001 / 1e12))
    told = f"{len(found)} single kernels were timed for a config (calibrate --for)."
    return changed_text(text, content, told, width=math.inf)  # a label of a kernel stays on its line


def _sizes(program: Program, ranks: int) -> tuple[int, ...]:
    """Returns the sizes of collectives that have most of the bytes."""
    moved: dict[int, int] = {}
    for event in Player(program.events, program.order).run() if program.order else program.events:
        if isinstance(event, Issue) and event.kind not in ("send", "recv") and len(event.ranks) == ranks:
            moved[event.num_bytes] = moved.get(event.num_bytes, 0) + max(1, event.num_bytes)
    ordered = sorted(moved, key=lambda size: -moved[size])
    return tuple(sorted(max(4, size // 4 * 4) for size in ordered[:_MOST_SIZES]))


def _with_sizes(
    text: str, before: ReplayedStep, points: Mapping[str, Sequence[tuple[int, float]]]
) -> tuple[str, tuple[Measured, ...]]:
    content: dict[str, Any] = load_yaml(text)
    inside, ranks = before.cluster.node.inside, before.program.ranks
    link = content["links"][inside.name]
    times = link.setdefault("all_reduce_us", {}).setdefault(ranks, {})
    rows, price = [], wire_cost(before.cluster, ranks)
    for size, seconds in points[inside.kind]:
        expected = price("all_reduce", size, tuple(range(ranks)))
        rows.append(Measured(name=f"all-reduce of {size:,} bytes", count=1, predicted_s=expected, measured_s=seconds))
        times[size] = rounded(seconds * 1e6)
    told = f"All-reduces of {len(rows)} sizes were timed for a config (calibrate --for)."
    return changed_text(text, content, told, width=math.inf), tuple(rows)
