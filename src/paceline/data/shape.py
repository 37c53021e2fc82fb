"""What a model must know of the data before it can be built; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """The sizes of a sample: ``None`` where a size has no meaning for this data, or is not known.

    ``classes`` data has inputs of ``features`` numbers (or images of ``channels`` x ``size`` x ``size``) and one class
    as target; ``tokens`` data has ``context`` tokens as inputs and as many as targets; ``custom`` data is anything.
    """

    kind: Literal["classes", "tokens", "custom"]
    features: int | None = None
    channels: int | None = None
    size: int | None = None
    classes: int | None = None
    vocab_size: int | None = None
    context: int | None = None
