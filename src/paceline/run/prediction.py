"""What ``paceline train`` predicts of a run: by formulas before it starts, by a dry run beside it where that pays.

A microbatch that the ranks find is known when the first of them writes its first record; the run is predicted then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.detect import detect_machine
from paceline.cluster.devices import load_cluster
from paceline.config import Config, dump_yaml
from paceline.errors import UsageError
from paceline.records.records import RunRecord, follow_records
from paceline.run.signals import start_thread
from paceline.search.expect import expect_run, expected_memory, unpriced
from paceline.search.expectation import FILE, Expectation

if TYPE_CHECKING:
    from paceline.rehearse.dryrun.expected import Background
    from paceline.run.warm import WarmRanks

_FEWEST_STEPS = 40  # of a run that is worth a process beside it
_ENTRY = "PACELINE_MACHINE"


def machine_entry() -> Path | None:
    """Returns the file that says what this machine can do, if its user names one in PACELINE_MACHINE."""
    named = os.environ.get(_ENTRY)
    return Path(named) if named else None


def entry_problem() -> str | None:
    """Returns the reason why the file that PACELINE_MACHINE names cannot be used; None if there is no such problem."""
    try:
        if entry := machine_entry():
            load_cluster(str(entry))
    except UsageError as error:
        return f"{_ENTRY} is of no use, and the run is not predicted: {str(error).splitlines()[0]}"
    return None


def predict_run(
    config: Config, *, threads: int | None = None, node_ranks: int | None = None, cores: Sequence[int] = ()
) -> Expectation | None:
    """Predicts time and memory of a run whose device and ranks are decided; None for what is no transformer.

    ``threads`` of a CPU rank and ``node_ranks`` are the launcher's; None: the cores are shared out, one host. ``cores``
    are those that the ranks share; without them, those of this process.
    """
    if config.model.kind != "gpt":
        return None
    machine = detect_machine(with_gpus=config.parallel.device == "cuda")
    machine = replace(machine, cores=len(cores) or machine.cores)
    ranks = config.parallel.decided_ranks
    hosts = -(-ranks // (config.parallel.node_ranks or node_ranks or ranks))
    return expect_run(config, machine, threads=threads, hosts=hosts, entry=machine_entry())


def is_worth_dry_run(config: Config) -> bool:
    """Says whether a dry run pays: for a run of processes that is not over at once."""
    return (config.train.steps or _FEWEST_STEPS) >= _FEWEST_STEPS and config.comm.backend != "virtual"


@dataclass(slots=True)
class BackgroundPrediction:
    """A dry run in another process while the run goes on; a run that succeeds keeps it beside the earlier prediction.

    ``warm`` forks it, with torch loaded. ``threads`` and ``cores`` are as for ``predict_run``. ``patience_s`` is how
    long a run that is done waits for it.
    """

    config: Config
    folder: Path
    formula: Expectation | None
    warm: WarmRanks | None = None
    threads: int | None = None
    cores: Sequence[int] = ()
    patience_s: float = 10.0
    _background: Background | None = None
    _since: float = field(default_factory=time.time)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _search: threading.Thread | None = None  # for what the ranks find

    def __enter__(self) -> None:
        if self.config.train.microbatch != "auto" or self.config.comm.backend == "virtual":
            self._start()
            return
        self._search = threading.Thread(target=self._start_when_found, name="microbatch", daemon=True)
        start_thread(self._search)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over.set()
        if self._search is not None:
            self._search.join()
        if kind is None:
            self._write()
        elif self._background is not None:
            self._background.stop()

    def _start(self) -> None:
        if not is_worth_dry_run(self.config) or unpriced(self.config, 1, machine_entry()):
            return
        from paceline.rehearse.dryrun.expected import Background, plain_start

        start = plain_start if self.warm is None else self.warm.arguments
        self._background = Background(
            dump_yaml(self.config), threads=self.threads, cores=self.cores, entry=machine_entry(), start=start
        )

    def _start_when_found(self) -> None:
        """Follows the first rank's records until they tell the microbatch, which takes the place of ``auto``."""
        with contextlib.suppress(ValueError, OSError):  # records that cannot be read are told of elsewhere
            for record in follow_records(self.folder / "records" / "rank-0.jsonl", self._is_over.is_set):
                if isinstance(record, RunRecord) and record.time >= self._since and record.microbatch:
                    found = {"microbatch": record.microbatch, "global_batch": record.global_batch, "accumulate": None}
                    self.config = self.config.with_values("train", **found)
                    self._start()
                    return

    def _write(self) -> None:
        """Adds what was predicted since the start to what the run's folder has of before."""
        formula = self.formula
        if self._search is not None:
            formula = predict_run(self.config, threads=self.threads, cores=self.cores)
        best = self._best(formula)
        if best is not None and best != self.formula:
            kept = (self.formula or Expectation()).with_later(best)
            (self.folder / FILE).write_text(kept.to_text(), encoding="utf-8")

    def _best(self, formula: Expectation | None) -> Expectation | None:
        """Returns the dry run's figures, or the formulas' and why there are no others; None where neither exists."""
        from paceline.rehearse.dryrun.expected import better_of

        found = None if self._background is None else self._background.result(self.patience_s)
        best = better_of(formula, found)
        if (best is None or best.step_s is None) and is_worth_dry_run(self.config):
            ranks, known = self.config.parallel.decided_ranks, unpriced(self.config, 1, machine_entry())
            reasons = dict.fromkeys(filter(None, ("" if best is None else best.reason, known)))
            best = replace(best or Expectation(), ranks=ranks, reason="; ".join(reasons))
        if best is not None and best.memory_bytes is None:
            best = replace(best, memory_bytes=expected_memory(self.config))
        return best
