"""What a step of a loop of one's own is expected to take, from its first step: model, batch and engine are known then.

The first pass of the first step is counted while it runs: products, kernels, and what backward will need. The formulas
price that as they price a config's model. A loop is never in the way of its prediction, nor the other way round: what
cannot be counted or priced has its reason in the place of figures.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.detect import detect_machine
from paceline.config import Config, config_from_dict
from paceline.engines.engine import Engine
from paceline.models.measured import ActivationBytes, ForwardCounter
from paceline.plan.layout import Layout
from paceline.plan.workload import config_values
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.run.processes import machine_entry
from paceline.search.expect import expect_run
from paceline.search.expectation import FILE, Expectation

_PATIENCE_S = 10.0  # with a prediction that is not done when the loop is


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCores:
    """How many hosts there are, and how many cores the ranks of this one share."""

    hosts: int = 1
    cores: int = 1


class _LoopCounter(ForwardCounter):  # type: ignore[no-untyped-call]
    """Counts operations of a loop, which go on where one cannot be counted: ``problem`` is the first reason."""

    problem = ""

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            super().count(func, args, kwargs, result)
        except Exception as error:
            self.problem = self.problem or f"{func} cannot be counted: {error!r}"

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return super().pack(tensor)
        except Exception as error:
            self.problem = self.problem or f"a tensor for backward cannot be counted: {error!r}"
            return tensor


class FirstPass:
    """Counts the passes of a step, and what the first of them computes and keeps; ``reason``: why it cannot."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.num_passes, self.reason = engine, 0, _uncounted(engine)
        self.counted: ActivationBytes | None = None
        self._running: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Follows the module while a step runs."""
        if self.reason:
            yield
            return
        module = self.engine.module
        enters = module.register_forward_pre_hook(lambda *_: self._enter())
        leaves = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
        with enters, leaves:  # which removes them
            yield

    def _enter(self) -> None:
        if not torch.is_grad_enabled():
            return
        self.num_passes += 1
        if self.num_passes == 1:
            self._counter = _LoopCounter(self.engine.num_parameters, _held(self.engine))
            self._running = contextlib.ExitStack()
            self._running.enter_context(self._counter.counting())

    def _leave(self) -> None:
        if self._running is not None:
            self._running.close()
            self.counted, self._running = self._counter.result(), None
            self.reason = self._counter.problem
            del self._counter  # and the tensors that it held on to


def _uncounted(engine: Engine) -> str:
    layout = getattr(engine, "layout", None)
    if layout is None or layout.degree > 1:
        return "a model or sequences in parts are priced from a config alone"
    compiled = [getattr(each, "_compiled_call_impl", None) for each in engine.module.modules()]
    compiled += [getattr(engine.module, "_orig_mod", None)]
    if layout.is_compiled or any(compiled):
        return "operations of a compiled model are not seen while it runs"
    if engine.world.backend == "virtual":
        return "virtual ranks take turns in one process"
    return ""


def _held(engine: Engine) -> list[torch.Tensor]:
    """Returns parameters and buffers; of a sharded model what these are gathered into, since to read them gathers."""
    if not engine.layout.is_fully_sharded:  # type: ignore[attr-defined]
        return [*engine.module.parameters(), *engine.module.buffers()]
    return [*(group.full for group in engine.flat_groups), *engine.module.buffers()]


class LoopPrediction:
    """Writes down, in a thread, what steps like the first one, with so many samples a rank, are expected to take."""

    def __init__(
        self, first: FirstPass, optimizer: torch.optim.Optimizer | None, samples: int, shared: SharedCores, folder: Path
    ) -> None:
        self._is_virtual, self._found = first.engine.world.backend == "virtual", Expectation()

        def work() -> None:
            self._found = replace(_expect(first, optimizer, samples, shared), is_later=True)
            with contextlib.suppress(OSError):  # a full disk is told of by what the loop needs
                (folder / FILE).write_text(self._found.to_text(), encoding="utf-8")

        self._thread = threading.Thread(target=work, name="prediction", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Waits for it, and returns why there is none: nothing, where there is one, and on virtual ranks."""
        self._thread.join(_PATIENCE_S)
        return "" if self._is_virtual else self._found.reason


def _expect(first: FirstPass, optimizer: torch.optim.Optimizer | None, count: int, shared: SharedCores) -> Expectation:
    engine, counted = first.engine, first.counted
    ranks, reason = engine.world.size, first.reason
    if reason or counted is None:
        return Expectation(ranks=ranks, reason=reason or "the first step has not called the engine with gradients")
    try:
        each = max(1, round(count / first.num_passes))
        layout: Layout = engine.layout  # type: ignore[attr-defined]
        config = _as_config(engine, optimizer, replace(layout, microbatch=each, accumulate=first.num_passes))
        machine = replace(detect_machine(with_gpus=engine.device.type == "cuda"), cores=shared.cores)
        facts, threads = _facts(engine, counted, each), torch.get_num_threads()
        return expect_run(config, machine, threads=threads, hosts=shared.hosts, entry=machine_entry(), facts=facts)
    except Exception as error:  # whatever it is, the loop goes on
        return Expectation(ranks=ranks, reason=f"{type(error).__name__}: {error}".splitlines()[0])


def _facts(engine: Engine, counted: ActivationBytes, samples: int) -> ModelFacts:
    flops, activations = counted.work.flops / samples, counted.work.activations / samples
    work = replace(counted.work, flops=flops, activations=activations)
    return ModelFacts(
        blocks=(),
        root=BlockFacts(parameters=engine.num_parameters, saved_bytes=counted.total / samples),
        buffer_bytes=sum(each.nbytes for each in engine.module.buffers()),
        temporary_bytes=2 * counted.largest / samples,  # its gradient, and that of what it was made from
        work=work,
    )


def _as_config(engine: Engine, optimizer: torch.optim.Optimizer | None, layout: Layout) -> Config:
    """Returns a config that says what the loop does; its model and data stand for those of the loop."""
    world, group = engine.world, {} if optimizer is None else optimizer.param_groups[0]
    is_double = any(each.dtype == torch.float64 for each in engine.parameters())
    plain = {"kind": "sgd", "momentum": float(group["momentum"])} if "momentum" in group else {}
    batch = layout.microbatch * layout.accumulate * world.size
    dtype, backend = "float64" if is_double else "float32", world.backend if world.size > 1 else "auto"
    sections: dict[str, dict[str, Any]] = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "optim": plain}
    sections |= {"memory": {}, "parallel": {"ranks": world.size, "device": world.device.type}}
    sections |= {"comm": {"backend": backend}}
    sections["train"] = {"steps": 1, "global_batch": batch, "accumulate": layout.accumulate, "dtype": dtype}
    for path, value in config_values(layout, names_precision=True).items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    return config_from_dict(sections)
