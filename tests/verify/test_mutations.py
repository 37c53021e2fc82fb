"""The mutation check: classic bugs of distributed training, planted one by one, are all found by the certificate.

Each bug is planted by patching the real code, so that everything else runs as it does for a user. The same case passes
before the bug is planted: the certificate fails because of the bug and nothing else. Where a bug lies outside of what
the certificate runs (the loader's shares, the learning-rate schedule), ``train/test_world_invariance.py`` plants it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from planted_bugs import (
    CLIP,
    SETTINGS,
    Branches,
    Bug,
    DiffersByRank,
    Plain,
    Plant,
    Quiet,
    Remembers,
    Tied,
    accumulating,
    accumulation_lost,
    also,
    case,
    certify_clean,
    check_found,
    current_rank,
    gradients_kept,
    keep_references,
    known,
    make_batch,
    make_even_batch,
    make_short_batch,
    mean_of_means,
    misplaced,
    never_synchronised,
    plain_backward,
    replacing,
    synchronised_first,
    untied,
)
from torch import nn

from paceline.comm.base import DONE, Call, Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator
from paceline.data.order import share
from paceline.engines.apply import parallelize
from paceline.engines.buckets.gradients import ReplicaBucket
from paceline.engines.ddp import DataParallel
from paceline.engines.groups import broadcast_tensors
from paceline.errors import CollectiveMismatchError
from paceline.shards import flat_layout
from paceline.train import step as steps
from paceline.verify.case import FunctionCase
from paceline.verify.certificate import certify


def test_the_cases_have_what_the_bugs_need() -> None:
    engine = parallelize(Plain().double(), _Pair(torch.device("cpu")), bucket_mb=0.02, first_bucket_mb=0.005)
    sizes = [len(bucket.members) for bucket in engine._arrivals.buckets]
    assert len(sizes) >= 3
    assert min(sizes) == 1
    assert sizes[0] > 2 or sizes[1] > 2
    for step in range(SETTINGS.steps):
        chosen = make_batch(step)[0][:, :4].argmax(1)
        by_rank = [set(chosen[share(torch.arange(19).numpy(), part, 3)].tolist()) for part in range(3)]
        assert len(set().union(*by_rank)) == 4
    shares = [len(share(torch.arange(19).numpy(), part, 6)) for part in range(6)]
    assert len(set(shares)) > 1


class _Pair(SoloCommunicator):
    """Says that there are two ranks, so that an engine makes buckets; for looking at, not for running."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.size = 2

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        output.copy_(tensor.repeat(2))
        return DONE


# The bugs.


def not_weighed(_: Any) -> Any:
    return lambda *_: None


def local_scale(_: Any) -> Any:
    """The count is this rank's own: every rank's mean, averaged."""

    def loss_scale(self: DataParallel, count: Any) -> torch.Tensor:
        del self
        return 1.0 / torch.as_tensor(count, dtype=torch.float64)

    return loss_scale


def nobody_joins(_: Any) -> Any:
    return lambda *_: None


# Clipping.


def clip_locally_first(original: Any) -> Any:
    def finish(self: DataParallel) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        original(self)

    return finish


def norm_of_a_share(_: Any) -> Any:
    """Each rank takes the norm of its share of the parameters for that of all."""

    def clip_grad_norm_(self: DataParallel, _: float) -> torch.Tensor:
        parameters = list(self.parameters())
        gradients = [p.grad for p in parameters[self.comm.rank :: self.comm.size] if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    return clip_grad_norm_


def norm_divided_by_ranks(_: Any) -> Any:
    """Squares are averaged over ranks as if each had a share: the norm is too small by the root of their number."""

    def clip_grad_norm_(self: DataParallel, _: float) -> torch.Tensor:
        parameters = list(self.parameters())
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) / self.comm.size**0.5

    return clip_grad_norm_


def leave_unclipped(_: Any) -> Any:
    return lambda *_: None


