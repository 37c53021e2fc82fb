"""What was measured, as YAML of the catalog: devices, links and nodes for ``load_cluster``; and its fit to a run.

Figures are rounded to four digits; more would be noise. Comments at the top say what they were measured on and with.
An entry is fitted to a run that the machine has finished, to what its kernels and its collectives really took:

    compute         c = measured (step - waiting for ranks - what surrounds it) / what a dry run's kernels add up to
                    what surrounds it is the wait for data, or the entry's loop where that is more
    communication   m such that the step of the dry run, with its collectives times m, takes as long as the run's

Times are medians over steps of the slowest rank, without the first tenth. The same run and entry give the same figures.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from paceline.bounded_yaml import load_yaml
from paceline.cluster.detect import Machine, detect_machine
from paceline.cluster.devices import Catalog, Cluster, loop_us
from paceline.cluster.entries import DeviceEntry, find_name, parse_catalog, shipped
from paceline.config import Config, load_config
from paceline.config.suggest import near_folders
from paceline.errors import UsageError
from paceline.predict.replay.program import Program
from paceline.predict.replay.replay import replay
from paceline.records.summary import open_run
from paceline.rehearse.dryrun.record import record_stages
from paceline.search.expect import present_cluster
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
    rate, latency = rounded(found.bandwidth / 1e9), rounded(found.latency_s * 1e6)
    times = {count: {size: rounded(took * 1e6) for size, took in points} for count, points in found.by_ranks.items()}
    link = {"kind": kind, "gb_per_s": rate, "efficiency": 1.0, "latency_us": latency, "ring_gb_per_s": {ranks: rate}}
    return link | {"all_reduce_us": times, "busy": rounded(found.busy)}


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


_ROUNDS = 14
_MOST = 20.0  # times what was measured: more is another machine
_CLOSE = 0.05  # of a step: collectives that change it by less cannot be told from a run
_USUAL_KERNELS, _USUAL_COLLECTIVES = (0.5, 2.0), (0.25, 4.0)  # outside of these something else was measured
_FEWEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Seconds of a finished run's steps, of their compute, and of their wait for data; on how many ranks, over what."""

    step_s: float
    compute_s: float
    data_s: float
    ranks: int
    backend: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What came out: seconds that were predicted before and are now, beside the measured; and the entry's text."""

    measured_s: float
    before_s: float
    after_s: float
    compute: float
    communication: float
    text: str
    ranks: int = 1
    cores: int = 0  # that ranks on CPUs shared

    def error(self, seconds: float) -> float:
        """Returns by which part of the measured time a prediction is off."""
        return seconds / self.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        errors = {"before_error": self.error(self.before_s), "after_error": self.error(self.after_s)}
        kept = ("measured_s", "before_s", "after_s", "compute", "communication")
        return {name: getattr(self, name) for name in kept} | errors | {"doubts": self.doubts()}

    def doubts(self) -> list[str]:
        """Returns what speaks against this fit: factors that no other run of the entry's machine would have."""
        factors = (("kernels", self.compute, _USUAL_KERNELS), ("collectives", self.communication, _USUAL_COLLECTIVES))
        told = [
            f"{name} {factor:.4g} times what the entry said, and {low:g} to {high:g} is usual"
            for name, factor, (low, high) in factors
            if not low <= factor <= high
        ]
        if told and self.ranks > self.cores > 0:
            told.append(f"{self.ranks} ranks took turns on {self.cores} cores: what they waited for counts as theirs")
        elif told:
            told.append("something else ran on the machine, or the entry or the run is of another one")
        return told


def refit(run_folder: Path, machine: Machine, base: Path | None = None) -> Refit:
    """Fits ``base`` (None: the catalog's small host) to a run. Raises UsageError where that cannot be."""
    path = run_folder / "config.yaml"
    if not path.is_file():
        raise UsageError(
            f"{run_folder} is no run: it has no config.yaml\n  a run's folder holds its config and records\n"
            f"  {near_folders(run_folder) or 'name the folder that paceline train has told'}"
        )
    config, times = load_config(path, []), read_times(run_folder)
    if times.backend == "virtual":
        raise UsageError(
            f"{run_folder} is of virtual ranks, which take turns\n  ranks that ran at the same time tell "
            "what they take\n  train with processes: paceline train CONFIG train.steps=40"
        )
    config = config.with_values("parallel", ranks=times.ranks)
    text = text_of(base, config, machine)
    programs = record_stages(config, ranks=times.ranks)
    cluster = cluster_of(config, machine, text)
    before = _predict(programs, cluster)
    around = max(0.0, cluster.device.loop_s - times.data_s)
    compute = max(times.compute_s - around, 0.5 * times.compute_s) / before[1]
    communication = _fit(config, machine, programs, text, compute, times)
    fitted = rescale(text, compute, communication, times.backend, str(run_folder.name))
    after = _predict(programs, cluster_of(config, machine, fitted))
    return Refit(
        measured_s=times.step_s,
        before_s=before[0],
        after_s=after[0],
        compute=compute,
        communication=communication,
        text=fitted,
        ranks=times.ranks,
        cores=machine.cores if config.parallel.device == "cpu" else 0,
    )


