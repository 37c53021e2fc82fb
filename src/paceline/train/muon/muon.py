"""Muon for the matrices of hidden layers, AdamW for all other parameters, under every strategy but tensor.

    M <- M + (1 - mu) (G - M)                  momentum: element by element, cut as the parameter is
    U <- G + mu (M - G), or M                  with Nesterov's look ahead, or without
    O <- orthogonalise(U)                      whole, once, on the rank that owns the matrix (rounds.py)
    W <- (1 - lr decay) W - lr s O             element by element again

The scale s follows the shape of W (rows x columns): 0.2 sqrt(max(rows, columns)) gives an update the size of AdamW's,
so that one learning rate serves both; sqrt(max(1, rows / columns)) is that of the first Muon. With the same settings an
update is that of torch.optim.Muon, which computes O in bf16 everywhere. Here it is bf16 on a GPU, and on a CPU the
dtype of the parameters, which is faster there and lets a run on many ranks be proved equal to one process.

Experts' matrices are stacked in one parameter, and are matrices each: ranks hold some of them, or slices of some. Not
of a hidden layer are embeddings and the output layer, known by their names; without these, the first and last matrix.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.config.schema import MuonConfig
from paceline.engines.engine import Engine
from paceline.engines.flat.flat import FlatGroup, piece_places
from paceline.engines.flat.shard import full_shape
from paceline.errors import UsageError
from paceline.train.muon.rounds import Matrix, UpdateRound, make_rounds

Part: TypeAlias = int | slice | None
"""Where a matrix is in what this rank has of a parameter: its number in a stack, elements of a piece; None: all."""
_MATRIX = 2


class _Member(NamedTuple):
    """A matrix that is updated, in its parameter."""

    parameter: nn.Parameter
    group: dict[str, Any]
    part: Part

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.part is None else tensor[self.part]


class Muon(torch.optim.Optimizer):
    """Updates hidden matrices by their orthogonalised momentum, and everything else as AdamW.

    Give it ``engine.named_parameters()`` and the engine, whose ranks share out the matrices; else all is done here.
    """

    gathers_matrices = True  # so it may update slices: see engines/flat/optimizer_state.py

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        engine: Engine | None = None,
        *,
        lr: float = 3e-4,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        settings: MuonConfig | None = None,
    ) -> None:
        settings = settings or MuonConfig()
        self.dtype: torch.dtype | None = None  # in which matrices are orthogonalised; None: as the device does it best
        self._engine = engine
        self._alone = functools.cache(SoloCommunicator)
        self._places: list[tuple[int, Part]] = []  # of matrices, by number: which parameter they are of, and its part
        self._rounds: list[UpdateRound] | None = None  # made in the first step, when the device is known
        if engine is not None and engine.splits_matrices:
            raise UsageError(
                "Muon cannot update a model whose matrices are cut over tensor ranks\n"
                "  a matrix is orthogonalised whole, and a tensor rank computes with a part of it that it never "
                "gathers\n  set parallel.tensor = 1 and shard with zero or fsdp, or optim.kind = adamw"
            )
        groups = _make_groups(dict(named), engine, lr, weight_decay, settings)
        others = [group for group in groups if not group["is_hidden"]]
        self._adamw: torch.optim.AdamW | None = None
        if others:
            can_fuse = all(p.device.type in ("cpu", "cuda") for group in others for p in group["params"])
            self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=can_fuse)
        hidden = [group for group in groups if group["is_hidden"]]
        defaults = settings.model_dump(exclude={"adamw_lr_factor", "adamw_for"})
        filled = hidden if self._adamw is None else [*hidden, *self._adamw.param_groups]
        super().__init__(filled, {"lr": lr, "weight_decay": weight_decay, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes an update. All ranks call it; a matrix that has no gradient stays as it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._rounds is None:
            self._rounds = self._make_rounds()
        held = self._members()
        members = [_Member(*held[index], part) for index, part in self._places]  # of a stack one for each expert
        if self._rounds:
            self._start(self._rounds[0], members)
        if self._adamw is not None:  # while the first slices are under way
            self._adamw.param_groups = [group for group in self.param_groups if not group["is_hidden"]]
            self._adamw.state = self.state
            self._adamw.step()
        for number, current in enumerate(self._rounds):
            if number + 1 < len(self._rounds):
                self._start(self._rounds[number + 1], members)
            current.compute(self._iterations())
            if number:
                _apply(self._rounds[number - 1], members)
        if self._rounds:
            _apply(self._rounds[-1], members)
        return loss

    def _members(self) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups if group["is_hidden"] for p in group["params"]]

    def _iterations(self) -> int:
        return int(next(group["iterations"] for group in self.param_groups if group["is_hidden"]))

    def _start(self, current: UpdateRound, members: Sequence[_Member]) -> None:
        """Moves the momentum of a round's matrices, and hands over what this rank gives of their updates."""
        found = {number: members[number] for number in current.numbers if members[number].parameter.grad is not None}
        by_group: dict[int, list[int]] = {}
        for number, (parameter, group, _) in found.items():
            by_group.setdefault(id(group), []).append(number)
            if "momentum_buffer" not in (state := self.state[parameter]):
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        updates: dict[int, torch.Tensor] = {}
        for numbers in by_group.values():
            momentum, nesterov = (found[numbers[0]].group[key] for key in ("momentum", "nesterov"))
            buffers = {n: found[n].own(self.state[found[n].parameter]["momentum_buffer"]) for n in numbers}
            gradients = {n: found[n].own(cast("torch.Tensor", found[n].parameter.grad)) for n in numbers}
            torch._foreach_lerp_(list(buffers.values()), list(gradients.values()), 1 - momentum)
            given = [number for number in numbers if number in set(current.needed)]
            values = [buffers[number] for number in given]
            if nesterov and given:
                values = list(torch._foreach_lerp([gradients[number] for number in given], values, momentum))
            updates.update(zip(given, values, strict=True))
        current.start(updates)

    def _make_rounds(self) -> list[UpdateRound]:
        """Makes the rounds of all matrices: those of one group of ranks, and of one dtype, after another."""
        places = {} if self._engine is None else piece_places(self._engine.flat_groups)
        kinds: dict[tuple[int, torch.dtype], tuple[Communicator, dict[int, Matrix]]] = {}
        self._places.clear()
        for index, (parameter, _) in enumerate(self._members()):
            if id(parameter) in places:
                comm, found = _describe_piece(*places[id(parameter)])
            else:
                engine = self._engine
                comm = self._alone(parameter.device) if engine is None else engine.groups.of(parameter).gradients
                matrix, is_stack = Matrix(shape=(parameter.shape[-2], parameter.shape[-1])), parameter.ndim > _MATRIX
                found = [(matrix, number) for number in range(len(parameter))] if is_stack else [(matrix, None)]
            for matrix, part in found:
                kinds.setdefault((id(comm), parameter.dtype), (comm, {}))[1][len(self._places)] = matrix
                self._places.append((index, part))
        rounds: list[UpdateRound] = []
        for (_, dtype), (comm, matrices) in kinds.items():
            lower = torch.bfloat16 if comm.device_kind == "cuda" and dtype == torch.float32 else dtype
            rounds += make_rounds(matrices, comm, self.dtype or lower, self._iterations())
        return rounds


