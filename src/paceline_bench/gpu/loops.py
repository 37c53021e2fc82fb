"""The arms of the GPU benchmark: loops that a user would write, at their strongest, other trainers, and ours.

All loops compile the whole model together with its loss, so that no kernel writes logits in fp32, clip by the global
norm and update with a fused optimizer of torch:

    plain autocast     fp32 parameters, autocast to bf16
    plain masters      bf16 parameters; fp32 masters are updated and copied back, each in one call over all tensors
    ... graphs         the same with ``mode="reduce-overhead"``: CUDA graphs of forward and backward
    ... channels last  the same with images and weights in that layout
    torchao fp8        linear layers in fp8 with dynamic scales per tensor; the output layer stays in bf16
    accelerate, lightning fabric    as their documentation says, around a module that returns the loss
    paceline engine    ``parallelize`` and ``train_step`` on batches that lie ready
    paceline train     the command that a user types

    python -m paceline_bench.gpu.loops '["plain autocast", "gpt-124m", "cuda", "configs/gpt_124m.yaml", 55]' OUTPUT

Each arm trains in a process of its own, by one config for all arms of a model. All batches are on the device when the
second step begins. The time of a step is that between the ends of two steps on the device's own time line, and nobody
waits for the device in between.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import resources
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.bounded_yaml import load_yaml
from paceline.clock import DeviceClock, seconds_between
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, OptimConfig, config_from_dict, dump_yaml, load_config
from paceline.config.shipped import find_config
from paceline.data.datasets import DataShape
from paceline.data.fetch import fetch_batch
from paceline.data.loader import StepBatch
from paceline.data.order import DataOrder
from paceline.data.registry import DataSplits, data_of
from paceline.free_memory import MemoryGauge
from paceline.train.assemble import build_trainer, build_workload
from paceline.train.step import place, train_step

OnDevice: TypeAlias = Literal["cuda", "cpu"]
# What a benchmark leaves out of a run: evaluation, checkpoints, ragged batches (for which plain loops would compile
# again), and rates that depend on the number of steps.
_TIMED = (
    *("data.eval_fraction=0.0", "data.last_batch=drop", "optim.schedule.kind=constant", "optim.schedule.warmup=0"),
    *("checkpoint.at_end=false", "parallel.ranks=1", "monitor.console=false"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWorkload:
    """A model with its batch: ``steps`` of a turn are timed after ``warm_up`` others. ``kinds``: which arms suit it."""

    model: str
    shipped: str = ""
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    steps: int
    warm_up: int
    kinds: Sequence[str] = field(hash=False)
    unit: Literal["tokens", "images"] = "tokens"
    device: OnDevice = "cuda"

    def config_file(self, folder: Path) -> Path:
        """Returns the config that ships, or writes one with these values into a folder."""
        if self.shipped:
            return find_config(self.shipped).absolute()
        path = folder / f"{self.model}.yaml"
        path.write_text(dump_yaml(config_from_dict(self.values)), encoding="utf-8")
        return path

    def overrides(self, steps: int, *, precision: str | None = None) -> list[str]:
        """Returns what is changed in the config for a turn of so many steps, warm-up included."""
        changed = [*_TIMED, f"parallel.device={self.device}", f"train.steps={steps}"]
        return changed if precision is None else [*changed, f"train.precision={precision}"]

    def config(self, file: Path, steps: int, *, precision: str | None = None) -> Config:
        """Reads the config as ``paceline train`` does with these overrides."""
        return load_config(file, self.overrides(steps, precision=precision))


@cache
def all_workloads() -> dict[str, GpuWorkload]:
    """Returns the workloads of all devices by model, from ``workloads.yaml``."""
    text = resources.files("paceline_bench.gpu").joinpath("workloads.yaml").read_text(encoding="utf-8")
    return {model: GpuWorkload(model=model, **about) for model, about in load_yaml(text).items()}


def workloads_on(device: str) -> dict[str, GpuWorkload]:
    """Returns the workloads of a device: ``cuda``, or ``cpu`` for a trial of the machinery."""
    return {model: each for model, each in all_workloads().items() if each.device == device}


Step = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuArm:
    """An arm: its name in records, the ``kind`` that a workload asks for it by, and how it is set up.

    ``library`` is what must be there to import; ``is_plain``: ours are compared with the fastest of those;
    ``precision``: what ours ask for, where it is not the config's.
    """

    name: str
    kind: str
    library: str = ""
    is_plain: bool = False
    has_masters: bool = False
    mode: str | None = None
    is_channels_last: bool = False
    precision: str | None = None

    @property
    def missing(self) -> str:
        """The reason why it cannot run here; empty if it can."""
        is_there = not self.library or importlib.util.find_spec(self.library) is not None
        return "" if is_there else f"{self.library} is not installed"

    @property
    def is_fp8(self) -> bool:
        return "fp8" in self.name


ENGINE, TRAIN = "paceline engine", "paceline train"
_GRAPHS = "reduce-overhead"
_plain_arm = partial(GpuArm, is_plain=True)
ARMS = (
    _plain_arm(name="plain autocast", kind="plain"),
    _plain_arm(name="plain autocast channels last", kind="channels_last", is_channels_last=True),
    _plain_arm(name="plain autocast channels last graphs", kind="channels_last", is_channels_last=True, mode=_GRAPHS),
    _plain_arm(name="plain masters", kind="masters", has_masters=True),
    _plain_arm(name="plain autocast graphs", kind="graphs", mode=_GRAPHS),
    _plain_arm(name="plain masters graphs", kind="graphs", has_masters=True, mode=_GRAPHS),
    GpuArm(name="accelerate", kind="accelerate", library="accelerate"),
    GpuArm(name="lightning fabric", kind="lightning", library="lightning"),
    GpuArm(name="torchao fp8", kind="fp8", library="torchao"),
    GpuArm(name="torchao fp8 masters", kind="fp8", library="torchao", has_masters=True),
    GpuArm(name=ENGINE, kind="engine"),
    GpuArm(name=TRAIN, kind="train"),
    GpuArm(name=f"{ENGINE} fp8", kind="fp8", precision="fp8"),
    GpuArm(name=f"{TRAIN} fp8", kind="fp8", precision="fp8"),
)


def set_up_loop(arm: GpuArm, model: nn.Module, config: Config, device: torch.device) -> Step:
    """Moves a model to the device and returns its training step."""
    model = model.to(device)
    if arm.is_channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if arm.library == "accelerate":
        return _accelerate(model, config, device)
    if arm.library == "lightning":
        return _lightning(model, config, device)
    if arm.library == "torchao" and device.type == "cuda":
        _to_fp8(model)
    return _plain(model, config, device, has_masters=arm.has_masters, mode=arm.mode)


class WithLoss(nn.Module):
    """A model that returns its loss, as libraries and compilers like to have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def _plain(model: nn.Module, config: Config, device: torch.device, *, has_masters: bool, mode: str | None) -> Step:
    whole = WithLoss(model)
    parameters = [each for each in model.parameters() if each.requires_grad]
    masters = [nn.Parameter(each.detach().clone()) for each in parameters] if has_masters else parameters
    for each, master in zip(parameters, masters, strict=True) if has_masters else ():  # room for gradients; bf16
        master.grad = torch.zeros_like(master)
        each.data = each.data.to(BF16)
    optimizer = make_optimizer(config.optim, masters)
    uses_graphs = mode == _GRAPHS and device.type == "cuda"

    def compute(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, BF16, enabled=not has_masters):
            loss: Tensor = whole(inputs, targets)
        return loss

    compiled = _compile(compute, device, mode)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        if uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = compiled(inputs, targets)
        loss.backward()
        if has_masters:
            torch._foreach_copy_(_gradients(masters), _gradients(parameters))
        if config.optim.clip_norm is not None:
            nn.utils.clip_grad_norm_(masters, config.optim.clip_norm, foreach=True)
        optimizer.step()
        if has_masters:
            with torch.no_grad():
                torch._foreach_copy_(tuple(parameters), tuple(masters))
        for each in parameters:
            each.grad = None
        kept: Tensor = loss.detach()
        return kept.clone() if uses_graphs else kept  # the next replay writes into the same memory

    return step


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _compile(function: Callable[..., Any], device: torch.device, mode: str | None = None) -> Callable[..., Any]:
    if device.type == "cpu":  # a trial: traced as on a GPU, and run without a C++ compiler
        return torch.compile(function, backend="eager")
    return torch.compile(function, mode=mode)


