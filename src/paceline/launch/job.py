"""A run that is to be started elsewhere, where its launch is kept, and the targets: modules with the same functions.

    runs/.launches/NAME/    job.json   what was asked for, and the job's id at the target
                            script     what was submitted
                            log        what the run prints, of all attempts
                            exit       its exit code, when it has ended

Making the folder reserves the name: of two launches of one config at the same moment, one takes the next number. A new
target is a file with the functions of ``Target``, and a line in ``TARGETS``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self, cast

from paceline.cluster.devices import load_cluster
from paceline.errors import UsageError, did_you_mean
from paceline.health.exit_codes import FAILED
from paceline.untrusted import parse_json_object, plain_name, read_regular

LAUNCHED = "PACELINE_LAUNCH"  # in the environment of a launched run: its launch's name
_MOST_REQUEUES = 10
_FOLDER = ".launches"
# Where runs can be started, with the module of this room for each.
TARGETS = {"local": "background", "slurm": "slurm", "ssh": "ssh", "ray": "ray_cluster", "kubernetes": "kubectl"}
_LOOK_S = 0.2
_ASK_S = 1.0  # the target: Slurm's controller is shared by all users
_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """What is to be started: ``nodes`` machines, each with ``ranks`` ranks on ``gpus`` GPUs, or on CPUs without."""

    target: str
    name: str = ""
    run: str = ""
    config: str = ""  # an absolute path that the machines of the target see, too, as is workdir
    overrides: tuple[str, ...] = ()
    workdir: str = ""
    folder: str = ""
    python: str = sys.executable
    nodes: int = 1
    least: int = 1  # of the nodes are enough
    gpus: int = 0
    ranks: int = 1
    time: str | None = None
    queue: str | None = None
    hosts: tuple[str, ...] = ()
    slots: int | None = None  # ranks of each host, where the list of hosts says so
    tasks: str | None = None  # the numbers of an array of runs, as Slurm writes them
    max_requeues: int | None = None
    port: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # options of the target's own
    setup: tuple[str, ...] = ()
    id: str = ""

    @property
    def log(self) -> Path:
        return Path(self.folder) / "log"

    @property
    def runs(self) -> Path:
        """The folder of the runs, which all machines of the target see."""
        return Path(self.folder).parent.parent

    @property
    def exit_file(self) -> Path:
        return Path(self.folder) / "exit"

    @property
    def most_requeues(self) -> int:
        """How often the job starts again after it has made room: as often as was asked for, else ten times."""
        return _MOST_REQUEUES if self.max_requeues is None else self.max_requeues

    def command(self, *options: str, run: str | None = None) -> list[str]:
        """Returns what each host runs. The run goes on with its newest checkpoint whenever it is started again."""
        words = [self.python, "-m", "paceline", "train", self.config, *self.overrides, f"name={run or self.run}"]
        return [*words, "--resume", "auto", *options]

    def exit_code(self) -> int | None:
        """Returns the exit code that the run has left; None: it has not ended, or could not leave one."""
        try:
            text = read_regular(self.exit_file, 64).decode("ascii", "replace").strip()
        except OSError:
            return None
        return int(text) if re.fullmatch(r"\d{1,3}", text) else None

    def write(self) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (Path(self.folder) / "job.json").write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a launch. Raises ValueError for what is none, OSError for what cannot be read."""
        found = parse_json_object(read_regular(folder / "job.json", 2**20))
        unknown = found.keys() - {each.name for each in dataclasses.fields(cls)}
        if unknown or not all(isinstance(found.get(name), str) for name in ("name", "target", "run", "config", "id")):
            raise ValueError("it is not a launch")
        for name in ("overrides", "hosts", "setup"):
            found[name] = tuple(map(str, found.get(name, ())))
        found["folder"] = str(folder)
        return cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Where a job stands; ``words`` say it as the target does. ``code``: with which it ended, where that is known."""

    kind: Literal["waiting", "running", "ended"]
    words: str
    code: int | None = None


def launches_folder(runs: Path) -> Path:
    return runs / _FOLDER


def find_launch(runs: Path, name: str | None) -> LaunchJob:
    """Returns a launch by its name; None: the last one. Raises UsageError where there is none."""
    known = all_launches(runs)
    if name is None and known:
        return known[0]
    for job in known:
        if name in (job.name, job.id):
            return job
    shown = ", ".join(job.name for job in known[:8]) or "none"
    what = f"no launch{f' named {name}' if name else ''} in {launches_folder(runs)}"
    rule = f"the launches there are {shown}"
    raise UsageError(f"{what}\n  {rule}\n  paceline launch status lists them; --runs names another folder of runs")


def all_launches(runs: Path) -> list[LaunchJob]:
    """Returns all launches, the newest first."""
    found: list[tuple[int, LaunchJob]] = []
    for path in launches_folder(runs).glob("*/job.json"):
        try:
            plain_name(path.parent.name)
            found.append((path.stat().st_mtime_ns, LaunchJob.read(path.parent)))
        except (OSError, ValueError, TypeError):
            continue
    return [job for _, job in sorted(found, key=lambda item: (-item[0], item[1].name))]


def refuse_options(job: LaunchJob, reasons: Mapping[str, str]) -> None:
    """Refuses options that would have no effect at a target; ``reasons`` says why, by option. Raises UsageError."""
    plain = LaunchJob(target=job.target)
    if job.target != "slurm":
        reasons = {"--array": "it is an option of Slurm", **reasons}
    for option, why in reasons.items():
        name = "tasks" if option == "--array" else option.removeprefix("--").replace("-", "_")
        if getattr(job, name) != getattr(plain, name):
            raise UsageError(f"{option} with --on {job.target}\n  {why}\n  leave it out")


def refuse_settings(job: LaunchJob, known: Collection[str]) -> None:
    """Refuses words of ``--set`` that a target does not know. Raises UsageError with those that it does."""
    for word in job.settings:
        if word not in known:
            fix = did_you_mean(word, known, "leave it out")
            rule = f"the words are {', '.join(known)}" if known else "it takes none"
            raise UsageError(f"--set {word} with --on {job.target}\n  {rule}\n  {fix}")


def gpu_memory(kind: str) -> float | None:
    """Returns the memory of a kind of GPU, if the catalog knows it by this name."""
    try:
        return float(load_cluster(f"1x {kind}").device.memory_bytes)
    except UsageError:
        return None


def read_time(text: str) -> int:
    """Returns the seconds of ``1:30:00``, ``90:00`` (minutes), ``1-00:00:00`` (a day) or ``90`` (minutes), as Slurm."""
    found = re.fullmatch(r"(?:(?P<days>\d{1,4})-)?(?P<rest>\d{1,6}(?::\d{1,2}){0,2})", text)
    parts = [int(part) for part in found["rest"].split(":")] if found else []
    if found and not found["days"] and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0, 0)[:3]
    total = (int(found["days"] or 0) if found else 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise UsageError(f"--time {text}\n  it is hours, minutes and seconds\n  try --time 1:30:00")
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMachines:
    """The machines that a target would give to a run: memory of a GPU and of a host, where that is known."""

    where: str  # what they are called in messages
    device_bytes: float | None = None
    host_bytes: float | None = None
    port: int | None = None  # where the hosts meet, if one was found
    notes: tuple[str, ...] = ()  # what else was found out


class Target(Protocol):
    """How runs get to machines of one kind, and how they are followed there."""

    def machines(self, job: LaunchJob) -> TargetMachines:
        """Asks for the machines. Raises UsageError for what the target has not: a queue, so many nodes, GPUs."""

    def render(self, job: LaunchJob) -> str:
        """Returns what will be submitted: a script, or manifests."""

    def submit(self, job: LaunchJob) -> str:
        """Starts the job and returns its id. Raises LaunchError with the target's own words."""

    def state(self, job: LaunchJob) -> JobState:
        """Says where the job stands."""

    def cancel(self, job: LaunchJob) -> None:
        """Ends the job, which saves first if it can."""


