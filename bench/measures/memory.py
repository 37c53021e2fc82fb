"""The largest GPT that trains within a memory budget, for each strategy and option: found by real training steps.

The number of layers grows at a fixed width, with one sample of a fixed length. A size fits if two whole steps run: the
second has the optimizer's state in memory. On CUDA the budget is a share of the device that the allocator may not
exceed, and a real out-of-memory error says no. On a CPU, where nothing can be taken away from a process, the tensors
alive after backward are counted exactly: parameters, gradients and optimizer state, without activations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm.solo import SoloCommunicator
from paceline.engines.apply import parallelize
from paceline.errors import TrainingError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Offload, StrategyName
from paceline.plan.model_shape import ModelShape
from paceline.units import GIB

# The largest size that fits, from a few trials: pure, the trials come as a function.
#
# What a model holds grows with its layers along a line. So two small trials tell where the line meets the budget, and
# the trials that follow only make sure: memory is lost between blocks of different sizes, which no line shows.


PROBES = (1, 3)

Limit = Literal["device", "host", "trials", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one trial needed at most."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much there is, and the most layers to look for."""

    device_bytes: int
    host_bytes: int
    max_layers: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The most layers that fit (0: not even one), the fewest that were seen not to, and what stopped the search.

    ``limit``: the device or the host is full, there were no more trials to find out, or nothing larger was asked for.
    """

    layers: int
    too_many: int | None
    limit: Limit
    tried: tuple[int, ...]


def find_largest(attempt: Callable[[int], Usage | None], budget: Budget, *, max_trials: int = 5) -> Largest:
    """Finds the most layers for which ``attempt`` does not run out of memory (None).

    A size that would not fit on the host is never tried: a host that runs out of memory ends processes.
    """
    fitting: dict[int, Usage] = {}
    tried: list[int] = []
    too_many: int | None = None
    step_back = 1
    while len(tried) < max_trials:
        largest = max(fitting, default=0)
        most = min(_most_on_host(fitting, budget), budget.max_layers if too_many is None else too_many - 1)
        if largest >= most:
            break
        if len(fitting) < len(PROBES) and too_many is None:
            guess = PROBES[len(tried)]
        else:
            guess = _on_the_line(fitting, "device_bytes", budget)
            if too_many is not None and guess >= too_many:
                guess = too_many - step_back  # the line is off by what is lost between blocks: little
                step_back *= 2
        layers = min(max(guess, largest + 1), most)
        tried.append(layers)
        usage = attempt(layers)
        if usage is None:
            too_many = layers
        else:
            fitting[layers] = usage
    largest = max(fitting, default=0)
    limit: Limit = "trials"
    if largest == budget.max_layers:
        limit = "search"
    elif too_many == largest + 1:
        limit = "device"
    elif largest == _most_on_host(fitting, budget):
        limit = "host"
    return Largest(layers=largest, too_many=too_many, limit=limit, tried=tuple(tried))


def _most_on_host(fitting: Mapping[int, Usage], budget: Budget) -> int:
    return max(_on_the_line(fitting, "host_bytes", budget), max(fitting, default=0))


def _on_the_line(fitting: Mapping[int, Usage], what: Literal["device_bytes", "host_bytes"], budget: Budget) -> int:
    """Returns how many layers meet the budget on the line through the two largest that fit."""
    points = sorted(fitting)[-2:]
    if len(points) < 2:
        return budget.max_layers
    low, high = (getattr(fitting[layers], what) for layers in points)
    slope = (high - low) / (points[1] - points[0])
    if slope <= 0:
        return budget.max_layers
    return points[1] + int((getattr(budget, what) - high) // slope)


_NUM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to train."""

    name: str
    strategy: StrategyName = "ddp"
    precision: str = "fp32"
    checkpoint_activations: str = "none"
    offload: Offload = field(default_factory=Offload)


