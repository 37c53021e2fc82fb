"""What the estimates know of a model: parameters and activations, block by block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.plan.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """One part of a model. Activations are bytes a sample, and ``cast_bytes`` does not depend on the batch."""

    parameters: int
    saved_bytes: float = 0.0  # what its forward leaves for its backward, its inputs among it
    input_bytes: float = 0.0  # its inputs: what is left of it where it is checkpointed whole
    product_bytes: float = 0.0  # outputs of matrix products: what selective checkpointing keeps besides
    cast_bytes: int = 0  # copies of its weights in autocast's dtype, saved for backward too
    largest_parameter: int = 0  # numbers of its largest tensor; 0: not known
    columns: int = 0  # of its matrices, added up: what the right factors of low-rank gradients are long
    buffer_bytes: int = 0
    temporary_bytes: float = 0.0  # bytes a sample that live only while one operation runs
    operations: float = 0.0  # what its forward costs for a sample, in the unit of ``engines/stages/costs.py``
    # What the ranks of a tensor group share of the figures above; nothing, where its layers have no plan.
    split_parameters: int = 0
    split_bytes: float = 0.0  # of ``saved_bytes``
    stream_bytes: float = 0.0  # of ``saved_bytes``: shared only under sequence parallelism
    split_products: float = 0.0  # of ``product_bytes``

    @classmethod
    def together(cls, layers: Iterable[BlockFacts], *, tied: int = 0, tied_columns: int = 0) -> BlockFacts:
        """Returns some layers as one, as far as a rank holds it; ``tied`` parameters are counted twice in them."""
        parts = tuple(layers)
        return cls(
            parameters=sum(each.parameters for each in parts) - tied,
            saved_bytes=sum(each.saved_bytes for each in parts),
            cast_bytes=sum(each.cast_bytes for each in parts),
            largest_parameter=max((each.largest_parameter for each in parts), default=0),
            columns=sum(each.columns for each in parts) - tied_columns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What a loss keeps of logits, and what one takes that is fused with the output layer, and keeps none.

    Of a sample of ``tokens``: ``kept_bytes``, of the root's ``saved_bytes``, are its logits for backward;
    ``temporary_bytes`` live while an operation of the blocks runs.
    """

    vocabulary: int
    width: int
    tokens: int
    element_bytes: int
    kept_bytes: float
    temporary_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as the estimates see it: repeated blocks, and the rest as one block called root."""

    name: str
    blocks: tuple[BlockFacts, ...]
    root: BlockFacts
    buffer_bytes: int = 0
    temporary_bytes: float = 0.0  # bytes a sample that live only while one operation runs, at the worst moment
    source: Literal["formula", "measured"] = "formula"
    # The layers before and after the blocks, where a pipeline may cut; none: only the model's own code knows them.
    entry: tuple[BlockFacts, ...] = ()
    exit: tuple[BlockFacts, ...] = ()
    tied_parameters: int = 0  # that the first and the last layer both use
    loss: LossFacts | None = None  # None: the loss is not fused with the output layer
    work: ModelShape | None = None  # None: a transformer, whose dimensions say more

    @property
    def parameters(self) -> int:
        """How many parameters there are, a shared one once."""
        return self.root.parameters + sum(block.parameters for block in self.blocks)

    @property
    def layers(self) -> tuple[BlockFacts, ...]:
        """The layers in the order in which they run, where a pipeline may cut; none: it cannot be cut."""
        return (*self.entry, *self.blocks, *self.exit) if self.entry else ()

    @property
    def columns(self) -> int:
        return self.root.columns + sum(block.columns for block in self.blocks)

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block; of the whole model where it has none."""
        return max((block.parameters for block in self.blocks), default=self.root.parameters)
