"""The automatic mesh: whole models first, then split ones by overhead; each rejection explained; no torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import plan_of

from paceline.config import Config, config_from_dict, run_checks
from paceline.errors import ConfigError
from paceline.plan.layout import Layout, Offload
from paceline.plan.plan import RunMachine
from paceline.plan.workload import mesh_text
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import with_memory
from paceline.search import automatic
from paceline.search.automatic import Choice, apply_choice, overhead_of
from paceline.units import GIB

SEVEN_BILLION: dict[str, Any] = {
    "model": {"kind": "gpt", "size": "gpt-7b"},
    "data": {"kind": "synthetic_tokens", "vocab_size": 32_000, "context": 2048},
    "train": {"precision": "bf16", "microbatch": 1, "global_batch": 64},
}
RESNET: dict[str, Any] = {
    "model": {"kind": "resnet", "depth": 50},
    "data": {"kind": "synthetic_images", "size": 224},
    "train": {"global_batch": 64},
}


def config_of(values: dict[str, Any], **train: Any) -> Config:
    return config_from_dict({**values, "parallel": {"strategy": "auto"}, "train": {**values.get("train", {}), **train}})


def room(gib: float, *, ranks: int = 16, node_ranks: int = 8, device: str = "cuda", host: float = 1.0) -> RunMachine:
    return RunMachine(
        device=device,
        device_bytes=round(gib * GIB),
        host_bytes=round(host * GIB),
        ranks=ranks,
        node_ranks=min(node_ranks, ranks),
    )


def choose(values: dict[str, Any], where: RunMachine, **train: Any) -> Choice:
    config = config_of(values, **train)
    model = describe_model(config, where.device)
    assert model is not None
    return automatic.choose(config, model, where)


def test_whole_models_come_first() -> None:
    assert choose(SEVEN_BILLION, room(300)).chosen.label == "ddp"
    choice = choose(SEVEN_BILLION, room(60))
    assert mesh_text(choice.chosen.layout) == "data 16"
    assert choice.reason().startswith("parallel.strategy = auto: hybrid in groups of 8, about")


def test_less_memory_splits_the_model_before_all_is_computed_again() -> None:
    choice = choose(SEVEN_BILLION, room(17))
    chosen = choice.chosen.layout
    assert chosen.pipeline * chosen.tensor > 1
    assert chosen.checkpoint_activations != "full"
    assert all(each.rejected for each in choice.ladder[: choice.ladder.index(choice.chosen)])
    whole = [each for each in choice.ladder if not each.layout.is_split]
    assert not [
        each
        for each in whole
        if each.layout.checkpoint_activations != "full" and not each.layout.offload.is_any and not each.rejected
    ]
    text = choice.reason()
    assert f"pipeline {chosen.pipeline}" in text or f"tensor {chosen.tensor}" in text
    assert "not ddp needs" in text


def test_tensor_parallelism_stays_inside_a_host() -> None:
    choice = choose(SEVEN_BILLION, room(300, ranks=16, node_ranks=4))
    assert {each.layout.tensor for each in choice.ladder} == {1, 2, 4}
    assert {each.layout.pipeline for each in choice.ladder} == {1, 2, 4, 8, 16}


def test_split_candidates_stand_in_the_order_of_overhead() -> None:
    ladder = choose(SEVEN_BILLION, room(300)).ladder
    for is_full in (False, True):
        split = [
            each
            for each in ladder
            if each.layout.is_split and (each.layout.checkpoint_activations == "full") == is_full
        ]
        assert [each.overhead for each in split] == sorted(each.overhead for each in split)
    first_split = next(number for number, each in enumerate(ladder) if each.layout.is_split)
    assert all(each.layout.checkpoint_activations != "full" for each in ladder[:first_split])
    assert ladder[-1].layout.offload.is_any


def test_the_overhead_of_a_pipeline_is_its_bubble() -> None:
    block = BlockFacts(parameters=0, operations=1e6, input_bytes=0.0)
    model = ModelFacts(blocks=(block,) * 6, root=block, entry=(block,), exit=(block,))
    for pipeline, count in ((2, 4), (4, 4), (4, 32)):
        layout = Layout(pipeline=pipeline, data=1, accumulate=count)
        bubble = (pipeline - 1) / (count + pipeline - 1)
        overhead = overhead_of(model, layout, room(1, ranks=pipeline))
        assert overhead / (1 + overhead) == pytest.approx(bubble)


def test_what_is_impossible_is_said() -> None:
    heads = {**SEVEN_BILLION, "model": {"kind": "gpt", "layers": 2, "heads": 6, "width": 48, "context": 2048}}
    choice = choose(heads, room(300))
    assert {each.layout.tensor for each in choice.ladder} == {1, 2}
    assert "pipeline 1 x tensor 4: parallel.tensor = 4 does not divide model.heads = 6" in choice.left_out
    assert any("makes 8 stages of a model with 4 layers" in reason for reason in choice.left_out)
    assert json.loads(json.dumps(choice.to_json()))["left_out"] == list(choice.left_out)


def test_a_microbatch_to_be_found_allows_no_pipeline() -> None:
    choice = choose(SEVEN_BILLION, room(300), microbatch="auto")
    assert {each.layout.pipeline for each in choice.ladder} == {1}
    assert any("train.microbatch = auto with parallel.pipeline = 2" in reason for reason in choice.left_out)


def test_a_batch_for_fewer_ranks_leaves_whole_models_out() -> None:
    choice = choose(SEVEN_BILLION, room(300), global_batch=8)
    assert {each.layout.data for each in choice.ladder} <= {1, 2, 4, 8}
    assert choice.left_out[0].startswith("data 16: parallel.ranks = 16 is more than train.global_batch = 8")
    assert choice.chosen.layout.is_split


def test_other_models_have_stages_and_no_tensor_plan() -> None:
    choice = choose(RESNET, room(300))
    assert {each.layout.tensor for each in choice.ladder} == {1}
    assert max(each.layout.pipeline for each in choice.ladder) > 1
    assert choice.left_out[0] == "tensor parallelism: there is no plan of what to split for model.kind = resnet"


def test_models_of_other_code_stay_whole() -> None:
    config = config_of({"model": {"kind": "factory", "factory": "a:b"}, "data": {"kind": "digits"}})
    model = ModelFacts(blocks=(), root=BlockFacts(parameters=1000))
    choice = automatic.choose(config, model, room(10))
    assert {mesh_text(each.layout) for each in choice.ladder} == {"data 16"}
    assert choice.left_out == ("pipeline and tensor parallelism: only the model's own code knows its layers",)


def test_what_memory_says_is_kept() -> None:
    config = config_of({**SEVEN_BILLION, "memory": {"checkpoint_activations": "none", "offload": []}})
    model = describe_model(config, "cuda")
    assert model is not None
    assert {
        (each.layout.checkpoint_activations, each.layout.offload)
        for each in automatic.choose(config, model, room(300)).ladder
    } == {("none", Offload())}


def test_where_nothing_fits_the_nearest_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        choose(SEVEN_BILLION, room(3))
    (problem,) = caught.value.problems
    assert problem.what.startswith("parallel.strategy = auto: nothing fits into 2.7 GiB")
    assert "to try anyway, set parallel.strategy = " in problem.fix
    small = {**SEVEN_BILLION, "memory": {"checkpoint_activations": "none", "offload": []}}
    with pytest.raises(ConfigError, match=r"set parallel\.strategy = ddp, parallel\.pipeline = \d"):
        choose(small, room(3), global_batch=1)


def test_a_batch_that_divides_nowhere_is_refused() -> None:
    values = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"microbatch": 3, "global_batch": 8}}
    with pytest.raises(ConfigError, match=r"global_batch = 8 is not a multiple of train\.microbatch = 3"):
        config_of(values)
    with pytest.raises(ConfigError, match=r"train\.global_batch = 9"):
        choose({**values, "train": {"microbatch": 4, "accumulate": 2, "global_batch": 9}}, room(10, ranks=2))


@given(
    gib=st.floats(1, 120),
    ranks=st.sampled_from([1, 2, 6, 8, 64]),
    node_ranks=st.sampled_from([1, 2, 8]),
    global_batch=st.sampled_from([1, 8, 96, 384]),
)
def test_a_choice_is_a_sound_config_that_needs_what_was_said(
    gib: float, ranks: int, node_ranks: int, global_batch: int
) -> None:
    small = {**SEVEN_BILLION, "model": {"kind": "gpt", "size": "gpt-1.1b"}}
    where = room(gib, ranks=ranks, node_ranks=node_ranks if ranks % node_ranks == 0 else ranks, host=50)
    config = config_of(small, global_batch=global_batch, microbatch=None)
    model = describe_model(config, "cuda")
    assert model is not None
    try:
        choice = automatic.choose(config, model, where)
    except ConfigError:
        return
    decided = apply_choice(config, choice)
    assert decided.parallel.strategy == choice.chosen.layout.strategy
    assert run_checks(decided) == []
    plan = plan_of(decided, ranks=ranks, train_samples=1000, eval_samples=0, node_ranks=where.node_ranks)
    assert plan.batch.ranks == choice.chosen.layout.data
    assert plan.batch.microbatch == choice.chosen.layout.microbatch
    assert with_memory(plan, decided, model, "cuda").memory == choice.chosen.memory
