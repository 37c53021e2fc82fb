"""``paceline train``: from a config to a finished run on this machine, or one rank of it under torchrun."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from paceline.checkpoint import PassedOver
    from paceline.config import Config
    from paceline.errors import Problem
    from paceline.records.console import ProgressView
    from paceline.records.records import Record
    from paceline.run.warm import WarmRanks
    from paceline.search.choice import Choice
    from paceline.search.expectation import Expectation


def train(
    config: Path = typer.Argument(metavar="CONFIG", help="A YAML file; see configs/ for examples."),
    overrides: list[str] = typer.Argument(None, metavar="SECTION.KEY=VALUE", help="Changes to the config."),
    resume: str = typer.Option(None, help="Continue from a checkpoint: auto (the run's newest), or a path."),
    force: bool = typer.Option(False, "--force", help="Replace a run folder of the same name."),
    port: int = typer.Option(0, min=0, max=65535, help="Port where the ranks meet; 0: a free one."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON, and no progress."),
    nnodes: str | None = typer.Option(None, metavar="N or MIN:MAX", help="Hosts, each with this command; see --rdzv."),
    rdzv: str | None = typer.Option(None, metavar="HOST:PORT", help="Where the hosts meet: one of them, and a port."),
    node_ranks: int | None = typer.Option(None, min=1, help="With --nnodes: ranks of this host; else one per GPU."),
    no_memory_check: bool = typer.Option(
        False, "--no-memory-check", help="Also start a run that is estimated to need more memory than there is."
    ),
) -> None:
    """Train on this machine: one rank per GPU, or two CPU ranks.

    Examples:

      paceline train configs/digits.yaml

      paceline train configs/gpt_pydoc.yaml parallel.ranks=4 train.steps=50

      paceline train configs/digits.yaml train.epochs=30 --resume auto

      torchrun --nproc-per-node 2 -m paceline train configs/digits.yaml

      paceline train configs/digits.yaml --nnodes 1:4 --rdzv host1:29400
    """
    from paceline.config import load_config

    asked = load_config(config, overrides or [])
    if "RANK" in os.environ:
        from paceline.run.under_launcher import run_under_launcher

        run_under_launcher(asked, force=force, resume=resume, as_json=as_json, is_judged=not no_memory_check)
        return
    if nnodes is not None or rdzv is not None:
        from paceline.run.several_hosts import NodeOptions, launch_node

        if nnodes is None or rdzv is None:
            raise typer.BadParameter("--nnodes and --rdzv belong together: how many hosts, and where they meet")
        options = NodeOptions(counts=nnodes, endpoint=rdzv, ranks=node_ranks)
        launch_node(asked, options, force=force, resume=resume, as_json=as_json)
        return
    _launch(asked, force=force, resume=resume, port=port, as_json=as_json, is_judged=not no_memory_check)


def resolve_config(config: Config) -> Config:
    """Settles what depends on the machine, device and ranks. Raises ConfigError if they do not fit."""
    import torch

    from paceline.config import check_ranks
    from paceline.errors import ConfigError, Problem
    from paceline.run.supervision import CPU_RANKS

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = config.parallel.device if config.parallel.device != "auto" else ("cuda" if num_gpus else "cpu")
    ranks = config.parallel.ranks if config.parallel.ranks != "auto" else (num_gpus if device == "cuda" else CPU_RANKS)
    problems: list[Problem] = _check_precision(config.train.precision, device)
    if device == "cuda" and num_gpus == 0:
        problems.append(
            Problem(
                what="parallel.device = cuda, and torch reaches no GPU here",
                rule="every rank needs a GPU of its own; virtual ranks share one",
                fix="set parallel.device = cpu; paceline doctor tells what is missing",
            )
        )
    elif device == "cuda" and ranks > num_gpus and config.comm.backend != "virtual":
        problems.append(
            Problem(
                what=f"parallel.ranks = {ranks} on {num_gpus} GPUs",
                rule="every rank needs a GPU of its own",
                fix=f"set parallel.ranks = {num_gpus}, or parallel.device = cpu",
            )
        )
    else:
        problems += check_ranks(config, ranks)
    if problems:
        raise ConfigError(problems, source="config")
    parallel = config.parallel.model_copy(update={"device": device, "ranks": ranks})
    return config.model_copy(update={"parallel": parallel})


def resolve_strategy(config: Config) -> tuple[Config, Choice | None]:
    """Decides ``strategy`` or ``sharding_strategy: auto`` of a config whose ranks are settled; says why, if it did.

    Raises ConfigError where nothing fits into memory.
    """
    if config.parallel.strategy != "auto":
        return config, None
    from paceline.free_memory import measure_room
    from paceline.train.resolve import resolve_strategy as decide

    ranks = config.parallel.ranks
    assert isinstance(ranks, int)
    return decide(config, measure_room(config.parallel.device, ranks, config.parallel.node_ranks or ranks))


def check_host(config: Config, node_ranks: int | None = None) -> None:
    """Raises ConfigError where this host cannot hold what its ranks would offload; None: it has all of them."""
    from paceline.errors import ConfigError
    from paceline.free_memory import free_host_bytes
    from paceline.search.host_room import host_problems

    ranks = config.parallel.ranks
    assert isinstance(ranks, int)
    problems = host_problems(config, node_ranks=node_ranks or ranks, free_bytes=free_host_bytes())
    if problems:
        raise ConfigError(problems, source="config")


def _check_precision(name: str, device: str) -> list[Problem]:
    """Lists why CPU ranks cannot compute in a precision. GPUs are asked by the ranks that own them."""
    import torch

    from paceline.engines.precision import check_precision, precision_named
    from paceline.errors import Problem, UsageError

    if device != "cpu":
        return []
    try:
        check_precision(precision_named(name), torch.device("cpu"))
    except UsageError as error:
        what, rule, fix = (line.strip() for line in str(error).splitlines()[:3])
        return [Problem(what=f"train.precision = {name}: {what}", rule=rule, fix=fix)]
    return []


def show_decisions(config: Config, choice: Choice | None) -> None:
    """Prints what was decided before the run, and why, in a few lines."""
    from rich.console import Console

    from paceline.run.foretell import entry_problem

    notes = [] if choice is None else [choice.reason()]
    if config.memory.offload and config.parallel.device == "cpu":
        notes.append("memory.offload moves nothing here: on CPU ranks the host's memory is the device's")
    if config.comm.nccl != type(config.comm.nccl)() and config.parallel.device == "cpu":
        notes.append("comm.nccl is not read here: CPU ranks do not use NCCL")
    problem = entry_problem()
    notes += [] if problem is None else [problem]
    for note in notes:
        Console().print(note, highlight=False, markup=False)


def predict_run(
    config: Config, *, threads: int | None = None, node_ranks: int | None = None, cores: Sequence[int] = ()
) -> Expectation | None:
    """Predicts time and memory of a run whose device and ranks are settled; None for what is no transformer.

    ``threads`` of a CPU rank and ``node_ranks`` are the launcher's; None: the cores are shared out, one host. ``cores``
    are those that the ranks share; without them, those of this process.
    """
    if config.model.kind != "gpt":
        return None
    from paceline.cluster.detect import detect_machine
    from paceline.run.foretell import machine_entry
    from paceline.search.expect import expect_run

    machine = detect_machine(with_gpus=config.parallel.device == "cuda")
    machine = replace(machine, cores=len(cores) or machine.cores)
    ranks = config.parallel.ranks
    assert isinstance(ranks, int)
    hosts = -(-ranks // (config.parallel.node_ranks or node_ranks or ranks))
    return expect_run(config, machine, threads=threads, hosts=hosts, entry=machine_entry())


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run lives and where it starts from. ``is_continued``: from a checkpoint of its own."""

    folder: Path
    checkpoint: Path | None = None
    is_continued: bool = False


