"""Data parallelism: every rank holds the whole model and a share of the batch; gradients are averaged.

Per step and rank, for P bytes of parameters on N ranks:

    memory          parameters + gradients + optimizer state: 16 P / 4 with fp32 Adam
    communication   all-reduce of the gradients: 2 P (N-1)/N, issued bucket by bucket as gradients arrive

The life of a gradient. Autograd hands a parameter its gradient; a hook counts it in. When the last one of a bucket is
there, the bucket is all-reduced while backward goes on with earlier layers. Buckets leave in one order on all ranks.
At the end of backward what is missing is sent as zeros, and the step waits for what is still under way.

- The first synchronised backward only watches: it learns the order in which gradients arrive and how often, sends
  everything at its end, and the buckets are rebuilt to fit.
- The last bucket carries one flag per parameter: was it used? So a parameter used on some ranks counts as zero on the
  others, one used on no rank keeps no gradient, and no extra collective is needed to know.
- One rank alone has nothing to reduce and watches no gradients: the hooks would be pure cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.base import BucketShape, GradientCompression, control_device
from paceline.engines.buckets.buckets import BucketPolicy, BucketTuner, ParameterSize, arrival_order, bucket_parameters
from paceline.engines.buckets.gradients import Arrivals, ReplicaBucket
from paceline.engines.flat.optimizer_state import on_cpu
from paceline.engines.flat.shard import reduce_norm
from paceline.engines.groups import Groups, differentiable_in, reduction, set_flags
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.precision import Masters, Precision, hand_over
from paceline.plan.layout import Layout
from paceline.shards import own_optimizer_state


class DataParallel(ModuleEngine):
    """Replicates a module over the ranks of ``groups.gradients`` and keeps the replicas in step."""

    can_leave_pass = True

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        layout: Layout | None = None,
        precision: Precision | None = None,
        compression: GradientCompression | None = None,
    ) -> None:
        super().__init__(module, groups, layout or Layout(), precision or Precision())
        comm = groups.gradients
        self._held = list(module.parameters())  # by the module; what is updated are the same, or their masters
        self._masters = Masters(module, self.precision.param_dtype)
        self._parameters = self._masters.parameters
        names = [name for name, _ in module.named_parameters()]
        self._updated = dict(zip(names, self._parameters, strict=True))
        self.precision.cast_buffers(module)
        self._compression = compression
        self._arrivals: Arrivals[ReplicaBucket] = Arrivals(
            names, overlap=self.layout.overlap, graph_fix="run that backward inside engine.no_sync()"
        )
        self._trainable: list[int] = []
        self._order: list[int] = []  # in which gradients arrive, once it is known
        self._tuner: BucketTuner | None = None  # while the size of buckets is to be found
        if comm.size > 1:
            if self.layout.tunes_buckets:
                self._tuner = BucketTuner(comm, BucketPolicy.of(self.layout, comm), overlap=self.layout.overlap)
            self._start_over()
        elif self.precision.param_dtype is not None:
            self._watch()

    @property
    def _spread(self) -> str:
        return f"ddp, nothing sharded, buckets: {len(self._arrivals.buckets)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_comm.size == 1 or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if self._trainable != [i for i, p in enumerate(self._held) if p.requires_grad]:
            self._start_over()
        elif self._arrivals.is_open:  # left over from a backward that raised
            self._reset()
            if self._compression is not None:
                self._compression.abandon_pass()
        if self._is_syncing and self.module.training:
            self._share_buffers()
        output = self._forward(*args, **kwargs)
        for tensor in differentiable_in(output):
            tensor.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]
        return output

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients, of which all ranks hold the same: the local norm is the global one, but for experts."""
        if not self.experts and math.isinf(max_norm):
            found = [p.grad for p in self._parameters if p.grad is not None]
            left = self._masters.norms_left(norm_type)
            if not left:
                return nn.utils.get_total_norm(found, norm_type)
            norms = torch.stack([*left, *(torch._foreach_norm(found, norm_type) if found else ())])
            return cast("Tensor", torch.linalg.vector_norm(norms, norm_type))
        self._masters.collect_gradients()
        if not self.experts:
            return nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type)
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        dense = nn.utils.get_total_norm([g for name, g in gradients.items() if name not in self.experts], norm_type)
        mine = nn.utils.get_total_norm([g for name, g in gradients.items() if name in self.experts], norm_type)
        power = mine if math.isinf(norm_type) else mine**norm_type
        others = reduce_norm(power.to(self.device), self.groups.expert, norm_type)
        norm = nn.utils.get_total_norm([dense.to(others), others], norm_type)
        if not math.isinf(max_norm):
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def gradients(self) -> list[Tensor]:
        self._masters.collect_gradients()
        return super().gradients()

    @property
    def can_fuse_cast(self) -> bool:
        return self._masters.can_fuse_cast

    def fuse_cast(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return self._masters.fuse_cast()

    def join_forward(self) -> None:
        """Shares the buffers as the others do in their forward, unless one that failed halfway has done so."""
        is_asked = torch.is_grad_enabled() and self._is_syncing and self.module.training
        if self.gradient_comm.size > 1 and is_asked and not self._are_buffers_shared:
            self._share_buffers()

    def join_backward(self) -> None:
        """Sends what the others wait for, without a backward of its own, and waits for what is under way."""
        if not self._is_syncing:
            return
        self.mark_updated()
        if self.gradient_comm.size > 1:
            if self.module.training and not self._are_buffers_shared:
                self._share_buffers()
            self._finish()

    def abandon_accumulation(self) -> None:
        """Forgets the passes since the last one that reduced: they have left nothing but gradients."""

    def forget_pass(self) -> None:
        """Drops what a pass that failed on some rank has taught: the next backward watches again. All ranks call it."""
        if self._compression is not None:
            self._compression.roll_back()
        if self.gradient_comm.size > 1:
            self._start_over()

    def _gather_state(self, *, rank0_only: bool) -> dict[str, Tensor]:
        state = {} if rank0_only and self.gradient_comm.rank != 0 else self._masters.state_dict()
        return {name: on_cpu(value) for name, value in state.items()}

    def mark_loaded(self) -> None:
        self._masters.may_have_changed = True
        self._masters.refresh()

    def mark_updated(self) -> None:
        self._masters.expect_update()

    def _load_state(self, state: dict[str, Tensor]) -> None:
        self._masters.load_state_dict(state)

    def _gather_optimizer_state(self, optimizer: Optimizer, *, rank0_only: bool) -> dict[str, Any]:
        return {} if rank0_only and self.gradient_comm.rank != 0 else on_cpu(own_optimizer_state(optimizer))

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        self._masters.collect_gradients()
        return super()._gather_gradients()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._masters.refresh()
        if self.precision.param_dtype is not None and self.gradient_comm.size == 1:
            self._watch()
        return super()._forward(*args, **kwargs)

    # Backward: gradients arrive, buckets leave.

    def _enter_backward(self, _: Tensor) -> None:
        """Runs when backward enters the module: what is missing at its end is sent then."""
        if self._is_syncing and not self._arrivals.is_open:
            if self._tuner is not None:
                self._tuner.begin()
            self._arrivals.open(self._finish)

    def _arrive(self, index: int, parameter: Tensor) -> None:
        """Counts a gradient in; runs as autograd's hook, once for each gradient."""
        gradient, arrivals = parameter.grad, self._arrivals
        if not self._is_syncing or gradient is None:
            return
        arrivals.check(index, gradient)
        if not arrivals.is_open:
            self._enter_backward(gradient)
        if self._tuner is not None and arrivals.expected is None:
            self._tuner.arrive(index)
        complete = arrivals.count(index, may_leave=False)
        if complete is None:
            return
        bucket, place = complete
        if bucket.is_large[place] and bucket.scale != 1.0:
            bucket.copy_in(place, gradient, bucket.scale)
        if bucket.num_missing == 0:
            for each in arrivals.take_leaving(is_end=False):
                self._launch(each)

    def _arrive_at_master(self, index: int, parameter: Tensor) -> None:
        """Hands a gradient over to its master, in the dtype of that; runs as autograd's hook instead of ``_arrive``."""
        gradient, master, masters = parameter.grad, self._parameters[index], self._masters
        if gradient is None:
            return
        if self._is_syncing or gradient.is_sparse:
            self._arrivals.check(index, gradient)
        elif gradient.requires_grad:
            return  # differentiated again by the user; it joins the next gradient
        stays = masters.is_cast_fused and self._is_syncing and self.gradient_comm.size == 1 and master.grad is None
        if master is not self._held[index] and not stays:
            if master.grad is None and self.gradient_comm.size > 1:
                bucket, place = self._arrivals.place_of[index]
                parameter.grad, master.grad = None, bucket.cast(place, gradient)
            else:  # nothing to reduce: its own memory, freed with it
                hand_over(parameter, master)
        if self._is_syncing:
            masters.expect_update()
        if self.gradient_comm.size > 1:
            self._arrive(index, master)

    def _launch(self, bucket: ReplicaBucket) -> None:
        self._fill(bucket)
        self._send(bucket)

    def _fill(self, bucket: ReplicaBucket) -> None:
        used = [self._parameters[i].grad is not None for i in self._trainable] if bucket.num_flags else []
        bucket.fill(bucket.scale)
        if bucket.num_flags:
            set_flags(bucket.flags, used)

    def _send(self, bucket: ReplicaBucket) -> None:
        buffer = bucket.buffer
        if buffer is None or not buffer.numel():
            return
        if bucket.compressed is not None:
            bucket.work = bucket.compressed.start(buffer, bucket.comm)
            return
        if self.precision.reduce_dtype is not None and self.precision.reduce_dtype != buffer.dtype:
            bucket.wire = buffer = buffer.to(self.precision.reduce_dtype)
        bucket.work = bucket.comm.all_reduce(buffer, reduction(bucket.comm))

    @torch.no_grad()
    def _finish(self) -> None:
        """Ends a synchronised backward: sends the rest, waits, and finds out who has a gradient."""
        missing = [i for i in self._trainable if self._parameters[i].grad is None]
        if self._tuner is not None and self._tuner.is_watching:  # one by one, so that each can be timed
            buckets = list(self._arrivals.take_leaving(is_end=True))
            for bucket in buckets:
                self._fill(bucket)
            self._tuner.end_backward()
            for bucket in buckets:
                self._send(bucket)
                bucket.wait()
            self._tuner.end_watched(len(buckets))
        for bucket in self._arrivals.take_leaving(is_end=True):
            self._launch(bucket)
        for bucket in self._arrivals.buckets:
            bucket.wait()
        if missing:
            self._fill_missing(missing)
        if self._compression is not None:
            self._compression.end_pass()
        self._learn()
        self._reset()
        self._end_pass()

    def _fill_missing(self, missing: list[int]) -> None:
        """Gives parameters that this rank did not use the gradient of the ranks that did. Reads the flags: a sync."""
        used = dict(zip(self._trainable, (self._arrivals.buckets[-1].flags > 0).tolist(), strict=True))
        for index in missing:
            bucket, place = self._arrivals.place_of[index]
            self._parameters[index].grad = bucket.gradient(place) if used[index] else None
        if self._compression is not None:
            self._compression.keep_residuals([self._arrivals.names[index] for index in missing if not used[index]])

    def _learn(self) -> None:
        """Keeps what this backward has taught: how often gradients arrive, in which order, and how fast."""
        tuner, arrivals = self._tuner, self._arrivals
        if tuner is not None and tuner.is_watching:
            self._build()  # once more, with other buckets
            return
        is_first = arrivals.expected is None
        if is_first:  # for the order in which gradients arrived on rank 0; the counts are each rank's own
            place = {index: position for position, index in enumerate(self._trainable)}
            order = arrival_order([place[index] for index in arrivals.seen], len(self._trainable))
            agreed = torch.tensor(order, dtype=torch.int64, device=control_device(self.gradient_comm))
            self.gradient_comm.broadcast(agreed).wait()
            self._order = [self._trainable[i] for i in agreed.tolist()]
            self._build()
        arrivals.learn()
        if not is_first and tuner is not None and tuner.end_overlapped():
            self._tuner = None
            self.bucket_choice = tuner.choose(self._sizes(), self._order)  # the size that the ranks find best
            self._build()

    def _watch(self) -> None:
        self._trainable = [i for i, p in enumerate(self._held) if p.requires_grad]
        self._masters.follow()
        arrive = DataParallel._arrive if self.precision.param_dtype is None else DataParallel._arrive_at_master
        self._arrivals.watch(self, arrive, {index: self._held[index] for index in self._trainable})

    def _sizes(self) -> list[ParameterSize]:
        return [
            ParameterSize(num_bytes=p.numel() * p.element_size(), kind=f"{p.dtype} {p.device} {shared.gradients.ranks}")
            for p, shared in zip(self._parameters, map(self.groups.of, self._held), strict=True)
        ]

    def _start_over(self) -> None:
        """Makes the buckets anew, for what is trainable now: the next backward watches."""
        if self._tuner is not None:
            self._tuner.start([size for size, p in zip(self._sizes(), self._held, strict=True) if p.requires_grad])
        self._arrivals.expected, self._order = None, []
        self._build()
        self._reset()

    def _build(self) -> None:
        """Makes the buckets: last defined first until the order of arrival is known."""
        self._watch()
        order = self._order or list(reversed(self._trainable))
        source = self._tuner or self.bucket_choice
        policy = BucketPolicy.of(self.layout, self.gradient_comm) if source is None else source.policy
        members = bucket_parameters(self._sizes(), order, policy)
        # The last one carries the flags, so that it is one of all ranks, if there is any.
        sharing = {each: self.groups.of(self._held[each[0]]) for each in members}
        dense = [each for each in members if sharing[each].gradients is self.gradient_comm]
        members = [each for each in members if each not in dense[-1:]] + dense[-1:]
        buckets = []
        for group in members:
            num_flags = len(order) if group is members[-1] else 0
            shared = sharing[group]
            scale = shared.scale if self._compression is None else 1.0  # a compression averages by itself
            parameters = [self._parameters[i] for i in group]
            buckets.append(ReplicaBucket(group, parameters, shared.gradients, scale, num_flags))
        if self._compression is not None:
            names = [tuple(self._arrivals.names[i] for i in bucket.members) for bucket in buckets]
            pairs = zip(names, buckets, strict=True)
            shapes = [BucketShape(names=each, layout=b.layout, tail=b.num_flags) for each, b in pairs]
            for bucket, compressed in zip(buckets, self._compression.bind(shapes), strict=True):
                bucket.compressed = compressed
        elif self._order:  # agreed on by all ranks: they can make something together
            for bucket in [each for each in buckets if not each.adopts]:
                # Where all ranks can reach it, if the communicator has such memory: less is copied.
                buffer = bucket.comm.shared_buffer(bucket.layout.length, bucket.parameters[0].dtype)
                if buffer is not None:
                    bucket.use(buffer)
        self._arrivals.arrange(buckets)

    def _reset(self) -> None:
        self._arrivals.reset()
        self._are_buffers_shared = False
