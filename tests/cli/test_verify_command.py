"""``paceline verify``: its options reach the certificate, its exit codes, and wrong input before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import verify as module
from paceline.plan.layout import Layout
from paceline.plan.rule_case import MEANINGS
from paceline.verify import certificate as certificates

Call = Callable[..., Any]

CONFIG = """
name: small
model: {kind: mlp, hidden_dim: 8, dropout: 0.5}
data: {kind: synthetic_classification, samples: 64, features: 6, classes: 3}
train: {steps: 3, global_batch: 8}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file in the current folder; its data is quickly made."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_processes", "run_virtual", "run_reference"):
        monkeypatch.setattr(certificates, name, None)


def verified(call: Call, *arguments: str) -> dict[str, Any]:
    called = call("verify", *arguments, "--json")
    assert called.code == 0, called.err + called.out
    found: dict[str, Any] = json.loads(called.out)
    assert found["passed"] is True
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid"])
def test_every_strategy_is_verified(call: Call, config: Path, strategy: str) -> None:
    found = verified(call, str(config), "--strategy", strategy, "--ranks", "4", "--accumulate", "3", "--clip", "0.5")
    assert (found["strategy"], found["ranks"], found["accumulate"], found["clip"]) == (strategy, 4, 3, 0.5)
    assert found["shard_ranks"] == (2 if strategy == "hybrid" else None)
    assert (found["measure"], found["tolerance"], found["dtype"]) == ("absolute", 1e-10, "float64")
    assert max(found["errors"].values()) < 1e-12
    assert found["batch"] == 25  # ragged: one over


@pytest.mark.parametrize("precision", ["bf16", "bf16_master", "fp16"])
def test_the_bound_of_mixed_precision_is_stated(call: Call, config: Path, precision: str) -> None:
    options = ["--strategy", "fsdp", "--precision", precision, "--ranks", "2", "--steps", "2"]
    found = verified(call, str(config), *options)
    assert (found["precision"], found["measure"]) == (precision, "relative")
    assert found["tolerance"] == (2.0**-15 if precision == "fp16" else 2.0**-12)
    assert found["bound"].startswith("the same roundings to ")
    shown = call("verify", str(config), *options)
    assert "largest relative difference" in shown.out
    assert f"allowed: {found['tolerance']:.3g} (the same roundings" in " ".join(shown.out.split())


@pytest.mark.some(1)
@pytest.mark.parametrize("options", [["--tensor", "2"], ["--pipeline", "2", "--accumulate", "2"]])
def test_split_models_of_fp8_are_within_one_rounding(call: Call, options: list[str]) -> None:
    """Tensor ranks cast parts of weights by themselves, and sum what they get in bf16."""
    found = verified(call, "gpt", *options, "--ranks", "2", "--precision", "fp8", "--steps", "1", "--batch", "8")
    assert (found["precision"], found["tolerance"]) == ("fp8", 2.0**-4)
    assert 0.0 < found["errors"]["gradients"] < 2.0**-5


@pytest.mark.exhaustive
def test_built_in_models_can_be_checkpointed(call: Call) -> None:
    """Even the one that has no repeated blocks."""
    found = verified(call, "mlp", "--strategy", "fsdp", "--ranks", "2", "--checkpoint-activations", "--clip", "none")
    assert (found["case"], found["checkpoint_activations"], found["clip"]) == ("mlp", "full", None)
    found = verified(call, "mlp", "--ranks", "2", "--checkpoint-policy", "every_2", "--steps", "1")
    assert found["checkpoint_activations"] == "every_2"


def test_batch_norm_is_verified_with_microbatches(call: Call) -> None:
    found = verified(call, "resnet", "--strategy", "zero2", "--ranks", "2", "--accumulate", "2", "--steps", "1")
    assert found["reference"] == "one process on batches in 2 pieces"
    assert 0.0 < found["errors"]["buffers"] < 1e-12


def test_what_the_config_says_about_sharding_is_verified(
    call: Call, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    parallelize = certificates.run_distributed.__globals__["parallelize"]

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["layout"])
        return parallelize(*args, **kwargs)

    monkeypatch.setattr(import_module("paceline.verify.runs"), "parallelize", noted)
    changes = ["parallel.strategy=fsdp", "parallel.units=[layers.1]", "parallel.prefetch=2"]
    found = verified(call, str(config), *changes, "--ranks", "2", "--steps", "1")
    assert found["strategy"] == "fsdp"
    assert (asked[0].strategy, asked[0].units, asked[0].prefetch) == ("fsdp", ("layers.1",), 2)
    # An option goes before the config, and what belongs to the config's strategy is left out.
    changes = ["parallel.strategy=hybrid", "parallel.shard_ranks=2"]
    assert verified(call, str(config), *changes, "--strategy", "zero1", "--steps", "1")["shard_ranks"] is None
    found = verified(call, str(config), *changes, "--shard-ranks", "4", "--steps", "1")
    assert (found["strategy"], found["shard_ranks"]) == ("hybrid", 4)
    # Values of several types are written as in a config.
    options = ["--units", "[layers.1]", "--reshard-after-forward", "false", "--no-overlap", "--bucket-mb", "0.5"]
    verified(call, str(config), "--strategy", "fsdp", *options, "--ranks", "2", "--steps", "1")
    layout = asked[-1]
    assert (layout.units, layout.reshard_after_forward, layout.overlap) == (("layers.1",), False, False)
    assert layout.bucket_mb == 0.5


