"""The automatic strategy: the cheapest that fits, with every rejection explained, and what is asked for is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import Config, config_from_dict, run_checks
from paceline.errors import ConfigError
from paceline.plan.plan import MARGIN, RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.search import automatic
from paceline.search.automatic import Choice, apply_choice
from paceline.units import GIB

P = 1_000_000_000
MODEL = ModelFacts(
    blocks=(BlockFacts(parameters=P // 20, saved_bytes=2e8, input_bytes=1e7, product_bytes=8e7),) * 19,
    root=BlockFacts(parameters=P // 20, saved_bytes=1e8),
)
NO_BLOCKS = ModelFacts(blocks=(), root=BlockFacts(parameters=P, saved_bytes=4e9))


def config_of(memory: dict[str, Any] | None = None, **train: Any) -> Config:
    values = {
        "model": {"kind": "factory", "factory": "a:b"},
        "data": {"kind": "digits"},
        "parallel": {"strategy": "auto"},
        "memory": memory or {},
        "train": {"microbatch": 1, "precision": "fp32", **train},
    }
    return config_from_dict(values)


def room(
    gib: float, *, ranks: int = 8, node_ranks: int | None = None, device: str = "cuda", host: float = 2000
) -> RunMachine:
    return RunMachine(
        device=device,
        device_bytes=round(gib * GIB),
        host_bytes=round(host * GIB),
        ranks=ranks,
        node_ranks=node_ranks or ranks,
    )


def choose(where: RunMachine, model: ModelFacts = MODEL, **options: Any) -> Choice:
    return automatic.choose(config_of(**options), model, where)


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (80, "ddp"),  # 16 P and activations of 4 GB
        (20, "zero1"),  # 9 P
        (14, "zero2"),  # 5.5 P
        (9.5, "fsdp"),  # 2 P and three units
        (7, "fsdp, checkpoint matmuls"),
        (5, "fsdp, checkpoint full"),
        (4, "fsdp, checkpoint full, offload optimizer"),
        (3, "fsdp, checkpoint full, offload optimizer and activations"),
        (2.5, "fsdp, checkpoint full, offload optimizer and gradients and parameters and activations"),
    ],
)
def test_less_memory_takes_more_sharing(gib: float, expected: str) -> None:
    choice = choose(room(gib))
    assert choice.chosen.label == expected
    assert choice.chosen.memory.device_bytes <= gib * GIB * (1 - MARGIN)
    assert all(each.rejected for each in choice.ladder[: choice.ladder.index(choice.chosen)])
    assert choice.reason().startswith(f"parallel.strategy = auto: {expected}, about")


def test_hosts_share_among_themselves_first() -> None:
    across = choose(room(9.5, ranks=32, node_ranks=16))
    assert (across.chosen.layout.strategy, across.chosen.layout.shards) == ("hybrid", 16)
    config = apply_choice(config_of(), across)
    assert (config.parallel.strategy, config.parallel.shard_ranks) == ("hybrid", 16)
    assert choose(room(9.5, ranks=32)).chosen.layout.strategy == "fsdp"


def test_one_rank_has_nobody_to_share_with() -> None:
    labels = [each.label for each in choose(room(80, ranks=1)).ladder]
    assert labels[:3] == ["ddp", "ddp, checkpoint matmuls", "ddp, checkpoint full"]
    assert choose(room(14, ranks=1)).chosen.label == "fsdp, offload optimizer"  # zero1 keeps whole gradients


def test_a_model_without_blocks_is_not_checkpointed() -> None:
    assert all(each.layout.checkpoint_activations == "none" for each in choose(room(80), NO_BLOCKS).ladder)


def test_cpu_ranks_do_not_offload() -> None:
    assert all(not each.layout.offload.is_any for each in choose(room(80, device="cpu")).ladder)


def test_the_host_has_limits_too() -> None:
    with pytest.raises(ConfigError, match="the host's memory is too small"):
        choose(room(4, host=5))


def test_what_is_asked_for_is_kept() -> None:
    full = choose(room(80), memory={"checkpoint_activations": "full"})
    assert {each.layout.checkpoint_activations for each in full.ladder} == {"full"}
    none = {"checkpoint_activations": "none", "offload": []}
    with pytest.raises(ConfigError, match="nothing fits"):
        choose(room(6), memory=none)
    offload = choose(room(80), memory={"offload": ["optimizer"]})
    assert {each.layout.offload.parts for each in offload.ladder} == {("optimizer",)}
    assert offload.chosen.layout.strategy == "zero1"


def test_a_microbatch_to_be_found_counts_as_one_sample() -> None:
    assert choose(room(80), microbatch="auto", global_batch=64).chosen.layout.microbatch == 1
    assert choose(room(80), microbatch=None, global_batch=64).chosen.layout.microbatch == 8
    assert choose(room(40), microbatch=None, global_batch=64).chosen.layout.strategy != "ddp"
    assert choose(room(40), microbatch="auto", global_batch=64).chosen.layout.strategy == "ddp"


def test_where_nothing_fits_the_nearest_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        choose(room(1), microbatch=4)
    (problem,) = caught.value.problems
    assert "nothing fits into 921.6 MiB" in problem.what
    assert "fsdp, checkpoint full, offload" in problem.what
    assert "train.microbatch = 2 or auto" in problem.fix


def test_a_choice_is_plain_data_and_a_sound_config() -> None:
    choice = choose(room(5))
    values = json.loads(json.dumps(choice.to_json()))
    assert values["chosen"] == choice.chosen.label
    assert len(values["ladder"]) == len(choice.ladder)
    assert values["ladder"][0]["memory"]["device_bytes"] == choice.ladder[0].memory.device_bytes
    config = apply_choice(config_of(), choice)
    assert config.memory.checkpoint_activations == "full"
    assert run_checks(config) == []


@given(
    gib=st.floats(0.5, 200),
    ranks=st.sampled_from([1, 2, 8, 64]),
    hosts=st.sampled_from([1, 2]),
    microbatch=st.integers(1, 64),
)
def test_the_first_that_fits_is_taken(gib: float, ranks: int, hosts: int, microbatch: int) -> None:
    where = room(gib, ranks=ranks, node_ranks=max(1, ranks // hosts))
    try:
        choice = choose(where, microbatch=microbatch)
    except ConfigError:
        return
    fitting = [each for each in choice.ladder if each.memory.device_bytes <= choice.where.budget_bytes]
    assert choice.chosen == fitting[0] or "host" in fitting[0].rejected
    assert run_checks(apply_choice(config_of(microbatch=microbatch), choice)) == []


def test_real_models() -> None:
    """A GPT of 7 billion parameters on eight GPUs of 80 GiB: the parameters alone in 16 bytes are 103 GiB."""
    values = {
        "model": {"kind": "gpt", "size": "gpt-7b"},
        "data": {"kind": "synthetic_tokens", "vocab_size": 50_000, "context": 2048},
        "parallel": {"strategy": "auto"},
        "train": {"precision": "bf16", "microbatch": 1},
    }
    config = config_from_dict(values)
    model = describe_model(config, "cuda")
    assert model is not None
    choice = automatic.choose(config, model, room(80))
    assert choice.chosen.layout.strategy in ("zero2", "fsdp")
    assert [each.layout.strategy for each in choice.ladder[:2]] == ["ddp", "zero1"]
