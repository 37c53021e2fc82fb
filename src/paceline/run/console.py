"""What a run tells on the terminal of whoever started it."""

from __future__ import annotations

import logging

from paceline.run.logs import log
from paceline.terminal import echo


def say(text: str) -> None:
    """Tells the user something that is not a result: on standard error, and in the log of the run if there is one."""
    echo(f"paceline: {text}", err=True)
    log(logging.INFO, text)


def tell(level: int, text: str) -> None:
    """Writes a line into the log of the run; warnings are told on standard error too."""
    log(level, text)
    if level >= logging.WARNING:
        echo(f"paceline: {text}", err=True)
