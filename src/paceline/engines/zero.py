"""ZeRO: every rank computes with the whole model and updates a slice of it. Stage 1 shards the optimizer's state, stage
2 the gradients too.

Per step and rank, for P fp32 parameters on N ranks with Adam:

    memory          stage 1   8 P + 8 P / N bytes    parameters and gradients whole, moments sharded
                    stage 2   4 P + 12 P / N bytes   and two buckets of gradients on their way
    communication   reduce-scatter of the gradients and all-gather of the parameters: 4 P (N-1)/N bytes each way

The life of a gradient is that of data parallelism, but that a bucket is reduce-scattered. The slice that arrives is the
gradient of this rank's *pieces*, which a plain optimizer updates; before the next forward reads them, the pieces are
gathered into the whole again (gathering.py).

- A bucket is a flat group, fixed from the start, since optimizers hold its pieces. The first backward learns in which
  order buckets are complete.
- Inside ``no_sync``, stage 1 adds up whole gradients and sends nothing. Stage 2 sends all the same, and adds up slices.
- One flag for each parameter (was it used?) is summed up behind the buckets; only a rank that misses a gradient waits
  for the answer. The squares of the slices travel along: clipping by the global norm finds their sum there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.comm.base import DONE, Communicator, Work, control_device
from paceline.engines.buckets.buckets import BucketPolicy, ParameterSize, bucket_parameters
from paceline.engines.buckets.gradients import Arrivals, BufferPool, SlicedBucket
from paceline.engines.flat.flat import FlatGroup, is_alone
from paceline.engines.flat.gathering import Gathering
from paceline.engines.flat.shard import clip_pieces, measured_norms
from paceline.engines.groups import Groups, differentiable_in, expert_dim, set_flags
from paceline.engines.module_engine import ModuleEngine, own_region
from paceline.engines.precision import Precision, kept_parameters
from paceline.errors import UsageError
from paceline.plan.layout import Layout, Offload
from paceline.shards import Shard


class ZeroParallel(ModuleEngine):
    """Trains a module on the ranks of ``groups.gradients``, each of which updates a slice of the parameters."""

    can_leave_pass = True

    def __init__(self, module: nn.Module, groups: Groups, layout: Layout, precision: Precision | None = None) -> None:
        super().__init__(module, groups, layout, precision or Precision())
        comm, offload = groups.gradients, layout.offload
        is_offloaded = offload.moves_states and comm.device.type != "cpu"
        self.precision.cast_buffers(module)
        self._named = dict(module.named_parameters())
        if comm.size > 1 or self.precision.param_dtype is not None or is_offloaded:
            policy = BucketPolicy.of(layout, comm)
            self.flat_groups = _make_groups(module, groups, policy, self.precision, offload)
        self._frozen = _cast_frozen(module, self.precision.param_dtype)
        pieces = {n: p for g in self.flat_groups for n, p in zip(g.layout.names, g.pieces, strict=True)}
        self._updated = {**self._named, **pieces}
        self._is_trainable = [parameter.requires_grad for parameter in self._named.values()]
        self._gathering = Gathering(module, list(reversed(self.flat_groups)))
        self._gathering.owner = self  # the modules' hooks hold the gathering: so the module keeps the engine alive
        self._arrivals: Arrivals[SlicedBucket] = Arrivals(
            [name for group in self.flat_groups for name in group.layout.names],
            overlap=self.layout.overlap,
            graph_fix="use torch.autograd.grad(..., create_graph=True), which leaves the parameters' gradients alone",
        )
        pool = BufferPool() if self.layout.strategy == "zero2" else None
        ends = list(itertools.accumulate(len(group.layout.names) for group in self.flat_groups))
        self._fixed = [  # parameters are numbered in the order of the groups
            SlicedBucket(group, range(end - len(group.layout.names), end), pool)
            for group, end in zip(self.flat_groups, ends, strict=True)
        ]
        # The places of buckets in ``_fixed``, in the order of this rank's backward, until all ranks have agreed on one.
        self._own_order: list[int] | None = [] if comm.size > 1 and len(self._fixed) > 1 else None
        self._summary = _BackwardSummary(comm, self.flat_groups)
        self._arrivals.arrange(self._fixed)
        parameters = (parameter for group in self.flat_groups for parameter in group.parameters)
        self._arrivals.watch(self, ZeroParallel._arrive, dict(enumerate(parameters)))
        self._reset()

    @property
    def _spread(self) -> str:
        sharded = "optimizer state" if self.layout.strategy == "zero1" else "gradients and optimizer state"
        return f"{self.layout.strategy}, {sharded} sharded, buckets: {len(self.flat_groups)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return self._forward(*args, **kwargs)
        is_training = torch.is_grad_enabled()
        if is_training:
            self._prepare()
        self._gathering.begin(is_overlapped=is_training and self.layout.overlap)
        try:
            output = self._forward(*args, **kwargs)
        finally:
            self._gathering.end()
        if is_training:
            enter = functools.partial(self._enter_backward, self._gathering.version)
            for tensor in differentiable_in(output):
                tensor.register_hook(enter)  # type: ignore[no-untyped-call]
        return output

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        squares = self._summary.take_squares() if norm_type == 2.0 else None
        return clip_pieces(list(self._updated.values()), self.gradient_comm, max_norm, norm_type, squares=squares)

    def join_pass(self) -> None:
        """Takes part in a pass of the others; after one that failed on this rank, completes that one for them."""
        if self._arrivals.is_open and not self._arrivals.reduces:
            self._drop_failed()  # the others wait for nothing of it
        super().join_pass()

    def join_forward(self) -> None:
        if self._is_plain:
            return
        if torch.is_grad_enabled() and self._is_syncing and self.module.training and not self._are_buffers_shared:
            self._share_buffers()
        self._gathering.refresh()

    def join_backward(self) -> None:
        if self._reduces and not self._is_plain:
            self._arrivals.forget_counts()  # nothing is learnt from a pass not made
            self._finish()

    def _gather_state(self, *, rank0_only: bool) -> dict[str, Tensor]:
        state = super()._gather_state(rank0_only=rank0_only)
        for name, built in self._frozen.items() if state else ():
            if torch.equal(state[name], built.to(state[name].dtype)):  # else somebody has changed it since
                state[name] = built.clone()
        return state

    def _load_state(self, state: dict[str, Tensor]) -> None:
        super()._load_state(state)
        self._frozen = {name: state[name].to("cpu", built.dtype, copy=True) for name, built in self._frozen.items()}
        self._gathering.may_have_changed = True

    def shards(self) -> Iterator[Shard]:
        """Yields what this rank holds; of frozen parameters that were cast, the values they were built with."""
        for shard in super().shards():
            built, held = self._frozen.get(shard.name), shard.tensor.detach()
            if built is None:
                yield shard
                continue
            if not torch.equal(held, built.to(held)):  # somebody has changed it since
                built.copy_(held)
            yield dataclasses.replace(shard, tensor=built, region=own_region(built), parameter=shard.tensor)

    @torch.no_grad()
    def mark_loaded(self) -> None:
        super().mark_loaded()
        for name, built in self._frozen.items():
            if name in self._named:  # else the second name of one that is shared
                self._named[name].data.copy_(built)
        self._gathering.may_have_changed = True

    def _prepare(self) -> None:
        pieces = [self._updated[name].requires_grad for name in self._named]
        is_trainable = [parameter.requires_grad for parameter in self._named.values()]
        if is_trainable != self._is_trainable or pieces != self._is_trainable:
            self._arrivals.expected = None
            for place, (name, own, piece) in enumerate(zip(self._named, is_trainable, pieces, strict=True)):
                # As the one of the two that has changed: users may have the parameter or its piece in hand.
                now = own if piece == self._is_trainable[place] else piece
                if now and name not in self._arrivals.names:
                    raise UsageError(
                        f"{name} was frozen when the engine was built, and requires a gradient now\n"
                        "  an optimizer holds pieces of the parameters that were trainable then\n"
                        "  build the engine with it trainable, and freeze it afterwards"
                    )
                self._named[name].requires_grad_(now)
                self._updated[name].requires_grad_(now)
                self._is_trainable[place] = now
        if self._arrivals.is_open:
            self._drop_failed()
        if self._is_syncing and self.module.training:
            self._share_buffers()

    def _drop_failed(self) -> None:
        for bucket in self._fixed:
            bucket.abandon()
        self._reset()

    # Backward: gradients arrive, buckets leave.

    @property
    def _reduces(self) -> bool:
        return self._is_syncing or self.layout.strategy == "zero2"

    def _enter_backward(self, version: int, _: Tensor) -> None:
        """Runs when backward enters the module: what is missing at its end is sent then."""
        if self._arrivals.is_open:
            return
        if version != self._gathering.version:
            raise UsageError(
                "parameters were updated between a forward pass and its backward\n"
                "  gradients would mix values from before and after the update\n"
                "  call optimizer.step() after the backward passes of all outputs that are needed"
            )
        self._arrivals.open(self._finish, reduces=self._reduces)

    def _arrive(self, index: int, parameter: Tensor) -> None:
        """Counts a gradient in; runs as autograd's hook, once for each gradient."""
        gradient, arrivals = parameter.grad, self._arrivals
        if gradient is None:
            return
        arrivals.check(index, gradient)
        if not arrivals.is_open:
            self._enter_backward(self._gathering.version, gradient)
        complete = arrivals.count(index, may_leave=True)
        if complete is None:
            return
        bucket, place = complete
        has_room = self.layout.strategy == "zero1" or bucket is arrivals.buckets[arrivals.num_left]
        if has_room and bucket.is_large[place] and bucket.group.shared.scale != 1.0:
            self._make_room(arrivals.num_left)
            bucket.copy_in(place, gradient, bucket.group.shared.scale)
        if bucket.num_missing == 0:
            for each in arrivals.take_leaving(is_end=False):
                self._launch(each)

    def _launch(self, bucket: SlicedBucket) -> None:
        self._make_room(self._arrivals.num_left - 1)
        bucket.fill(bucket.group.shared.scale)
        if self._reduces:
            bucket.send()

    def _make_room(self, place: int) -> None:
        """Keeps at most two whole buckets of gradients in stage 2: waits for the one before the last."""
        if self.layout.strategy == "zero2" and place > 1:
            self._arrivals.buckets[place - 2].wait(is_last=self._is_syncing)

    @torch.no_grad()
    def _finish(self) -> None:
        """Ends a backward: sends the rest, waits, and finds out who has a gradient."""
        for bucket in self._arrivals.take_leaving(is_end=True):
            self._launch(bucket)
        if not self._reduces:
            for bucket in self._fixed:
                bucket.show_placeholder()
        else:
            for bucket in self._arrivals.buckets:
                bucket.wait(is_last=self._is_syncing)
                if self._is_syncing:
                    bucket.group.gradients.measure()  # while the others are under way
            for group in self.flat_groups:
                group.gradients.finish()
            if self._is_syncing:
                used = [flag for bucket in self._fixed for flag in bucket.end_accumulation()]
                self._summary.send(used)
                self._drop_unused([index for index, is_used in enumerate(used) if not is_used])
                self._summary.note_measured()
        self._learn()
        self._reset()
        self._gathering.may_have_changed |= self._is_syncing
        if self._is_syncing:
            self._end_pass()

    def _drop_unused(self, missing: list[int]) -> None:
        """Takes the gradient from pieces of parameters that no rank has used. Reads the flags: a sync."""
        places = {index: self._arrivals.place_of[index] for index in missing}
        if any(bucket.parameters[place].requires_grad for bucket, place in places.values()):
            used = self._summary.used_anywhere()
            missing = [index for index in missing if not used[index]]
        for index in missing:
            bucket, place = places[index]
            bucket.group.pieces[place].grad = None

    def _learn(self) -> None:
        """Keeps how often gradients arrived; agrees with rank 0 on the order in which buckets are complete."""
        arrivals = self._arrivals
        if arrivals.expected is None and arrivals.seen:
            last = {arrivals.place_of[index][0]: moment for moment, index in enumerate(arrivals.seen)}
            ends = [last.get(bucket, len(arrivals.seen)) for bucket in self._fixed]
            if self._own_order is not None:
                self._own_order = sorted(range(len(ends)), key=ends.__getitem__)
        if arrivals.expected is not None or arrivals.seen:
            arrivals.learn()
        if self._own_order is not None and self._reduces:
            order = torch.tensor(self._own_order or [-1] * len(self._fixed), device=control_device(self.gradient_comm))
            self.gradient_comm.broadcast(order).wait()
            agreed = order.tolist()
            if agreed[0] >= 0:  # else rank 0 has had no samples so far
                self._own_order = None
                arrivals.arrange([self._fixed[place] for place in agreed])
                self._gathering.arrange([bucket.group for bucket in reversed(arrivals.buckets)])

    def _reset(self) -> None:
        self._arrivals.reset()
        self._are_buffers_shared = False


