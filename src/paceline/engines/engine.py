"""What every engine offers: the training step, evaluation and checkpoints know this and no strategy.

What an engine updates may be the module's parameters themselves (data parallelism), or this rank's slices of them
(sharding), under the same names either way. The trainer never needs to know which.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, ParamSpec, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVar  # with defaults, which Python 3.13 has: an Engine is one of any module

from paceline.clock import on_device
from paceline.comm.base import Communicator
from paceline.engines.groups import Groups, forget_gradients
from paceline.engines.loss_sums import LossSum, differentiable_sum
from paceline.engines.precision import Precision
from paceline.errors import UsageError
from paceline.models.balance import Balanced, loss_factor
from paceline.shards import Shard

if TYPE_CHECKING:
    from paceline.engines.buckets.buckets import BucketChoice
    from paceline.engines.flat.flat import FlatGroup
    from paceline.engines.float8 import Float8Layers

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
M = TypeVar("M", covariant=True, default=nn.Module)
LossFunction = Callable[[Callable[..., Any], Any], Any]  # loss(model, batch) -> LossSum
OnPhase = Callable[[str], None]
Scale = float | Tensor | None

_CASTS = {"half": torch.float16, "float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16}
_MOVES = ("cuda", "cpu", "xpu")
_TIED = "it is tied to its module, its optimizer and the other ranks"
_ELSEWHERE = "choose it when the ranks meet: paceline.connect(device=...)"
_OTHER_DTYPE = 'cast the model before parallelize(), or give precision="bf16" or another one'


class HasForward(Protocol[P, T_co]):
    """A module, to type checkers: a call of its engine takes and returns what its ``forward`` does."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...


