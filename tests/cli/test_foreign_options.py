"""Options of other launchers: what is proposed in their place goes with the config, when it is pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paceline.cli.foreign_options import refuse_options
from paceline.config import load_config
from paceline.config.suggest import _OTHER_NAMES
from paceline.errors import ConfigError, Problem

CONFIGS = Path(__file__).parents[2] / "configs"
VALUES = {
    "--zero-stage": "2",
    "--mixed-precision": "bf16",
    "--compression-ratio": "0.1",
    "--batch-size": "32",
    "--communication-pattern": "ring",
    "--world-size": "2",
    "--strategy": "fsdp",
    "--learning-rate": "0.01",
    "--max-steps": "50",
    "--num-epochs": "2",
    "--gradient-accumulation-steps": "4",
    "--seed": "7",
}
FLAGS = ["--cpu-offload", "--activation-checkpointing", "--fp16", "--bf16", "--amp", "--zero", "--pipeline-parallel"]


def problem_of(name: str, *words: str) -> Problem:
    with pytest.raises(ConfigError) as refused:
        refuse_options([str(CONFIGS / name), *words], ["--resume"])
    return refused.value.problems[0]


@pytest.mark.parametrize("name", ["digits.yaml", "gpt_pydoc.yaml", "gpt_pipeline.yaml", "resnet_images.yaml"])
def test_what_is_proposed_in_place_of_an_option_is_accepted_when_it_is_pasted(name: str) -> None:
    pasted = 0
    for words in [*VALUES.items(), *((flag,) for flag in FLAGS)]:
        fix = problem_of(name, *words).fix
        for way in fix.removeprefix("write ").split(" or ") if fix.startswith("write ") else ():
            load_config(CONFIGS / name, shlex.split(way))
            pasted += 1
    assert pasted > len(VALUES)


def test_a_list_is_quoted_and_offload_comes_with_shards() -> None:
    proposed = "write parallel.strategy=fsdp 'memory.offload=[optimizer, parameters]'"
    assert problem_of("digits.yaml", "--cpu-offload").fix == proposed
    sharded = problem_of("digits.yaml", "parallel.strategy=fsdp", "--cpu-offload")
    assert sharded.fix == "write 'memory.offload=[optimizer, parameters]'"


def test_what_the_model_cannot_do_is_left_out_with_the_reason() -> None:
    problem = problem_of("digits.yaml", "--activation-checkpointing")
    assert problem.fix == "leave it out"
    assert "it works on the repeated blocks of a model, and an mlp has none" in problem.rule
    assert problem_of("gpt_pydoc.yaml", "--activation-checkpointing").fix == "write memory.checkpoint_activations=full"


def test_every_name_of_others_leads_to_a_key_that_there_is() -> None:
    for names in _OTHER_NAMES.values():
        for name in names.split():
            assert "=" in problem_of("gpt_pydoc.yaml", f"--{name.replace('_', '-')}").fix, name