def clip_one_by_one(_: Any) -> Any:
    """Clips each parameter by its own norm."""

    def scale(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    nn.utils.clip_grad_norm_([parameter], CLIP)

    return scale


def clip_before_weighing() -> Plant:
    weigh = steps.weigh_gradients
    counts: dict[int | None, Any] = {}

    def later(_: Any) -> Any:
        return lambda _, count: counts.update({current_rank(): count})

    def clip(original: Any) -> Any:
        def clip_grad_norm_(self: DataParallel, max_norm: float) -> torch.Tensor:
            norm = original(self, max_norm)
            weigh(self, counts[current_rank()])
            return norm

        return clip_grad_norm_

    return also(replacing(steps, "weigh_gradients", later), replacing(DataParallel, "clip_grad_norm_", clip))


# Buckets.


def scaled(factor: Callable[[int], float]) -> Callable[[Any], Any]:
    """What arrives from the reduction is multiplied."""

    def make(original: Any) -> Any:
        def launch(self: DataParallel, bucket: ReplicaBucket) -> None:
            original(self, bucket)
            work, size = bucket.work, self.comm.size

            class Scaled:
                def wait(self) -> None:
                    work.wait()
                    assert bucket.buffer is not None
                    bucket.buffer.mul_(factor(size))

            bucket.work = Scaled()

        return launch

    return make


def never_waited(original: Any) -> Any:
    def launch(self: DataParallel, bucket: ReplicaBucket) -> None:
        original(self, bucket)
        bucket.work = DONE

    return launch


def one_skipped(original: Any) -> Any:
    def launch(self: DataParallel, bucket: ReplicaBucket) -> None:
        if self._arrivals.buckets.index(bucket) == 1:
            bucket.comm = Quiet(bucket.comm)  # type: ignore[assignment]
        original(self, bucket)

    return launch


def one_sent_twice(original: Any) -> Any:
    def launch(self: DataParallel, bucket: ReplicaBucket) -> None:
        original(self, bucket)
        assert bucket.buffer is not None
        if self._arrivals.buckets.index(bucket) == 0:
            bucket.work.wait()
            bucket.work = self.comm.all_reduce(bucket.buffer, "sum")

    return launch


def sent_too_early(original: Any) -> Any:
    """Buckets leave with one gradient still to come: it arrives when the reduction is over."""

    def arrive(self: DataParallel, index: int, parameter: torch.Tensor) -> None:
        for bucket in self._arrivals.buckets if self._arrivals.expected is not None else []:
            if bucket.num_missing == len(bucket.members) > 1:
                bucket.num_missing -= 1
        original(self, index, parameter)

    return arrive


def stale_slots(original: Any) -> Any:
    """The place of a gradient that is missing keeps what it held in the last step."""

    def fill(self: ReplicaBucket, *args: Any) -> None:
        kept = [
            (view, view.clone())
            for parameter, view in zip(self.parameters, self.views, strict=False)
            if parameter.grad is None
        ]
        original(self, *args)
        for view, old in kept:
            view.copy_(old)

    return fill


def stale_gradients(original: Any) -> Any:
    """Gradients are copied into the buffer, and the optimizer still sees what they were before."""

    def fill(self: ReplicaBucket, *args: Any) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        original(self, *args)
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient

    return fill


def not_cleared(original: Any) -> Any:
    """The buffer is added to and never cleared: a step has the gradients of all steps before."""

    def fill(self: ReplicaBucket, *args: Any) -> None:
        old = None if self.buffer is None else self.buffer.clone()
        original(self, *args)
        if old is not None and self.buffer is not None and not self.adopts:
            self.buffer.add_(old)

    return fill


def order_not_agreed(original: Any) -> Any:
    """Every rank fills its buckets in the order in which its own gradients arrived."""

    def learn(self: DataParallel) -> None:
        groups, quiet = self.groups, Quiet(self.gradient_comm)
        self.groups = dataclasses.replace(groups, gradients=quiet)  # type: ignore[arg-type]
        try:
            original(self)
        finally:
            self.groups = groups

    return learn


def narrow(original: Any) -> Any:
    """Gradients travel in single precision."""

    def issue(self: VirtualCommunicator, call: Call) -> Any:
        if call.kind == "all_reduce":
            call.tensor.data.copy_(call.tensor.data.float().double())
        return original(self, call)

    return issue


# Used or not.


def flags_ignored(_: Any) -> Any:
    """A parameter that this rank did not use keeps no gradient, whatever the others have."""
    return lambda *_: None


def flags_all_set(original: Any) -> Any:
    """Every parameter counts as used somewhere: one that is used nowhere gets a gradient of zeros, and decays."""

    def settle(self: DataParallel, missing: list[int]) -> None:
        flags = self._arrivals.buckets[-1].flags
        (flags() if callable(flags) else flags).fill_(1.0)
        original(self, missing)

    return settle


# Tied weights.


def tied_reduced_twice(original: Any) -> Any:
    def finish(self: DataParallel) -> None:
        original(self)
        names = [id(p) for _, p in self.module.named_parameters(remove_duplicate=False)]
        for parameter in self.module.parameters():
            if names.count(id(parameter)) > 1 and parameter.grad is not None:
                self.comm.all_reduce(parameter.grad, "sum").wait()

    return finish


# Replicas.


def from_the_last_rank(original: Any) -> Any:
    def send(comm: Communicator, tensors: Any, source: int = 0) -> None:
        del source
        original(comm, tensors, comm.size - 1)

    return send


def parameters_alone(original: Any) -> Any:
    def send(comm: Communicator, tensors: Any, source: int = 0) -> None:
        original(comm, [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)], source)

    return send


