"""Hosts as ``--hosts`` and ``--hostfile`` write them, with the ranks of each as Open MPI and DeepSpeed do.

node1                   a host
node1 slots=4           a host with four ranks, in a hostfile; what follows a # is a comment
node1:4                 the same, in both
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from paceline.errors import ConfigError, Problem

# A name with more than one colon is an address of IPv6.
_ENTRY = re.compile(r"(?P<host>[^\s:]+|\S*:\S*:\S*)(?:(?::|\s+slots=)(?P<slots>[1-9]\d{0,2}))?")
_RULE = "it is HOST, HOST slots=N or HOST:N, with N ranks there, 999 at most"
_FIX = "leave the rest out: no host gets more ranks than slots, and ssh's port goes into ~/.ssh/config"


def read_hosts(named: str, lines: Iterable[str] = ()) -> tuple[tuple[str, ...], int | None]:
    """Returns the hosts of ``--hosts`` and of a hostfile, and the ranks of each, if given. Raises ConfigError."""
    entries = [("--hosts", word.strip()) for word in named.split(",")]
    entries += [(f"line {number}", line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    read = [(where, text, _ENTRY.fullmatch(text)) for where, text in entries if text]
    problems = [Problem(what=f"{at}: {text[:80]!r}", rule=_RULE, fix=_FIX) for at, text, found in read if not found]
    slots = [(found["host"], found["slots"]) for _, _, found in read if found]
    for host, count in Counter(host for host, _ in slots).items():
        if count > 1:
            rule = "one launcher on a host starts all of its ranks"
            fix = f"write {host}:{count} once"
            problems.append(Problem(what=f"{host} is listed {count} times", rule=rule, fix=fix))
    if len({count for _, count in slots}) > 1:
        shown = ", ".join(f"{host} {count or 'none'}" for host, count in slots[:8])
        rule = "every host has as many ranks as the others"
        problems.append(Problem(what=f"slots of hosts differ: {shown}", rule=rule, fix="give all the same slots"))
    if problems:
        raise ConfigError(problems, source="the hosts")
    return tuple(host for host, _ in slots), int(slots[0][1]) if slots and slots[0][1] else None
