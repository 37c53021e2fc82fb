"""Faults as data: what goes wrong, on which rank, at which step.

    kill:rank=1@step=20            kill:rank=1:phase=backward@step=20
    slow:rank=0x2@step=30          slow-link:rank=1x20:steps=50
    spike:x100@step=12             disk-full@step=40              corrupt-checkpoint
    kill:rank=0@step=20,kill-in-recovery:rank=1                   kill-host:rank=1@step=30

Several have commas between. Without a step, a fault comes after the second checkpoint; ``kill-in-recovery`` comes in
the recovery of the fault before it. A plan of faults reaches the ranks, and they say what they did, by files:

    plan.json       seed and faults, and what hosts need to know, written once
    fired.jsonl     one line for each fault of each rank, written before it happens: it happens once, also over restarts
    started.jsonl   one line for each attempt, of rank 0: the step that it begins with
    passed.jsonl    one line for each fault whose step has been trained after it

A line is one ``write`` to a file that is opened for appending: ranks do not mix theirs, and SIGKILL loses nothing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.config.suggest import nearest
from paceline.errors import ConfigError, Problem
from paceline.health.ledger_view import FORWARD, PHASES, SETUP, STEP_PHASES
from paceline.untrusted import parse_json_object, read_regular

_ANYWHERE = (FORWARD, *(each for each in PHASES if each not in (SETUP, FORWARD)))
_SYNTAX = "a fault is KIND[:rank=R][:xFACTOR][:phase=PHASE]@step=S"
_FACTOR = re.compile(r"x(\d+(?:\.\d+)?)")
_RANK = re.compile(r"(\d+)(?:x(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """What can be said about a kind of fault. ``phases``: where it may come, the usual one first."""

    phases: tuple[str, ...] = ()
    factor: float | None = None
    has_length: bool = False
    has_step: bool = True
    on_all_ranks: bool = False


TRAITS: Final[Mapping[str, Trait]] = {
    **dict.fromkeys(("kill", "hang", "stop", "exception"), Trait(phases=_ANYWHERE)),  # SIGKILL, for good, SIGSTOP
    "oom": Trait(phases=("forward", "backward")),
    "preempt": Trait(phases=("optimizer", "data", "forward", "backward")),  # by SIGUSR1
    "slow": Trait(factor=2.0, has_length=True),
    "slow-link": Trait(factor=20.0, has_length=True),
    "nan": Trait(on_all_ranks=True),
    "spike": Trait(factor=100.0, on_all_ranks=True),
    **dict.fromkeys(("disk-full", "unwritable"), Trait()),
    "kill-while-saving": Trait(),  # in the middle of a file of a checkpoint
    "corrupt-checkpoint": Trait(),  # flips a bit of the newest, then SIGKILL
    "kill-two": Trait(phases=_ANYWHERE),  # the rank and the next one, at once
    "kill-in-recovery": Trait(has_step=False),  # when it has its state again, before its first step
    "kill-in-snapshot": Trait(),  # in the middle of a file of a snapshot
    "memory-full": Trait(),  # the same, and no room
    "kill-keeper": Trait(phases=_ANYWHERE),  # the process that holds the snapshots of the rank's host
    "kill-launcher": Trait(phases=_ANYWHERE),  # that of the rank's host
    "kill-host": Trait(phases=_ANYWHERE),  # all processes of the rank's host, at once
}
DRAWN: Final = tuple(TRAITS)[: tuple(TRAITS).index("kill-two")]  # from these a seed draws
IN_SNAPSHOT: Final = ("kill-in-snapshot", "memory-full")
OF_MEMORY: Final = (*IN_SNAPSHOT, "kill-keeper")  # of snapshots in memory
OF_HOSTS: Final = ("kill-launcher", "kill-host")  # memory goes with its launcher
_GO_ON: Final = ("disk-full", "unwritable", "memory-full", "kill-keeper")  # mostly, as losses and slowness do
WHILE_SAVING: Final = ("disk-full", "unwritable", "kill-while-saving")
ON_LOSS: Final = ("nan", "spike")
SLOW: Final = ("slow", "slow-link")
MEETS: Final = "the launcher where all hosts meet"  # told where that is killed, or its host


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once a run, in ``step`` or in the first checkpoint from it on; no ``rank``: on all."""

    number: int
    kind: str
    rank: int | None = 0
    step: int | None = None
    phase: str = ""
    factor: float = 1.0
    length: int = 10

    def __str__(self) -> str:
        rank = "" if self.rank is None else f":rank={self.rank}"
        trait = TRAITS[self.kind]
        times = "" if trait.factor is None else f"{'' if rank else ':'}x{self.factor:g}"
        phase = f":phase={self.phase}" if trait.phases and self.phase != trait.phases[0] else ""
        step = "" if self.step is None else f"@step={self.step}"
        return f"{self.kind}{rank}{times}{phase}{step}"


