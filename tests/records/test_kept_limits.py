"""Verdicts on made-up runs with every cause at and beside its threshold, and what would help: every word is kept.

See ``tests/pool/kept_texts.py`` for how to keep other ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kept_texts import check_kept, shown
from made_records import RUN, STEP

from paceline.health.straggler import find_straggler
from paceline.records.facts import Goodput, MemoryUse, RunFacts
from paceline.records.limits import Gains, Limits, judge_run
from paceline.records.records import StepRecord
from paceline.records.summary import StepTable

KEPT = Path(__file__).parent / "kept"
# Sums of these are exact: what is at a threshold is at it under every version of Python.
QUICK = replace(STEP, step_s=20.0, data_s=0.0, forward_s=5.0, backward_s=10.0, comm_s=0.0, optimizer_s=2.5)
WORKED = replace(RUN, device="cpu", backend="gloo", world_size=4)
NOTHING_LOST = Goodput(
    wall_s=16.0,
    useful_s=8.0,
    repeated_s=0.0,
    down_s=0.0,
    evaluation_s=0.0,
    restarts=0,
    roll_backs=0,
    repeated_steps=0,
    skipped_steps=0,
)
LOST = replace(NOTHING_LOST, repeated_s=1.0, down_s=0.5, restarts=1, repeated_steps=1200)
GPU = replace(RUN, device="cuda:0", flops_per_sample=2e9, peak_flops=1e12, compute="fp32", measured_peak_flops=5e11)


def facts_of(*ranks: StepRecord, steps: int = 12, later: StepRecord | None = None, **more: Any) -> RunFacts:
    rows = [{rank: replace(each, step=number) for rank, each in enumerate(ranks)} for number in range(1, steps + 1)]
    if later is not None:  # from step 7 on
        rows[6:] = [{rank: replace(later, step=number) for rank in range(len(ranks))} for number in range(7, steps + 1)]
    table = StepTable(rows)
    values: dict[str, Any] = {"run": WORKED, "goodput": NOTHING_LOST, "straggler": find_straggler(table.rows)}
    return RunFacts(steps=table, **(values | more))


def cases() -> Iterator[tuple[str, RunFacts, dict[str, Any]]]:
    for share in (0.04, 0.05, 0.5, 1.0):
        for workers in (None, 0, 2, "auto"):
            yield f"data {share} {workers}", facts_of(replace(QUICK, data_s=20 * share)), {"data.workers": workers}
    for share in (0.125, 0.15, 0.6):
        for policy in ("none", "bf16"):
            one = replace(QUICK, comm_s=round(20 * share, 1))
            yield f"communication {share} {policy}", facts_of(one, one), {"comm.compression.policy": policy}
    waits = replace(QUICK, comm_s=10.0)
    for priced in (2.25, 2.5, 0.0, 8.0):
        for hosts in (1, 2):
            yield f"link {priced} {hosts}", facts_of(waits, waits, priced_comm_s=priced, num_hosts=hosts), {}
    late = replace(QUICK, comm_s=0.5, backward_s=16.0)
    for run in (WORKED, replace(WORKED, world_size=2)):
        yield f"rank of {run.world_size}", facts_of(waits, late, run=run), {}
        yield f"rank of {run.world_size} and wait", facts_of(waits, replace(late, comm_s=4.0), run=run), {}
    for share in (0.49, 0.5, 0.9):
        for compiled in (None, "none", False, "auto", True):
            yield f"host {share} {compiled}", facts_of(replace(QUICK, host_s=20 * share)), {"model.compile": compiled}
    yield "host of some", facts_of(replace(QUICK, host_s=0.0), later=replace(QUICK, host_s=25.0)), {}
    sizes = {"activations": 2**30, "parameters": 2**20, "buffers": 2**10, "optimizer": 3 * 2**20}
    memories = {
        "cut": MemoryUse(peak_bytes=10, cuts={7: 4}, by_category=sizes),
        "cut twice": MemoryUse(peak_bytes=10, cuts={6: 4, 9: 2}),
        "cut at first": MemoryUse(cuts={1: 4}),
        "full": MemoryUse(peak_bytes=92 * 2**20, capacity_bytes=100 * 2**20),
        "nearly": MemoryUse(peak_bytes=91 * 2**20, capacity_bytes=100 * 2**20, by_category=sizes),
    }
    for name, memory in memories.items():
        for precision, checkpoints in (("fp32", "none"), ("bf16_master", "full")):
            for run in (WORKED, replace(WORKED, strategy="fsdp")):
                settings = {"train.precision": precision, "memory.checkpoint_activations": checkpoints}
                found = facts_of(QUICK, later=replace(QUICK, step_s=30.0), memory=memory, run=run)
                yield f"memory {name} {precision} {run.strategy}", found, settings
    for goodput in (LOST, replace(LOST, restarts=3), replace(LOST, down_s=0.0), replace(LOST, restarts=0)):
        name = f"restarts {goodput.restarts} {goodput.down_s}"
        yield name, facts_of(replace(QUICK, data_s=3.0), goodput=goodput), {}
    tenth = replace(LOST, repeated_s=0.5, down_s=0.5, useful_s=9.0)
    yield "restarts at the threshold", facts_of(QUICK, goodput=tenth), {}
    for compute in ("fp32", "tf32", "bf16"):
        for compiled in ("none", "auto"):
            run = replace(GPU, compute=compute)
            yield f"compute {compute} {compiled}", facts_of(QUICK, run=run), {"model.compile": compiled}
    yield "compute on a cpu", facts_of(replace(QUICK, comm_s=2.5), run=replace(GPU, device="cpu")), {}
    yield "small steps", facts_of(QUICK, run=replace(GPU, compute="bf16", measured_peak_flops=1e11)), {}
    for steps in (5, 6):
        yield f"{steps} steps", facts_of(QUICK, steps=steps), {}
    yield "no time", facts_of(replace(QUICK, step_s=0.0)), {}


KEY_OF_A_CONFIG = re.compile(r"\b(train|comm|data|model|memory|parallel|checkpoint)\.\w")


def judged(facts: RunFacts, settings: dict[str, Any], **known: Any) -> Limits:
    given = {key: value for key, value in settings.items() if value is not None}
    return judge_run(facts, Gains(facts.run, given, **known))


def test_verdicts_say_what_they_said() -> None:
    told = [[f"== {name}", *judged(facts, settings).lines()] for name, facts, settings in cases()]
    check_kept(KEPT / "limits.txt", "\n".join(line for lines in told for line in lines))


def test_predicted_gains_take_the_place_of_bounds() -> None:
    """Each change is predicted with the overrides that it consists of."""
    asked: list[tuple[str, ...]] = []

    def predict(overrides: Any) -> float | None:
        asked.append(tuple(overrides))
        return 1.0 + len(asked) / 8 if overrides else None

    found = {name: judged(facts, settings, predict=predict).lines() for name, facts, settings in cases()}
    asked_once = sorted(set(asked))
    some = {name: lines for name, lines in found.items() if lines and name.startswith(("communication", "compute"))}
    check_kept(KEPT / "limits-predicted.json", shown({"asked": asked_once, "told": some}))


@pytest.mark.parametrize(("gain", "is_told"), [(1.004, False), (1.005, True), (1.5, True)])
def test_a_change_that_brings_nothing_is_not_told(gain: float, is_told: bool) -> None:
    found = judged(facts_of(replace(QUICK, host_s=18.0)), {"model.compile": "none"}, predict=lambda _: gain)
    assert ("compile the model (model.compile = auto)" in {each.text for each in found.changes}) == is_told


def test_a_verdict_as_json_has_its_lines() -> None:
    found = judged(facts_of(replace(QUICK, data_s=10.0)), {}).to_json()
    assert (found["what"], found["lines"][0]) == ("data", "limited by data: 50 % of the step waits for the next batch")
    assert found["found"][0]["share"] == 0.5


def test_a_loop_of_ones_own_is_advised_in_its_own_words() -> None:
    advised = set()
    for name, facts, _ in cases():
        facts = replace(facts, run=replace(facts.run, microbatch=0))
        texts = [change.text for change in judged(facts, {}).changes]
        assert not [text for text in texts if KEY_OF_A_CONFIG.search(text)], (name, texts)
        advised.update(texts)
    assert "update after twice as many batches (engine.accumulate)" in advised
    assert 'send half the bytes (compression="bf16" of parallelize)' in advised
    assert 'shard the states (strategy="fsdp" of parallelize) and raise the loader\'s batch_size' in advised
    assert "raise the loader's num_workers" in advised


def test_what_a_loop_of_ones_own_does_already_is_not_advised() -> None:
    run = replace(RUN, microbatch=0)
    facts = facts_of(replace(QUICK, comm_s=3.0), run=run)
    texts = [change.text for change in judged(facts, {"comm.compression.policy": "bf16"}).changes]
    assert texts
    assert not any("half the bytes" in text for text in texts)
