"""``paceline report``, ``watch`` and ``sample``: what runs left behind, their live page, and text of their models."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from paceline.cli.checkpoint import find_any
from paceline.cli.completion import complete_run
from paceline.cli.options import IsOpened, Port, check_page, check_picture, check_table, check_word, print_json
from paceline.errors import UsageError
from paceline.terminal import echo, new_console
from paceline.untrusted import read_regular

PAGE_TOKEN = "PACELINE_PAGE_TOKEN"  # nosec B105  # the name of a variable
_FEWEST_CHARACTERS = 16


def report(
    folders: list[Path] = typer.Argument(
        metavar="RUN", autocompletion=complete_run, help="Folders of runs, such as runs/digits."
    ),
    compare: bool = typer.Option(False, "--compare", help="Mark what changed from each run to the next."),
    as_json: bool = typer.Option(False, "--json", help="Print the summaries as JSON."),
    html: Path | None = typer.Option(None, metavar="FILE.html", callback=check_page, help="Write the runs' page."),
    png: Path | None = typer.Option(None, "--png", metavar="FILE", callback=check_picture, help="Draw the charts."),
    svg: Path | None = typer.Option(None, "--svg", metavar="FILE", callback=check_picture, help="Draw the charts."),
    csv: Path | None = typer.Option(None, metavar="FILE.csv", callback=check_table, help="Write a line for each step."),
) -> None:
    """Show what limited a run, and what it did."""
    from paceline.records.comparison import compare_runs, draw_comparison, draw_scaling, scaling_of
    from paceline.records.report import render, summarize
    from paceline.records.summary import open_run

    if compare and len(folders) < 2:
        raise typer.BadParameter("--compare needs two runs or more")
    gc.disable()  # records are many and have no cycles: the collector would look at all of them again and again
    records = [open_run(folder) for folder in folders]
    summaries = [summarize(folder, own) for folder, own in zip(folders, records, strict=True)]
    points = scaling_of(summaries)
    changes = [compare_runs(before, after) for before, after in pairwise(summaries)] if compare else []
    if as_json and len(summaries) == 1:
        print_json(summaries[0].to_json())
    elif as_json:
        more = {"scaling": [asdict(point) for point in points]}
        more |= {"changes": [each.to_json() for each in changes]} if compare else {}
        print_json({"runs": [run.to_json() for run in summaries], **more})
    else:
        console = new_console()
        for number, run in enumerate([] if compare else summaries):
            console.print(*([""] if number else []), render(run), sep="\n")
        for part in [*map(draw_comparison, changes), *draw_scaling(points)]:
            console.print("", part, sep="\n")
    asked = {"html": html, "png": png, "svg": svg, "csv": csv}
    files = {kind: path for kind, path in asked.items() if path}
    if not files:
        return
    from paceline.view.html import write_csv, write_report
    from paceline.view.picture import write_figure
    from paceline.view.runs import read_runs

    runs = read_runs(folders, records)
    for kind, path in files.items():
        if kind == "html":
            write_report(runs, path, summaries)
        elif kind == "csv":
            write_csv(runs, path)
        else:
            write_figure(runs, path, kind)
        echo(f"wrote {path}", err=as_json)


def watch(
    runs: list[Path] | None = typer.Argument(
        None, metavar="RUNS", autocompletion=complete_run, help="Runs, or folders of runs; else runs/."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to serve at; any but the loopback needs the token it prints."),
    port: Port = None,
    is_opened: IsOpened = True,
    token_file: Path | None = typer.Option(
        None, help="A file with the token to ask for, the same after each start; else PACELINE_PAGE_TOKEN has it."
    ),
    parent: int | None = typer.Option(None, hidden=True, help="End when this process has ended."),
) -> None:
    """Show runs on a page that follows them."""
    import secrets

    from paceline.view.gate import is_loopback
    from paceline.view.server import Follower, listen, make_app, make_server

    folders, given = runs or [Path("runs")], given_token(token_file)
    token = given or ("" if is_loopback(host) else secrets.token_urlsafe(24))
    # With a parent, the folder of its first run may not be there yet.
    follower = Follower(folders, notice=lambda text: echo(f"paceline: {text}", err=True) if parent is None else None)
    if runs and parent is None and not follower.runs:
        raise typer.BadParameter("none of these is a run, nor a folder with runs in it", param_hint="RUNS")
    found = listen(host, port)
    # All interfaces have no address of their own that a browser could open: the machine's name is shown.
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host  # nosec B104  # what was asked for is compared
    address = f"[{shown}]" if ":" in shown else shown
    url = f"http://{address}:{found.getsockname()[1]}/"
    echo(f"the page is at {url}{f'?token={token}' if token and not given else ''}")
    if given:
        echo(f"  it asks for the token of {token_file or PAGE_TOKEN}: add ?token=... once; nothing is encrypted")
    elif token:
        echo("  the token is printed once: whoever has it sees the runs; nothing is encrypted")
    if parent is None:
        echo("  Ctrl-C ends it")
    if is_opened and not token:
        open_browser(url)
    if parent is not None:
        from paceline.run.processes import end_with_parent

        end_with_parent(parent)
    make_server(make_app(follower, token=token)).run(sockets=[found])


def given_token(path: Path | None) -> str:
    """Returns the token of a file, else of the environment; empty without either. Raises UsageError for a weak one."""
    if path is None and PAGE_TOKEN not in os.environ:
        return ""
    source = str(path or PAGE_TOKEN)
    try:
        token = os.environ[PAGE_TOKEN] if path is None else read_regular(path, 4096).decode("ascii", "replace")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        rule, fix = "--token-file names a file with the token", "write one there, or leave the option out"
        raise UsageError(f"the token of the page cannot be read: {path}: {why}\n  {rule}\n  {fix}") from error
    token = token.strip()
    if len(token) < _FEWEST_CHARACTERS or not re.fullmatch(r"[\w.~+/=-]+", token, re.ASCII):
        what, fix = f"the token of the page in {source} has {len(token)} characters", "openssl rand -hex 32"
        rule = f"it takes {_FEWEST_CHARACTERS} at least, letters, digits and any of -._~+/= alone"
        raise UsageError(f"{what}\n  {rule}\n  make one with: {fix}")
    return token


def open_browser(url: str) -> None:
    """Opens a page in the browser of this machine, beside what runs here."""
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def sample(
    run: str = typer.Argument(metavar="RUN", autocompletion=complete_run, help="A checkpoint; of a run, the newest."),
    prompt: str = typer.Option("\n", help="The text that the model goes on from."),
    *,
    tokens: int = typer.Option(200, min=1, help="The most tokens that are written."),
    temperature: float = typer.Option(0.8, min=0.0, help="0: the most likely token always; 1: as the model says."),
    top_k: int = typer.Option(0, min=0, help="Draw among so many of the most likely tokens.  [default: all]"),
    seed: int = typer.Option(0, min=0, help="The same seed writes the same text."),
    device: str = typer.Option("auto", help="cpu, cuda, or auto."),
    ranks: int = typer.Option(1, min=1, help="CPU ranks that hold a part of the model each; for GPUs see below."),
    spread: str = typer.Option("fsdp", metavar="fsdp|tensor", help="A part is of all parameters, or of each layer."),
    as_json: bool = typer.Option(False, "--json", help="Print prompt, text and tokens as JSON."),
) -> None:
    """Write text with the language model of a run."""
    import torch

    from paceline.comm.solo import SoloCommunicator
    from paceline.comm.torch_dist import connect, disconnect, launched_rank
    from paceline.run.function_ranks import run_processes
    from paceline.train.sampling import SampleOptions, write_together

    check_word("--spread", spread, ("fsdp", "tensor"))
    options = SampleOptions(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    checkpoint = find_any(run)
    work: tuple[Any, ...] = (checkpoint, prompt, options, spread)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        drawn, text = write_together(connect(device=None if device == "auto" else device), *work)
        disconnect()
    elif ranks > 1:
        if device == "cuda":
            fix = f"on GPUs: torchrun --standalone --nproc-per-node {ranks} -m paceline sample {run}"
            raise UsageError(f"--ranks {ranks} with --device cuda\n  it starts CPU ranks\n  {fix}")
        drawn, text = run_processes(write_together, ranks, args=work)[0]
    else:
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        drawn, text = write_together(SoloCommunicator(torch.device(chosen)), *work)
    if launched_rank() != 0:
        return
    if as_json:
        print_json({"checkpoint": checkpoint, "prompt": prompt, "text": text, "tokens": drawn})
    else:
        echo(prompt + text)
