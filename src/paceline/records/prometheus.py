"""The newest numbers of runs as Prometheus reads them: ``metrics_text(runs)`` is the text of ``/metrics``.

Every series has the label ``run``; those of a rank ``rank``, those of a host ``host``, and ``device`` where there are
several. Only the ends of files are read, so that a page that is asked every few seconds stays cheap.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.records.records import (
    CommRecord,
    EndRecord,
    EvalRecord,
    HostRecord,
    Record,
    RunRecord,
    StepRecord,
    parse_line,
)
from paceline.records.summary import PHASES
from paceline.untrusted import open_regular

_TAIL_BYTES = 2**18

METRICS = {
    "paceline_step": "updates that the rank has made",
    "paceline_steps_planned": "updates that the run will make",
    "paceline_epoch": "epochs that the run has gone through",
    "paceline_loss": "mean loss of the rank's samples in the newest step",
    "paceline_learning_rate": "learning rate of the newest step",
    "paceline_grad_norm": "norm of the gradients of all ranks before clipping",
    "paceline_step_seconds": "seconds of the newest step",
    "paceline_phase_seconds": "seconds of the newest step by phase; comm is exposed communication",
    "paceline_samples_per_second": "samples of the rank a second",
    "paceline_units_per_second": "tokens, images or samples of the rank a second",
    "paceline_flops_per_second": "FLOP/s of the rank's share of the model",
    "paceline_mfu": "share of the device's peak FLOP/s",
    "paceline_memory_bytes": "memory of the rank: peak, allocated, reserved",
    "paceline_eval_loss": "loss of the newest evaluation",
    "paceline_eval_accuracy": "accuracy of the newest evaluation",
    "paceline_comm_bytes_per_second": "bytes of tensors over seconds, by kind and group of collectives",
    "paceline_comm_bus_bytes_per_second": "bytes over a link a second, by kind and group of collectives",
    "paceline_last_record_timestamp_seconds": "when the newest record was made",
    "paceline_ended": "1 when the rank's newest attempt has ended, with how",
    "paceline_hw_gpu_utilization": "share of time in which a GPU ran kernels",
    "paceline_hw_gpu_memory_usage": "bytes of a GPU's memory in use",
    "paceline_hw_gpu_memory_limit": "bytes of a GPU's memory",
    "paceline_hw_gpu_clock_sm": "clock of a GPU's processors in hertz",
    "paceline_hw_gpu_clock_memory": "clock of a GPU's memory in hertz",
    "paceline_hw_gpu_throttle_power": "1 while power lowers a GPU's clocks",
    "paceline_hw_gpu_throttle_thermal": "1 while heat lowers a GPU's clocks",
    "paceline_hw_gpu_throttle_hardware": "1 while the hardware lowers a GPU's clocks",
    "paceline_hw_gpu_throttle_sync": "1 while another GPU of its group lowers a GPU's clocks",
    "paceline_hw_power": "watts of a GPU",
    "paceline_hw_temperature": "degrees Celsius of a GPU",
    "paceline_system_cpu_utilization": "share of all cores of the host that is busy",
    "paceline_system_memory_usage": "bytes of the host's memory in use",
    "paceline_system_memory_limit": "bytes of the host's memory",
    "paceline_process_memory_usage": "resident bytes of a rank's process; device is the rank",
    "paceline_system_network_io": "bytes a second through the network; device is receive or transmit",
    "paceline_system_disk_io": "bytes a second of the disks; device is read or write",
}
"""The names of all metrics, with what they are."""

Sample = tuple[str, dict[str, str], float]


def metrics_text(runs: Sequence[Path]) -> str:
    """Returns the newest numbers of runs in Prometheus's text format. What cannot be read is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Runs(runs))
    return generate_latest(registry).decode("utf-8")


class _Runs(Collector):
    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        by_name: dict[str, list[Sample]] = {}
        for label, folder in _labels(self._runs):
            for sample in _of_run(label, folder):
                by_name.setdefault(sample[0], []).append(sample)
        for name, help_text in METRICS.items():
            samples = by_name.get(name)
            if samples:
                family = GaugeMetricFamily(name, help_text)
                for _, labels, value in samples:
                    family.add_sample(name, labels, value)
                yield family


