"""What a field of a config takes, in words: read from its JSON Schema; and every field with what it takes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.suggest import fields_at, find_field, known_fields, leaf_field, section_kinds, section_paths

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (INTEGER, "a whole number"),
        ({"type": "number"}, "a number"),
        ({"type": "boolean"}, "true or false"),
        (TEXT, "text"),
        ({"type": "object"}, "a section of named plain values"),
        ({"type": "null"}, "null"),
        ({**INTEGER, "minimum": 1}, "a whole number of at least 1"),
        ({**INTEGER, "exclusiveMinimum": 0, "maximum": 9}, "a whole number above 0 and at most 9"),
        ({"type": "number", "exclusiveMaximum": 1}, "a number below 1"),
        ({**TEXT, "minLength": 1}, "text that is not empty"),
        ({**TEXT, "minLength": 0}, "text"),
        ({**TEXT, "pattern": "x"}, "a path of the form package.module:name"),
        ({"type": "string", "const": "a"}, "a"),
        ({"type": "string", "enum": ["a", "b"]}, "one of a, b"),
        ({"type": "array", "items": INTEGER}, "a list, each a whole number"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, "a list, each one of a, b"),
        ({"type": "array", "prefixItems": [INTEGER, INTEGER]}, "a list of 2, each a whole number"),
        ({"anyOf": [{"type": "null"}, INTEGER]}, "a whole number or null"),
        ({"anyOf": [INTEGER, {"const": "auto"}]}, "a whole number or auto"),
    ],
)
def test_what_a_field_takes_in_words(spec: dict[str, Any], words: str) -> None:
    assert leaf_field("train.x", None, spec).expected == words


def test_a_field_knows_its_choices_types_and_default() -> None:
    spec = {"anyOf": [{"type": "array", "items": {**TEXT, "enum": ["a", "b"]}}, {"const": 3}, INTEGER]}
    found = leaf_field("train.x", "gpt", {**spec, "default": "a", "description": "what it is"})
    assert (found.choices, found.types, found.default) == (("a", "b", "3"), {"array", "integer"}, "a")
    assert (found.description, found.is_import_path, found.is_section) == ("what it is", False, False)
    assert leaf_field("a", None, {"type": "array", "items": {**TEXT, "pattern": "x"}}).is_import_path
    assert leaf_field("a", None, {**TEXT, "pattern": "x"}).is_import_path


def test_sections_and_their_fields_are_known_by_their_paths() -> None:
    fields = {(each.path, each.kind): each for each in known_fields()}
    assert fields["train", None].is_section
    assert fields["train", None].expected == "a section of named values"
    assert (fields["train", None].default, fields["train.steps", None].is_section) == (None, False)
    compression = fields["comm.compression.policy", None]
    assert (compression.place, compression.key, "topk" in compression.choices) == ("comm.compression", "policy", True)
    assert {kind for path, kind in fields if path == "model.layers"} >= {"gpt"}
    assert None not in {kind for path, kind in fields if path == "data.path"}
    assert fields["train.loss", None].is_import_path
    paths = section_paths()
    assert paths >= {"train", "model", "data", "comm", "comm.compression", "parallel", "memory"}
    assert not paths & {"name", "train.steps", "compression"}


def test_fields_are_found_by_place_and_kind() -> None:
    assert (section_kinds("train"), "gpt" in section_kinds("model")) == ((), True)
    found = find_field("model.layers", "gpt")
    assert found is not None
    assert found.place == "model"
    assert find_field("model.layers", "mlp") is None or find_field("model.layers", "mlp") != found
    assert find_field("model.nothing", "gpt") is None
    of_gpt = {each.key for each in fields_at("model", "gpt")}
    of_all = {each.key for each in fields_at("model", None)}
    assert "heads" in of_gpt
    assert of_gpt < of_all
