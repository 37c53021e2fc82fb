"""Attention for models of one's own: plain in one process, and shared where several ranks hold parts of each sequence.

A model calls ``paceline.attention(query, key, value, is_causal=True)`` with the tokens that it has. In one process that
is ``scaled_dot_product_attention``. Where a ``SequencePart`` is in use, a rank has some tokens of each sequence, and
``attention`` hands over to it; then ``positions`` says where in their sequence the tokens are.

Several ranks may live in one process, each in a thread of its own, and a backward pass may run in threads of torch. So
a thread has the part that was set in it, and a thread in which none was ever set has that of the main thread.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.models.document_attention import attend_documents, attend_masked


class Asked(TypedDict):
    """What ``attention`` is asked for, besides its tensors."""

    is_causal: bool
    documents: Tensor | None
    mask: Tensor | None
    dropout: float
    scale: float | None


class SequencePart(Protocol):
    """What a rank knows that holds some tokens of each sequence, and others the rest."""

    def length(self, tokens: int) -> int:
        """Returns how long the whole rows are of which this rank has so many tokens."""

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this rank's tokens of whole rows (batch, tokens, ...)."""

    def join(self, tensor: Tensor) -> Tensor:
        """Returns whole rows of what each rank has for its tokens: the inverse of ``cut``. All ranks call it."""

    def documents(self) -> Tensor | None:
        """Returns for each of this rank's tokens where in its whole row its document begins; None: a row is one."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the places of this rank's tokens, (length,); (batch, length) where rows are cut differently."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """Returns this rank's rows of the attention over whole sequences. All ranks that share them call it alike."""


class _Thread(threading.local):
    is_set = False
    part: SequencePart | None = None


_here = _Thread()
_of_main: SequencePart | None = None
_is_used = False  # compiled code without a part looks at nothing else


class use_part:  # noqa: N801
    """Sets the part of this thread, from the call on, or for a ``with`` statement; None: sequences are whole.

    Activation checkpointing runs forward again inside backward, so that the part stays in use until that has ended.
    """

    def __init__(self, part: SequencePart | None) -> None:
        global _is_used
        _is_used = _is_used or part is not None
        self._before = _here.is_set, _here.part
        self._set(True, part)

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._set(*self._before)

    def _set(self, is_set: bool, part: SequencePart | None) -> None:
        global _of_main
        _here.is_set, _here.part = is_set, part
        if threading.current_thread() is threading.main_thread():
            _of_main = part


def current_part() -> SequencePart | None:
    """Returns what this rank knows of its part of each sequence; None where it has whole ones."""
    if not _is_used:
        return None
    return _here.part if _here.is_set else _of_main


def positions(length: int, device: torch.device, first: int = 0) -> Tensor:
    """Returns the places of ``length`` tokens in their sequence, (length,) or (batch, length): from ``first`` on.

    Where ranks share each sequence, the places of this rank's tokens.
    """
    part = current_part()
    if part is None:
        return torch.arange(first, first + length, device=device)
    if first:
        raise UsageError(
            f"tokens from place {first} on, where several ranks share each sequence\n"
            "  a rank has the tokens that it was dealt, and reads no further\n"
            "  generate text with a model whose sequences are whole"
        )
    return part.positions(length, device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    documents: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Returns for each query the mix of values that it attends to, (batch, heads, length, head_dim).

    Keys and values may have fewer heads, of which groups of query heads share one. ``documents`` (batch, length) says
    for each token where in its whole row its document begins: attention does not cross documents. A ``mask`` is that of
    ``scaled_dot_product_attention``, for this rank's queries and all keys; it says all, so that it goes with neither
    ``is_causal`` nor ``documents``. ``dropout`` is for training alone: the caller passes 0 elsewhere.
    """
    if mask is not None and (is_causal or documents is not None):
        raise UsageError(
            f"attention with a mask and {'is_causal' if is_causal else 'documents'}\n"
            "  a mask says for each query and key whether they meet\n  put all into the mask, or leave it out"
        )
    is_checked = documents is not None and not torch.compiler.is_compiling()
    given = tuple(getattr(documents, "shape", (type(documents).__name__,))) if is_checked else None
    if given not in (None, (len(query), query.shape[-2])):
        raise UsageError(
            f"documents {given}, and queries {tuple(query.shape)}\n"
            "  queries are (rows, heads, tokens, width), and documents a tensor (rows, tokens)\n"
            f"  give documents ({len(query)}, {query.shape[-2]}): where in its row the document of each token begins"
        )
    part = current_part()
    if part is not None:
        return part.attend(
            *(query, key, value), is_causal=is_causal, documents=documents, mask=mask, dropout=dropout, scale=scale
        )
    if mask is not None:
        return attend_masked(query, key, value, mask, is_causal, dropout, scale)
    return attend_documents(query, key, value, documents, is_causal, dropout, scale)
