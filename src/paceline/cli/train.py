"""``paceline train``: from a config to a finished run on this machine, or one rank of it under torchrun."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.monitor.console import ProgressView

CPU_RANKS = 2  # where there is no GPU: enough to be distributed, and every machine has two cores


def train(
    config: Path = typer.Argument(help="A YAML file; see configs/ for examples."),
    overrides: list[str] = typer.Argument(None, metavar="[SECTION.KEY=VALUE]...", help="Changes to the config."),
    resume: str = typer.Option(None, help="Continue from a checkpoint: auto (the run's newest), or a path."),
    force: bool = typer.Option(False, "--force", help="Replace a run folder of the same name."),
    port: int = typer.Option(0, help="Port where the ranks meet; 0: a free one."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON, and no progress."),
) -> None:
    """Train on this machine: one rank per GPU, or two CPU ranks.

    Examples:

      paceline train configs/digits.yaml

      paceline train configs/gpt_pydoc.yaml parallel.ranks=4 train.steps=50 name=quick

      paceline train configs/digits.yaml --resume auto

      torchrun --nproc-per-node 2 -m paceline train configs/digits.yaml
    """
    from paceline.config import load_config

    asked = load_config(config, overrides or [])
    if "RANK" in os.environ:
        from paceline.cli.worker import run_under_launcher

        run_under_launcher(asked, force=force, resume=resume)
        return
    _launch(asked, force=force, resume=resume, port=port, as_json=as_json)


def resolve_config(config: Config) -> Config:
    """Settles what depends on the machine, device and ranks. Raises ConfigError if they do not fit."""
    import torch

    from paceline.config import check_ranks
    from paceline.errors import ConfigError, Problem

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = config.parallel.device if config.parallel.device != "auto" else ("cuda" if num_gpus else "cpu")
    ranks = config.parallel.ranks if config.parallel.ranks != "auto" else (num_gpus if device == "cuda" else CPU_RANKS)
    problems: list[Problem] = []
    if device == "cuda" and ranks > num_gpus:
        problems.append(
            Problem(
                what=f"parallel.ranks = {ranks} on {num_gpus} GPUs",
                rule="every rank needs a GPU of its own",
                fix=f"set parallel.ranks = {num_gpus}, or parallel.device = cpu"
                if num_gpus
                else "set parallel.device = cpu",
            )
        )
    else:
        problems += check_ranks(config, ranks)
    if problems:
        raise ConfigError(problems, source="config")
    parallel = config.parallel.model_copy(update={"device": device, "ranks": ranks})
    return config.model_copy(update={"parallel": parallel})


def run_folder(config: Config) -> Path:
    """Returns the folder that a config's run lives in."""
    return Path(config.monitor.folder) / config.name


def _launch(asked: Config, *, force: bool, resume: str | None, port: int, as_json: bool) -> None:
    from rich.console import Console

    from paceline.checkpoint import find_checkpoint
    from paceline.config import dump_yaml
    from paceline.launch.folder import prepare_folder
    from paceline.launch.local import launch_local

    config = resolve_config(asked)
    folder = run_folder(config)
    checkpoint = None if resume is None else find_checkpoint(resume, folder).resolve()
    prepare_folder(folder, dump_yaml(config), force=force, resume=resume is not None)
    command = ["paceline.cli.worker", str(folder)]
    if checkpoint is not None:
        (folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        command += ["--resume", str(checkpoint)]
    assert isinstance(config.parallel.ranks, int)
    console = Console(stderr=as_json)
    with _Progress(folder, console, is_shown=config.monitor.console and not as_json):
        launch_local(command, folder, ranks=config.parallel.ranks, threads=config.parallel.threads, port=port)
    show_result(folder, console, as_json=as_json)


def show_result(folder: Path, console: object, *, as_json: bool) -> None:
    """Prints what a finished run did, where it is, and what to try next."""
    import json

    from rich.console import Console

    from paceline.report import render, summarize, to_json

    summary = summarize(folder)
    if as_json:
        typer.echo(json.dumps(to_json(summary), indent=2))
        return
    assert isinstance(console, Console)
    console.print(render(summary))
    console.print(f"\nThe run is in {folder}: records, checkpoints, logs, config.", highlight=False)
    console.print(
        "Try next:\n"
        "  paceline verify mlp --ranks 4                        the distributed run computes what one process would\n"
        "  paceline train configs/gpt_pydoc.yaml                a small GPT on Python's own documentation\n"
        f"  paceline train {folder}/config.yaml --resume auto   continue this run (raise train.epochs first)\n"
        "  paceline config explain configs/digits.yaml          what was asked for, and what follows from it",
        highlight=False,
    )


class _Progress:
    """Shows rank 0's records as they are written, in a thread of its own."""

    def __init__(self, folder: Path, console: object, *, is_shown: bool) -> None:
        self._path = folder / "records" / "rank-0.jsonl"
        self._console = console
        self._is_shown = is_shown
        self._is_over = threading.Event()
        self._since = time.time()
        self._thread: threading.Thread | None = None
        self._view: ProgressView | None = None

    def __enter__(self) -> None:
        if not self._is_shown:
            return
        from rich.console import Console

        from paceline.monitor.console import ProgressView

        assert isinstance(self._console, Console)
        self._view = ProgressView(self._console)
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None and self._view is not None:
            self._thread.join(timeout=5.0)
            self._view.close()

    def _follow(self) -> None:
        from paceline.monitor.records import follow_records

        assert self._view is not None
        for record in follow_records(self._path, self._is_over.is_set, poll_s=0.1):
            if record.time >= self._since:  # a resumed run's file begins with what an earlier attempt wrote
                self._view.write(record)
