"""The peaks of devices by the names that drivers have."""

from __future__ import annotations

from pathlib import Path

from paceline.cluster.devices import Peaks, find_peaks

ENTRY = Path("src/paceline/cluster/catalog/h200-measured.yaml")


def test_a_gpu_of_the_catalog_has_both_peaks() -> None:
    found = find_peaks("NVIDIA H200", "bf16")
    assert (found.sheet, found.measured) == (989e12, 794.5e12)
    assert find_peaks("NVIDIA H200", "fp8") == Peaks(sheet=1979e12, measured=1453.4e12)
    assert find_peaks("NVIDIA H200", "tf32").measured is None


def test_what_nobody_knows_has_none() -> None:
    assert find_peaks("NVIDIA Something 9000", "bf16") == Peaks()
    assert find_peaks("cpu-host", "fp32") == Peaks()  # another machine's
    assert find_peaks("cpu", "fp32", Path("no/such/file.yaml")) == Peaks()


def test_an_entry_of_ones_own_takes_the_catalogs_place() -> None:
    path = Path(__file__).parents[2] / ENTRY
    assert find_peaks("NVIDIA H200", "bf16", path) == Peaks(sheet=989e12, measured=721.5e12)
