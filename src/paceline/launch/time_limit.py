"""The time that a job may take, as Slurm writes it, for every target that has time limits."""

from __future__ import annotations

import re

from paceline.errors import UsageError


def read_time(text: str) -> int:
    """Returns the seconds of ``1:30:00``, ``90:00`` (minutes), ``1-00:00:00`` (a day) or ``90`` (minutes), as Slurm."""
    found = re.fullmatch(r"(?:(?P<days>\d{1,4})-)?(?P<rest>\d{1,6}(?::\d{1,2}){0,2})", text)
    parts = [int(part) for part in found["rest"].split(":")] if found else []
    if found and found["days"]:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    elif parts:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    total = 0 if not found else int(found["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise UsageError(f"--time {text}\n  it is hours, minutes and seconds\n  try --time 1:30:00")
    return total
