"""A sink in memory, for tests that look at what a trainer told."""

from __future__ import annotations

from paceline.records.records import EventRecord, Record, StepRecord


class Kept:
    """Keeps the records that it is given, in their order."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, *records: Record) -> None:
        self.records += records

    def flush(self) -> None:
        """Does nothing: there is nowhere to hand them over to."""

    def close(self) -> None:
        """Does nothing: they can still be read."""

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def events(self) -> list[EventRecord]:
        return [record for record in self.records if isinstance(record, EventRecord)]