def find_place(config: Config, *, force: bool, resume: str | None) -> Place:
    """Finds a run's folder, and the checkpoint to start from; does nothing yet.

    Raises RunFolderError if the folder may not be used, CheckpointError if there is no such checkpoint or if none could
    be written to ``checkpoint.folder``.
    """
    from paceline.cli.destination import check_checkpoint_folder
    from paceline.run.folder import check_folder

    folder = Path(config.monitor.folder) / config.name
    check_checkpoint_folder(config.checkpoint.folder)
    if resume is None:
        check_folder(folder, force=force)
        return Place(folder=folder)
    from paceline.checkpoint import find_checkpoint
    from paceline.checkpoint.storage import absolute_path
    from paceline.errors import CheckpointError, UsageError
    from paceline.run.supervision import is_scheduled

    try:
        where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
        checkpoint = absolute_path(find_checkpoint(resume, where, config.checkpoint.verify, _tell_passed_over))
    except CheckpointError:
        if resume != "auto" or not is_scheduled():
            raise
        # A scheduler starts the same command again: also a run that had nothing to save yet.
        typer.echo(f"paceline: no checkpoint in {folder} yet: starting from the beginning", err=True)
        check_folder(folder, force=force, resume=(folder / "config.yaml").is_file())
        return Place(folder=folder, is_continued=(folder / "config.yaml").is_file())
    is_continued = resume == "auto" or checkpoint.is_relative_to(folder.resolve())
    if is_continued and force:
        raise UsageError(
            f"--force would remove {folder}, from which --resume {resume} continues\n"
            "  one replaces a run, the other goes on with it\n  give one of them"
        )
    check_folder(folder, force=force, resume=is_continued)
    return Place(folder=folder, checkpoint=checkpoint, is_continued=is_continued)


