"""``paceline train``, ``chaos`` and ``profile``: runs of real ranks on this machine, or one rank under torchrun."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli import options
from paceline.errors import ConfigError, PacelineError, Problem, UsageError, did_you_mean
from paceline.health.exit_codes import REFUSED
from paceline.run.signals import scratch_folder
from paceline.terminal import echo, new_console

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.records.report import RunSummary
    from paceline.run.find_rate import RateFinding
    from paceline.run.location import RunResult

_RULE = "what a run does is in its config, and changed by section.key=value after it"
_CONFIG = ("config", "config_file", "cfg")
_ENDINGS = (".yaml", ".yml")
_MOST_REPORTED_BYTES = 16 * 2**20  # of records: about a second


def train(
    context: typer.Context,
    config: options.ConfigPath,
    overrides: options.Overrides = None,
    *,
    resume: str = typer.Option(None, help="Continue: auto or last (the newest checkpoint), best, or a path."),
    force: bool = typer.Option(False, "--force", help="Replace the run of this name, in place of a new number."),
    auto_batch_size: bool = typer.Option(
        False, "--auto-batch-size", help="The largest microbatch that fits: the same as train.microbatch=auto."
    ),
    find_lr: bool = typer.Option(False, "--find-lr", help="Try rising learning rates in a short run; suggest one."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON, and no progress."),
    verbose: bool = typer.Option(False, "--verbose", help="Show the lines of the run's log in place of progress."),
    quiet: bool = typer.Option(False, "--quiet", help="Show notes and errors alone."),
    nnodes: str | None = typer.Option(None, metavar="N or MIN:MAX", help="Hosts, each with this command; see --rdzv."),
    rdzv: str | None = typer.Option(None, metavar="HOST:PORT", help="Where the hosts meet: one of them, and a port."),
    node_ranks: int | None = typer.Option(None, min=1, help="With --nnodes: ranks of this host; else one per GPU."),
    is_watched: bool = typer.Option(False, "--watch", "--monitor", help="Serve the live page beside the run."),
    no_memory_check: options.NoMemoryCheck = False,
) -> None:
    """Train on this machine: one rank per GPU, or two CPU ranks."""
    options_here = [name for each in context.command.params for name in each.opts if name.startswith("--")]
    config, words, notes = translate_options([str(config), *(overrides or [])], options_here)
    for note in notes if options.tells_for_host() else ():
        echo(note, err=True)
    from paceline.run.location import RunOptions
    from paceline.run.train import train as run
    from paceline.run.whereami import parse_nodes

    hosts = None
    if nnodes is not None and rdzv is not None:
        hosts = parse_nodes(nnodes, rdzv, node_ranks)
    elif nnodes is not None or rdzv is not None:
        raise typer.BadParameter("--nnodes and --rdzv belong together: how many hosts, and where they meet")
    if verbose and (quiet or as_json):
        raise typer.BadParameter("--verbose shows the log, and --quiet and --json show no progress: take one of them")
    how = {"is_quiet": as_json or quiet, "is_verbose": verbose, "checks_memory": not no_memory_check}
    asked = RunOptions(force=force, resume=resume, hosts=hosts, **how)
    if find_lr:
        from paceline.run.find_rate import find_rate

        show_finding(find_rate(config, words, options=asked), as_json=as_json)
        return
    words += ["train.microbatch=auto"] if auto_batch_size else []
    with live_page(config, words) if is_watched else nullcontext():
        result = run(config, words, asked)
    if result is not None and (as_json or not quiet):
        show_result(result, as_json=as_json)


@contextmanager
def live_page(config: Path, overrides: list[str]) -> Iterator[None]:
    """Serves the page of the run's folder meanwhile, in a process of its own; under torchrun rank 0 does."""
    from paceline.config import load_config_with_sources

    if os.environ.get("RANK", "0") != "0":
        yield
        return
    folder = load_config_with_sources(config, overrides).config.monitor.folder
    command = [sys.executable, "-m", "paceline", "watch", folder, "--no-open", "--parent", str(os.getpid())]
    with subprocess.Popen(command, start_new_session=True) as page:
        try:
            yield
        finally:
            page.terminate()