class HasTurns(Protocol):
    """A loader that knows where its loop stands."""

    def turn(self, batches: int) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One batch of those that make an update: its number, from 1, of how many; and the factor of its summed loss."""

    number: int
    of: int
    scale: float

    @property
    def is_last(self) -> bool:
        """Whether the update follows: gradients of this pass are averaged over the ranks, with all before."""
        return self.number == self.of


def ignore_phase(phase: str) -> None:
    """Ignores the end of a phase."""


class Engine(ABC, Generic[M]):
    """A model that trains on the ranks of ``groups.world``; those of ``batch_comm`` share out every batch."""

    module: M
    groups: Groups
    precision: Precision
    bucket_choice: BucketChoice | None = None  # set where the engine was asked to find the size of its buckets
    float8: Float8Layers | None = None  # the linear layers that compute with 8 bits, where the precision asks for it
    pipeline: Any = None  # the ``Pipeline`` that runs the stages, where the model has several
    flat_groups: Sequence[FlatGroup] = ()  # whose pieces the optimizer updates, where it is not the parameters
    checked_optimizer: weakref.ref[Optimizer] | None = None  # the last one that was found to fit
    can_leave_pass: ClassVar[bool] = False  # whether a rank whose pass failed may join the rest of it without samples

    @property
    def _plain_module(self) -> nn.Module:
        return cast("nn.Module", self.module)

    @property
    def world(self) -> Communicator:
        """All ranks that train together."""
        return self.groups.world

    @property
    def batch_comm(self) -> Communicator:
        """The ranks that share out the batch: each reads other samples."""
        return self.groups.batch

    @property
    def comm(self) -> Communicator:
        """Another name of ``batch_comm``, for scripts."""
        return self.groups.batch

    @property
    def gradient_comm(self) -> Communicator:
        """The ranks over which losses are added up, and the gradients of dense parameters averaged."""
        return self.groups.gradients

    @property
    def device(self) -> torch.device:
        return self.groups.world.device

    @property
    def random_stream(self) -> int:
        """Which stream of random numbers this rank draws from: ranks that compute the same draw the same."""
        return self.groups.pipeline.rank * self.batch_comm.size + self.batch_comm.rank

    @property
    def reports_samples(self) -> bool:
        """Whether this rank's samples count, or are those of another one, for other tokens or parts of the model."""
        return self.groups.pipeline.rank == self.groups.context.rank == self.groups.tensor.rank == 0

    @property
    @abstractmethod
    def _totals(self) -> tuple[int, int]: ...

    @property
    def num_parameters(self) -> int:
        """How many parameters the whole model has."""
        return self._totals[0]

    @property
    def num_trained(self) -> int:
        """How many of them are trained; the others are frozen."""
        return self._totals[1]

    @property
    def holds_parts(self) -> bool:
        """Whether this rank updates parts of the parameters, of which others have the rest."""
        return False

    @property
    def splits_matrices(self) -> bool:
        """Whether ranks compute with parts of matrices that nobody holds whole."""
        return self.groups.tensor.size > 1

    @property
    @abstractmethod
    def _spread(self) -> str:
        """How the ranks share the work, in a few words."""

    def __repr__(self) -> str:
        ranks = f"rank {self.world.rank} of {self.world.size}"
        count = f"{self.num_parameters:,} parameters"
        return f"<{type(self).__name__}: {count}, {ranks}, {self._spread}, {self.precision.name}>"

    @abstractmethod
    def __call__(self: Engine[HasForward[P, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the module. All ranks call it equally often; one without samples calls ``join_pass``."""

    def run_microbatches(
        self, microbatches: Sequence[Any], loss: LossFunction, scale: Scale = None, on_phase: OnPhase = ignore_phase
    ) -> Sequence[LossSum]:
        """Runs the forward and backward passes of a step, and leaves its gradients, reduced with the last pass.

        ``loss(model, microbatch)`` returns a sum and a count; the sum times ``scale`` is differentiated. A microbatch
        without samples on this rank is None: the rank joins that pass. Every rank passes the same number of
        microbatches, or none, which counts as one without samples. ``on_phase`` is called at the end of each "forward"
        and "backward". Returns the sums and counts of what this rank computed.
        """
        with self.loss_factor(1.0 if scale is None else scale):
            return self._run_microbatches(microbatches or [None], loss, scale, on_phase)

    def _run_microbatches(
        self, microbatches: Sequence[Any], loss: LossFunction, scale: Scale, on_phase: OnPhase
    ) -> Sequence[LossSum]:
        """Runs the passes; None alone: no samples in the whole step, but the others wait for this rank."""
        values: list[LossSum] = []
        microbatches = self.groups.filled(microbatches)
        context = self.precision.context(self.device)
        for number, microbatch in enumerate(microbatches, start=1):
            with contextlib.nullcontext() if number == len(microbatches) else self.no_sync():
                if microbatch is None:
                    self.join_pass()
                else:
                    with self.inside(microbatch) as own:
                        with context:
                            value = differentiable_sum(loss(self, own))
                        on_phase("forward")
                        total = value.total if scale is None else value.total * scale
                        total.backward()  # type: ignore[no-untyped-call]
                    values.append(value)
                on_phase("backward")
        return values

    @functools.cached_property
    def routers(self) -> nn.ModuleList:
        """The routers of experts on this rank, in the model's order."""
        return nn.ModuleList(each for each in self._plain_module.modules() if isinstance(each, Balanced))

    def loss_factor(self, factor: float | Tensor) -> AbstractContextManager[None]:
        """Says by what a summed loss is multiplied in passes inside, which penalties of routers are weighed with."""
        return loss_factor(self.routers, factor)

    @torch.no_grad()
    def move_biases(self, norm: Tensor | None = None) -> None:
        """Ends an update: routers that balance by a bias move it by the loads of all ranks. All ranks call it.

        Where the ``norm`` of the gradients is not finite the update was left out, and biases stay.
        """
        routers = [each for each in self.routers if isinstance(each, Balanced)]
        if any(each.bias is not None for each in routers):
            arrived = torch.stack([each.arrived for each in routers])
            self.gradient_comm.all_reduce(arrived).wait()
            for each, own in zip(routers, arrived, strict=True):
                each.move_bias(own, norm)

    def show_batch(self, make: Callable[[], Any]) -> None:
        """Shows what a batch looks like, where a rank may have none in its first pass and must know."""
        if self.groups.blanks is not None:
            self.groups.blanks.fill([make()])

    def apply_loss(self, compute: Callable[..., T], batch: Any) -> T | None:
        """Returns ``compute(model, batch)`` without gradients; None where another rank of a pipeline has the result."""
        with self.inside(batch) as own:
            return compute(self, own)

    def cut(self, *values: Any) -> Any:
        """Returns this rank's part of whole rows (samples, tokens, ...), where several ranks share each sequence.

        Elsewhere the values as they are. Every rank of ``groups.context`` gives the same rows; one value comes alone.
        """
        found = values if self.groups.sequences is None else self.groups.sequences.cut(values)
        return found[0] if len(found) == 1 else found

    def inside(self, batch: Any) -> AbstractContextManager[Any]:
        """Cuts a batch as ``cut`` does, and has attention know its rows, backward included; None: rows are whole."""
        sequences = self.groups.sequences
        return contextlib.nullcontext(batch) if sequences is None else sequences.inside(batch)

    def add_up(self, sums: Tensor) -> None:
        """Adds what ``apply_loss`` gave over all ranks that have a part; every rank of the world gets the result."""
        self.gradient_comm.all_reduce(sums).wait()

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulates gradients: those of the backward passes inside are completed by the next one outside."""

    @contextlib.contextmanager
    def accumulate(self, batches: int, loader: HasTurns) -> Iterator[Turn]:
        """Stands around the pass of one batch, where ``batches`` of them make an update; fewer where an epoch ends.

            with engine.accumulate(4, loader) as turn:
                (F.cross_entropy(engine(x), y, reduction="sum") * turn.scale).backward()
                if turn.is_last:
                    optimizer.step()

        ``turn.scale`` makes summed losses a mean over the samples of all ranks and batches of the update. The loader
        is the one that the batch is of: from ``paceline.loader`` or ``paceline.shard``. Biases of routers move at the
        end of the last one.
        """
        if batches < 1 or not hasattr(loader, "turn"):
            raise UsageError(
                f"engine.accumulate({batches}, a {type(loader).__name__})\n"
                "  it takes a number of batches from 1 on, and the loader that tells where an epoch ends\n"
                "  make the loader with paceline.loader() or paceline.shard()"
            )
        number, of, samples = loader.turn(batches)
        turn = Turn(number=number, of=of, scale=self.gradient_comm.size / samples)
        with contextlib.nullcontext() if turn.is_last else self.no_sync(), self.loss_factor(turn.scale):
            yield turn
        if turn.is_last:
            self.move_biases()

    @abstractmethod
    def join_pass(self) -> None:
        """Joins a forward of other ranks, and with gradients its backward, for which this rank has no samples."""

    def sit_out(self) -> None:
        """Another name of ``join_pass``, for scripts."""
        self.join_pass()

    def abandon_accumulation(self) -> None:
        """Forgets the passes since the last one that reduced; their gradients are dropped. All ranks call it."""
        self.join_pass()

    @abstractmethod
    def forget_pass(self) -> None:
        """Takes back what the last pass taught the engine; its gradients are dropped. All ranks call it."""

    @abstractmethod
    def share_buffers(self) -> None:
        """Gives every rank the buffers of rank 0, where the policy says so. All ranks call it."""

    def train(self, mode: bool = True) -> Self:
        """Puts the module into training mode."""
        self._plain_module.train(mode)
        return self

    def eval(self) -> Self:
        """Puts the module into evaluation mode."""
        return self.train(False)

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterates over what this rank updates, under the module's own names, the same on every rank."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterates over what this rank updates."""
        return (parameter for _, parameter in self.named_parameters())

    def _names_by_id(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.named_parameters()}

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of what this rank updates, to be read or scaled in place."""
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    @property
    def can_fuse_cast(self) -> bool:
        """Whether ``fuse_cast`` finds such copies."""
        return False

    def fuse_cast(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Returns, by master, the copy in bf16 that the module computes with: for an optimizer that writes both.

        From then on the engine relies on it: it casts no masters after an update, and a gradient that needs no sum
        stays where backward leaves it, at the copy. Empty where there are no such copies, and then nothing changes.
        """
        return {}

    def lend_copies(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Another name of ``fuse_cast``, for scripts."""
        return self.fuse_cast()

    def loss_scale(self, count: float | Tensor) -> Tensor:
        """Returns N / (sum of ``count`` over the N ranks): turns a rank's summed loss into its share of the mean.

        Gradients are averaged over ranks, so a rank's *summed* loss times this factor gives, after reduction, exactly
        the gradient of the mean over all samples (or tokens) of all ranks and microbatches. Every rank calls it once a
        step, with its count over all microbatches.
        """
        total = on_device(count, self.device).clone()
        self.gradient_comm.all_reduce(total).wait()
        return self.gradient_comm.size / total

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their global norm is at most ``max_norm``; returns the norm before.

        The same on every rank, and not finite if any gradient is not. An infinite ``max_norm`` only measures.
        """

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Gathers the reduced gradients, whole, on the CPU, by name; None where no rank had one. All ranks call it."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises UsageError unless the optimizer can update this engine's parameters, and updates no others."""
        if not self.num_trained:
            raise UsageError(
                f"{type(optimizer).__name__} for an engine whose {self.num_parameters:,} parameters are all frozen\n"
                "  no parameter of the model requires a gradient: there is nothing to train\n"
                "  leave the optimizer out, or leave some parameters trainable before parallelize()"
            )
        ours = {id(parameter) for parameter in self.parameters()}
        theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strangers = sum(id(parameter) not in ours for parameter in theirs)
        if strangers:
            raise UsageError(
                f"{strangers} of the optimizer's {len(theirs)} tensors are not parameters of this engine\n"
                "  an optimizer updates what engine.parameters() gives, or training would change nothing\n"
                f"  build it as {type(optimizer).__name__}(engine.parameters(), ...) after parallelize()"
            )
        self.checked_optimizer = weakref.ref(optimizer)

    @abstractmethod
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Returns the whole model's state on the CPU, by name; ``rank0_only``: {} on other ranks. All ranks call it."""

    @abstractmethod
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads what ``full_state_dict`` gave, each rank its part; every name must be there, and no other."""

    @abstractmethod
    def full_optimizer_state(self, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the optimizer's state as one process would have it, whole tensors on the CPU. All ranks call it."""

    @abstractmethod
    def load_full_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loads what ``full_optimizer_state`` gave, each rank its part."""

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yields what this rank holds of the parameters and buffers: the tensors themselves, to save or to fill."""

    def state_names(self) -> Collection[str]:
        """Returns the names of all that ranks together hold: every rank has a shard of each, if an empty one."""
        return {shard.name for shard in self.shards()}

    def mark_loaded(self) -> None:
        """Tells the engine that the shards have new values, which no version counter shows."""
        for group in self.flat_groups:
            if group.host is not None:
                group.host.seen_version = -1

    def mark_updated(self) -> None:  # most engines need not know
        """Tells the engine that a step was replayed: parameters have changed, and none of its passes has run."""

    # What users do with a module, done with an engine. All other attributes are the module's own.

    def forward(self: Engine[HasForward[P, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the module, as a call of the engine does: hooks and all."""
        return self(*args, **kwargs)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the whole state on the CPU, by name; all ranks call it. ``paceline.save`` needs no such memory."""
        return self.full_state_dict()

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> Any:
        """Loads what ``state_dict`` gave; all ranks call it. Returns what does not fit; RuntimeError, if ``strict``."""
        if strict:
            self.load_full_state_dict(state)
            return nn.modules.module._IncompatibleKeys([], [])
        mine = self.full_state_dict()
        self.load_full_state_dict({name: state.get(name, value) for name, value in mine.items()})
        missing = [name for name in mine if name not in state]
        return nn.modules.module._IncompatibleKeys(missing, [name for name in state if name not in mine])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients: of what is updated, and of the module's own parameters."""
        forget_gradients((*self.parameters(), *self._plain_module.parameters()), set_to_none)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the engine, which is on its communicator's device. Raises UsageError for another device or dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.device
        if device is not None and (device.type != here.type or device.index not in (None, here.index)):
            _refuse(f"engine.to({device})", f"its tensors are on {here}, that of the communicator", _ELSEWHERE)
        if dtype is not None and any(parameter.dtype != dtype for parameter in self._plain_module.parameters()):
            _refuse(f"engine.to({dtype})", "the engine holds its parameters in buffers of one dtype", _OTHER_DTYPE)
        return self

    def apply(self, *_: Any) -> NoReturn:
        """Raises UsageError: values are set before the ranks share them."""
        fix = "call model.apply(...) before parallelize()"
        _refuse("engine.apply(...)", "a rank may hold parts of parameters, as vectors", fix)

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UsageError: what is compiled is part of the layout."""
        rule = "blocks are compiled one by one, so that communication overlaps"
        _refuse("engine.compile()", rule, 'give parallelize(..., compile="auto")')

    def __deepcopy__(self, _: object) -> NoReturn:
        fix = "copy engine.state_dict(); for an average: paceline.WeightAverage(engine, decay)"
        _refuse("a copy of an engine", _TIED, fix)

    def __reduce_ex__(self, _: object) -> NoReturn:
        fix = "save engine.state_dict(), or call paceline.save(folder, engine, optimizer, step=step)"
        _refuse("a pickle of an engine", _TIED, fix)

    if not TYPE_CHECKING:  # else a wrong name would be right to a type checker

        def __getattr__(self, name: str) -> Any:
            """Returns the module's attribute of a name that the engine does not have."""
            if name.startswith("_") or name == "module":
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            if name in _CASTS:
                return functools.partial(self.to, dtype=_CASTS[name])
            if name in _MOVES:
                return lambda device=None: self.to(
                    torch.device(name, device) if isinstance(device, int) else device or name
                )
            if name == "type":
                _refuse("engine.type(...)", "the engine holds its parameters in buffers of one dtype", _OTHER_DTYPE)
            if name == "to_empty":
                _refuse("engine.to_empty()", "its tensors are on the device of the communicator", _ELSEWHERE)
            try:
                return getattr(self.module, name)
            except AttributeError:
                kinds = f"neither {type(self).__name__} nor its module, a {type(self.module).__name__},"
                raise AttributeError(f"{kinds} has an attribute {name!r}") from None


def _refuse(what: str, rule: str, fix: str) -> NoReturn:
    raise UsageError(f"{what}\n  {rule}\n  {fix}")