def _make_groups(
    named: Mapping[str, nn.Parameter], engine: Engine | None, lr: float, weight_decay: float, settings: MuonConfig
) -> list[dict[str, Any]]:
    """Returns the group of the hidden matrices, and those of AdamW: other tensors with decay, vectors without."""
    cut = [name for name, p in named.items() if len(full_shape(p)) != p.ndim]
    if engine is None and cut:
        rule = "a matrix is orthogonalised whole, and the engine knows which ranks hold its slices"
        fix = "build it as Muon(engine.named_parameters(), engine, ...)"
        raise UsageError(f"Muon was given slices ({cut[0]}), and no engine\n  {rule}\n  {fix}")
    shapes = {name: full_shape(parameter) for name, parameter in named.items()}
    others = () if engine is None or engine.pipeline is None else engine.state_names()
    hidden = hidden_matrices(shapes, settings.adamw_for, others)
    trained = [(name in hidden, parameter) for name, parameter in named.items() if parameter.requires_grad]
    matrices = [parameter for is_hidden, parameter in trained if is_hidden]
    rest = [parameter for is_hidden, parameter in trained if not is_hidden]
    adamw = {"is_hidden": False, "lr": lr * settings.adamw_lr_factor}
    groups = [
        {"params": matrices, "is_hidden": True, "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in rest if len(full_shape(p)) >= 2], **adamw, "weight_decay": weight_decay},
        {"params": [p for p in rest if len(full_shape(p)) < 2], **adamw, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _describe_piece(group: FlatGroup, place: int) -> tuple[Communicator, list[tuple[Matrix, Part]]]:
    """Returns who shares a parameter, and of each of its matrices what each of them holds, and where this rank does."""
    slot, size = group.layout.slots[place], group.comm.size
    rows, columns = slot.shape[-2:]
    # Memory in the order of the columns is that of the transposed matrix, which is orthogonalised to the transposed.
    shape = (columns, rows) if slot.stride[-2] < slot.stride[-1] else (rows, columns)
    ranges = [group.layout.shard_range(rank, size) for rank in range(size)]
    begins = [slot.offset + number * rows * columns for number in range(slot.numel // (rows * columns))]
    found: list[tuple[Matrix, Part]] = []
    for begin in begins:
        edges = [[min(max(edge - begin, 0), rows * columns) for edge in span] for span in ranges]
        first, end = (begin + edge - max(ranges[group.comm.rank][0], slot.offset) for edge in edges[group.comm.rank])
        part = None if len(begins) == 1 else slice(max(first, 0), max(end, 0))
        found.append((Matrix(shape=shape, spans=tuple((first, end) for first, end in edges)), part))
    return group.comm, found


def _apply(current: UpdateRound, members: Sequence[_Member]) -> None:
    """Decays the parameters of a round, and adds their updates: in one call for all that have the same factors."""
    alike: dict[tuple[float, float], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for number, update in current.finish().items():
        (parameter, group, _), own = members[number], members[number].own(members[number].parameter)
        if parameter.grad is None or not own.numel():
            continue
        lr, (rows, columns) = float(group["lr"]), full_shape(parameter)[-2:]
        matches = group["lr_shape"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matches else math.sqrt(max(1.0, rows / columns))
        factors = 1 - lr * group["weight_decay"], -lr * scale
        parameters, updates = alike.setdefault(factors, ([], []))
        parameters.append(own)
        updates.append(update.to(own.device).reshape(own.shape))
    for (kept, step), (parameters, updates) in alike.items():
        torch._foreach_mul_(parameters, kept)
        torch._foreach_add_(parameters, updates, alpha=step)


# Of a mixture, shared is an expert; of an encoder and a decoder, their embedding.
_END = re.compile(r"(^|\.)([^.]*emb[^.]*|wte|wpe|[^.]*heads?|score|classifier|(?<!mlp\.)shared)(\.|$)")
_STACK = re.compile(r"(^|\.)experts\.[^.]+$")  # matrices of all experts: they are orthogonalised one by one


def hidden_matrices(
    shapes: Mapping[str, tuple[int, ...]], patterns: Sequence[str] | None = None, others: Collection[str] = ()
) -> set[str]:
    """Returns the names of the matrices of hidden layers among parameters, given in the model's order.

    ``patterns`` are names that AdamW updates, in place of the rule; ``others`` the model's parameters on other ranks.
    Raises UsageError if there are none, or if the rule cannot tell.
    """
    matrices = [name for name, shape in shapes.items() if len(shape) == _MATRIX or _STACK.search(name)]
    if patterns is not None:
        found = {name for name in matrices if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    elif any(_END.search(name) for name in (*shapes, *others)):
        found = {name for name in matrices if not _END.search(name)}
    elif set(others) - set(shapes):
        what = "optim.kind = muon cannot tell the input and the output layer of a model whose layers lie on other ranks"
        fix = "name them in optim.muon.adamw_for, as patterns such as ['layers.0.*', 'layers.7.*']"
        raise UsageError(f"{what}\n  AdamW updates them, and none has the name of an embedding or a head\n  {fix}")
    else:
        found = set(matrices[1:-1])
    if not found and not others:
        what = f"optim.kind = muon has nothing to do: none of {len(shapes)} parameters is a matrix of a hidden layer"
        rule = "Muon updates 2-d weights other than embeddings and the layers at both ends of a model"
        fix = "set optim.kind = adamw, or say with optim.muon.adamw_for which names AdamW updates"
        raise UsageError(f"{what}\n  {rule}\n  {fix}")
    return found