def _launch(
    asked: Config, *, force: bool, resume: str | None, port: int, as_json: bool, is_judged: bool = True
) -> None:
    place = find_place(asked, force=force, resume=resume)  # before torch is imported, which takes seconds
    from paceline.run.supervision import rank_modules, rank_threads
    from paceline.run.warm import warm_ranks

    modules, threads = rank_modules(asked), rank_threads(asked)
    with warm_ranks(modules, is_wanted=asked.recovery.warm, threads=threads) as warm:  # loads torch as this one does
        config, choice = _settle(asked, is_judged=is_judged)
        _launch_in(place, config, choice, force=force, port=port, as_json=as_json, warm=warm)


def _settle(asked: Config, *, is_judged: bool) -> tuple[Config, Choice | None]:
    """Settles device, ranks and strategy. Raises ConfigError or UsageError for what this machine cannot hold."""
    config, choice = resolve_strategy(resolve_config(asked))
    check_host(config)
    if is_judged and choice is None:  # what was chosen was chosen because it fits
        from paceline.run.memory_check import check_memory

        check_memory(config)
    return config, choice


def _launch_in(
    place: Place,
    config: Config,
    choice: Choice | None,
    *,
    force: bool,
    port: int,
    as_json: bool,
    warm: WarmRanks | None,
) -> None:
    from paceline.config import dump_yaml
    from paceline.errors import LaunchError, UsageError
    from paceline.run.failure import RunFailedError, RunPreemptedError, RunStoppedError
    from paceline.run.folder import claim_folder
    from paceline.run.foretell import Foretold
    from paceline.run.local import check_port
    from paceline.run.settings import rank_variables

    uses_nccl = config.parallel.device == "cuda" and config.comm.backend in ("auto", "nccl")
    variables = rank_variables(config, uses_nccl=uses_nccl)
    check_port(port)
    if config.monitor.console and not as_json:
        show_decisions(config, choice)
    expected = predict_run(config)
    with claim_folder(place.folder, dump_yaml(config), force=force, resume=place.is_continued) as claimed:
        if expected is not None:
            claimed.expect(expected.to_text())
        try:
            shown = config.monitor.console and not as_json
            with Progress(place.folder, is_shown=shown), Foretold(config, place.folder, expected, warm):
                _run_attempts(config, place, port=port, variables=variables, warm=warm)
        except UsageError:
            claimed.discard()
            raise
        except RunPreemptedError as error:
            raise RunPreemptedError(f"{error}{how_to_continue(place.folder)}") from None
        except RunFailedError as error:
            raise RunFailedError(f"{error}{how_to_continue(place.folder)}", error.cause, error.code) from error
        except RunStoppedError as error:
            raise RunStoppedError(error.number, how_to_continue(place.folder)) from None
        except LaunchError as error:
            raise LaunchError(f"{error}{how_to_continue(place.folder)}") from error
        show_result(place.folder, config, as_json=as_json, choice=choice)


def _run_attempts(
    config: Config, place: Place, *, port: int, variables: dict[str, str], warm: WarmRanks | None
) -> None:
    """Runs the ranks, and runs them again while that helps."""
    from paceline.run.local import launch_local
    from paceline.run.supervise import RestartNote, supervise
    from paceline.run.supervision import rank_command, restart_policy, surroundings
    from paceline.run.watch import watch_policy

    ranks = config.parallel.ranks
    assert isinstance(ranks, int)
    is_virtual = config.comm.backend == "virtual"

    def start(checkpoint: Path | None, restart: RestartNote | None) -> None:
        launch_local(
            rank_command(place.folder, checkpoint, restart),
            place.folder,
            ranks=1 if is_virtual else ranks,
            num_records=ranks,
            threads=config.parallel.threads,
            port=port,
            variables=variables,
            warm=warm,
            watch=watch_policy(config),
        )

    around = surroundings(config, place.folder, place.checkpoint)
    names = f"{ranks} {'virtual ' if is_virtual else ''}rank{'s' if ranks > 1 else ''}"
    supervise(start, place.checkpoint, place.folder, restart_policy(config), around, ranks=names)


def _tell_passed_over(passed: PassedOver) -> None:
    typer.echo(f"paceline: {passed}", err=True)


def how_to_continue(folder: Path) -> str:
    """Returns the line that says how to go on from the newest checkpoint, if there is one."""
    from paceline.checkpoint import list_checkpoints

    found = list_checkpoints(folder / "checkpoints")
    if not found:
        return ""
    command = shlex.join(["paceline", "train", str(folder / "config.yaml"), "--resume", "auto"])
    return f"\n  to go on from step {int(found[-1].name.rpartition('-')[2])}:  {command}"


