"""The search over ways to train: what is left out and why, what comes first, and what it would take to fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.devices import Cluster, load_cluster
from paceline.errors import UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Layout, Offload, Strategy
from paceline.plan.model_shape import ModelShape
from paceline.plan.plan import MemoryEstimate
from paceline.plan.workload import Workload, count_differences, layout_text
from paceline.predict.formulas.engine_costs import engine_footprint, price, price_untuned, zero_bubble_share
from paceline.predict.formulas.step import COMPOSED_P90, Prediction, predict
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import EngineMemory, StateFacts
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import make_schedule
from paceline.search.candidates import TrainingTask, candidates_for, resized
from paceline.search.scaling import scaling_rows
from paceline.search.search import (
    HOST_TOO_SMALL,
    TOO_LARGE,
    Search,
    budget_of,
    explain_against,
    explain_winner,
    host_bytes,
    rank_one,
    search,
    smallest_changes,
    what_would_fit,
)

SMALL = ModelShape(layers=12, width=768, heads=12, kv_heads=12, mlp_width=3072, vocab_size=50304, mlp="gelu", tied=True)
LARGE = ModelShape(layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, vocab_size=128256)
TASK = TrainingTask(model=LARGE, global_batch=128, seq_len=4096)
NODES = load_cluster("2x dgx-h100")


@pytest.fixture(scope="module")
def found() -> Search:
    return search(TASK, NODES)


def laid_out(
    strategy: Strategy, accumulate: int, task: TrainingTask = TASK, ranks: int = 16, **options: Any
) -> Workload:
    """A task on so many ranks, in microbatches that make its batch."""
    layout = Layout(strategy=strategy, accumulate=accumulate, **options).for_ranks(ranks)
    return task.workload(replace(layout, microbatch=task.global_batch // accumulate // layout.data))


def test_every_candidate_is_a_mesh_of_all_devices() -> None:
    left_out: Counter[str] = Counter()
    layouts = list(candidates_for(TASK, NODES, left_out))
    assert len({layout_text(each) for each in layouts}) == len(layouts)
    assert {each.strategy for each in layouts} == {"ddp", "zero1", "zero2", "fsdp", "hybrid"}
    assert {each.schedule for each in layouts if each.pipeline > 1} == {"1f1b", "interleaved", "zb-h1", "zb-v"}
    assert not any(each.splits_backward and each.is_fully_sharded for each in layouts)
    for layout in layouts:
        assert layout.ranks == 16
        assert layout.microbatch * layout.accumulate * layout.data == 128
        assert LARGE.kv_heads % layout.tensor == 0
        assert layout.data % layout.shards == 0
        assert layout.pipeline == 1 or layout.accumulate >= layout.pipeline
    assert set(left_out) == {"fewer microbatches than stages"}


def test_what_cannot_be_is_counted_by_reason() -> None:
    left_out: Counter[str] = Counter()
    odd = replace(TASK, model=replace(SMALL, heads=10, kv_heads=5), global_batch=24)
    found = list(candidates_for(odd, NODES, left_out))
    assert {each.tensor for each in found} == {1}
    assert left_out["tensor ranks do not divide the heads"] == 3
    assert left_out["more stages than blocks"] == 1
    assert left_out["data ranks do not divide the batch"] == 1


def test_a_winner_is_its_own_prediction_for_older_scripts(found: Search) -> None:
    assert found.ranked[0].prediction.seconds == found.ranked[0].seconds


def test_all_that_is_ranked_fits_and_the_fastest_is_first(found: Search) -> None:
    seconds = [each.seconds for each in found.ranked]
    assert seconds == sorted(seconds)
    assert all(each.memory_bytes <= budget_of(NODES) for each in found.ranked)
    assert found.left_out[TOO_LARGE] > 0
    assert found.looked_at == len(found.ranked) + sum(found.left_out.values())
    assert found.nearest is None
    assert 0.2 < found.ranked[0].mfu < 0.8


def test_recomputation_is_taken_only_where_less_does_not_fit(found: Search) -> None:
    for each in found.ranked:
        if each.workload.recompute == "full":
            less = replace(each.workload, layout=replace(each.layout, checkpoint_activations="matmuls"))
            assert engine_footprint(less).device_bytes > budget_of(NODES)


def test_another_estimate_of_memory_counts_where_it_is_larger(found: Search) -> None:
    winner, small = str(found.ranked[0]), engine_footprint(found.ranked[0].workload)

    class Need(EngineMemory):
        def estimate(self, layout: Layout) -> MemoryEstimate:
            return replace(small, parameters=1e15) if layout_text(layout) == winner else small

    need = Need(facts=ModelFacts(blocks=(), root=BlockFacts(parameters=1)), states=StateFacts())
    again = search(replace(TASK, need=need), NODES)
    assert winner not in {str(each) for each in again.ranked}


def test_by_memory_the_smallest_is_first(found: Search) -> None:
    smallest = search(TASK, NODES, order="memory")
    sizes = [each.memory_bytes for each in smallest.ranked]
    assert sizes == sorted(sizes)
    assert sizes[0] < min(each.memory_bytes for each in found.ranked)
    assert smallest.ranked[0].workload.recompute != "none"


def test_the_same_search_finds_the_same(found: Search) -> None:
    assert [str(each) for each in search(TASK, NODES).ranked] == [str(each) for each in found.ranked]


def test_winner_and_runners_up_are_explained(found: Search) -> None:
    first = explain_winner(found)
    assert str(found.ranked[0]) in first
    assert f"fastest of {len(found.ranked)} that fit: computing" in first
    slowest = explain_against(found.ranked[0], found.ranked[-1])
    assert "longer, with" in slowest
    assert explain_against(found.ranked[0], found.ranked[0]).endswith("takes as long")


def test_of_a_thousand_devices_few_candidates_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def counted(workload: Workload, cluster: Cluster) -> Prediction:
        timed.append(workload)
        return price_untuned(workload, cluster)

    monkeypatch.setattr("paceline.search.search.engine_costs.price_untuned", counted)
    large = search(replace(TASK, global_batch=1024), load_cluster("128x dgx-h100"))
    assert len(timed) == len(large.ranked) < 2000  # each takes about a millisecond
    assert large.looked_at > len(timed) > 200


def test_a_batch_that_no_mesh_shares_is_refused() -> None:
    cluster = load_cluster("8x dgx-h100")
    odd = replace(TASK, model=replace(LARGE, layers=4, kv_heads=1, heads=1), global_batch=3)
    with pytest.raises(UsageError, match=r"no mesh fits a batch of 3[^!]*try train.global_batch=64, or 3 devices"):
        search(odd, cluster)
    few = replace(TASK, model=replace(LARGE, layers=1, kv_heads=1, heads=1), global_batch=80)
    with pytest.raises(UsageError, match="or 40 or 80 devices"):
        search(few, cluster)


# What the engines send beside what is predicted.


def test_engines_pay_for_every_microbatch_where_they_do() -> None:
    def both(strategy: Strategy, pipeline: int = 1, shard: int = 0) -> tuple[float, float]:
        workload = laid_out(strategy, 8 * pipeline, pipeline=pipeline, shard_ranks=shard)
        assert workload.layout.microbatch == 1
        # What frameworks call full sharding in groups is priced without what the groups send to one another.
        plain = replace(workload.layout, strategy="fsdp") if strategy == "hybrid" else workload.layout
        steps = price(workload, NODES).step, predict(replace(workload, layout=plain), NODES).step
        return steps[0].exposed + steps[0].hidden, steps[1].exposed + steps[1].hidden

    cases: tuple[tuple[Strategy, int, int], ...] = (("zero2", 1, 0), ("fsdp", 2, 0), ("hybrid", 1, 8))
    for strategy, pipeline, shard in cases:
        ours, plain = both(strategy, pipeline, shard)
        assert ours > plain, strategy
    ours, plain = both("fsdp")
    assert ours == plain
    few: tuple[Strategy, ...] = ("ddp", "zero1")
    for strategy in few:  # more, and smaller, pieces than blocks
        ours, plain = both(strategy)
        assert plain < ours < 2 * plain, strategy


# What is tuned.


def whole(strategy: Strategy, *offload: str, **tuning: Any) -> Workload:
    return laid_out(strategy, 8, offload=Offload.of(offload), **tuning)


def test_small_buckets_cost_latency_and_one_bucket_hides_nothing() -> None:
    exposed = [price(whole("ddp", bucket_mb=size), NODES).step for size in (1, 100, 1e6)]
    plain = price(whole("ddp"), NODES).step
    assert plain == price(whole("ddp", bucket_mb=25), NODES).step
    assert exposed[0].exposed + exposed[0].hidden > exposed[1].exposed + exposed[1].hidden
    assert exposed[2].exposed > 5 * exposed[1].exposed
    assert exposed[2].hidden == pytest.approx(0.0, abs=1e-3)


def test_what_stays_gathered_is_sent_less_and_takes_memory() -> None:
    usual, kept = (price(whole("fsdp", reshard_after_forward=reshard), NODES) for reshard in (True, False))
    assert kept.step.exposed + kept.step.hidden < usual.step.exposed + usual.step.hidden
    assert kept.memory.device_bytes > usual.memory.device_bytes + LARGE.params
    assert kept.step.compute == usual.step.compute


def test_offload_trades_memory_for_time() -> None:
    found = [price(whole("fsdp", *offload), NODES) for offload in ((), ("optimizer",), ("optimizer", "parameters"))]
    sizes, times = [each.memory.device_bytes for each in found], [each.seconds for each in found]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)
    assert found[1].step.optimizer > 5 * found[0].step.optimizer
    assert host_bytes(whole("fsdp", "optimizer")) == pytest.approx(18 * LARGE.params / 16)


def test_an_update_on_the_host_takes_as_long_as_it_was_measured() -> None:
    """3.4 billion parameters of one rank beside an H200, a sample of 2048 tokens: bench/results/memory-h200.json."""
    shape = ModelShape(layers=69, width=2048, heads=16, kv_heads=8, mlp_width=5632, vocab_size=32000)
    task = TrainingTask(model=shape, global_batch=1, seq_len=2048)
    for offload, measured in ((("optimizer",), 2048 / 1569.6), (("optimizer", "parameters"), 2048 / 1024.8)):
        moved = Offload.of(offload)
        workload = laid_out("fsdp", 1, task, 1, checkpoint_activations="full", offload=moved)
        assert 0.5 < price(workload, load_cluster("1x h200-sxm")).seconds / measured < 1.5


def test_offload_is_of_whole_models_beside_devices_with_memory_of_their_own(found: Search) -> None:
    for each in found.ranked:
        if each.layout.offload.is_any:
            assert not each.layout.is_split
            assert each.layout.strategy != "ddp"
            assert host_bytes(each.workload) > 0
    assert all(not each.layout.offload.is_any for each in search(TASK, NODES, host_memory=1e9).ranked)


def test_one_device_offloads_in_every_way_and_may_be_faster_with_more_of_it() -> None:
    task = TrainingTask(model=replace(LARGE, layers=16), global_batch=64, seq_len=4096)
    ranked = search(task, load_cluster("1x h100-sxm")).ranked
    ways = {(each.layout.strategy, each.layout.offload.parts) for each in ranked}
    both = ("optimizer", "parameters")
    assert ways >= {("zero1", both[:1]), ("fsdp", both[:1]), ("fsdp", both)}
    assert all(each.layout.offload.is_any for each in ranked if each.layout.strategy != "ddp")
    # Gradients are reduced, and added up on the host, once a step and not in every microbatch.
    assert ranked[0].layout.strategy == "zero1"
    same = [each for each in ranked if each.layout.strategy == "fsdp" and each.layout.microbatch == 1]
    alike = {each.layout.offload.parts: each for each in same if each.workload.recompute == "none"}
    assert alike[both].seconds < alike[both[:1]].seconds


def test_what_no_published_run_has_is_outside_and_has_the_wider_range() -> None:
    plain, moved = (price(whole("fsdp", *offload), NODES) for offload in ((), ("optimizer",)))
    assert not any("offload" in reason for reason in plain.outside)
    assert "offloaded states: no published run has them" in moved.outside
    assert not moved.fitted
    assert (moved.band[1] - moved.band[0]) / moved.seconds == pytest.approx(2 * COMPOSED_P90)
    ranked = [each for each in search(TASK, NODES).ranked if each.layout.splits_backward]
    assert ranked
    assert all("a zero-bubble schedule: no published run has one" in each.outside for each in ranked)
    host = search(TrainingTask(model=SMALL, global_batch=8, seq_len=128, compute="fp32"), load_cluster("cpu-host"))
    assert any("paceline predict" in reason for reason in host.ranked[0].outside)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_zero_bubbles_are_those_of_the_schedules(name: str) -> None:
    """The share of the plain schedule's bubble that is left, beside what the executor's own schedules come to."""
    ranks, microbatches = 4, 12
    chunks = 2 if name == "zb-v" else 1
    plain = make_schedule("interleaved" if chunks == 2 else "1f1b", ranks, microbatches, chunks)
    idle = [
        each.makespan - max(each.busy)
        for each in (measure_schedule(make_schedule(name, ranks, microbatches, chunks)), measure_schedule(plain))
    ]
    assert zero_bubble_share("none") == pytest.approx(idle[0] / idle[1])
    assert zero_bubble_share("none") < zero_bubble_share("selective") < zero_bubble_share("full") < 1


def test_compiled_blocks_have_no_zero_bubble_schedule() -> None:
    left_out: Counter[str] = Counter()
    compiled = replace(TASK, framework="compiled")
    assert not any(each.splits_backward for each in candidates_for(compiled, NODES, left_out))
    assert left_out["zero-bubble schedules cut the backward of compiled blocks"] > 0


def test_experts_are_shared_inside_a_node() -> None:
    mixture = replace(LARGE, experts=8, active=2)
    found = {each.expert for each in candidates_for(replace(TASK, model=mixture), NODES, Counter())}
    assert found == {1, 2, 4, 8}


# What makes it fit.


def test_changes_that_make_it_fit_come_fastest_first_and_more_of_them_are_faster(found: Search) -> None:
    asked = laid_out("ddp", 1)
    assert rank_one(asked, NODES).memory_bytes > budget_of(NODES)
    changes = smallest_changes(asked, found, most=10)
    times = [each.ranked.seconds for each in changes if each.ranked]
    assert len(times) == len(changes) >= 2
    assert times == sorted(times)
    assert times[0] == pytest.approx(found.ranked[0].seconds)
    decided = [count_differences(asked.layout, each.ranked.layout) for each in changes if each.ranked]
    assert decided == sorted(decided, reverse=True)
    few = smallest_changes(asked, found, most=1)
    assert [str(each) for each in few] == [str(changes[-1])]  # of the fewest decisions, were it the slowest
    named = smallest_changes(asked, found, named=("train.microbatch",))
    assert all("train.microbatch" in each.keys for each in named)
    assert "a step" in str(named[0])


def test_where_nothing_fits_more_devices_or_shorter_sequences_are_named() -> None:
    small = load_cluster("1x g5.12xlarge")
    nothing = search(replace(TASK, global_batch=8), small, host_memory=1e9)
    assert nothing.left_out[HOST_TOO_SMALL] > 0
    assert nothing.ranked == ()
    assert nothing.nearest is not None
    assert nothing.nearest.memory_bytes > budget_of(nothing.cluster)
    changes = list(what_would_fit(nothing))
    assert all(each.keys for each in changes)
    assert any("devices" in each.keys for each in changes)
    more = next(each.keys["devices"] for each in changes if "devices" in each.keys)
    assert isinstance(more, int)
    assert search(replace(TASK, global_batch=8), resized(small, more), host_memory=1e9).ranked


# Scaling.


@pytest.mark.exhaustive
def test_scaling_keeps_or_grows_the_batch() -> None:
    task = TrainingTask(model=SMALL, global_batch=64, seq_len=1024)
    strong = scaling_rows(task, NODES, [8, 1, 16, 16], weak=False)
    weak = scaling_rows(task, NODES, [1, 8, 16], weak=True)
    assert [row.devices for row in strong] == [1, 8, 16]
    assert [row.global_batch for row in strong] == [64, 64, 64]
    assert [row.global_batch for row in weak] == [4, 32, 64]
    assert strong[0].efficiency == 1.0
    assert strong[0].best is not None
    assert strong[2].best is not None
    assert strong[2].best.seconds < strong[0].best.seconds
    assert strong[2].efficiency < 1.0


def test_rows_without_a_plan_say_why() -> None:
    rows = scaling_rows(TASK, NODES, [1, 16], weak=False, host_memory=1e9)
    assert rows[0].best is None
    assert rows[0].why == "out of memory"
    assert rows[1].efficiency == 1.0
    (odd,) = scaling_rows(replace(TASK, global_batch=8), NODES, [1], weak=True)
    assert "no whole number on 1" in odd.why


def test_devices_are_a_part_of_a_node_or_whole_nodes() -> None:
    assert resized(NODES, 4).node.devices == 4
    assert resized(NODES, 64).nodes == 8
    for count in (0, 12):
        with pytest.raises(UsageError, match="beyond one node they are whole nodes"):
            resized(NODES, count)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