def nothing_is_sent(_: Any) -> Any:
    return lambda *_: None


def buffers_stay(_: Any) -> Any:
    def share_buffers(self: DataParallel) -> None:
        self._are_buffers_shared = True

    return share_buffers


def update_lost(original: Any) -> Any:
    """One rank does not apply the last step's update."""

    def train_step(engine: DataParallel, *args: Any, **kwargs: Any) -> Any:
        before = [parameter.detach().clone() for parameter in engine.parameters()]
        outcome = original(engine, *args, **kwargs)
        if current_rank() == 1:
            with torch.no_grad():
                for parameter, old in zip(engine.parameters(), before, strict=True):
                    parameter.copy_(old)
        return outcome

    return train_step


# Shares of the batch, as the certificate cuts them.


def overlapping(_: Any) -> Any:
    def cut(indices: Any, part: int, parts: int) -> Any:
        size = len(indices)
        return indices[part * size // parts : (part + 1) * size // parts + 1]

    return cut


def one_missing(_: Any) -> Any:
    def cut(indices: Any, part: int, parts: int) -> Any:
        size = len(indices) // parts
        return indices[part * size : (part + 1) * size]

    return cut


PLAIN, KNOWN = case(Plain), known(Plain)

THREE_STEPS = dataclasses.replace(SETTINGS, steps=3)  # the first two would hide what the second leaves behind
BUGS: dict[str, Bug] = {
    "mean of means, count known": Bug(plant=accumulating(mean_of_means), case=KNOWN, shows="gradient"),
    "mean of means, count exchanged": Bug(
        plant=also(accumulating(mean_of_means), replacing(steps, "weigh_gradients", not_weighed)),
        case=PLAIN,
        shows="gradient",
    ),
    "mean over ranks: a count of its own": Bug(
        plant=replacing(DataParallel, "loss_scale", local_scale), case=PLAIN, shows="gradient"
    ),
    "sums are not weighed": Bug(plant=replacing(steps, "weigh_gradients", not_weighed), case=PLAIN, shows="gradient"),
    "no synchronisation with the last microbatch": Bug(
        plant=accumulating(never_synchronised), case=KNOWN, shows="gradient"
    ),
    "synchronisation with the first microbatch": Bug(
        plant=accumulating(synchronised_first), case=KNOWN, shows="gradient"
    ),
    "accumulation lost": Bug(plant=accumulating(accumulation_lost), case=KNOWN, shows="gradient"),
    "gradients not cleared": Bug(
        plant=replacing(torch.optim.Optimizer, "zero_grad", gradients_kept), case=KNOWN, shows="gradient", step=1
    ),
    "a rank without samples does not join": Bug(
        plant=replacing(DataParallel, "join_pass", nobody_joins),
        case=known(Plain, make_short_batch),
        shows="",
        verdict=CollectiveMismatchError,
    ),
    "clipped before the reduction": Bug(
        plant=replacing(DataParallel, "_finish", clip_locally_first), case=KNOWN, shows="gradient"
    ),
    "norm of a rank's share": Bug(
        plant=replacing(DataParallel, "clip_grad_norm_", norm_of_a_share), case=KNOWN, shows="norm"
    ),
    "norm divided by ranks": Bug(
        plant=replacing(DataParallel, "clip_grad_norm_", norm_divided_by_ranks), case=KNOWN, shows="norm"
    ),
    "norm divided by ranks, nothing to clip": Bug(
        plant=replacing(DataParallel, "clip_grad_norm_", norm_divided_by_ranks),
        case=KNOWN,
        shows="norm",
        settings=dataclasses.replace(SETTINGS, clip=1e9),
    ),
    "measured and not clipped": Bug(plant=replacing(steps, "_scale", leave_unclipped), case=KNOWN, shows="gradient"),
    "clipped one by one": Bug(plant=replacing(steps, "_scale", clip_one_by_one), case=KNOWN, shows="gradient"),
    "clipped before weighing": Bug(plant=clip_before_weighing(), case=PLAIN, shows="norm"),
    "sum instead of average": Bug(
        plant=replacing(DataParallel, "_launch", scaled(lambda size: size)), case=KNOWN, shows="gradient"
    ),
    "averaged twice": Bug(
        plant=replacing(DataParallel, "_launch", scaled(lambda size: 1 / size)), case=KNOWN, shows="gradient"
    ),
    "bucket never waited for": Bug(
        plant=replacing(DataParallel, "_launch", never_waited), case=KNOWN, shows="gradient", step=1
    ),
    "bucket skipped": Bug(plant=replacing(DataParallel, "_launch", one_skipped), case=KNOWN, shows="gradient"),
    "bucket sent twice": Bug(
        plant=replacing(DataParallel, "_launch", one_sent_twice), case=KNOWN, shows="gradient", module="wide"
    ),
    "bucket sent too early": Bug(
        plant=replacing(DataParallel, "_arrive", sent_too_early), case=KNOWN, shows="gradient", step=1
    ),
    "stale slot of a missing gradient": Bug(
        plant=replacing(ReplicaBucket, "fill", stale_slots),
        case=known(Branches),
        shows="gradient",
        step=2,
        settings=THREE_STEPS,
    ),
    "gradient is not the bucket's view": Bug(
        plant=replacing(ReplicaBucket, "fill", stale_gradients), case=KNOWN, shows="gradient"
    ),
    "bucket never cleared": Bug(
        plant=replacing(ReplicaBucket, "fill", not_cleared), case=KNOWN, shows="gradient", step=2, settings=THREE_STEPS
    ),
    "slots overlap": Bug(
        plant=lambda m: m.setattr("paceline.engines.buckets.gradients.flat_layout", misplaced(flat_layout)),
        case=KNOWN,
        shows="gradient",
    ),
    "order of buckets not agreed": Bug(
        plant=replacing(DataParallel, "_learn", order_not_agreed), case=known(Branches), shows="gradient", step=1
    ),
    "gradients travel in single precision": Bug(
        plant=replacing(VirtualCommunicator, "issue", narrow), case=KNOWN, shows="gradient"
    ),
    "flags of use ignored": Bug(
        plant=replacing(DataParallel, "_fill_missing", flags_ignored), case=known(Branches), shows="gradient"
    ),
    "flags of use all set": Bug(
        plant=replacing(DataParallel, "_fill_missing", flags_all_set),
        case=known(Branches),
        shows="gradient",
        module="never",
    ),
    "tied weight reduced twice": Bug(
        plant=replacing(DataParallel, "_finish", tied_reduced_twice), case=known(Tied), shows="gradient", module="embed"
    ),
    "tie lost": Bug(
        plant=lambda m: m.setattr(import_module("paceline.verify.runs"), "parallelize", untied(parallelize)),
        case=known(Tied),
        shows="gradient",
        module="embed",
    ),
    "first values not sent": Bug(
        plant=lambda m: m.setattr("paceline.engines.apply.broadcast_tensors", nothing_is_sent(None)),
        case=known(DiffersByRank),
        shows="forward",
    ),
    "first values from the last rank": Bug(
        plant=lambda m: m.setattr("paceline.engines.apply.broadcast_tensors", from_the_last_rank(broadcast_tensors)),
        case=known(DiffersByRank),
        shows="forward",
    ),
    "first values of buffers not sent": Bug(
        plant=lambda m: m.setattr("paceline.engines.apply.broadcast_tensors", parameters_alone(broadcast_tensors)),
        case=known(DiffersByRank),
        shows="gradient",
    ),
    "buffers not sent": Bug(
        plant=replacing(DataParallel, "_share_buffers", buffers_stay),
        case=known(Remembers),
        shows="gradient",
        step=1,
        settings=SETTINGS.with_layout(accumulate=1),
    ),
    "an update lost on one rank": Bug(
        plant=lambda m: m.setattr(import_module("paceline.verify.runs"), "train_step", update_lost(steps.train_step)),
        case=KNOWN,
        shows="update",
        settings=dataclasses.replace(SETTINGS, steps=1),  # later, all ranks would be wrong
    ),
    "shares overlap": Bug(
        plant=lambda m: m.setattr(import_module("paceline.verify.case"), "share", overlapping(None)),
        case=KNOWN,
        shows="gradient",
    ),
    "a share misses a sample": Bug(
        plant=lambda m: m.setattr(import_module("paceline.verify.case"), "share", one_missing(None)),
        case=KNOWN,
        shows="gradient",
    ),
}


@pytest.mark.some(16)
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(bug, monkeypatch)


@functools.cache
def rounding(made: FunctionCase) -> FunctionCase:
    """The same case with linear layers that round their outputs to float32, as norms of Hugging Face models do."""

    def make() -> nn.Module:
        model = made.model()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _, __, output: (output.float() * 1.1).to(output.dtype))
        return model

    return dataclasses.replace(made, model=make)


