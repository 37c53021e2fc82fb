"""The view says the right numbers on a terminal and in a file, and outlives its reader."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from paceline.records.console import ProgressView, format_loss
from paceline.units import format_percent

if TYPE_CHECKING:
    from paceline.records.records import EndRecord, EvalRecord, EventRecord, RunRecord, StepRecord
    from paceline.records.sinks import Sink


class _Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _plain(clock: _Clock, width: int = 80) -> tuple[ProgressView, io.StringIO]:
    stream = io.StringIO()
    return ProgressView(Console(file=stream, force_terminal=False, width=width), clock=clock), stream


def _terminal(clock: _Clock) -> tuple[ProgressView, io.StringIO]:
    stream = io.StringIO()
    # A terminal that is not dumb, whatever the tests run in; 80 columns.
    console = Console(file=stream, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    return ProgressView(console, clock=clock), stream


def _text(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def _step(record: StepRecord, step: int, step_s: float = 0.1, position: int | None = None) -> StepRecord:
    return replace(record, step=step, step_s=step_s, position=64 * step if position is None else position)


def test_a_file_gets_plain_lines_now_and_then(
    run_record: RunRecord, step_record: StepRecord, eval_record: EvalRecord, end_record: EndRecord
) -> None:
    clock = _Clock()
    view, stream = _plain(clock)
    sink: Sink = view
    sink.write(run_record)
    for step in range(1, 101):
        clock.now += 0.0625  # 80 steps in the five seconds between two lines
        sink.write(_step(step_record, step))
        if step == 60:
            sink.write(replace(eval_record, step=60))
    sink.write(end_record)
    sink.close()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines() == [
        "ddp on 2 ranks (nccl, cuda)   1.2M parameters   global batch 64   100 steps",
        "step 60   evaluation   loss 0.5000   accuracy 97.2 %   360 samples in 12.5 ms",
        "step 80/100   epoch 0.50   loss 0.2500   640 samples/s   accuracy 97.2 %   2 s left",
        "step 100/100   epoch 0.50   loss 0.2500   640 samples/s   accuracy 97.2 %",
        "done   step 100   41.2 s",
    ]


def test_the_header_says_how_many_parameters_train(run_record: RunRecord) -> None:
    view, stream = _plain(_Clock())
    view.write(replace(run_record, num_trained=34_000))
    view.close()
    assert "   1.2M parameters, 34.0k of them trained   global batch" in stream.getvalue()


def test_the_rate_is_of_all_ranks_and_of_recent_steps(run_record: RunRecord, step_record: StepRecord) -> None:
    view, stream = _plain(_Clock())
    view.write(run_record)
    rates = []
    # The first step pays for start-up, the last is short; then a long stretch at twice the pace.
    for step, step_s, position in [(1, 6.4, 64), (2, 0.1, 128), (3, 0.3, 160)]:
        view.write(_step(step_record, step, step_s, position))
        view.flush()
        rates.append(_last_rate(stream))
    for step in range(4, 4 + 40):
        view.write(_step(step_record, step, 0.05, 160 + (step - 3) * 64))
    view.flush()
    # global batch / 6.4 s; 64 / 0.1 s; (64 + 32) / 0.4 s; 64 / 0.05 s
    assert [*rates, _last_rate(stream)] == ["10", "640", "240", "1.3k"]
    view.close()


def _last_rate(stream: io.StringIO) -> str:
    return str(re.findall(r"(\S+) samples/s", stream.getvalue())[-1])


def test_records_of_every_tenth_step_give_the_same_rate(run_record: RunRecord, step_record: StepRecord) -> None:
    view, stream = _plain(_Clock())
    view.write(run_record)
    for step in range(10, 100, 10):
        view.write(_step(step_record, step))
    view.flush()
    assert _last_rate(stream) == "640"
    assert "1 s left" in stream.getvalue()
    view.close()


def test_a_resumed_run_does_not_mix_its_rate_with_the_attempt_before(
    run_record: RunRecord, step_record: StepRecord
) -> None:
    view, stream = _plain(_Clock())
    view.write(run_record)
    for step in range(1, 50):
        view.write(_step(step_record, step))
    view.write(run_record)
    for step in (30, 31):
        view.write(_step(step_record, step, step_s=0.2))
    view.flush()
    assert "step 31/100   epoch 0.50   loss 0.2500   320 samples/s   14 s left" in stream.getvalue()
    view.close()


def test_a_rank_without_samples_keeps_the_loss_before(run_record: RunRecord, step_record: StepRecord) -> None:
    view, stream = _plain(_Clock())
    view.write(run_record)
    view.write(_step(step_record, 1))
    view.write(replace(_step(step_record, 2), loss=None))
    view.flush()
    assert "step 2/100   epoch 0.50   loss 0.2500" in stream.getvalue()
    view.close()


def test_plain_lines_stay_one_line_however_long(run_record: RunRecord, event_record: EventRecord) -> None:
    view, stream = _plain(_Clock(), width=40)
    view.write(run_record)
    view.write(replace(event_record, detail={"path": "/a/[bold]/" + "long " * 40}))
    view.close()
    assert len(stream.getvalue().splitlines()) == 2
    assert "/a/[bold]/long" in stream.getvalue()


def test_a_failure_shows_its_first_line(run_record: RunRecord, end_record: EndRecord) -> None:
    view, stream = _plain(_Clock())
    view.write(run_record)
    view.write(replace(end_record, status="failed", step=7, message="TrainingError: loss is nan\nTraceback"))
    view.close()
    assert stream.getvalue().splitlines()[1:] == ["failed   step 7   41.2 s   TrainingError: loss is nan"]


def test_a_terminal_gets_a_bar(
    run_record: RunRecord, step_record: StepRecord, eval_record: EvalRecord, end_record: EndRecord
) -> None:
    clock = _Clock()
    view, stream = _terminal(clock)
    stdout = sys.stdout
    view.write(run_record)
    assert "step 0/100   waiting for the first step" in _text(stream)
    for step in range(1, 51):
        clock.now += 0.1
        view.write(_step(step_record, step))
    view.write(eval_record)
    shown = _text(stream)
    last_bar = shown.rstrip().splitlines()[-2]
    assert last_bar.startswith("━")
    assert last_bar.endswith("step 50/100   5 s left")
    assert len(last_bar) == 80
    assert last_bar.count("━") + last_bar.count("╸") + last_bar.count("╺") > 40
    assert shown.rstrip().endswith("epoch 0.50   loss 0.2500   640 samples/s   accuracy 97.2 %")
    assert shown.count("step 10   evaluation   loss 0.5000   accuracy 97.2 %   360 samples in 12.5 ms") == 1
    view.write(end_record)
    assert _text(stream).rstrip().splitlines()[-1].endswith("done   step 100   41.2 s")
    assert stream.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in stream.getvalue().rpartition("\x1b[?25l")[2]
    assert sys.stdout is stdout
    view.close()


def test_a_terminal_is_drawn_a_few_times_a_second_at_most(run_record: RunRecord, step_record: StepRecord) -> None:
    clock = _Clock()
    view, stream = _terminal(clock)
    view.write(run_record)
    for step in range(1, 1001):
        clock.now += 0.001
        view.write(_step(step_record, step))
    view.close()
    assert 4 <= len(re.findall(r"step [1-9]\d*/100", _text(stream))) <= 7


def test_closing_in_mid_run_gives_the_terminal_back(run_record: RunRecord) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    stdout = sys.stdout
    view = ProgressView(console)
    view.write(run_record)
    assert sys.stdout is not stdout, "prints of the training script must go above the bar"
    view.close()
    view.close()
    assert sys.stdout is stdout
    assert console.file is stream
    assert "\x1b[?25h" in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(run_record: RunRecord, step_record: StepRecord) -> None:
    stream = io.StringIO()
    view = ProgressView(Console(file=stream, force_terminal=True, width=80, _environ={"TERM": "dumb"}))
    view.write(run_record)
    view.write(step_record)
    view.flush()
    view.close()
    assert _text(stream).splitlines()[1:] == ["step 1/100   epoch 0.50   loss 0.2500   640 samples/s"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_pipe_without_a_reader_does_not_stop_the_run(
    is_terminal: bool, run_record: RunRecord, step_record: StepRecord, eval_record: EvalRecord, end_record: EndRecord
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        console = Console(file=stream, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"})
        view = ProgressView(console, plain_every_s=0.0)
        view.write(run_record)
        os.close(reading)
        for record in (step_record, eval_record, end_record, run_record, step_record):
            view.write(record)
            view.flush()
        view.close()
        # The stream still holds what could not be sent: closing it must not raise at the end of this block.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), writing)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "lost terminal"), ValueError("I/O operation on closed file")])
@pytest.mark.parametrize("method", ["write", "flush"])
def test_a_lost_terminal_does_not_stop_the_run(error: Exception, method: str, eval_record: EvalRecord) -> None:
    class Lost(io.StringIO):
        calls = 0

        def fail(self, *_: object) -> int:
            self.calls += 1
            raise error

    stream = Lost()
    setattr(stream, method, stream.fail)
    view = ProgressView(Console(file=stream, force_terminal=False))
    view.write(eval_record)
    view.write(eval_record)
    view.close()
    assert stream.calls == 1, "a broken stream is not tried again"


def test_text_that_the_stream_cannot_encode_is_replaced(tmp_path: Path, event_record: EventRecord) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as stream:
        view = ProgressView(Console(file=stream, force_terminal=False))
        view.write(replace(event_record, detail={"path": "café"}))
        view.close()
    assert "path caf?" in path.read_text()


def test_several_threads_may_write(run_record: RunRecord, eval_record: EvalRecord) -> None:
    view, stream = _plain(_Clock())
    view.write(run_record)

    def write() -> None:
        for _ in range(50):
            view.write(eval_record)

    threads = [Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view.close()
    lines = stream.getvalue().splitlines()[1:]
    assert len(lines) == 200
    assert len(set(lines)) == 1


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (0.25, "0.2500"),
        (0.0, "0.0000"),
        (1e-5, "1.000e-05"),
        (123456.0, "1.235e+05"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "-"),
    ],
)
def test_losses_are_written_short(loss: float | None, text: str) -> None:
    assert format_loss(loss) == text


def test_shares_are_written_as_percent() -> None:
    assert format_percent(0.972) == "97.2 %"
    assert format_percent(None) == "-"


def test_speed_is_told_in_what_the_run_counts_and_as_a_share_of_the_peak(
    run_record: RunRecord, step_record: StepRecord
) -> None:
    run = replace(run_record, unit="tokens", units_per_sample=1024.0, flops_per_sample=1e12, peak_flops=989e12)
    for known, told in (
        (run, "655.4k tokens/s   640.0 TFLOP/s   MFU 32.4 %"),  # 640 samples/s on two devices
        (replace(run, peak_flops=None), "655.4k tokens/s   640.0 TFLOP/s   2 s left"),
        (replace(run, flops_per_sample=None), "655.4k tokens/s   2 s left"),
    ):
        view, stream = _plain(_Clock(), width=200)
        view.write(known)
        for step in range(1, 81):
            view.write(_step(step_record, step))
        view.flush()
        view.close()
        assert told in stream.getvalue()


def test_a_run_that_is_over_soon_leaves_no_trace(run_record: RunRecord, step_record: StepRecord) -> None:
    clock, stream = _Clock(), io.StringIO()
    view = ProgressView(
        Console(file=stream, force_terminal=False, width=80), after_s=5.0, plain_every_s=0.0, clock=clock
    )
    view.write(run_record, _step(step_record, 1))
    view.flush()
    assert stream.getvalue() == ""
    clock.now += 6.0
    view.write(_step(step_record, 2))
    view.write(_step(step_record, 3))
    first, *steps = stream.getvalue().splitlines()
    assert run_record.strategy in first
    assert len(steps) == 2
