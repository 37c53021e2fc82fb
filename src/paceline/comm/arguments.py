"""What the verbs refuse, on every backend alike: else a mistake would pass on virtual ranks and hang real ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import UsageError


def check_peer(kind: str, peer: int, size: int) -> None:
    """Raises UsageError unless ``peer`` is a rank of a group of ``size``."""
    if not 0 <= peer < size:
        raise UsageError(f"{kind} rank {peer} in a group of {size}: its ranks are 0 to {size - 1}")


def check_pieces(kind: str, *, whole: torch.Tensor, piece: torch.Tensor, size: int) -> None:
    """Raises UsageError unless ``whole`` holds one ``piece`` for each rank, of the same dtype."""
    if whole.numel() != piece.numel() * size:
        raise UsageError(
            f"{kind} on {size} ranks with {whole.numel()} elements in all and {piece.numel()} a rank: "
            f"the whole must be {size} times the piece"
        )
    if whole.dtype != piece.dtype:
        raise UsageError(f"{kind} between {whole.dtype} and {piece.dtype}: both tensors have the same dtype")


def all_to_all_splits(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Returns the rows of ``tensor`` that belong to each rank; raises UsageError where they do not add up."""
    rows = tensor.shape[0]
    if splits is None and rows % size:
        raise UsageError(f"all_to_all of {rows} rows on {size} ranks: give splits, or rows that divide")
    result = list(splits) if splits is not None else [rows // size] * size
    if len(result) != size or sum(result) != rows or min(result) < 0:
        raise UsageError(f"all_to_all splits {result} do not make {rows} rows on {size} ranks")
    return result


def check_split(ranks: Sequence[int], rank: int, size: int) -> None:
    """Raises UsageError unless ``ranks`` are distinct ranks of a group of ``size``, with ``rank`` among them."""
    if rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < size for r in ranks):
        raise UsageError(
            f"split({list(ranks)}) on rank {rank} of {size}: give distinct ranks of this group, this one among them"
        )