def find_target(name: str) -> Target:
    """Returns a target by its name. Raises UsageError for one that there is not."""
    if name not in TARGETS:
        raise UsageError(f"--on {name} is not a target\n  the targets are {', '.join(TARGETS)}\n  give one of them")
    return cast(Target, importlib.import_module(f"paceline.launch.{TARGETS[name]}"))


def follow(target: Target, job: LaunchJob, write: Callable[[str], None], tell: Callable[[str], None]) -> int:
    """Hands a run's log to ``write`` and its state to ``tell`` until it has ended; returns its exit code."""
    read, known, next_ask, state = 0, "", 0.0, JobState(kind="waiting", words="")
    while True:
        if time.monotonic() >= next_ask:
            state = target.state(job)
            next_ask = time.monotonic() + _ASK_S
            if state.words != known and state.kind != "ended":
                tell(f"{job.name}: {state.words}")
            known = state.words
        # A run that is queued again leaves no code: what is there is of its end.
        code = None if job.tasks else job.exit_code()
        if job.log.is_file():
            with job.log.open("rb") as file:
                file.seek(read)
                while block := file.read(_READ_BYTES):
                    read += len(block)
                    write(block.decode("utf-8", "replace"))
        if code is not None or state.kind == "ended":
            if job.exit_code() is None:
                tell(f"{job.name}: {state.words}")
            return next((each for each in (code, state.code) if each is not None), FAILED)
        time.sleep(_LOOK_S)
