"""Pictures of lessons 8 and 12: a roofline with products of the catalog's devices, and what a run loses at scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.cluster.devices import Device, load_cluster
from paceline.cluster.kernels import KernelRates, matmul_seconds
from paceline.predict.formulas.saving import best_interval, time_between_failures
from paceline.predict.formulas.step import slowest_share
from pictures_svg import MARGIN, WIDTH, Picture

# The roofline.

_DEVICES = (("a", "1x dgx-h100", "bf16", 2.0), ("g", "cpu-host", "fp32", 4.0))  # with the bytes of a number
_LEFT, _ROOM, _TALL = MARGIN + 74, WIDTH - 2 * MARGIN - 90, 300.0
_INTENSITY, _SPEED = (0.25, 8192.0), (2e8, 2e15)  # FLOPs a byte, FLOP/s


class Product(NamedTuple):
    """A product of (T, d) with (d, d): its FLOPs a byte, and the FLOP/s that it reaches."""

    name: str
    intensity: float
    speed: float


def products(device: Device, dtype: str, number: float) -> list[Product]:
    """Prices products from a few tokens to many, and a small one that waits for its launch."""
    sizes = [("T = 16", 16, 8192), ("T = 256", 256, 8192), ("T = 4,096", 4096, 8192), ("T = d = 128", 128, 128)]
    if device.is_cpu:
        sizes = [("T = 1", 1, 1024), ("T = 16", 16, 1024), ("T = 256", 256, 1024), ("T = d = 16", 16, 16)]
    found = []
    for name, tokens, width in sizes:
        flops, moved = 2.0 * tokens * width**2, number * (2 * tokens * width + width**2)
        seconds = max(device.launch_s, matmul_seconds(device, KernelRates(), tokens, width, width, dtype))
        found.append(Product(name, flops / moved, flops / seconds))
    return found


def _log(value: float, ends: tuple[float, float], room: float) -> float:
    return room * math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def draw_roofline() -> str:
    """Draws roofline.svg."""
    picture = Picture(
        "The roofline: who waits for memory, and who for arithmetic",
        "Across, the FLOPs that a kernel does for each byte that it moves; up, its speed. The slope is the memory's "
        "bandwidth, and the flat part is the peak of the arithmetic. Dots are products of T tokens with a square "
        "weight of 8,192 (on the CPU 1,024). A dot far below its line waits for its launch, or reaches a "
        "share of its limit.",
        "peaks of the catalog, and matmul_seconds",
    )
    top = picture.top + 14
    bottom = top + _TALL
    for power in range(9, 16, 2):
        y = bottom - _log(10.0**power, _SPEED, _TALL)
        picture.line(_LEFT, y, _LEFT + _ROOM, y)
        picture.text(_LEFT - 8, y + 4, _flops(10.0**power), "tiny soft end")
    for power in range(0, 14, 3):
        x = _LEFT + _log(2.0**power, _INTENSITY, _ROOM)
        picture.line(x, bottom, x, bottom + 5)
        picture.text(x, bottom + 18, f"{2**power:,}", "tiny soft mid")
    picture.text(_LEFT + _ROOM, bottom + 34, "FLOPs a byte", "small soft end")
    for kind, cluster, dtype, number in _DEVICES:
        device = load_cluster(cluster).device
        _draw_roof(picture, bottom, kind, device, dtype, number)
    return picture.svg(bottom + 46)


def _flops(speed: float) -> str:
    return f"{speed / 1e12:,.0f} TFLOP/s" if speed >= 1e12 else f"{speed / 1e9:,.0f} GFLOP/s"


def _draw_roof(picture: Picture, bottom: float, kind: str, device: Device, dtype: str, number: float) -> None:
    peak, memory = device.peak(dtype), device.memory_bandwidth
    ridge = peak / memory

    def place(intensity: float, speed: float) -> tuple[float, float]:
        return _LEFT + _log(intensity, _INTENSITY, _ROOM), bottom - _log(speed, _SPEED, _TALL)

    picture.band(*place(_INTENSITY[0], _INTENSITY[0] * memory), *place(ridge, peak), kind)
    picture.band(*place(ridge, peak), *place(_INTENSITY[1], peak), kind)
    x, y = place(_INTENSITY[1], peak)
    words = f"{device.name}, {dtype}: {_flops(peak)}, {memory / 1e9:,.0f} GB/s; they meet at {ridge:,.1f}"
    picture.text(x, y - 7, words, "small bold ink end halo")
    for name, intensity, speed in products(device, dtype, number):
        x, y = place(intensity, speed)
        picture.box(x - 4, y - 4, 8, 8, kind, rx=4, says=f"{name}: {speed / 1e9:,.1f} GFLOP/s")
        picture.text(x + 8, y + 14, name, "tiny ink halo")


# What a run loses.

SAVE_S, RESTART_S, DEVICE_S = 40.0, 300.0, 54 * 86_400 * 16_384 / 419
_COUNTS = (80, 1024, 4096, 16_384, 65_536)
_LOSSES: Sequence[tuple[str, str, Callable[[int], float]]] = (
    ("c", "saves", lambda devices: SAVE_S / _interval(devices)),
    ("b", "repeated steps", lambda devices: _interval(devices) / 2 / _failure(devices)),
    ("e", "restarts", lambda devices: RESTART_S / _failure(devices)),
)


def _failure(devices: int) -> float:
    return time_between_failures(DEVICE_S, devices)


def _interval(devices: int) -> float:
    return best_interval(SAVE_S, _failure(devices))


def shares(devices: int) -> dict[str, float]:
    """Returns what the time of a run goes to: training at the speed of one node, and what is lost."""
    found = {name: of(devices) for _, name, of in _LOSSES}
    stays = max(0.0, 1 - sum(found.values()))
    trains = stays / (1 + slowest_share(devices))
    return {"training": trains, **found, "the slowest device": stays - trains}


def draw_at_scale() -> str:
    """Draws at-scale.svg."""
    picture = Picture(
        "What a run loses as it grows",
        "Shares of a run's time. One GPU fails once in 5.8 years (the rate of the Llama 3 report), a save takes 40 "
        "seconds and a restart five minutes, and the run saves as often as loses least.",
        "predict/formulas/saving.py and slowest_share",
    )
    kinds = {"training": "a", **{name: kind for kind, name, _ in _LOSSES}, "the slowest device": "g"}
    y = picture.legend(MARGIN, picture.top + 8, [(kind, name) for name, kind in kinds.items()]) + 6
    left, room = MARGIN + 92, WIDTH - 2 * MARGIN - 92.0
    for devices in _COUNTS:
        picture.text(left - 8, y + 16, f"{devices:,} GPUs", "small ink end")
        at = left
        for name, share in shares(devices).items():
            picture.box(at, y, max(share * room - 0.5, 0.2), 22, kinds[name], says=f"{name}: {share:.1%}")
            at += share * room
        words = f"{shares(devices)['training']:.0%} train; a failure every {_hours(_failure(devices))}, a save every "
        picture.text(left + 6, y + 16, words + _hours(_interval(devices)), "small on")
        y += 32
    picture.ruler(left, y, room, 100, "%")
    return picture.svg(y + 34)


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return (
        f"{hours / 24:.0f} days" if hours > 72 else f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    )