def test_a_config_of_mixed_precision_is_verified_in_float64_unless_asked(call: Call, config: Path) -> None:
    found = verified(call, str(config), "train.precision=bf16", "--ranks", "2", "--steps", "1")
    assert (found["precision"], found["dtype"]) == ("fp32", "float64")


def test_a_mismatch_ends_with_code_1_and_names_the_place(call: Call, config: Path) -> None:
    called = call("verify", str(config), "--strategy", "fsdp", "--ranks", "3", "--tolerance", "1e-30")
    assert called.code == 1
    assert called.out.startswith("FAILED")
    assert "first divergence: step 0, " in called.out
    found = json.loads(call("verify", str(config), "--ranks", "3", "--tolerance", "1e-30", "--json").out)
    assert found["passed"] is False
    assert found["divergence"]["step"] == 0


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--strategy", "fsdb", "--ranks", "0"], ["strategy = 'fsdb' is unknown", "did you mean fsdp?", "ranks = 0"]),
        (["--pipeline", "0"], ["pipeline = 0", "give 1 or more"]),
        (["--strategy", "hybrid", "--ranks", "3"], ["strategy = hybrid on 3 ranks of one host, without shard_ranks"]),
        (["--strategy", "fsdp", "--shard-ranks", "2"], ["shard_ranks = 2 has no effect with strategy = fsdp"]),
        (["--shard-ranks", "-1"], ["shard_ranks = -1"]),
        (["--precision", "fp9", "--accumulate", "0"], ["precision = 'fp9' is unknown", "accumulate = 0"]),
        (["--checkpoint-policy", "some"], ["checkpoint_activations = 'some' is unknown"]),
        (["--clip", "0"], ["clip = 0.0", "give a number above 0, or none"]),
        (["--clip", "one"], ["--clip one is not a number", "or none"]),
        (["--backend", "nccl", "--batch", "0"], ["backend = 'nccl' is unknown", "batch = 0"]),
        (["parallel.strategy=auto"], ["strategy = 'auto'", "give one of ddp, zero1"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith(("-", "parallel")) else "",
)
def test_wrong_input_is_refused_before_anything_starts(
    call: Call, config: Path, arguments: list[str], messages: list[str]
) -> None:
    called = call("verify", str(config), *arguments)
    assert called.code == 2
    assert called.out == ""
    for message in messages:
        assert message in called.err


@pytest.mark.usefixtures("nothing_starts")
def test_an_unknown_case_is_refused_with_the_nearest(call: Call) -> None:
    called = call("verify", "restnet")
    assert called.code == 2
    assert "did you mean resnet?" in called.err


@pytest.mark.usefixtures("nothing_starts")
def test_a_wrong_override_of_a_built_in_case_is_told_by_its_name(call: Call) -> None:
    called = call("verify", "gpt", "model.heads=7")
    assert called.code == 2
    assert called.err.startswith("paceline: the built-in case gpt: ")


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_the_built_in_gpt_has_heads_for_any_number_of_tensor_ranks(ranks: int) -> None:
    config = module._load("gpt", module._large_enough({"tensor": ranks}))
    model = config.model
    assert model.kind == "gpt"
    assert model.width is not None
    assert model.heads == model.kv_heads == ranks
    assert (model.width >= 64, model.width % (2 * ranks)) == (True, 0)


def test_every_field_of_the_layout_is_an_option_with_the_words_of_the_config(call: Call) -> None:
    shown = " ".join(call("verify", "--help").out.split())
    for name in {each.name for each in fields(Layout)} - set(module._NOT_VERIFIED):
        spelled = {"checkpoint_activations": "checkpoint-policy", "context_ranks": "context"}
        option = f"--{spelled.get(name, name.replace('_', '-'))}"
        assert f"{option} " in shown.replace(",", " ")
        assert MEANINGS[name].partition(";")[0][1:] in shown
    assert "--clip" in shown
    assert "--checkpoint-activations" in shown
    assert set(module.BUILT_IN) == {"mlp", "gpt", "resnet"}
