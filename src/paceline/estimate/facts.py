"""What the estimates know of a model: parameters and activations, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """One part of a model. Activations are bytes a sample, and ``cast_bytes`` does not depend on the batch."""

    parameters: int
    saved_bytes: float = 0.0  # what its forward leaves for its backward, its inputs among it
    input_bytes: float = 0.0  # its inputs: what is left of it where it is checkpointed whole
    product_bytes: float = 0.0  # outputs of matrix products: what selective checkpointing keeps besides
    cast_bytes: int = 0  # copies of its weights in autocast's dtype, saved for backward too
    columns: int = 0  # of its matrices, added up: what the right factors of low-rank gradients are long


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as the estimates see it: repeated blocks, and the rest as one block called root."""

    name: str
    blocks: tuple[BlockFacts, ...]
    root: BlockFacts
    buffer_bytes: int = 0
    temporary_bytes: float = 0.0  # bytes a sample that live only while one operation runs, at the worst moment
    source: Literal["formula", "measured"] = "formula"

    @property
    def parameters(self) -> int:
        """How many parameters there are, a shared one once."""
        return self.root.parameters + sum(block.parameters for block in self.blocks)

    @property
    def columns(self) -> int:
        """Columns of all matrices."""
        return self.root.columns + sum(block.columns for block in self.blocks)

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block; of the whole model where it has none."""
        return max((block.parameters for block in self.blocks), default=self.root.parameters)
