"""What a rank does in a step, event by event.

    Run     a kernel                  Issue   an operation of the communicator starts
    Hold    memory is taken           Wait    what follows needs it
    Drop    memory is given back      EventMark    an action of a pipeline's schedule begins
    OnHost  the host works itself

A ``Turn`` says that an action is done once more, for another microbatch: see program.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from paceline.cluster.kernels import Operation

LOSS = "loss"  # the block of a compiled loss: its kernels are fused, softmax and all


@dataclass(frozen=True, slots=True)
class Run:
    """A kernel, and the block of the model that it belongs to; no block: the ends, the engine or the optimizer."""

    operation: Operation
    block: str = ""


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective, or one side of a message, starts. What is on one lane is done in the order of its issue.

    ``ranks`` are those of the world; of a message, its sender and its receiver. A collective that is made of messages
    has an ``algorithm``, ``share`` is the part of its rounds that starts here, and ``messages`` are those of this rank:
    kind, number and bytes.
    """

    number: int
    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    lane: str
    tag: int = 0
    phase: str = "forward"
    algorithm: str = ""
    share: float = 1.0
    messages: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """What is computed from here on needs the result of an operation."""

    number: int
    phase: str = "forward"


@dataclass(frozen=True, slots=True)
class OnHost:
    """The host goes through memory of its own, on so many bytes, while it launches nothing.

    Before, it waits for the operations ``waits`` and, where it ``reads`` a value, for all that the device computes.
    """

    name: str
    num_bytes: int
    waits: tuple[int, ...] = ()
    reads: bool = False
    phase: str = "optimizer"


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory is taken. ``tensors`` are those of kernels that lie in it."""

    number: int
    num_bytes: int
    category: str
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """Memory is given back."""

    number: int


@dataclass(frozen=True, slots=True)
class EventMark:
    """What follows, up to the next mark, is one action of a schedule; after all actions, of the ``END``."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Turn:
    """An action of the whole step: it is like that of another microbatch, which was recorded.

    ``arrived`` are the sends, as (kind, stage, microbatch), that it learns have arrived.
    """

    kind: str
    stage: int
    microbatch: int
    like: int
    arrived: tuple[tuple[str, int, int], ...] = ()


Event: TypeAlias = Run | Issue | Wait | Hold | Drop | EventMark | OnHost
END = "end"
TO_HOST, TO_DEVICE = "to_host", "to_device"  # kinds of copies over a device's bus: issued, and waited for
