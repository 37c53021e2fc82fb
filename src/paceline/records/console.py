"""A run on the console: a live bar on a terminal and in a notebook, a line now and then elsewhere.

``ProgressView`` is fed the records of one rank, normally rank 0: by the training loop, as a sink, or by a launcher in
another process that follows the rank's file. What it shows for all ranks comes from ``position``, which counts the
samples of all of them.

It has no thread of its own and draws while a record is written, a few times a second at most; the records in between
only update numbers.
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
from rich.table import Table
from rich.text import Text

from paceline.notebook import cell_display, show_bar
from paceline.records.event_words import event_name, event_text
from paceline.records.records import EndRecord, EvalRecord, EventRecord, Record, RunRecord, StepRecord
from paceline.terminal import new_console
from paceline.units import format_count, format_flops, format_seconds

_DRAW_EVERY_S = 0.2
_WINDOW_STEPS = 32
_CELL_LINES = 20
_GAP = "   "
_END_STYLES = {"done": "green", "failed": "bold red", "stopped": "yellow"}


class ProgressView:
    """Shows a run as its records arrive.

    On a terminal: a bar that stays at the bottom, with a line above it per evaluation and event. In a notebook: a bar
    in the cell, with these lines below it. Elsewhere: plain lines, one update every ``plain_every_s`` seconds at most.
    Several threads may write. A reader that went away (a closed pipe, a lost terminal) makes the view silent and never
    stops the run.
    """

    def __init__(
        self, console: Console | None = None, *, plain_every_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console if console is not None else new_console()
        self._cell = cell_display() if console is None else None
        self._lines: deque[str] = deque(maxlen=_CELL_LINES)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal and self._cell is None
        self._every_s = _DRAW_EVERY_S if self._is_live or self._cell is not None else plain_every_s
        self._clock = clock
        self._lock = RLock()
        self._progress = _RunProgress()
        self._live: Live | None = None
        self._shown_at = clock()
        self._shown_step = 0
        # Rich leaves the process when a pipe breaks, so errors of the stream must not reach it.
        self._stream = self._console.file
        self._console.file = cast("IO[str]", _LastingStream(self._stream))

    def write(self, *records: Record) -> None:
        with self._lock:
            for record in records:
                self._progress.take(record)
                self._show(record)

    def flush(self) -> None:
        """Shows the newest step, whether or not it is time to."""
        with self._lock:
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
                self._start(record)
            case EvalRecord():
                self._print(_eval_line(record))
            case EventRecord(name="first_step" | "histogram" | "clock"):
                pass  # of the report, TensorBoard and the page
            case EventRecord():
                self._print(_event_line(record))
            case EndRecord():
                self._finish(record)

    def _start(self, run: RunRecord) -> None:
        self._stop_live()  # of an attempt that was cut off
        self._print(_run_line(run))
        self._shown_step = 0
        self._shown_at = self._clock()
        if self._is_live:
            self._live = Live(
                console=self._console, get_renderable=self._progress.render, auto_refresh=False, transient=True
            )
            self._live.start(refresh=True)

    def _show_step(self) -> None:
        self._shown_at = self._clock()
        if self._cell is not None:
            self._draw_cell()
        elif self._live is not None:
            self._live.refresh()
        elif not self._is_live and self._progress.step > self._shown_step:
            self._shown_step = self._progress.step
            self._print(self._progress.line())

    def _finish(self, end: EndRecord) -> None:
        if not self._is_live:
            self._show_step()
        self._stop_live()
        self._print(_end_line(end))

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: Text) -> None:
        if self._cell is not None:
            self._lines.append(line.plain)
            self._draw_cell()
            return
        # On a live terminal a long line wraps; in a file it must stay one line.
        self._console.print(line, soft_wrap=not self._is_live)
        if self._live is not None:
            self._live.refresh()

    def _draw_cell(self) -> None:
        if self._cell is not None:
            show_bar(self._cell, self._progress.share, "\n".join([self._progress.line().plain, *self._lines]))


def format_loss(loss: float | None) -> str:
    """Writes a loss with four decimals, or as a power of ten where those would hide it."""
    if loss is None:
        return "-"
    return f"{loss:.3e}" if 0 < abs(loss) < 1e-3 or 1e4 <= abs(loss) < float("inf") else f"{loss:.4f}"


def format_percent(share: float | None) -> str:
    """Writes a share of one: ``format_percent(0.972) == '97.2 %'``."""
    return "-" if share is None else f"{100 * share:.1f} %"


class _RunProgress:
    """What is known of the run so far, smoothed over the last steps."""

    def __init__(self) -> None:
        self.step = 0
        self._run: RunRecord | None = None
        self._total_steps = 0
        self._global_batch = 0
        self._epoch = 0.0
        self._loss: float | None = None
        self._evaluation: EvalRecord | None = None
        self._window: deque[StepRecord] = deque(maxlen=_WINDOW_STEPS + 1)

    def take(self, record: Record) -> None:
        match record:
            case RunRecord():
                self._run = record
                self._total_steps = record.total_steps
                self._global_batch = record.global_batch
                self._window.clear()
            case StepRecord():
                self.step, self._epoch = record.step, record.epoch
                self._loss = self._loss if record.loss is None else record.loss
                self._window.append(record)
            case EvalRecord():
                self._evaluation = record

    @property
    def share(self) -> float:
        """How much of the run is done."""
        return self.step / self._total_steps if self._total_steps else 0.0

    def step_seconds(self) -> float | None:
        """Returns the mean time of the recent steps.

        The oldest record in the window only marks where it begins. So the first step of a run, which pays for
        start-up, counts only while it is the only one.
        """
        timed = list(self._window)[1:] or list(self._window)
        return sum(record.step_s for record in timed) / len(timed) if timed else None

    def samples_per_second(self) -> float | None:
        """Returns the rate of all ranks over the recent steps."""
        seconds = self.step_seconds()
        if not seconds:
            return None
        first, last = self._window[0], self._window[-1]
        num_steps = last.step - first.step
        return (last.position - first.position) / num_steps / seconds if num_steps > 0 else self._global_batch / seconds

    def line(self) -> Text:
        """Returns one plain line for a log."""
        parts = [f"step {self.step}/{self._total_steps}", *self._numbers(), self._left()]
        return Text(_GAP.join(part for part in parts if part))

    def render(self) -> RenderableType:
        """Returns two lines for a terminal: how far, and how it goes."""
        how_far = Table.grid(padding=(0, 3, 0, 0), expand=True)
        how_far.add_column(ratio=1)
        how_far.add_column(no_wrap=True)
        how_far.add_column(no_wrap=True, style="dim")
        how_far.add_row(
            ProgressBar(total=max(1, self._total_steps), completed=self.step),
            f"step {self.step}/{self._total_steps}",
            self._left(),
        )
        return Group(how_far, Text(_GAP.join(self._numbers()), no_wrap=True, overflow="ellipsis"))

    def _left(self) -> str:
        seconds = self.step_seconds()
        if seconds is None:
            return "waiting for the first step"
        if len(self._window) == 1 or self.step >= self._total_steps:  # nothing to guess from, or nothing left
            return ""
        left = seconds * (self._total_steps - self.step)
        # Whole seconds below a minute: a guess does not deserve more, and its width should not dance.
        return f"{format_seconds(left) if left >= 60 else f'{left:.0f} s'} left"

    def _numbers(self) -> list[str]:
        rate = self.samples_per_second()
        if rate is None:
            return []
        numbers = [f"epoch {self._epoch:.2f}", f"loss {format_loss(self._loss)}", *_format_speed(rate, self._run)]
        if self._evaluation is not None and self._evaluation.accuracy is not None:
            numbers.append(f"accuracy {format_percent(self._evaluation.accuracy)}")
        return numbers


def _format_speed(samples_per_s: float, run: RunRecord | None) -> list[str]:
    """Writes the rate of all ranks in what the run counts, and how good that is, as far as it is known."""
    rate = samples_per_s * (1.0 if run is None else run.units_per_sample)
    told = [f"{format_count(round(rate) if rate >= 10 else rate)} {'samples' if run is None else run.unit}/s"]
    if run is not None and run.flops_per_sample:
        flops = samples_per_s * run.flops_per_sample
        told.append(format_flops(flops))
        if run.peak_flops:
            told.append(f"MFU {format_percent(flops / run.peak_flops / run.world_size)}")
    return told


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


def _run_line(run: RunRecord) -> Text:
    ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
    return Text(
        f"{run.strategy} on {ranks} ({run.backend}, {run.device.partition(':')[0]})"
        f"{_GAP}{parameters_text(run.num_parameters, run.num_trained)}{_GAP}global batch {run.global_batch}"
        f"{_GAP}{run.total_steps} steps",
        style="dim",
    )


def _eval_line(evaluation: EvalRecord) -> Text:
    parts = [f"step {evaluation.step}", "evaluation", f"loss {format_loss(evaluation.loss)}"]
    if evaluation.accuracy is not None:
        parts.append(f"accuracy {format_percent(evaluation.accuracy)}")
    parts += [f"{name} {format_loss(value)}" for name, value in evaluation.metrics.items()]
    line = Text(_GAP.join(parts))
    cost = f"{_GAP}{evaluation.samples} samples in {format_seconds(evaluation.seconds)}"
    return line.append(cost, style="dim")


def _event_line(event: EventRecord) -> Text:
    text = event_text(event)
    if event.name == "straggler" or "note" in event.detail:
        return Text(f"step {event.step}{_GAP}{text}", style="yellow" if event.name == "straggler" else "")
    return Text(f"step {event.step}{_GAP}{event_name(event.name)}").append(f"{_GAP}{text}", style="dim")


def _end_line(end: EndRecord) -> Text:
    first_line = end.message.partition("\n")[0]  # the rest, such as a traceback, is in the log
    line = Text().append(end.status, style=_END_STYLES.get(end.status, ""))
    line.append(f"{_GAP}step {end.step}{_GAP}{format_seconds(end.seconds)}")
    return line.append(f"{_GAP}{first_line}" if first_line else "")
