"""Configs and options of other frameworks and scripts, as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train import translate_options
from paceline.config import config_from_dict
from paceline.config.suggest import translate_config, translate_setting
from paceline.errors import ConfigError

KNOWN = ["--resume", "--force", "--auto-batch-size"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("strategy", "fsdp", {"parallel.strategy": "fsdp"}),
        ("batch_size", 32, {"train.microbatch": "32", "train.global_batch": "null"}),
        ("global-batch-size", 32, {"train.global_batch": "32"}),
        ("epochs", 10, {"train.epochs": "10"}),
        ("total_epochs", 10, {"train.epochs": "10"}),
        ("save_frequency", 5, {"checkpoint.every_epochs": "5"}),
        ("mixed_precision", True, {"train.precision": "auto"}),
        ("gradient_clip", 1.0, {"optim.clip_norm": "1.0"}),
        ("activation_checkpointing", True, {"memory.checkpoint_activations": "full"}),
        ("checkpoint_dir", "./checkpoints", {"checkpoint.folder": "./checkpoints"}),
        ("cpu_offload", True, {"memory.offload": "[optimizer, parameters]"}),
        ("lr", 0.1, {"optim.lr": "0.1"}),
        ("seed", 3, {"train.seed": "3"}),
        ("num_gpus", 4, {"parallel.ranks": "4"}),
        ("model", "transformer", {"model.kind": "gpt"}),
        ("model", "resnet", {"model.kind": "resnet"}),
        ("zero_redundancy", "stage_2", {"parallel.strategy": "zero2"}),
        ("pipeline_parallelism", False, {"parallel.pipeline": "1"}),
        ("communication_pattern", "tree", {"comm.algorithm": "tree"}),
        ("compression_ratio", 0.01, {"comm.compression": "{policy: topk, ratio: 0.01}"}),
        ("train", True, {}),
        ("deepspeed", "ds.json", {}),
    ],
)
def test_a_setting_of_others_is_one_of_ours(name: str, value: Any, expected: dict[str, str]) -> None:
    assert translate_setting(name, value) == expected


def test_a_config_of_others_becomes_one_that_is_sound() -> None:
    theirs = {
        "model": "transformer",
        "batch_size": 32,
        "num_gpus": 4,
        "pipeline_parallelism": True,
        "zero_redundancy": True,
        "sharding_strategy": "auto",
        "communication_pattern": "ring",
        "horovod": True,
        "optim": {"lr": 0.01},
    }
    values, notes = translate_config(theirs)
    config = config_from_dict(values)
    assert (config.model.kind, config.data.kind, config.train.microbatch) == ("gpt", "text", 32)
    assert (config.parallel.ranks, config.parallel.pipeline, config.parallel.strategy) == (4, 2, "zero1")
    assert (config.comm.algorithm, config.optim.lr) == ("ring", 0.01)
    told = "\n".join(notes)
    for line in (
        "batch_size = 32: taken for the batch of a rank",
        "it could be parallel.strategy = zero2 or parallel.strategy = fsdp",
        "sharding_strategy = 'auto': left out, as parallel.strategy and parallel.pipeline decide it",
        "horovod = True: left out",
        "the file names no data",
        "the file names no length",
    ):
        assert line in told


@pytest.mark.parametrize("theirs", [{}, {"model": "cnn", "epochs": 2}, {"sharding_strategy": "auto", "num_gpus": 2}])
def test_what_a_config_of_others_does_not_say_is_filled_up(theirs: dict[str, Any]) -> None:
    values, _ = translate_config(theirs)
    config_from_dict(values)
    assert values.get("parallel", {}).get("sharding_strategy") == theirs.get("sharding_strategy")


def test_the_options_of_a_script_become_overrides() -> None:
    words = "tiny.yaml --strategy ddp --batch-size 32 --mixed-precision --epochs=3 optim.lr=0.1 --checkpoint-dir ck"
    config, overrides, notes = translate_options(words.split(), KNOWN)
    assert config == Path("tiny.yaml")
    assert overrides == [
        "parallel.strategy=ddp",
        "train.microbatch=32",
        "train.global_batch=null",
        "train.precision=auto",
        "train.epochs=3",
        "optim.lr=0.1",
        "checkpoint.folder=ck",
    ]
    assert notes[1] == "--batch-size 32: read as train.microbatch=32 train.global_batch=null"
    assert len(notes) == 5


@pytest.mark.parametrize("words", ["--config a.yaml --amp", "--amp a.yaml", "a.yaml --amp"])
def test_a_config_is_found_wherever_it_stands(words: str) -> None:
    assert translate_options(words.split(), KNOWN)[:2] == (Path("a.yaml"), ["train.precision=auto"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategy ddp", "no config among the arguments"),
        ("optim.lr=1", "no config among the arguments"),
        ("a.yaml --config b.yaml", "a.yaml and b.yaml are configs"),
    ],
)
def test_one_config_is_needed(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate_options(words.split(), KNOWN)


def test_a_file_of_others_is_refused_with_the_command_that_translates_it() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"batch_size": 32, "num_gpus": 4, "model": {"kind": "mlp"}, "data": {"kind": "digits"}})
    assert str(caught.value).count("for the whole file: paceline config import FILE") == 1