def show_result(folder: Path, config: Config, *, as_json: bool, choice: Choice | None = None) -> None:
    """Prints what a finished run did, where it is, and what to try next. Raises LaunchError if it is not finished."""
    import json

    from rich.console import Console

    from paceline.errors import LaunchError
    from paceline.records.report import render, summarize, to_json

    summary = summarize(folder)
    if summary.status != "done":
        raise LaunchError(
            f"the ranks left before the run was done: it is {summary.status}, at step {summary.steps}\n"
            f"  their logs are in {folder / 'logs'}"
        )
    note = _nothing_left(folder, config)
    if as_json:
        chosen = {} if choice is None else {"choice": choice.to_json()}
        typer.echo(json.dumps(to_json(summary) | chosen, indent=2))
        if note:
            typer.echo(note, err=True)
        return
    console = Console()
    if note:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
        return
    console.print(render(summary))
    lines = [f"The run is in {folder}: records, checkpoints, logs, config.", "Try next:"]
    console.print("", *lines, *_next_steps(folder, config), sep="\n", highlight=False, markup=False, soft_wrap=True)


def _nothing_left(folder: Path, config: Config) -> str:
    """Returns a note if the last attempt found the run complete, and else nothing."""
    from paceline.records.records import EndRecord, RunRecord, StepRecord, read_records

    has_trained, step = False, 0
    for record in read_records(folder / "records" / "rank-0.jsonl"):
        if isinstance(record, RunRecord):
            has_trained = False
        elif isinstance(record, StepRecord):
            has_trained = True
        elif isinstance(record, EndRecord):
            step = record.step
    if has_trained:
        return ""
    return (
        f"nothing left to do: the checkpoint is of step {step}, and the run ends there\n"
        f"  to go on, make it longer: {_longer(config)} --resume ..."
    )


def _next_steps(folder: Path, config: Config) -> list[str]:
    """Returns what makes sense after this run: commands to paste, with a comment where 80 columns have room for it."""
    own_config = str(folder / "config.yaml")
    commands = [
        ("prove it right", ["paceline", "verify", own_config, "--ranks", "4"]),
        ("every setting", ["paceline", "config", "explain", own_config]),
        ("this again", ["paceline", "report", str(folder)]),
    ]
    if any((folder / "checkpoints").glob("step-*")):
        commands.insert(0, ("go on", ["paceline", "train", own_config, _longer(config), "--resume", "auto"]))
    example = Path("configs/gpt_pydoc.yaml")
    if config.model.kind != "gpt" and example.is_file():
        commands.append(("a small GPT", ["paceline", "train", str(example)]))
    return [_with_comment(f"  {shlex.join(command)}", comment) for comment, command in commands]


def _with_comment(command: str, comment: str) -> str:
    full = f"{command:<50}  # {comment}"
    return full if len(full) <= 80 else command


def _longer(config: Config) -> str:
    train = config.train
    return f"train.steps={2 * train.steps}" if train.steps else f"train.epochs={2 * (train.epochs_to_run or 1):g}"


class Progress:
    """Shows rank 0's records as they are written, in a thread of its own."""

    def __init__(self, folder: Path, *, is_shown: bool) -> None:
        self._path = folder / "records" / "rank-0.jsonl"
        self._is_shown = is_shown
        self._is_over = threading.Event()
        self._since = time.time()
        self._thread: threading.Thread | None = None
        self._view: ProgressView | None = None

    def __enter__(self) -> None:
        if not self._is_shown:
            return
        from paceline.records.console import ProgressView

        self._view = ProgressView()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None and self._view is not None:
            self._thread.join(timeout=5.0)
            self._view.flush()
            self._view.close()

    def _follow(self) -> None:
        from paceline.records.records import EndRecord, RunRecord, follow_records

        assert self._view is not None
        for record in follow_records(self._path, self._is_over.is_set, poll_s=0.1):
            if record.time < self._since:  # a resumed run's file begins with what an earlier attempt wrote
                continue
            # What went wrong is told once, with its cause; an attempt that failed in its set-up plans no steps.
            is_failure = isinstance(record, EndRecord) and record.status != "done"
            if not is_failure and not (isinstance(record, RunRecord) and record.total_steps == 0):
                self._view.write(_with_near_paths(record))


def _with_near_paths(record: Record) -> Record:
    """Returns an event with paths below the current folder as seen from there."""
    from paceline.records.records import EventRecord

    if not isinstance(record, EventRecord):
        return record
    here = f"{Path.cwd()}{os.sep}"
    detail = {
        key: value.removeprefix(here) if isinstance(value, str) else value for key, value in record.detail.items()
    }
    return replace(record, detail=detail)
