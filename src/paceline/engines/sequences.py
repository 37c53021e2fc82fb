"""How batches of whole rows become the parts of ranks that share each sequence, in an engine.

    cut       this rank's tokens of every tensor of a batch, (samples, tokens, ...); each remembers the rows it is of
    inside    while a model runs on them, attention, positions and dropout ask for the part of the rows in use

All ranks of the group ``context`` read the same samples. Targets are shifted before rows are cut: the target of a
token may be on another rank. A model is called with what was cut; whole rows are refused.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.comm.base import Communicator
from paceline.comm.objects import gather_objects
from paceline.engines.groups import fingerprint
from paceline.engines.sequence.part import SequenceRank
from paceline.errors import ForeignAttentionError, UsageError
from paceline.models.attention import current_part, use_part
from paceline.models.dropout import Dropout
from paceline.models.hugging_face import text_part
from paceline.models.hugging_face_attention import is_transformers, share_attention
from paceline.plan.layout import Layout
from paceline.schedule.ring import split_sequence

_MARK = "_paceline_part"
_COMPARED = 2  # batches
_NO_CHANCE = 32  # tokens that are not alike by chance


class Sequences:
    """Cuts batches for one of the ranks that share each sequence."""

    def __init__(
        self, part: SequenceRank, documents: Callable[[Tensor], Tensor | None] | None, *, is_whole: bool
    ) -> None:
        """Takes what returns of whole rows where each token's document begins, where the model keeps them apart.

        ``is_whole``: the model is not cut into stages, of which some may have no attention.
        """
        self._part, self._documents, self._is_proven = part, documents, not is_whole
        self._last: tuple[tuple[int, ...], SequenceRank] | None = None  # rows without documents are cut alike
        self._num_compared = 0  # batches, with those of the other ranks
        self._is_inside = False  # whether the part in use is that of what the model is called with

    def detail(self) -> dict[str, Any]:
        """Returns how sequences are shared, for a record."""
        split = self._part.split
        return {"ranks": split.ranks, "method": split.method, "ring": split.ring, "ulysses": split.ulysses}

    def cut(self, batch: Any) -> Any:
        """Returns this rank's part of every tensor in a batch: of inputs and what belongs to their tokens.

        Inputs may be of several lengths where they come first in a tuple. Raises UsageError for tensors of others.
        """
        tensors = _tensors(batch)
        if not tensors or any(hasattr(each, _MARK) for each in tensors):
            return batch  # nothing, or cut already
        inputs = _tensors(batch[0]) if isinstance(batch, tuple | list) else tensors[:1]
        lengths = tuple(dict.fromkeys(each.shape[1] if each.ndim > 1 else 0 for each in inputs))
        if not lengths or 0 in lengths or any(each.ndim < 2 or each.shape[1] not in lengths for each in tensors):
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
            raise UsageError(
                f"a batch with tensors of shape {shapes}, where {self._part.comm.size} ranks share each sequence\n"
                "  rows are cut by tokens, in dim 1 of every tensor: targets have one for each token of the inputs\n"
                "  give targets (samples, tokens), or set parallel.context = 1"
            )
        self._compare(tensors)
        part = self._begin(inputs[0], lengths)
        part.is_placed |= len(tensors) > 2  # perhaps by what is cut with the tokens

        def own(tensor: Tensor) -> Tensor:
            found = part.cut(tensor) if tensor.ndim else tensor
            setattr(found, _MARK, part)
            return found

        return tree_map_only(Tensor, own, batch)

    @contextlib.contextmanager
    def inside(self, batch: Any) -> Iterator[Any]:
        """Cuts a batch, unless that was done, and has models know of its rows."""
        found, before = self.cut(batch), self._is_inside
        self._is_inside = True
        try:
            with use_part(part_of(found)):
                yield found
        finally:
            self._is_inside = before

    @contextlib.contextmanager
    def call(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Has a model know of the rows that it is called with. Raises UsageError for whole ones.

        With gradients not for the call alone: activation checkpointing runs forward again inside backward. Raises
        ForeignAttentionError for a model that asks no other rank: it would learn from parts of sequences.
        """
        part = part_of((args, kwargs)) or cast("SequenceRank | None", current_part() if self._is_inside else None)
        if part is None:
            shapes = ", ".join(str(tuple(each.shape)) for each in _tensors((args, kwargs)))
            raise UsageError(
                f"the engine is called with tensors of shape {shapes or 'none'}, which were not cut\n"
                "  ranks share each sequence: every rank reads whole rows, and calls the model with its part of them\n"
                "  call inputs, targets = engine.cut(inputs, targets) as the last thing before the engine"
            )
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise UsageError(
                "the engine is called with labels, and without shift_labels, where ranks share each sequence\n"
                "  the library shifts labels inside the rows that it is given, and these are parts of rows\n"
                "  shift them first, cut them with the tokens, and give both: labels=targets, shift_labels=targets"
            )
        used = use_part(part)
        yield
        if not torch.is_grad_enabled():
            used.__exit__(None, None, None)
        is_first, self._is_proven = not self._is_proven, self._is_proven or part.is_asked
        if not self._is_proven:
            _refuse(self._part.comm.size, "its forward pass has called no attention of several ranks")
        if is_first and not part.is_placed:
            warnings.warn(
                f"the model asked for no positions, where {self._part.comm.size} ranks share each sequence\n"
                "  torch.arange counts a rank's tokens from 0, and their places are those in the whole row\n"
                "  take paceline.positions(length, device) inside forward; a model without positions needs nothing",
                stacklevel=2,
            )

    def _compare(self, tensors: Sequence[Tensor]) -> None:
        """Raises UsageError on all ranks where one of them reads other rows, in the first batches."""
        if self._num_compared == _COMPARED or tensors[0].is_meta:
            return
        self._num_compared += 1
        if len(tensors) > 1:
            _check_shift(*tensors[:2])
        comm = self._part.comm
        seen = gather_objects(comm, (fingerprint(tensors), [tuple(each.shape) for each in tensors]))
        for rank, found in enumerate(seen):
            if found != seen[0]:
                raise UsageError(
                    f"ranks {comm.ranks[0]} and {comm.ranks[rank]} share each sequence, and read different batches\n"
                    "  each keeps its part of the tokens of the same rows, and the rest of these would be lost\n"
                    "  share the data out over engine.batch_comm: paceline.shard(dataloader, engine.batch_comm)"
                )

    def _begin(self, tokens: Tensor, lengths: tuple[int, ...]) -> SequenceRank:
        with use_part(None):  # these rows are whole
            documents = None if self._documents is None or tokens.is_meta else self._documents(tokens)
        if documents is None and self._last is not None and self._last[0] == lengths:
            return self._last[1]
        part = copy.copy(self._part)  # with rows of its own, which stay known until backward has ended
        part.begin(lengths[0], documents, beside=lengths[1:])
        self._last = (lengths, part) if documents is None else None
        return part


