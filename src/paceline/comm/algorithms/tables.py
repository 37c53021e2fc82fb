"""A table of measured all-reduces for a group: read by rank 0, so that all ranks choose alike."""

from __future__ import annotations

from pathlib import Path

from paceline.cluster.measured import MeasuredTable, read_table
from paceline.comm.algorithms.communicator import placement
from paceline.comm.algorithms.topology import Topology
from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.errors import UsageError


def share_table(path: str, comm: Communicator, topology: Topology) -> MeasuredTable:
    """Returns what the record on rank 0's host says about this group. All ranks call it.

    Raises UsageError on every rank where the record cannot be read, or says nothing about such a group.
    """
    found: MeasuredTable | str | None = None
    if comm.rank == 0:
        try:
            found = read_table(Path(path), placement(topology))
        except UsageError as error:
            found = str(error)
    found = broadcast_object(comm, found)
    if not isinstance(found, MeasuredTable):
        raise UsageError(f"comm.algorithm_table: {found}")
    return found
