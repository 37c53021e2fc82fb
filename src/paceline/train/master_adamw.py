"""AdamW over fp32 masters in one pass: reads gradients where backward left them, writes the module's copies in bf16.

Memory traffic of an update, in bytes a parameter, where a step has one microbatch:

    gradients cast to fp32, their norm, AdamW, masters cast to bf16     6 + 4 + 28 + 6 = 44
    their norm in bf16, this                                            2 + 28         = 30

The clip factor, the learning rates, the count of steps, and whether the step is left out because the norm is not
finite: all of it is read on the device. So a step can be captured into a CUDA graph and replayed (see ``step``).

State, groups and state dicts are those of ``torch.optim.AdamW(fused=True)``: a run goes on from either to the other.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
_ALIGN = 16  # bytes
_NOT_PREPARED = (
    "a CUDA graph captures an update for which no step has prepared\n"
    "  a step makes tables on the device, and pinned memory for one graph; a capture can make neither\n"
    "  make one step with the same parameters and gradients before each capture"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What happens to gradients: times ``weight``, then clipped to ``max_norm``; left out if ``norm`` is not finite."""

    norm: torch.Tensor | None = None
    max_norm: float | None = None
    weight: torch.Tensor | None = None


@dataclass(slots=True)
class _Update:
    group: int
    master: nn.Parameter
    gradient: torch.Tensor
    average: torch.Tensor
    square: torch.Tensor
    step: torch.Tensor
    copy: nn.Parameter | None

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What one launch has in common: settings of the group, dtype of the gradient, whether there are copies."""
        return self.group, self.gradient.dtype == torch.bfloat16, self.copy is not None


class MasterAdamW(torch.optim.AdamW):
    """Updates masters and the module's copies, by the master's gradient in fp32, or else that of its copy in bf16."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        copies: Mapping[nn.Parameter, nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self._step_supports_amp_scaling = False  # of torch's GradScaler, which would write to the masters' gradients
        self._copies = dict(copies)
        self._scaling = Scaling()
        self._tables: _Tables | None = None  # made in the first step, where the device is known

    def gradient(self, master: nn.Parameter) -> torch.Tensor | None:
        if master.grad is not None:
            return master.grad
        copy = self._copies.get(master)
        return None if copy is None else copy.grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes an update. For a CUDA graph, make one step before the capture, and keep the gradients' memory.

        Call ``upload_rates`` before each replay for which learning rates have changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = list(self._updates())
        if not updates:
            return loss
        if updates[0].master.device.type != "cuda":
            for update in updates:
                _update_plainly(update, self.param_groups[update.group], self._scaling)
        else:
            if self._tables is None:
                self._tables = _Tables(updates[0].master.device)
            self.upload_rates()
            self._tables.launch(updates, self.param_groups, self._scaling)
        for update in updates:
            if update.copy is None and (copy := self._copies.get(update.master)) is not None:
                copy.data.copy_(update.master)
        return loss

    def step_scaled(self, scaling: Scaling) -> None:
        """Makes an update by gradients that are weighed and clipped on the way, or leaves it out."""
        self._scaling = scaling
        try:
            self.step()
        finally:
            self._scaling = Scaling()

    def upload_rates(self) -> None:
        """Brings learning rates that have changed to the device, without waiting for it; not while it captures."""
        if self._tables is not None and not torch.cuda.is_current_stream_capturing():
            self._tables.upload_rates([float(group["lr"]) for group in self.param_groups])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for copy in self._copies.values():
            if set_to_none:
                copy.grad = None
            elif copy.grad is not None:
                copy.grad.zero_()

    def _updates(self) -> Iterable[_Update]:
        """Iterates over what has a gradient, with its state, laid out in memory as the master is."""
        for number, group in enumerate(self.param_groups):
            for master in group["params"]:
                gradient = self.gradient(master)
                if gradient is None or not master.numel():
                    continue
                state = self.state[master]
                if not state:  # as torch makes it
                    state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                    state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
                elif state["step"].device != master.device:  # of an optimizer that was not fused
                    state["step"] = state["step"].to(master.device, torch.float32)
                for name in ("exp_avg", "exp_avg_sq"):
                    if state[name].stride() != master.stride():
                        state[name] = torch.empty_like(master, requires_grad=False).copy_(state[name])
                dtype = torch.bfloat16 if gradient.dtype == torch.bfloat16 else torch.float32
                if gradient.dtype != dtype or not _lie_alike(gradient, master):
                    gradient = torch.empty_like(master, dtype=dtype, requires_grad=False).copy_(gradient)
                copy = self._copies.get(master)
                if copy is not None and not _lie_alike(copy, master):
                    copy = None  # somebody gave it another memory format: it is written by itself
                yield _Update(number, master, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"], copy)


def can_update(parameters: Sequence[nn.Parameter]) -> bool:
    """Says whether the kernel updates these masters: fp32 on one NVIDIA device, whole in memory, with Triton there."""
    if not parameters or torch.version.hip is not None or parameters[0].device.type != "cuda":
        return False
    device, is_dense = parameters[0].device, torch.ops.aten.is_non_overlapping_and_dense
    alike = all(p.device == device and p.dtype == torch.float32 for p in parameters)
    return alike and all(p.data_ptr() % _ALIGN == 0 and is_dense(p) for p in parameters) and has_kernel(device)


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Says whether Triton can build a kernel here: a small one is run. A warning says why it cannot."""
    if importlib.util.find_spec("triton") is None:
        return False
    master = nn.Parameter(torch.ones(1, device=device))
    copy = nn.Parameter(torch.ones(1, device=device, dtype=torch.bfloat16))
    copy.grad = torch.ones_like(copy)
    try:
        optimizer = MasterAdamW([{"params": [master]}], {master: copy}, lr=0.5, betas=(0.0, 0.0))
        optimizer.step_scaled(Scaling(norm=torch.ones((), device=device), max_norm=1.0))  # as every step does
        return bool((master < 0.6).item())
    except Exception as error:  # whatever a compiler, a driver or a version of Triton brings up
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        told = f"Triton cannot build the update of fp32 masters ({reason}): torch's fused AdamW takes its place"
        warnings.warn(f"{told}, which reads and writes more memory", stacklevel=2)
        return False


class _Tables:
    """What the kernels read on the device: where the tensors are, who updates which block, the learning rates."""

    def __init__(self, device: torch.device) -> None:
        self.kernel = importlib.import_module("paceline.train.adamw_kernel")
        self.device = device
        self._rates = torch.empty(0, 4, device=device)
        self._known_rates: list[float] = []
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._captured: list[torch.Tensor] = []  # what graphs read, for as long as this lives

    def upload_rates(self, rates: list[float]) -> None:
        if rates == self._known_rates:
            return
        if len(rates) != len(self._rates):
            self._rates = torch.empty(len(rates), 4, device=self.device)  # 16 bytes apart, so that each is aligned
        self._rates.copy_(_pinned([rate for rate in rates for _ in range(4)], torch.float32).view(-1, 4), True)
        self._known_rates = rates

    def launch(self, updates: list[_Update], groups: Sequence[Mapping[str, Any]], scaling: Scaling) -> None:
        updates.sort(key=lambda update: update.kind)  # keeps the order within a kind
        key = tuple((update.kind, update.master.numel()) for update in updates)
        is_capturing = torch.cuda.is_current_stream_capturing()
        if key not in self._plans:
            if is_capturing:
                raise UsageError(_NOT_PREPARED)
            self._plans[key] = _Plan(updates, self.kernel, self.device)
        plan = self._plans[key]
        addresses = [  # row by row of the kernel's table
            *(update.master.data_ptr() for update in updates),
            *(update.average.data_ptr() for update in updates),
            *(update.square.data_ptr() for update in updates),
            *(update.step.data_ptr() for update in updates),
            *(update.gradient.data_ptr() for update in updates),
            *(0 if update.copy is None else update.copy.data_ptr() for update in updates),
        ]
        table = self._place(plan, addresses, is_capturing=is_capturing)
        norm = None if scaling.norm is None else scaling.norm.detach().to(self.device, torch.float32)
        weight = None if scaling.weight is None else scaling.weight.detach().to(self.device, torch.float32)
        kernel, columns, unused = self.kernel, len(updates), self._rates
        with torch.cuda.device(self.device):
            for (number, is_half, has_copy), owners in plan.owners.items():
                group = groups[number]
                beta1, beta2 = (float(beta) for beta in group["betas"])
                kernel.update_tensors[(len(owners),)](
                    table, columns, owners, plan.firsts, plan.sizes, self._rates[number],
                    unused if norm is None else norm, unused if weight is None else weight,
                    math.inf if scaling.max_norm is None else scaling.max_norm, float(group["weight_decay"]),
                    1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2), float(group["eps"]),
                    IS_HALF=is_half, HAS_COPY=has_copy, HAS_NORM=norm is not None, HAS_WEIGHT=weight is not None,
                    BLOCK=kernel.BLOCK, num_warps=kernel.NUM_WARPS,
                )  # fmt: skip
            kernel.count_step[(-(-columns // kernel.COUNTED),)](
                table, columns, unused if norm is None else norm, HAS_NORM=norm is not None, COUNTED=kernel.COUNTED
            )

    def _place(self, plan: _Plan, addresses: list[int], *, is_capturing: bool) -> torch.Tensor:
        """Returns the table of addresses on the device, copied where they changed; a graph has one of its own."""
        if is_capturing:
            source, table, plan.spare = plan.spare, torch.empty_like(plan.table), None
            if source is None:
                raise UsageError(_NOT_PREPARED)
            source.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
            table.copy_(source, non_blocking=True)
            self._captured += [source, table]
            return table
        if plan.spare is None:  # for the next graph that is captured, which cannot pin memory itself
            plan.spare = torch.empty(plan.table.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        if addresses != plan.addresses:
            # Torch's allocator does not hand out pinned memory again before the copy from it has ended.
            plan.table.copy_(_pinned(addresses, torch.int64), non_blocking=True)
            plan.addresses = addresses
        return plan.table


class _Plan:
    """Which program updates which tensor, for updates of the same kinds and sizes."""

    def __init__(self, updates: Sequence[_Update], kernel: Any, device: torch.device) -> None:
        sizes = [update.master.numel() for update in updates]
        blocks = [-(-size // kernel.BLOCK) for size in sizes]
        firsts: list[int] = []
        columns: dict[tuple[int, bool, bool], list[int]] = {}  # by kind
        for column, update in enumerate(updates):
            mine = columns.setdefault(update.kind, [])
            firsts.append(sum(blocks[each] for each in mine))
            mine.append(column)
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self.firsts = torch.tensor(firsts, dtype=torch.int32, device=device)
        self.owners = {}  # by kind the column of each program, of every column as many as it has blocks
        for kind, mine in columns.items():
            counts = torch.tensor([blocks[column] for column in mine], device="cpu")
            numbers = torch.tensor(mine, dtype=torch.int32, device="cpu")
            self.owners[kind] = torch.repeat_interleave(numbers, counts).to(device)
        self.addresses: list[int] = []
        self.table = torch.empty(kernel.NUM_ROWS * len(updates), dtype=torch.int64, device=device)
        self.spare: torch.Tensor | None = None  # pinned memory


def _update_plainly(update: _Update, group: Mapping[str, Any], scaling: Scaling) -> None:
    """Does to one tensor what the kernel does, in operators of torch, on any device."""
    factor, is_finite = torch.ones(()), torch.ones((), dtype=torch.bool)
    if scaling.weight is not None:
        factor = scaling.weight
    if scaling.norm is not None:
        is_finite = scaling.norm.isfinite()
        limit = math.inf if scaling.max_norm is None else scaling.max_norm
        factor = factor * (limit / (scaling.norm + _EPS)).clamp(max=1.0)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    rate, master = float(group["lr"]), update.master.detach()
    gradient = update.gradient.to(master.dtype) * factor
    step = update.step + 1.0
    average = update.average + (1.0 - beta1) * (gradient - update.average)
    square = update.square + (1.0 - beta2) * (gradient * gradient - update.square)
    bias1, root2 = -torch.expm1(step * _log(beta1)), (-torch.expm1(step * _log(beta2))).sqrt()
    value = master - rate * group["weight_decay"] * master
    value = value - rate / bias1 * average / (square.sqrt() / root2 + group["eps"])
    for held, new in ((master, value), (update.average, average), (update.square, square), (update.step, step)):
        held.copy_(torch.where(is_finite, new, held))
    if update.copy is not None:
        update.copy.data.copy_(master)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _pinned(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers in memory from which they are copied to the device without waiting."""
    return torch.tensor(values, dtype=dtype, device="cpu").pin_memory()


def _lie_alike(tensor: torch.Tensor, master: torch.Tensor) -> bool:
    """Says whether the kernel can walk through both with the same offsets, and read several numbers at a time."""
    return tensor.stride() == master.stride() and tensor.data_ptr() % _ALIGN == 0
