"""What one rank needs of memory, by category: a value that a plan carries and ``predict/memory`` fills in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, on its device by category, and on its host where something is offloaded."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    temporary: int
    framework: int
    host: int = 0
    compression: int = 0  # what ranks owe one another

    @property
    def device_bytes(self) -> int:
        """All of the device's."""
        states = self.parameters + self.gradients + self.optimizer + self.buffers + self.compression
        return states + self.activations + self.temporary + self.framework

    def to_json(self) -> dict[str, Any]:
        """Returns the estimate as plain data."""
        return dataclasses.asdict(self) | {"device_bytes": self.device_bytes}
