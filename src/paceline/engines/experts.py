"""Experts over ranks: each of E ranks holds 1/E of a block's experts, and tokens travel to those that they chose.

    rows of a rank, by expert      | e0 e0 | e1 | e2 e2 | e3 |
    to the ranks of the experts    rank 0: e0 e0 e1 of itself, e0 e1 e1 of rank 1, ...      one all-to-all
    sorted by local expert         | e0 e0 e0 | e1 e1 e1 |      those of the first rank first, as in one process
    multiplied, and back           the same way                                            one all-to-all

For T tokens a rank, k experts each, of width W, a layer sends 2 T k W (E-1)/E numbers in forward and as many in
backward, and before them E - 1 messages of how many rows come. The host reads these, since pieces differ in size: it
waits for the device once in each layer. While rows are under way, what every token passes through is computed: the
shared expert; and its backward, while gradients are.

Every rank meets the others in every pass: one whose experts nobody chose sends and takes nothing, and its gradients
are zeros. A rank without samples runs the pass on a batch of zero rows (``Blanks`` of groups.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.comm.base import Communicator, Work, unwatched
from paceline.engines.groups import expert_dim, mark_expert
from paceline.engines.nodes import moved, same
from paceline.engines.tensor.layout import Split, drawn_whole
from paceline.errors import UsageError
from paceline.models.experts import Experts, Mixture
from paceline.models.lora import mixed


def spread_experts(model: nn.Module, comm: Communicator, source: Communicator | None) -> None:
    """Leaves a model this rank's part of the experts of each block, in place, and lets blocks send tokens to the rest.

    ``source`` are the ranks that take the values of their first one; None: all have the same. Raises UsageError where
    ranks cannot have as many experts each.
    """
    exchange: Any = ExpertExchange(comm)
    for name, mixture in model.named_modules():
        if not isinstance(mixture, Mixture):
            continue
        if mixture.num_experts % comm.size:
            raise UsageError(
                f"expert = {comm.size} does not divide the {mixture.num_experts} experts of {name}\n"
                "  every rank holds as many whole experts as the others\n  give a number of ranks that divides them"
            )
        _keep_part(mixture.experts, comm, source)
        mixture.exchange = exchange


@torch.no_grad()
def _keep_part(experts: nn.Module, comm: Communicator, source: Communicator | None) -> None:
    own = {name: p for name, p in experts._parameters.items() if p is not None}
    splits = {name: Split(shape=tuple(p.shape), dim=0) for name, p in own.items()}
    for name, parameter in own.items():
        if source is not None and not parameter.is_meta:
            whole = parameter.detach().to(source.device).contiguous()
            source.broadcast(whole, 0).wait()
            parameter.data.copy_(whole)
        parameter.data = splits[name].cut(parameter.data, comm.rank, comm.size)
        parameter.grad = None
        mark_expert(parameter)
    experts.__class__ = mixed(cast("Any", LocalExperts), cast("Any", type(experts)))
    vars(experts).update(of_experts=(splits, comm))


class LocalExperts(nn.Module):
    """Some of a block's experts, drawn as if they were all."""

    of_experts: tuple[dict[str, Split], Communicator]

    def reset_parameters(self) -> None:
        """Gives the parameters this rank's experts of those that one process would draw."""
        with drawn_whole(self, *self.of_experts):
            super().reset_parameters()  # type: ignore[misc]


def has_experts(model: nn.Module) -> bool:
    """Says whether a model has experts to be dealt out, or parts of some that are marked already."""
    is_marked = any(expert_dim(parameter) is not None for parameter in model.parameters())
    return is_marked or any(isinstance(module, Mixture) for module in model.modules())


class Trip:
    """Rows on their way to other ranks: ``sent`` to each of them, ``taken`` from each; in forward or in backward."""

    def __init__(self, comm: Communicator, sent: list[int], taken: list[int]) -> None:
        self._comm, self._sent, self._taken = comm, sent, taken
        self._under_way: tuple[Work, Tensor] | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Sends rows; nobody may look at what this returns before ``wait``."""
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(self._taken), *rows.shape[1:])
        with unwatched():
            self._under_way = self._comm.all_to_all(arriving, rows, self._taken, self._sent), arriving
        return arriving

    def start_beside(self, rows: Tensor) -> Tensor:
        """Sends rows, and returns them: a node hands on what has the shape of its input, and ``wait`` has the rest."""
        self.start(rows)
        return rows

    def wait(self, _: Tensor) -> Tensor:
        """Returns what has arrived."""
        assert self._under_way is not None
        (work, arrived), self._under_way = self._under_way, None
        with unwatched():
            work.wait()
        return same(arrived)


Way = tuple[Trip, Trip, Tensor, Tensor]  # there, back, how to sort by expert what comes, and the inverse


class ExpertExchange:
    """Sends rows to the ranks that hold their experts, and brings back what these make of them."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        # No compiler follows a conversation between ranks. Said here, as a decorator would load it with this file.
        for name in ("_leave", "_arrive", "_return"):
            setattr(self, name, cast("Any", torch.compiler).disable(getattr(self, name)))

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertExchange:
        return self

    def __call__(
        self, rows: Tensor, counts: Tensor, experts: Experts, beside: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what all experts make of rows, and what ``beside`` computes while these are under way.

        ``rows`` are sorted by their experts; ``counts`` are those of each expert of all ranks.
        """
        way, moving, local = self._leave(rows, counts)
        found = None if beside is None else beside()
        made = experts(self._arrive(moving, *way), local)
        return self._return(made, *way), found

    def _leave(self, rows: Tensor, counts: Tensor) -> tuple[Way, Tensor, Tensor]:
        """Starts the way there; returns it, the rows on it, and how many of them each expert of this rank has."""
        kind, size = rows.device.type, self.comm.size
        if kind != "meta" and torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
            rows = rows.to(torch.get_autocast_dtype(kind))  # as the experts would: fewer bytes are sent
        arriving = torch.empty_like(counts)  # by source rank, then by local expert
        with unwatched():
            self.comm.all_to_all(arriving, counts).wait()
        if rows.is_meta:  # no values: as if all experts were chosen alike
            sent = taken = [len(rows) // size + (rank < len(rows) % size) for rank in range(size)]
        else:
            sent, taken = torch.stack((counts, arriving)).view(2, size, -1).sum(2).tolist()  # sync point
        local, total = len(counts) // size, sum(taken)
        kinds = torch.arange(local, device=counts.device).repeat(size)
        order = kinds.repeat_interleave(arriving, output_size=total).argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(total, device=order.device))
        there, back = Trip(self.comm, sent, taken), Trip(self.comm, taken, sent)
        return (there, back, order, place), moved(rows, there.start, back.wait), arriving.view(size, -1).sum(0)

    def _arrive(self, moving: Tensor, there: Trip, back: Trip, order: Tensor, place: Tensor) -> Tensor:
        """Waits for the rows, and sorts them; backward sends their gradients back, for which ``_leave`` waits."""
        arrived = moved(moving, there.wait, back.start_beside)
        return moved(arrived, lambda rows: rows.index_select(0, order), lambda rows: rows.index_select(0, place))

    def _return(self, made: Tensor, there: Trip, back: Trip, order: Tensor, place: Tensor) -> Tensor:
        """Brings what was made of rows to where these came from, in their order."""
        return moved(
            made,
            lambda rows: back.wait(back.start(rows.index_select(0, place))),
            lambda rows: there.wait(there.start(rows)).index_select(0, order),
        )