def part_of(batch: Any) -> SequenceRank | None:
    """Returns what a batch that was cut is a part of; None for whole rows."""
    return next((getattr(leaf, _MARK) for leaf in tree_leaves(batch) if hasattr(leaf, _MARK)), None)


def _check_shift(tokens: Tensor, targets: Tensor) -> None:
    """Raises UsageError for targets that are the tokens of whole rows themselves, or those after the next ones."""
    is_target = targets >= 0
    if tokens.shape != targets.shape or tokens.is_floating_point() or is_target.sum() < _NO_CHANCE:
        return
    others = {ahead: (targets != tokens.roll(-ahead, 1)) & is_target for ahead in (0, 1, 2)}
    found = [ahead for ahead, other in others.items() if not other[:, : tokens.shape[1] - ahead].any()]
    if found and 1 not in found:
        raise UsageError(
            f"targets {list(targets.shape)} that are the tokens {found[0]} places further on in their rows\n"
            "  the target of a token is the next one: targets are shifted once, before rows are cut\n"
            "  give engine.cut(rows[:, :-1], rows[:, 1:])"
        )


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]


def share_sequences(model: nn.Module, comm: Communicator, layout: Layout) -> Sequences:
    """Prepares a model whose sequences the ranks of ``comm`` share, in place, before it is split up in any other way.

    Returns what cuts its batches. Raises ForeignAttentionError where the model's attention does not ask other ranks.
    """
    for module in model.modules():
        is_wide = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
        if is_wide or isinstance(module, nn.MultiheadAttention | nn.Transformer | nn.RNNBase):
            _refuse(comm.size, f"a {type(module).__name__} sees the tokens of its own rank alone")
    for each in [each for each in model.modules() if type(each) is nn.Dropout]:
        each.__class__ = Dropout
    if layout.sequence_parallel and any(isinstance(each, Dropout) and each.p for each in model.modules()):
        _refuse(comm.size, "dropout goes by the places of tokens, of which sequence_parallel gives a rank a part again")
    if is_transformers(model):
        share_attention(model)
    # Which one waits least is decided with the plan, for the machine; a ring goes with any number of heads.
    method = "ring" if layout.context_method == "auto" else layout.context_method
    of_node, heads = layout.node_ranks // layout.tensor, _heads(model) // layout.tensor
    part = SequenceRank(
        comm, split_sequence(method, comm.size, heads, node_ranks=of_node), is_compiled=layout.is_compiled
    )
    return Sequences(part, getattr(model, "documents", None), is_whole=layout.pipeline == 1)


def _heads(model: nn.Module) -> int:
    """Returns how many heads ask in an attention of the model, by its config; 0: that is not known."""
    settings = text_part(getattr(model, "config", None))
    found = getattr(settings, "heads", None) or getattr(settings, "num_attention_heads", None)
    return found if isinstance(found, int) else 0


def _refuse(ranks: int, why: str) -> NoReturn:
    raise ForeignAttentionError(
        f"context_ranks = {ranks} for a model whose attention is not ours: {why}\n"
        "  ranks that share each sequence see one another's tokens through paceline.attention\n"
        "  call that in the model, or set context_ranks = 1"
    )
