"""The most FLOP per second of a device, which the speed of a run is measured against: data sheet, and as measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.devices import Catalog, Device, load_cluster
from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """FLOP per second of one device in one dtype: of the data sheet, and the most that products were measured to reach.

    None where nobody knows: a device that is not in the catalog, or one that was not measured in this dtype.
    """

    sheet: float | None = None
    measured: float | None = None


def find_peaks(name: str, compute: str, entry: Path | None = None) -> Peaks:
    """Returns the peaks of a GPU by the name that its driver has, or of the device of an ``entry``.

    Without an entry a CPU has none: those of the catalog were measured on other machines.
    """
    device = _find(name, entry)
    if device is None or (entry is None and device.is_cpu):
        return Peaks()
    try:
        sheet = device.peak(compute)
    except UsageError:  # there is no figure for this dtype
        return Peaks(measured=device.matmul_ceiling.get(compute))
    return Peaks(sheet=sheet, measured=device.matmul_ceiling.get(compute))


def _find(name: str, entry: Path | None) -> Device | None:
    try:
        return Catalog().device(name) if entry is None else load_cluster(str(entry)).device
    except UsageError:  # unknown, or a file that is of no use, which is told of elsewhere
        return None
