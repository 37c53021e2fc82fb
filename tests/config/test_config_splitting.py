"""Pipeline and tensor degrees: each rule fires on its case, and is silent on the neighbouring sound one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pasted import refused_when_pasted

from paceline.config import (
    Config,
    check_ranks,
    config_batch,
    config_from_dict,
    explain,
    layout_of,
    load_config,
    run_checks,
)
from paceline.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
GPT = ["model={kind: gpt, layers: 4, heads: 4, width: 32, context: 16}", "data.kind=text"]
MLP = ["model.kind=mlp", "data.kind=digits"]
RESNET = ["model.kind=resnet", "data.kind=synthetic_images"]
MIXTURE = ["model={kind: gpt, layers: 4, heads: 4, width: 32, context: 16, experts: 4, active: 2}", "data.kind=text"]
PIPE = [*GPT, "parallel.pipeline=2"]
CASES: list[tuple[list[str], list[str], str | None]] = [
    (PIPE, [], None),
    (GPT, ["parallel.tensor=2", "parallel.sequence_parallel=true"], None),
    # all of it is chosen
    (GPT, ["parallel.sharding_strategy=auto"], None),
    (GPT, ["parallel.sharding_strategy=auto", "parallel.strategy=auto", "parallel.ranks=8"], None),
    (
        GPT,
        ["parallel.sharding_strategy=auto", "parallel.strategy=zero1"],
        "parallel.sharding_strategy = auto with parallel.strategy = zero1",
    ),
    (PIPE, ["parallel.sharding_strategy=auto"], "parallel.strategy = auto with parallel.pipeline = 2"),
    (
        GPT,
        ["parallel.sharding_strategy=auto", "parallel.tensor=2"],
        "parallel.strategy = auto with parallel.tensor = 2",
    ),
    (
        GPT,
        ["parallel.sharding_strategy=auto", "parallel.schedule=gpipe"],
        "parallel.strategy = auto with parallel.schedule = gpipe",
    ),
    # degrees and ranks
    (PIPE, ["parallel.ranks=3"], "parallel.pipeline = 2 does not divide parallel.ranks = 3"),
    (PIPE, ["parallel.ranks=6", "parallel.tensor=2"], "parallel.pipeline = 2 x parallel.tensor = 2 do not divide"),
    (PIPE, ["parallel.ranks=8", "parallel.tensor=2", "parallel.data=2"], None),
    (
        PIPE,
        ["parallel.ranks=8", "parallel.tensor=2", "parallel.data=4"],
        "parallel.data = 4 with parallel.pipeline = 2",
    ),
    (GPT, ["parallel.ranks=2", "parallel.data=1"], "try parallel.data = 2, or parallel.ranks = 1"),
    # keys that nobody reads
    (GPT, ["parallel.schedule=gpipe"], "parallel.schedule = gpipe has no effect with parallel.pipeline = 1"),
    (GPT, ["parallel.stage_layers=[4]"], "parallel.stage_layers = [4] has no effect"),
    (PIPE, ["parallel.sequence_parallel=true"], "parallel.sequence_parallel = true has no effect"),
    # schedules
    (PIPE, ["parallel.schedule=interleaved"], None),
    (PIPE, ["parallel.schedule=interleaved", "parallel.chunks=3"], None),
    (PIPE, ["parallel.schedule=interleaved", "parallel.chunks=1"], "it takes at least 2"),
    (PIPE, ["parallel.schedule=zb-v"], None),
    (PIPE, ["parallel.schedule=zb-v", "parallel.chunks=3"], "it takes exactly 2"),
    (
        PIPE,
        ["parallel.schedule=1f1b", "parallel.chunks=2"],
        "set parallel.chunks = 1, or parallel.schedule = interleav",
    ),
    (PIPE, ["parallel.schedule=zb-h1", "parallel.strategy=zero2"], None),
    (PIPE, ["parallel.schedule=zb-h1", "parallel.strategy=fsdp"], "frees the weights between them"),
    (PIPE, ["parallel.schedule=1f1b", "parallel.strategy=fsdp"], None),
    (PIPE, ["parallel.schedule_file=no/such.csv"], "parallel.schedule_file = 'no/such.csv' does not exist"),
    # stages
    (GPT, ["parallel.pipeline=6"], None),
    (GPT, ["parallel.pipeline=7"], "parallel.pipeline = 7 makes 7 stages of a model with 6 layers"),
    (PIPE, ["parallel.schedule=interleaved", "parallel.chunks=4"], "makes 8 stages"),
    (MLP, ["parallel.pipeline=3"], None),
    (MLP, ["parallel.pipeline=4"], "4 stages of a model with 3 linear layers"),
    (RESNET, ["parallel.pipeline=10"], None),
    (RESNET, ["parallel.pipeline=11"], "of a model with 10 layers"),
    (PIPE, ["parallel.stage_layers=[1, 3]"], None),
    (PIPE, ["parallel.stage_layers=[0, 4]"], None),
    (PIPE, ["parallel.stage_layers=[2, 3]"], "adds up to 5, and the model has 4 blocks"),
    (PIPE, ["parallel.stage_layers=[1, 1, 2]"], "is for 3 stages, and there are 2"),
    (GPT, ["parallel.pipeline=3", "parallel.stage_layers=[2, 0, 2]"], "leaves a stage without blocks"),
    (PIPE, ["parallel.stages=[layers.1]"], None),
    (PIPE, ["parallel.stages=[layers.1, layers.2]"], "cuts into 3 stages, and there are 2"),
    (GPT, ["parallel.pipeline=3", "parallel.stages=[layers.1, layers.1]"], "names layers.1 twice"),
    (PIPE, ["parallel.stages=[layers.1]", "parallel.stage_layers=[1, 3]"], "are both given"),
    # tensor
    (GPT, ["parallel.tensor=3"], "parallel.tensor = 3 does not divide model.heads = 4"),
    (GPT, ["parallel.tensor=4", "model.kv_heads=2"], "parallel.tensor = 4 does not divide model.kv_heads = 2"),
    (GPT, ["parallel.tensor=4"], None),
    (
        GPT,
        ["parallel.tensor=4", "parallel.sequence_parallel=true", "model.context=18"],
        "does not divide the 18 tokens",
    ),
    (MLP, ["parallel.tensor=2"], "parallel.tensor = 2 with model.kind = mlp"),
    (RESNET, ["parallel.tensor=2"], "parallel.tensor = 2 with model.kind = resnet"),
    # experts
    (MIXTURE, ["parallel.expert=2", "parallel.ranks=4"], None),
    (MIXTURE, ["parallel.expert=4", "parallel.ranks=8", "parallel.tensor=2", "parallel.strategy=fsdp"], None),
    (MIXTURE, ["parallel.expert=4", "parallel.ranks=8", "parallel.context=2"], None),
    (MIXTURE, ["parallel.expert=3"], "parallel.expert = 3 does not divide model.experts = 4"),
    (MIXTURE, ["parallel.expert=4", "parallel.ranks=2"], "try parallel.expert = 2, or 4 ranks"),
    (
        MIXTURE,
        ["parallel.expert=4", "parallel.ranks=4", "parallel.strategy=hybrid", "parallel.shard_ranks=2"],
        "parallel.expert = 4 does not divide parallel.shard_ranks = 2",
    ),
    (GPT, ["parallel.expert=2"], "parallel.expert = 2 with model.kind = gpt without experts"),
    (MLP, ["parallel.expert=2"], "parallel.expert = 2 with model.kind = mlp without experts"),
    (MIXTURE, ["parallel.expert=2", "comm.compression.policy=topk"], "parallel.expert = 2 with comm.compression.pol"),
    (MIXTURE, ["parallel.expert=2", "parallel.strategy=auto"], "parallel.strategy = auto with parallel.expert = 2"),
    (MIXTURE, ["parallel.expert=2", "train.microbatch=auto"], "train.microbatch = auto with parallel.expert = 2"),
    # the rest
    (PIPE, ["parallel.strategy=auto"], "parallel.strategy = auto with parallel.pipeline = 2"),
    (GPT, ["parallel.tensor=2", "parallel.strategy=auto"], "parallel.strategy = auto with parallel.tensor = 2"),
    (PIPE, ["train.microbatch=auto"], "train.microbatch = auto with parallel.pipeline = 2"),
    (GPT, ["parallel.tensor=2", "train.microbatch=auto"], "train.microbatch = auto with parallel.tensor = 2"),
    (PIPE, ["model.compile=true", "parallel.schedule=zb-h1"], "model.compile = auto with parallel.schedule = zb-h1"),
    (PIPE, ["comm.compression.policy=topk"], "comm.compression.policy = topk with parallel.pipeline = 2"),
    (PIPE, ["parallel.strategy=zero1", "memory.offload=[optimizer]"], "memory.offload = [optimizer] with parallel.pip"),
    # the batch is shared by data ranks alone
    (PIPE, ["parallel.ranks=8", "train.global_batch=4"], None),
    (
        PIPE,
        ["parallel.ranks=8", "train.global_batch=6"],
        "train.global_batch = 6 is not a multiple of parallel.data = 4",
    ),
    (PIPE, ["parallel.ranks=4", "train={microbatch: 4, accumulate: 4, global_batch: 32}"], None),
]


def make(*overrides: str) -> Config:
    return load_config(None, list(overrides))


REFUSED = [(base, overrides) for base, overrides, text in CASES if text is not None]


@pytest.mark.parametrize(("base", "overrides"), REFUSED, ids=lambda case: " ".join(case)[:70])
def test_a_proposed_fix_is_accepted_when_it_is_pasted(base: list[str], overrides: list[str]) -> None:
    assert refused_when_pasted([*base, *overrides]) == []


@pytest.mark.parametrize(("base", "overrides", "text"), CASES)
def test_each_rule_fires_on_its_case(base: list[str], overrides: list[str], text: str | None) -> None:
    if text is None:
        assert run_checks(make(*base, *overrides)) == []
        return
    with pytest.raises(ConfigError) as caught:
        make(*base, *overrides)
    (problem,) = caught.value.problems
    assert text in str(problem)
    assert problem.rule
    assert problem.fix


def test_all_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        make(*PIPE, "parallel.ranks=3", "parallel.tensor=3", "parallel.schedule=zb-v", "parallel.strategy=fsdp")
    found = [problem.what for problem in caught.value.problems]
    assert len(found) == 3
    assert "parallel.schedule = zb-v with parallel.strategy = fsdp" in found


def test_a_schedule_file_takes_the_place_of_the_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("F0.0,,,B0.0\n,F1.0,B1.0\n")
    assert run_checks(make(*PIPE, f"parallel.schedule_file={path}")) == []
    with pytest.raises(ConfigError, match=r"parallel\.schedule = gpipe are both given"):
        make(*PIPE, f"parallel.schedule_file={path}", "parallel.schedule=gpipe")


def test_ranks_that_are_found_later_are_checked_then() -> None:
    config = make(*PIPE, "parallel.tensor=2", "train.global_batch=6")
    assert check_ranks(config, 4) == []
    (problem,) = check_ranks(config, 6)
    assert problem.what == "parallel.pipeline = 2 x parallel.tensor = 2 do not divide parallel.ranks = 6"
    (problem,) = check_ranks(config, 16)
    assert problem.what == "train.global_batch = 6 is not a multiple of parallel.data = 4"
    assert problem.fix == "try train.global_batch = 4 or 8"  # parallel.data follows from the ranks


@given(pipeline=st.integers(1, 4), tensor=st.integers(1, 4), data=st.integers(1, 4), samples=st.integers(1, 24))
def test_a_pipeline_has_as_many_microbatches_as_ranks_where_the_batch_allows(
    pipeline: int, tensor: int, data: int, samples: int
) -> None:
    parallel = {"pipeline": pipeline, "tensor": tensor}
    config = config_from_dict(
        {
            "model": {"kind": "factory", "factory": "a:b"},
            "data": {"kind": "digits"},
            "parallel": parallel,
            "train": {"global_batch": data * samples},
        }
    )
    ranks = pipeline * tensor * data
    batch = config_batch(config, ranks)
    assert batch.ranks == data == layout_of(config).for_ranks(ranks).data
    assert batch.microbatch * batch.accumulate * data == batch.global_batch
    if pipeline == 1:
        assert batch.accumulate == 1
    else:
        assert batch.accumulate >= min(pipeline, samples)


def test_what_is_given_about_microbatches_is_kept() -> None:
    assert config_batch(make(*PIPE, "train.accumulate=1"), 2).accumulate == 1
    assert config_batch(make(*PIPE, "train={microbatch: 16, global_batch: 64}"), 2).accumulate == 4


def test_shard_groups_are_among_data_ranks() -> None:
    split = make(*PIPE, "parallel.tensor=2", "parallel.strategy=fsdp")
    assert layout_of(split, 16).shards == 4
    hybrid = make(*PIPE, "parallel.tensor=2", "parallel.strategy=hybrid")
    assert layout_of(hybrid, 32, node_ranks=8).shards == 4
    assert layout_of(hybrid, 16, node_ranks=16).shards == 4
    with pytest.raises(ConfigError, match="does not divide the 4 data ranks of parallel"):
        make(*PIPE, "parallel={pipeline: 2, ranks: 8, strategy: hybrid, shard_ranks: 3}")


def test_explain_says_what_follows() -> None:
    rows = {row.key: row for row in explain(make(*PIPE, "parallel.schedule=zb-v", "parallel.tensor=2"), ranks=8)}
    assert rows["parallel.data"].value == 2
    assert rows["parallel.chunks"].value == 2
    assert rows["derived.stages"].value == 4 == layout_of(make(*PIPE, "parallel.schedule=zb-v")).num_stages
    assert rows["train.accumulate"].value == 2
    assert "parallel.data) = 64 / (2 x 2)" in rows["train.microbatch"].origin
    unsplit = {row.key for row in explain(make(*GPT), ranks=2) if row.origin.startswith("derived")}
    assert not unsplit & {"parallel.data", "parallel.chunks", "derived.stages"}


@pytest.mark.parametrize(("name", "ranks", "data"), [("gpt_pipeline", 2, 1), ("gpt_3d", 8, 2)])
def test_the_examples_are_sound(name: str, ranks: int, data: int) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.parallel.ranks == ranks
    assert check_ranks(config, ranks) == []
    assert config_batch(config, ranks).ranks == data


def test_the_older_key_of_an_open_mesh_is_read_as_the_strategy() -> None:
    config = make(*GPT, "parallel.sharding_strategy=auto")
    assert config == make(*GPT, "parallel.strategy=auto")
    assert (config.parallel.strategy, config.parallel.sharding_strategy) == ("auto", "manual")
    assert check_ranks(config, 1024) == []  # how many of them share the batch is not decided yet
    with pytest.raises(ConfigError) as caught:
        make(*GPT, "parallel={sharding_strategy: auto, strategy: ddp, pipeline: 2, tensor: 2}")
    (problem,) = caught.value.problems
    assert problem.what == "parallel.sharding_strategy = auto with parallel.strategy = ddp"
    with pytest.raises(ConfigError) as caught:
        make(*GPT, "parallel={strategy: auto, pipeline: 2, tensor: 2}")
    assert [problem.fix for problem in caught.value.problems] == [
        f"remove parallel.{key}, or set parallel.strategy = ddp" for key in ("pipeline", "tensor")
    ]
