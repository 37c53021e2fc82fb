"""``paceline learn play``: a page with sliders that shows memory and step time of a model."""

from __future__ import annotations

import typer

from paceline.terminal import echo


def play(
    port: int | None = typer.Option(
        None, min=1, max=65535, help="Port to serve at; else 6070 or the next that is free."
    ),
    is_opened: bool = typer.Option(True, "--open/--no-open", help="Open the page in a browser."),
) -> None:
    """Move sliders, and see the memory and the step time of a model at once.

    The page is served on this machine alone. Its numbers come from the formulas of paceline plan, and it shows the
    command that gives the same.

    Example:  paceline learn play --no-open
    """
    from paceline.cli.watch import open_browser, require_server

    require_server()
    from paceline.learn.play_server import make_play_app, make_play_server
    from paceline.view.server import listen

    app = make_play_app()
    found = listen("127.0.0.1", port)
    url = f"http://127.0.0.1:{found.getsockname()[1]}/"
    echo(f"the page is at {url}")
    echo("  Ctrl-C ends it")
    if is_opened:
        open_browser(url)
    make_play_server(app).run(sockets=[found])
