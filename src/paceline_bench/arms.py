"""The arms of the engine benchmark: every engine of ours and its peers, as a user would set each of them up.

An arm has a *peer*, the arm that its time is divided by. On several ranks our engines run twice: through Gloo as the
peers do, and through shared memory. The peers run on a process group that torch makes by itself, and once more on ours
(``OUR_GROUP``), whose threads do not get in the way of those that compute. Every arm trains a copy of one model, from
the same values, on the same batch, with the same optimizer and clipping, on the same cores: what differs is the engine.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.config.sections import GPT_SIZES
from paceline.engines.apply import parallelize
from paceline.engines.blocks import compile_model
from paceline.engines.precision import precision_named
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.models.mlp import MLPClassifier
from paceline.models.registry import model_blocks
from paceline.plan.layout import StrategyName
from paceline.plan.model_shape import ModelShape
from paceline.train.step import update_if_finite
from paceline_bench.timing import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWorkload:
    """A model and a batch that all arms train on."""

    model: str  # mlp, a size of GPT, or a name for one whose ``shape`` says all
    batch: int
    context: int = 0
    tied: bool | None = None  # whether a GPT's output layer uses the embedding's weight; None: as its size has it
    shape: Mapping[str, Any] = field(default_factory=dict)  # of a GPT: fields that its size does not have so

    @property
    def items(self) -> int:
        """Samples or tokens of a batch."""
        return self.batch * max(self.context, 1)

    def make_model(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "mlp":
            return MLPClassifier(784, 512, 10, dropout=0.0).to(device)
        with device:
            return GPT(self.gpt)

    @property
    def gpt(self) -> ModelShape:
        size = self.model if self.model in GPT_SIZES or not self.shape else None
        return gpt_config(size, **{"dropout": 0.0, "tied": self.tied, **self.shape})

    def make_batch(self, device: torch.device, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        if self.model == "mlp":
            inputs = torch.randn(self.batch, 784, generator=generator)
            return inputs.to(device), torch.randint(0, 10, (self.batch,), generator=generator).to(device)
        vocab = self.gpt.vocab_size
        tokens = torch.randint(0, vocab, (self.batch, self.context + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CPU_WORKLOADS = {
    "mlp": (BenchWorkload(model="mlp", batch=64), Turns(rounds=40, steps_per_turn=20, warm_up=10)),
    "gpt-11m": (BenchWorkload(model="gpt-11m", batch=4, context=128), Turns(rounds=12, steps_per_turn=2, warm_up=3)),
}
CUDA_WORKLOADS = {
    "gpt-124m": (
        BenchWorkload(model="gpt-124m", batch=32, context=1024),
        Turns(rounds=10, steps_per_turn=3, warm_up=4),
    ),
    "gpt-1.1b": (BenchWorkload(model="gpt-1.1b", batch=8, context=2048), Turns(rounds=8, steps_per_turn=2, warm_up=4)),
}


_CLIP = 1.0
SHARED = "shared memory"
OUR_GROUP = "on our group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A model as an engine has set it up: how it is called, what is updated, and the update, clipped."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[nn.Parameter]
    update: Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeeredArm:
    """An arm of any kind: its name in records, and the arm that its time is divided by."""

    name: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm(PeeredArm):
    """One way to train a model; ``wrap`` sets it up. Arms of one set take turns and are in memory together.

    Where arms are compiled, one that ``compiles_whole`` is one graph with its loss, which is the fastest for a loop
    that communicates nothing; the others are compiled block by block, and their loss by itself.
    """

    wrap: Callable[..., Wrapped]  # of a model and a communicator
    set: int = 0
    compiles_whole: bool = False
    compiles_itself: bool = False  # ``wrap`` is told ``compiled``, and does it where the engine does


class TrainingStep:
    """A training step with AdamW that keeps the first losses; ``passes`` returns the parts of this rank's loss."""

    def __init__(
        self,
        passes: Callable[[], Sequence[torch.Tensor]],
        parameters: Iterable[nn.Parameter],
        num_losses: int,
        update: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer.step(),
    ) -> None:
        self._passes, self._update = passes, update
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self._num_losses = num_losses
        self._losses: list[torch.Tensor] = []

    def __call__(self) -> None:
        parts = self._passes()
        if parts and len(self._losses) < self._num_losses:
            self._losses.append(torch.stack(list(parts)).detach().sum())
        self._update(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def losses(self) -> list[float]:
        """The losses of this rank's first steps."""
        return [float(loss) for loss in self._losses]


def set_up(
    arm: Arm, workload: BenchWorkload, comm: Communicator, num_losses: int, *, compiled: bool = False
) -> TrainingStep:
    """Builds an arm's model, compiled if asked, and returns its training step."""
    model = workload.make_model(comm.device)
    if compiled and not (arm.compiles_whole or arm.compiles_itself):
        compile_model(model, whole=False)
    wrapped = arm.wrap(model, comm, compiled=compiled) if arm.compiles_itself else arm.wrap(model, comm)
    inputs, targets = workload.make_batch(comm.device, comm.rank)
    mean_loss: Callable[..., torch.Tensor] = _mean_loss
    if compiled and not arm.compiles_whole:
        mean_loss = torch.compile(_mean_loss)

    def forward() -> torch.Tensor:
        return mean_loss(wrapped.forward(inputs), targets)

    whole: Callable[[], torch.Tensor] = torch.compile(forward) if compiled and arm.compiles_whole else forward

    def passes() -> Sequence[torch.Tensor]:
        loss = whole()
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss]

    return TrainingStep(passes, wrapped.parameters, num_losses, wrapped.update)


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = logits.view(-1, logits.shape[-1]).float()  # a module of bf16 parameters gives bf16
    return F.cross_entropy(rows, targets.view(-1))


