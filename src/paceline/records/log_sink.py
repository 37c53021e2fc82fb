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

    def write(self, *records: Record) -> None:
        for record in records:
            line = describe(record)
            if line:
                level = _LEVELS.get(record.name, logging.INFO) if isinstance(record, EventRecord) else logging.INFO
                self._logger.log(level, "%s", line)

    def flush(self) -> None:
        """Does nothing: a line is written when it comes."""

    def close(self) -> None:
        """Does nothing: the logger's handlers are not its own."""


def describe(record: Record) -> str:
    """Returns a record in one line; empty for what is many numbers."""
    match record:
        case RunRecord():
            size, how = format_count(record.num_parameters), f"{record.strategy}, {record.backend}"
            where = f"rank {record.rank} of {record.world_size} begins on {record.host} ({record.device})"
            return f"{where}: {how}, {size} parameters, {record.total_steps} steps"
        case StepRecord():
            loss = "no samples" if record.loss is None else f"loss {record.loss:.4f}"
            rate = f"{record.samples_per_s:,.0f} samples/s"
            return f"step {record.step}: {loss}, lr {record.lr:.3g}, {1e3 * record.step_s:.1f} ms, {rate}"
        case EvalRecord():
            accuracy = "" if record.accuracy is None else f", accuracy {record.accuracy:.4f}"
            return f"evaluation after step {record.step}: loss {record.loss:.4f}{accuracy}"
        case EventRecord(name="histogram" | "scalars"):
            return ""
        case EventRecord():
            return f"{event_name(record.name)} at step {record.step}: {event_text(record)}"
        case EndRecord():
            why = f": {record.message}" if record.message else ""
            return f"{record.status} after step {record.step} and {record.seconds:.1f} s{why}"
    return ""
