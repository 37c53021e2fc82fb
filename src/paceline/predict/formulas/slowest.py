"""What a step loses because all ranks wait for the slowest of N: devices of one kind differ, and so do batches.

    loss = sigma x (E[largest of N normal deviates] - E[largest of 8]) x compute

as constants come from runs on one node, and hold what the slowest of its eight takes.

GPUs of one model and one cluster differ by 8 % from the slowest to the fastest that is no outlier (mean over clusters
and programs; Sinha and others, "Not All GPUs Are Created Equal", arXiv 2208.11035): clocks depend on the chip, its
voltage and its cooling. Whiskers of a box plot are 5.4 standard deviations apart, so sigma is 0.015.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import NormalDist

from paceline.cluster.devices import Device

_DEVICE_SPREAD = 0.015
_NODE_DEVICES = 8


def slowest_share(devices: int) -> float:
    """Returns what waiting for the slowest of so many devices takes more than on one node, as a share of compute."""
    return _DEVICE_SPREAD * max(0.0, expected_most(devices) - expected_most(_NODE_DEVICES))


def slowest_device(device: Device, count: int) -> Device:
    """Returns the one of so many that the others wait for; ranks on processors are measured on their own host."""
    share = 0.0 if device.is_cpu else slowest_share(count)
    return replace(device, factor=device.factor * (1 + share)) if share else device


@cache
def expected_most(count: int) -> float:
    """Returns the expected largest of so many normal deviates, by Blom's formula: 1.4 of 8, 3.2 of 1,024."""
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
