"""The summary of a run, against numbers worked out by hand."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import RUN, STEP, write_records
from rich.console import Console

from paceline.errors import RunFolderError
from paceline.records.facts import MemoryUse
from paceline.records.records import EndRecord, EndStatus, EvalRecord, EventRecord, RunRecord, StepRecord, to_line
from paceline.records.report import RankSummary, RunSummary, render, summarize
from paceline.search.expectation import Expectation, read_expectation
from paceline.view.html import summary_of

START = 1000.0


def _run(rank: int, world_size: int = 2, time: float = START) -> RunRecord:
    return replace(
        RUN,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        device=f"cuda:{rank}",
        host="node-a",
        num_parameters=11_200_000,
        global_batch=7,
        time=time,
    )


def _step(
    step: int, *, loss_sum: float = 1.0, count: int = 1, step_s: float = 1.0, comm_s: float = 0.0, memory: int = 0
) -> StepRecord:
    return replace(
        STEP,
        step=step,
        position=7 * step,
        loss=loss_sum / count if count else None,
        loss_sum=loss_sum,
        count=count,
        grad_norm=None,
        samples=count,
        step_s=step_s,
        data_s=0.125,
        forward_s=0.25,
        backward_s=0.5,
        comm_s=comm_s,
        optimizer_s=0.0625,
        samples_per_s=count / step_s,
        memory_bytes=memory,
        time=START + step,
    )


def _end(seconds: float = 50.0, status: EndStatus = "done", message: str = "") -> EndRecord:
    return EndRecord(status=status, step=4, seconds=seconds, message=message, time=START + 50)


def _ragged_run(folder: Path) -> None:
    """Two ranks and four steps of 4 + 3 samples; in the last, of one sample, rank 1 has none."""
    evaluations = [
        EvalRecord(step=step, loss=loss, accuracy=accuracy, samples=10, seconds=1.0, time=START)
        for step, loss, accuracy in ((2, 0.9, 0.5), (4, 0.7, 0.75))
    ]
    write_records(
        folder,
        0,
        _run(0),
        _step(1, loss_sum=8.0, count=4, step_s=10.0, comm_s=6.0, memory=300),
        _step(2, loss_sum=6.0, count=4, step_s=2.0, comm_s=0.5, memory=100),
        evaluations[0],
        _step(3, loss_sum=5.0, count=4, step_s=2.0, comm_s=0.5, memory=200),
        _step(4, loss_sum=1.0, count=1, step_s=1.0, comm_s=0.0, memory=100),
        evaluations[1],
        _end(),
    )
    write_records(
        folder,
        1,
        _run(1),
        _step(1, loss_sum=3.0, count=3, step_s=8.0, comm_s=2.0),
        _step(2, loss_sum=3.0, count=3, step_s=4.0, comm_s=1.5),
        _step(3, loss_sum=1.0, count=3, step_s=1.0, comm_s=0.5),
        _step(4, loss_sum=0.0, count=0, step_s=1.0, comm_s=1.0),
        _end(49.0),
    )


def test_two_ranks_with_ragged_counts(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    _ragged_run(folder)
    summary = summarize(folder)
    ranks = summary.ranks
    assert summary == RunSummary(
        name="digits",
        folder=folder,
        status="done",
        message="",
        strategy="ddp",
        backend="nccl",
        world_size=2,
        num_parameters=11_200_000,
        global_batch=7,
        steps=4,
        seconds=50.0,
        # (8 + 6 + 5 + 1 + 3 + 3 + 1 + 0) / (13 + 9), and not the mean of the ranks' or the steps' means
        final_loss=27 / 22,
        test_loss=0.7,
        test_accuracy=0.75,
        # the first step is warm-up; then 7 / max(2, 4), 7 / max(2, 1), 1 / max(1, 1)
        samples_per_s=1.75,
        # (6 + 2) / 2 + (0.5 + 1.5) / 2 + (0.5 + 0.5) / 2 + (0 + 1) / 2 of (18 + 6 + 3 + 2) / 2
        comm_share=6.0 / 14.5,
        comm_s=6.0,
        ranks=ranks,
        units_per_s=1.75,
        limits=summary.limits,
        goodput=summary.goodput,
        memory=MemoryUse(peak_bytes=300),
    )
    assert "too few to judge" in summary.limits.sentence
    assert ranks[0] == RankSummary(
        rank=0,
        device="cuda:0",
        host="node-a",
        steps=4,
        samples=13,
        count=13,
        loss_sum=20.0,
        step_s=2.0,
        total_s=15.0,
        data_s=0.5,
        forward_s=1.0,
        backward_s=2.0,
        comm_s=7.0,
        optimizer_s=0.25,
        memory_bytes=300,
    )
    assert (ranks[1].rank, ranks[1].samples, ranks[1].step_s, ranks[1].comm_s) == (1, 9, 2.5, 5.0)


def test_the_final_loss_is_of_the_last_five_steps(tmp_path: Path) -> None:
    steps = [_step(step, loss_sum=float(2**step), count=2) for step in range(1, 9)]
    write_records(tmp_path, 0, _run(0, world_size=1), *steps, _end())
    assert summarize(tmp_path).final_loss == (8 + 16 + 32 + 64 + 128 + 256 - 8) / 10


def test_the_rate_leaves_out_the_first_tenth(tmp_path: Path) -> None:
    # 2 of 20 steps are warm-up: of the 18 left, 9 took one second and 9 two, so the median lies between.
    seconds = [100.0, 100.0, *[1.0] * 9, *[2.0] * 9]
    steps = [_step(step, count=6, step_s=step_s) for step, step_s in enumerate(seconds, start=1)]
    write_records(tmp_path, 0, _run(0, world_size=1), *steps, _end())
    assert summarize(tmp_path).samples_per_s == 4.5


def test_one_step_is_better_than_none(tmp_path: Path) -> None:
    write_records(tmp_path, 0, _run(0, world_size=1), _step(1, count=6, step_s=2.0), _end())
    assert summarize(tmp_path).samples_per_s == 3.0


def test_a_resumed_step_counts_once_and_as_it_was_last(tmp_path: Path) -> None:
    first = [_step(step, loss_sum=100.0) for step in (1, 2, 3)]
    again = [_step(step, loss_sum=1.0, count=2) for step in (2, 3, 4)]
    for rank in (0, 1):
        # The first attempt was killed 3 s after its start; the second took 20 s.
        write_records(tmp_path, rank, _run(rank), *first, _run(rank, time=START + 100), *again, _end(20.0))
    summary = summarize(tmp_path)
    assert summary.steps == 4
    assert summary.final_loss == 206 / 14
    assert summary.seconds == 23.0
    assert [rank.steps for rank in summary.ranks] == [4, 4]


def test_a_rank_that_the_resumed_run_has_no_more_loses_the_steps_done_again(tmp_path: Path) -> None:
    first = [_step(step, loss_sum=100.0, comm_s=0.5) for step in (1, 2)]
    write_records(tmp_path, 0, _run(0), *first, _run(0, world_size=1), _step(2, loss_sum=1.0), _end())
    write_records(tmp_path, 1, _run(1), *first, _end(status="failed", message="gone"))
    summary = summarize(tmp_path)
    assert summary.status == "done", "how a rank of an earlier attempt ended is history"
    assert summary.world_size == 1
    assert summary.final_loss == 201 / 3
    assert summary.comm_s == 0.5
    assert [rank.steps for rank in summary.ranks] == [2, 1]


@pytest.mark.parametrize(
    ("ends", "status", "message"),
    [
        ((_end(), _end()), "done", ""),
        ((_end(status="stopped", message="signal"), _end()), "stopped", "signal"),
        ((_end(), None), "unfinished", ""),
        ((None, None), "unfinished", ""),
        ((None, _end(status="failed", message="rank 1: nan")), "failed", "rank 1: nan"),
    ],
)
def test_a_run_ended_as_its_worst_rank(
    tmp_path: Path, ends: tuple[EndRecord | None, ...], status: str, message: str
) -> None:
    for rank, end in enumerate(ends):
        write_records(tmp_path, rank, _run(rank), _step(1), *([end] if end else []))
    summary = summarize(tmp_path)
    assert (summary.status, summary.message) == (status, message)
    if ends[0] is None:
        assert summary.seconds == 1.0, "from the run's record to the last one"


def test_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    write_records(tmp_path, 0, _run(0, world_size=1), _end(0.5, status="failed", message="DataError: no data"))
    summary = summarize(tmp_path)
    assert (summary.steps, summary.final_loss, summary.samples_per_s, summary.comm_share) == (0, None, None, 0.0)
    text = _draw(summary, 80)
    assert "failed  DataError: no data" in text
    assert "what each rank did" not in text


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    _ragged_run(tmp_path)
    path = tmp_path / "records" / "rank-0.jsonl"
    path.write_text(path.read_text()[:-10])
    assert summarize(tmp_path).status == "unfinished"


@pytest.mark.parametrize("content", [None, "", '{"type":"ru'])
def test_a_folder_without_records_is_refused_with_the_fix(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "records").mkdir()
        (tmp_path / "records" / "rank-0.jsonl").write_text(content)
    with pytest.raises(RunFolderError) as caught:
        summarize(tmp_path)
    assert str(tmp_path / "records") in str(caught.value)
    assert "paceline train CONFIG" in str(caught.value)


@pytest.mark.parametrize("content", ["nonsense\n", to_line(_step(1))])
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, content: str) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "rank-0.jsonl").write_text(content)
    with pytest.raises(RunFolderError, match=r"rank-0\.jsonl, line 1"):
        summarize(tmp_path)


def test_json_is_strict_and_complete(tmp_path: Path) -> None:
    write_records(tmp_path, 0, _run(0, world_size=1), _step(1, loss_sum=math.nan), _end())
    values = summarize(tmp_path).to_json()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["final_loss"] == "nan"
    assert values["folder"] == str(tmp_path)
    assert values["ranks"][0]["device"] == "cuda:0"


def _draw(summary: RunSummary, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False).print(render(summary))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_fit_and_say_the_numbers(tmp_path: Path, width: int) -> None:
    _ragged_run(tmp_path / "digits")
    lines = [line.rstrip() for line in _draw(summarize(tmp_path / "digits"), width).splitlines()]
    assert lines[:2] == ["digits  done", "ddp on 2 ranks (nccl), 11.2M parameters, global batch 7"]
    rows = [line.split() for line in lines]
    assert ["test", "accuracy", "75.0", "%"] in rows
    assert ["test", "loss", "0.7000"] in rows
    assert any(row[:3] == ["training", "loss", "1.2273"] for row in rows)
    assert any(row[:2] == ["samples/s", "2"] for row in rows)
    assert any(row[:6] == ["time", "in", "communication", "6.0", "s", "41.4"] for row in rows)
    assert ["duration", "50.0", "s"] in rows
    # shares of 15 s in steps: 0.5, 1, 2, 7 and 0.25 s
    assert ["0", "cuda:0", "13", "2.0", "s", "3.3", "6.7", "13.3", "46.7", "1.7", "300", "B"] in rows
    assert "on node-a (rank 0 1)" in lines
    assert max(map(len, lines)) <= width


def test_what_a_run_could_not_keep_is_told_once_with_the_reason_of_the_rank_that_has_it(tmp_path: Path) -> None:
    reasons = ["another rank could not keep its part", "the memory is full", "the memory is full"]
    for rank, reason in enumerate(reasons):
        detail = {"reason": reason, "ranks": 2}
        lost = EventRecord(name="no_snapshots", step=1, detail=detail, time=START)
        write_records(tmp_path, rank, _run(rank, world_size=3), _step(1), lost, _end())
    told = [line for line in _draw(summarize(tmp_path), 120).splitlines() if "snapshots" in line]
    assert told == ["no snapshots at step 1: none from here on, on 2 ranks: the memory is full"]


EXPECTED = Expectation(ranks=2, step_s=2.0, step_s_low=1.5, step_s_high=2.5, memory_bytes=200.0)


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    _ragged_run(tmp_path)
    (tmp_path / "prediction.json").write_text(EXPECTED.to_text())
    summary = summarize(tmp_path)
    lines = [line.rstrip() for line in _draw(summary, 80).splitlines()]
    # the slowest ranks took 10, 4, 2 and 1 s; the first step is warm-up
    assert lines[-2:] == [
        "predicted 2.00 s a step (band 25 %), measured 2.00 s: as predicted",
        "predicted 200 B of memory a rank, measured 300 B: 50 % more",
    ]
    found = summary.to_json()["prediction"]
    assert (found["predicted"]["step_s"], found["measured_step_s"], found["memory_ratio"]) == (2.0, 2.0, 1.5)


def test_a_prediction_made_while_the_run_went_on_stands_beside_the_earlier_one(tmp_path: Path) -> None:
    _ragged_run(tmp_path)
    kept = EXPECTED.with_later(replace(EXPECTED, step_s=1.0, step_s_low=0.9, step_s_high=1.1))
    (tmp_path / "prediction.json").write_text(kept.to_text())
    summary = summarize(tmp_path)
    assert [line.rstrip() for line in _draw(summary, 100).splitlines()][-3:] == [
        "predicted 2.00 s a step (band 25 %), measured 2.00 s: as predicted",
        "predicted 200 B of memory a rank, measured 300 B: 50 % more",
        "predicted 1.00 s a step while it ran (band 10 %), measured 2.00 s: 100 % more, outside the band",
    ]
    predicted = summary.to_json()["prediction"]["predicted"]
    assert (predicted["step_s"], predicted["later"]["step_s"], predicted["later"]["is_later"]) == (2.0, 1.0, True)
    assert read_expectation(tmp_path) == kept


def test_a_prediction_is_compared_with_the_last_attempt_that_made_a_step(tmp_path: Path) -> None:
    again = _run(0, world_size=1, time=START + 9)
    steps = [_step(1, step_s=9.0), _step(2, step_s=9.0)]
    then = [again, _step(3, step_s=3.0), _end(), again, _end()]
    write_records(tmp_path, 0, _run(0, world_size=2), *steps, _end(), *then)
    for ranks, measured in ((1, 3.0), (2, None)):
        (tmp_path / "prediction.json").write_text(replace(EXPECTED, ranks=ranks).to_text())
        found = summarize(tmp_path).prediction
        assert found is not None
        assert found.measured_step_s == measured


@pytest.mark.parametrize(
    "content", ["", "[]", '{"pace": 1}', '{"step_s": "fast"}', '{"step_s": -1}', '{"step_s": NaN}', '{"later": 1}']
)
def test_a_damaged_prediction_is_left_out_with_its_reason(tmp_path: Path, content: str) -> None:
    _ragged_run(tmp_path)
    (tmp_path / "prediction.json").write_text(content)
    summary = summarize(tmp_path)
    assert "prediction.json cannot be read" in summary.to_json()["prediction"]["predicted"]["reason"]
    assert "predicted" not in _draw(summary, 80)


def test_missing_ranks_and_steps_are_told(tmp_path: Path) -> None:
    write_records(tmp_path, 0, _run(0, world_size=3), _step(1), _step(2), _end())
    write_records(tmp_path, 2, _run(2, world_size=3), _step(1))
    text = _draw(summarize(tmp_path), 80)
    assert "rank 1 left no records" in text
    assert "rank 2 recorded 1 steps, others 2" in text


def test_a_rank_that_came_with_a_resume_or_went_is_not_taken_for_one_that_lost_records(tmp_path: Path) -> None:
    """Two ranks for two steps, then three for three, then one for one."""
    first, then, last = [_step(1), _step(2)], [_step(3), _step(4), _step(5)], [_step(6)]
    lead = [_run(0, world_size=2), *first, _end(), _run(0, world_size=3), *then, _end(), _run(0, world_size=1), *last]
    write_records(tmp_path, 0, *lead, _end())
    write_records(tmp_path, 1, _run(1, world_size=2), *first, _end(), _run(1, world_size=3), *then, _end())
    write_records(tmp_path, 2, _run(2, world_size=3), *then, _end())
    summary = summarize(tmp_path)
    assert [(rank.steps, rank.absent_steps) for rank in summary.ranks] == [(6, 0), (5, 1), (3, 3)]
    text = _draw(summary, 80)
    assert "recorded" not in text
    assert "rank 1: there in 5 of 6 steps" in text
    assert "rank 2: there in 3 of 6 steps" in text


def test_a_rank_that_came_with_a_resume_may_have_lost_records_all_the_same(tmp_path: Path) -> None:
    write_records(tmp_path, 0, _run(0, world_size=1), _step(1), _end(), _run(0), _step(2), _step(3), _end())
    write_records(tmp_path, 1, _run(1), _step(2), _end())
    assert "rank 1 recorded 1 of the 2 steps in which it was there" in _draw(summarize(tmp_path), 80)


def test_the_widest_numbers_fit_in_eighty_columns(tmp_path: Path) -> None:
    steps = [replace(_step(step, step_s=0.9994, memory=1023 * 2**30), samples=999_900) for step in (1, 2)]
    for rank in range(12):
        write_records(tmp_path, rank, _run(rank, world_size=12), *steps, _end())
    text = _draw(summarize(tmp_path), 80)
    assert "11 cuda:11" in text
    assert "999.4 ms" in text
    assert "1023.0 GiB" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_report_needs_no_torch() -> None:
    code = "import sys, paceline.records.report; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_report_says_how_good_the_run_was(tmp_path: Path) -> None:
    """Two ranks with 4 samples each in steps of 2 s: 4 samples/s of 8 tokens and 1 TFLOP."""
    known = {"unit": "tokens", "units_per_sample": 8.0, "flops_per_sample": 1e12, "compute": "bf16"}
    peaks = {"peak_flops": 10e12, "measured_peak_flops": 8e12}
    for rank in (0, 1):
        steps = [replace(_step(number, count=4, step_s=2.0), host_s=1.5) for number in range(1, 11)]
        write_records(tmp_path, rank, replace(_run(rank), **known, **peaks), *steps, _end())
    summary = summarize(tmp_path)
    assert (summary.units_per_s, summary.flops_per_s) == (32.0, 4e12)
    assert (summary.mfu, summary.mfu_measured) == (0.2, 0.25)
    text = " ".join(_draw(summary, 120).split())
    assert "tokens/s 32 median step after warm-up, 4.0 samples/s" in text
    assert "model FLOP/s 4.0 TFLOP/s" in text
    assert "MFU 20.0 % of 10.0 TFLOP/s (bf16, data sheet), 25.0 % of 8.0 TFLOP/s (measured)" in text
    assert "limited by host: 75 % of the step waits for the host to launch kernels" in text
    values = summary.to_json()
    assert (values["limits"]["what"], values["limits"]["found"][0]["share"]) == ("host", 0.75)
    assert (values["mfu"], values["unit"]) == (0.2, "tokens")


def test_the_report_says_what_the_time_to_the_first_step_went_to(tmp_path: Path) -> None:
    detail = {"seconds": 9.5, "processes": 4.0, "joining": 0.01, "data": 1.25, "model": 2.0, "step": 2.24}
    events = [
        EventRecord(name=name, step=1, detail=found, time=START)
        for name, found in (("first_step", detail), ("compiled", {"what": "the whole model", "seconds": 1.5}))
    ]
    write_records(tmp_path, 0, _run(0, world_size=1), _step(1), *events, _end())
    summary = summarize(tmp_path)
    assert summary.start == {**detail, "compiling": 1.5}
    told = " ".join(_draw(summary, 200).split())
    assert "first step after 9.5 s starting and loading 4.0 s, data 1.2 s, model 2.0 s" in told
    assert "the step 2.2 s, of it compiling 1.5 s" in told


def test_a_metric_of_ones_own_is_in_the_report_and_its_tiles(tmp_path: Path) -> None:
    evaluation = EvalRecord(
        step=1, loss=0.5, accuracy=0.75, samples=8, seconds=0.1, time=START, metrics={"top5": 0.875}
    )
    write_records(tmp_path, 0, _run(0, world_size=1), _step(1), evaluation, _end())
    assert summarize(tmp_path).test_metrics == {"top5": 0.875}
    assert any(line.split() == ["test", "top5", "0.8750"] for line in _draw(summarize(tmp_path), 80).splitlines())
    assert ["test top5", "0.8750", ""] in summary_of(tmp_path)["facts"]
