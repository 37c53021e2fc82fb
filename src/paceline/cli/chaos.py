"""``paceline chaos``: a run with faults, on the recovery path of every run, and what it cost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from paceline.chaos.faults import Fault
    from paceline.chaos.report import Report, Sameness
    from paceline.chaos.timeline import Command, Policies
    from paceline.config import Config
    from paceline.config.load import LoadedConfig
    from paceline.records.summary import Attempt

_SAVE_EVERY = 10  # steps, where a config saves nothing on the way
_HANG_S = 5.0  # where a config says nothing: nobody wants to watch a minute
_HANG_SETUP_S = 30.0  # the first step of an attempt counts as set-up
_CHANGES_RESULT = ("nan", "spike")
_LOOK_EVERY_S = 0.1


def chaos(
    config: Path = typer.Argument(metavar="CONFIG", help="A YAML file; see configs/ for examples."),
    overrides: list[str] = typer.Argument(None, metavar="SECTION.KEY=VALUE", help="Changes to the config."),
    faults: str = typer.Option(None, metavar="KIND:rank=R@step=S,...", help="What goes wrong; see docs/chaos.md."),
    random: int = typer.Option(0, min=0, help="So many faults instead, drawn by --seed."),
    seed: int = typer.Option(0, help="Says at which byte or bit, and which random faults."),
    backend: str = typer.Option(
        None, metavar="virtual|gloo", help="Ranks in one process, or one each; else the config's."
    ),
    compare: bool = typer.Option(False, "--compare", help="Train undisturbed too, and compare every loss."),
    mtbf: float = typer.Option(None, min=1e-6, help="Hours between failures to recommend for; else as in this run."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Train with faults, recover as the config says, and report what it cost.

    The run is left in <folder>/<name>-chaos; an older one there is replaced. Exit code 0 if every fault was handled as
    the policies of the config say.

    Examples:

      paceline chaos configs/digits.yaml --faults kill:rank=1@step=20

      paceline chaos configs/digits.yaml --faults disk-full@step=40,corrupt-checkpoint@step=50 --backend virtual

      paceline chaos configs/digits.yaml --random 5 --seed 3 --compare --json
    """
    from paceline.config.load import load_config_with_sources
    from paceline.errors import UsageError

    if (faults is None) == (random == 0):
        raise UsageError("--faults or --random\n  one of them says what goes wrong\n  try --faults kill:rank=1@step=20")
    loaded = load_config_with_sources(config, [*(overrides or []), *_backend(backend)])
    may_hang = faults is None or "hang" in faults
    setting = _settle(loaded, config, [*(overrides or []), *_backend(backend)], may_hang=may_hang)
    plan = _plan(setting, faults, num_random=random, seed=seed)
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as scratch:
        report = _run(setting, plan, Path(scratch), seed=seed, compare=compare, mtbf=mtbf)
    _show(report, setting.folder, as_json=as_json)
    raise typer.Exit(0 if report.is_good else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A config as chaos runs it: the file, what is changed about it, and where the run goes."""

    path: Path
    overrides: tuple[str, ...]
    config: Config
    folder: Path
    ranks: int
    notes: tuple[str, ...] = ()


def _backend(name: str | None) -> list[str]:
    from paceline.errors import UsageError

    if name is None:
        return []
    if name not in ("virtual", "gloo"):
        raise UsageError(
            f"--backend {name}\n  ranks are threads of one process, or processes\n  choose virtual or gloo"
        )
    return [f"comm.backend={name}", "parallel.device=cpu"]


def _settle(loaded: LoadedConfig, path: Path, overrides: Sequence[str], *, may_hang: bool) -> Setting:
    """Changes of a config what it leaves open and a run with faults needs; tells each."""
    from paceline.config import load_config
    from paceline.run.supervision import CPU_RANKS

    config, changes, notes = loaded.config, [f"name={loaded.config.name}-chaos"], []
    if config.checkpoint.every_steps is None and config.checkpoint.every_minutes is None:
        changes.append(f"checkpoint.every_steps={_SAVE_EVERY}")
        notes.append(f"the config saves nothing on the way: saving every {_SAVE_EVERY} steps (checkpoint.every_steps)")
    if loaded.sources.get("monitor.hang_s", "default") == "default":
        changes.append(f"monitor.hang_s={_HANG_S:g}")
    if may_hang and loaded.sources.get("monitor.hang_setup_s", "default") == "default":
        changes.append(f"monitor.hang_setup_s={_HANG_SETUP_S:g}")
    if loaded.sources.get("recovery.max_restarts", "default") == "default":
        changes.append("recovery.max_restarts=100")  # faults are as many as were asked for
    changed = [*overrides, *changes]
    settled = load_config(path, changed)
    ranks = settled.parallel.ranks
    return Setting(
        path=path,
        overrides=tuple(changed),
        config=settled,
        folder=Path(settled.monitor.folder) / settled.name,
        ranks=ranks if isinstance(ranks, int) else CPU_RANKS,
        notes=tuple(notes),
    )


def _plan(setting: Setting, text: str | None, *, num_random: int, seed: int) -> list[Fault]:
    """Reads or draws the faults. Raises ConfigError with all that cannot happen in this run."""
    from paceline.chaos.faults import check_faults, parse_faults, place_faults, random_faults
    from paceline.errors import ConfigError

    every, total = setting.config.checkpoint.every_steps or _SAVE_EVERY, setting.config.train.steps
    if text is None:
        faults = random_faults(seed, num_random, ranks=setting.ranks, last_step=total or 5 * every)
    else:
        faults = place_faults(parse_faults(text), after=2 * every)
    problems = check_faults(faults, ranks=setting.ranks, total_steps=total)
    if problems:
        raise ConfigError(problems, source="--faults")
    return faults


def _run(
    setting: Setting, faults: Sequence[Fault], scratch: Path, *, seed: int, compare: bool, mtbf: float | None
) -> Report:
    from paceline.chaos.notes import Fired, Passed, Started, read_notes, write_plan
    from paceline.chaos.report import make_report
    from paceline.chaos.timeline import Notes, handle, straggler_verdict
    from paceline.run.codes import REFUSED

    for note in setting.notes:
        say(note)
    write_plan(scratch, seed, faults)
    commands = _run_commands(setting, scratch, num_faults=len(faults))
    if commands[0].code == REFUSED:  # why has been told; what lies in the folder, if anything, is an older run
        raise typer.Exit(REFUSED)
    attempts = _attempts(setting.folder, setting.ranks)
    notes = Notes(
        fired=tuple(read_notes(scratch, Fired)),
        started=tuple(read_notes(scratch, Started)),
        passed=tuple(read_notes(scratch, Passed)),
    )
    handlings = [handle(each, notes, attempts[0], commands, _policies(setting.config)) for each in faults]
    handlings = [
        replace(each, verdict=straggler_verdict(each, attempts)) if each.fault.kind == "slow" else each
        for each in handlings
    ]
    samples = audit_samples(setting.folder)
    sameness = _compare(setting, attempts, faults) if compare else None
    report = make_report(
        setting.config.name,
        setting.ranks,
        attempts[0],
        commands,
        handlings,
        mtbf_s=None if mtbf is None else mtbf * 3600.0,
        samples=samples,
        sameness=sameness,
    )
    if setting.folder.is_dir():
        kept = setting.folder / "chaos"
        kept.mkdir(exist_ok=True)
        for path in scratch.iterdir():
            shutil.copy2(path, kept / path.name)
        (kept / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    return report


def _run_commands(setting: Setting, scratch: Path, *, num_faults: int) -> list[Command]:
    """Runs ``paceline train``, and again with ``--resume auto`` while a fault ended it: what a scheduler would do."""
    from paceline.chaos.notes import Fired, read_notes
    from paceline.run.codes import DONE, MEANINGS, REFUSED

    begin = ["train", str(setting.path), *setting.overrides, "--json"]
    commands = [_run_command([*begin, "--force"] if (setting.folder / "config.yaml").is_file() else begin, scratch)]
    known = 0
    while commands[-1].code not in (DONE, REFUSED) and len(commands) <= num_faults:
        happened = len({fired.number for fired in read_notes(scratch, Fired)})
        if happened == known:
            break  # it ended for another reason
        known = happened
        meaning = MEANINGS.get(commands[-1].code, "ended")
        say(f"exit code {commands[-1].code} ({meaning}): starting it again, as a scheduler would")
        again = ["train", str(setting.folder / "config.yaml"), "--resume", "auto", "--json"]
        commands.append(_run_command(again, scratch))
    return commands


def _run_command(arguments: Sequence[str], scratch: Path | None) -> Command:
    """Runs ``paceline`` in a process of its own; tells what it tells, and which faults happen, as they do."""
    from paceline.chaos.notes import VARIABLE
    from paceline.chaos.timeline import Command

    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if scratch is not None:
        environment[VARIABLE] = str(scratch.absolute())
    start, told = time.time(), list[tuple[float, str]]()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    is_over = threading.Event()
    teller = threading.Thread(target=_tell_faults, args=(scratch, is_over), daemon=True)
    teller.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            told.append((time.time(), line.rstrip("\n")))
            typer.echo(line.rstrip("\n"), err=True)
        code = process.wait()
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30.0)  # Ctrl-C has reached it too
        process.kill()
        raise
    finally:
        is_over.set()
        teller.join()
    return Command(start=start, end=time.time(), code=code, told=tuple(told))


def _tell_faults(scratch: Path | None, is_over: threading.Event) -> None:
    """Tells of each fault when it happens."""
    from paceline.chaos.notes import Fired, read_notes, read_plan

    if scratch is None:
        return
    plan, known = {each.number: each for each in read_plan(scratch).faults}, len(read_notes(scratch, Fired))
    while True:
        is_last = is_over.wait(_LOOK_EVERY_S)
        fired = read_notes(scratch, Fired)
        for each in fired[known:]:
            detail = f" ({each.detail})" if each.detail else ""
            say(f"{plan[each.number]}: on rank {each.rank}, in step {each.step}{detail}")
        known = len(fired)
        if is_last:
            return


def _attempts(folder: Path, ranks: int) -> list[list[Attempt]]:
    """Reads the records of every rank."""
    from paceline.records.records import read_records
    from paceline.records.summary import split_attempts

    paths = [folder / "records" / f"rank-{rank}.jsonl" for rank in range(ranks)]
    return [split_attempts(list(read_records(path))) if path.is_file() else [] for path in paths]


def _policies(config: Config) -> Policies:
    from paceline.chaos.timeline import Policies

    given = {each.name: getattr(config.recovery, each.name, None) for each in fields(Policies)}
    given["max_bad_steps"] = config.train.max_bad_steps
    given["has_automatic_microbatch"] = config.train.microbatch == "auto"
    return Policies(**given)  # type: ignore[arg-type]


def audit_samples(folder: Path) -> str:
    """Says whether the newest checkpoint of a run has consumed the right samples, each once an epoch."""
    from paceline.checkpoint import list_checkpoints
    from paceline.checkpoint.find import read_manifest
    from paceline.checkpoint.tensors import decode
    from paceline.checkpoint.tools.audit import check_samples
    from paceline.errors import CheckpointError

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
    state = {key: decode(value) for key, value in manifest.values.items() if key == "consumed"}.get("consumed")
    if state is None:
        return "not known: nothing was noted"
    gaps = sum(
        after["first"] != before["last"]
        for before, after in zip(state["segments"], state["segments"][1:], strict=False)
    )
    once = "each once an epoch, in order" if not gaps else f"in order, with {gaps} stretches left out"
    return f"{state['count']:,} up to step {manifest.step}, {once}: {state['hash'][:12]}"


def _compare(setting: Setting, attempts: list[list[Attempt]], faults: Sequence[Fault]) -> Sameness:
    """Trains the same config undisturbed, and compares."""
    from paceline.chaos.report import compare_steps

    name = f"{setting.config.name.removesuffix('-chaos')}-undisturbed"
    folder = Path(setting.config.monitor.folder) / name
    say("now undisturbed, to compare")
    arguments = ["train", str(setting.path), *setting.overrides, f"name={name}", "--json"]
    command = _run_command([*arguments, "--force"] if (folder / "config.yaml").is_file() else arguments, None)
    twin = _attempts(folder, setting.ranks)
    changed = any(each.kind in _CHANGES_RESULT for each in faults)
    is_expected = command.code == 0 and not changed
    ours, theirs = audit_samples(setting.folder), audit_samples(folder)
    return compare_steps(attempts, twin, is_expected=is_expected, samples="the same" if ours == theirs else theirs)


def say(text: str) -> None:
    """Tells what chaos does."""
    typer.echo(f"chaos: {text}", err=True)


def _show(report: Report, folder: Path, *, as_json: bool) -> None:
    from paceline.chaos.report import report_lines

    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
        return
    typer.echo("")
    for line in report_lines(report):
        typer.echo(line)
    verdict = "every fault was handled as its policy says" if report.is_good else "not everything was handled"
    typer.echo(f"\n{verdict}; the run is in {folder}")
