"""The schema: strict, documented, and the same for editors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import ValidationError

from paceline.config import Config, data_sections, schema
from paceline.config import sections as sections_
from paceline.config.schema import descriptions, json_schema
from paceline.config.sections import GPT_SIZES, GPTModelConfig, GPTSize, gpt_shape
from paceline.config.suggest import known_fields, section_paths
from paceline.config.train_checks import _READ_BY
from paceline.plan.model_shape import ModelShape


def test_defaults_are_as_documented() -> None:
    config = Config.model_validate({"model": {"kind": "mlp"}, "data": {"kind": "digits"}})
    assert config.name == "run"
    assert config.model.model_dump() == {
        "kind": "mlp",
        "compile": False,
        "input_dim": None,
        "hidden_dim": 512,
        "num_classes": None,
        "dropout": 0.3,
    }
    assert config.optim.betas == (0.9, 0.999)
    assert config.optim.schedule.kind == "constant"
    assert config.train.epochs_to_run == 1
    assert config.checkpoint.at_end


def test_the_length_of_a_run() -> None:
    base = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
    assert Config.model_validate({**base, "train": {"epochs": 3}}).train.epochs_to_run == 3
    assert Config.model_validate({**base, "train": {"epochs": 0.5}}).train.epochs_to_run == 0.5
    assert Config.model_validate({**base, "train": {"steps": 3}}).train.epochs_to_run is None


@pytest.mark.parametrize("values", [{"steps": True}, {"steps": 3.0}, {"steps": "3"}, {"seed": None}, {"dtype": 32}])
def test_types_are_strict(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": values})


def test_every_key_has_a_description_and_an_expectation() -> None:
    fields = known_fields()
    assert len(fields) > 110
    assert [each.path for each in fields if not each.description] == []
    assert [each.path for each in fields if not each.expected] == []


def test_every_description_is_of_a_key() -> None:
    path = Path(schema.__file__).parent / "descriptions.yaml"
    sections = {name: each for module in (sections_, data_sections, schema) for name, each in vars(module).items()}
    texts = yaml.safe_load(path.read_text())
    assert not [f"{name}.{key}" for name, keys in texts.items() for key in keys.keys() - sections[name].model_fields]


def test_the_description_of_an_optimizers_key_begins_with_the_kinds_that_read_it() -> None:
    kinds = {key: tuple(text.partition(": ")[0].split(", ")) for key, text in descriptions()["OptimConfig"].items()}
    found = {key: each for key, each in kinds.items() if set(each) <= {"adamw", "sgd", "muon"}}
    assert found | {"muon": ("muon",), "args": ("an optimizer given by its path",)} == _READ_BY


def test_json_schema_is_fit_for_editors() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["title"] == "Paceline config"
    assert schema["required"] == ["model", "data"]
    assert schema["additionalProperties"] is False
    sections = [each for each in schema["$defs"].values() if "properties" in each]
    assert len(sections) > 20
    assert all(each["additionalProperties"] is False for each in sections)
    assert schema["$defs"]["TrainConfig"]["properties"]["epochs"]["description"]


def test_sizes_in_schema_and_table_are_the_same() -> None:
    assert set(get_args(GPTSize)) == set(GPT_SIZES)


def test_a_size_with_changes_keeps_its_proportions() -> None:
    shape = gpt_shape(GPTModelConfig(kind="gpt", size="gpt-nano", heads=8, width=128))
    assert shape == ModelShape(layers=4, heads=8, kv_heads=4, width=128, mlp_width=256, context=64, tied=True)


def test_without_a_size_the_current_family_is_followed() -> None:
    shape = gpt_shape(GPTModelConfig(kind="gpt", layers=2, heads=4, width=128))
    assert shape == ModelShape(layers=2, heads=4, kv_heads=4, width=128, mlp_width=384)
    shape = gpt_shape(GPTModelConfig(kind="gpt", layers=2, heads=4, width=128, mlp="gelu"))
    assert shape is not None
    assert shape.mlp_width == 512
    assert gpt_shape(GPTModelConfig(kind="gpt", layers=2)) is None


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("paceline.config", ("torch", "numpy", "typer", "rich")), ("paceline.cli.config", ("torch", "pydantic", "yaml"))],
)
def test_import_is_light(module: str, unwanted: tuple[str, ...]) -> None:
    code = f"import {module}, sys; found = set(sys.modules) & set({unwanted!r}); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_sections_of_the_models_are_those_of_the_schema() -> None:
    assert section_paths() == {each.path for each in known_fields() if each.is_section}
