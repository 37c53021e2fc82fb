"""Fair timing on a noisy machine: all arms take turns in one process, and only ratios are quoted; and its JSON record.

Absolute times drift with the weather of the machine; the ratio of two arms that ran seconds apart, many times, does
not. Arms rotate, so that no arm is always first, and each turn's ratio to its peer is taken within the round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import gmtime, strftime
from typing import Any

import torch

from paceline import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one arm took: milliseconds per step, and its ratio to its peer in the same round."""

    arm: str
    peer: str
    median_ms: float
    spread_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    num_steps: int

    def to_json(self) -> dict[str, Any]:
        """Returns the timing as plain values, to four places."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How long arms take turns: in each round every arm has a turn of so many steps; before that, steps to warm up."""

    rounds: int
    steps_per_turn: int
    warm_up: int


def interleave(
    arms: Mapping[str, Callable[[], None]],
    turns: Turns,
    *,
    baseline: str | Mapping[str, str],
    device: torch.device,
    meet: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Times the arms' steps in turns. ``baseline`` is the peer of all arms, or says which is whose.

    ``meet`` brings all ranks together before a turn, so that none is billed for another's lateness.
    """
    for step in arms.values():
        for _ in range(turns.warm_up):
            step()
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    medians: dict[str, list[float]] = {name: [] for name in names}
    for name in rotate(names, turns.rounds):
        meet()
        turn = [time_step(arms[name], device) for _ in range(turns.steps_per_turn)]
        times[name] += turn
        medians[name].append(statistics.median(turn))
    peers = dict.fromkeys(names, baseline) if isinstance(baseline, str) else baseline
    return [timing_of(name, peers[name], times[name], medians) for name in names]


def rotate(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Iterates over the turns of all rounds; every round begins with another name."""
    for number in range(rounds):
        first = number % len(names)
        yield from (*names[first:], *names[:first])


def time_step(step: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a step, until the device has done it."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def timing_of(name: str, peer: str, times: Sequence[float], medians: Mapping[str, Sequence[float]]) -> Timing:
    """Returns the timing of an arm from the seconds of its steps, and from the median of each arm in each round."""
    low, _, high = quartiles(times)
    return Timing(
        arm=name,
        peer=peer,
        median_ms=statistics.median(times) * 1e3,
        spread_ms=(high - low) * 1e3,
        **ratios_to(medians[name], medians[peer]),
        num_steps=len(times),
    )


def quartiles(times: Sequence[float]) -> list[float]:
    """Returns the three quartiles, of a single time as well."""
    return statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3


def ratios_to(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Returns the median of the ratios within each round, and what the middle half of them lies between."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    return {"ratio": statistics.median(ratios), "ratio_low": ratios[quarter], "ratio_high": ratios[-1 - quarter]}


def describe_hardware() -> dict[str, Any]:
    """Names the processor, its cores, and the GPU if there is one."""
    found: dict[str, Any] = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)  # nosec B607  # git of the PATH, as in a shell
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """A benchmark's result, with the machine and the versions it was measured on: what is needed to repeat it."""

    name: str
    command: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    hardware: dict[str, Any] = field(default_factory=describe_hardware)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "paceline": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    )
    commit: str = field(default_factory=_commit)
    time: str = field(default_factory=lambda: strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)
