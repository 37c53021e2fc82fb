"""Settings of NCCL and Gloo as the environment variables that carry them to the ranks.

A config names the variables that matter, each with a key of its own; a user may have exported some too. Both are
``BackendSetting``s, so that one list of rules finds what contradicts. A variable that is exported with another value
than the config's is refused: one of the two would lose silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.bounded_yaml import load_shipped
from paceline.errors import Problem, did_you_mean
from paceline.plan.rule_case import text_of

if TYPE_CHECKING:
    from paceline.config.schema import CommConfig, Config

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_MOST_SOCKETS = 64
_INTERFACE = re.compile(r"[A-Za-z0-9][\w.@-]{0,14}")  # Linux allows 15 characters
_CARD = re.compile(r"[A-Za-z0-9][\w.-]*(:\d+)?")


@cache
def nccl_variables() -> dict[str, dict[str, Any]]:
    """Returns what ``nccl.yaml`` says of each variable, with its ``key``, by its name."""
    rows = load_shipped((Path(__file__).parent / "nccl.yaml").read_text(encoding="utf-8"))
    return {row["variable"]: {"key": key, **row} for key, row in rows.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSetting:
    """One variable with its value. ``key`` is that of the config which says so; None: it was exported."""

    variable: str
    value: str
    key: str | None = None
    written: str = ""  # the key's value, as the config has it

    def __str__(self) -> str:
        return f"{self.key} = {self.written}" if self.key else f"{self.variable}={self.value} (exported)"

    @property
    def name(self) -> str:
        return self.key or self.variable

    @property
    def removal(self) -> str:
        return f"remove {self.key}" if self.key else f"unset {self.variable}"


BackendSettings: TypeAlias = Mapping[str, BackendSetting]  # by variable


def config_settings(comm: CommConfig) -> dict[str, BackendSetting]:
    """Returns what a config says, by variable. ``comm.interface`` is for both backends, and exact for both."""
    found: dict[str, BackendSetting] = {}
    if (name := comm.interface) is not None:
        for variable, mark in ((GLOO_INTERFACE, ""), (NCCL_INTERFACE, "=")):
            setting = BackendSetting(variable=variable, value=mark + name, key="comm.interface", written=name)
            found[variable] = setting  # NCCL's own key, below, takes its place
    for variable, row in nccl_variables().items():
        given, key = getattr(comm.nccl, row["key"]), f"comm.nccl.{row['key']}"
        value = ",".join(given) if isinstance(given, tuple) else str(given)
        if isinstance(given, bool):
            value = str(int(given != variable.endswith("_DISABLE")))
        if given is not None:
            found[variable] = BackendSetting(variable=variable, value=value, key=key, written=text_of(given))
    return found


def exported_settings(environment: Mapping[str, str]) -> dict[str, BackendSetting]:
    given = {name: value for name, value in environment.items() if name.startswith(("NCCL_", "GLOO_")) and value}
    return {name: BackendSetting(variable=name, value=value) for name, value in sorted(given.items())}


def variables_of(comm: CommConfig, *, uses_nccl: bool) -> dict[str, str]:
    """Returns the variables that ranks need in their environment, before their group is made."""
    settings = config_settings(comm)
    return {name: each.value for name, each in settings.items() if uses_nccl or not name.startswith("NCCL_")}


def _meaning(variable: str, value: str) -> object:
    """Returns what is equal where two values mean the same: names have no case, and lists of them no order."""
    is_list = variable in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG_SUBSYS")
    return set(value.lower().split(",")) if is_list else value.strip().lower()


def check_backend_settings(config: Config) -> Iterator[Problem]:
    comm, settings = config.comm, config_settings(config.comm)
    if comm.interface is not None and comm.nccl.socket_interface is not None:
        what = f"comm.interface = {comm.interface} and comm.nccl.socket_interface = {comm.nccl.socket_interface}"
        rule = "both say which network interface NCCL takes: the first by its name, the second as NCCL reads it"
        yield Problem(what=what, rule=rule, fix="keep one of them")
    yield from contradictions(settings)
    unread = [str(each) for each in settings.values() if (each.key or "").startswith("comm.nccl.")]
    if comm.backend in ("gloo", "shared_memory", "virtual") and unread:
        what = f"{', '.join(unread)} with comm.backend = {comm.backend}"
        fix = "remove comm.nccl, or set comm.backend = auto; for the interface of Gloo, set comm.interface"
        yield Problem(what=what, rule="comm.nccl is read by NCCL alone, which moves bytes between GPUs", fix=fix)


def check_exported(config: Config, environment: Mapping[str, str], *, uses_nccl: bool) -> list[Problem]:
    """Checks that the exported variables agree with the config: no other value of a variable, no contradiction."""
    given = _read_by(config_settings(config.comm), uses_nccl=uses_nccl)
    exported = _read_by(exported_settings(environment), uses_nccl=uses_nccl)
    problems = [
        Problem(
            what=f"{ours} asks for {variable}={ours.value}, and {theirs}",
            rule="the config and the environment say one thing, as one of them would be ignored",
            fix=f"unset {theirs.variable}, or {ours.removal}",
        )
        for variable, ours in given.items()
        for name in (variable, *nccl_variables().get(variable, {}).get("also", ()))
        if (theirs := exported.get(name)) is not None
        and _meaning(variable, ours.value) != _meaning(variable, theirs.value)
    ]
    # Those of one side alone are reported elsewhere: when the config is loaded, and by the doctor.
    known = {str(problem) for side in (given, exported) for problem in contradictions(side)}
    return problems + [each for each in contradictions({**exported, **given}) if str(each) not in known]


def check_interfaces(settings: BackendSettings, present: Collection[str], *, uses_nccl: bool) -> list[Problem]:
    asked = settings.get(NCCL_INTERFACE if uses_nccl else GLOO_INTERFACE)
    if asked is None:
        return []
    if uses_nccl and not asked.value.startswith("="):
        found, shown = matching(asked.value, present), asked.value.lstrip("^=")
        return [] if found else [_absent(asked, "no network interface of this host matches", shown, present)]
    missing = [name for name in asked.value.lstrip("=").split(",") if name not in present]
    return [_absent(asked, f"this host has no network interface {name}", name, present) for name in missing]


def _read_by(settings: BackendSettings, *, uses_nccl: bool) -> dict[str, BackendSetting]:
    return {name: each for name, each in settings.items() if uses_nccl == name.startswith("NCCL_")}


def matching(wanted: str, present: Collection[str]) -> list[str]:
    """Returns the interfaces that a value of NCCL_SOCKET_IFNAME selects: by prefix, or with = by name; ^ the others."""
    is_excluding, is_exact = wanted.startswith("^"), "=" in wanted[:2]
    names = wanted.lstrip("^=").split(",")
    found = {name for name in present for each in names if (name == each if is_exact else name.startswith(each))}
    return [name for name in present if (name in found) != is_excluding]


def contradictions(settings: BackendSettings) -> list[Problem]:
    rules = (_check_readable, _check_switches, _check_counts, _check_words)
    return [problem for rule in rules for problem in rule(settings)]


def unknown_variables(settings: BackendSettings) -> list[Problem]:
    """Lists exported variables whose name is almost that of a known one: NCCL ignores what it does not know."""
    names = {*nccl_variables(), GLOO_INTERFACE}
    aliases = {alias for row in nccl_variables().values() for alias in row.get("also", ())}
    found = []
    for each in settings.values():
        fix = did_you_mean(each.variable, names, cutoff=0.9)
        if each.variable not in names | aliases and fix:
            found.append(Problem(what=f"{each}", rule="a variable that no library knows is ignored", fix=fix))
    return found


def _check_readable(settings: BackendSettings) -> Iterator[Problem]:
    """Checks that values are those that NCCL documents. The schema checks those of a config, but for text."""
    for each in settings.values():
        if each.variable in (GLOO_INTERFACE, NCCL_INTERFACE, "NCCL_IB_HCA"):
            if each.variable == NCCL_INTERFACE and each.key == "comm.interface":
                continue  # the same text as Gloo's
            yield from _check_names(each)
        elif each.key is None:
            yield from _check_value(each)


def _check_names(setting: BackendSetting) -> Iterator[Problem]:
    is_gloo, is_card = setting.variable == GLOO_INTERFACE, setting.variable == "NCCL_IB_HCA"
    form = _CARD if is_card else _INTERFACE
    listed = setting.value.lstrip("^=")
    marks, parts = setting.value.removesuffix(listed), listed.split(",")
    wrong = next((part for part in parts if not form.fullmatch(part)), None)
    if wrong is None and marks in (("",) if is_gloo else ("", "=", "^", "^=")):
        return
    if is_gloo:
        rule, fix = "Gloo takes names, one or several: eth0, or eth0,eth1", f"write {_repaired(parts, '')}"
    else:
        kind = "a card, with a port if need be (mlx5_0:1)" if is_card else "an interface (eth0)"
        rule = f"it is a list of prefixes of {kind}; = in front of the list takes them as names, ^ excludes them"
        fix = f"write the marks once, in front, ^ before =: {_repaired(parts, marks)}"
    why = f": {wrong!r} is no name" if wrong is not None else ""
    yield Problem(what=f"{setting} cannot be read{why}", rule=rule, fix=fix)


def _repaired(parts: list[str], marks: str) -> str:
    names = [re.sub(r"[^\w.@:-]", "", part) for part in parts]
    return "".join(sign for sign in "^=" if sign in marks) + ",".join(name for name in names if name)


def _check_value(setting: BackendSetting) -> Iterator[Problem]:
    variable, value = setting.variable, setting.value.strip()
    row = nccl_variables().get(variable, {})
    words = row.get("words")
    if "numbers" in row:
        low, high = row["numbers"]
        if not re.fullmatch(r"-?\d+", value) or not low <= int(value) <= high:
            rule = f"it is a whole number from {low} to {high}"
            yield Problem(what=f"{setting} cannot be read", rule=rule, fix=setting.removal)
    elif words is not None and not (variable.endswith("_LEVEL") and value.isdigit()):  # levels were numbers once
        known = {word.lower() for word in words}
        # Since NCCL 2.24: function:list;function:list.
        given = [word.partition(":")[2] or word for word in value.lower().replace(";", ",").split(",")]
        wrong = next((word for word in given if word.lstrip("^") not in known), None)
        if wrong is not None:
            fix = did_you_mean(wrong.upper(), map(str.upper, words), setting.removal, cutoff=0.5)
            yield Problem(what=f"{setting} cannot be read", rule=f"it is one of {', '.join(words)}", fix=fix)


def _check_switches(settings: BackendSettings) -> Iterator[Problem]:
    off, level = settings.get("NCCL_P2P_DISABLE"), settings.get("NCCL_P2P_LEVEL")
    if off and level and (off.value == "1") != (level.value.upper() in ("LOC", "0")):
        of_level = "a level says how far GPUs may reach one another directly, and they may not at all"
        rule = of_level if off.value == "1" else "LOC means that GPUs never reach one another directly"
        yield Problem(what=f"{off} and {level}", rule=rule, fix=f"{level.removal}, or {off.removal}")
    off = settings.get("NCCL_IB_DISABLE")
    for variable in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT") if off and off.value == "1" else ():
        if off and (given := settings.get(variable)):
            rule = "the second is about InfiniBand and RoCE, which the first turns off"
            yield Problem(what=f"{off} and {given}", rule=rule, fix=f"{given.removal}, or {off.removal}")


def _check_counts(settings: BackendSettings) -> Iterator[Problem]:
    numbers = {name: int(each.value) for name, each in settings.items() if re.fullmatch(r"\s*\d+\s*", each.value)}
    low, high = numbers.get("NCCL_MIN_NCHANNELS"), numbers.get("NCCL_MAX_NCHANNELS")
    if low is not None and high is not None and low > high:
        least, most = settings["NCCL_MIN_NCHANNELS"], settings["NCCL_MAX_NCHANNELS"]
        rule = "NCCL takes at least the one and at most the other"
        yield Problem(what=f"{least} is more than {most}", rule=rule, fix=f"set {least.name} to {high} or less")
    count, each = numbers.get("NCCL_SOCKET_NTHREADS"), numbers.get("NCCL_NSOCKS_PERTHREAD")
    if count is not None and each is not None and count * each > _MOST_SOCKETS:
        threads, sockets = settings["NCCL_SOCKET_NTHREADS"], settings["NCCL_NSOCKS_PERTHREAD"]
        what = f"{threads} and {sockets} make {count * each} sockets for a connection"
        fix = f"set {sockets.name} to {max(1, _MOST_SOCKETS // count)} or less"
        yield Problem(what=what, rule=f"NCCL opens {_MOST_SOCKETS} at most", fix=fix)


def _check_words(settings: BackendSettings) -> Iterator[Problem]:
    given = settings.get("NCCL_ALGO")
    names = given.value.lower().replace(" ", "").split(",") if given else ["ring"]
    if given and "ring" not in names and not re.search(r"[\^:;]", given.value):
        rule = "broadcasts are made by Ring alone, and NCCL 2.24 and newer fails where no algorithm is left"
        fix = f"set {given.name} to [Ring, {given.value.replace(',', ', ')}]" if given.key else given.removal
        yield Problem(what=f"{given} leaves out Ring", rule=rule, fix=fix)
    level, parts = settings.get("NCCL_DEBUG"), settings.get("NCCL_DEBUG_SUBSYS")
    if parts is None or (level is not None and level.value.upper() in ("INFO", "TRACE")):
        return
    what = f"{parts} " + ("without a level" if level is None else f"with {level}")
    change = "set comm.nccl.debug = INFO" if parts.key else "export NCCL_DEBUG=INFO"
    yield Problem(what=what, rule="it chooses among what NCCL_DEBUG=INFO writes", fix=f"{change}, or {parts.removal}")


def _absent(setting: BackendSetting, what: str, wanted: str, present: Collection[str]) -> Problem:
    rule = f"the interfaces of this host are {', '.join(present)}"
    fix = did_you_mean(wanted, present, f"name one of them, or {setting.removal}", cutoff=0.5)
    return Problem(what=f"{setting}: {what}", rule=rule, fix=fix)
