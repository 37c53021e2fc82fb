"""Explain: every key once, with the right origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import ExplainRow, config_from_dict, dump_yaml, explain, load_config, load_config_with_sources
from paceline.config.load import leaf_values
from paceline.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def rows_of(name: str, *overrides: str, ranks: int | None = None) -> dict[str, ExplainRow]:
    rows = explain(load_config_with_sources(CONFIGS / name, overrides), ranks)
    found = {row.key: row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("name", ["digits.yaml", "gpt_pydoc.yaml", "gpt_fsdp.yaml", "resnet_images.yaml"])
def test_every_key_is_explained_and_given_values_are_kept(name: str) -> None:
    rows = rows_of(name, ranks=2)
    for key, value in leaf_values(load_config(CONFIGS / name)).items():
        if value is not None and key != "parallel.ranks":
            assert rows[key].value == value, key
    assert all(
        row.origin.split(":")[0].split(" ")[0] in ("file", "override", "default", "derived") for row in rows.values()
    )


def test_origins() -> None:
    rows = rows_of("digits.yaml", "optim.lr=1e-3", ranks=2)
    assert rows["optim.lr"].origin == "override"
    assert rows["model.hidden_dim"].origin.startswith(f"file {CONFIGS / 'digits.yaml'}:")
    assert rows["optim.eps"].origin == "default"
    assert rows["train.microbatch"].value == 32
    assert rows["train.microbatch"].origin == (
        "derived: train.global_batch / (train.accumulate x parallel.ranks) = 64 / (1 x 2)"
    )


def test_batch_is_derived_in_every_direction() -> None:
    rows = rows_of("digits.yaml", "train.global_batch=null", "train.microbatch=8", "train.accumulate=3", ranks=2)
    assert rows["train.global_batch"].value == 48
    assert rows["train.global_batch"].origin.endswith("= 8 x 3 x 2")
    assert rows["derived.samples_per_rank_and_step"].value == 24
    rows = rows_of("digits.yaml", "train.microbatch=8", ranks=2)
    assert rows["train.accumulate"].value == 4
    assert rows["train.accumulate"].origin.endswith("= 64 / (8 x 2)")


def test_ranks() -> None:
    assert rows_of("digits.yaml")["parallel.ranks"].value == "auto"
    assert rows_of("digits.yaml")["train.microbatch"].value is None
    assert "give the ranks" in rows_of("digits.yaml")["train.microbatch"].origin
    assert rows_of("digits.yaml", ranks=4)["parallel.ranks"].value == 4
    assert rows_of("gpt_pydoc.yaml")["train.microbatch"].value == 8
    assert rows_of("gpt_pydoc.yaml", ranks=4)["train.microbatch"].value == 4
    assert "the config says 2" in rows_of("gpt_pydoc.yaml", ranks=4)["parallel.ranks"].origin
    with pytest.raises(ConfigError, match="not a multiple"):
        rows_of("digits.yaml", ranks=3)


def test_learning_rate_and_length() -> None:
    rows = rows_of("gpt_pydoc.yaml", "optim.lr=0.5", "optim.schedule.final_ratio=0.1")
    assert rows["derived.peak_lr"].value == 0.5
    assert rows["derived.final_lr"].value == pytest.approx(0.05)
    assert rows["derived.samples_of_the_run"].value == 3200
    assert rows["optim.schedule.length"].value == 200
    rows = rows_of("digits.yaml", "train.epochs=null")
    assert rows["train.epochs"].value == 1
    assert rows["train.epochs"].origin.startswith("derived")


def test_a_rate_that_grows_with_the_batch() -> None:
    asked = ["train.global_batch=128", "optim={lr: 0.5, lr_batch: 32, lr_scaling: sqrt, schedule: {kind: cosine}}"]
    rows = rows_of("digits.yaml", *asked)
    assert rows["derived.peak_lr"].value == 1.0
    assert rows["derived.peak_lr"].origin == "derived: optim.lr x sqrt(128 / 32)"
    assert rows["derived.final_lr"].origin.startswith("derived: derived.peak_lr x optim.schedule.final_ratio = 1 x")
    assert rows_of("digits.yaml", *asked, "optim.lr_scaling=linear")["derived.peak_lr"].value == 2.0
    waiting = rows_of("digits.yaml", *asked, "train.global_batch=null")["derived.peak_lr"]
    assert waiting.value is None
    assert "give the ranks" in waiting.origin


def test_a_searched_microbatch_is_found_when_the_run_starts() -> None:
    rows = rows_of("digits.yaml", "train.microbatch=auto", ranks=2)
    assert rows["train.microbatch"].value is None
    assert "at most 32" in rows["train.microbatch"].origin
    assert rows["train.accumulate"].value is None


def test_buckets_that_are_measured_have_no_size_yet() -> None:
    row = rows_of("digits.yaml", "comm.bucket_mb=auto")["comm.bucket_mb"]
    assert row.value is None
    assert "the times of the first steps" in row.origin
    row = rows_of("digits.yaml", "comm.bucket_mb=auto", "parallel.strategy=zero1")["comm.bucket_mb"]
    assert "latency is a tenth" in row.origin
    assert rows_of("digits.yaml", "comm.bucket_mb=8")["comm.bucket_mb"].value == 8.0


def test_sharding() -> None:
    rows = rows_of("digits.yaml", "parallel={strategy: hybrid, ranks: 4, node_ranks: 2}")
    assert rows["parallel.shard_ranks"].value == 2
    assert rows["derived.copies_of_the_model"].value == 2
    assert rows_of("digits.yaml", "parallel.strategy=fsdp", ranks=4)["derived.copies_of_the_model"].value == 1
    assert "derived.strategy" not in rows
    rows = rows_of("digits.yaml", "parallel={strategy: zero1, device: cpu}", "memory.offload=[optimizer]", ranks=1)
    assert rows["derived.offload"].value == []
    assert "derived.strategy" not in rows  # what is offloaded are shards
    row = rows_of("digits.yaml", "parallel.strategy=zero1", ranks=1)["derived.strategy"]
    assert row.value == "ddp"
    assert row.origin.startswith("derived: parallel.strategy = zero1 runs as ddp: one rank has nobody")


def test_what_model_and_data_take_from_each_other() -> None:
    rows = rows_of("digits.yaml", "train.seed=7")
    assert rows["model.input_dim"].value == 64
    assert rows["model.num_classes"].value == 10
    assert rows["data.seed"].value == 7
    rows = rows_of("gpt_pydoc.yaml", "model={kind: gpt, size: gpt-nano}")
    assert rows["model.layers"].value == 4
    assert rows["model.layers"].origin == "derived: model.size = gpt-nano"
    assert rows["data.context"].value == 64
    assert rows["model.vocab_size"].value is None
    rows = rows_of("gpt_pydoc.yaml", "model.context=null", "data.context=32")
    assert rows["model.context"].value == 32


def test_a_config_without_a_file() -> None:
    config = config_from_dict({"model": {"kind": "mlp", "hidden_dim": 8}, "data": {"kind": "digits"}})
    rows = {row.key: row for row in explain(config, ranks=1)}
    assert rows["model.hidden_dim"].origin == "given"
    assert rows["model.dropout"].origin == "default"
    assert rows["train.global_batch"].value == 64
    assert "hidden_dim: 8" in dump_yaml(config)
