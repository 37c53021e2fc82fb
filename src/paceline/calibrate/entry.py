"""What was measured, as YAML of the catalog: devices, links and nodes that ``load_cluster`` reads. No torch.

Figures are rounded to four digits; more would be noise. Comments at the top say what they were measured on and with.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from paceline.cluster.detect import Machine, detect_machine
from paceline.cluster.devices import Catalog
from paceline.cluster.entries import parse_catalog
from paceline.errors import UsageError
from paceline.units import GIB

if TYPE_CHECKING:
    from paceline.calibrate.machine import LinkFigures, MachineFigures
    from paceline.cluster.devices import Device, ShapeRate

_LINK_NAMES = {"shared_memory": "shm", "loopback": "gloo", "nvlink": "nccl"}


def best_rates(rates: Sequence[ShapeRate]) -> dict[str, float]:
    """Returns the most that products reached, by dtype."""
    found: dict[str, float] = {}
    for rate in rates:
        if rate.kind == "matmul":
            found[rate.dtype] = max(found.get(rate.dtype, 0.0), rate.flops)
    return found


def suggest_name(machine: Machine, measured: MachineFigures) -> str:
    """Returns a name for the entry: of the GPU, or of the host's cores and ranks."""
    if measured.device == "cuda" and machine.gpus:
        known = _known(machine, measured)
        return f"{known.name if known else 'gpu'}-measured"
    return f"cpu-{measured.ranks}x{measured.threads}"


def entry_of(measured: MachineFigures, command: str, torch_version: str, name: str | None = None) -> tuple[str, str]:
    """Returns the name and the YAML text of an entry for what was measured on this machine just now."""
    machine = detect_machine()
    chosen = name or suggest_name(machine, measured)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = {"time": when, "torch": torch_version, "python": platform.python_version()}
    return chosen, make_entry(chosen, machine, measured, command, about)


def make_entry(name: str, machine: Machine, measured: MachineFigures, command: str, about: Mapping[str, Any]) -> str:
    """Returns the YAML of a device, its links and nodes; ``about``: time, torch and python of the measurement."""
    about = {**about, "spread": rounded(measured.spread)}
    links = {
        f"{name}-{_LINK_NAMES[kind]}": _link(kind, found, measured.ranks) for kind, found in measured.links.items()
    }
    content: dict[str, Any] = {"devices": {name: _device(name, machine, measured, about)}}
    if links:
        content["links"] = links
    # A node for each link. The first one's has the device's name, another one's the link's.
    names, inside = [name, *list(links)[1:]], list(links) or [f"{name}-alone"]
    content["nodes"] = {
        node: {"device": name, "devices": measured.ranks, "inside": link}
        for node, link in zip(names, inside, strict=True)
    }
    if measured.alone is not None and links:
        # One rank that has all cores: a device and a node of its own, behind those of several ranks.
        whole = f"{name}-alone"
        content["devices"][whole] = _device(whole, machine, measured.alone, about)
        content["nodes"][whole] = {"device": whole, "devices": 1, "inside": next(iter(links))}
    if not links:
        # One rank: nothing was measured between ranks, and a node names a link all the same.
        # A copy reads and writes, so that it has half of the memory's rate.
        rate = rounded(measured.kernels.memory_bandwidth / 2e9)
        lone = {"kind": "shared_memory", "gb_per_s": rate, "efficiency": 1.0, "latency_us": 20.0}
        content["links"] = {f"{name}-alone": lone}
    written = yaml.safe_dump(content, sort_keys=False, width=110, default_flow_style=None)
    cores = f"{machine.cores} cores" if measured.device == "cpu" else f"{len(machine.gpus)} GPUs"
    told = f"{measured.ranks} ranks at once, {measured.threads} threads each; torch {about['torch']}."
    header = [
        f"Measured by: {command}",
        f"on {_what(machine, measured)}, {cores}; {told}",
        f"Samples spread by {100 * measured.spread:.1f} % (median, between quartiles).",
        *(
            f"The ring fits the all-reduces over {kind} within {100 * x.worst:.0f} %."
            for kind, x in measured.links.items()
        ),
    ]
    text = "".join(f"# {line}\n" for line in header) + written
    parse_catalog(text, "the new entry")
    return text


