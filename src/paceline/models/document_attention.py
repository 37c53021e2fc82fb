"""Attention inside documents that share a row. ``documents`` says for each token (batch, length) where its own begins.

    way      taken                                                   work for a row of T tokens in documents of n
    mask     up to 512 tokens; while a CUDA graph is captured        T x T, and a mask of that size
    blocks   longer rows: SDPA document by document, short ones      T x n
             some together
    varlen   on a GPU in half precision: flash attention, which is   T x n
             told where each document begins
    flex     on a GPU, where a model is compiled: a kernel that      T x (n + 128)
             leaves out blocks of 128 tokens; no wait for the host

Dropout, and float64, take the first two. ``blocks`` and ``varlen`` need the places of documents on the host, which
waits for the device once for each tensor ``documents``, not once a layer; a graph of the compiler ends there. Tensors
without values (a dry run, a trace) are taken for one document.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.errors import UsageError

Way: TypeAlias = Literal["mask", "blocks", "varlen", "flex", "whole"]

_SHORT = 512  # tokens: a row whose mask costs less than calls by document
_TOGETHER = 128  # tokens: shorter documents take one call with a mask
_BLOCK = 128  # tokens that flex attention leaves out together
_HALF = (torch.bfloat16, torch.float16)
_AMPERE = (8, 0)  # the oldest GPUs with flash attention
_TOLD = 6  # tokens, in a message
_WIDEST = 256  # features of a head that flash attention knows, in steps of 8


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Returns what SDPA gives for each document alone, (batch, heads, length, width); heads of keys may be fewer."""
    if documents is None or (way := choose_way(query, documents, dropout)) == "whole":
        return attend_masked(query, key, value, None, is_causal, dropout, scale)
    if way == "flex":
        block_mask, shares = document_blocks(documents, is_causal), query.shape[1] != key.shape[1]
        return flex_attention(query, key, value, None, block_mask, scale, shares)
    if way == "varlen":
        return _by_varlen(query, key, value, documents, is_causal, scale)
    if way == "blocks":
        return _by_blocks(query, key, value, documents, is_causal, dropout, scale)
    if documents.device.type == "cpu" and not torch.compiler.is_compiling():
        _places(documents)  # which checks them; a GPU would have to wait for that
    mask = document_mask(documents, is_causal)
    if torch.compiler.is_compiling() or not (documents.is_cuda and torch.cuda.is_current_stream_capturing()):
        return attend_masked(query, key, value, mask, False, dropout, scale)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # cuDNN asks the driver for memory
        return attend_masked(query, key, value, mask, False, dropout, scale)


def choose_way(query: Tensor, documents: Tensor, dropout: float) -> Way:
    is_short, has_kernels = documents.shape[1] <= _SHORT, query.is_cuda and not dropout
    if torch.compiler.is_compiling():
        if has_kernels and query.dtype != torch.float64:
            return "flex"
        return "mask" if is_short else "blocks"
    if documents.is_meta or isinstance(documents, FakeTensor):
        return "whole"
    if documents.is_cuda and torch.cuda.is_current_stream_capturing():
        return "mask"
    fits_flash = query.dtype in _HALF and query.shape[3] % 8 == 0 and query.shape[3] <= _WIDEST
    if has_kernels and fits_flash and torch.cuda.get_device_capability(query.device) >= _AMPERE and _varlen()[0]:
        return "varlen"
    return "mask" if is_short else "blocks"


def document_mask(documents: Tensor, is_causal: bool = False) -> Tensor:
    """Returns where attention looks, (batch, 1, length, length)."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same.tril() if is_causal else same).unsqueeze(1)


def document_blocks(documents: Tensor, is_causal: bool = False) -> BlockMask:
    """Returns the same for flex attention, from the first and the last document of each block: no square of length."""
    length = documents.shape[1]
    last = torch.arange(_BLOCK - 1, length + _BLOCK - 1, _BLOCK, device=documents.device).clamp(max=length - 1)
    low, high = documents[:, ::_BLOCK], documents[:, last]
    meets = (low[:, None, :] <= high[:, :, None]) & (low[:, :, None] <= high[:, None, :])
    is_one = torch.where(low == high, low, -1)
    is_whole = (is_one[:, None, :] == is_one[:, :, None]) & (is_one >= 0)[:, :, None]
    if is_causal:
        meets, is_whole = meets.tril(), is_whole.tril(-1)
    if length % _BLOCK:  # the last block has fewer tokens, which the mask must tell
        is_inside = torch.arange(1, len(last) + 1, device=last.device) * _BLOCK <= length
        is_whole = is_whole & is_inside[:, None] & is_inside

    def looks(batch: Tensor, head: Tensor, place: Tensor, other: Tensor) -> Tensor:  # noqa: ARG001  # flex's form
        same = documents[batch, place] == documents[batch, other]
        return same & (place >= other) if is_causal else same

    partly, wholly = _listed(meets & ~is_whole), _listed(is_whole)
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=_BLOCK, mask_mod=looks, seq_lengths=(length, length))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many blocks are marked in each row, and their numbers, first."""
    marked = blocks.unsqueeze(1).to(torch.int32)
    order = marked.argsort(dim=-1, descending=True, stable=True)
    return marked.sum(-1, dtype=torch.int32), order.to(torch.int32)


