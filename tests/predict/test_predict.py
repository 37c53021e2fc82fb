"""Predictions: what must hold whatever the constants are, and what cannot fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.devices import Cluster, load_cluster
from paceline.cluster.kernels import memory_seconds
from paceline.cluster.wires import Group, collective_seconds, group_of
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.block import CALL_S, FUSED_LOGITS, PASSES
from paceline.predict.formulas.constants import Constants, Domain, constants_for
from paceline.predict.formulas.step import StepParts, predict
from paceline.predict.memory.memory import footprint
from paceline.units import GIB

SHAPE = ModelShape(
    layers=24, width=2048, heads=16, kv_heads=16, mlp_width=8192, vocab_size=51200, mlp="gelu", tied=True
)
COVERED = {"transformer": Domain(("bf16",), {"width": (2048, 2048), "length": (2048, 2048), "tokens": (4096, 4096)})}
SETS = {("ampere", "eager"): Constants(domain=COVERED), ("ampere", "megatron"): Constants(launch_us=30.0)}


def cluster(devices: int = 8) -> Cluster:
    return load_cluster(f"{devices}x a100-sxm-80gb")


def workload(
    data: int = 8, tensor: int = 1, pipeline: int = 1, sharding: str = "fsdp", recompute: str = "none"
) -> Workload:
    """A step; ``sharding`` is a strategy, or none: gradients are sent when the backward is done."""
    strategy: Any = "ddp" if sharding == "none" else sharding
    layout = Layout(
        strategy=strategy,
        tensor=tensor,
        pipeline=pipeline,
        overlap=sharding != "none",
        checkpoint_activations=recompute,
    )
    run = Running(global_batch=64, micro_batch=2, seq_len=2048, compute="bf16")
    return Workload(model=SHAPE, layout=layout.for_ranks(data * tensor * pipeline), run=run)


def test_parts_add_up_to_the_step() -> None:
    step = predict(workload(), cluster(), SETS).step
    parts = (
        step.compute,
        step.tensor_wait,
        step.launch_wait,
        step.bubble,
        step.exposed,
        step.contention,
        step.slowest,
        step.optimizer,
    )
    assert step.total == pytest.approx(sum(parts))
    assert all(part >= 0 for part in parts)


def test_no_step_is_faster_than_the_device() -> None:
    found = predict(workload(), cluster(), SETS)
    flops = 6 * SHAPE.active_matmul_params * 64 * 2048
    assert found.seconds > flops / (8 * 312e12)


def test_recomputing_takes_longer_and_holds_less() -> None:
    plain, full = (predict(workload(recompute=each), cluster(), SETS) for each in ("none", "full"))
    assert full.seconds > plain.seconds
    assert full.memory.activations < plain.memory.activations / 2


def test_sharding_cuts_what_a_rank_holds() -> None:
    whole, cut = (predict(workload(sharding=each), cluster(), SETS).memory for each in ("ddp", "fsdp"))
    assert cut.states == pytest.approx(whole.states / 8)


def test_a_pipeline_has_a_bubble_and_tensor_ranks_wait() -> None:
    piped = predict(workload(data=2, pipeline=4, sharding="none"), cluster(), SETS).step
    split = predict(workload(data=2, tensor=4, sharding="none"), cluster(), SETS).step
    assert piped.bubble > 0
    assert piped.tensor_wait == split.bubble == 0
    assert split.tensor_wait > 0


def test_a_fused_loss_passes_over_the_logits_once() -> None:
    base = workload(sharding="zero1")
    run = replace(base.run, framework="megatron")
    apart, fused = (
        predict(replace(base, run=replace(run, fused_loss=each)), cluster(), SETS).step.compute
        for each in (False, True)
    )
    logits = 64 / 8 * 2048 * SHAPE.vocab_size
    saved = (PASSES["megatron"].logits - FUSED_LOGITS) * logits
    assert apart - fused == pytest.approx(memory_seconds(cluster().device, Constants(), saved))


def test_megatron_without_sharding_reduces_all_gradients_at_once() -> None:
    base = workload(sharding="none")
    one = predict(replace(base, run=replace(base.run, framework="megatron")), cluster(), SETS).step
    num_bytes = (24 * SHAPE.layer_params + SHAPE.end_params) * 4
    alone = collective_seconds("all_reduce", num_bytes, group_of(cluster(), 8), cluster())
    assert (one.exposed, one.hidden) == (pytest.approx(alone + CALL_S), 0.0)
    two = predict(
        replace(workload(data=16, sharding="none"), run=replace(base.run, framework="megatron")), cluster(16), SETS
    ).step
    across = collective_seconds("all_reduce", num_bytes, group_of(cluster(16), 16), cluster(16))
    assert two.exposed == pytest.approx((across + CALL_S) * Constants().slowdown)


def test_messages_across_nodes_are_waited_for_and_those_inside_hide() -> None:
    base = replace(workload(data=4, pipeline=2, sharding="none").run, framework="megatron")
    waits = []
    for data in (4, 8):
        work = workload(data=data, pipeline=2, sharding="none")
        few, many = (
            predict(replace(work, run=replace(base, global_batch=2 * count * data)), cluster(2 * data), SETS).step
            for count in (4, 64)
        )
        waits.append((many.bubble + many.launch_wait) - (few.bubble + few.launch_wait))
    message = collective_seconds("send", 2 * 2048 * SHAPE.width * 2, Group(2, 2), cluster(16)) + CALL_S
    assert waits[1] - waits[0] == pytest.approx(60 * 2 * message * Constants().slowdown)


def test_small_work_waits_for_the_host() -> None:
    base = workload(sharding="ddp")
    tiny = replace(
        base,
        model=replace(SHAPE, width=128, mlp_width=512, heads=2, kv_heads=2),
        run=replace(base.run, micro_batch=1, seq_len=64),
    )
    step = predict(tiny, cluster(), SETS).step
    assert step.launch_wait > step.compute


def test_a_slower_network_exposes_more() -> None:
    fast, slow = load_cluster("4x dgx-a100"), load_cluster("4x dgx-a100 over ethernet-100g")
    spread = workload(data=32)
    assert predict(spread, slow, SETS).step.exposed > predict(spread, fast, SETS).step.exposed


def test_what_does_not_fit_is_said() -> None:
    large = replace(
        workload(),
        model=ModelShape(
            layers=96, width=12288, heads=96, kv_heads=96, mlp_width=49152, vocab_size=51200, mlp="gelu", tied=True
        ),
    )
    found = predict(large, cluster(), SETS)
    assert not found.fits
    assert found.memory.device_bytes > 80 * GIB


def test_megatron_keeps_eighteen_bytes_a_parameter() -> None:
    one = workload(data=1, tensor=8, sharding="none")
    run = replace(one.run, framework="megatron", compute="fp16", fused_attention=False)
    states = predict(replace(one, run=run), cluster(), SETS).memory.states
    assert states == pytest.approx(18 * SHAPE.params / 8)


def test_a_block_keeps_the_published_bytes_a_token() -> None:
    """Korthikanti and others (arXiv 2205.05198): 34 h with the attention recomputed, 5 a s more without."""
    one = workload(data=1, sharding="none")
    run = replace(one.run, framework="megatron", compute="fp16", fused_attention=False, micro_batch=1, global_batch=1)
    tokens = 2048 * SHAPE.layers
    attention = replace(one.layout, checkpoint_activations="matmuls")
    again = replace(one, layout=attention, run=replace(run, recomputes_attention=True))
    kept = predict(again, cluster(1), SETS).memory.activations
    whole = predict(replace(one, run=run), cluster(1), SETS).memory.activations
    assert kept == pytest.approx(34 * SHAPE.width * tokens)
    assert whole == pytest.approx((34 * SHAPE.width + 5 * SHAPE.heads * 2048) * tokens)


def test_logits_and_a_recomputed_block_are_not_held_at_once() -> None:
    """Where every block is computed again, logits count as far as they take more than such a block."""
    one = workload(data=1, sharding="none", recompute="full")
    one = replace(one, run=replace(one.run, framework="compiled"))  # whose optimizers are fused
    totals = [
        footprint(replace(one, model=replace(SHAPE, vocab_size=vocab))).device_bytes - 10 * vocab * SHAPE.width
        for vocab in (128, 1024, 512000)
    ]
    assert totals[0] == pytest.approx(totals[1])
    assert totals[2] > 1.2 * totals[1]
    kept = replace(one, layout=replace(one.layout, checkpoint_activations="none"))
    small, large = (footprint(replace(kept, model=replace(SHAPE, vocab_size=vocab))).temporary for vocab in (128, 1024))
    assert large == pytest.approx(8 * small)


def test_an_update_that_is_not_fused_holds_two_numbers_for_each_parameter_when_activations_are_gone() -> None:
    small = workload(data=1, sharding="none", recompute="full")
    small = replace(small, run=replace(small.run, micro_batch=1, seq_len=16), model=replace(SHAPE, vocab_size=128))
    eager = footprint(small)
    fused = footprint(replace(small, run=replace(small.run, framework="compiled")))
    assert eager.activations + eager.temporary == pytest.approx(8 * small.model.params)
    assert fused.temporary < 0.1 * eager.temporary


def test_gradients_that_are_reduced_once_are_whole_until_then_and_are_sent_once() -> None:
    each = workload(data=8)
    once = replace(each, run=replace(each.run, keeps_gradients=True))
    sliced, whole = (footprint(one) for one in (each, once))
    assert whole.gradients == pytest.approx(4 * SHAPE.params)
    assert whole.gradients > 4 * sliced.gradients
    assert not replace(once, run=replace(once.run, global_batch=16)).reduces_once  # one microbatch
    more, fewer = (predict(one, cluster(8), SETS).step for one in (each, once))
    assert fewer.exposed + fewer.hidden < 0.8 * (more.exposed + more.hidden)
    staged = workload(data=2, pipeline=4)
    kept = footprint(replace(staged, run=replace(staged.run, keeps_gradients=True)))
    assert kept.temporary > 2 * SHAPE.params / 4 > footprint(staged).temporary


def test_the_last_stage_holds_the_logits_and_one_microbatch() -> None:
    one = workload(data=1, pipeline=4, sharding="none")
    one = replace(one, run=replace(one.run, framework="megatron"))
    few, many = (footprint(replace(one, model=replace(SHAPE, vocab_size=vocab))) for vocab in (128, 10**7))
    logits = 6 * 10**7 * one.tokens
    assert few.temporary == 0.0
    assert many.activations + many.temporary == pytest.approx(many.activations / 4 + logits)


def test_slices_of_hybrid_sharding_are_summed_among_replicas() -> None:
    def sent(sharding: str, ranks: int) -> float:
        one = workload(sharding=sharding)
        layout = replace(one.layout, shard_ranks=8, data=0).for_ranks(ranks)
        run = replace(one.run, global_batch=2 * ranks)
        step = predict(replace(one, layout=layout, run=run), cluster(ranks), SETS).step
        return step.exposed + step.hidden

    assert sent("fsdp", 8) == pytest.approx(sent("hybrid", 8))
    assert sent("hybrid", 8) < sent("hybrid", 16) < sent("hybrid", 32)


def test_collectives_that_ranks_wait_for_are_not_slowed_as_hidden_ones_are() -> None:
    def step(slowdown: float) -> StepParts:
        sets = {("ampere", "eager"): Constants(slowdown=slowdown)}
        return predict(workload(data=2, tensor=4), cluster(8), sets).step

    assert step(1.4).tensor_wait == step(1.0).tensor_wait > 0
    assert step(1.4).exposed + step(1.4).hidden > step(1.0).exposed + step(1.0).hidden


def test_an_interleaved_pipeline_hides_reductions_behind_the_chunks_of_its_other_ranks() -> None:
    one = workload(data=32, pipeline=4, sharding="zero1")
    one = replace(one, run=replace(one.run, framework="megatron", global_batch=2048, micro_batch=1, seq_len=256))
    sets = {("ampere", "megatron"): Constants(launch_us=1.0)}
    plain, interleaved = (
        predict(replace(one, layout=replace(one.layout, chunks=chunks)), cluster(128), sets).step for chunks in (1, 2)
    )
    assert interleaved.exposed < plain.exposed
    assert interleaved.exposed + interleaved.hidden == pytest.approx(plain.exposed + plain.hidden)


def _of_experts(
    devices: int = 8, *, active: int = 8, expert: int = 8, width: int = 8192, is_ours: bool = False, **run: object
) -> StepParts:
    """A step of Megatron, or of the engines here, with 64 experts in each layer."""
    model = replace(SHAPE, mlp="swiglu", mlp_width=width, experts=64, active=active)
    one = replace(workload(data=devices, sharding="zero1"), model=model)
    changes: dict[str, Any] = {"framework": "megatron", "global_batch": 8 * devices, **run}
    one = replace(one, layout=replace(one.layout, expert=expert), run=replace(one.run, **changes))
    return predict(one, cluster(devices), SETS, is_ours=is_ours).step


def test_a_row_goes_once_to_each_rank_that_holds_its_experts() -> None:
    few, many = (_of_experts(active=active).tensor_wait for active in (1, 8))
    assert many < 6 * few  # of 8 ranks, 5.3 have one of 8 experts that are chosen evenly
    assert _of_experts(is_ours=True).tensor_wait > many
    assert _of_experts(sends_copies=True).tensor_wait == pytest.approx(many * 8 / 5.25, rel=0.05)


def test_a_row_goes_over_the_network_once_to_each_node() -> None:
    once, copies = (_of_experts(16, expert=16, sends_copies=each).tensor_wait for each in (False, True))
    # Of two nodes both have some of 8 experts, but for one time in 128: half of two rows leaves, and half of eight.
    assert 3.5 < copies / once < 4.1


def test_rows_of_experts_are_hidden_behind_another_microbatch_as_far_as_it_computes() -> None:
    near, hidden = (_of_experts(hides_dispatch=each).tensor_wait for each in (False, True))
    assert hidden == pytest.approx(Constants().contention * near, rel=1e-6)
    across, shown = (
        _of_experts(64, expert=64, width=256, sends_copies=True, hides_dispatch=each).tensor_wait
        for each in (False, True)
    )
    assert 1.5 * Constants().contention * across < shown < across


def test_what_is_recorded_as_a_graph_is_not_launched() -> None:
    none, layers, step = (_of_experts(micro_batch=1, graphs=each).launch_wait for each in ("none", "layers", "step"))
    assert none > 1.3 * layers
    assert layers > 100 * step


def test_gradients_of_experts_have_the_cards_of_the_ranks_that_hold_them() -> None:
    """Of 16 ranks on two nodes, two hold the same experts, one on each node: they share one card, not eight."""
    alone, shared = (_of_experts(16, expert=each) for each in (16, 8))
    sent, here = (each.exposed + each.hidden for each in (shared, alone))
    model = replace(SHAPE, mlp="swiglu", experts=64, active=8)
    experts = SHAPE.layers * model.routed_params / 8
    network = cluster(16).between
    assert network is not None
    # Half of the gradients (4 bytes) leaves a rank, and half of the parameters (2) comes back.
    over_one_card = experts * (4 + 2) / 2 / (network.reached / 8)
    assert sent - here == pytest.approx(1.15 * over_one_card, rel=0.1)


def test_an_interleaved_pipeline_hides_gathers_behind_the_chunks_of_its_other_ranks() -> None:
    one = workload(data=32, pipeline=4, sharding="zero1")
    sets = {("ampere", "megatron"): Constants(launch_us=1.0)}

    def exposed(seq_len: int, chunks: int) -> float:
        run = replace(one.run, framework="megatron", compute="fp16", global_batch=2048, micro_batch=1, seq_len=seq_len)
        found = predict(replace(one, run=run, layout=replace(one.layout, chunks=chunks)), cluster(128), sets)
        return found.step.exposed

    ends = exposed(2048, 1)  # a block's forward is long enough, and so is a backward of half the tokens
    assert exposed(1024, 1) > 1.05 * ends
    assert exposed(1024, 2) == pytest.approx(ends)


def test_autocast_computes_the_softmax_of_scores_in_four_bytes() -> None:
    one = workload(data=1, sharding="none")
    one = replace(one, run=replace(one.run, fused_attention=False))
    plain, wide = (
        predict(replace(one, run=replace(one.run, autocast=is_wide)), cluster(1), SETS).step.compute
        for is_wide in (False, True)
    )
    assert plain < wide < 2 * plain


def test_states_of_experts_are_cut_by_the_ranks_that_hold_the_same_ones() -> None:
    model = replace(SHAPE, mlp="swiglu", experts=8, active=2)
    layout = replace(workload(data=8, sharding="fsdp").layout, expert=8)
    found = footprint(Workload(model=model, layout=layout, run=workload().run))
    assert found.states == pytest.approx(16 * model.params / 8)
    ends = replace(layout, strategy="zero1").for_ranks(16)
    spread = footprint(Workload(model=model, layout=ends, run=workload().run))
    assert spread.optimizer == pytest.approx(8 * model.params / 16)


def test_gathered_parameters_are_waited_for_where_nothing_hides_them() -> None:
    run = replace(workload().run, framework="megatron")
    waits = []
    for devices in (16, 512):
        many = replace(workload(data=devices, sharding="zero1"), run=replace(run, global_batch=2 * devices))
        waits.append(predict(many, cluster(devices), SETS).step.exposed)
    assert 0 < waits[0] < waits[1]


def test_sets_that_were_not_fitted_are_composed() -> None:
    found, fitted = constants_for(SETS, "hopper", "megatron")
    assert not fitted
    assert found.launch_us == 30.0
    assert constants_for(SETS, "ampere", "eager") == (SETS["ampere", "eager"], True)
    assert not found.domain


def test_many_rows_weigh_more_in_a_composed_set() -> None:
    few, many = Constants(matmul=0.9, rows=4), Constants(matmul=0.6, rows=64)
    found, _ = constants_for({("hopper", "eager"): many, ("hopper", "compiled"): few}, "hopper", "megatron")
    assert found.matmul == pytest.approx(0.6 ** (8 / 10) * 0.9 ** (2 / 10))


def test_a_band_is_wider_where_nothing_was_fitted() -> None:
    fitted = predict(workload(), cluster(), SETS)
    composed = predict(workload(), load_cluster("8x h100-sxm"), SETS)
    widths = [(found.band[1] - found.band[0]) / found.seconds for found in (fitted, composed)]
    assert 0 < widths[0] < widths[1]


def test_the_same_input_gives_the_same_prediction() -> None:
    assert predict(workload(), cluster()) == predict(workload(), cluster())
