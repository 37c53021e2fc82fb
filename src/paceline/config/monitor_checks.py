"""The rule for trackers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from paceline.config.schema import Config
from paceline.errors import Problem

_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_trackers(config: Config) -> Iterator[Problem]:
    """Finds trackers that nobody knows."""
    for name in config.monitor.trackers:
        if name not in _TRACKERS and _IMPORT_PATH.fullmatch(name) is None:
            near = difflib.get_close_matches(name, _TRACKERS, n=1)
            yield Problem(
                what=f"monitor.trackers has {name!r}, which is no tracker",
                rule=f"the trackers are {', '.join(_TRACKERS)}, and sinks of your own as package.module:name",
                fix=f"did you mean {near[0]}?"
                if near
                else "for a class Curves in my_curves.py, write my_curves:Curves",
            )
