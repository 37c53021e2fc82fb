"""Fully sharded data parallelism (ZeRO 3): a rank keeps a slice of everything, and gathers a unit when it needs it.

Per step and rank, for P bytes of parameters on N ranks in units of U bytes:

    memory          16 P / 4 N with fp32 Adam, + parameters and gradients of two units (4 U)
    communication   all-gather in forward and again in backward, reduce-scatter of gradients: 3 P (N-1)/N
    hybrid          the same within a shard group of S ranks, + all-reduce of slices over R replicas: 2 P/S (R-1)/R
    besides         an all-reduce of one byte per parameter: was it used?

The life of a unit. Before its forward the ranks gather it, while the unit before it still computes; after it, it is
freed again. Backward gathers it once more, ahead of use. When the gradient has come out at the unit's inputs, all
its parameters' gradients are there: they are brought into one flat buffer, which is reduce-scattered while backward
goes on. What autograd saved are views into the flat buffer, whose memory came back with the same values.

- The order of collectives is a route (``gathering.py``): learnt in the first pass, the same on all ranks, so a rank may
  skip a unit, or join a pass without samples, and none waits for ever.
- The root unit (what no other unit has) stays gathered from forward to the end of backward; so does the last unit
  called, which backward needs first, a unit that is called several times, and one that is read beside its calls.
- Every backward reduces, also inside ``no_sync``: accumulated gradients are sharded. Only the exchange between the
  replicas of a hybrid mesh, which a compression may replace, and the flags wait for the last microbatch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, BucketShape, Communicator, GradientCompression, Work
from paceline.engines.flat.gathering import Leg, Route, Table
from paceline.engines.flat.shard import SideStream, clip_pieces, measured_norms
from paceline.engines.flat.unit import Call, Crossing, Pass, Unit, read_note
from paceline.engines.groups import Groups, differentiable_in, set_flags, tensors_in
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.precision import Precision
from paceline.errors import UsageError
from paceline.plan.layout import Layout


class FullySharded(ModuleEngine):
    """Shards a module's parameters, gradients and optimizer state over the ranks of a group."""

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        units: Sequence[Unit],
        layout: Layout,
        precision: Precision,
        compression: GradientCompression | None = None,
    ) -> None:
        """Takes units that are built already (``materialize.py``), the root last. ``compression`` is over replicas."""
        super().__init__(module, groups, layout, precision)
        self._units = list(units)
        self._root = self._units[-1]
        self.flat_groups = [group for unit in self._units for group in unit.groups]
        gathers, reductions = SideStream(self.device), SideStream(self.device)
        for group in self.flat_groups:
            group.gathers, group.gradients.side_stream = gathers, reductions
        for unit in self._units if self._is_plain else ():
            unit.use()
        self._updated = dict(module.named_parameters())  # the pieces, unless units are in use
        self._compression = compression if groups.replicate.size > 1 else None
        if self._compression is not None:
            layouts = [group.layout for group in self.flat_groups]
            shapes = [BucketShape(names=each.names, layout=each, shard=(each.start, each.stop)) for each in layouts]
            bound = self._compression.bind(shapes, groups.replicate)
            for group, compressed in zip(self.flat_groups, bound, strict=True):
                group.gradients.compressed = compressed
        order = [Leg(unit.index, "gather") for unit in (self._root, *self._units[:-1])]
        training = self._route(order)
        self._pass = Pass(training, self._route(order), forward=training, backward=training)
        self._interleaves = False
        self._flags = UsedFlags(self.gradient_comm, list(self._updated))
        self._has_noted_reads = False

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Hooks into the units' modules, the model itself last."""
        if self._is_plain:
            return
        for unit, module in zip(self._units, modules, strict=True):
            module.register_forward_pre_hook(lambda _, a, k, unit=unit: self._enter(unit, a, k), with_kwargs=True)
            module.register_forward_hook(lambda _module, _args, output, unit=unit: self._leave(unit, output))
        names = {module: name for name, module in self.module.named_modules()}
        tables: dict[nn.Module, tuple[Table, ...]] = {}
        for unit in self._units[:-1]:
            tables |= unit.notice_reads(functools.partial(self._read, unit, names))
        self._root.put_into(tables)

    def interleave(self) -> None:
        """Prepares for a pipeline: nothing stays gathered from a forward to its backward, as others come in between."""
        self._interleaves = True

    @property
    def _is_plain(self) -> bool:
        return self.groups.replicate.size == 1 and not any(group.has_copy for group in self.flat_groups)

    @property
    def _spread(self) -> str:
        shards = f"all sharded over {self.groups.shard.size}, replicas: {self.groups.replicate.size}"
        return f"{self.layout.strategy}, {shards}, units: {len(self._units)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_syncing and self.module.training and torch.is_grad_enabled():
            self.share_buffers()
        try:
            with self.precision.context(self.device):
                return self._run_module(*args, **kwargs)
        except BaseException:
            self._pass.is_forward = False  # what is read from now on is read outside of a forward
            raise

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norms = measured_norms(group.gradients for group in self.flat_groups) if norm_type == 2.0 else None
        return clip_pieces(list(self._updated.values()), self.groups.shard, max_norm, norm_type, norms=norms)

    def join_forward(self) -> None:
        if self.gradient_comm.size > 1:
            if torch.is_grad_enabled() and self._is_syncing and self.module.training:
                self.share_buffers()
            self._begin_forward()
            self._end_forward()

    def join_backward(self) -> None:
        if self.gradient_comm.size > 1:
            self._begin_backward()
            self._finish()

    def abandon_accumulation(self) -> None:
        super().abandon_accumulation()
        self.forget_pass()

    def forget_pass(self) -> None:
        """Takes back what the last pass has changed beside the gradients, which are dropped. All ranks call it."""
        if self._compression is not None:
            self._compression.roll_back()

    # Forward: a unit is gathered, used, freed.

    def _enter(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        now = self._pass
        if unit is self._root:
            self._begin_forward()
            self._reach(unit, now.forward)
            return self.precision.cast_inputs((args, kwargs))
        if now.is_backward:  # a checkpointed part runs again
            self._reach_in_backward(unit)
            if unit.num_blind_calls and torch.is_grad_enabled():
                unit.num_blind_calls -= 1
                self._watch_inputs(unit, args, kwargs)
            return None
        if not now.is_forward:  # called by itself, outside the model's forward
            unit.start_gather()
            unit.use()
        elif unit.pass_number != now.number or not unit.in_use:
            self._reach(unit, now.forward)
        if torch.is_grad_enabled():
            unit.open_calls[now.forward_number] += 1
            self._watch_inputs(unit, args, kwargs)
        elif self._is_training_forward:  # a re-entrant checkpoint: the graph comes later
            unit.open_calls[now.forward_number] += 1
            unit.num_blind_calls += 1
        return None

    @property
    def _is_training_forward(self) -> bool:
        """Whether a forward is under way that has a backward to come."""
        return self._pass.is_forward and self._pass.forward is self._pass.training

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """Asks to be called when the gradients of a call's inputs are there."""
        now = self._pass
        inputs = differentiable_in((args, kwargs))
        call = Call(unit, now.undone if now.is_backward else now.forward_number, len(inputs))
        for tensor in inputs:
            self._crossing(tensor).ends.append(call)

    def _read(self, unit: Unit, names: Mapping[nn.Module, str], module: nn.Module) -> bool:
        """Gathers a unit until backward ends, if a parameter is read beside its calls; returns whether it is there."""
        now = self._pass
        if torch._guards.TracingContext.try_get() is not None:
            return False  # torch.compile only looks: it fails at a piece, and the function runs as it is
        if now.is_forward:
            route = now.forward
            if route is self._pass.training and not route.is_learning and Leg(unit.index, "gather") not in route.read:
                raise UsageError(
                    f"parameters of {names[module]} are read beside calls of their unit ({unit.name}), "
                    "which is new after the first pass\n"
                    "  the first pass settles when all ranks reduce the gradients of a unit, "
                    "and this one's would come too late\n"
                    f"  read them in the first step too, or leave {unit.name} to the root: units=... without it"
                )
            unit.readers.add(names[module])
            now.read.add(unit)
            self._reach(unit, route, is_read=True)
        elif now.is_backward and torch._C._current_graph_task_id() != -1:
            self._reach_in_backward(unit)
        return unit.in_use

    def _leave(self, unit: Unit, output: Any) -> None:
        now = self._pass
        if unit is self._root:
            self._end_forward()
            if now.forward is now.evaluation or self._interleaves:
                unit.free()
            self._mark_outputs(unit, output)
            return
        if now.is_backward:
            return
        has_graph = self._mark_outputs(unit, output)
        if now.is_forward and now.forward.is_learning and unit not in now.read:
            mine = {group.full.untyped_storage()._cdata for group in unit.groups}
            if any(tensor.untyped_storage()._cdata in mine for tensor in tensors_in(output)):
                self._read(unit, {self.module: unit.name}, self.module)  # a view of a parameter, whose memory must stay
        # A re-entrant checkpoint runs without a graph, and will need the unit in backward all the same.
        if has_graph or self._is_training_forward:
            if not self._stays(unit):
                unit.reshard(self.groups.regather)
        elif unit not in now.read and not (now.is_forward and Leg(unit.index, "gather") in now.forward.repeated):
            unit.free()

    def _mark_outputs(self, unit: Unit, output: Any) -> bool:
        """Asks to be called when backward enters the unit; returns whether it can."""
        tensors = differentiable_in(output) if torch.is_grad_enabled() else []
        for tensor in tensors:
            crossing = self._crossing(tensor)
            if all(call.unit is not unit for call in crossing.ends):  # else an input that the unit hands on
                crossing.begins.append(unit)
        return bool(tensors)

    def _stays(self, unit: Unit) -> bool:
        """Whether a unit stays gathered until its backward. The same on every rank; known after the first pass."""
        if self._interleaves:
            return False
        leg, legs = Leg(unit.index, "gather"), self._pass.training.legs
        is_last = legs is not None and legs[-1] == leg
        is_kept = leg in self._pass.training.repeated or leg in self._pass.training.read
        return self.layout.reshard_after_forward is False or is_last or is_kept

    def _reach(self, unit: Unit, route: Route, *, is_read: bool = False) -> None:
        unit.pass_number = self._pass.number
        route.reach(Leg(unit.index, "gather"), is_read=is_read)
        unit.use()

    def _begin_forward(self) -> None:
        now = self._pass
        now.forward = self._pass.training if torch.is_grad_enabled() else self._pass.evaluation
        now.num_forwards += now.forward is self._pass.training
        now.forward_number += self._interleaves
        now.number += 1
        now.is_forward, now.is_backward = True, False
        for group in self.flat_groups:
            group.gradients.drop()
        for unit in self._units:
            unit.begin_forward()
        for leg in self._pass.training.read:
            self._units[leg.unit].hide()  # it may be in use since a forward before
        now.forward.begin()

    def _end_forward(self) -> None:
        now = self._pass
        is_first = now.forward.is_learning
        now.forward.finish()
        now.is_forward = False
        if now.forward is self._pass.evaluation or self._interleaves:
            for unit in (*now.read, *(self._units[leg.unit] for leg in now.forward.repeated)):
                unit.free()
        now.read.clear()
        if is_first and now.forward.read and self.gradient_comm.rank == 0 and not self._has_noted_reads:
            self._has_noted_reads = True
            read = [self._units[leg.unit] for leg in sorted(now.forward.read)]
            warnings.warn(read_note(self.module, self._units[:-1], read), stacklevel=2)

    # Backward: a unit is gathered again; its gradients leave when they have come out at its inputs.

    def _crossing(self, tensor: Tensor) -> Crossing:
        """Returns the crossing at a tensor; one hook serves the units on both sides."""
        found: Crossing | None = getattr(tensor, "_paceline_crossing", None)
        if found is not None and found.engine is self and not tensor.is_leaf:
            return found
        crossing = Crossing(self, self._pass.forward_number)
        handle = tensor.register_hook(lambda _: self._cross(crossing))  # type: ignore[no-untyped-call]
        if tensor.is_leaf:
            crossing.handle = handle  # a leaf outlives the graph, and so would its hook
        else:
            tensor._paceline_crossing = crossing  # type: ignore[attr-defined]
        return crossing

    def _cross(self, crossing: Crossing) -> None:
        """Runs when the gradient of a tensor between units is there: they are left and entered in this order."""
        if not self._pass.is_backward:
            self._pass.undone = next((call.forward for call in crossing.ends), crossing.forward)
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        for call in crossing.ends:
            call.num_inputs -= 1
            if call.num_inputs == 0:
                self._close_call(call, is_at_leaf=crossing.handle is not None)
        if crossing.handle is not None:
            crossing.handle.remove()
        for unit in sorted(crossing.begins, key=lambda unit: unit is not self._root):  # the root holds the others
            self._reach_in_backward(unit)

    def _begin_backward(self) -> None:
        now = self._pass
        now.is_backward = True
        now.number += 1
        for unit in self._units:
            unit.is_complete = False
        if self._interleaves:
            now.num_forwards = 1
        if now.num_forwards not in self._pass.backwards:
            self._pass.backwards[now.num_forwards] = self._route(self._backward_order())
        now.backward = self._pass.backwards[now.num_forwards]
        now.backward.begin()

    def _backward_order(self) -> list[Leg]:
        """Returns the way of forward, from its end: who has come to a unit is done with those behind it."""
        root, learned = self._root.index, self._pass.training.legs
        forward = [leg.unit for leg in learned] if learned else [unit.index for unit in self._units]
        legs = [Leg(root, "gather"), *sorted(self._pass.training.read)] if self._interleaves else []
        for unit in reversed(forward):
            if unit != root:
                legs += [leg for leg in (Leg(unit, "gather"), Leg(unit, "reduce")) if leg not in legs]
        return [*legs, Leg(root, "reduce")]

    def _reach_in_backward(self, unit: Unit) -> None:
        if not unit.in_use:
            self._reach(unit, self._pass.backward)
        elif unit is not self._root:
            # Not sooner: backward begins with the loss, when the memory is fullest.
            self._pass.backward.look_ahead()
        if unit is self._root and self._interleaves:
            for leg in sorted(self._pass.training.read):
                self._reach_in_backward(self._units[leg.unit])

    def _close_call(self, call: Call, *, is_at_leaf: bool = False) -> None:
        """Ends the backward of a call: with the last one open, the unit's gradients are all there.

        At a leaf (the input of a re-entrant checkpoint) they may still be on their way, until that backward ends.
        """
        if is_at_leaf:
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._close_call, call))
            return
        unit, route = call.unit, self._pass.backward
        if call.forward in unit.open_calls:
            unit.open_calls[call.forward] -= 1
        if unit.open_calls.get(call.forward) != 0 or not self._pass.is_backward:
            return
        if Leg(unit.index, "gather") in self._pass.training.read:  # more gradients may come, and nothing tells when
            return
        unit.is_complete = True
        if route.is_learning:
            route.reach(Leg(unit.index, "reduce"))
        else:
            route.reach_ready(lambda leg: self._units[leg.unit].is_complete)
        unit.free()

    @torch.no_grad()
    def _finish(self) -> None:
        """Ends a backward: reduces the rest, waits, and finds out who has a gradient."""
        now = self._pass
        now.backward.finish(drop=lambda leg: leg.is_gather and self._stays(self._units[leg.unit]))
        self._finish_reduce()
        now.reducing = now.landing = None
        now.is_backward = False
        now.num_forwards = 0
        for unit in self._units:
            unit.open_calls.pop(now.undone, None)  # whatever calls were not part of it
            unit.num_blind_calls = 0
            unit.free()
        left = [unit for unit in self._units if any(p.grad is not None for g in unit.groups for p in g.parameters)]
        if left:
            names = ", ".join(unit.name or "the root" for unit in left)
            raise UsageError(
                f"gradients of {names} came after the ranks had reduced them\n"
                "  the first backward settles the order in which all ranks reduce their units\n"
                "  call the units in the same order in every step, or make one unit of those whose order changes"
            )
        if self._is_syncing:
            for group in self.flat_groups:
                group.gradients.finish()
            self._finish_gradients()
            self._end_pass()

    def _finish_gradients(self) -> None:
        """Ends a step's gradients: those of the replicas are averaged, and a parameter that no rank used has none."""
        replicated = self._units if self.groups.replicate.size > 1 else []
        for unit in replicated:
            unit.start_replicate()
        unused = [name for name in self._updated if name not in self._pass.used]
        missing = [name for name in unused if self._updated[name].requires_grad]
        frozen = [name for name in unused if not self._updated[name].requires_grad]
        if self.gradient_comm.size > 1:
            missing = self._flags.ask_others(self._pass.used, missing)
        for name in (*frozen, *missing):
            self._updated[name].grad = None
        for unit in replicated:
            unit.finish_replicate()
        if self._compression is not None:
            dropped = [name for name, piece in self.named_parameters() if piece.grad is None]
            self._compression.keep_residuals(dropped)
            self._compression.end_pass(self.groups.shard)
        self._pass.used.clear()

    # What the routes call.

    def _route(self, order: Sequence[Leg]) -> Route:
        names = [unit.name or "root" for unit in self._units]
        return Route(self.groups.shard, order, names, self._issue, self._release, self.layout.prefetch)

    def _issue(self, leg: Leg) -> None:
        unit, now = self._units[leg.unit], self._pass
        if leg.is_gather:
            unit.start_gather()
            return
        with torch.no_grad():
            if now.landing is not None:
                for group in now.landing.groups:
                    group.gradients.finish()  # on the host: the device holds no more of them
            self._finish_reduce()  # two units' gradients at a time
            now.used.update(unit.start_reduce(averages_replicas=self._compression is None))
            now.landing, now.reducing = now.reducing, unit

    def _finish_reduce(self) -> None:
        if self._pass.reducing is not None:
            is_final = self._is_syncing and self.groups.replicate.size == 1
            self._pass.reducing.finish_reduce(is_last=self._is_syncing, is_final=is_final)

    def _release(self, leg: Leg) -> None:
        """Lets go of a unit that was gathered for the others; all keep a slice of it where backward will need that."""
        unit = self._units[leg.unit]
        if unit.in_use:
            return
        if self._is_training_forward and unit is not self._root and not self._stays(unit):
            unit.reshard(self.groups.regather)
        else:
            unit.free()


class UsedFlags:
    """Which parameters some rank has used: an all-reduce of one byte for each, of which few ranks need the answer."""

    def __init__(self, comm: Communicator, names: Sequence[str]) -> None:
        self._comm = comm
        self._names = tuple(names)
        self._flags = torch.ones(len(names), dtype=torch.uint8, device=comm.device)
        self._work: Work = DONE

    def ask_others(self, used: Collection[str], missing: list[str]) -> list[str]:
        """Sends what was used here; returns the missing that no rank used. Who misses none does not wait for it."""
        self._work.wait()
        set_flags(self._flags, [name in used for name in self._names] if missing else ())
        self._work = self._comm.all_reduce(self._flags, "max")
        if not missing:
            return []
        self._work.wait()
        # sync point, for models that leave parameters unused
        used_anywhere = dict(zip(self._names, self._flags.tolist(), strict=True))
        return [name for name in missing if not used_anywhere[name]]
