"""Dynamic loss scaling for fp16, whose smallest numbers are too large for many gradients.

    loss * scale --backward--> gradients * scale --/ scale--> gradients
    a gradient overflows:                  the step is left out, scale *= backoff
    2,000 good steps since:                scale *= growth

Powers of two scale exactly. The decision follows the global gradient norm, so it is the same on every rank under every
strategy. Scale and counts live on the device and are updated there: the host never waits for them.

What is scaled is a microbatch's share of the mean over the global batch, not the mean of a rank: so the numbers that
may overflow, and the steps that are left out, do not depend on how many ranks there are. Where the count of elements is
exchanged after backward, that of the step before stands for it until then.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.engines.precision import Precision

GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000


class LossScaler:
    """The scale of the loss, and how many good steps there were since it last moved."""

    def __init__(self, device: torch.device, initial: float = 65536.0) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._num_good = torch.zeros((), dtype=torch.int32, device=device)
        self._elements: torch.Tensor | None = None

    def factors(self, ranks: int, count: float | None, guess: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what a summed loss is multiplied by before backward, and the averaged gradients after it.

        With a known ``count`` of elements the gradients are then those of the mean over them. Without one they are
        those of the sum; ``guess`` stands for the count until one is known, and all ranks must give the same.
        """
        if count is not None:
            return self.scale / count, ranks / self.scale
        elements = torch.full_like(self.scale, guess) if self._elements is None else self._elements
        return self.scale / elements, elements / self.scale

    @property
    def knows_elements(self) -> bool:
        return self._elements is not None

    def note_elements(self, elements: torch.Tensor) -> None:
        """Takes how many elements the step had over all ranks: the next one will have about as many."""
        self._elements = elements.to(self.scale).clamp(min=1.0)

    @torch.no_grad()
    def update(self, norm: torch.Tensor) -> None:
        """Moves the scale after a step whose unscaled gradients had this global norm."""
        is_bad = norm.isfinite().logical_not_().to(device=self.scale.device, dtype=torch.float32)
        # A new tensor each time: the scale of the step before may still be on its way into a record.
        self.scale = self.scale.clone()
        torch._amp_update_scale_(self.scale, self._num_good, is_bad, GROWTH, BACKOFF, GROWTH_INTERVAL)

    def state_dict(self) -> dict[str, Any]:
        """Returns scale and counts as plain numbers. Waits for the device."""
        elements = None if self._elements is None else float(self._elements)
        return {"scale": float(self.scale), "num_good": int(self._num_good), "elements": elements}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = torch.full_like(self.scale, float(state["scale"]))
        self._num_good.fill_(int(state["num_good"]))
        elements = state["elements"]
        self._elements = None if elements is None else torch.full_like(self.scale, elements)


def make_scaler(precision: Precision, device: torch.device, initial: float = 65536.0) -> LossScaler | None:
    """Makes the scaler that a precision needs; None where gradients have the range of fp32."""
    return LossScaler(device, initial) if precision.scales_loss else None
