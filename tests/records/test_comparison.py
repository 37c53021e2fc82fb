"""Runs side by side: speed-up over ranks, and what changed."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_records import END, RUN, STEP, write_records
from rich.console import Console

from paceline.config import dump_yaml, load_config
from paceline.errors import UsageError
from paceline.records.comparison import compare_runs, draw_comparison, draw_scaling, scaling_between, scaling_of
from paceline.records.report import RunSummary, summarize


def make_run(folder: Path, ranks: int, step_s: float, *overrides: str, loss: float = 1.0) -> RunSummary:
    """A run whose ranks share 16 samples a step."""
    for rank in range(ranks):
        one = replace(STEP, samples=16 // ranks, count=4, loss_sum=4 * loss, step_s=step_s)
        steps = [replace(one, step=step) for step in range(1, 11)]
        write_records(folder, rank, replace(RUN, rank=rank, world_size=ranks, device="cpu"), *steps, END)
    if overrides:
        settled = load_config("configs/digits.yaml", overrides)
        (folder / "config.yaml").write_text(dump_yaml(settled))
    return summarize(folder)


def test_efficiency_is_speed_up_by_ranks(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(ranks), ranks, step_s) for ranks, step_s in ((4, 1.0), (1, 1.6), (2, 1.0))]
    points = scaling_of(runs)
    assert [point.ranks for point in points] == [1, 2, 4]
    assert [point.speed_up for point in points] == pytest.approx([1.0, 1.6, 1.6])
    assert [point.efficiency for point in points] == pytest.approx([1.0, 0.8, 0.4])
    assert [point.ideal for point in points] == [1.0, 2.0, 4.0]


def test_runs_with_other_batches_do_not_scale_one_another(tmp_path: Path) -> None:
    runs = {}
    for ranks, batch in ((1, 16), (2, 16), (2, 32), (4, 64), (4, 512)):
        name = f"{ranks}-{batch}"
        runs[name] = replace(make_run(tmp_path / name, ranks, 1.0), global_batch=batch)
    points = scaling_of(list(runs.values()))
    assert {point.name: point.scaling for point in points} == {
        "1-16": "",
        "2-16": "strong",
        "2-32": "weak",
        "4-64": "weak",
    }
    with pytest.raises(UsageError, match="global batch: 512 on 4 ranks against 32 on 2") as caught:
        scaling_between(runs["4-512"], runs["2-32"])
    assert "train.global_batch=512, or this one with train.global_batch=32 or 64" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_parameters": 7}, "parameters: 1,234,567 against 7"),
        ({"backend": "virtual"}, "ranks: real against simulated"),
        ({"compute": "bf16"}, "compute: fp32 against bf16"),
        ({"peak_flops": 2e12}, r"device peak: 1e\+12 FLOP/s against 2e\+12 FLOP/s"),
        ({"world_size": 4}, "ranks: 2 against 4, which are more"),
    ],
)
def test_runs_that_differ_in_more_than_ranks_are_not_compared(other: dict[str, Any], message: str) -> None:
    run = replace(RUN, compute="fp32", peak_flops=1e12)
    assert scaling_between(run, replace(run, world_size=1)) == "strong"
    assert scaling_between(run, run) == "strong"
    with pytest.raises(UsageError, match=message):
        scaling_between(run, replace(run, **{"world_size": 1, **other}))


def test_one_number_of_ranks_has_no_scaling(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 2, 1.0) for name in ("a", "b")]
    assert scaling_of(runs) == ()
    assert draw_scaling(()) == []


def test_what_changed_is_marked(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a", 2, 1.0, "optim.lr=0.1", "name=a")
    after = make_run(tmp_path / "b", 2, 0.5, "optim.lr=0.2", "name=b", loss=1.5)
    found = compare_runs(before, after)
    assert [(each.key, each.before, each.after) for each in found.config] == [("optim.lr", 0.1, 0.2)]
    marks = {each.name: each.mark for each in found.figures}
    assert (marks["samples_per_s"], marks["final_loss"], marks["memory_bytes"]) == ("better", "worse", "same")
    stream = io.StringIO()
    Console(file=stream, width=100, force_terminal=False).print(draw_comparison(found))
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert ["samples", "per", "s", "16.0", "32.0", "+100.0", "%", "better"] in rows
    assert ["optim.lr", "0.1", "0.2"] in rows
    assert found.to_json()["figures"][0]["mark"] == "better"


def test_a_loss_that_is_not_finite_is_worse_than_any(tmp_path: Path) -> None:
    found = compare_runs(make_run(tmp_path / "a", 1, 1.0), make_run(tmp_path / "b", 1, 1.0, loss=float("nan")))
    assert next(each.mark for each in found.figures if each.name == "final_loss") == "worse"
    assert found.config == (), "neither has a config"