def _labels(runs: Iterable[Path]) -> list[tuple[str, Path]]:
    """Returns each run with its name, and with its folder's where several have the same."""
    folders = list(dict.fromkeys(run.absolute() for run in runs))
    names = Counter(folder.name for folder in folders)
    return [(folder.name if names[folder.name] == 1 else str(folder), folder) for folder in folders]


def _of_run(label: str, folder: Path) -> Iterator[Sample]:
    for path in sorted((folder / "records").glob("*.jsonl")):
        rank, host = re.fullmatch(r"rank-(\d+)", path.stem), path.stem.startswith("host-")
        if rank is None and not host:
            continue
        with contextlib.suppress(OSError):
            newest = _newest(path)
            if rank is not None:
                yield from _of_rank({"run": label, "rank": rank[1]}, newest)
            else:
                yield from _of_host(label, newest)


def _newest(path: Path) -> dict[object, Record]:
    """Returns the last record of each type among the first and the last lines of a file; of communication by group."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(min(size, 4096)) or b""
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES) or b""
    lines = tail.split(b"\n")[:-1]  # the last part is a line that is being written
    if size > _TAIL_BYTES:
        lines = [head.split(b"\n")[0], *lines[1:]]  # the first of the run, and no half line
    found: dict[object, Record] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            record = parse_line(line)
            if isinstance(record, RunRecord):
                found.clear()  # a new attempt
            key = (record.kind, record.group) if isinstance(record, CommRecord) else type(record)
            found[key] = record
    return found


def _of_rank(labels: dict[str, str], newest: dict[object, Record]) -> Iterator[Sample]:
    run = newest.get(RunRecord)
    for record in newest.values():
        match record:
            case RunRecord():
                yield "paceline_steps_planned", labels, record.total_steps
            case StepRecord():
                yield from _of_step(labels, record, run if isinstance(run, RunRecord) else None)
            case EvalRecord():
                yield "paceline_eval_loss", labels, record.loss
                if record.accuracy is not None:
                    yield "paceline_eval_accuracy", labels, record.accuracy
            case CommRecord():
                collective = {**labels, "kind": record.kind, "group": record.group}
                yield "paceline_comm_bytes_per_second", collective, record.bandwidth
                yield "paceline_comm_bus_bytes_per_second", collective, record.bus_bandwidth
            case EndRecord():
                yield "paceline_ended", {**labels, "status": record.status}, 1
    if newest:
        newest_s = max(record.time for record in newest.values())
        yield "paceline_last_record_timestamp_seconds", labels, newest_s


def _of_step(labels: dict[str, str], record: StepRecord, run: RunRecord | None) -> Iterator[Sample]:
    values = {
        "paceline_step": record.step,
        "paceline_epoch": record.epoch,
        "paceline_loss": record.loss,
        "paceline_learning_rate": record.lr,
        "paceline_grad_norm": record.grad_norm,
        "paceline_step_seconds": record.step_s,
        "paceline_samples_per_second": record.samples_per_s,
        "paceline_flops_per_second": record.flops_per_s,
        "paceline_mfu": record.mfu,
    }
    yield from ((name, labels, value) for name, value in values.items() if value is not None)
    for phase in PHASES:
        yield "paceline_phase_seconds", {**labels, "phase": phase.removesuffix("_s")}, getattr(record, phase)
    if run is not None:
        rate = record.samples_per_s * run.units_per_sample
        yield "paceline_units_per_second", {**labels, "unit": run.unit}, rate
    memory = {"peak": record.memory_bytes, "allocated": record.allocated_bytes, "reserved": record.reserved_bytes}
    for kind, value in memory.items():
        if value is not None:
            yield "paceline_memory_bytes", {**labels, "kind": kind}, value


def _of_host(label: str, newest: dict[object, Record]) -> Iterator[Sample]:
    record = newest.get(HostRecord)
    if not isinstance(record, HostRecord):
        return
    for key, value in record.values.items():
        name, _, device = key.partition("/")
        metric = f"paceline_{name.replace('.', '_')}"
        if metric in METRICS:
            yield metric, {"run": label, "host": record.host, **({"device": device} if device else {})}, value