def parse_faults(text: str) -> list[Fault]:
    """Reads a list of faults. Raises ConfigError with all problems at once."""
    problems: list[Problem] = []
    parts = filter(None, (part.strip() for part in text.split(",")))
    found = [fault for number, each in enumerate(parts) if (fault := _parse(number, each, problems)) is not None]
    if not found and not problems:
        problems = [Problem(what="--faults names none", rule=_SYNTAX, fix="write --faults kill:rank=1@step=20")]
    if problems:
        raise ConfigError(problems, source="--faults")
    return found


def place_faults(faults: Sequence[Fault], *, after: int) -> list[Fault]:
    """Gives faults without a step the one behind ``after``, if they may have one."""
    return [replace(one, step=after + 1) if one.step is None and TRAITS[one.kind].has_step else one for one in faults]


def check_faults(faults: Sequence[Fault], *, ranks: int, total_steps: int | None) -> list[Problem]:
    """Lists what cannot happen in a run of so many ranks and steps."""
    problems = []
    for fault in faults:
        before = next((each for each in faults if each.number == fault.number - 1), None)
        if fault.kind == "kill-in-recovery" and (before is None or before.kind in (*SLOW, *ON_LOSS, *_GO_ON)):
            what = f"{fault}: {f'nothing recovers from {before}' if before else 'there is no fault before it'}"
            rule = "it comes in the recovery of the fault before it in the list"
            problems.append(Problem(what=what, rule=rule, fix=f"write kill:rank=0@step=20,{fault}"))
        if fault.kind == "kill-two" and ranks == 1:
            what, rule = f"{fault}: there is one rank", "it kills a rank and the next one"
            problems.append(Problem(what=what, rule=rule, fix="write kill, or set parallel.ranks"))
        if fault.rank is not None and fault.rank >= ranks:
            what = f"{fault}: there is no rank {fault.rank}"
            last = "there is rank 0 alone" if ranks == 1 else f"ranks are 0 to {ranks - 1}"
            problems.append(Problem(what=what, rule=last, fix="choose one of them"))
        if total_steps is not None and fault.step is not None and fault.step > total_steps:
            what, rule = f"{fault}: step {fault.step} never comes", f"the run has {total_steps} steps"
            problems.append(Problem(what=what, rule=rule, fix="choose an earlier step, or set train.steps"))
    return problems


def random_faults(seed: int, number: int, *, ranks: int, last_step: int) -> list[Fault]:
    """Draws faults of any kind, at steps in order: the same for the same arguments."""
    draw = random.Random(seed)  # nosec B311  # faults by a seed
    steps = sorted(draw.randrange(2, max(3, last_step)) for _ in range(number))
    found = []
    for place, step in enumerate(steps):
        kind = draw.choice(sorted(each for each in DRAWN if each != "slow-link"))  # a seed draws what it always drew
        trait = TRAITS[kind]
        phases = [each for each in trait.phases if each in STEP_PHASES]
        rank, phase = None if trait.on_all_ranks else draw.randrange(ranks), draw.choice(phases) if phases else ""
        found.append(Fault(number=place, kind=kind, rank=rank, step=step, phase=phase, factor=trait.factor or 1.0))
    return found


