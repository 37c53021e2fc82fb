"""What snapshots in the memory of hosts cost a run, and how often to take them: by ``predict/formulas/saving.py``."""

from __future__ import annotations

from paceline.cluster.devices import Cluster
from paceline.config import Config
from paceline.predict.formulas.engine_costs import bus_bytes_per_s
from paceline.predict.formulas.saving import BESIDE_SHARE, SnapshotCost, lost_share, refined_interval
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, framework_bytes
from paceline.units import format_bytes, format_percent, format_seconds

_KEPT_BYTES_PER_S = 1e9  # that one thread hashes and writes into memory, beside the steps


def snapshot_cost(config: Config, *, ranks: int, node_ranks: int, device: str, **rates: float) -> SnapshotCost | None:
    """Prices a snapshot by the rates of ``SnapshotCost.of``; None where only the model's code knows its size."""
    model = describe_model(config, device)
    if model is None:
        return None
    states, copies = StateFacts.of(config, device), config.checkpoint.memory.copies
    whole = model.parameters * states.itemsize * (1 + states.optimizer_slots) + model.buffer_bytes
    return SnapshotCost.of(whole, ranks=ranks, node_ranks=node_ranks, copies=copies, **rates)


def describe_snapshots(config: Config, cluster: Cluster, ranks: int, step_s: float) -> list[str]:
    """Returns lines on the snapshots and the spare processes that a config asks for; nothing where it asks for none."""
    every, cost = config.checkpoint.memory.every_steps, _cost_on(config, cluster, ranks, step_s)
    lines, spares = [], config.recovery.spares
    if spares and not cluster.device.is_cpu:
        lines = [f"spares        {spares} a host: {format_bytes(framework_bytes('cuda'))} of a GPU each, besides"]
    if every is None or cost is None:
        return lines
    wait = f"{format_seconds(cost.blocked_s)} each, {format_percent(cost.blocked_s / (every * step_s))} of the time"
    room = f"{format_bytes(cost.rank_bytes)} a rank, {format_bytes(cost.host_bytes)} of each host's memory"
    return [*lines, f"snapshots     every {every} steps: {room}; {wait}"]


def choose_interval(config: Config, cluster: Cluster, ranks: int, step_s: float, failure_s: float) -> tuple[int, str]:
    """Returns the steps between snapshots that lose least, by Daly's formula, and what is lost with them; 0: unknown.

    They are never closer than it takes to keep one.
    """
    cost = _cost_on(config, cluster, ranks, step_s)
    if cost is None:
        return 0, "snapshots: only the model's own code knows what there is to copy"
    kept_s, blocked_s = cost.rank_bytes / _KEPT_BYTES_PER_S, max(cost.blocked_s, 1e-6)
    every = max(1, round(max(refined_interval(blocked_s, failure_s), kept_s) / step_s))
    lost = lost_share(every * step_s, save_s=blocked_s, failure_s=failure_s)
    return every, (
        f"with a failure every {format_seconds(failure_s)}: checkpoint.memory.every_steps = {every}; snapshots and "
        f"steps made again take {format_percent(lost)} of the time, and {format_bytes(cost.host_bytes)} of each host"
    )


def _cost_on(config: Config, cluster: Cluster, ranks: int, step_s: float) -> SnapshotCost | None:
    device = "cpu" if cluster.device.name.startswith("cpu") else "cuda"
    here, rate = min(ranks, cluster.node.devices), cluster.device.memory_bandwidth
    beside = BESIDE_SHARE * step_s * bus_bytes_per_s(cluster) if device == "cuda" else 0.0
    return snapshot_cost(config, ranks=ranks, node_ranks=here, device=device, bytes_per_s=rate, beside_bytes=beside)
