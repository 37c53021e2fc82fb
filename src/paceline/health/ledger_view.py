"""What a rank's ledger says, as plain values: whoever writes it, a file, a thread or a test, it is judged alike.

An operation is known by its group and its number there: all ranks of a group issue the same operations in the same
order, so that the n-th of one rank is the n-th of the others. Messages are numbered by sender, receiver and tag.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

State = Literal["running", "finished", "failed", "dead"]

PHASES = ("setup", "data", "forward", "backward", "optimizer", "evaluation", "checkpoint")
SETUP, DATA, FORWARD, BACKWARD, OPTIMIZER, EVALUATION, CHECKPOINT = PHASES
STEP_PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER)
_LAST = 8  # operations of a rank that another host is told


@dataclass(frozen=True, slots=True)
class GroupName:
    """A group of ranks of the world; ``number`` tells groups of the same members apart, in the order they were made."""

    ranks: tuple[int, ...]
    number: int = 0

    def __str__(self) -> str:
        again = f" (group {self.number + 1} of these)" if self.number else ""
        return f"{list(self.ranks)}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCall:
    """What was asked for, as far as all ranks must agree on it. ``peer`` is a rank of the world: root, or other end."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    op: str = ""
    peer: int | None = None
    tag: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it joins two ranks and not the whole group."""
        return self.kind in ("send", "recv")

    @property
    def agreed(self) -> tuple[object, ...]:
        """What must be the same on all ranks: not the shape of an all-to-all, nor how the same elements are shaped."""
        if self.kind == "all_to_all":
            return self.kind, self.dtype
        return self.kind, self.dtype, math.prod(self.shape) if self.dtype else 0, self.op, self.peer

    def __str__(self) -> str:
        data = f"{self.dtype} {list(self.shape)}" if self.dtype else ""
        peer = "" if self.peer is None else f"{'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        tag = f"tag {self.tag}" if self.tag else ""
        return f"{self.kind}({', '.join(part for part in (self.op, peer, data, tag) if part)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """An operation by its ``number`` in the rank and ``sequence`` in the group; ``done_s`` is None while it waits."""

    number: int
    group: GroupName
    sequence: int
    call: LedgerCall
    site: str = ""
    phase: str = ""
    step: int = 0
    issued_s: float = 0.0
    done_s: float | None = None

    @property
    def line(self) -> str:
        return self.site or "an unknown line"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """One rank at one moment.

    ``entries`` are its last operations, oldest first; ``issued`` says how many collectives it has issued in each
    group; ``waiting`` is the number of the entry in which it stands now; ``changed_s`` is when anything last changed
    here, and ``stands_at`` the line where it is, if somebody asked. ``halted`` says what stopped its process from
    outside, such as "stopped (SIGSTOP)", since ``halted_s``; ``blocked`` what the system does for it all the time.
    ``has_joined`` is False before its first entry can be written.
    """

    rank: int
    state: State = "running"
    phase: str = SETUP
    step: int = 0
    entries: tuple[LedgerEntry, ...] = ()
    issued: Mapping[GroupName, int] = field(default_factory=dict)
    waiting: int | None = None
    changed_s: float = 0.0
    stands_at: str = ""
    host: str = ""
    pid: int = 0
    halted: str = ""
    halted_s: float = 0.0
    blocked: str = ""
    has_joined: bool = True

    @property
    def waits_in(self) -> LedgerEntry | None:
        if self.waiting is None or self.state != "running":
            return None
        return next((entry for entry in reversed(self.entries) if entry.number == self.waiting), None)


def views_to_text(views: Sequence[LedgerView], now: float) -> str:
    """Turns views into text, each with its last operations and the seconds since it last changed."""
    found = []
    for view in views:
        entry = view.waits_in
        kept = {each.number: each for each in (*view.entries[-_LAST:], *([] if entry is None else [entry]))}
        values = asdict(replace(_shifted(view, now), entries=(), issued={}))
        issued = [[list(group.ranks), group.number, count] for group, count in view.issued.items()]
        found.append(values | {"entries": [asdict(kept[number]) for number in sorted(kept)], "issued": issued})
    return json.dumps(found)


def views_from_text(text: str, now: float) -> list[LedgerView]:
    """Reads what ``views_to_text`` wrote; ``now`` is on the reader's clock."""
    found = []
    for values in json.loads(text):
        issued = {GroupName(tuple(ranks), number): count for ranks, number, count in values.pop("issued")}
        entries = tuple(map(_entry, values.pop("entries")))
        found.append(_shifted(LedgerView(**values, entries=entries, issued=issued), now))
    return found


def _shifted(view: LedgerView, now: float) -> LedgerView:
    """Turns the times of a view into the seconds since, and back."""
    halted_s = now - view.halted_s if view.halted else 0.0
    return replace(view, changed_s=now - view.changed_s, halted_s=halted_s)


def _entry(values: dict[str, Any]) -> LedgerEntry:
    group, call = values.pop("group"), values.pop("call")
    name = GroupName(tuple(group["ranks"]), group["number"])
    return LedgerEntry(**values, group=name, call=LedgerCall(**call | {"shape": tuple(call["shape"])}))
