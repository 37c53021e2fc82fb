"""What we will do: every decision about a run, as frozen data that serialises to JSON.

``search/request.py`` makes a plan of a config and a machine. The launcher sends it to the ranks as ``plan.json``, and
from there on nobody asks the config how the run is spread. The length of the run follows when the ranks have opened the
data: until then the counts are 0.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.plan.layout import Layout

MARGIN = 0.1  # of a device's memory is kept free: allocators lose some, and estimates are estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMachine:
    """What there is for a run. ``device_bytes`` are a rank's, ``host_bytes`` all those of a host; 0: nobody asks."""

    device: str  # cpu or cuda
    ranks: int
    node_ranks: int | None = None
    device_bytes: int = 0
    host_bytes: int = 0

    @property
    def local_ranks(self) -> int:
        return self.node_ranks or self.ranks

    @property
    def budget_bytes(self) -> int:
        return round(self.device_bytes * (1 - MARGIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How one step's samples are spread: ``global_batch = microbatch x accumulate x ranks``, always."""

    global_batch: int
    microbatch: int
    accumulate: int
    ranks: int

    @property
    def samples_per_rank(self) -> int:
        return self.microbatch * self.accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, on its device by category, and on its host where something is offloaded.

    Each category is what it holds at most. ``at_other_times`` is 0 or less: what they do not all hold at one moment.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float = 0.0
    temporary: float = 0.0
    framework: float
    host: float = 0
    compression: float = 0  # what ranks owe one another
    at_other_times: float = 0

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.compression

    @property
    def device_bytes(self) -> float:
        return self.states + self.activations + self.temporary + self.framework + self.at_other_times

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"device_bytes": self.device_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions of a run: who computes what, in how many steps of which batch."""

    name: str
    layout: Layout
    device: str
    finds_microbatch: bool = False  # the ranks try sizes, beginning with the layout's
    train_samples: int = 0
    eval_samples: int = 0
    steps_per_epoch: int = 0
    total_steps: int = 0
    total_samples: int = 0
    memory: MemoryEstimate | None = None  # of one rank; None where nobody has described the model

    @property
    def batch(self) -> BatchPlan:
        layout = self.layout
        size = layout.microbatch * layout.accumulate * layout.data
        return BatchPlan(
            global_batch=size, microbatch=layout.microbatch, accumulate=layout.accumulate, ranks=layout.data
        )

    def with_microbatch(self, microbatch: int) -> Plan:
        """Returns the plan with the same global batch in microbatches of this size, which cuts it evenly."""
        accumulate = self.batch.samples_per_rank // microbatch
        layout = dataclasses.replace(self.layout, microbatch=microbatch, accumulate=accumulate)
        return dataclasses.replace(self, layout=layout)

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "layout": self.layout.to_json(),
            "strategy": self.layout.strategy,
            "mesh": self.layout.axes,
            "batch": dataclasses.asdict(self.batch),
            "memory": None if self.memory is None else self.memory.to_json(),
        }

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=2) + "\n"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        known = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        memory = known["memory"]
        if memory is not None:
            memory = MemoryEstimate(**{name: size for name, size in memory.items() if name != "device_bytes"})
        return cls(**known | {"layout": Layout.from_json(known["layout"]), "memory": memory})