class _BackwardSummary:
    """What ranks add up behind the buckets: the squares of their slices, and a 1 for what they have used."""

    def __init__(self, comm: Communicator, groups: Sequence[FlatGroup]) -> None:
        self._comm = comm
        self._groups = groups
        wide = groups[0].dtype if groups else torch.float32
        num_parameters = sum(len(group.layout.names) for group in groups)
        self._sums = torch.zeros(1 + num_parameters, dtype=wide, device=comm.device)
        self._work: Work = DONE
        self._measured: list[tuple[int, list[bool]]] = []  # by group: which gradient, and of which pieces
        self._has_squares = False

    def send(self, used: Sequence[bool]) -> None:
        """Sends which parameters were used here, and how large this rank's gradients are, to be added up."""
        self._work.wait()
        set_flags(self._sums[1:], used)
        norms = measured_norms(group.gradients for group in self._groups)
        self._has_squares = norms is not None
        if norms is not None:
            stacked = torch.stack(norms).to(self._sums.dtype)
            self._sums[0] = torch.dot(stacked, stacked)
        self._work = self._comm.all_reduce(self._sums)

    def used_anywhere(self) -> list[float]:
        """Returns how many ranks have used each parameter. A sync point."""
        self._work.wait()
        return cast("list[float]", self._sums[1:].tolist())

    def note_measured(self) -> None:
        """Notes which gradients the squares are those of, now that it is known who has one."""
        self._measured = [(g.gradients.version, g.has_gradient) for g in self._groups] if self._has_squares else []

    def take_squares(self) -> Tensor | None:
        """Returns the sum of all ranks' squares, once; None unless it is that of the gradients there are now."""
        measured, self._measured = self._measured, []
        for group, (version, had) in zip(self._groups if measured else (), measured, strict=True):
            if not group.gradients.is_of_version(version) or group.has_gradient != had:
                return None
        if not measured:
            return None
        self._work.wait()
        return self._sums[0]