# Which arms there are.


def arms_on_ranks(workload: BenchWorkload, ranks: int) -> list[Arm]:
    """Returns the arms on several ranks, in fp32; ours also through shared memory, as CPUs of one host have it."""
    torch_ddp, fsdp2, hybrid2 = "torch ddp", "torch fsdp2", "torch fsdp2 hybrid"

    def ours(strategy: StrategyName, peer: str, **how: Any) -> Arm:
        name = f"paceline {strategy}" + (f" {SHARED}" if how.get("shares_memory") else "")
        return Arm(name=name, peer=peer, wrap=partial(_wrap_ours, strategy=strategy, **how))

    arms = [
        ours("ddp", torch_ddp),
        Arm(name=torch_ddp, peer=torch_ddp, wrap=_wrap_ddp),
        Arm(name=f"{torch_ddp}, gradient_as_bucket_view", peer=torch_ddp, wrap=partial(_wrap_ddp, as_view=True)),
        Arm(name=f"{torch_ddp} {OUR_GROUP}", peer=torch_ddp, wrap=partial(_wrap_ddp, on_our_group=True)),
        ours("zero1", "paceline ddp"),
        ours("zero2", "paceline ddp"),
        ours("fsdp", fsdp2),
        Arm(name=fsdp2, peer=fsdp2, wrap=_wrap_fsdp2),
        Arm(name=f"{fsdp2} {OUR_GROUP}", peer=fsdp2, wrap=partial(_wrap_fsdp2, on_our_group=True)),
        ours("ddp", torch_ddp, shares_memory=True),
        ours("zero1", f"paceline ddp {SHARED}", shares_memory=True),
        ours("zero2", f"paceline ddp {SHARED}", shares_memory=True),
        ours("fsdp", fsdp2, shares_memory=True),
    ]
    if workload.model == "mlp":  # its layers are so small that one unit may suit it better
        arms.append(Arm(name=f"{fsdp2} root only", peer=fsdp2, wrap=partial(_wrap_fsdp2, root_only=True)))
    if ranks >= 4 and ranks % 2 == 0:
        arms.append(ours("hybrid", hybrid2, shard_ranks=ranks // 2))
        arms.append(Arm(name=hybrid2, peer=hybrid2, wrap=partial(_wrap_fsdp2, shard_ranks=ranks // 2)))
    return arms


def arms_alone() -> list[Arm]:
    """Returns the arms at world size 1 in fp32: what the engine itself costs."""
    plain = "plain loop"
    return [
        Arm(name=plain, peer=plain, wrap=_wrap_plain),
        Arm(name="paceline ddp", peer=plain, wrap=partial(_wrap_ours, strategy="ddp")),
        Arm(name="paceline fsdp", peer=plain, wrap=partial(_wrap_ours, strategy="fsdp")),
    ]


def arms_in_bf16() -> list[Arm]:
    """Returns the arms at world size 1 in bf16, in two sets that fit on a device: replicated, and sharded."""
    plain, fsdp2 = "plain loop bf16", "torch fsdp2 bf16_master"
    master = partial(_wrap_ours, precision="bf16_master")
    autocast = partial(_wrap_ours, precision="bf16")
    return [
        Arm(name=plain, peer=plain, wrap=partial(_wrap_plain, precision="bf16"), compiles_whole=True),
        Arm(name="torch ddp bf16", peer=plain, wrap=partial(_wrap_ddp, precision="bf16")),
        Arm(name="paceline ddp bf16", peer=plain, wrap=partial(autocast, strategy="ddp")),
        Arm(name="paceline ddp bf16_master", peer=plain, wrap=partial(master, strategy="ddp")),
        Arm(name=fsdp2, peer=fsdp2, wrap=partial(_wrap_fsdp2, precision="bf16_master"), set=1),
        Arm(name="paceline fsdp bf16_master", peer=fsdp2, wrap=partial(master, strategy="fsdp"), set=1),
        Arm(name="paceline fsdp bf16", peer=fsdp2, wrap=partial(autocast, strategy="fsdp"), set=1),
    ]


def arms_on_links() -> list[Arm]:
    """Returns the arms on several ranks of GPUs in bf16, in two sets: replicated, and sharded."""
    torch_ddp, fsdp2 = "torch ddp bf16", "torch fsdp2 bf16_master"
    theirs = partial(_wrap_fsdp2, precision="bf16_master")

    def ours(strategy: StrategyName, peer: str, words: str = "", **how: Any) -> Arm:
        wrap = partial(_wrap_ours, strategy=strategy, precision="bf16_master", **how)
        name, number = f"paceline {strategy} bf16_master{words}", int(peer == fsdp2)
        return Arm(name=name, peer=peer, wrap=wrap, set=number, compiles_itself=True)

    return [
        Arm(
            name=torch_ddp, peer=torch_ddp, wrap=partial(_wrap_ddp, precision="bf16", as_view=True, sends_buffers=False)
        ),
        ours("ddp", torch_ddp),
        ours("zero1", torch_ddp),
        ours("zero2", torch_ddp),
        Arm(name=fsdp2, peer=fsdp2, wrap=theirs, set=1),
        Arm(name=f"{fsdp2}, prefetch two", peer=fsdp2, wrap=partial(theirs, prefetch=2), set=1),
        Arm(name=f"{fsdp2}, kept", peer=fsdp2, wrap=partial(theirs, reshards=False), set=1),
        ours("fsdp", fsdp2),
        ours("fsdp", fsdp2, ", kept", reshard_after_forward=False),
    ]


A = TypeVar("A", bound=PeeredArm)


def select(arms: Sequence[A], wanted: Sequence[str] | None) -> list[A]:
    """Returns the arms whose name contains one of the words, with their peers; all without words."""
    if not wanted:
        return list(arms)
    by_name = {arm.name: arm for arm in arms}
    names = {arm.name for arm in arms if any(word in arm.name for word in wanted)}
    while missing := {by_name[name].peer for name in names} - names:
        names |= missing
    return [arm for arm in arms if arm.name in names]


def check_words(names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises UsageError for words that are in no arm's name."""
    if wrong := [word for word in wanted if not any(word in name for name in names)]:
        raise UsageError(
            f"--arms {','.join(wrong)}: no arm is called so\n  an arm is taken if its name contains one of the words\n"
            f"  there are {'; '.join(dict.fromkeys(names))}"
        )


def sets_of(arms: Sequence[Arm]) -> Iterator[list[Arm]]:
    """Iterates over the sets of arms that take turns."""
    for number in sorted({arm.set for arm in arms}):
        yield [arm for arm in arms if arm.set == number]


# How each is set up.


def _wrap_ours(
    model: nn.Module,
    comm: Communicator,
    *,
    strategy: StrategyName,
    precision: str = "fp32",
    shard_ranks: int | None = None,
    shares_memory: bool = False,
    compiled: bool = False,
    reshard_after_forward: bool = True,
) -> Wrapped:
    if shares_memory:
        comm = SharedMemoryCommunicator.join(comm)
    more: Any = {"compile": "blocks"} if compiled else {}
    if not reshard_after_forward:
        more["reshard_after_forward"] = False
    engine = parallelize(model, comm, strategy, precision=precision, shard_ranks=shard_ranks or 0, **more)

    def update(optimizer: torch.optim.Optimizer) -> None:
        update_if_finite(optimizer, engine.clip_grad_norm_(math.inf), _CLIP)  # as train_step does

    return Wrapped(forward=engine, parameters=list(engine.parameters()), update=update)


def _wrap_ddp(
    model: nn.Module,
    comm: Communicator,
    *,
    as_view: bool = False,
    precision: str = "fp32",
    on_our_group: bool = False,
    sends_buffers: bool = True,
) -> Wrapped:
    device_ids = None if comm.device.type == "cpu" else [comm.device]
    group = None if on_our_group else _torch_group(comm)
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
    options: Any = {"gradient_as_bucket_view": as_view} | ({} if sends_buffers else {name: False})
    wrapped = DistributedDataParallel(model, device_ids=device_ids, process_group=group, **options)
    return _wrap_plain(model, comm, precision=precision, call=wrapped)


def _wrap_fsdp2(
    model: nn.Module,
    comm: Communicator,
    *,
    root_only: bool = False,
    precision: str = "fp32",
    shard_ranks: int | None = None,
    on_our_group: bool = False,
    prefetch: int = 0,
    reshards: bool | None = None,
) -> Wrapped:
    """Shards the model's blocks and its root, as FSDP2's tutorial does; of a model without blocks, its layers.

    ``prefetch``: how many blocks are gathered ahead, in forward and in backward; 0: as FSDP2 does by itself.
    """
    policy = precision_named(precision)
    mixed = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
    group = None if on_our_group or shard_ranks else _torch_group(comm)
    if shard_ranks is not None:  # torch makes the groups of the two dimensions by itself
        shape = (comm.size // shard_ranks, shard_ranks)
        mesh = init_device_mesh(comm.device.type, shape, mesh_dim_names=("replicate", "shard"))
    elif group is None:
        mesh = init_device_mesh(comm.device.type, (comm.size,))
    else:
        mesh = DeviceMesh.from_group(group, comm.device.type)
    units = model_blocks(model) or [module for module in model.modules() if isinstance(module, nn.Linear)]
    more: Any = {} if reshards is None else {"reshard_after_forward": reshards}
    sharded: list[Any] = [
        fully_shard(unit, mesh=mesh, mp_policy=mixed, **more) for unit in ([] if root_only else units)
    ]
    fully_shard(model, mesh=mesh, mp_policy=mixed, **more)
    for place, unit in enumerate(sharded if prefetch else []):
        unit.set_modules_to_forward_prefetch(sharded[place + 1 : place + 1 + prefetch])
        unit.set_modules_to_backward_prefetch(sharded[max(0, place - prefetch) : place][::-1])
    return _wrap_plain(model, comm, precision=precision)


def _torch_group(comm: Communicator) -> dist.ProcessGroup | None:
    """Returns a group of all Gloo ranks as torch makes it; None where there is but one rank, or another backend."""
    if comm.size == 1 or comm.backend != "gloo":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _wrap_plain(
    model: nn.Module, comm: Communicator, *, precision: str = "fp32", call: nn.Module | None = None
) -> Wrapped:
    """Trains as torch does; ``call`` is called in the place of the model, if it is given."""
    parameters, policy = list(model.parameters()), precision_named(precision)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with policy.context(comm.device):
            logits: torch.Tensor = (call or model)(inputs)
        return logits

    def update(optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()

    return Wrapped(forward=forward, parameters=parameters, update=update)