@pytest.mark.some(2)
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_found_in_a_model_that_computes_parts_in_float32(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = certify_clean(rounding(bug.case), bug.settings)
    assert clean.passed, clean.divergence
    keep_references(monkeypatch)
    bug.plant(monkeypatch)
    if bug.verdict is not None:
        with pytest.raises(bug.verdict):
            certify(rounding(bug.case), bug.settings)
        return
    assert not certify(rounding(bug.case), bug.settings).passed


def test_gradients_in_single_precision_are_found_in_a_model_that_computes_parts_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug = BUGS["gradients travel in single precision"]
    clean = certify_clean(rounding(bug.case), bug.settings)
    assert clean.bound.startswith("parts of the model compute in float32 (Linear): one process differs from itself by")
    assert clean.measure == "relative"
    assert clean.errors.largest <= clean.tolerance < 1e-6
    test_a_planted_bug_is_found_in_a_model_that_computes_parts_in_float32(bug, monkeypatch)


# What the cases and the replaced loop do by themselves.


@pytest.mark.parametrize("made", [KNOWN, PLAIN], ids=["count known", "count exchanged"])
def test_the_replaced_loop_is_right_without_a_bug(made: FunctionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulating(plain_backward)(monkeypatch)
    assert certify(made, SETTINGS).passed


def test_even_batches_would_hide_a_mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why batches are ragged here and in ``paceline verify``: where all shares are alike, the bug computes the same."""
    accumulating(mean_of_means)(monkeypatch)
    assert certify(known(Plain, make_even_batch), SETTINGS).passed
    assert not certify(KNOWN, SETTINGS).passed


def test_one_step_would_hide_a_bucket_that_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why several steps are compared: the first one agrees on the order of buckets, and so waits for everyone."""
    replacing(DataParallel, "_launch", never_waited)(monkeypatch)
    assert certify(KNOWN, dataclasses.replace(SETTINGS, steps=1)).passed
    assert not certify(KNOWN, dataclasses.replace(SETTINGS, steps=2)).passed
