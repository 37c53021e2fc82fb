"""What ``paceline train`` expects of a run: by formulas before it starts, by a dry run beside it where that pays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.dryrun.expected import Background
    from paceline.launch.warm import WarmRanks
    from paceline.planner.expectation import Expectation

_FEWEST_STEPS = 40  # of a run that is worth a process beside it
_ENTRY = "PACELINE_MACHINE"


def machine_entry() -> Path | None:
    """Returns the file that says what this machine can do, if its user names one in PACELINE_MACHINE."""
    named = os.environ.get(_ENTRY)
    return Path(named) if named else None


def is_worth(config: Config) -> bool:
    """Says whether a run is predicted kernel by kernel: one of processes that is not over at once."""
    steps = config.train.steps
    is_long = steps is None or steps >= _FEWEST_STEPS
    return is_long and config.comm.backend != "virtual"


class Foretold:
    """A dry run beside a run, whose figures take the place of the formulas' when the run has succeeded."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        formula: Expectation | None,
        warm: WarmRanks | None = None,
        *,
        threads: int | None = None,
        patience_s: float = 10.0,
    ) -> None:
        """With ``warm`` the dry run is forked from the process that ranks are, which has torch loaded.

        ``threads`` of a CPU rank are the launcher's, where the config does not say; None: the cores are shared out.
        ``patience_s`` is how long a run that is done waits for it.
        """
        self._threads, self._patience_s = threads, patience_s
        self._warm = warm
        self._config = config
        self._folder = run_folder
        self._formula = formula
        self._background: Background | None = None

    def __enter__(self) -> None:
        if not is_worth(self._config):
            return
        from paceline.config import dump_yaml
        from paceline.dryrun.expected import Background, plain_start

        start = plain_start if self._warm is None else self._warm.arguments
        entry = machine_entry()
        self._background = Background(dump_yaml(self._config), threads=self._threads, entry=entry, start=start)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._background is None:
            return
        if kind is not None:
            self._background.stop()
            return
        from paceline.dryrun.expected import better_of
        from paceline.planner.expectation import FILE

        found = self._background.result(self._patience_s)
        best = better_of(self._formula, found)
        if found is not None and best is not None:
            (self._folder / FILE).write_text(best.to_text(), encoding="utf-8")
