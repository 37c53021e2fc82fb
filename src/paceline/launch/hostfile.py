"""Hosts as ``--hosts`` and ``--hostfile`` write them, with the ranks of each as Open MPI and DeepSpeed do.

    node1                   a host
    node1 slots=4           a host with four ranks, in a hostfile; what follows a # is a comment
    node1:4                 the same, in both

A host stands there once: one launcher starts all of its ranks. All hosts have as many ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from paceline.errors import ConfigError, Problem

_MOST_SLOTS = 1024
_LINE_RULE = "a line is HOST, HOST slots=N or HOST:N"


def read_hosts(named: str, lines: Iterable[str] = ()) -> tuple[tuple[str, ...], int | None]:
    """Returns the hosts of ``--hosts`` and of a hostfile's lines, and the ranks of each, where slots say so.

    Raises ConfigError with all that is wrong with them.
    """
    found = [([word.strip()], "--hosts") for word in named.split(",")]
    found += [(line.partition("#")[0].split(), f"line {number}") for number, line in enumerate(lines, 1)]
    hosts: list[str] = []
    slots: dict[str, int] = {}
    problems: list[Problem] = []
    for words, where in found:
        if words and words[0]:
            host, count, wrong = _read_line(words, where)
            hosts.append(host)
            problems += wrong
            if count is not None:
                slots[host] = count
    problems += [*_twice(hosts), *_uneven(hosts, slots)]
    if problems:
        raise ConfigError(problems, source="the hosts")
    return tuple(hosts), next(iter(slots.values()), None)


def _read_line(words: list[str], where: str) -> tuple[str, int | None, list[Problem]]:
    """Returns a host, its slots, and what is wrong with them. More than one colon is an address of IPv6."""
    host, _, count = words[0].partition(":") if words[0].count(":") == 1 else (words[0], "", "")
    given = [count] if host != words[0] else []
    problems = []
    for word in words[1:]:
        name, separator, value = word.partition("=")
        if name == "slots" and separator:
            given.append(value)
        else:
            fix = "leave it out: no more ranks are started than slots" if "max" in name else "leave it out"
            problems.append(Problem(what=f"{where}: {word!r} of host {host}", rule=_LINE_RULE, fix=fix))
    if len(given) > 1:
        what = f"{where}: slots of host {host} are given twice, {' and '.join(given)}"
        problems.append(Problem(what=what, rule=_LINE_RULE, fix="give them once"))
    for text in given:
        if not re.fullmatch(r"[1-9]\d{0,5}", text) or int(text) > _MOST_SLOTS:
            rule = f"slots are ranks of the host, 1 to {_MOST_SLOTS}"
            fix = f"write {host}:2 for two ranks; ssh's port goes into ~/.ssh/config"
            problems.append(Problem(what=f"{where}: host {host} has slots {text!r}", rule=rule, fix=fix))
    return host, int(given[0]) if given and not problems else None, problems


def _twice(hosts: list[str]) -> Iterator[Problem]:
    for host, count in Counter(hosts).items():
        if count > 1:
            rule = "one launcher on a host starts all of its ranks"
            yield Problem(what=f"host {host} is listed {count} times", rule=rule, fix=f"write {host}:{count} once")


def _uneven(hosts: list[str], slots: dict[str, int]) -> Iterator[Problem]:
    without = [host for host in hosts if host not in slots]
    if len(set(slots.values())) > 1 or (slots and without):
        shown = ", ".join(f"{host} {slots.get(host, 'none')}" for host in hosts[:8])
        rule = "every host has as many ranks as the others"
        yield Problem(what=f"the slots of hosts differ: {shown}", rule=rule, fix="give all hosts the same slots")
