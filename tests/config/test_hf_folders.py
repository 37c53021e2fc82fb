"""What a model's folder says of images, classes and tokens, and what is told where config and folder differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.data_sections import DataShape
from paceline.config.hf_folder import (
    ImageSettings,
    check_folder_is_followed,
    check_shared_sequences,
    image_size,
    parse_class_names,
    parse_image_settings,
    read_class_names,
    read_image_settings,
    tokenizer_file,
)
from paceline.config.load import config_from_dict
from paceline.errors import DataError


def settings_of(**values: Any) -> ImageSettings:
    return parse_image_settings(json.dumps({"image_mean": [0.5], "image_std": [0.25], **values}).encode())


@pytest.mark.parametrize(
    ("values", "size", "mean", "std"),
    [
        ({}, None, (127.5,), (63.75,)),
        ({"size": 32}, 32, (127.5,), (63.75,)),
        ({"size": {"height": 7, "width": 7}}, 7, (127.5,), (63.75,)),
        ({"size": {"shortest_edge": 9}}, 9, (127.5,), (63.75,)),
        ({"size": [8, 8]}, 8, (127.5,), (63.75,)),
        ({"size": 1}, 1, (127.5,), (63.75,)),
        ({"size": 32, "crop_size": 28}, 32, (127.5,), (63.75,)),
        ({"size": 32, "crop_size": 28, "do_center_crop": True}, 28, (127.5,), (63.75,)),
        ({"size": 32, "do_center_crop": True}, 32, (127.5,), (63.75,)),
        ({"rescale_factor": 0.5}, None, (1.0,), (0.5,)),
        ({"rescale_factor": 0.5, "do_rescale": False}, None, (0.5,), (0.25,)),
        ({"do_normalize": False}, None, (0.0,), (255.0,)),
        ({"image_mean": 0.5, "image_std": 0.25}, None, (127.5,), (63.75,)),
        ({"image_mean": [0, 1, 0], "image_std": [1, 1, 2]}, None, (0.0, 255.0, 0.0), (255.0, 255.0, 510.0)),
    ],
)
def test_images_are_as_the_folder_says(
    values: dict[str, Any], size: int | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    assert settings_of(**values) == ImageSettings(size=size, mean=mean, std=std)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": {"height": 7, "width": 8}}, "is not that of a square"),
        ({"size": {"longest_edge": 7}}, "is not that of a square"),
        ({"size": 0}, "is not that of a square"),
        ({"size": []}, "is not that of a square"),
        ({"size": "8"}, "is not that of a square"),
        ({"image_mean": [0.5, 0.5]}, "are not 3 numbers, or 1, above 0"),
        ({"image_mean": [0.5, 0.5], "image_std": [1, 1]}, "are not 3 numbers, or 1, above 0"),
        ({"image_std": [0.0]}, "are not 3 numbers, or 1, above 0"),
        ({"image_std": [-1.0]}, "are not 3 numbers, or 1, above 0"),
        ({"image_mean": None}, "image_mean = None and rescale_factor = 0.00392156862745098 are no numbers"),
        ({"rescale_factor": 0}, "image_mean = [0.5] and rescale_factor = 0 are no numbers"),
        ({"image_std": ["x"]}, "image_std = ['x'] and rescale_factor"),
    ],
)
def test_what_cannot_be_followed_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as told:  # noqa: PT011  # the words are looked at
        settings_of(**values)
    assert words in str(told.value)


def test_a_folder_without_a_processor_has_the_size_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"image_size": 16, "id2label": {"0": "cat", "1": "dog", "3": "LABEL_3"}}')
    assert (read_image_settings(tmp_path), image_size(tmp_path)) == (None, 16)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 0.5, "image_std": 0.5}')
    assert image_size(tmp_path) == 16
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 0.5, "image_std": 0.5, "size": 24}')
    assert image_size(tmp_path) == 24
    assert read_class_names(tmp_path) == ("cat", "dog", "LABEL_2")
    assert read_class_names(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}', None),
        ('{"id2label": {"0": "LABEL_0", "1": "b"}}', ("LABEL_0", "b")),
        ('{"id2label": ["a"]}', None),
        ("{}", None),
    ],
)
def test_classes_that_are_only_numbered_have_no_names(text: str, names: tuple[str, ...] | None) -> None:
    assert parse_class_names(text.encode()) == names


def problems_of(folder: Path, data: dict[str, Any], *, pretrained: bool = True) -> list[str]:
    """Returns what is told of a config that was sound before it got this folder and these data."""
    sound = folder.parent / "sound"
    sound.mkdir(exist_ok=True)
    (sound / "config.json").write_text("{}")
    (sound / "a.txt").write_text("some text")
    kind = data["kind"]
    first = {"kind": kind, "path": str(sound / "a.txt"), **({} if kind == "images" else {"context": 4})}
    values = {"model": {"kind": "hf", "path": str(sound), "pretrained": False}, "data": first}
    config = config_from_dict({**values, "train": {"steps": 1, "global_batch": 2}})
    config = config.with_values("model", path=str(folder), pretrained=pretrained).with_values("data", **data)
    return [f"{each.what}|{each.fix}".replace(str(folder), "MODEL") for each in check_folder_is_followed(config)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"image_size": 16}')
    return made


def test_images_of_another_size_are_told(folder: Path) -> None:
    def told(**changes: Any) -> list[str]:
        return problems_of(folder, {"kind": "images", **changes})

    assert (told(), told(size=16)) == ([], [])
    assert told(size=32) == [
        "data.size = 32, and the model in model.path reads images of 16|"
        "leave data.size out, or change the size in the folder's preprocessor_config.json"
    ]
    (folder / "config.json").write_text("{}")
    assert told(size=32) == []
    (folder / "preprocessor_config.json").write_text('{"size": 4}')
    (found,) = told()
    assert found.startswith("model.path = 'MODEL': its images cannot be made: image_mean = None")
    (folder / "config.json").unlink()  # whoever builds the model says so
    assert told(size=32) == []


TOKENIZER = {"version": "1", "model": {"vocab": {"a": 0}}, "padding": None}


def test_other_tokens_than_the_model_s_are_told(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    text = {"kind": "text"}
    assert problems_of(folder, text) == [
        "model.path = 'MODEL' has no tokenizer, and data.tokens is not set|"
        "save it there: AutoTokenizer.from_pretrained(...).save_pretrained('MODEL'); "
        "or set data.tokens, if the model was trained on bytes or characters"
    ]
    assert problems_of(folder, {**text, "tokens": "bytes"}) == []
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert problems_of(folder, text) == []
    for tokens in ("bytes", "char"):
        assert problems_of(folder, {**text, "tokens": tokens}) == [
            f"data.tokens = {tokens!r} has other tokens than the tokenizer of the pretrained model in model.path|"
            "leave data.tokens out; or begin with random weights: model.pretrained = false"
        ]
        assert problems_of(folder, {**text, "tokens": tokens}, pretrained=False) == []
    for kind, is_same in ((TOKENIZER | {"version": "2", "padding": {"length": 3}}, True), ({"model": {}}, False)):
        (other / "tokenizer.json").write_text(json.dumps(kind))
        found = problems_of(folder, {**text, "tokens": str(other)})
        assert (not found) == is_same
    prepared = problems_of(folder, {"kind": "tokens", "path": str(other)})
    assert [each.partition("|")[2] for each in prepared] == [
        "paceline data prepare ... --tokenizer MODEL; or begin with random weights: model.pretrained = false"
    ]
    (other / "tokenizer.json").write_text("{")  # whoever opens it says so
    assert problems_of(folder, {**text, "tokens": str(other)}) == []
    (other / "tokenizer.json").unlink()
    assert problems_of(folder, {"kind": "tokens", "path": str(other)}) == []


def test_a_vocabulary_of_bytes_is_the_same_as_bytes(folder: Path) -> None:
    text = {"kind": "text"}
    (folder / "vocabulary.json").write_text('{"kind": "bytes"}')
    assert tokenizer_file(folder) == folder / "vocabulary.json"
    assert problems_of(folder, {**text, "tokens": "bytes"}) == []
    assert len(problems_of(folder, {**text, "tokens": "char"})) == 1
    (folder / "vocabulary.json").write_text('{"kind": "char"}')
    assert len(problems_of(folder, {**text, "tokens": "bytes"})) == 1


@pytest.mark.parametrize(
    ("shape", "is_right"),
    [
        ({"mean": [1.0], "std": [1.0]}, True),
        ({"mean": [1.0], "std": [1.0], "channels": 3}, True),
        ({"mean": [1.0] * 3, "std": [1.0] * 3, "channels": 3}, True),
        ({"mean": [1.0] * 3, "std": [1.0] * 3}, True),
        ({"mean": [1.0] * 2, "std": [1.0] * 2, "channels": 3}, False),
        ({"mean": [1.0], "std": [1.0, 1.0]}, False),
        ({"mean": [1.0] * 3, "std": [1.0]}, False),
        ({"mean": [1.0], "std": [0.0]}, False),
        ({"mean": [1.0], "std": [-1.0]}, False),
        ({"mean": [1.0]}, False),
        ({"std": [1.0]}, False),
        ({"mean": "x", "std": [1.0]}, False),
        ({}, True),
    ],
)
def test_a_mean_and_a_deviation_for_each_channel_or_one_for_all(shape: dict[str, Any], is_right: bool) -> None:
    if is_right:
        assert DataShape(kind="classes", **shape)
        return
    with pytest.raises(DataError, match="a mean and a positive deviation for each"):
        DataShape(kind="classes", **shape)


@pytest.mark.parametrize(
    ("settings", "data", "told"),
    [
        ({"sliding_window": 32}, {}, "parallel.context = 2 with sliding_window = 32 in "),
        ({"sliding_window": 64}, {}, ""),
        ({"sliding_window": 32, "use_sliding_window": False}, {}, ""),
        ({"sliding_window": 32, "layer_types": ["full_attention"]}, {}, ""),
        ({}, {"kind": "jsonl", "classes": 2, "targets": "label"}, "parallel.context = 2 with data of texts that are"),
        ({"n_head": 3}, {}, "parallel.context = 2 with parallel.context_method = ulysses and 3 heads in "),
        ({"text_config": {"num_attention_heads": 5}}, {}, "parallel.context = 2 with parallel.context_method = uly"),
        ({"num_attention_heads": 4}, {}, ""),
    ],
    ids=["window", "wide", "unused", "no layer", "classes", "heads", "heads of the part for texts", "enough heads"],
)
def test_what_ranks_cannot_share_is_told(folder: Path, settings: Any, data: Any, told: str) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "a.txt").write_text("{}")
    values = {"kind": "text", "tokens": "bytes", "path": str(folder / "a.txt"), "context": 64, **data}
    if "classes" in data:
        del values["tokens"]
    config = config_from_dict({"model": {"kind": "hf", "path": str(folder), "pretrained": False}, "data": values})
    assert list(check_shared_sequences(config)) == []
    shared = {"context": 2, "context_method": "ulysses"}
    found = [each.what for each in check_shared_sequences(config.with_values("parallel", **shared))]
    assert [each.startswith(told) for each in found] == [True] * bool(told)
