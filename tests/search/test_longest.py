"""The longest sequences that fit, rung by rung; and ``memory: auto``, which climbs the same rungs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.detect import Machine
from paceline.cluster.devices import load_cluster
from paceline.config import Config, config_from_dict, layout_of
from paceline.errors import ConfigError, UsageError
from paceline.plan.plan import RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.search.automatic import RUNGS, Choice, apply_choice, choose
from paceline.search.longest import STEP, longest
from paceline.units import GIB

H200 = load_cluster("1x h200")
HERE = Machine(processor="", cores=16, memory_bytes=0, gpus=("NVIDIA H200",), gpu_memory_bytes=(140 * GIB,))


def config_of(tokens: int = 2048, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"kind": "gpt", "size": "gpt-1.1b", "context": tokens, "compile": True},
        "data": {"kind": "synthetic_tokens", "context": tokens, "vocab_size": 32_000},
        "train": {"global_batch": 1, "precision": "bf16_master"},
        "parallel": {"device": "cuda", "ranks": 1},
    }
    return config_from_dict(values | sections)


def decided(config: Config, *, gib: float = 139.8, host: float = 128, ranks: int = 1) -> Choice:
    model = describe_model(config, "cuda")
    assert model is not None
    where = RunMachine(
        device="cuda", device_bytes=round(gib * GIB), host_bytes=round(host * GIB), ranks=ranks, node_ranks=ranks
    )
    return choose(config, model, where, HERE)


def test_every_rung_fits_up_to_its_length_and_not_beyond() -> None:
    found = longest(config_of(), H200, 1, host_bytes=128 * GIB)
    assert [each.label for each in found.rungs[:3]] == ["nothing", "checkpoint matmuls", "MLPs in tiles"]
    for rung in found.rungs:
        needs = []
        for tokens in (rung.tokens, rung.tokens + STEP):
            parts: dict[str, dict[str, Any]] = {"memory": {}, "parallel": {"device": "cuda", "ranks": 1}}
            for key, value in rung.keys.items():
                section, _, name = key.partition(".")
                parts[section][name] = value
            config = config_of(tokens, **parts)
            facts = describe_model(config, "cuda")
            assert facts is not None
            needs.append(estimate_memory(facts, layout_of(config, 1), StateFacts.of(config, "cuda")))
        assert needs[0].device_bytes <= found.budget_bytes
        assert needs[0].host <= 0.9 * 128 * GIB
        assert needs[1].device_bytes > found.budget_bytes or needs[1].host > 0.9 * 128 * GIB
    reached = [each.tokens for each in found.rungs]
    assert reached[0] < 90_000 < 524_288 < reached[RUNGS.index(RUNGS[5])] < 1_048_576 < max(reached)
    assert found.rungs[0].price == 0
    assert all(0 <= each.price < 0.3 for each in found.rungs)


def test_what_is_set_stays() -> None:
    memory = {"checkpoint_activations": "full", "mlp_tiles": 1, "offload": []}
    (rung,) = longest(config_of(memory=memory), H200, 1).rungs
    assert rung.label == "checkpoint full"


def test_images_have_no_length() -> None:
    images = {"model": {"kind": "resnet", "depth": 18}, "data": {"kind": "synthetic_images", "size": 32}}
    with pytest.raises(UsageError, match="it is for rows of tokens"):
        longest(config_of(**images), H200, 1)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (65_536, "ddp"),
        (98_304, "ddp, checkpoint matmuls"),
        (131_072, "ddp, MLPs in tiles"),
        (262_144, "ddp, checkpoint every_2, MLPs in tiles"),
        (524_288, "ddp, checkpoint full"),
        (1_048_576, "ddp, checkpoint full, MLPs in tiles, offload activations"),
    ],
)
def test_memory_auto_climbs_as_far_as_a_sequence_needs(tokens: int, expected: str) -> None:
    config = config_of(tokens, memory="auto")
    choice = decided(config)
    assert choice.chosen.label == expected
    assert choice.reason().startswith(f"memory = auto: {expected}, about ")
    assert all(each.rejected for each in choice.ladder[: choice.ladder.index(choice.chosen)])
    taken = apply_choice(config, choice)
    assert replace(layout_of(taken, 1), compile="whole") == choice.chosen.layout
    assert not taken.is_open


def test_a_strategy_that_is_given_stays_and_one_that_is_not_is_open() -> None:
    batch = {"global_batch": 4, "precision": "bf16_master"}
    parallel = {"device": "cuda", "ranks": 4, "strategy": "zero2"}
    given = config_of(65_536, memory="auto", parallel=parallel, train=batch)
    assert {each.layout.strategy for each in decided(given, gib=40, ranks=4).ladder} == {"zero2"}
    assert apply_choice(given, decided(given, gib=40, ranks=4)).parallel.strategy == "zero2"
    split = config_of(65_536, memory="auto", parallel={"device": "cuda", "ranks": 2, "tensor": 2})
    assert {each.layout.tensor for each in decided(split, gib=60, ranks=2).ladder} == {2}
    free = decided(config_of(2048, memory="auto"), gib=16)
    assert free.chosen.layout.offload.moves_states
    assert apply_choice(config_of(2048, memory="auto"), free).parallel.strategy == free.chosen.layout.strategy


def test_what_fits_without_a_margin_is_not_refused() -> None:
    config = config_of(65_536, memory={"auto": True, "checkpoint_activations": "none", "mlp_tiles": 1, "offload": []})
    need = decided(config).chosen.memory_bytes / GIB
    assert decided(config, gib=1.01 * need).chosen.label == "ddp"
    with pytest.raises(ConfigError, match="nothing fits"):
        decided(config, gib=0.99 * need)
    with pytest.raises(ConfigError, match="the host's memory is too small"):
        decided(config_of(1_048_576, memory="auto"), host=64)
