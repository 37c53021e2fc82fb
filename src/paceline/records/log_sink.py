"""A sink that writes records as lines of a log, for people."""

from __future__ import annotations

import logging

from paceline.records.event_words import event_name, event_text
from paceline.records.records import EndRecord, EvalRecord, EventRecord, Record, RunRecord, StepRecord
from paceline.units import format_count

_LEVELS = {"skipped": logging.WARNING, "straggler": logging.WARNING, "roll_back": logging.WARNING}


class LogSink:
    """Hands records to ``logging``: the start and the end of an attempt, steps, evaluations and events."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._global_batch = 0

    def write(self, *records: Record) -> None:
        for record in records:
            if isinstance(record, RunRecord):
                self._global_batch = record.global_batch
            line = describe(record, self._global_batch)
            if line:
                level = _LEVELS.get(record.name, logging.INFO) if isinstance(record, EventRecord) else logging.INFO
                self._logger.log(level, "%s", line)

    def flush(self) -> None:
        """Does nothing: a line is written when it comes."""

    def close(self) -> None:
        """Does nothing: the logger's handlers are not its own."""


def describe(record: Record, global_batch: int = 0) -> str:
    """Returns a record in one line; empty for what is many numbers. A rank may have a part of the global batch."""
    match record:
        case RunRecord():
            size, how = format_count(record.num_parameters), f"{record.strategy}, {record.backend}"
            where = f"rank {record.rank} of {record.world_size} begins on {record.host} ({record.device})"
            return f"{where}: {how}, {size} parameters, {record.total_steps} steps"
        case StepRecord():
            loss = "no samples" if record.loss is None else f"loss {record.loss:.4f}"
            if record.loss is not None and record.samples < global_batch:
                loss += f" of this rank's {record.samples} of {global_batch} samples"
            rate = f"{record.samples_per_s:,.0f} samples/s"
            return f"step {record.step}: {loss}, lr {record.lr:.3g}, {1e3 * record.step_s:.1f} ms, {rate}"
        case EvalRecord():
            values = {"loss": record.loss, "accuracy": record.accuracy, **record.metrics}
            told = [f"{name} {value:.4f}" for name, value in values.items() if value is not None]
            return f"evaluation after step {record.step}: {', '.join(told)}"
        case EventRecord(name="histogram" | "scalars"):
            return ""
        case EventRecord():
            return f"{event_name(record.name)} at step {record.step}: {event_text(record)}"
        case EndRecord():
            why = f": {record.message}" if record.message else ""
            return f"{record.status} after step {record.step} and {record.seconds:.1f} s{why}"
    return ""