def _device(name: str, machine: Machine, measured: MachineFigures, about: Mapping[str, Any]) -> dict[str, Any]:
    kernels, known = measured.kernels, _known(machine, measured)
    best = best_rates(kernels.rates)
    bandwidth = known.memory_bandwidth if known else kernels.memory_bandwidth
    peaks = {dtype: known.peak_flops.get(dtype, rate) if known else rate for dtype, rate in best.items()}
    memory = known.memory_bytes if known else machine.memory_bytes / measured.ranks
    found: dict[str, Any] = {
        "vendor": known.vendor if known else "nvidia" if measured.device == "cuda" else "host",
        "generation": known.generation if known else "cpu",
        "memory_gib": rounded(memory / GIB),
        "memory_gb_per_s": rounded(bandwidth / 1e9),
        "memory_share": rounded(min(1.0, kernels.memory_bandwidth / bandwidth)),
        "peak_tflops": {dtype: rounded(max(rate, best[dtype]) / 1e12) for dtype, rate in peaks.items()},
        "measured_tflops": {dtype: rounded(rate / 1e12) for dtype, rate in best.items()},
        "launch_us": rounded(kernels.launch_s * 1e6),
    }
    if kernels.compiled_launch_s is not None:
        found["compiled_launch_us"] = rounded(kernels.compiled_launch_s * 1e6)
    found["multiprocessors"] = known.sm_count if known else measured.threads
    found["node"] = name
    found["shapes"] = [
        {"kind": rate.kind, "dtype": rate.dtype, "sizes": list(rate.sizes), "tflops": rounded(rate.flops / 1e12)}
        | ({"layout": rate.layout} if rate.layout else {})
        for rate in kernels.rates
    ]
    if kernels.families is not None:
        families = kernels.families
        found["operation_us"] = rounded(families.operation_s * 1e6)
        found["tensor_us"] = rounded(families.tensor_s * 1e6)
        if families.loop_s is not None:
            found |= {"step_us": rounded(families.step_s * 1e6), "loop_us": rounded(families.loop_s * 1e6)}
        found["memory_rates"] = {
            family: {size: rounded(rate / 1e9) for size, rate in points} for family, points in families.rates.items()
        }
    if "time" in about:
        where = {"processor": _what(machine, measured), "threads": measured.threads, "ranks": measured.ranks}
        found["measured"] = {name: about[name] for name in ("time", "torch", "python")} | where
        found["measured"]["spread"] = about["spread"]
    return found


def _link(kind: str, found: LinkFigures, ranks: int) -> dict[str, Any]:
    rate = rounded(found.bandwidth / 1e9)
    return {
        "kind": kind,
        "gb_per_s": rate,
        "efficiency": 1.0,
        "latency_us": rounded(found.latency_s * 1e6),
        "ring_gb_per_s": {ranks: rate},
        "all_reduce_us": {
            count: {size: rounded(took * 1e6) for size, took in points} for count, points in found.by_ranks.items()
        },
        "busy": rounded(found.busy),
    }


def _what(machine: Machine, measured: MachineFigures) -> str:
    return machine.gpus[0] if measured.device == "cuda" and machine.gpus else machine.processor


def _known(machine: Machine, measured: MachineFigures) -> Device | None:
    """Returns the catalog's device of the GPUs that were measured; None where it has none, and for a CPU."""
    if measured.device != "cuda" or not machine.gpus:
        return None
    try:
        return Catalog().device(machine.gpus[0])
    except UsageError:
        return None


def rounded(value: float) -> float:
    """Returns a figure with four digits."""
    return float(f"{value:.4g}")