def make_optimizer(asked: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes torch's own fused optimizer with a config's settings; biases and norms get no weight decay."""
    known = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [each for each in known if each.ndim >= 2], "weight_decay": asked.weight_decay},
        {"params": [each for each in known if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if asked.kind == "sgd":
        return torch.optim.SGD(groups, lr=asked.lr, momentum=asked.momentum, nesterov=asked.nesterov, fused=True)
    return torch.optim.AdamW(groups, lr=asked.lr, betas=(asked.betas[0], asked.betas[1]), eps=asked.eps, fused=True)


def _accelerate(model: nn.Module, config: Config, device: torch.device) -> Step:
    from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from accelerate.utils import TorchDynamoPlugin  # type: ignore[import-not-found, import-untyped, unused-ignore]

    plugin = TorchDynamoPlugin(backend="inductor" if device.type == "cuda" else "eager")
    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu", dynamo_plugin=plugin)
    whole: Any = WithLoss(model)
    prepared, optimizer = accelerator.prepare(whole, make_optimizer(config.optim, model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = prepared(inputs, targets)
        accelerator.backward(loss)
        if config.optim.clip_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _lightning(model: nn.Module, config: Config, device: torch.device) -> Step:
    from lightning.fabric import Fabric  # type: ignore[import-not-found, import-untyped, unused-ignore]

    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    compiled: Any = _compile(WithLoss(model), device)
    prepared, optimizer = fabric.setup(compiled, make_optimizer(config.optim, model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = prepared(inputs, targets)
        fabric.backward(loss)
        if config.optim.clip_norm is not None:
            # Looked at on the host, the norm would stop the device in every step.
            fabric.clip_gradients(prepared, optimizer, max_norm=config.optim.clip_norm, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _to_fp8(model: nn.Module) -> None:
    from torchao import float8  # type: ignore[import-not-found, import-untyped, unused-ignore]

    def fits(module: nn.Module, name: str) -> bool:
        is_multiple = isinstance(module, nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0
        return is_multiple and name != "head"

    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=fits)


# One arm in a process of its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTurn:
    """What one turn of an arm measured: seconds and losses of all steps; when it was asked for, and had made one."""

    step_s: list[float]
    losses: list[float]
    peak_bytes: int | None
    first_step_at: float
    samples: int  # of a step
    started_at: float = 0.0

    @property
    def first_step_s(self) -> float:
        return self.first_step_at - self.started_at

    def median_s(self, warm_up: int) -> float:
        """Returns the seconds of the median step after the warm-up."""
        return median(self.step_s[warm_up:] or self.step_s)


def run_arm(name: str, model: str, on: OnDevice, file: str, steps: int) -> ArmTurn:
    """Sets an arm up and lets it train a model by a config, in this process."""
    workload, device = replace(all_workloads()[model], device=on), torch.device(on)
    arm = next(each for each in ARMS if each.name == name)
    config = workload.config(Path(file), steps, precision=arm.precision)
    if arm.name.startswith(ENGINE):
        return _measure(*_set_up_engine(config, device), device)
    work = build_workload(config)
    batches = make_batches(config, work.data, device)
    if workload.unit == "images":
        batches = (
            (_as_images(inputs, work.data.shape, is_last=arm.is_channels_last), targets) for inputs, targets in batches
        )
    return _measure(set_up_loop(arm, work.model, config, device), batches, device)


def _as_images(inputs: Tensor, shape: DataShape, *, is_last: bool) -> Tensor:
    """Returns images as a loop trains on them: bytes are normalised before the time begins."""
    images = inputs
    if not inputs.is_floating_point():
        mean, std = (getattr(shape, name, None) for name in ("mean", "std"))
        as_channels = [inputs.new_tensor(each, dtype=torch.float32).view(1, -1, 1, 1) for each in (mean, std) if each]
        images = (inputs - as_channels[0]) / as_channels[1] if len(as_channels) == 2 else inputs / 255
    return images.contiguous(memory_format=torch.channels_last) if is_last else images


def _set_up_engine(config: Config, device: torch.device) -> tuple[Step, Iterator[Batch]]:
    trainer = build_trainer(config, SoloCommunicator(device))
    parts = trainer.parts
    data = data_of(config)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        samples = len(targets)
        batch = StepBatch(microbatches=[(inputs, targets)], global_samples=samples, local_samples=[samples])
        outcome = train_step(
            parts.engine, parts.optimizer, batch, parts.loss, parts.policy, scaler=trainer.scaler, passes=parts.passes
        )
        return outcome.loss_sum / outcome.count

    return step, make_batches(config, data, device)


def make_batches(config: Config, data: DataSplits, device: torch.device) -> Iterator[Batch]:
    """Yields the batches of all steps of a run on one rank, in its order, on the device."""
    batch_size, seed = config.train.global_batch, config.data.seed
    assert batch_size is not None
    assert config.train.steps is not None
    order = DataOrder(
        length=len(data.train),
        global_batch=batch_size,
        seed=config.train.seed if seed is None else seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.last_batch == "drop",
    )
    for batch in islice(order.batches(0), config.train.steps):
        inputs, targets = place(fetch_batch(data.train, batch.indices, batch.epoch), device, None)
        yield inputs, targets


def _measure(step: Step, batches: Iterator[Batch], device: torch.device) -> ArmTurn:
    gauge, clock = MemoryGauge(device), DeviceClock(device)
    first = next(batches)
    start, losses = clock.take(), [step(*first)]
    marks = [clock.take()]
    losses[0].item()  # waits for the first step
    first_step_at, first_s = time.time(), seconds_between(start, marks[0])
    ready = list(batches)
    gauge.reset()
    for batch in ready:
        losses.append(step(*batch))
        marks.append(clock.take())
    ends = [float(loss) for loss in losses]
    # Of the batches that lie ready a loop would hold one; the others are the benchmark's.
    held = sum(each.numel() * each.element_size() for batch in ready[1:] for each in batch)
    return ArmTurn(
        step_s=[first_s, *(seconds_between(before, after) for before, after in pairwise(marks))],
        losses=ends,
        peak_bytes=gauge.peak_bytes() - held if device.type == "cuda" else None,
        first_step_at=first_step_at,
        samples=len(first[1]),
    )


def main() -> None:
    """Runs the arm of the command line. One that fails says why in its output, and leaves with code 1."""
    found: dict[str, Any]
    try:
        found = asdict(run_arm(*json.loads(sys.argv[1])))
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
