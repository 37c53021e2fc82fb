"""The newest numbers of runs as Prometheus reads them: ``metrics_text(runs)`` is the text of ``/metrics``.

Every series has the label ``run``; those of a rank ``rank``, those of a host ``host``, and ``device`` where there are
several. Only the ends of files are read, so that a page that is asked every few seconds stays cheap. The series of a
run leave ten minutes after it has ended, and a day after it went silent.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.bounded_yaml import load_yaml
from paceline.records import records as kinds
from paceline.records.sinks import scalars
from paceline.records.summary import PHASES
from paceline.untrusted import open_regular

_TAIL_BYTES = 2**18
_STAYS_S, _STAYS_SILENT_S = 600.0, 86_400.0

Sample = tuple[str, dict[str, str], float]


@cache
def metrics() -> dict[str, str]:
    """Returns the names of all metrics, with what they are."""
    return dict(load_yaml(resources.files("paceline.records").joinpath("metrics.yaml").read_text(encoding="utf-8")))


def metrics_text(runs: Sequence[Path]) -> str:
    """Returns the newest numbers of runs in Prometheus's text format. What cannot be read is left out."""
    return generate_latest(_Runs(runs)).decode("utf-8")


class _Runs(Collector):
    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        by_name: dict[str, list[Sample]] = {}
        folders = list(dict.fromkeys(run.absolute() for run in self._runs))
        names = Counter(folder.name for folder in folders)
        for folder in folders:
            for sample in _of_run(folder.name if names[folder.name] == 1 else str(folder), folder):
                by_name.setdefault(sample[0], []).append(sample)
        for name, help_text in metrics().items():
            if name in by_name:
                family = GaugeMetricFamily(name, help_text)
                for _, labels, value in by_name[name]:
                    family.add_sample(name, labels, value)
                yield family


def _of_run(label: str, folder: Path) -> Iterator[Sample]:
    paths = sorted((folder / "records").glob("*.jsonl"))
    if _is_over(paths):
        return
    for path in paths:
        with contextlib.suppress(OSError):
            if rank := re.fullmatch(r"rank-(\d+)", path.stem):
                yield from _of_rank({"run": label, "rank": rank[1]}, _newest(path))
            elif path.stem.startswith("host-"):
                yield from _of_host(label, _newest(path))


def _is_over(paths: Sequence[Path]) -> bool:
    """Says whether a run has ended, and for so long that everybody has asked for its end."""
    ranks = [path for path in paths if path.stem.startswith("rank-")]
    with contextlib.suppress(OSError):
        quiet_s = time.time() - max((path.stat().st_mtime for path in ranks), default=0.0)
        return quiet_s > _STAYS_SILENT_S or (quiet_s > _STAYS_S and kinds.EndRecord in _newest(ranks[0]))
    return True


def _newest(path: Path) -> dict[object, kinds.Record]:
    """Returns the last record of each type, group and layer among the first and the last lines of a file."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(min(size, 4096)) or b""
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES) or b""
    lines = tail.split(b"\n")[:-1]  # the last part is a line that is being written
    if size > _TAIL_BYTES:
        lines = [head.split(b"\n")[0], *lines[1:]]  # the first of the run, and no half line
    found: dict[object, kinds.Record] = {}
    for line in reversed(lines):
        if kinds.StepRecord in found and line.startswith(kinds.STEPS):
            continue  # it is older
        with contextlib.suppress(ValueError):
            record = kinds.parse_line(line)
            kind = kinds.StepRecord if isinstance(record, kinds.StepRecord) else type(record)
            group = (record.kind, record.group) if isinstance(record, kinds.CommRecord) else kind
            found.setdefault((kind, record.layer) if isinstance(record, kinds.ExpertsRecord) else group, record)
            if isinstance(record, kinds.RunRecord):
                break  # an attempt begins
    return found


def _of_rank(labels: dict[str, str], newest: dict[object, kinds.Record]) -> Iterator[Sample]:
    run = newest.get(kinds.RunRecord)
    for record in newest.values():
        match record:
            case kinds.RunRecord():
                yield "paceline_steps_planned", labels, record.total_steps
            case kinds.StepRecord():
                yield from _of_step(labels, record, run if isinstance(run, kinds.RunRecord) else None)
            case kinds.EvalRecord():
                yield "paceline_eval_loss", labels, record.loss
                if record.accuracy is not None:
                    yield "paceline_eval_accuracy", labels, record.accuracy
            case kinds.CommRecord():
                collective = {**labels, "kind": record.kind, "group": record.group}
                yield "paceline_comm_bytes_per_second", collective, record.bandwidth
                yield "paceline_comm_bus_bytes_per_second", collective, record.bus_bandwidth
            case kinds.ExpertsRecord():
                for tag, value in scalars(record):
                    yield f"paceline_experts_{tag.rpartition('/')[2]}", {**labels, "layer": record.layer}, value
            case kinds.EndRecord():
                yield "paceline_ended", {**labels, "status": record.status}, 1
    if newest:
        yield "paceline_last_record_timestamp_seconds", labels, max(record.time for record in newest.values())


def _of_step(labels: dict[str, str], record: kinds.StepRecord, run: kinds.RunRecord | None) -> Iterator[Sample]:
    values = {"step": record.step, "epoch": record.epoch, "loss": record.loss, "learning_rate": record.lr}
    values |= {"grad_norm": record.grad_norm, "step_seconds": record.step_s, "mfu": record.mfu}
    values |= {"samples_per_second": record.samples_per_s, "flops_per_second": record.flops_per_s}
    yield from ((f"paceline_{name}", labels, value) for name, value in values.items() if value is not None)
    for phase in PHASES:
        yield "paceline_phase_seconds", {**labels, "phase": phase.removesuffix("_s")}, getattr(record, phase)
    if run is not None:
        rate = record.samples_per_s * run.units_per_sample
        yield "paceline_units_per_second", {**labels, "unit": run.unit}, rate
    memory = {"peak": record.memory_bytes, "allocated": record.allocated_bytes, "reserved": record.reserved_bytes}
    for kind, value in memory.items():
        if value is not None:
            yield "paceline_memory_bytes", {**labels, "kind": kind}, value


def _of_host(label: str, newest: dict[object, kinds.Record]) -> Iterator[Sample]:
    if isinstance(record := newest.get(kinds.HostRecord), kinds.HostRecord):
        for key, value in record.values.items():
            name, _, device = key.partition("/")
            metric = f"paceline_{name.replace('.', '_')}"
            if metric in metrics():
                yield metric, {"run": label, "host": record.host, **({"device": device} if device else {})}, value
