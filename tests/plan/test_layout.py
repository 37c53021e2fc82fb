"""The one type that says how a run is spread: what follows from a number of ranks, JSON, and its rules."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import layout_of, load_config
from paceline.config.layout import CONFIG_KEYS
from paceline.config.schema import CommConfig, MemoryConfig, ParallelConfig, TrainConfig
from paceline.errors import UsageError
from paceline.plan.layout import STRATEGIES, Compression, Layout, Offload
from paceline.plan.model_shape import ModelShape
from paceline.plan.rule_case import SENTENCES, RuleCase
from paceline.plan.rules import RULES, check_layout, rules
from paceline.schedule.schedules import make_schedule

GPT = ["model={kind: gpt, layers: 4, heads: 4, width: 32, context: 16}", "data.kind=text"]


@given(
    strategy=st.sampled_from(STRATEGIES),
    pipeline=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2, 4, 8]),
)
def test_all_that_is_left_open_follows_from_the_ranks(strategy: Any, pipeline: int, tensor: int, data: int) -> None:
    ranks = pipeline * tensor * data
    asked = Layout(strategy=strategy, pipeline=pipeline, tensor=tensor)
    layout = asked.for_ranks(ranks, node_ranks=max(tensor, ranks // 2))
    assert (layout.ranks, layout.data, layout.mesh.size) == (ranks, data, ranks)
    assert data % layout.shards == 0
    assert layout.shards == (1 if strategy == "ddp" else layout.shard_ranks)
    assert 0 not in (layout.shard_ranks, layout.node_ranks, layout.chunks)
    assert layout.for_ranks(ranks) == layout


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(strategy="fsdp", units=("a", "b"), offload=Offload(optimizer=True), reshard_after_forward=2),
        Layout(compression=Compression(policy="topk", exclude=("embed.*",)), stages=("layers.2",), pipeline=2),
        Layout(pipeline=2, schedule=make_schedule("zb-h1", 2, 4), stage_layers=(1, 2)).for_ranks(4),
    ],
    ids=["default", "sharded", "compressed", "own schedule"],
)
def test_a_layout_is_plain_data(layout: Layout) -> None:
    values = json.loads(json.dumps(layout.to_json()))
    assert set(values) == {field.name for field in fields(Layout)}
    assert Layout.from_json(values) == layout


def test_the_config_has_the_defaults_of_the_layout() -> None:
    config = load_config(None, GPT)
    assert layout_of(config) == Layout()
    sections = {"parallel": ParallelConfig, "comm": CommConfig, "memory": MemoryConfig, "train": TrainConfig}
    for written in CONFIG_KEYS.values():
        section, _, name = written.partition(".")
        model = sections.get(section)
        assert model is None or name in model.model_fields, f"{written} is no key"


def test_messages_name_fields_or_keys() -> None:
    layout = Layout(strategy="ddp", offload=Offload(optimizer=True))
    (of_code,), (of_config,) = rules(RuleCase(layout)), rules(RuleCase(layout, keys=CONFIG_KEYS))
    assert of_code.what == "offload = [optimizer] with strategy = ddp"
    assert of_config.what == "memory.offload = [optimizer] with parallel.strategy = ddp"


def test_activations_need_no_shards_and_no_graph_of_the_whole_model() -> None:
    layout = Layout(offload=Offload(activations=True), checkpoint_activations="full", compile="whole", pipeline=2)
    assert rules(RuleCase(layout)) == []
    assert not layout.offload.moves_states
    assert layout.offload.is_any
    assert Layout(strategy="fsdp", offload=layout.offload).shards_nothing(1)
    assert layout.for_ranks(2).compile == "blocks"
    assert Layout(compile="auto", mlp_tiles=2).for_ranks(1).compile == "blocks"
    assert Layout(compile="whole", checkpoint_activations="full").for_ranks(1).compile == "whole"


def test_everything_that_is_wrong_comes_at_once() -> None:
    layout = Layout(strategy="zero1", prefetch=-1, pipeline=3, schedule="interleaved", chunks=1, shard_ranks=2)
    found = [problem.what for problem in rules(RuleCase(layout, ranks=8))]
    for part in ("prefetch = -1", "pipeline = 3 does not divide ranks = 8", "chunks = 1", "shard_ranks = 2"):
        assert any(part in each for each in found), (part, found)
    with pytest.raises(UsageError, match="pipeline = 3 does not divide ranks = 8"):
        check_layout(replace(layout, prefetch=1), 8)


def test_rules_that_need_the_ranks_are_silent_without_them() -> None:
    layout = Layout(strategy="hybrid", pipeline=3, shard_ranks=5)
    assert rules(RuleCase(layout)) == []
    assert len(rules(RuleCase(layout, ranks=8))) == 1


def test_rules_know_the_model() -> None:
    layout = Layout(tensor=4, sequence_parallel=True)
    model = ModelShape(kind="gpt", heads=6, kv_heads=3, context=10)
    assert [problem.what for problem in rules(RuleCase(layout, model=model))] == [
        "tensor = 4 does not divide heads = 6",
        "tensor = 4 does not divide kv_heads = 3",
        "tensor = 4 does not divide the 10 tokens of a sample",
    ]


def test_a_filled_in_layout_keeps_the_rules() -> None:
    for strategy in STRATEGIES:
        asked = Layout(strategy=strategy, shard_ranks=2 if strategy == "hybrid" else 0)
        assert check_layout(check_layout(asked, 4), 4) == asked.for_ranks(4)


def test_every_rule_says_what_it_reads() -> None:
    known = {field.name for field in fields(Layout)} | {"ranks", "heads", "context"}
    assert all(set(reads) <= known for reads in RULES.values())
    assert all(name in CONFIG_KEYS for reads in RULES.values() for name in reads)


def test_every_sentence_is_that_of_a_rule() -> None:
    code = Path(sys.modules[check_layout.__module__].__file__ or "").read_text()
    assert all(code.count(f'"{name}"') for name in SENTENCES)
    assert all(len(sentences) == 3 for sentences in SENTENCES.values())


@pytest.mark.parametrize(
    ("changes", "model", "told"),
    [
        ({}, ModelShape(kind="mlp"), "context_ranks = 4 with model.kind = mlp"),
        ({}, ModelShape(kind="gpt", heads=4, context=7), "context_ranks = 4 for sequences of 7 tokens"),
        (
            {"context_method": "ulysses", "tensor": 2},
            ModelShape(kind="gpt", heads=4, context=64),
            "context_ranks = 4 with context_method = ulysses and heads = 4, of which each of 2 tensor ranks has 2",
        ),
        (
            {"tensor": 2, "sequence_parallel": True},
            ModelShape(kind="gpt", heads=8, context=24),
            "context_ranks = 4 x tensor = 2, with two parts for each, does not divide the 24 tokens of a sample",
        ),
        ({"context_ranks": 1, "context_method": "ring"}, ModelShape(), "context_method = ring has no effect"),
    ],
)
def test_sequences_are_shared_where_they_can_be(changes: dict[str, Any], model: ModelShape, told: str) -> None:
    (problem,) = rules(RuleCase(Layout(**{"context_ranks": 4, **changes}), model=model))
    assert problem.what.startswith(told)
    assert rules(RuleCase(Layout(context_ranks=4), ranks=8, model=ModelShape(kind="gpt", heads=3, context=8))) == []


@pytest.mark.parametrize(
    ("method", "model"),
    [("auto", ModelShape(kind="gpt", heads=4, context=7)), ("ulysses", ModelShape(kind="gpt", heads=6, context=64))],
    ids=["three ranks have two tokens each", "four and eight ranks do not divide the heads"],
)
def test_the_context_ranks_of_a_fix_divide_those_that_were_asked_for(method: Any, model: ModelShape) -> None:
    (problem,) = rules(RuleCase(Layout(context_ranks=4, context_method=method), model=model))
    assert "try context_ranks = 2, or " in problem.fix
    assert rules(RuleCase(Layout(context_ranks=2, context_method=method), ranks=4, model=model)) == []


def test_a_shard_group_has_whole_sequences_or_none() -> None:
    asked = Layout(strategy="hybrid", context_ranks=4, shard_ranks=2)
    (problem,) = rules(RuleCase(asked, ranks=12))
    assert "shard_ranks = 2 with context_ranks = 4 and 3 data ranks" in problem.what
    for size in (4, 3, 12):
        assert rules(RuleCase(replace(asked, shard_ranks=size), ranks=12)) == []


def test_a_layout_of_an_earlier_plan_has_no_rank_that_shares_a_sequence() -> None:
    values = Layout().to_json()
    del values["context_ranks"], values["context_method"]
    assert Layout.from_json({**values, "context": 1}) == Layout()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "fdsp"}, "it is one of ddp, zero1, zero2, fsdp, hybrid\n  did you mean fsdp?"),
        ({"algorithm": "rng"}, "did you mean ring?"),
        ({"buffers": "brodcast"}, "did you mean broadcast?"),
        ({"schedule": "1f1bb"}, "interleaved, zb-h1, zb-v\n  did you mean 1f1b?"),
        ({"bucket_mb": -1}, "bucket_mb = -1\n  it is a size in MiB"),
        ({"bucket_mb": "big"}, "bucket_mb = 'big'"),
        ({"prefetch": "two"}, "prefetch = 'two'\n  it is a whole number"),
        ({"accumulate": 0}, "accumulate = 0\n  it is a whole number\n  give 1 or more"),
        ({"tensor": 0}, "tensor = 0"),
        ({"overlap": "no"}, "overlap = 'no'\n  it is a yes or no"),
        ({"offload": {"optimizer"}}, "give paceline.Offload(optimizer=True)"),
        ({"compression": 3}, 'give paceline.Compression(policy="topk")'),
        ({"units": "layers"}, "units = 'layers'\n  it is names of modules, or None"),
        ({"stage_layers": (1, "two")}, "stage_layers = (1, 'two')"),
    ],
    ids=str,
)
def test_values_that_are_of_no_use_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_layout(replace(Layout(), **changes), 1)
    assert message in str(caught.value)
