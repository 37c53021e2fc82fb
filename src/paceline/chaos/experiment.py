"""A run with faults: ``paceline train`` in a process of its own, started again as a scheduler would, and its report.

The faults happen inside the ranks (``inject.py``), which find their plan through an environment variable. Here the
command is started, what it says is noted with its time, and what its records say is put together. With several hosts
it is started once for each: their launchers are processes of this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.chaos import faults, report
from paceline.checkpoint import list_checkpoints
from paceline.checkpoint.find import read_manifest
from paceline.checkpoint.tensors import decode
from paceline.checkpoint.tools.audit import check_samples
from paceline.config import Config, load_config
from paceline.config.load import LoadedConfig
from paceline.errors import CheckpointError, ConfigError, Problem
from paceline.health.exit_codes import DONE, MEANINGS, REFUSED
from paceline.records.summary import RankAttempt, read_run

_SAVE_EVERY = 10  # steps, where a config saves nothing on the way
_HANG_S = 5.0  # where a config says nothing: nobody wants to watch a minute
_HANG_SETUP_S = 30.0  # the first step of an attempt counts as set-up
_LOOK_EVERY_S = 0.1
_NEXT_HOST_S = 1.0  # so that the first one is where they meet, and all come before the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyRun:
    """A config as it is run with faults; ``say`` tells the user, ``hosts`` meet at the port ``meeting``."""

    path: Path
    overrides: tuple[str, ...]
    config: Config
    ranks: int
    environment: Mapping[str, str]
    say: Callable[[str], None]
    hosts: int = 1
    meeting: int | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.monitor.folder) / self.config.name


def prepare_run(
    loaded: LoadedConfig,
    path: Path,
    overrides: Sequence[str],
    *,
    kinds: Sequence[str],
    ranks: int,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    hosts: int = 1,
) -> FaultyRun:
    """Decides what a run with faults of these ``kinds`` needs, on ``ranks`` if the config leaves them open."""
    config, changes = loaded.config, [f"name={loaded.config.name}-chaos"]

    def is_open(key: str) -> bool:
        return loaded.sources.get(key, "default") == "default"

    saving = config.checkpoint
    keeps = saving.memory.every_steps is not None
    is_enough = keeps and not any(kind in faults.OF_HOSTS for kind in kinds)
    if saving.every_steps is None and saving.every_minutes is None and not is_enough:
        changes.append(f"checkpoint.every_steps={_SAVE_EVERY}")
        what = "nothing on the way" if not keeps else "nothing to disk, and memory goes with its launcher"
        say(f"the config saves {what}: saving every {_SAVE_EVERY} steps (checkpoint.every_steps)")
    if not keeps and any(kind in faults.OF_MEMORY for kind in kinds):
        changes.append(f"checkpoint.memory.every_steps={_SAVE_EVERY}")
        say(f"the config keeps no snapshots: one every {_SAVE_EVERY} steps (checkpoint.memory.every_steps)")
    if is_open("monitor.hang_s"):
        changes.append(f"monitor.hang_s={_HANG_S:g}")
    if {"hang", "stop"} & set(kinds) and is_open("monitor.hang_setup_s"):
        changes.append(f"monitor.hang_setup_s={_HANG_SETUP_S:g}")
    if is_open("recovery.max_restarts"):
        changes.append(f"recovery.max_restarts={len(kinds)}")
    if is_open("recovery.max_stalled_restarts") and "kill-in-recovery" in kinds:
        changes.append(f"recovery.max_stalled_restarts={len(kinds)}")
    changed = [*overrides, *changes]
    final = load_config(path, changed)
    known = final.parallel.ranks if isinstance(final.parallel.ranks, int) else max(ranks, hosts)
    if known % hosts:
        what, rule = f"{known} ranks on {hosts} hosts", "every host has as many ranks as the others"
        raise ConfigError([Problem(what=what, rule=rule, fix=f"set parallel.ranks = {hosts}")], source="--hosts")
    found = FaultyRun(path=path, overrides=tuple(changed), config=final, ranks=known, environment=environment, say=say)
    if hosts == 1:
        return found
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return replace(found, hosts=hosts, meeting=free.getsockname()[1])


def plan_faults(run: FaultyRun, text: str | None, *, num_random: int, seed: int) -> list[faults.Fault]:
    """Reads or draws the faults. Raises ConfigError with all that cannot happen in this run."""
    every, total = run.config.checkpoint.every_steps or _SAVE_EVERY, run.config.train.steps
    if text is None:
        planned = faults.random_faults(seed, num_random, ranks=run.ranks, last_step=total or 5 * every)
    else:
        planned = faults.place_faults(faults.parse_faults(text), after=2 * every)
    problems = faults.check_faults(planned, ranks=run.ranks, total_steps=total)
    if problems:
        raise ConfigError(problems, source="--faults")
    return planned


def run_with_faults(
    run: FaultyRun, planned: Sequence[faults.Fault], scratch: Path, *, seed: int, compare: bool, mtbf_s: float | None
) -> report.Report | None:
    """Trains with faults, with ``compare`` undisturbed too; returns what it cost, None if the command was refused."""
    faults.write_plan(scratch, seed, planned, meeting=run.meeting, ranks=run.ranks)
    commands = _run_commands(run, scratch, num_faults=len(planned))
    if commands[0].code == REFUSED:  # what lies in the folder, if anything, is an older run
        return None
    attempts = _attempts(run.folder, run.ranks)
    fired, started = faults.read_notes(scratch, faults.Fired), faults.read_notes(scratch, faults.Started)
    notes = report.Notes(fired=fired, started=started, passed=faults.read_notes(scratch, faults.Passed))
    handled = [report.handle(each, notes, attempts[each.rank or 0], commands, run.config) for each in planned]
    for number, each in enumerate(handled):
        if each.fault.kind == "slow":
            handled[number] = replace(each, verdict=report.straggler_verdict(each, attempts))
    samples, twin = audit_samples(run.folder), _compare(run, attempts, planned, scratch) if compare else None
    name, own = run.config.name, attempts[0]
    found = report.make_report(name, run.ranks, own, commands, handled, mtbf_s=mtbf_s, samples=samples, comparison=twin)
    if run.folder.is_dir():
        kept = run.folder / "chaos"
        kept.mkdir(exist_ok=True)
        for path in filter(Path.is_file, scratch.iterdir()):
            shutil.copy2(path, kept / path.name)
        (kept / "report.json").write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
    return found


def audit_samples(folder: Path) -> str:
    """Says whether the newest checkpoint of a run has consumed the right samples, each once an epoch."""
    found = list_checkpoints(folder / "checkpoints")
    if not found:
        return "not known: there is no checkpoint"
    try:
        manifest = read_manifest(found[-1])
    except CheckpointError as error:
        return f"not known: {str(error).splitlines()[0]}"
    check = check_samples(manifest)
    if check.problems:
        return f"wrong: {'; '.join(check.problems)}"
    if "consumed" not in manifest.values:
        return "not known: nothing was noted"
    state = decode(manifest.values["consumed"])
    gaps = sum(after["first"] != before["last"] for before, after in itertools.pairwise(state["segments"]))
    once = "each once an epoch, in order" if not gaps else f"in order, with {gaps} stretches left out"
    return f"{state['count']:,} up to step {manifest.step}, {once}: {state['hash'][:12]}"


def _run_commands(run: FaultyRun, scratch: Path, *, num_faults: int) -> list[report.Command]:
    """Runs ``paceline train``, and again with ``--resume auto`` while a fault ended it: what a scheduler would do."""
    begin = ["train", str(run.path), *run.overrides, "--json"]
    commands = [_run_command(run, begin, scratch, run.folder)]
    known = 0
    while commands[-1].code not in (DONE, REFUSED) and len(commands) <= num_faults:
        happened = len({fired.number for fired in faults.read_notes(scratch, faults.Fired)})
        if happened == known:
            break  # it ended for another reason
        known = happened
        meaning = MEANINGS.get(commands[-1].code, "ended")
        run.say(f"exit code {commands[-1].code} ({meaning}): starting it again, as a scheduler would")
        again = ["train", str(run.folder / "config.yaml"), "--resume", "auto", "--json"]
        commands.append(_run_command(run, again, scratch))
    return commands


def _run_command(
    run: FaultyRun, arguments: Sequence[str], scratch: Path | None, replaced: Path | None = None
) -> report.Command:
    """Runs ``paceline`` in a process, in place of an older run in ``replaced``; tells what it tells, and faults."""
    force = ["--force"] if replaced is not None and (replaced / "config.yaml").is_file() else []
    environment = {name: value for name, value in run.environment.items() if name != faults.VARIABLE}
    if scratch is not None:
        environment[faults.VARIABLE] = str(scratch.absolute())
    start = time.time()
    told: list[tuple[float, str]] = []
    is_over = threading.Event()
    threads = [threading.Thread(target=_tell_faults, args=(run, scratch, is_over), daemon=True)]
    launchers: list[subprocess.Popen[str]] = []
    try:
        threads[0].start()
        for host in range(run.hosts):
            is_over.wait(_NEXT_HOST_S if host else 0.0)
            launchers.append(_start_launcher(run, host, [*arguments, *force], environment))
            threads.append(threading.Thread(target=_listen, args=(launchers[-1], host, told), daemon=True))
            threads[-1].start()
        codes = [each.wait() for each in launchers]
    except BaseException:
        for each in launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(30.0)  # Ctrl-C has reached it too
            each.kill()
        raise
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    # That of a host that has seen the end; where the first is killed, the others say that they could not go on.
    return report.Command(start=start, end=time.time(), code=codes[0], told=tuple(sorted(told)))


def _start_launcher(
    run: FaultyRun, host: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    words, named = list(arguments), dict(environment)
    if run.meeting is not None:
        words += ["--nnodes", f"1:{run.hosts}", "--node-ranks", str(run.ranks // run.hosts)]
        words += ["--rdzv", f"127.0.0.1:{run.meeting}"]
        named["PACELINE_HOST"] = f"host-{host}"
    command = [sys.executable, "-m", "paceline", *words]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env=named, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True)


def _listen(launcher: subprocess.Popen[str], host: int, told: list[tuple[float, str]]) -> None:
    """Notes what a launcher says, and passes it on, with the host's name where it is not the first."""
    assert launcher.stderr is not None
    for line in launcher.stderr:
        told.append((time.time(), line.rstrip("\n")))
        print(f"host-{host}: {told[-1][1]}" if host else told[-1][1], file=sys.stderr, flush=True)


