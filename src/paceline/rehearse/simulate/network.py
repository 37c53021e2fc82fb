"""What an operation of virtual ranks costs: the cost function of their clocks, by the wires of cluster/wires.py."""

from __future__ import annotations

from paceline.cluster.devices import Cluster
from paceline.cluster.wires import wire_cost
from paceline.comm.virtual.clock import OperationCost


def network_cost(cluster: Cluster | None, ranks: int, node_ranks: int | None = None) -> OperationCost:
    """Returns what operations cost on ``cluster``, or between processes of hosts where there is none.

    Without a cluster ``node_ranks`` share a host; None: all do. Raises UsageError if the cluster has fewer devices
    than there are ranks.
    """
    return wire_cost(cluster, ranks, node_ranks)
