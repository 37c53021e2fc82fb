"""Options of other launchers: what they are read as goes with the config, also when it is pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paceline.cli.train import translate_options
from paceline.config import load_config
from paceline.config.suggest import other_names
from paceline.errors import ConfigError

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
FLAGS = ["--cpu-offload", "--activation-checkpointing", "--fp16", "--bf16", "--amp"]
# What these do not go with is a rule of the config, which says so.
REFUSED = {
    ("digits.yaml", "--cpu-offload"): "offload",
    ("gpt_pydoc.yaml", "--cpu-offload"): "offload",
    ("digits.yaml", "--activation-checkpointing"): "an mlp has none",
}


@pytest.mark.parametrize("name", ["digits.yaml", "gpt_pydoc.yaml"])
@pytest.mark.parametrize("words", [*VALUES.items(), *((flag,) for flag in FLAGS)], ids=lambda words: words[0])
def test_what_an_option_is_read_as_can_be_pasted_and_goes_with_the_config(name: str, words: tuple[str, ...]) -> None:
    path, overrides, notes = translate_options([str(CONFIGS / name), *words], ["--resume"])
    (note,) = notes
    assert shlex.split(note.partition(": read as ")[2]) == overrides
    reason = REFUSED.get((name, words[0]))
    if reason is None:
        load_config(path, overrides)
        return
    with pytest.raises(ConfigError, match=reason):
        load_config(path, overrides)


def test_offload_goes_with_shards() -> None:
    words = [str(CONFIGS / "digits.yaml"), "--strategy", "fsdp", "--cpu-offload"]
    path, overrides, _ = translate_options(words, ["--resume"])
    assert load_config(path, overrides).memory.offload


def test_every_name_of_others_leads_to_a_key_that_there_is() -> None:
    for names in other_names()["keys"].values():
        for name in names.split():
            try:
                _, found, _ = translate_options([str(CONFIGS / "digits.yaml"), f"--{name.replace('_', '-')}"], [])
            except ConfigError as error:
                found = [error.problems[0].fix]
            assert any("=" in each for each in found), name
