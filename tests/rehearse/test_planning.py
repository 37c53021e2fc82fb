"""``paceline.plan``: every kind of model, what comes back, and what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_model import Own
from torch import nn

import paceline
from paceline.cluster.devices import load_cluster
from paceline.config import Config, config_from_dict, load_config
from paceline.errors import ConfigError, UsageError
from paceline.rehearse.planning import trace_plan

ROOT = Path(__file__).parents[2]
VALUES: dict[str, Any] = {
    "name": "small",
    "model": {"kind": "gpt", "layers": 4, "heads": 4, "width": 256, "vocab_size": 512},
    "data": {"kind": "synthetic_tokens", "vocab_size": 512, "context": 128, "samples": 64},
    "train": {"global_batch": 16, "steps": 2},
}
DATA = ["data.kind=synthetic_classification", "data.features=64", "data.classes=10", "train.global_batch=64"]


def make_own() -> nn.Module:
    return Own(width=512)


def test_a_config_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "small.json.yaml"
    path.write_text(json.dumps(VALUES))
    config = config_from_dict(VALUES)
    sources: list[Any] = [VALUES, config, path, str(path)]
    found = [paceline.plan(source, "dgx-a100") for source in sources]
    texts = {each.to_text() for each in found}
    assert len(texts) == 1
    assert len({json.dumps(each.to_json()) for each in found}) == 1
    first = found[0]
    assert first.winner is first.plans[0]
    assert first.explanations(3)[0].startswith(str(first.winner) if first.winner else "")
    assert len(first.explanations(3)) == 3
    assert paceline.plan(config, load_cluster("dgx-a100")).to_text() in texts
    assert paceline.plan(VALUES, "dgx-a100", overrides=["train.global_batch=32"]).request.tasks[0].global_batch == 32


def test_the_first_plan_is_a_config_that_trains(tmp_path: Path) -> None:
    found = paceline.plan(VALUES, "dgx-a100")
    assert isinstance(found.config, Config)
    path = tmp_path / "plan.yaml"
    path.write_text(found.to_yaml())
    assert load_config(path) == found.config
    assert found.winner is not None
    assert found.config.train.microbatch == found.winner.layout.microbatch
    assert found.config.parallel.ranks == 8


def test_the_first_plan_has_a_time_line(tmp_path: Path) -> None:
    found = paceline.plan(VALUES, "dgx-a100")
    replayed = trace_plan(found, tmp_path / "step.json")
    assert replayed.seconds > 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)


def test_scaling_and_prices() -> None:
    found = paceline.plan(VALUES, "dgx-a100", gpus=[1, 8], price=2.0, by="cost")
    assert set(found.scaling) == {"strong", "weak"}
    assert [row.devices for row in found.scaling["strong"]] == [1, 8]
    cheapest = found.cheapest_row()
    assert cheapest is not None
    assert cheapest.devices == 1  # eight devices share a step that one has waited most of
    assert found.winner is not None
    cost = found.cost_of(found.winner)
    assert cost["per_step"] == pytest.approx(2.0 * cost["hours_per_step"])


def test_a_hugging_face_model_by_its_values() -> None:
    values = {"model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8}
    values |= {"num_attention_heads": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1000}
    values |= {"max_position_embeddings": 512}
    found = paceline.plan(values, "dgx-a100", overrides=["train.global_batch=64"])
    assert found.winner is not None
    assert "experts: 4" in found.to_yaml()


def test_a_function_that_makes_a_module() -> None:
    found = paceline.plan(make_own, "dgx-a100", overrides=DATA)
    assert found.request.tasks[0].model.params == sum(each.numel() for each in make_own().parameters())
    assert {each.layout.strategy for each in found.plans} == {"ddp", "zero1", "zero2", "fsdp"}
    assert found.config.model.kind == "factory"
    assert f"{__name__}:make_own" in found.to_yaml()
    assert "samples/s" in found.to_text()
    assert "OUTSIDE the calibrated domain" in found.to_text()
    assert found.to_json()["plans"][0]["memory_by_category"]["activations"] > 0
    # The same by its name, from a config.
    named = {"model": {"kind": "factory", "factory": f"{__name__}:make_own"}, "train": {"global_batch": 64}}
    data = {"kind": "synthetic_classification", "features": 64, "classes": 10}
    again = paceline.plan({**named, "data": data}, "dgx-a100")
    assert again.winner == found.winner
    nameless = paceline.plan(lambda: Own(width=512), "dgx-a100", overrides=DATA)
    assert nameless.winner == found.winner
    with pytest.raises(UsageError, match="has no name by which it can be imported"):
        nameless.to_yaml()


def test_what_cannot_be_planned_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"a plan cannot measure the model[^!]*describe it as model.kind: gpt"):
        paceline.plan(lambda: Own(curious=True), "dgx-a100", overrides=DATA)
    with pytest.raises(UsageError, match="is given without data"):
        paceline.plan(make_own, "dgx-a100")
    with pytest.raises(UsageError, match="did you mean dgx-a100"):
        paceline.plan(VALUES, "dgx-a10")
    with pytest.raises(UsageError, match="ranked by time, cost, memory"):
        paceline.plan(VALUES, "dgx-a100", by="luck")
    with pytest.raises(UsageError, match="it is in dollars, and above 0"):
        paceline.plan(VALUES, "dgx-a100", price=-2.0)
    with pytest.raises(UsageError, match=r"overrides train\.steps=3 of a config that is read already"):
        paceline.plan(config_from_dict(VALUES), "dgx-a100", overrides=["train.steps=3"])
    with pytest.raises(UsageError, match="try 8 or 16"):
        paceline.plan(VALUES, "4x dgx-a100", gpus=[12])
    with pytest.raises(ConfigError, match="layrs"):
        paceline.plan({**VALUES, "model": {"kind": "gpt", "layrs": 4}}, "dgx-a100")


def test_nothing_that_fits_is_a_result() -> None:
    found = paceline.plan(ROOT / "configs" / "gpt_7b.yaml", "1x l4", overrides=["train.global_batch=1"], host_gb=8)
    assert found.winner is None
    assert found.explanations() == []
    assert found.found.nearest is not None
    with pytest.raises(UsageError, match="nothing fits"):
        found.to_yaml()


def test_gradients_that_are_compressed_are_those_of_whole_models() -> None:
    found = paceline.plan({**VALUES, "comm": {"compression": {"policy": "topk"}}}, "dgx-a100")
    assert {each.layout.tensor * each.layout.pipeline for each in found.plans} == {1}
    assert found.found.left_out["the config forbids them"] > 0
    assert found.config.comm.compression.policy == "topk"


@pytest.mark.exhaustive
def test_a_trillion_parameters_on_4096_devices() -> None:
    found = paceline.plan(ROOT / "configs" / "gpt_1t.yaml", "512x dgx-h100")
    assert found.request.tasks[0].model.params == pytest.approx(1e12, rel=0.02)
    assert found.winner is not None
    assert found.winner.layout.pipeline > 1
    assert found.winner.layout.tensor > 1
    assert 0.2 < found.winner.mfu < 0.7
    assert found.config.parallel.ranks == 4096


def test_a_config_is_planned_without_torch() -> None:
    script = (
        "import sys, json, paceline; "
        "found = paceline.plan(json.loads(sys.argv[1]), 'dgx-a100'); found.to_yaml(); found.to_text(); "
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, json.dumps(VALUES)], capture_output=True, text=True, check=False
    )
    assert (shown.stdout.strip(), shown.stderr) == ("False", "")
