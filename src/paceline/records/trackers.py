"""Sinks that hand the numbers of a run to trackers: Weights & Biases, MLflow, trackio, or one of the user's own.

Each is opened with a ``TrackedRun`` and takes records like any other sink. A run that is resumed goes on under the
identity that its folder remembers. Nothing here is called by a rank: ``run/observe.py`` follows the files of records
and feeds the sinks, each in a thread of its own.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.config.load import dotted_values
from paceline.errors import UsageError
from paceline.imports import import_from_path
from paceline.records.records import EndRecord, Record
from paceline.records.sinks import Sink, scalars
from paceline.untrusted import parse_json_object, read_regular

_IDENTITIES = ".trackers.json"
_PROJECT = "paceline"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker shows. ``tell`` writes a line with a level into the run's log."""

    folder: Path
    config: Mapping[str, Any]
    tell: Callable[[int, str], None]

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    def identity(self, tracker: str) -> str | None:
        """Returns what a tracker called this run when it was started first; None for a new one."""
        found = self._identities().get(tracker)
        return found if isinstance(found, str) else None

    def remember(self, tracker: str, identity: str) -> None:
        """Keeps what a tracker calls this run, for when it is resumed."""
        path = self.folder / _IDENTITIES
        partial = path.with_suffix(f".{tracker}")  # trackers are opened side by side
        partial.write_text(json.dumps({**self._identities(), tracker: identity}) + "\n", encoding="utf-8")
        partial.replace(path)

    def _identities(self) -> dict[str, Any]:
        try:
            return parse_json_object(read_regular(self.folder / _IDENTITIES))
        except (OSError, ValueError):
            return {}


class _Tracker:
    """What the trackers have in common: numbers by name, at the last step that was seen, and how the run ended."""

    _step = 0
    _status = ""  # of the last attempt that ended
    _is_closed = False

    def write(self, *records: Record) -> None:
        for record in records:
            self._step = getattr(record, "step", self._step)
            if values := {name: float(value) for name, value in scalars(record)}:
                self._log(values, self._step, record.time)
            if isinstance(record, EndRecord):
                self._status = record.status

    def flush(self) -> None:
        """Does nothing: the library sends by itself."""

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._finish()

    def _log(self, values: dict[str, float], step: int, time: float) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


class WandbSink(_Tracker):
    """A run of Weights & Biases. Without a login it is kept offline, in the run's folder, for ``wandb sync``."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        asked = wandb.setup().settings  # of the environment and wandb's own files
        is_offline = asked.mode == "online" and not _has_login(asked)
        if is_offline:  # wandb would ask on the terminal
            words = f"wandb has no login: offline; later: wandb sync {run.folder}/wandb/offline-run-*"
            run.tell(logging.WARNING, words)
        self._run: Any = wandb.init(
            project=asked.project or _PROJECT,
            name=run.name,
            id=run.identity("wandb"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode="offline" if is_offline else None,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, x_disable_stats=True),
        )
        run.remember("wandb", str(self._run.id))
        # Steps come again after a restart, which a run's own step count does not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _log(self, values: dict[str, float], step: int, _: float) -> None:
        self._run.log({**values, "step": step})

    def _finish(self) -> None:
        self._run.finish(exit_code=0 if self._status in ("", "done") else 1)


class MlflowSink(_Tracker):
    """A run of MLflow, where its own settings say: a server or a database."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric

        if not mlflow.is_tracking_uri_set() and find_spec("sqlalchemy") is None:
            what = "MLFLOW_TRACKING_URI is not set, and mlflow-skinny keeps no runs of its own"
            raise UsageError(
                f"{what}: set it to a server's address, or install the local database (pip install mlflow)"
            )
        self._metric: Any = Metric
        self._client: Any = mlflow.MlflowClient()
        known = run.identity("mlflow")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get() or _PROJECT
        experiment = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(place, run_name=run.name).info.run_id
        run.remember("mlflow", self._id)
        for key, value in dotted_values(run.config).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def _log(self, values: dict[str, float], step: int, time: float) -> None:
        stamp = int(time * 1e3)
        metrics = [self._metric(name, value, stamp, step) for name, value in values.items() if math.isfinite(value)]
        self._client.log_batch(self._id, metrics=metrics)

    def _finish(self) -> None:
        statuses = {"done": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, statuses.get(self._status, "FAILED"))


class TrackioSink(_Tracker):
    """A run of trackio, in its local database."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = run.identity("trackio") or run.name
        self._run: Any = trackio.init(project=_PROJECT, name=name, resume="allow", config=dict(run.config), embed=False)
        run.remember("trackio", name)

    def _log(self, values: dict[str, float], step: int, _: float) -> None:
        self._run.log(values, step=step)

    def _finish(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[TrackedRun], Sink]] = {"wandb": WandbSink, "mlflow": MlflowSink, "trackio": TrackioSink}


def open_tracker(name: str, run: TrackedRun) -> Sink:
    """Opens a tracker by its name, or the user's own sink by its import path. Raises whatever that raises."""
    if name in _SINKS:
        try:
            return _SINKS[name](run)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ModuleNotFoundError(f"{name} is not installed (pip install 'paceline[{name}]')", name=name) from None
    made = import_from_path(name, "monitor.trackers")(run)
    missing = ", ".join(verb for verb in ("write", "flush", "close") if not callable(getattr(made, verb, None)))
    if missing:
        raise TypeError(f"{name} made a {type(made).__name__} without {missing}: a sink has write, flush, close")
    return made  # type: ignore[no-any-return]


def _has_login(settings: Any) -> bool:
    """Says whether wandb can log in without asking: by its settings, or by what ``wandb login`` wrote."""
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    try:
        return netrc().authenticators(urlsplit(settings.base_url).netloc) is not None
    except (OSError, NetrcParseError):
        return False