def read_times(run_folder: Path) -> RunTimes:
    """Reads what a run's steps took. Raises UsageError where there are too few of them, RunFolderError where none."""
    records = open_run(run_folder)
    if len(records.steps) <= _FEWEST:
        raise UsageError(
            f"{run_folder} holds {len(records.steps)} steps\n  an entry is fitted to {_FEWEST + 1} steps at least\n"
            "  train for longer: paceline train CONFIG train.steps=40"
        )
    rows = [list(row.values()) for row in records.steps.without_warm_up().rows]
    return RunTimes(
        step_s=median(max(each.step_s for each in row) for row in rows),
        compute_s=median(max(each.step_s - each.comm_s - each.data_s for each in row) for row in rows),
        data_s=median(max(each.data_s for each in row) for row in rows),
        ranks=records.run.world_size,
        backend=records.run.backend,
        steps=len(records.steps),
    )


def rescale(text: str, compute: float, communication: float, backend: str, run: str) -> str:
    """Returns an entry whose kernels take ``compute`` times as long, and the collectives of a backend so many times."""
    content: dict[str, Any] = load_yaml(text)
    for device in content["devices"].values():
        # It is no kernel: where nobody has measured it, the guess stays what it was.
        device["loop_us"] = loop_us(DeviceEntry.model_validate(device))
        device["factor"] = rounded(device.get("factor", 1.0) * compute)
        for key in ("operation_us", "tensor_us", "step_us", "launch_us", "compiled_launch_us"):
            if key in device:
                device[key] = rounded(device[key] * compute)
        if "measured" in device:
            device["measured"]["fitted_to"] = run
    for link in content.get("links", {}).values():
        if (link["kind"] == "loopback") != (backend == "gloo"):
            continue
        link["latency_us"] = rounded(link["latency_us"] * communication)
        link["gb_per_s"] = rounded(link["gb_per_s"] / communication)
        rates, times = link.get("ring_gb_per_s", {}), link.get("all_reduce_us", {})
        link["ring_gb_per_s"] = {count: rounded(rate / communication) for count, rate in rates.items()}
        link["all_reduce_us"] = {
            count: {size: rounded(took * communication) for size, took in points.items()}
            for count, points in times.items()
        }
    factors = f"kernels x {compute:.3f}, collectives over {backend} x {communication:.3f}"
    return changed_text(text, content, f"Fitted to the run {run}: {factors}.")


def changed_text(text: str, content: Mapping[str, Any], told: str, *, width: float = 110) -> str:
    """Writes an entry with other content: below the comments of its text, and what is told of the change."""
    lines = [line for line in text.splitlines() if line.startswith("#")]
    body = yaml.safe_dump(content, sort_keys=False, width=width, default_flow_style=None)
    written = "\n".join([*lines, f"# {told}", body])
    parse_catalog(written, "the new entry")
    return written


def _fit(
    config: Config, machine: Machine, programs: tuple[Program, ...], text: str, compute: float, times: RunTimes
) -> float:
    """Halves the range of the factor until the step takes as long as it did. Raises UsageError where none does."""
    if times.ranks == 1:
        return 1.0

    def seconds(factor: float) -> float:
        return _predict(programs, cluster_of(config, machine, rescale(text, compute, factor, times.backend, "")))[0]

    low, high = 1 / _MOST, _MOST
    if seconds(low) >= times.step_s or seconds(high) <= times.step_s:
        if abs(seconds(1.0) / times.step_s - 1) < _CLOSE:
            return 1.0
        end = low if seconds(low) >= times.step_s else high
        raise UsageError(
            f"no factor fits: with kernels {compute:.4g} times and collectives {end:g} times what the entry says, "
            f"a step takes {1e3 * seconds(end):.4g} ms, and {1e3 * times.step_s:.4g} ms were measured\n"
            f"  collectives may take {low:g} to {_MOST:g} times as long: more is another machine, or a busy one\n"
            "  train again while nothing else runs, or name this machine's entry with --cluster"
        )
    for _ in range(_ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < times.step_s else (low, middle)
    return rounded((low * high) ** 0.5)


def _predict(programs: tuple[Program, ...], cluster: Cluster) -> tuple[float, float]:
    """Returns seconds of a step, and of its compute with what the host adds."""
    found = replay(programs, cluster, with_loop=True)
    rank = found.longest
    return found.seconds, rank.compute + rank.launch_wait + rank.contention


def cluster_of(config: Config, machine: Machine, text: str) -> Cluster:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "entry.yaml"
        path.write_text(text, encoding="utf-8")
        return present_cluster(config, machine, config.parallel.decided_ranks, None, path)[0]


def text_of(base: Path | None, config: Config, machine: Machine) -> str:
    """Returns the entry that a config is predicted by here: a file's text, or the catalog's. Raises UsageError."""
    if base is not None:
        rule = "an entry is a file that paceline calibrate wrote\n  name one"
        try:
            text = base.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{base} cannot be read: {error}\n  {rule}") from error
        found = parse_catalog(text, str(base))
        if not (found.nodes or found.devices):
            raise UsageError(f"{base} has no nodes and no devices\n  {rule}")
        return text
    name: str | None = "cpu-host"
    if config.parallel.device != "cpu":  # the catalog's file of what was measured on GPUs like these, if there is one
        known = shipped().devices.get(find_name(machine.gpus[0], shipped().devices) or "") if machine.gpus else None
        name = None if known is None else known.tables_of
    if name is None:
        raise UsageError(
            "a run on GPUs, and no entry to fit\n  the catalog has no figures that were measured on such GPUs\n"
            "  measure this machine first: paceline calibrate --output mine.yaml, then --cluster mine.yaml"
        )
    return resources.files("paceline.cluster").joinpath("catalog", f"{name}.yaml").read_text(encoding="utf-8")
