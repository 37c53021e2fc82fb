"""What each strategy cuts among its ranks, and what it sends: memory, time and engines read it here.

For N ranks that share the states, in a step of m microbatches, counted in copies of the parameters:

    strategy       1 / N on a rank     reduced     gathered
    ddp            nothing             1           1           an all-reduce is both
    zero1          optimizer state     1           1           once a step
    zero2          gradients too       m           1
    fsdp, hybrid   parameters too      m           2 m         before forward and before backward
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Strategy: TypeAlias = Literal["ddp", "zero1", "zero2", "fsdp", "hybrid"]

_MOMENTS = 2  # of Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Which states the ranks of a group cut among themselves; each has the others whole."""

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False

    def copies_sent(self, microbatches: int) -> int:
        """Returns how often as many numbers as there are parameters are reduced or gathered in a step."""
        return (microbatches if self.gradients else 1) + (2 * microbatches if self.parameters else 1)

    def share_of_states(self, ranks: int) -> float:
        """Returns what a rank holds of parameters, gradients and the moments of Adam, as a share of all of them."""
        whole = (not self.parameters) + (not self.gradients) + _MOMENTS * (not self.optimizer)
        states = 2 + _MOMENTS
        return (whole + (states - whole) / ranks) / states

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives of a step with one microbatch, each of as many numbers as there are parameters."""
        if self.parameters:
            return ("all_gather", "all_gather", "reduce_scatter")
        return ("reduce_scatter", "all_gather") if self.optimizer else ("all_reduce",)


SHARING: Mapping[str, Sharing] = {
    "ddp": Sharing(),
    "zero1": Sharing(optimizer=True),
    "zero2": Sharing(optimizer=True, gradients=True),
    "fsdp": Sharing(optimizer=True, gradients=True, parameters=True),
    "hybrid": Sharing(optimizer=True, gradients=True, parameters=True),
}
