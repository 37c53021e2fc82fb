"""Data parallelism: every rank holds the whole model and a share of the batch; gradients are averaged.

Per step and rank, for P bytes of parameters on N ranks:

    memory          parameters + gradients + optimizer state: 16 P / 4 with fp32 Adam
    communication   all-reduce of the gradients: 2 P (N-1)/N, issued bucket by bucket as gradients arrive

The life of a gradient. Autograd hands a parameter its gradient; a hook counts it in. When the last one of a bucket is
there, the bucket is all-reduced while backward goes on with earlier layers. Buckets leave in one order on all ranks.
At the end of backward what is missing is sent as zeros, and the step waits for what is still under way.

- Gradients are views into the bucket's flat buffer: nothing is copied out. A gradient that autograd made elsewhere
  is moved in once, all of a bucket together; one that is alone in its bucket becomes the buffer itself.
- The first synchronised backward only watches: it learns the order in which gradients arrive and how often (twice
  under re-entrant checkpointing), sends everything at its end, and the buckets are rebuilt to fit. Where their size is
  to be found too, a few more passes watch (see bucket_tuner.py).
- The last bucket carries one flag per parameter: was it used? So a parameter used on some ranks counts as zero on the
  others, one used on no rank keeps no gradient, and no extra collective is needed to know.
- One rank alone has nothing to reduce and watches no gradients: the hooks would be pure cost.
- A compression (see comm/compress) takes the place of a bucket's all-reduce: it makes the bucket small when it is
  complete, so that its bytes leave during backward, and makes gradients of what came when the step waits for it.
- With masters (see masters.py) the buckets hold the masters' gradients: a gradient is cast as it is brought in.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from paceline.comm.base import (
    DONE,
    BucketReduction,
    BucketShape,
    Communicator,
    GradientCompression,
    control_device,
)
from paceline.engines.agree import tensors_in
from paceline.engines.batchnorm import standing_in
from paceline.engines.buckets.buckets import BucketPolicy, ParameterSize, arrival_order, bucket_parameters
from paceline.engines.buckets.ddp_bucket import GradientBucket
from paceline.engines.buckets.tuner import BucketTuner
from paceline.engines.engine import BufferPolicy, ModuleEngine
from paceline.engines.flat.flat import gradient_scale, reduction
from paceline.engines.flat.masters import Masters
from paceline.engines.flat.optimizer_state import load_optimizer_state
from paceline.engines.precision import Precision
from paceline.errors import UsageError

_LARGE_BYTES = 2**18  # about what a second-level cache holds


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPPolicy:
    """What may be chosen about data parallelism. With ``tunes_buckets``, ``buckets`` holds until it is known better."""

    buckets: BucketPolicy = field(default_factory=BucketPolicy)
    buffers: BufferPolicy = "broadcast"
    overlap: bool = True
    tunes_buckets: bool = False


class DataParallel(ModuleEngine):
    """Replicates a module over the ranks of ``comm`` and keeps the replicas in step."""

    can_leave_pass = True

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        policy: DDPPolicy | None = None,
        precision: Precision | None = None,
        compression: GradientCompression | None = None,
    ) -> None:
        self.policy = policy or DDPPolicy()
        super().__init__(module, comm, precision or Precision(), self.policy.buffers)
        self.holds_first_copy = comm.rank == 0
        self._names = [name for name, _ in module.named_parameters()]
        self._held = list(module.parameters())  # by the module; what is updated are the same, or their masters
        self._masters = None if self.precision.param_dtype is None else Masters(module, self.precision.param_dtype)
        self._parameters = self._held if self._masters is None else self._masters.parameters
        self.precision.cast_buffers(module)
        is_plain = self._masters is None and self.precision.autocast_dtype is None
        self._forward: Callable[..., Any] = module if is_plain else self._forward_in_precision
        # NCCL averages while it reduces. Gloo would take a second pass over the sum, so on a CPU the division is part
        # of the pass that brings the gradients into the bucket. A compression averages by itself.
        self._reduction = reduction(comm)
        self._compression = compression
        self._scale = gradient_scale(comm) if compression is None else 1.0
        self._reductions: dict[GradientBucket, BucketReduction] = {}
        self._trainable: list[int] = []
        self._buckets: list[GradientBucket] = []
        self._place_of: dict[int, tuple[GradientBucket, int]] = {}
        self._moved_at_once: set[int] = set()
        self._next_bucket = 0
        self._observed: list[int] = []
        self._arrival: list[int] = []
        self._expected: list[int] | None = None
        self._arrived: list[int] = []
        self._is_backward_known = False
        self._has_shared_buffers = False
        self._hooked: set[int] = set()
        self._bucket_policy = self.policy.buckets
        self._tuner: BucketTuner | None = None  # while the size of buckets is to be found
        if comm.size > 1:
            if self.policy.tunes_buckets:
                self._tuner = BucketTuner(comm, self.policy.buckets, overlap=self.policy.overlap)
            self._start_over()
        elif self._masters is not None:
            self._watch()

    # What users call.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; in training, prepares the replicas for the backward pass that follows."""
        if self.comm.size == 1 or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if self._trainable != [i for i, p in enumerate(self._held) if p.requires_grad]:
            self._start_over()
        elif self._is_backward_known:  # left over from a backward that raised
            self._reset()
            if self._compression is not None:
                self._compression.abandon_pass()
        if self._is_syncing and self.module.training:
            self._share_buffers()
        output = self._forward(*args, **kwargs)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return output

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterates over what this rank updates: for data parallelism, every parameter."""
        return iter(self._parameters)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterates over what this rank updates, under the module's own names."""
        return iter(zip(self._names, self._parameters, strict=True))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients so that their global norm is at most ``max_norm``; returns the norm before.

        After reduction every rank holds the same gradients, so the local norm is the global one. An infinite
        ``max_norm`` only measures.
        """
        if math.isinf(max_norm):
            return nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None], norm_type)
        return nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type)

    def sit_out(self) -> None:
        """Takes part in a pass of the other ranks: in their reduction, for without gradients they need nobody."""
        with standing_in(self.module):
            if torch.is_grad_enabled() and self._is_syncing:
                self._join()

    def _join(self) -> None:
        """Sends what this rank owes without a backward of its own, and waits for what is under way."""
        if self._masters is not None:
            self._masters.may_have_changed = True
        if self.comm.size == 1:
            return
        if self.module.training and not self._has_shared_buffers:
            self._share_buffers()  # as the others did in their forward
        self._finish()

    def forget_pass(self) -> None:
        """Drops what a pass that failed on some rank has taught: the next backward watches again. All ranks call it."""
        if self._compression is not None:
            self._compression.roll_back()
        if self.comm.size > 1:
            self._start_over()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns all parameters and buffers on the CPU under their own names; empty on the others if rank 0 only."""
        if rank0_only and self.comm.rank != 0:
            return {}
        state = self.module.state_dict() if self._masters is None else self._masters.state_dict()
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

    def mark_loaded(self) -> None:
        """Tells the engine that the shards have new values: the module's parameters follow their masters."""
        if self._masters is not None:
            self._masters.may_have_changed = True
            self._masters.refresh()

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads what ``full_state_dict`` gave; every name must be there, and no other."""
        if self._masters is None:
            self.module.load_state_dict(state)
        else:
            self._masters.load_state_dict(state)

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the optimizer's state on the CPU; empty on the others if rank 0 only."""
        return {} if rank0_only and self.comm.rank != 0 else _on_cpu(optimizer.state_dict())

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads what ``full_optimizer_state`` gave."""
        load_optimizer_state(optimizer, (), state)  # a copy: torch's own would keep the tensors of ``state``

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Returns the reduced gradients on the CPU under the module's names; None where no rank had one."""
        return {name: None if p.grad is None else _on_cpu(p.grad) for name, p in self.named_parameters()}

    def _forward_in_precision(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module under its precision, with parameters that follow their masters."""
        if self._masters is not None:
            self._masters.refresh()
            if self.comm.size == 1:
                self._watch()
            args, kwargs = self.precision.cast_inputs((args, kwargs))
        with self.precision.context(self.comm.device):
            return self.module(*args, **kwargs)

    # Backward: gradients arrive, buckets leave.

    def _note_backward(self, gradient: torch.Tensor) -> None:
        """Runs when backward enters the module: what is missing at its end is sent then.

        Queued from the outputs, not from the first gradient: under re-entrant checkpointing that one belongs to an
        inner backward, which ends long before the outer one.
        """
        del gradient
        if self._is_syncing and not self._is_backward_known:
            self._is_backward_known = True
            if self._tuner is not None:
                self._tuner.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _arrive(self, index: int, parameter: torch.Tensor) -> None:
        """Counts a gradient in; runs as autograd's hook, once for each gradient."""
        if not self._is_syncing:
            return
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.requires_grad:
            raise UsageError(self._explain_refusal(index, gradient))
        if not self._is_backward_known:
            self._note_backward(gradient)
        self._arrived[index] += 1
        if self._expected is None:
            self._observed.append(index)
            if self._tuner is not None:
                self._tuner.arrive(index)
            return
        if not self.policy.overlap:
            return
        if self._arrived[index] == self._expected[index]:
            bucket, position = self._place_of[index]
            if index in self._moved_at_once:
                bucket.bring_in(position, self._scale)
            bucket.num_missing -= 1
            if bucket.num_missing == 0:
                self._launch_complete()
        elif self._arrived[index] > self._expected[index] > 0:
            raise UsageError(
                f"{self._names[index]} got a gradient after it was counted in: it arrived "
                f"{self._arrived[index]} times in this backward, {self._expected[index]} times in the first one\n"
                "  with overlap, every step must visit a parameter as often as the first one did\n"
                "  set comm.overlap = false (parallelize(..., overlap=False))"
            )

    def _arrive_at_master(self, index: int, parameter: torch.Tensor) -> None:
        """Hands a gradient over to its master, in the dtype of that; runs as autograd's hook instead of ``_arrive``."""
        assert self._masters is not None
        gradient, master = parameter.grad, self._parameters[index]
        assert gradient is not None
        if gradient.is_sparse or (gradient.requires_grad and self._is_syncing):
            raise UsageError(self._explain_refusal(index, gradient))
        if gradient.requires_grad:
            return  # differentiated again by the user; it joins the next gradient
        if self._masters.has_copy(index):
            parameter.grad = None
            if master.grad is not None:
                master.grad.add_(gradient)
            elif self.comm.size == 1:  # nothing to reduce: its own memory, freed with it
                master.grad = gradient.to(master.dtype)
            else:
                bucket, position = self._place_of[index]
                master.grad = bucket.cast(position, gradient)
        if self._is_syncing:
            self._masters.may_have_changed = True
        if self.comm.size > 1:
            self._arrive(index, master)

    def _explain_refusal(self, index: int, gradient: torch.Tensor) -> str:
        if gradient.is_sparse:
            return (
                f"{self._names[index]} has a sparse gradient\n  buckets are dense\n"
                "  build its nn.Embedding with sparse=False, or freeze it"
            )
        return (
            f"{self._names[index]} has a gradient with a graph (backward(create_graph=True))\n"
            "  a reduced gradient cannot be differentiated again\n  run that backward inside engine.no_sync()"
        )

    def _launch_complete(self) -> None:
        """Sends the buckets that are complete, in order: a bucket waits for those before it."""
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].num_missing == 0:
            self._launch(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _launch(self, bucket: GradientBucket) -> None:
        self._fill(bucket)
        self._send(bucket)

    def _fill(self, bucket: GradientBucket) -> None:
        used = [self._parameters[i].grad is not None for i in self._trainable] if bucket.num_flags else []
        buffer = bucket.fill(self._scale)
        if bucket.num_flags:
            if all(used):
                bucket.flags.fill_(1.0)
            else:  # staged by the driver at once, so the host need not wait for the device
                bucket.flags.copy_(torch.tensor(used, dtype=buffer.dtype), non_blocking=True)

    def _send(self, bucket: GradientBucket) -> None:
        buffer = bucket.buffer
        assert buffer is not None
        if self._compression is not None and buffer.numel():
            bucket.work = self._reductions[bucket].start(buffer, self.comm)
            return
        if self.precision.reduce_dtype is not None and self.precision.reduce_dtype != buffer.dtype:
            bucket.wire = buffer = buffer.to(self.precision.reduce_dtype)
        bucket.work = self.comm.all_reduce(buffer, self._reduction) if buffer.numel() else DONE

    @torch.no_grad()
    def _finish(self) -> None:
        """Ends a synchronised backward: sends the rest, waits, and settles who has a gradient."""
        missing = [i for i in self._trainable if self._parameters[i].grad is None]
        if self._tuner is not None and self._tuner.is_watching:
            self._send_one_by_one(self._tuner)
        for bucket in self._buckets[self._next_bucket :]:
            self._launch(bucket)
        for bucket in self._buckets:
            bucket.land()
        if missing:
            self._settle(missing)
        if self._compression is not None:
            self._compression.end_pass()
        if self._tuner is not None and self._tuner.is_watching:
            self._build(None)  # once more, with other buckets
        elif self._expected is None:
            self._learn()
        else:
            if 0 in self._expected:
                self._expected = [before or now for before, now in zip(self._expected, self._arrived, strict=True)]
            if self._tuner is not None and self._tuner.end_overlapped():
                self._resize(self._tuner)
        self._reset()

    def _send_one_by_one(self, tuner: BucketTuner) -> None:
        """Sends each bucket when the one before it is there, for the tuner to take the time."""
        for bucket in self._buckets:
            self._fill(bucket)
        tuner.end_backward()
        for bucket in self._buckets:
            self._send(bucket)
            bucket.land()
        self._next_bucket = len(self._buckets)
        tuner.end_watched(len(self._buckets))

    def _settle(self, missing: list[int]) -> None:
        """Gives parameters that this rank did not use the gradient of the ranks that did. Reads the flags: a sync."""
        used = dict(zip(self._trainable, (self._buckets[-1].flags > 0).tolist(), strict=True))
        for index in missing:
            bucket, position = self._place_of[index]
            self._parameters[index].grad = bucket.gradient(position) if used[index] else None
        if self._compression is not None:
            self._compression.withhold([self._names[index] for index in missing if not used[index]])

    def _learn(self) -> None:
        """Rebuilds the buckets for the order in which gradients arrived on rank 0; the counts are each rank's own."""
        place = {index: position for position, index in enumerate(self._trainable)}
        order = arrival_order([place[index] for index in self._observed], len(self._trainable))
        agreed = torch.tensor(order, dtype=torch.int64, device=control_device(self.comm))
        self.comm.broadcast(agreed).wait()
        arrived = self._arrived
        self._arrival = [self._trainable[i] for i in agreed.tolist()]
        self._build(self._arrival)
        self._expected = arrived  # 0: not seen yet, so it cannot be known when it is complete before backward ends

    def _resize(self, tuner: BucketTuner) -> None:
        """Rebuilds the buckets in the size that the ranks find best."""
        self._tuner, expected = None, self._expected
        self.bucket_choice = tuner.choose(self._sizes(), self._arrival)
        if self.bucket_choice is not None:
            self._bucket_policy = self.bucket_choice.policy
        self._build(self._arrival)
        self._expected = expected

    # Buckets.

    def _watch(self) -> None:
        """Hooks into the gradients of what is trainable now."""
        self._trainable = [i for i, p in enumerate(self._held) if p.requires_grad]
        if self._masters is not None:
            self._masters.follow()
        arrive = DataParallel._arrive if self._masters is None else DataParallel._arrive_at_master
        engine: Any = weakref.proxy(self)  # the collector cannot see what a hook refers to
        for index in set(self._trainable) - self._hooked:
            hook = functools.partial(arrive, engine, index)
            self._held[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._hooked.add(index)

    def _sizes(self) -> list[ParameterSize]:
        return [
            ParameterSize(num_bytes=p.numel() * p.element_size(), kind=f"{p.dtype} {p.device}")
            for p in self._parameters
        ]

    def _start_over(self) -> None:
        """Makes the buckets anew, for what is trainable now: the next backward watches."""
        if self._tuner is not None:
            self._tuner.start([size for size, p in zip(self._sizes(), self._held, strict=True) if p.requires_grad])
        self._build(None)

    def _build(self, arrival: list[int] | None) -> None:
        """Makes the buckets: last defined first until the order of arrival is known."""
        self._watch()
        self._expected = None
        sizes = self._sizes()
        order = arrival if arrival is not None else list(reversed(self._trainable))
        groups = bucket_parameters(sizes, order, self._bucket_policy if self._tuner is None else self._tuner.policy)
        last, num_flags = len(groups) - 1, len(order)
        self._buckets = [
            GradientBucket(list(group), [self._parameters[i] for i in group], num_flags=num_flags if i == last else 0)
            for i, group in enumerate(groups)
        ]
        if self._compression is not None:
            shapes = [
                BucketShape(names=tuple(self._names[i] for i in b.members), layout=b.layout, tail=b.num_flags)
                for b in self._buckets
            ]
            self._reductions = dict(zip(self._buckets, self._compression.bind(shapes), strict=True))
        elif arrival is not None:  # agreed on by all ranks just now: they can make something together
            self._find_common_memory()
        self._place_of = {i: (bucket, place) for bucket in self._buckets for place, i in enumerate(bucket.members)}
        # On a CPU a large gradient is moved while it is in the cache; small ones wait for one another, since the first
        # call after a matrix product pays for cold code.
        self._moved_at_once = {
            i for b in self._buckets for i in b.members if not b.adopts and sizes[i].num_bytes >= _LARGE_BYTES
        }
        if self._scale == 1.0:
            self._moved_at_once.clear()
        self._reset()

    def _find_common_memory(self) -> None:
        """Puts the buckets where all ranks can reach them, if the communicator has such memory: less is copied."""
        for bucket in self._buckets:
            if not bucket.adopts:
                buffer = self.comm.shared_buffer(bucket.layout.length, bucket.parameters[0].dtype)
                if buffer is not None:
                    bucket.use(buffer)

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._has_shared_buffers = False
        self._next_bucket = 0
        self._observed = []
        self._arrived = [0] * len(self._parameters)
        self._is_backward_known = False

    def _share_buffers(self) -> None:
        self._has_shared_buffers = True
        self.share_buffers()


def _on_cpu(state: Any) -> Any:
    def copy(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    return tree_map(copy, state)