def show_finding(found: RateFinding, *, as_json: bool) -> None:
    if as_json:
        options.print_json({"suggestion": found.suggestion, "rates": found.rates, "losses": found.losses})
        return
    stride = max(1, len(found.rates) // 12)
    for rate, loss in list(zip(found.rates, found.losses, strict=True))[::stride]:
        echo(f"  learning rate {rate:8.1e}   smoothed loss {loss:.4f}")
    echo(f"the loss falls fastest at {found.suggestion:.1e}, and is lowest at {found.lowest_loss_at:.1e}")
    echo(f"try optim.lr={found.suggestion:.1e}   (the run is in {found.folder})")


def show_result(result: RunResult, *, as_json: bool) -> None:
    """Prints what a finished run did, where it is, and what to try next."""
    from paceline.records.report import render

    note = "" if result.has_trained else _nothing_left(result)
    if as_json:
        chosen = {} if result.choice is None else {"choice": result.choice.to_json()}
        options.print_json(result.summary.to_json() | chosen)
        if note:
            echo(note, err=True)
        return
    console = new_console()
    if note:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
        return
    console.print(render(result.summary))
    lines = [f"The run is in {result.folder}: records, checkpoints, logs, config.", "Try next:"]
    lines += _next_steps(result.folder, result.config)
    if (path := write_small_report(result.folder, result.summary)) is not None:
        lines += ["", f"Its report, for a browser, is {path}"]
    console.print("", *lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


def write_small_report(folder: Path, summary: RunSummary) -> Path | None:
    """Writes ``report.html`` into a run's folder, unless its records are so large that it would take seconds."""
    from paceline.view.html import write_report
    from paceline.view.runs import read_runs

    size = sum(path.stat().st_size for path in (folder / "records").glob("*.jsonl"))
    if size > _MOST_REPORTED_BYTES:
        return None
    path = folder / "report.html"
    try:
        write_report(read_runs([folder]), path, [summary])
    except PacelineError:  # a full disk, say: the run is done all the same
        return None
    return path


def _nothing_left(result: RunResult) -> str:
    patience = result.config.train.early_stop.patience
    note = f"nothing left to do: the checkpoint is of step {result.last_step}, and the run ends there"
    ways = [f"to go on, make it longer: {_longer(result.config)} --resume ..."]
    if patience is not None:
        ways.append(f"where early stopping ended it: train.early_stop.patience={2 * patience} --resume ...")
    return "\n  ".join([note, *ways])


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
    if config.model.kind != "gpt":
        commands.append(("a small GPT", ["paceline", "train", "gpt_pydoc"]))
    lines = {f"  {shlex.join(command)}": comment for comment, command in commands}
    full = {line: f"{line:<50}  # {comment}" for line, comment in lines.items()}
    return [full[line] if len(full[line]) <= 80 else line for line in lines]


def _longer(config: Config) -> str:
    train = config.train
    return f"train.steps={2 * train.steps}" if train.steps else f"train.epochs={2 * (train.epochs_to_run or 1):g}"


def translate_options(words: Sequence[str], known: Sequence[str]) -> tuple[Path, list[str], list[str]]:
    """Returns config, overrides, and a line on each translated option. Raises ConfigError with answers to others."""
    from paceline.config.suggest import translate_setting

    files: list[str] = []
    overrides: list[str] = []
    notes: list[str] = []
    problems: list[Problem] = []
    for option, value in _options(words):
        if not option:
            is_override = "=" in value and not value.endswith(_ENDINGS)
            (overrides if files or is_override else files).append(value)
        elif option.strip("-") in _CONFIG and value:
            files.append(value)
        elif found := [f"{key}={it}" for key, it in translate_setting(option.strip("-"), value or True).items()]:
            overrides += found
            notes.append(f"{option} {value}".strip() + f": read as {shlex.join(found)}")
        else:
            problems.append(_answer(option, value, known))
    if len(files) != 1:
        what = f"{' and '.join(files)} are configs" if files else "there is no config among the arguments"
        fix = "write paceline train digits, and then the options"
        problems.append(Problem(what=what, rule="one config is the first argument", fix=fix))
    if problems:
        raise ConfigError(problems, source="paceline train")
    return Path(files[0]), overrides, notes


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields options with their values, if any, and other words with no option."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, separator, value = word.partition("=")
        if not word.startswith("-") or not word.strip("-"):
            yield "", word
            continue
        following = waiting[0] if waiting and not separator else "-"
        is_file = following.endswith(_ENDINGS) and name.strip("-") not in _CONFIG
        if not following.startswith("-") and "=" not in following and not is_file:
            value = waiting.pop(0)
        yield name, value


def _answer(option: str, value: str, known: Sequence[str]) -> Problem:
    from paceline.config.suggest import suggest_keys

    what = f"{f'{option} {value}'.strip()} is not an option of train"
    if own := did_you_mean(option, known, cutoff=0.75):
        return Problem(what=what, rule=f"the options are {', '.join(known)}", fix=own)
    name = option.strip("-").replace("-", "_")
    keys = suggest_keys("", name, {})
    # Of a section one word can set its kind alone, where it has one.
    keys = [f"{key}.kind" if key in ("model", "data", "optim") else key for key in keys]
    found = [f"{key}={value or '...'}" for key in keys if "." in key or key == "name"]
    fix = f"write {' or '.join(found)}" if found else "leave it out, or find its key: paceline config explain CONFIG"
    return Problem(what=what, rule=_RULE, fix=fix)


def chaos(
    config: options.ConfigPath,
    overrides: options.Overrides = None,
    *,
    faults: str = typer.Option(None, metavar="KIND:rank=R@step=S,...", help="What goes wrong; see docs/chaos.md."),
    random: int = typer.Option(0, min=0, help="So many faults instead, drawn by --seed."),
    seed: int = typer.Option(0, help="Says at which byte or bit, and which random faults."),
    backend: str = typer.Option(None, metavar="virtual|gloo", help="Ranks as threads or processes; else the config's."),
    hosts: int = typer.Option(1, min=1, help="So many launchers on this machine share the ranks (CPU ranks)."),
    compare: bool = typer.Option(False, "--compare", help="Train undisturbed too, and compare every loss."),
    mtbf: float = typer.Option(None, min=1e-6, help="Hours between failures to recommend for; else as in this run."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Train with faults, recover, and report what that cost."""
    from paceline.chaos.experiment import plan_faults, prepare_run, run_with_faults
    from paceline.chaos.faults import parse_faults
    from paceline.chaos.report import report_lines
    from paceline.config.load import load_config_with_sources
    from paceline.run.warm import CPU_RANKS

    if (faults is None) == (random == 0):
        raise UsageError("--faults or --random\n  one of them says what goes wrong\n  try --faults kill:rank=1@step=20")
    changes = list(overrides or [])
    if backend is not None:
        options.check_word("--backend", backend, ("virtual", "gloo"))
        changes += [f"comm.backend={backend}", "parallel.device=cpu"]
    changes += ["parallel.device=cpu"] if hosts > 1 else []
    kinds = ["hang"] * random if faults is None else [each.kind for each in parse_faults(faults)]  # any may hang

    def say(text: str) -> None:
        echo(f"chaos: {text}", err=True)

    loaded = load_config_with_sources(config, changes)
    known = os.environ
    run = prepare_run(loaded, config, changes, kinds=kinds, ranks=CPU_RANKS, environment=known, say=say, hosts=hosts)
    plan = plan_faults(run, faults, num_random=random, seed=seed)
    mtbf_s = None if mtbf is None else mtbf * 3600.0
    with scratch_folder() as scratch:
        report = run_with_faults(run, plan, scratch, seed=seed, compare=compare, mtbf_s=mtbf_s)
    if report is None:
        raise typer.Exit(REFUSED)
    if as_json:
        options.print_json(report.to_json())
    else:
        verdict = "every fault was handled as its policy says" if report.is_good else "not everything was handled"
        echo("\n".join(["", *report_lines(report), f"\n{verdict}; the run is in {run.folder}"]))
    raise typer.Exit(0 if report.is_good else 1)


def profile(
    config: options.ConfigPath,
    overrides: options.Overrides = None,
    steps: int = typer.Option(3, min=1, help="Steps to profile, after a warm-up of three."),
    output: Path = typer.Option("trace.json", callback=options.check_file, help="The time line; a .gz is compressed."),
    beside: list[Path] = typer.Option([], metavar="TRACE", help="A time line to lay beside it; may be repeated."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Profile a few steps of real ranks as one time line."""
    if "RANK" in os.environ:
        raise UsageError("paceline profile starts its ranks itself\n  run it without torchrun")
    from paceline.chrome_trace import write_events
    from paceline.run.processes import PROFILE
    from paceline_bench.profile.hook import profile_run
    from paceline_bench.profile.merge import beside as lay_beside
    from paceline_bench.profile.merge import merged_events, summarize_profile

    asked = options.load_and_tell(config, overrides).config
    for path in beside:
        lay_beside([], path)  # what is no trace is refused before anything runs
    with scratch_folder() as folder:
        os.environ[PROFILE] = str(folder)
        try:
            ranks = profile_run(asked, steps, Path(folder))
        finally:
            del os.environ[PROFILE]
    found = summarize_profile(ranks)
    events = merged_events(ranks)
    for path in beside:
        events = lay_beside(events, path)
    write_events(output, events, {"kind": "measured", "name": asked.name, "step_s": found.step_s})
    if as_json:
        options.print_json(found.to_json() | {"trace": str(output)})
        return
    for line in [*found.lines(), "", f"The time line is in {output}: open it in ui.perfetto.dev."]:
        echo(line)
