"""``paceline watch``: the live page of runs, in a browser."""

from __future__ import annotations

import socket
from pathlib import Path

import typer

from paceline.terminal import echo


def watch(
    runs: list[Path] | None = typer.Argument(
        None, metavar="RUNS", help="Runs, or folders of runs; else those in runs/."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to serve at; any but the loopback needs the token it prints."),
    port: int | None = typer.Option(
        None, min=1, max=65535, help="Port to serve at; else 6070 or the next that is free."
    ),
    is_opened: bool = typer.Option(True, "--open/--no-open", help="Open the page in a browser."),
    parent: int | None = typer.Option(None, hidden=True, help="End when this process has ended."),
) -> None:
    """Show runs on a page that follows them.

    Examples:

      paceline watch

      paceline watch runs/digits runs/digits-2

      paceline watch runs --host 0.0.0.0 --port 8080 --no-open
    """
    require_server()
    from paceline.view.server import Follower, is_loopback, listen, make_app, make_server

    folders = runs or [Path("runs")]
    token = ""
    if not is_loopback(host):
        import secrets

        token = secrets.token_urlsafe(24)
    # With a parent, the folder of its first run may not be there yet.
    follower = Follower(folders, notice=lambda text: echo(f"paceline: {text}", err=True) if parent is None else None)
    if runs and parent is None and not follower.runs:
        raise typer.BadParameter("none of these is a run, nor a folder with runs in it", param_hint="RUNS")
    found = listen(host, port)
    # All interfaces have no address of their own that a browser could open: the machine's name is shown.
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host  # nosec B104  # what was asked for is compared
    address = f"[{shown}]" if ":" in shown else shown
    url = f"http://{address}:{found.getsockname()[1]}/"
    echo(f"the page is at {url}{f'?token={token}' if token else ''}")
    if token:
        echo("  the token is printed once: whoever has it sees the runs; nothing is encrypted")
    if parent is None:
        echo("  Ctrl-C ends it")
    if is_opened and not token:
        open_browser(url)
    if parent is not None:
        _end_with(parent)
    make_server(make_app(follower, token=token)).run(sockets=[found])


def require_server() -> None:
    """Raises UsageError where the packages that serve the page are missing."""
    from importlib.util import find_spec

    from paceline.errors import UsageError

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the live page needs {' and '.join(missing)}\n  they are part of a normal installation of Paceline\n"
            f"  pip install {' '.join(missing)}"
        )


def open_browser(url: str) -> None:
    """Opens a page in the browser of this machine, beside what runs here."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, however that happened."""
    import os
    import signal
    import threading
    import time

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True).start()
