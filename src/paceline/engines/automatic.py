"""``strategy="auto"`` for a plain module: by its parameters alone, since nobody has seen its batches.

Half of a rank's memory is left to activations, which the choice knows nothing of. A config says more, and gets a better
choice: see ``paceline.search.choice``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.errors import ConfigError, UsageError
from paceline.free_memory import measure_room
from paceline.plan.layout import Layout
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import StateFacts
from paceline.search.choice import Choice, choose_strategy

_FOR_ACTIVATIONS = 0.5


def choose_for_module(
    model: nn.Module, comm: Communicator, blocks: Sequence[nn.Module] = (), precision: str = "fp32"
) -> Choice:
    """Chooses a strategy for a module on the ranks of ``comm``, all on one host: rank 0 decides for all of them.

    Activations are not checkpointed, as nobody knows whether they are large; what is offloaded is part of the choice.
    Raises UsageError on every rank where nothing fits.
    """
    decided: Choice | UsageError | None = None
    if comm.rank == 0:
        room = measure_room(comm.device.type, comm.size, comm.size)
        room = dataclasses.replace(room, device_bytes=round(room.device_bytes * (1 - _FOR_ACTIVATIONS)))
        itemsize = max((p.element_size() for p in model.parameters()), default=4)
        states = StateFacts(itemsize=itemsize, device=comm.device.type)
        keep = frozenset({"checkpoint_activations"})
        try:
            decided = choose_strategy(
                _facts(model, blocks), Layout(precision=precision), room, states=states, keep=keep
            )
        except ConfigError as error:
            decided = UsageError(f"strategy = 'auto'\n  {error.problems[0]}")
    decided = broadcast_object(comm, decided)
    if isinstance(decided, UsageError):
        raise decided
    assert decided is not None
    return decided


def _facts(model: nn.Module, blocks: Sequence[nn.Module]) -> ModelFacts:
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    total = sum(parameter.numel() for parameter in model.parameters())
    return ModelFacts(
        name=type(model).__name__,
        blocks=tuple(BlockFacts(parameters=size) for size in sizes),
        root=BlockFacts(parameters=total - sum(sizes)),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        source="measured",
    )
