"""A run on the console: a live bar on a terminal and in a notebook, a line now and then elsewhere.

``ProgressView`` is fed the records of one rank, normally rank 0, by the training loop or by a launcher that follows its
file. What it shows for all ranks comes from ``position``, which counts the samples of all of them. It has no
thread of its own and draws while a record is written, a few times a second at most.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import IO, Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from paceline.notebook import cell_display, is_notebook, show_bar
from paceline.records.event_words import event_name, event_text
from paceline.records.records import EndRecord, EvalRecord, EventRecord, Record, RunRecord, StepRecord
from paceline.terminal import new_console
from paceline.units import format_count, format_flops, format_percent, format_seconds

_DRAW_EVERY_S = 0.2
_WINDOW_STEPS = 32
_CELL_LINES = 20
_GAP = "   "
_END_STYLES = {"done": "green", "failed": "bold red", "stopped": "yellow"}


class ProgressView:
    """Shows a run as its records arrive: a bar with a line per evaluation and event, on a terminal and in a notebook.

    Elsewhere plain lines, one update every ``plain_every_s`` seconds at most. Several threads may write. A reader that
    went away (a closed pipe, a lost terminal) makes the view silent and never stops the run. In its first ``after_s``
    seconds it shows nothing: a run that is over by then leaves no trace.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        plain_every_s: float = 5.0,
        after_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starts_at, self._first = clock() + after_s, list[Record]()
        self._console = console if console is not None else new_console()
        self._has_cell, self._cell = console is None and is_notebook(), None  # which is made when it is first drawn
        self._lines: deque[str] = deque(maxlen=_CELL_LINES)
        is_seen = self._console.is_terminal if console is not None else self._console.file.isatty()  # not FORCE_COLOR
        self._is_live = is_seen and not self._console.is_dumb_terminal and not self._has_cell
        self._every_s = _DRAW_EVERY_S if self._is_live or self._has_cell else plain_every_s
        self._clock, self._lock = clock, RLock()
        self._progress = _RunProgress()
        self._live: Live | None = None
        self._shown_at, self._shown_step = clock(), 0
        # Rich leaves the process when a pipe breaks, so errors of the stream must not reach it.
        self._stream = self._console.file
        self._console.file = cast("IO[str]", _LastingStream(self._stream))

    def write(self, *records: Record) -> None:
        with self._lock:
            for record in records:
                self._progress.take(record)
                if self._clock() >= self._starts_at:
                    for each in (*self._first, record):
                        self._show(each)
                    self._first = []
                elif isinstance(record, RunRecord):
                    self._first = [record]

    def flush(self) -> None:
        """Shows the newest step, whether or not it is time to."""
        with self._lock:
            if self._clock() >= self._starts_at:
                self._show_step()

    def close(self) -> None:
        """Leaves the terminal as it was and gives the console its stream back."""
        with self._lock:
            self._stop_live()
            if isinstance(self._console.file, _LastingStream):
                self._console.file = self._stream

    def _show(self, record: Record) -> None:
        match record:
            case StepRecord():
                if self._clock() - self._shown_at >= self._every_s:
                    self._show_step()
            case RunRecord():
                self._stop_live()  # of an attempt that was cut off
                self._print(_line_of(record))
                self._shown_step, self._shown_at = 0, self._clock()
                if self._is_live:
                    options: dict[str, Any] = {"auto_refresh": False, "transient": True}
                    self._live = Live(console=self._console, get_renderable=self._progress.render, **options)
                    self._live.start(refresh=True)
            case EventRecord(name="first_step" | "histogram" | "samples" | "clock"):
                pass  # of the report, TensorBoard and the page
            case EvalRecord() | EventRecord():
                self._print(_line_of(record))
            case EndRecord():
                if not self._is_live:
                    self._show_step()
                self._stop_live()
                self._print(_line_of(record))

    def _show_step(self) -> None:
        self._shown_at = self._clock()
        if self._has_cell:
            self._draw_cell()
        elif self._live is not None:
            self._live.refresh()
        elif not self._is_live and self._progress.step > self._shown_step:
            self._shown_step = self._progress.step
            self._print(self._progress.line())

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: Text) -> None:
        if self._has_cell:
            self._lines.append(line.plain)
            self._draw_cell()
            return
        # On a live terminal a long line wraps; in a file it must stay one line.
        self._console.print(line, soft_wrap=not self._is_live)
        if self._live is not None:
            self._live.refresh()

    def _draw_cell(self) -> None:
        self._cell = self._cell or cell_display()
        show_bar(self._cell, self._progress.share, "\n".join([self._progress.line().plain, *self._lines]))


def format_loss(loss: float | None) -> str:
    """Writes a loss with four decimals, or as a power of ten where those would hide it."""
    if loss is None:
        return "-"
    return f"{loss:.3e}" if 0 < abs(loss) < 1e-3 or 1e4 <= abs(loss) < float("inf") else f"{loss:.4f}"


def scores_text(evaluation: EvalRecord) -> dict[str, str]:
    """Returns what an evaluation found, written out by name."""
    scores = evaluation.scores.items()
    return {name: format_percent(value) if name == "accuracy" else format_loss(value) for name, value in scores}


