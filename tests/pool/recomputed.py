"""What a run should have consumed, by the segments that it has noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data.order import batches_of, extend_hash, hash_text, segments_of


def recompute(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hash and count as the segments of a state say that they are: equal, unless samples were lost or twice."""
    known, count = (0, 0), 0
    for segment, batch in batches_of(segments_of(state)):
        indices = batch.indices[: segment.last - batch.position]
        known, count = extend_hash(known, indices), count + len(indices)
    return {"hash": hash_text(known), "count": count}
