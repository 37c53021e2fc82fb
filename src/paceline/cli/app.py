"""The verbs of ``paceline``, and how errors reach people. torch is imported inside the verbs that need it."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from pathlib import Path

import typer
from typer.main import get_command

from paceline.cli.bench import app as bench_app
from paceline.cli.checkpoint import app as checkpoint_app
from paceline.cli.config import app as config_app
from paceline.cli.config import data_app
from paceline.cli.forecast import plan, predict, validate
from paceline.cli.launch import app as launch_app
from paceline.cli.learn import app as learn_app
from paceline.cli.machine import calibrate, cluster_app, doctor
from paceline.cli.options import tells_for_host
from paceline.cli.runs import report, sample, watch
from paceline.cli.simulate import schedule, simulate
from paceline.cli.train import chaos, profile, train
from paceline.cli.verify import verify
from paceline.errors import CheckpointError, ConfigError, DataError, PacelineError, RunFolderError, UsageError
from paceline.health.exit_codes import FAILED, REFUSED
from paceline.terminal import echo

app = typer.Typer(
    name="paceline",
    help="Trains PyTorch models on many devices, and tells you before you start how it will go.",
    epilog="Start with:  paceline train digits",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings={"ignore_unknown_options": True})(train)  # it answers those of other launchers
for _verb in (verify, validate, plan, predict, profile, report, watch, sample, simulate, chaos, schedule, doctor):
    app.command()(_verb)
app.command()(calibrate)
_GROUPS = {"launch": launch_app, "config": config_app, "cluster": cluster_app, "checkpoint": checkpoint_app}
for _name, _group in (_GROUPS | {"data": data_app, "bench": bench_app, "learn": learn_app}).items():
    app.add_typer(_group, name=_name)


def _add_help(verbs: typer.Typer, texts: dict[str, str], above: str = "") -> None:
    """Puts what ``help.md`` says of a verb below the first line, which is the docstring of its function."""
    for command in verbs.registered_commands:
        name = f"{above}{command.name or getattr(command.callback, '__name__', '')}"
        if name in texts:
            command.help = f"{inspect.getdoc(command.callback)}\n\n{texts[name]}"
    for group in verbs.registered_groups:
        if group.typer_instance is not None:
            _add_help(group.typer_instance, texts, f"{above}{group.name} ")


_SECTIONS = (Path(__file__).parent / "help.md").read_text(encoding="utf-8").split("\n## ")[1:]
_add_help(app, {name: text.strip() for name, _, text in (section.partition("\n") for section in _SECTIONS)})


def _show_version(wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    del version


_command_line = cache(get_command)  # the parser of all verbs takes 0.1 s to make


def run_command(verbs: typer.Typer = app, program: str = "paceline") -> None:
    """Runs the command line; our own errors are one message and an exit code, never a traceback.

    Exit codes: those of ``health/exit_codes.py``, and 128 + n for what signal n ended (Ctrl-C: 130).
    """
    try:
        _command_line(verbs)(prog_name=program)
    except PacelineError as error:
        is_refusal = isinstance(error, ConfigError | UsageError | RunFolderError | CheckpointError | DataError)
        from paceline.run.notes import RunFailedError, RunPreemptedError, RunStoppedError
        from paceline.run.whereami import SOURCE

        is_of_rank = isinstance(error, ConfigError) and error.source == SOURCE
        # Under torchrun every rank finds the same wrong input, and one of each host tells it.
        if not is_refusal or is_of_rank or tells_for_host():
            echo(f"paceline: {error}", err=True)
        if isinstance(error, RunFailedError | RunPreemptedError | RunStoppedError):
            sys.exit(error.code)
        sys.exit(REFUSED if is_refusal else FAILED)