class _RunProgress:
    """What is known of the run so far, smoothed over the last steps."""

    def __init__(self) -> None:
        self.step = self._total_steps = 0
        self._run: RunRecord | None = None
        self._loss: float | None = None
        self._evaluation: EvalRecord | None = None
        self._window: deque[StepRecord] = deque(maxlen=_WINDOW_STEPS + 1)

    def take(self, record: Record) -> None:
        match record:
            case RunRecord():
                self._run, self._total_steps = record, record.total_steps
                self._window.clear()
            case StepRecord():
                self.step = record.step
                self._loss = self._loss if record.loss is None else record.loss
                self._window.append(record)
            case EvalRecord():
                self._evaluation = record

    @property
    def share(self) -> float:
        return self.step / self._total_steps if self._total_steps else 0.0

    def _step_seconds(self) -> float | None:
        """Returns the mean time of the recent steps; the first, which pays for start-up, counts only while alone."""
        timed = list(self._window)[1:] or list(self._window)
        return sum(record.step_s for record in timed) / len(timed) if timed else None

    def line(self) -> Text:
        parts = [f"step {self.step}/{self._total_steps}", *self._numbers(), self._left()]
        return Text(_GAP.join(part for part in parts if part))

    def render(self) -> RenderableType:
        """Returns two lines for a terminal: how far, and how it goes."""
        columns = (Column(ratio=1), Column(no_wrap=True), Column(no_wrap=True, style="dim"))
        how_far = Table.grid(*columns, padding=(0, 3, 0, 0), expand=True)
        bar = ProgressBar(total=max(1, self._total_steps), completed=self.step)
        how_far.add_row(bar, f"step {self.step}/{self._total_steps}", self._left())
        return Group(how_far, Text(_GAP.join(self._numbers()), no_wrap=True, overflow="ellipsis"))

    def _left(self) -> str:
        seconds = self._step_seconds()
        if seconds is None:
            return "waiting for the first step"
        if len(self._window) == 1 or self.step >= self._total_steps:  # nothing to guess from, or nothing left
            return ""
        left = seconds * (self._total_steps - self.step)
        # Whole seconds below a minute: a guess does not deserve more, and its width should not dance.
        return f"{format_seconds(left) if left >= 60 else f'{left:.0f} s'} left"

    def _numbers(self) -> list[str]:
        """Returns how it goes: the rate is of all ranks over the recent steps, in what the run counts."""
        seconds, run = self._step_seconds(), self._run
        if not seconds:
            return []
        first, last = self._window[0], self._window[-1]
        samples = 0.0 if run is None else run.global_batch
        if last.step > first.step:
            samples = (last.position - first.position) / (last.step - first.step)
        rate = samples / seconds * (1.0 if run is None else run.units_per_sample)
        unit = "samples" if run is None else run.unit
        numbers = [f"epoch {last.epoch:.2f}", f"loss {format_loss(self._loss)}"]
        numbers.append(f"{format_count(round(rate) if rate >= 10 else rate)} {unit}/s")
        if run is not None and run.flops_per_sample:
            flops = samples / seconds * run.flops_per_sample
            numbers.append(format_flops(flops))
            if run.peak_flops:
                numbers.append(f"MFU {format_percent(flops / run.peak_flops / run.world_size)}")
        if self._evaluation is not None and self._evaluation.accuracy is not None:
            numbers.append(f"accuracy {format_percent(self._evaluation.accuracy)}")
        return numbers


class _LastingStream:
    """A stream whose reader may go away: what cannot be written any more is dropped."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_broken = False

    def write(self, text: str) -> int:
        if not self._is_broken:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "replace").decode())
            except (OSError, ValueError):  # ValueError: the stream was closed
                self._is_broken = True
        return len(text)

    def flush(self) -> None:
        if not self._is_broken:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._is_broken = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def parameters_text(count: int, num_trained: int | None) -> str:
    """Says how many parameters there are, and how many of them are trained where that is not all."""
    rest = "" if num_trained in (None, count) else f", {format_count(num_trained or 0)} of them trained"
    return f"{format_count(count)} parameters{rest}"


def _line_of(record: RunRecord | EvalRecord | EventRecord | EndRecord) -> Text:
    match record:
        case RunRecord():
            ranks = "1 rank" if record.world_size == 1 else f"{record.world_size} ranks"
            where = f"{record.strategy} on {ranks} ({record.backend}, {record.device.partition(':')[0]})"
            size = parameters_text(record.num_parameters, record.num_trained)
            parts = (where, size, f"global batch {record.global_batch}", f"{record.total_steps} steps")
            return Text(_GAP.join(parts), style="dim")
        case EvalRecord():
            told = [f"step {record.step}", "evaluation", *map(" ".join, scores_text(record).items())]
            cost = f"{_GAP}{record.samples} samples in {format_seconds(record.seconds)}"
            return Text(_GAP.join(told)).append(cost, style="dim")
        case EventRecord():
            text = event_text(record)
            if record.name == "straggler" or "note" in record.detail:
                return Text(f"step {record.step}{_GAP}{text}", style="yellow" if record.name == "straggler" else "")
            return Text(f"step {record.step}{_GAP}{event_name(record.name)}").append(f"{_GAP}{text}", style="dim")
        case EndRecord():
            first_line = record.message.partition("\n")[0]  # the rest, such as a traceback, is in the log
            line = Text().append(record.status, style=_END_STYLES.get(record.status, ""))
            line.append(f"{_GAP}step {record.step}{_GAP}{format_seconds(record.seconds)}")
            return line.append(f"{_GAP}{first_line}" if first_line else "")
