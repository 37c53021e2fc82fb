"""``paceline bench``: ours beside the best of the others, interleaved in one run."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Time ours beside the best of the others, interleaved in one run.")


@app.callback()
def _root() -> None:
    pass
