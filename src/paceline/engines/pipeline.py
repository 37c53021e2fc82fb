"""Pipeline parallelism: every rank holds some stages of the model, and microbatches flow through them.

Per step and rank, for P ranks, M microbatches whose activations between stages take A bytes, and v stages a rank:

    memory          1/P of parameters, gradients and optimizer state, + activations of the microbatches in flight
    communication   A forward and A backward for each microbatch and stage, from neighbour to neighbour
    idle            (P-1) / (M+P-1) of the step for GPipe and 1F1B, less for interleaved and zero-bubble schedules

One executor runs any schedule: it walks this rank's row of actions (see schedules.py), and knows nothing of the grid.

- A receive is posted when the schedule says so, ahead of its use; a send is forgotten until something that comes back
  tells that it has arrived. Nothing but the use of what is missing waits.
- A stage is an engine of its own, which reduces with the last backward of the step and accumulates before it.
- The loss is called on every rank that needs it: on the first stage as far as its call of the model, which tells what
  the inputs are; on the last stage with a model that returns what came through the pipeline.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.clock import on_device
from paceline.comm.base import Communicator, Work
from paceline.engines.batchnorm import SyncBatchNorm
from paceline.engines.engine import LossFunction, OnPhase, Scale
from paceline.engines.groups import differentiable_in, wait_for_all
from paceline.engines.loss_sums import DetachedLoss, LossSum, differentiable_sum
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.nodes import DeferredWeights, WeightPart, input_part
from paceline.engines.sequences import part_of
from paceline.engines.stages.links import Arrival, Links, hand_over, map_tensors, shape_key
from paceline.engines.stages.stages import Stage
from paceline.errors import UsageError
from paceline.models.attention import use_part
from paceline.schedule.grid import Action, RankProgram, Schedule, lower


class _Asked(BaseException):
    """Carries what a loss calls the model with. Not an Exception: a loss that catches those must not catch this."""


@dataclass(slots=True)
class _Flight:
    """One microbatch at one stage, between its forward and the end of its backward."""

    inputs: list[Tensor]  # those whose gradients go back
    roots: list[Tensor]
    gradients: list[Tensor | None] | None  # of the roots, where they are known: not before backward comes
    part: WeightPart | None


class Pipeline:
    """Runs microbatches through the stages of this rank and of the others."""

    def __init__(
        self, stages: Mapping[int, ModuleEngine], pipe: Communicator, make_schedule: Callable[[int], Schedule]
    ) -> None:
        """Takes this rank's engines by stage, and what makes the schedule for a number of microbatches."""
        first = make_schedule(1)
        self.stages = dict(sorted(stages.items()))
        self.pipe = pipe
        self._make_schedule = make_schedule
        self.placement = first.placement
        self.num_stages = first.stages
        self.splits_backward = first.splits_backward
        self.journal: list[Action] = []  # what the last step did, in order
        self.on_action: Callable[[Action], None] | None = None  # hears of each action when it is done
        self.peak_in_flight = 0  # microbatches whose activations were held at once, over all steps
        self._links = Links(pipe, first.placement)
        self._programs: dict[int, RankProgram] = {}
        self._sent: deque[list[Work]] = deque()  # by evaluations
        self._kept: Any = None
        for engine in self.stages.values() if self.num_stages > 1 else ():
            engine.interleave()
        # By stage, the earlier ones of this rank that own a parameter which it uses.
        self.owner_stages: dict[int, list[int]] = {stage: [] for stage in self.stages}
        if self.splits_backward:
            for stage, engine in self.stages.items():
                engine.module.register_forward_hook(self._keep_output)
                borrowed = engine.module.borrowed_ids() if isinstance(engine.module, Stage) else set()
                self.owner_stages[stage] = [
                    other
                    for other, owner in self.stages.items()
                    if any(id(parameter) in borrowed for parameter in owner.module.parameters())
                ]

    def run(self, microbatches: Sequence[Any], loss: LossFunction, scale: Scale, on_phase: OnPhase) -> list[LossSum]:
        """Leaves the gradients of all microbatches, reduced; returns the losses, on the rank of the last stage."""
        while self._sent:
            wait_for_all(self._sent.popleft())
        program = self.program(max(len(microbatches), 1))
        step = _Step(self, microbatches or [None], loss, scale, program)
        self.journal = []
        for action in program.actions:
            step.do(action)
            self.journal.append(action)
            if self.on_action is not None:
                self.on_action(action)
            if action.kind in _PHASES:
                on_phase(_PHASES[action.kind])
        for works in step.sends.values():
            wait_for_all(works)
        return step.values

    @torch.no_grad()
    def evaluate(self, compute: LossFunction, batch: Any) -> Any:
        """Runs one batch through all stages; returns the result on the last one. Sends are not waited for."""
        key, handed, result, works = shape_key(batch, "evaluation"), None, None, list[Work]()
        for stage, engine in self.stages.items():
            if stage and self.placement[stage - 1] != self.pipe.rank:
                handed = self._links.post_inputs(stage, key).take()
            if self._is_end(stage):
                result = compute(_once(engine, handed if stage else None), batch)
                continue
            args, kwargs = ((handed,), {}) if stage else model_inputs(compute, batch)
            handed = engine(*args, **kwargs)
            if self.placement[stage + 1] != self.pipe.rank:
                works += self._links.send_outputs(stage + 1, key, handed)
        self._sent.append(works)
        if len(self._sent) > 2:
            wait_for_all(self._sent.popleft())
        return result

    def share_values(self, values: Sequence[LossSum]) -> LossSum:
        """Returns the summed loss and count of a step on every rank of the pipeline: the last stage has them."""
        device = self.pipe.device
        rows = [torch.stack([on_device(v.total, device), on_device(v.count, device)]) for v in values]
        sums = torch.stack(rows).sum(0) if rows else torch.zeros(2, dtype=torch.float64, device=device)
        if self.pipe.size > 1:
            self.pipe.broadcast(sums, self.placement[-1]).wait()
        return DetachedLoss(sums[0], sums[1])

    def _is_end(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    def program(self, microbatches: int) -> RankProgram:
        if microbatches not in self._programs:
            programs = lower(self._make_schedule(microbatches))
            self._programs[microbatches] = _prepare(programs, self.pipe.rank, self.placement)
        return self._programs[microbatches]

    def _keep_output(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Keeps a stage's output for the input part of backward; the engine watches a view, and sees one backward."""
        if not torch.is_grad_enabled():
            return None
        self._kept = output
        return map_tensors(lambda tensor: tensor.view_as(tensor), output)


_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


class _Step:
    """One step: what is in flight, has arrived, or is under way."""

    def __init__(
        self, owner: Pipeline, microbatches: Sequence[Any], loss: LossFunction, scale: Scale, program: RankProgram
    ) -> None:
        self.values: list[LossSum] = []
        self._owner, self._links, self._program = owner, owner._links, program
        self._loss, self._scale = loss, scale
        self._microbatches = microbatches
        # Of each, its part of the rows, where ranks share them.
        shares_rows = next(iter(owner.stages.values())).groups.sequences is not None
        self._parts = [part_of(each) for each in microbatches] if shares_rows else []
        self._keys: list[Hashable] = [shape_key(batch, "training") for batch in microbatches]
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._outputs: dict[tuple[int, int], Any] = {}  # until they are sent
        self._arrivals: dict[Action, Arrival] = {}
        self._late: dict[int, deque[Action]] = {}  # receives that could not be posted yet, by stage
        self._handed: dict[Action, Any] = {}  # between two stages of this rank, under the receive it stands for
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}  # of inputs, until they are sent
        self._last: dict[int, Action] = {}  # by stage, what gives its parameters their last gradients
        for action in program.actions:
            if action.kind in ("B", "W"):
                self._last |= dict.fromkeys(self._receivers(action), action)
        self.sends: dict[Action, list[Work]] = {}

    def do(self, action: Action) -> None:
        """Does one action; those of a microbatch without samples are nothing, or a pass to join."""
        kind, stage, number = action.kind, action.stage, action.microbatch
        if kind == "R":
            return  # the engine reduced with the backward before it
        if self._parts and self._microbatches[number] is not None:
            use_part(self._parts[number])  # until the next action: a backward pass may run a part of forward again
        if self._microbatches[number] is None:
            self._join(action)
        elif kind == "F":
            self._forward(action)
        elif kind == "B":
            self._backward(action)
        elif kind == "I":
            self._input_part(action)
        elif kind == "W":
            self._weight_part(action)
        elif kind == "SF":
            output = self._outputs.pop((stage, number))
            self.sends[action] = self._links.send_outputs(stage + 1, self._keys[number], output)
        elif kind == "SB":
            self.sends[action] = self._links.send_gradients(stage, self._gradients.pop((stage, number)))
        elif kind == "RB":
            self._arrivals[action] = self._links.post_gradients(stage, self._flights[stage, number].roots)
        elif self._late.get(stage) or not self._links.knows(stage, self._keys[number]):
            # The first of its shape is not described yet; to wait for that here might be to wait for oneself. What
            # comes behind it waits too: messages are taken in the order in which they are sent.
            self._late.setdefault(stage, deque()).append(action)
        else:
            self._post_inputs(action)

    def _forward(self, action: Action) -> None:
        owner, stage, number = self._owner, action.stage, action.microbatch
        engine, batch = owner.stages[stage], self._microbatches[number]
        handed = self._take(Action("RF", stage, number)) if stage else None
        part = WeightPart() if owner.splits_backward else None
        deferring = contextlib.nullcontext() if part is None else DeferredWeights(part)
        with self._syncing(action, stage), deferring, engine.precision.context(engine.device):
            if owner._is_end(stage):
                roots, gradients = self._end_forward(engine, handed if stage else None, batch)
            else:
                args, kwargs = ((handed,), {}) if stage else model_inputs(self._loss, batch)
                output = engine(*args, **kwargs)
                self._outputs[stage, number] = output
                roots, gradients = differentiable_in(owner._kept if part else output), None
        owner._kept = None
        self._flights[stage, number] = _Flight(differentiable_in(handed), roots, gradients, part)
        owner.peak_in_flight = max(owner.peak_in_flight, len(self._flights))
        if not owner._is_end(stage) and owner.placement[stage + 1] == owner.pipe.rank:
            self._handed[Action("RF", stage + 1, number)] = hand_over(self._outputs.pop((stage, number)))

    def _end_forward(self, engine: ModuleEngine, handed: Any, batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """Runs the last stage and the loss; returns where backward begins."""
        is_split = self._owner.splits_backward
        leaves: list[Any] = []

        def cut(output: Any) -> Any:
            if not is_split:
                return output
            leaves.append(hand_over(output))
            return leaves[0]

        value = differentiable_sum(self._loss(_once(engine, handed, cut), batch))
        # Not the sum itself: its graph would hold the stage's inputs, and their gradients, until the step is over.
        self.values.append(DetachedLoss(value.total.detach(), value.count))
        total = value.total if self._scale is None else value.total * self._scale
        if not is_split:
            return [total], [None]
        found = torch.autograd.grad(total, differentiable_in(leaves[0]), allow_unused=True)
        pairs = zip(differentiable_in(self._owner._kept), found, strict=True)
        kept = [(root, gradient) for root, gradient in pairs if gradient is not None]
        return [root for root, _ in kept], [gradient for _, gradient in kept]

    def _backward(self, action: Action) -> None:
        flight = self._flights.pop((action.stage, action.microbatch))
        gradients = self._take_gradients(action, flight)
        with self._syncing(action, action.stage):
            if flight.roots:
                torch.autograd.backward(flight.roots, gradients)
            else:  # nothing here has a gradient
                self._owner.stages[action.stage].join_backward()
        self._give_gradients(action, flight, [tensor.grad for tensor in flight.inputs])

    def _input_part(self, action: Action) -> None:
        flight = self._flights[action.stage, action.microbatch]
        assert flight.part is not None
        gradients = self._take_gradients(action, flight)
        module = self._owner.stages[action.stage].module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        found: list[Tensor | None] = []
        if flight.roots:
            found = input_part(flight.roots, gradients, flight.inputs, parameters, flight.part)
        self._give_gradients(action, flight, found or [None] * len(flight.inputs))
        flight.roots, flight.inputs, flight.gradients = [], [], None

    def _weight_part(self, action: Action) -> None:
        flight = self._flights.pop((action.stage, action.microbatch))
        assert flight.part is not None
        flight.part.multiply()
        for stage in self._receivers(action):  # one engine after another, as on a rank without samples
            engine = self._owner.stages[stage]
            with self._syncing(action, stage):
                if not flight.part.give(engine.module.parameters()):
                    engine.join_backward()

    def _receivers(self, action: Action) -> list[int]:
        """Returns the stages whose parameters a backward gives gradients: its own, then those that it borrows from."""
        return [action.stage, *self._owner.owner_stages[action.stage]]

    def _syncing(self, action: Action, stage: int) -> contextlib.AbstractContextManager[None]:
        """Lets a stage's engine reduce if no later action of the step gives it gradients, else accumulate."""
        last = self._last[stage]
        is_last = last.microbatch == action.microbatch if action.kind == "F" else last == action
        return contextlib.nullcontext() if is_last else self._owner.stages[stage].no_sync()

    def _join(self, action: Action) -> None:
        if action.kind not in ("F", "B", "W"):
            return
        engine = self._owner.stages[action.stage]
        if engine.gradient_comm.size > 1 and any(isinstance(each, SyncBatchNorm) for each in engine.module.modules()):
            raise UsageError(
                f"microbatch {action.microbatch} has no samples on this rank, and stage {action.stage} has "
                "synchronised batch norms\n"
                "  those exchange statistics in the order of the schedule, where a rank without samples has no part\n"
                "  set data.last_batch = drop, or a global batch that every rank has a share of"
            )
        if action.kind == "F":
            with self._syncing(action, action.stage):
                engine.join_forward()
            return
        for stage in self._receivers(action):
            with self._syncing(action, stage):
                self._owner.stages[stage].join_backward()

    def _take(self, receive: Action) -> Any:
        """Returns what a neighbour gave, and lets go of the sends that have arrived, as that tells."""
        if receive in self._handed:
            return self._handed.pop(receive)
        while receive not in self._arrivals:
            self._post_inputs(self._late[receive.stage].popleft())
        tree = self._arrivals.pop(receive).take()
        for send in self._program.released.get(receive, ()):
            wait_for_all(self.sends.pop(send, []))
        return tree

    def _take_gradients(self, action: Action, flight: _Flight) -> list[Tensor | None]:
        if flight.gradients is not None:
            return flight.gradients
        return list(self._take(Action("RB", action.stage, action.microbatch)))

    def _give_gradients(self, action: Action, flight: _Flight, found: Sequence[Tensor | None]) -> None:
        """Keeps the gradients of a stage's inputs for the stage before; zeros where there is none."""
        if action.stage == 0:
            return
        pairs = zip(flight.inputs, found, strict=True)
        gradients = [torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in pairs]
        if self._owner.placement[action.stage - 1] == self._owner.pipe.rank:
            self._handed[Action("RB", action.stage - 1, action.microbatch)] = gradients
        else:
            self._gradients[action.stage, action.microbatch] = gradients

    def _post_inputs(self, action: Action) -> None:
        self._arrivals[action] = self._links.post_inputs(action.stage, self._keys[action.microbatch])


def model_inputs(compute: LossFunction, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a loss calls the model with for a batch: runs it up to that call."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        raise _Asked(args, kwargs)

    try:
        compute(ask, batch)
    except _Asked as asked:
        args, kwargs = asked.args
        return args, kwargs
    raise UsageError("the loss does not call the model\n  it is called as loss(model, batch), and calls model(inputs)")


def _once(engine: ModuleEngine, handed: Any, cut: Callable[[Any], Any] = lambda output: output) -> Callable[..., Any]:
    """Returns the model that a loss sees on the last stage: it takes what came through the pipeline, once."""
    calls: list[None] = []

    def model(*args: Any, **kwargs: Any) -> Any:
        if calls:
            raise UsageError(
                "the loss calls the model twice\n  a pipeline carries one forward for each microbatch\n"
                "  call it once, on all inputs together, or train without a pipeline"
            )
        calls.append(None)
        return cut(engine(*args, **kwargs) if handed is None else engine(handed))

    return model


def _prepare(programs: Sequence[Sequence[Action]], rank: int, placement: Sequence[int]) -> RankProgram:
    """Finds in the programs of all ranks what this rank's sends and backwards must know."""
    actions = tuple(programs[rank])
    last = {action.stage: action.microbatch for action in actions if action.kind in ("B", "W")}
    position = {action: place for program in programs for place, action in enumerate(program)}

    def computed(kind: str, stage: int, number: int) -> int:
        kinds = ("F",) if kind == "F" else ("B", "I")
        return next(position[a] for k in kinds if (a := Action(k, stage, number)) in position)  # type: ignore[arg-type]

    # A send has arrived when the peer has used it. That it has is known once something comes that it made later.
    open_sends = [
        (action, placement[peer], computed("F" if action.kind == "SF" else "B", peer, action.microbatch))
        for action in actions
        if action.kind in ("SF", "SB")
        for peer in [action.stage + (1 if action.kind == "SF" else -1)]
    ]
    released: dict[Action, tuple[Action, ...]] = {}
    for action in actions:
        if action.kind in ("RF", "RB"):
            source = action.stage + (-1 if action.kind == "RF" else 1)
            made = computed("F" if action.kind == "RF" else "B", source, action.microbatch)
            past = [each for each in open_sends if each[1] == placement[source] and each[2] < made]
            released[action] = tuple(send for send, _, _ in past)
            open_sends = [each for each in open_sends if each not in past]
    return RankProgram(actions, last, released)
