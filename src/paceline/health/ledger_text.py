"""What ledgers say as text, for another host: whole views where ranks stand still, and times while they do not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.pairing import Update
from paceline.health.straggler import PhaseTimes, RankLook

_LAST = 8
_COLLECTIVE = LedgerCall(kind="a collective")


def views_to_text(views: Sequence[LedgerView], now: float) -> str:
    """Turns views into text, each with its last operations and the seconds since it last changed."""
    return json.dumps([_to_json(_shifted(view, now)) for view in views])


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


def looks_to_text(looks: Sequence[RankLook]) -> str:
    """Turns looks into text with what comparing ranks needs: groups once, and the places and times of operations."""
    groups: dict[GroupName, int] = {}
    ranks = []
    for look in looks:
        entries = [
            [groups.setdefault(each.group, len(groups)), each.sequence, each.step, each.issued_s]
            for each in look.view.entries
            if not each.call.is_message
        ]
        view = look.view
        ranks.append([view.rank, view.host, view.pid, asdict(look.times), look.ahead_s, entries])
    return json.dumps([[[list(group.ranks), group.number] for group in groups], ranks])


def looks_from_text(text: str) -> list[RankLook]:
    """Reads what ``looks_to_text`` wrote."""
    named, ranks = json.loads(text)
    groups = [GroupName(tuple(members), number) for members, number in named]
    looks = []
    for rank, host, pid, times, ahead_s, places in ranks:
        entries = tuple(
            LedgerEntry(
                number=at, group=groups[group], sequence=sequence, step=step, issued_s=issued_s, call=_COLLECTIVE
            )
            for at, (group, sequence, step, issued_s) in enumerate(places, start=1)
        )
        view = LedgerView(rank=rank, host=host, pid=pid, entries=entries)
        looks.append(RankLook(view=view, times=PhaseTimes(**times), ahead_s=ahead_s))
    return looks


PlacedUpdate = tuple[Update, LedgerEntry | None]
"""An update, and the collective before it."""


def updates_to_text(updates: Sequence[PlacedUpdate]) -> str:
    """Turns updates into text; the lines and calls of the collectives before them come once each."""
    places: dict[str, int] = {}
    rows = []
    for update, entry in updates:
        place = "" if entry is None else json.dumps([asdict(entry.call), entry.site])
        counters = list(update.counters.items())
        rows.append([update.collectives, update.updates, update.idle, counters, places.setdefault(place, len(places))])
    return json.dumps([list(places), rows])


def updates_from_text(text: str, group: GroupName) -> list[PlacedUpdate]:
    """Reads what ``updates_to_text`` wrote; ``group`` is that of all ranks. Raises ValueError for other texts."""
    try:
        places, rows = json.loads(text)
        calls = [json.loads(place) if place else None for place in places]
        return [_placed_update(row, calls, group) for row in rows]
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"no updates of ranks: {error}") from error


def _placed_update(row: Sequence[Any], calls: Sequence[Any], group: GroupName) -> PlacedUpdate:
    collectives, updates, idle, counters, place = row
    update = Update(collectives=collectives, updates=updates, idle=idle, counters=dict(counters))
    if calls[place] is None:
        return update, None
    call, site = calls[place]
    asked = LedgerCall(**call | {"shape": tuple(call["shape"])})
    return update, LedgerEntry(number=0, group=group, sequence=collectives - 1, call=asked, site=site)


def _to_json(view: LedgerView) -> dict[str, Any]:
    entry = view.waits_in
    kept = {each.number: each for each in (*view.entries[-_LAST:], *([] if entry is None else [entry]))}
    values = asdict(replace(view, entries=(), issued={}))
    issued = [[list(group.ranks), group.number, count] for group, count in view.issued.items()]
    return values | {"entries": [asdict(kept[number]) for number in sorted(kept)], "issued": issued}


def _entry(values: dict[str, Any]) -> LedgerEntry:
    group, call = values.pop("group"), values.pop("call")
    return LedgerEntry(
        **values,
        group=GroupName(tuple(group["ranks"]), group["number"]),
        call=LedgerCall(**call | {"shape": tuple(call["shape"])}),
    )
