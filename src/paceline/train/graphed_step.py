"""CUDA graphs: the hundreds of short kernels of a step, recorded once, and issued by the host as one call.

    steps 1 to 5    run as they are; from the third on, the host is timed
    step 6          is recorded, unless the host took too small a share of the time (``auto``); then it is replayed
    later steps     the batch is copied to where the recorded one was, and the graph is replayed

What changes from step to step is read from the device: the batch, the learning rates, the optimizer's count of steps,
and random numbers, whose generator torch moves on at each replay by what the graph draws. So a run with graphs trains
as one without. A step of another shape, such as a ragged last batch, runs as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from paceline.config import Config
from paceline.data.loader import StepBatch
from paceline.engines.engine import Engine, OnPhase, ignore_phase
from paceline.errors import TrainingError
from paceline.plan.layout import Layout
from paceline.train.loss import Loss
from paceline.train.master_adamw import MasterAdamW
from paceline.train.step import StepOutcome, place

GraphChoice = Literal["auto", "on", "off"]
RunStep = Callable[[StepBatch, OnPhase], StepOutcome]  # trains on one global batch
_TIMED = (3, 4, 5)  # steps; the first ones compile, and make the optimizer's state
FIRST_REPLAY = 1 + _TIMED[-1] + 1  # the step before it is recorded
# The host's share of a step from which on a graph pays: kernels of a graph also follow one another more closely. Below
# it the device has long kernels, and phases that records can show one by one are worth more.
_HOST_BOUND = 0.25


def graph_problem(config: Config, layout: Layout, device: str, loss: Loss) -> str:
    """Says why the steps of a run cannot be replayed from a graph; nothing where they can."""
    problems = {
        f"the device is {device}, and graphs are CUDA's": device != "cuda",
        f"there are {layout.ranks} ranks, and a graph holds one rank's step": layout.ranks > 1,
        f"parallel.strategy = {layout.strategy} gathers and frees memory around passes": layout.strategy != "ddp",
        "parts of what a rank holds are offloaded to the host": layout.offload.is_any,
        "memory.mlp_tiles keeps the states of random numbers": layout.mlp_tiles != 1,
        f"optim.kind = {config.optim.kind} may read numbers on the host": config.optim.kind not in ("adamw", "sgd"),
        "train.dtype = float64, and a graph reads its learning rates in fp32": config.train.dtype == "float64",
        "train.precision = fp16 moves its loss scale on the host": layout.precision == "fp16",
        "train.microbatch = auto may change the microbatches": config.train.microbatch == "auto",
        "the loss counts its elements anew in every step": loss.elements_per_sample is None,
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


class GraphedStep:
    """Runs steps, and replays them where that is faster (``auto``), or always (``on``); ``on_decided`` hears why."""

    def __init__(self, choice: GraphChoice, dtype: torch.dtype) -> None:
        self.on_decided: Callable[[dict[str, Any]], None] = lambda _: None
        self._choice, self._dtype = choice, dtype
        self._num_steps = 0
        self._host_shares: list[float] = []
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape: tuple[Any, ...] = ()
        self._inputs: list[torch.Tensor] = []
        self._rates: list[torch.Tensor] = []
        self._last_rates: list[float] = []
        self._outcome: StepOutcome | None = None

    def __call__(
        self, engine: Engine, optimizer: Optimizer, batch: StepBatch, on_phase: OnPhase, run: RunStep
    ) -> StepOutcome:
        """Trains on one global batch: ``run`` does it kernel by kernel."""
        self._num_steps += 1
        if self._num_steps <= _TIMED[-1]:
            return self._timed(lambda: run(batch, on_phase))
        if self._num_steps == _TIMED[-1] + 1:
            self._decide(engine, optimizer, batch, run)
        if self._graph is not None and _shape(batch) == self._shape:
            return self._replay(engine, optimizer, batch, on_phase)
        return run(batch, on_phase)

    def _timed(self, run: Callable[[], StepOutcome]) -> StepOutcome:
        """Runs a step on the stream that a graph will be recorded on, and takes the host's share of its time."""
        if self._num_steps in _TIMED:
            torch.cuda.synchronize()
        start = time.perf_counter()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outcome = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        issued = time.perf_counter()
        if self._num_steps in _TIMED:
            torch.cuda.synchronize()
            self._host_shares.append((issued - start) / (time.perf_counter() - start))
        return outcome

    def _decide(self, engine: Engine, optimizer: Optimizer, batch: StepBatch, run: RunStep) -> None:
        """Records the step of a batch, where that pays and is possible; nothing is computed yet."""
        share, device = sorted(self._host_shares)[len(self._host_shares) // 2], engine.device
        if self._choice != "on" and share < _HOST_BOUND:
            self.on_decided({"used": False, "why": f"the host took {share:.0%} of a step: the device is busy"})
            return
        placed = place(batch.microbatches, device, self._dtype)
        static = tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, placed)
        rates = [torch.tensor(float(group["lr"]), device=device) for group in optimizer.param_groups]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has memory of its own
        try:
            # Of this thread alone: another one reads batches ahead, and may allocate memory meanwhile.
            recording = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
            with _capturable(optimizer, rates), recording:
                outcome = run(replace(batch, microbatches=static), ignore_phase)
        except Exception as error:  # a host that reads what the device computes, memory that runs out, ...
            torch.cuda.synchronize()
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if self._choice == "on":
                raise TrainingError(
                    f"train.cuda_graphs = true: the step cannot be recorded: {reason}\n"
                    "  a graph replays the same kernels: nothing in the step may wait for the device, or branch on "
                    "what it computed\n  take train.cuda_graphs = auto, which goes on without a graph"
                ) from error
            self.on_decided({"used": False, "why": f"the step cannot be recorded: {reason}"})
            return
        self._graph, self._outcome, self._shape = graph, outcome, _shape(batch)
        self._inputs, self._rates = _tensors(static), rates
        self._last_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.on_decided({"used": True, "why": f"the host took {share:.0%} of a step", "counted_as": "forward"})

    def _replay(self, engine: Engine, optimizer: Optimizer, batch: StepBatch, on_phase: OnPhase) -> StepOutcome:
        assert self._graph is not None
        assert self._outcome is not None
        for target, source in zip(self._inputs, _tensors(batch.microbatches), strict=True):
            target.copy_(source, non_blocking=True)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if isinstance(optimizer, MasterAdamW):
            optimizer.upload_rates()
        elif rates != self._last_rates:
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)
            self._last_rates = rates
        self._graph.replay()
        engine.mark_updated()
        on_phase("forward")
        outcome = self._outcome
        # Copies: the next replay writes into the same memory.
        count = outcome.count.clone() if isinstance(outcome.count, torch.Tensor) else outcome.count
        return replace(outcome, loss_sum=outcome.loss_sum.clone(), count=count, grad_norm=outcome.grad_norm.clone())


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]


def _shape(batch: StepBatch) -> tuple[Any, ...]:
    """Returns what must be the same for a graph to stand for a step."""
    return (batch.global_samples, *((each.shape, each.dtype) for each in _tensors(batch.microbatches)))


@contextmanager
def _capturable(optimizer: Optimizer, rates: Sequence[torch.Tensor]) -> Iterator[None]:
    """Lets an optimizer read its learning rates from the device for a while."""
    groups = optimizer.param_groups
    before = [(group["lr"], group.get("capturable")) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"], group["capturable"] = rate, True
    try:
        yield
    finally:
        for group, (rate, is_capturable) in zip(groups, before, strict=True):
            group["lr"] = rate
            if is_capturable is not None:
                group["capturable"] = is_capturable
            else:
                del group["capturable"]