_sharded = partial(Option, strategy="fsdp", precision="bf16_master")
OPTIONS = (
    Option(name="ddp fp32"),
    Option(name="ddp bf16", precision="bf16"),
    Option(name="ddp bf16_master", precision="bf16_master"),
    _sharded(name="fsdp bf16_master"),
    _sharded(name="fsdp bf16_master checkpointed", checkpoint_activations="full"),
    _sharded(
        name="fsdp bf16_master checkpointed, optimizer offloaded",
        checkpoint_activations="full",
        offload=Offload(optimizer=True),
    ),
    _sharded(
        name="fsdp bf16_master checkpointed, optimizer and parameters offloaded",
        checkpoint_activations="full",
        offload=Offload(optimizer=True, parameters=True),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that differ in their number of layers alone, and the length of the one sample that they train on."""

    size: str
    context: int

    def config(self, layers: int) -> ModelShape:
        """Returns the config of a member."""
        return gpt_config(self.size, layers=layers, context=self.context, dropout=0.0)


def bench_memory(
    option: Option, family: Family, budget: Budget, device: torch.device, *, max_trials: int = 5
) -> dict[str, Any]:
    """Finds the largest model of a family that trains with an option; returns a row."""
    meter = _MemoryMeter(device, budget)
    trials: dict[int, _TimedTrial] = {}  # those that fitted

    def attempt(layers: int) -> Usage | None:
        _release(device)
        meter.start()
        with contextlib.suppress(torch.OutOfMemoryError):
            trials[layers] = _train(option, family.config(layers), device, meter)
        _release(device)  # not before: the error's frames hold the tensors
        return trials[layers].usage if layers in trials else None

    try:
        found = find_largest(attempt, budget, max_trials=max_trials)
    finally:
        meter.close()
    return _row(option, found, trials)


def select_options(words: Sequence[str] | None) -> list[Option]:
    """Returns the options whose name contains one of the words; all without words. UsageError where there are none."""
    found = [option for option in OPTIONS if not words or any(word in option.name for word in words)]
    if not found:
        raise UsageError(
            f"--options {','.join(words or [])}: no row is called so\n"
            "  a row is taken if its name contains one of the words\n"
            f"  there are {'; '.join(option.name for option in OPTIONS)}"
        )
    return found


def make_budget(device: torch.device, budget_gb: float | None, host_gb: float) -> Budget:
    """Returns the budget in bytes; without a number, the whole device. Raises UsageError for more than there is."""
    if budget_gb is None and device.type != "cuda":
        raise UsageError("--budget-gb is needed on a CPU\n  there the bytes of tensors are counted against it")
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    device_bytes = int(total if budget_gb is None and total is not None else (budget_gb or 0) * GIB)
    for name, asked, there in (
        ("--budget-gb", device_bytes, total),
        ("--host-gb", int(host_gb * GIB), psutil.virtual_memory().available if total is not None else None),
    ):
        if asked < 1 or (there is not None and asked > there):
            free = "" if there is None else f", and there are {there / GIB:.3g}"
            raise UsageError(f"{name} {asked / GIB:.3g}{free}\n  give what may be used, in GiB")
    return Budget(device_bytes=device_bytes, host_bytes=int(host_gb * GIB))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedTrial:
    usage: Usage
    parameters: int
    tokens_per_s: float


def _train(option: Option, config: ModelShape, device: torch.device, meter: _MemoryMeter) -> _TimedTrial:
    model = _make_model(option, config, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = parallelize(
        model,
        SoloCommunicator(device),
        option.strategy,
        precision=option.precision,
        checkpoint_activations=option.checkpoint_activations,
        offload=option.offload,
    )
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, fused=True)
    tokens = torch.arange(config.context + 1, device=device).remainder(config.vocab_size)
    seconds = 0.0
    for _ in range(_NUM_STEPS):
        start = time.perf_counter()
        logits = engine(tokens[None, :-1])
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), tokens[1:])
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
        meter.note()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):  # sync point
            raise TrainingError(f"{option.name}: the loss of {config.layers} layers is not finite")
        seconds = time.perf_counter() - start
    return _TimedTrial(usage=meter.read(), parameters=parameters, tokens_per_s=config.context / seconds)


def _make_model(option: Option, config: ModelShape, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta") if option.strategy == "fsdp" else device:
        model = GPT(config)
    if option.strategy == "fsdp":
        _initialise_quickly(model)
    return model


def _initialise_quickly(model: nn.Module) -> None:
    """Lets matrices be filled by repeating a few random rows: drawing billions of numbers on a host takes minutes."""

    def fill(module: nn.Linear | nn.Embedding) -> None:
        count, width = module.weight.shape
        rows = torch.randn(min(count, 64), width) * 0.02
        module.weight.data.copy_(rows.repeat(-(-count // len(rows)), 1)[:count])

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters = partial(fill, module)  # type: ignore[method-assign]


def _release(device: torch.device) -> None:
    """Gives all memory back that is not in use, pinned memory too, so that a trial starts as the first did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):  # no public name yet; the newer one first
            if hasattr(torch._C, name):
                getattr(torch._C, name)()
                break


def _set_allocator(settings: str) -> None:
    """Changes how CUDA's allocator works; there is no public name for it yet."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)


class _MemoryMeter:
    """Counts the memory of a trial, which gets a torch.OutOfMemoryError where it needs more than the budget.

    On CUDA by the allocator's own count and limit. Elsewhere tensors in host memory take the place of a device's.
    """

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self._budget = budget
        self._cuda = device if device.type == "cuda" else None
        self._host = LiveTensors("cpu")
        if self._cuda is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            # Segments that grow lose next to nothing between blocks of different sizes, as long runs set it, too.
            _set_allocator("expandable_segments:True")
            torch.cuda.set_per_process_memory_fraction(min(budget.device_bytes / total, 1.0), device)

    def start(self) -> None:
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._host.start()

    def note(self) -> None:
        """Counts where a step holds the most that lasts: after backward."""
        self._host.note()
        if self._cuda is None and self._host.peak_bytes > self._budget.device_bytes:
            raise torch.OutOfMemoryError(f"{self._host.peak_bytes} bytes are in use")

    def read(self) -> Usage:
        if self._cuda is None:
            return Usage(device_bytes=self._host.peak_bytes, host_bytes=0)
        return Usage(device_bytes=torch.cuda.max_memory_allocated(self._cuda), host_bytes=self._host.peak_bytes)

    def close(self) -> None:
        if self._cuda is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self._cuda)


class LiveTensors:
    """Counts the storages of all tensors on a kind of device that have come to life since ``start``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._before: dict[int, int] = {}
        self.peak_bytes = 0

    def start(self) -> None:
        """Leaves out what is there already."""
        self._before = dict(self._storages())
        self.peak_bytes = 0

    def note(self) -> None:
        """Counts what is there now."""
        now = dict(self._storages())
        self.peak_bytes = max(self.peak_bytes, sum(size for at, size in now.items() if self._before.get(at) != size))

    def _storages(self) -> Iterator[tuple[int, int]]:
        for found in gc.get_objects():
            if type(found) in (torch.Tensor, nn.Parameter) and found.device.type == self._kind:
                gradient = found.grad if found.is_leaf else None  # which Python may not have seen yet
                for tensor in (found, gradient):
                    if tensor is not None and tensor.layout == torch.strided:
                        storage = tensor.untyped_storage()
                        yield storage.data_ptr(), storage.nbytes()


def _row(option: Option, found: Largest, trials: dict[int, _TimedTrial]) -> dict[str, Any]:
    best = trials.get(found.layers)
    offload = dataclasses.asdict(option.offload)
    return {
        "row": option.name,
        "strategy": option.strategy,
        "precision": option.precision,
        "checkpoint_activations": option.checkpoint_activations,
        "offload": [name for name, is_on in offload.items() if is_on],
        "layers": found.layers,
        "parameters": best.parameters if best else 0,
        "device_bytes": best.usage.device_bytes if best else None,
        "host_bytes": best.usage.host_bytes if best else None,
        "tokens_per_s": round(best.tokens_per_s, 1) if best else None,
        "limit": found.limit,
        "too_many_layers": found.too_many,
        "tried_layers": list(found.tried),
    }