def parameters_to_bucket(module: nn.Module, dtype: torch.dtype | None) -> tuple[list[ParameterSize], list[int]]:
    """Returns the sizes of what is trainable, in the order of definition, and the order in which buckets fill.

    The bytes are those of a gather, which is the smaller of a bucket's two collectives: in ``dtype``, if it has one.
    """
    kept = kept_parameters(module)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sizes = []
    for index, p in enumerate(trainable, start=1):
        kind = f"{p.dtype} {p in kept} {index * is_alone(p)} {expert_dim(p) is None}"
        itemsize = p.element_size() if dtype is None or p in kept else dtype.itemsize
        sizes.append(ParameterSize(num_bytes=p.numel() * itemsize, kind=kind))
    return sizes, list(reversed(range(len(trainable))))


def _make_groups(
    module: nn.Module, groups: Groups, policy: BucketPolicy, precision: Precision, offload: Offload
) -> list[FlatGroup]:
    kept = kept_parameters(module)
    as_built = dataclasses.replace(precision, param_dtype=None)
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    found = []
    for members in bucket_parameters(*parameters_to_bucket(module, precision.param_dtype), policy):
        pairs = [named[index] for index in members]
        group = FlatGroup(pairs, groups.of(pairs[0][1]), as_built if pairs[0][1] in kept else precision, offload)
        group.keep_slice(in_place=True)
        found.append(group)
    return found


def _cast_frozen(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Casts the frozen parameters where they lie; returns them as they were built, on the host, for state dicts."""
    if dtype is None:
        return {}
    kept = kept_parameters(module)
    built: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and parameter.is_floating_point() and parameter not in kept:
            built[name] = parameter.detach().to("cpu", copy=True)
    for parameter in {module.get_parameter(name) for name in built}:
        parameter.data = parameter.data.to(dtype)
    return built
