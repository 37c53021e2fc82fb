"""What limits a run is told from its records, with the evidence and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from made_records import END, RUN, STEP

from paceline.health.experts import judge_experts
from paceline.health.straggler import find_straggler
from paceline.records.facts import Goodput, MemoryUse, RunFacts, find_goodput
from paceline.records.limits import Gains, Limits, judge_run
from paceline.records.records import ExpertsRecord, Record, RunRecord, StepRecord
from paceline.records.summary import StepTable, split_attempts

QUICK = replace(STEP, step_s=1.0, data_s=0.0, forward_s=0.3, backward_s=0.6, comm_s=0.0, optimizer_s=0.1)
ON_CPU = replace(RUN, device="cpu", backend="gloo")
NO_LOSS = Goodput(
    wall_s=10.0,
    useful_s=10.0,
    repeated_s=0.0,
    down_s=0.0,
    evaluation_s=0.0,
    restarts=0,
    roll_backs=0,
    repeated_steps=0,
    skipped_steps=0,
)


def table_of(*ranks: StepRecord, steps: int = 10) -> StepTable:
    # The first step is warm-up: it must not count.
    first = {rank: replace(record, step_s=100.0, data_s=90.0, comm_s=90.0) for rank, record in enumerate(ranks)}
    rest = ({rank: replace(each, step=number) for rank, each in enumerate(ranks)} for number in range(2, steps + 1))
    return StepTable([first, *rest])


def facts_of(*ranks: StepRecord, steps: int = 10, run: RunRecord = ON_CPU, **more: object) -> RunFacts:
    table = table_of(*ranks, steps=steps)
    values: dict[str, object] = {"goodput": NO_LOSS, "straggler": find_straggler(table.rows)}
    return RunFacts(run=run, steps=table, **(values | more))  # type: ignore[arg-type]


def judged(*ranks: StepRecord, settings: Mapping[str, object] | None = None, **more: object) -> Limits:
    facts = facts_of(*ranks, **more)  # type: ignore[arg-type]
    return judge_run(facts, Gains(facts.run, settings or {}))


@pytest.mark.parametrize(
    ("changes", "what", "share"),
    [({"data_s": 0.17}, "data", 0.17), ({"comm_s": 0.3}, "communication", 0.3), ({"host_s": 0.9}, "host", 0.9)],
)
def test_each_limit_is_found_by_its_share(changes: dict[str, float], what: str, share: float) -> None:
    limits = judged(replace(QUICK, **changes))
    (found,) = limits.found
    assert (limits.what, found.what, found.share) == (what, what, pytest.approx(share))
    assert limits.sentence.startswith(f"limited by {what}: {100 * share:.0f} % of the step waits for")


def test_a_run_that_only_computes_is_limited_by_compute() -> None:
    run = replace(ON_CPU, flops_per_sample=1e9, peak_flops=32e9, compute="fp32", world_size=1)
    limits = judged(replace(QUICK, data_s=0.01, comm_s=0.05, host_s=0.0, samples=8), run=run)
    assert limits.sentence == "limited by compute: 100 % of the step is the model's own work"
    assert limits.evidence == (
        "forward 30 %, backward 60 %, update 10 %",
        "MFU 25.0 % of 32.0 GFLOP/s (fp32, data sheet)",
    )


def test_the_largest_comes_first() -> None:
    limits = judged(replace(QUICK, data_s=0.2, comm_s=0.4))
    assert [each.what for each in limits.found] == ["communication", "data"]
    assert any(line.startswith("  also limited by data: 20 %") for line in limits.lines())


def windows_of(rank: int, ranks: int) -> list[ExpertsRecord]:
    """Of a layer with four experts on each of some ranks, one of which takes 1.8 times the fair share."""
    others = 100 * (ranks - 1.8) / (ranks - 1)
    choices = tuple(180 if place == rank else round(others) for place in range(ranks) for _ in range(4))
    one = ExpertsRecord(
        step=0, layer="layers.0.mlp", steps=2, tokens=sum(choices) // 2, choices=choices, dropped=0, entropy=0.9,
        auxiliary=1.0, ranks=ranks, time=1.0,
    )  # fmt: skip
    return [replace(one, step=2 * window) for window in range(1, 8)]


@pytest.mark.parametrize(
    ("busy", "ranks", "strategy", "is_by_load"),
    [
        (1, 2, "expert 2 x ddp", True),
        (0, 2, "expert 2 x ddp", False),
        (3, 4, "expert 4 x fsdp", True),
        (1, 2, "tensor 2 x expert 2 x ddp", True),
        (0, 2, "tensor 2 x expert 2 x ddp", False),
    ],
)
def test_a_rank_that_is_late_by_its_load_is_not_a_slow_machine(
    busy: int, ranks: int, strategy: str, is_by_load: bool
) -> None:
    waiting = replace(QUICK, forward_s=0.1, backward_s=0.3, comm_s=0.5)
    run = replace(ON_CPU, world_size=4, strategy=strategy)
    wrong = tuple(judge_experts([windows_of(busy, ranks)]))
    assert [(each.kind, each.rank, each.ranks) for each in wrong] == [("straggler", busy, ranks)]
    limits = judged(*[waiting] * 3, replace(QUICK, comm_s=0.01), run=run, experts_wrong=wrong)
    kind = "uneven experts" if is_by_load else "a slow rank"
    assert limits.sentence == f"limited by {kind}: rank 3 holds the others up"
    assert ("times the fair share of a rank" in limits.evidence[-1]) is is_by_load
    assert limits.changes[0].text.startswith("the others wait for it: balance" if is_by_load else "make rank 3 as fast")
    assert any("leave rank 3 out" in each.text for each in limits.changes) is not is_by_load


def test_waiting_for_a_slow_rank_is_not_communication() -> None:
    waiting = replace(QUICK, forward_s=0.1, backward_s=0.3, comm_s=0.5)
    limits = judged(waiting, waiting, replace(QUICK, comm_s=0.01), run=replace(ON_CPU, world_size=3))
    assert [each.what for each in limits.found] == ["rank"]
    assert limits.sentence == "limited by a slow rank: rank 2 holds the others up"
    assert "loses the time in backward" in limits.evidence[0]
    assert [(round(each.gain, 2), each.basis) for each in limits.changes] == [(2.0, "bound"), (1.33, "bound")]


def test_a_rank_beside_which_communication_is_slow_too() -> None:
    limits = judged(
        replace(QUICK, forward_s=0.1, backward_s=0.1, comm_s=0.7), replace(QUICK, comm_s=0.25, forward_s=0.1)
    )
    assert [each.what for each in limits.found] == ["rank", "communication"]
    assert limits.found[1].share == pytest.approx(0.25), "that of the rank that waits least"


@pytest.mark.parametrize(("priced_s", "what"), [(0.4, "communication"), (0.01, "link"), (None, "communication")])
def test_a_slow_link_takes_several_times_what_its_traffic_should(priced_s: float | None, what: str) -> None:
    one = replace(QUICK, comm_s=0.5, forward_s=0.1, backward_s=0.3)
    limits = judged(one, one, priced_comm_s=priced_s)
    assert limits.what == what
    if what == "link":
        assert limits.evidence[-1] == "in nine of ten steps every rank waits 500.0 ms or more, 50 times as long"
        assert limits.changes[0].gain == pytest.approx(1 / (1 - 0.5 * (1 - 0.02)))


@pytest.mark.parametrize(
    ("num_hosts", "backend", "name", "fix"),
    [
        (1, "gloo", "slow exchanges", "end what else runs on node-1"),
        (2, "gloo", "a slow link", "or leave its host out"),
        (1, "virtual", "a slow link", "or leave its host out"),
    ],
)
def test_a_busy_host_alone_has_no_slow_link_and_is_not_left_out(
    num_hosts: int, backend: str, name: str, fix: str
) -> None:
    one = replace(QUICK, comm_s=0.5, forward_s=0.1, backward_s=0.3)
    run = replace(ON_CPU, backend=backend, host="node-1")
    limits = judged(one, one, priced_comm_s=0.01, num_hosts=num_hosts, run=run)
    assert limits.sentence.startswith(f"limited by {name}: 50 %")
    assert fix in limits.changes[0].text


def test_ranks_that_share_cores_wait_in_some_steps_and_have_no_slow_link() -> None:
    quick, late = replace(QUICK, comm_s=0.02), replace(QUICK, comm_s=0.9)
    rows = [{rank: replace(late if step % 2 else quick, step=step) for rank in (0, 1)} for step in range(1, 21)]
    facts = replace(facts_of(QUICK), steps=StepTable(rows), priced_comm_s=0.02)
    assert judge_run(facts).what == "communication"


def test_memory_that_ran_out_limits_a_run_that_computes() -> None:
    memory = MemoryUse(peak_bytes=10, cuts={5: 4}, by_category={"activations": 2**30, "parameters": 2**20})
    limits = judged(QUICK, memory=memory)
    assert limits.sentence == (
        "limited by memory: memory ran out, and ranks went on with microbatches of 4 from step 5 on"
    )
    assert "the plan expects most of activations (1.0 GiB), parameters (1.0 MiB)" in limits.evidence
    assert all("train.microbatch" in each.text for each in limits.changes)


def test_what_smaller_microbatches_cost_is_measured_where_steps_of_both_sizes_are_there() -> None:
    quick, slow = replace(QUICK, step_s=1.0), replace(QUICK, step_s=1.6)
    rows = [{0: replace(quick if step < 6 else slow, step=step)} for step in range(1, 13)]
    facts = replace(facts_of(QUICK), steps=StepTable(rows), memory=MemoryUse(cuts={6: 4}))
    (found,) = judge_run(facts).found
    assert (found.what, found.share) == ("memory", pytest.approx(1 - 1 / 1.6))
    assert found.evidence[0] == "a step took 1.0 s before and 1.6 s after"


@pytest.mark.parametrize(("peak", "what"), [(95, "memory"), (80, "compute")])
def test_a_device_that_is_nearly_full(peak: int, what: str) -> None:
    assert judged(QUICK, memory=MemoryUse(peak_bytes=peak, capacity_bytes=100)).what == what


def _attempt(start: float, steps: Sequence[int], *, ends: bool = False) -> list[Record]:
    """An attempt whose first step begins 5 s after its start; a step takes 1 s."""
    made = [replace(QUICK, step=step, time=start + 6 + number) for number, step in enumerate(steps)]
    return [replace(ON_CPU, time=start), *made, *([replace(END, time=start + 6 + len(steps))] if ends else [])]


def test_restarts_cost_steps_made_again_and_the_time_in_between() -> None:
    records = [*_attempt(0, range(1, 9)), *_attempt(20, range(5, 13)), *_attempt(40, range(9, 21), ends=True)]
    goodput = find_goodput(split_attempts(records))
    # The first attempt ends at 13 s and the next trains from 25 s on; 33 - 6 = 27 s are those of 28 steps less one.
    assert (goodput.restarts, goodput.repeated_steps, goodput.useful_s, goodput.repeated_s) == (2, 8, 20.0, 8.0)
    assert goodput.down_s == (25 - 13) + (45 - 33)
    assert goodput.wall_s == 58.0
    assert goodput.share == pytest.approx(20 / 58)
    limits = judged(replace(QUICK, data_s=0.4), goodput=goodput)
    assert [each.what for each in limits.found] == ["restarts", "data"]
    assert limits.sentence.startswith("limited by restarts: 62 % of the time went to restarts")
    assert "8 recorded steps were made again (8.0 s)" in limits.evidence[0]


def test_a_run_that_was_stopped_and_continued_lost_nothing() -> None:
    records = [*_attempt(0, range(1, 9), ends=True), *_attempt(500, range(9, 13), ends=True)]
    goodput = find_goodput(split_attempts(records))
    assert (goodput.restarts, goodput.down_s, goodput.lost_share, goodput.wall_s) == (0, 0.0, 0.0, 24.0)


def test_a_few_steps_say_nothing() -> None:
    limits = judged(replace(QUICK, data_s=0.5), steps=5)
    assert (limits.what, limits.found, limits.changes) == ("unknown", (), ())
    assert "too few to judge" in limits.sentence
    assert judge_run(replace(facts_of(QUICK), steps=StepTable([]))).what == "unknown"


def test_changes_name_the_value_to_set_and_their_bound() -> None:
    (first, second) = judged(replace(QUICK, data_s=0.6, forward_s=0.1), settings={"data.workers": 2}).changes
    assert str(first) == (
        "raise data.workers from 2 to 5: at most 2.50 x as fast (arithmetic bound: no waiting for data)"
    )
    assert second.text.startswith("prepare samples once")


def test_a_change_that_formulas_can_price_is_predicted() -> None:
    facts = facts_of(replace(QUICK, comm_s=0.4))
    asked: list[Sequence[str]] = []

    def predict(overrides: Sequence[str]) -> float | None:
        asked.append(overrides)
        return 1.3

    changes = judge_run(facts, Gains(facts.run, {}, predict)).changes
    assert ["train.accumulate=4", "train.global_batch=128"] in asked
    assert {each.basis for each in changes} == {"predicted", "bound"}
    assert "1.30 x as fast (predicted by formulas)" in str(next(each for each in changes if each.basis == "predicted"))


def test_the_verdict_is_strict_json() -> None:
    values = judged(replace(QUICK, comm_s=0.4)).to_json()
    assert (values["what"], values["found"][0]["what"], len(values["changes"])) == ("communication", "communication", 2)
    assert values["lines"][0] == values["sentence"]