def _parse(number: int, text: str, problems: list[Problem]) -> Fault | None:
    """Reads one fault; adds what is wrong with it to ``problems``, and returns None then."""
    head, _, where = text.partition("@")
    kind, *parts = (part.strip() for part in head.split(":"))
    trait = TRAITS.get(kind)
    if trait is None:
        near = nearest(kind, TRAITS)
        what, rule = f"{text}: no fault is called {kind!r}", f"there are {', '.join(TRAITS)}"
        problems.append(Problem(what=what, rule=rule, fix=f"did you mean {near}?" if near else "choose one of these"))
        return None
    values: dict[str, Any] = {"rank": None if trait.on_all_ranks else 0, "factor": trait.factor or 1.0}
    values["phase"] = trait.phases[0] if trait.phases else ""
    wrong = [Problem(what=f"{text}: {what}", rule=_SYNTAX, fix=fix) for what, fix in _read_parts(parts, trait, values)]
    if where:
        key, _, value = where.partition("=")
        if not trait.has_step:
            fix = f"write kill:rank=0@{where},{head}"
            wrong.append(Problem(what=f"{text}: @{where}", rule="it comes in the recovery of another fault", fix=fix))
        elif key.strip() != "step" or not value.strip().isdecimal() or int(value) < 1:
            wrong.append(Problem(what=f"{text}: @{where}", rule="steps count from 1", fix="write @step=20"))
        else:
            values["step"] = int(value)
    problems += wrong
    return None if wrong else Fault(number=number, kind=kind, **values)


def _read_parts(parts: Sequence[str], trait: Trait, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Reads what stands between the colons into ``values``; returns what is wrong with it, and what to do."""
    wrong = []
    for part in filter(None, parts):
        key, _, value = part.partition("=")
        phase = "checkpoint" if value == "saving" else value
        factor = _FACTOR.fullmatch(part)
        rank = _RANK.fullmatch(value) if key == "rank" else None
        if rank is not None and (rank[2] is None or trait.factor is not None):
            values["rank"] = int(rank[1])
            values["factor"] = float(rank[2]) if rank[2] else values["factor"]
        elif factor is not None and trait.factor is not None:
            values["factor"] = float(factor[1])
        elif key == "phase" and phase in trait.phases:
            values["phase"] = phase
        elif key == "steps" and trait.has_length and value.isdecimal() and int(value) > 0:
            values["length"] = int(value)
        else:
            wrong.append((f"{part!r} says nothing here", _fix(key, value, trait)))
    if trait.factor is not None and values["factor"] <= 1.0:
        wrong.append((f"x{values['factor']:g} changes nothing", "write a factor above 1, such as x2"))
    return wrong


def _fix(key: str, value: str, trait: Trait) -> str:
    if key == "phase" and trait.phases:
        near = nearest(value, trait.phases)
        return f"did you mean phase={near}?" if near else f"phases are {', '.join(sorted(trait.phases))}"
    keys = ["rank=1", *(["phase=backward"] if trait.phases else []), *(["x2"] if trait.factor else [])]
    return f"it takes {' and '.join([*keys, *(['steps=5'] if trait.has_length else [])])}"


VARIABLE: Final = "PACELINE_CHAOS"  # names the folder of these files to the ranks; set by ``paceline chaos`` alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """A fault that happened: on which rank, in which step, after how many samples, and when."""

    number: int
    rank: int
    step: int
    position: int
    time: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An attempt that begins to train, after so many steps and samples."""

    step: int
    position: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The first step after a fault that had not been trained before it; ``is_later``: in a later attempt."""

    number: int
    step: int
    is_later: bool
    time: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What ranks do: ``seed`` says at which byte or bit. Hosts meet at the port ``meeting``, and have all ``ranks``."""

    seed: int
    faults: list[Fault]
    meeting: int | None = None
    ranks: int = 1


def write_plan(folder: Path, seed: int, faults: Sequence[Fault], *, meeting: int | None = None, ranks: int = 1) -> None:
    """Writes the plan for the ranks."""
    content = {"seed": seed, "faults": [asdict(fault) for fault in faults], "meeting": meeting, "ranks": ranks}
    (folder / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> FaultPlan:
    content = parse_json_object(read_regular(folder / "plan.json"))
    found = [Fault(**values) for values in content["faults"]]
    return FaultPlan(content["seed"], found, content["meeting"], content["ranks"])


def note(folder: Path, what: Fired | Started | Passed) -> None:
    with (folder / _FILES[type(what)]).open("ab", buffering=0) as file:
        file.write((json.dumps(asdict(what)) + "\n").encode())


def read_notes(folder: Path, kind: type[_Note]) -> list[_Note]:
    try:
        lines = (folder / _FILES[kind]).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return sorted((kind(**parse_json_object(line)) for line in lines), key=lambda noted: noted.time)


_Note = TypeVar("_Note", Fired, Started, Passed)
_FILES: Final[dict[type, str]] = {Fired: "fired.jsonl", Started: "started.jsonl", Passed: "passed.jsonl"}
