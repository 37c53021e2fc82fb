"""``paceline launch``: a run on other machines, submitted, followed, looked at and ended from here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from paceline.cli.options import ConfigPath, NoMemoryCheck, Overrides
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.launch.job import LaunchJob, Target

_MOST_BYTES = 2**19  # of a file of hosts, or a patch
_RUNS = typer.Option(Path("runs"), help="The folder of the runs: monitor.folder of their config.")


class _ConfigFirst(TyperGroup):
    """Lets a config stand where a verb does: ``paceline launch CONFIG`` is ``paceline launch start CONFIG``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


_HELP = "Start a run on other machines, and follow it. `paceline launch CONFIG` is short for `launch start`."
app = typer.Typer(cls=_ConfigFirst, help=_HELP, no_args_is_help=True, rich_markup_mode=None)


@app.command()
def start(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    on: str = typer.Option("local", help="Where: local, slurm, ssh, ray or kubernetes."),
    nodes: str = typer.Option(None, metavar="N or MIN:MAX", help="Machines, by default 1; MIN of them are enough."),
    gpus_per_node: int = typer.Option(0, min=0, help="GPUs of each, with a rank on each; 0: ranks on CPUs."),
    time: str = typer.Option(None, help="How long the job may take, as the target writes it: 1:30:00."),
    queue: str = typer.Option(None, help="The queue or partition; else the target's default."),
    hosts: str = typer.Option(None, metavar="A,B", help="ssh: the machines; A:4,B:4 with 4 ranks on each."),
    hostfile: Path = typer.Option(None, help="ssh: a machine on each line, with slots=4 for 4 ranks."),
    kind: str = typer.Option(None, help="kubernetes: job, statefulset, jobset or trainjob; by default job."),
    patch: Path = typer.Option(None, metavar="FILE", help="kubernetes: a part of the pods' template, merged into it."),
    port: int = typer.Option(None, min=1, max=65535, help="ssh, ray: the port at which the machines meet."),
    array: str = typer.Option(None, metavar="0-3", help="slurm: a run for each number; {task} in an override is it."),
    max_requeues: int = typer.Option(None, min=0, help="slurm, ray: starts after preemptions, by default 10."),
    settings: list[str] = typer.Option(None, "--set", metavar="KEY=VALUE", help="An option of the target's own."),
    setup: list[str] = typer.Option(None, help="A line of shell before the run, such as 'module load cuda'."),
    python: str = typer.Option(sys.executable, help="The Python of the machines."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the newest run of this name."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be submitted."),
    detach: bool = typer.Option(False, "--detach", help="Submit, and do not follow."),
    no_memory_check: NoMemoryCheck = False,
) -> None:
    """Start a run, and follow it; leaves with its exit code."""
    from paceline.launch import start as launching
    from paceline.launch.hostfile import read_hosts
    from paceline.launch.job import LaunchJob

    words = _target_options(on, settings or [], kind, patch)
    named, slots = read_hosts(hosts or "", _text(hostfile, "--hostfile").splitlines() if hostfile else ())
    least, most = _counts(nodes or str(len(named) or 1))
    if named and most != len(named):
        raise typer.BadParameter(f"--nodes {nodes} with {len(named)} hosts: name as many, or leave --nodes out")
    machines: dict[str, Any] = {"nodes": most, "least": least, "gpus": gpus_per_node, "hosts": named, "slots": slots}
    taken: dict[str, Any] = {"time": time, "queue": queue, "tasks": array, "max_requeues": max_requeues, "port": port}
    request = LaunchJob(target=on, python=python, settings=words, setup=tuple(setup or ()), **machines, **taken)
    how = {"resumes": resume, "checks_memory": not no_memory_check, "is_dry": dry_run}
    target, job, lines = launching.prepare(config, overrides or [], request, **how)
    for line in (f"run {job.run} on {job.target}", *lines):
        echo(line, err=True)
    if dry_run:
        echo(target.render(job), nl=False)
        return
    job = launching.start(target, job)
    echo(f"launched {job.name} on {job.target}: job {job.id}, log {job.log}", err=True)
    if detach or array is not None:
        echo(f"  paceline launch status {job.name}\n  paceline launch cancel {job.name}", err=True)
        return
    raise typer.Exit(_follow(target, job))


@app.command()
def status(name: str = typer.Argument(None, help="A launch; else all of them."), runs: Path = _RUNS) -> None:
    """Show where launches stand."""
    from paceline.launch.job import all_launches, find_launch, find_target

    found = [find_launch(runs, name)] if name else all_launches(runs)
    for job in found:
        state = find_target(job.target).state(job)
        code = "" if state.code is None else f", exit code {state.code}"
        echo(f"{job.name:<24} {job.target:<10} {job.id:<16} {state.words}{code}")
    if not found:
        echo(f"no launches in {runs}")


@app.command()
def logs(
    name: str = typer.Argument(None, help="A launch; else the last one."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Wait for more; leaves with the run's exit code."),
    runs: Path = _RUNS,
) -> None:
    """Show what a launched run has printed."""
    from paceline.launch.job import find_launch, find_target

    job = find_launch(runs, name)
    if follow:
        raise typer.Exit(_follow(find_target(job.target), job))
    for path in sorted(job.log.parent.glob("log*")):
        echo(path.read_text(encoding="utf-8", errors="replace"), nl=False)


@app.command()
def cancel(name: str = typer.Argument(help="A launch, or its job's id."), runs: Path = _RUNS) -> None:
    """End a launched run, which saves first if it can."""
    from paceline.launch.job import find_launch, find_target

    job = find_launch(runs, name)
    find_target(job.target).cancel(job)
    echo(f"asked {job.name} (job {job.id} on {job.target}) to end")


def _follow(target: Target, job: LaunchJob) -> int:
    from paceline.launch.job import follow

    try:
        return follow(target, job, lambda text: echo(text, nl=False), lambda text: echo(text, err=True))
    except BaseException:
        echo(f"{job.name} goes on without being followed; to end it: paceline launch cancel {job.name}", err=True)
        raise


def _counts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or not 1 <= int(least) <= int(most or least):
        raise typer.BadParameter(f"--nodes {text}: it is a number of machines, or the fewest and the most: 2:4")
    return int(least), int(most or least)


def _target_options(on: str, settings: list[str], kind: str | None, patch: Path | None) -> dict[str, str]:
    """Returns the options of the target's own: those of ``--set``, and of Kubernetes."""
    if wrong := [word for word in settings if "=" not in word]:
        raise typer.BadParameter(f"--set {wrong[0]}: it is KEY=VALUE")
    for option, value in {"--kind": kind, "--patch": patch}.items():
        if value is not None and on != "kubernetes":
            raise typer.BadParameter(f"{option} with --on {on}: it is an option of Kubernetes")
    words = dict(word.split("=", 1) for word in settings)
    words |= {} if kind is None else {"kind": kind}
    return words | ({} if patch is None else {"patch": _text(patch, "--patch")})


def _text(file: Path, option: str) -> str:
    try:
        with file.open("rb") as opened:  # a pipe will do: <(scontrol show hostnames)
            return opened.read(_MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {file}: {getattr(error, 'strerror', None) or error}") from error