class _Places(NamedTuple):
    """Where documents begin in all rows, one behind the other, and where the last one ends; on the device too."""

    on_host: list[int]
    on_device: Tensor
    version: int


_known: Any = WeakTensorKeyDictionary()  # layers of a model are handed the same tensor


def _places(documents: Tensor) -> _Places:
    found: _Places | None = _known.get(documents)
    if found is None or found.version != documents._version:
        is_first = first_tokens(documents)
        on_device = F.pad(is_first.flatten().nonzero().flatten(), (0, 1), value=documents.numel()).to(torch.int32)
        found = _Places(on_device.tolist(), on_device, documents._version)
        _known[documents] = found
    return found


def first_tokens(documents: Tensor) -> Tensor:
    """Returns where documents (batch, length) begin. Raises UsageError for what are no places, but numbers say."""
    places = torch.arange(documents.shape[1], device=documents.device)
    is_first = documents == places
    wrong = (documents != (is_first * places).cummax(1).values).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise UsageError(
            f"documents[{row}] = {documents[row, : place + 1].tolist()[-_TOLD:]} up to token {place}: "
            "these are not places where documents begin\n"
            "  documents say for each token where in its row its own document begins: 0 0 0 3 3\n"
            "  where they number documents in ascending order, give torch.searchsorted(documents, documents)"
        )
    return is_first


def _by_varlen(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    attend, shares_heads = _varlen()
    assert attend is not None
    places = _places(documents)
    longest = max(end - start for start, end in pairwise(places.on_host))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0 if is_causal else -1)}
    if shares_heads:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = (repeat_heads(each, query.shape[1]) for each in (key, value))
    # From (batch, heads, length, width) to one row of tokens, (batch * length, heads, width).
    rows = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    found = attend(*rows, places.on_device, places.on_device, longest, longest, **options)
    return cast("Tensor", found.unflatten(0, documents.shape).transpose(1, 2))


@functools.cache
def _varlen() -> tuple[Callable[..., Any] | None, bool]:
    """Returns torch's kernel, of 2.11 and later, and whether it lets heads share keys and values."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, False
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if "window_size" in known else None, "enable_gqa" in known


@_disable_dynamo  # torch.compiler.disable, which loads the compiler only when it is called: that takes two seconds
def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, is_causal: bool, dropout: float, scale: float | None
) -> Tensor:
    rows, cuts = [], _block_lengths(_places(documents).on_host, documents.shape[1])
    for lengths, *row in zip(cuts, query, key, value, documents, strict=True):
        found = []
        for q, k, v, starts in zip(
            *(each.split(lengths, dim=-2) for each in row[:3]), row[3].split(lengths), strict=True
        ):
            mask = document_mask(starts[None], is_causal) if len(starts) <= _TOGETHER else None
            found.append(attend_masked(q[None], k[None], v[None], mask, mask is None and is_causal, dropout, scale))
        rows.append(torch.cat(found, dim=2))
    return torch.cat(rows)


def _block_lengths(places: list[int], length: int) -> list[list[int]]:
    """Returns for each row the lengths of its blocks: a document each, or several of up to 128 tokens together."""
    rows: list[list[int]] = []
    for start, end in pairwise(places):
        if start % length == 0:
            rows.append([end - start])
        elif rows[-1][-1] + end - start <= _TOGETHER:
            rows[-1][-1] += end - start
        else:
            rows[-1].append(end - start)
    return rows


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Returns what SDPA gives where fewer heads of keys and values are shared by groups of query heads."""
    # On a GPU the kernels share the heads; so they do on the meta device, where a dry run stands for a GPU in these
    # dtypes. Elsewhere heads are repeated by hand: SDPA's enable_gqa leaves out some kernels there, and which ones
    # differs by version. With a mask, only the slowest kernel shares heads.
    is_gpu = query.device.type in ("cuda", "meta") and query.dtype in _HALF
    shares = is_gpu and mask is None and query.shape[1] != key.shape[1]
    if not shares:
        key, value = (repeat_heads(each, query.shape[1]) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=shares)


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Returns keys or values (batch, heads, ...) with each head as often as query heads share it."""
    times = heads // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)