def _tell_faults(run: FaultyRun, scratch: Path | None, is_over: threading.Event) -> None:
    if scratch is None:
        return
    plan = {each.number: each for each in faults.read_plan(scratch).faults}
    known = len(faults.read_notes(scratch, faults.Fired))
    while True:
        is_last = is_over.wait(_LOOK_EVERY_S)
        fired = faults.read_notes(scratch, faults.Fired)
        for each in fired[known:]:
            detail = f" ({each.detail})" if each.detail else ""
            run.say(f"{plan[each.number]}: on rank {each.rank}, in step {each.step}{detail}")
        known = len(fired)
        if is_last:
            return


def _attempts(folder: Path, ranks: int) -> list[list[RankAttempt]]:
    found = read_run(folder)
    return [found.get(rank, []) for rank in range(ranks)]


def _compare(
    run: FaultyRun, attempts: list[list[RankAttempt]], planned: Sequence[faults.Fault], scratch: Path
) -> report.LossComparison:
    name = f"{run.config.name.removesuffix('-chaos')}-undisturbed"
    folder = Path(run.config.monitor.folder) / name
    run.say("now undisturbed, to compare")
    arguments = ["train", str(run.path), *run.overrides, f"name={name}", "--json"]
    nothing = scratch / "undisturbed" if run.hosts > 1 else None  # all hosts begin together
    if nothing is not None:
        nothing.mkdir()
        faults.write_plan(nothing, 0, [], meeting=run.meeting, ranks=run.ranks)
    command = _run_command(run, arguments, nothing, folder)
    is_expected = command.code == 0 and not any(each.kind in faults.ON_LOSS for each in planned)
    ours, theirs = audit_samples(run.folder), audit_samples(folder)
    twin = _attempts(folder, run.ranks)
    is_expected = is_expected and len({each.run.world_size for each in (*attempts[0], *twin[0])}) == 1
    samples = report.SAME if ours == theirs else theirs
    return report.compare_steps(attempts, twin, is_expected=is_expected, samples=samples)
