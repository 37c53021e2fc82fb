"""Validation of a table: predictions that no result can touch, scores, and rows that are skipped."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline_bench.scored.measured_table import read_table
from paceline_bench.scored.published import predict_case, read_case
from paceline_bench.scored.validation import rows_csv, to_json, validate

MakeTable = Callable[..., Path]


def test_no_result_touches_a_prediction(make_table: MakeTable) -> None:
    low = validate(read_table(make_table({"value": "0.001", "note": "EP=8"}, {"value": "5", "metric_name": "mem_gib"})))
    high = validate(read_table(make_table({"value": "900", "note": ""}, {"value": "1", "metric_name": "mem_gib"})))
    assert [each.predicted for each in low.rows] == [each.predicted for each in high.rows]


def test_names_and_sources_touch_no_prediction(make_table: MakeTable) -> None:
    one = validate(read_table(make_table({"id": "mpt-1", "source": "a", "split": "dev"})))
    other = validate(read_table(make_table({"id": "x-7", "source": "b", "split": "calib"})))
    assert one.rows[0].predicted == other.rows[0].predicted


def test_rows_are_written_with_their_reasons(make_table: MakeTable) -> None:
    found = validate(read_table(make_table({}, {"gpu": "Z9000"}, {"value": "fast"}, {"value": "OOM"})))
    rows = list(csv.DictReader(io.StringIO(rows_csv(found))))
    assert list(rows[0]) == ["id", "metric_name", "measured", "predicted", "skipped"]
    assert (rows[0]["measured"], rows[0]["skipped"]) == ("1", "")
    assert float(rows[0]["predicted"]) > 0
    assert rows[1]["predicted"] == ""
    assert rows[1]["skipped"].startswith("line 3, columns gpu, n_gpus: no device is called 'Z9000'")
    assert rows[2]["skipped"] == "line 4, column value: 'fast' is not a number above 0"
    assert (rows[3]["measured"], rows[3]["skipped"]) == ("OOM", "ran out of memory: nothing was measured")
    assert (found.ran_out, found.false_fits) == (1, 1)


def test_a_row_that_cannot_be_predicted_is_not_said_to_fit(make_table: MakeTable) -> None:
    found = validate(read_table(make_table({"gpu": "Z9000", "value": "OOM"})))
    assert (found.ran_out, found.false_fits, found.has_scores) == (0, 0, False)


def test_a_run_that_cannot_fit_is_not_said_to_fit(make_table: MakeTable) -> None:
    huge = {"layers": "96", "hidden": "12288", "heads": "96", "kv_heads": "96", "ffn": "49152", "params_b": "175"}
    found = validate(read_table(make_table({**huge, "value": "OOM"})))
    assert (found.ran_out, found.false_fits) == (1, 0)


def test_alternatives_and_scaling_are_grouped(make_table: MakeTable) -> None:
    layouts = [("8", "1", "1"), ("4", "2", "1"), ("2", "4", "1"), ("2", "2", "2")]
    rows = [{"dp": dp, "tp": tp, "pp": pp, "zero_stage_or_fsdp": "none"} for dp, tp, pp in layouts]
    more = {"n_gpus": "16", "dp": "16", "global_batch": "128", "zero_stage_or_fsdp": "none"}
    found = validate(read_table(make_table(*rows, more)))
    assert found.ranking is not None
    assert (found.ranking.groups, found.ranking.alternatives) == (1, 4)
    assert found.scaling is not None
    assert found.scaling.rows == 1


def test_states_listed_apart_make_the_other_rows_activations(make_table: MakeTable) -> None:
    memory = {"metric_name": "mem_gib", "zero_stage_or_fsdp": "none"}
    whole = validate(read_table(make_table(memory))).rows[0].predicted
    found = validate(read_table(make_table(memory, {**memory, "activation_recompute": "any"}))).rows
    parts = [each.predicted for each in found]
    assert whole is not None
    assert all(part is not None and part < whole for part in parts)


def test_scores_are_plain_data_and_the_same_every_time(make_table: MakeTable) -> None:
    path = make_table({}, {"metric_name": "mem_gib", "value": "30"}, {"split": "dev"})
    first, second = (to_json(validate(read_table(path), "calib")) for _ in range(2))
    assert first == second
    assert first["rows"] == 2
    assert first["families"]["gpt"]["time"]["rows"] == 1
    assert first["overall"]["memory"]["mean"] == pytest.approx(first["families"]["gpt"]["memory"]["mean"])


def test_scaling_is_told_from_the_smallest_run_of_any_split(make_table: MakeTable) -> None:
    small = {"n_gpus": "1", "dp": "1", "global_batch": "8", "zero_stage_or_fsdp": "DDP", "value": "1.0"}
    middle = {**small, "n_gpus": "4", "dp": "4", "global_batch": "32", "value": "99"}
    large = {**small, "n_gpus": "8", "dp": "8", "global_batch": "64", "split": "dev", "value": "1.1"}
    found = validate(read_table(make_table(small, middle, large)), "dev")
    assert len(found.rows) == 1
    assert found.scaling is not None
    assert (found.scaling.groups, found.scaling.rows) == (1, 1)
    alone = validate(read_table(make_table(small, large)), "dev")
    assert alone.scaling == found.scaling


def test_rows_outside_the_calibrated_domain_are_scored_apart(make_table: MakeTable) -> None:
    found = validate(read_table(make_table({}, {"gpu": "B200"}, {"seq_len": "16"})))
    assert [bool(each.outside) for each in found.rows] == [False, True, True]
    assert found.inside is not None
    assert found.outside is not None
    assert (found.inside.rows, found.outside.rows) == (1, 2)
    assert to_json(found)["overall"]["outside_calibrated_domain"]["rows"] == 2


def test_a_family_is_held_out_by_constants_that_never_saw_it(make_table: MakeTable) -> None:
    found = validate(read_table(make_table({"id": "mpt-1"}, {"id": "own-1"})))
    fitted, own = found.rows
    assert fitted.predicted == own.predicted == own.held_out
    assert fitted.held_out != fitted.predicted
    # Without its rows nothing is like it: its widths and lengths are outside, and the band is the wider one.
    assert found.held_out is not None
    scored = to_json(found)
    assert scored["families"]["own"]["held_out"] == scored["families"]["own"]["time"]
    assert scored["overall"]["held_out_mean_over_families"] == pytest.approx(
        (scored["families"]["mpt"]["held_out"]["mean"] + scored["families"]["own"]["time"]["mean"]) / 2
    )


@pytest.mark.parametrize("metric", ["step_time_s", "tokens_per_s_per_gpu"])
def test_coverage_counts_the_runs_whose_time_is_in_the_band(make_table: MakeTable, metric: str) -> None:
    (row,) = validate(read_table(make_table({"metric_name": metric}))).rows
    assert row.predicted is not None
    band = row.bands[0]
    # Bands are of seconds: of a throughput the other way round.
    times = [1 - band - 0.01, 1 - band + 0.01, 1 + band - 0.01, 1 + band + 0.01]
    values = [row.predicted * (time if metric == "step_time_s" else 1 / time) for time in times]
    found = validate(read_table(make_table(*({"metric_name": metric, "value": str(each)} for each in values))))
    assert [each.in_bands[0] for each in found.rows] == [False, True, True, False]
    assert found.coverage == found.held_out_coverage == 0.5


def test_runs_that_ran_and_were_said_not_to_fit_are_counted(make_table: MakeTable) -> None:
    huge = {"layers": "96", "hidden": "12288", "heads": "96", "kv_heads": "96", "ffn": "49152", "params_b": "175"}
    found = validate(read_table(make_table({}, huge, {**huge, "value": "OOM"})))
    assert (found.false_fits, found.false_misfits) == (0, 1)


MIXTURE = {
    **dict.fromkeys(("params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), ""),
    "model_family": "GPT OSS 120B",
    "seq_len": "4096",
    "global_batch": "1280",
    "n_gpus": "64",
    "dp": "64",
    "zero_stage_or_fsdp": "distributed optimizer (ZeRO-1)",
    "activation_recompute": "not stated",
}


def test_experts_are_spread_over_as_many_ranks_as_hold_them(make_table: MakeTable) -> None:
    runs = [{**MIXTURE, "gpu": gpu, "activation_recompute": "none"} for gpu in ("B200", "B300")]
    table = read_table(make_table(*runs, {**MIXTURE, "gpu": "B200", "activation_recompute": "not stated"}))
    cases = [read_case(row) for row in table.rows]
    assert all(case.expert_ranks == (8, 16, 32, 64) for case in cases)
    small, large, open_one = (predict_case(case) for case in cases)
    assert (small.workload.layout.expert, large.workload.layout.expert) == (16, 8)
    assert small.fits
    assert open_one.workload.layout.expert == 8  # it may recompute, which is sooner than rows on the network
    assert small.step.tensor_wait > 2 * large.step.tensor_wait


def test_what_a_row_leaves_open_does_not_keep_it_from_fitting(make_table: MakeTable) -> None:
    much = {"micro_batch": "32", "global_batch": "256", "zero_stage_or_fsdp": "distributed optimizer (ZeRO-1)"}
    table = read_table(make_table(much, {**much, "activation_recompute": "not stated"}))
    stated, left_open = (predict_case(read_case(row)) for row in table.rows)
    assert (stated.fits, left_open.fits) == (False, True)
    assert left_open.seconds == stated.seconds
