"""Data as the model of a Hugging Face folder reads them: its tokens, its images and its classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
import torch
from PIL import Image

from paceline.checkpoint.read import HUGGING_FACE
from paceline.config import Config, config_from_dict, explain
from paceline.config.hf_folder import read_image_settings
from paceline.data.fetch import fetch_batch
from paceline.data.registry import data_of
from paceline.data.tokenizers import ByteTokenizer
from paceline.errors import ConfigError, DataError
from paceline.train.assemble import build_workload
from paceline.train.run_state import kept_files

WORDS = ["the", "cat", "sat", "on", "mat"]


def write_tokenizer(folder: Path, words: list[str]) -> Path:
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def make_config(folder: Path, data: dict[str, Any], **model: Any) -> Config:
    values = {"model": {"kind": "hf", "path": str(folder), **model}, "data": data}
    return config_from_dict({**values, "train": {"steps": 1, "global_batch": 2}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that is read before the library is."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 20)
    return {"kind": "text", "path": str(tmp_path / "text.txt"), "context": 4}


def test_a_pretrained_model_reads_text_with_its_own_tokenizer(folder: Path, text: dict[str, Any]) -> None:
    write_tokenizer(folder, WORDS)
    data = data_of(make_config(folder, {**text, "windows": "fixed"}))
    assert (data.shape.vocab_size, data.tokenizer and data.tokenizer.name) == (5, "model")
    told = {row.key: row.value for row in explain(make_config(folder, text))}
    assert told["data.tokens"] == str(folder / "tokenizer.json")
    inputs, targets = fetch_batch(data.train, np.arange(1))
    assert (inputs.tolist(), targets.tolist()) == ([[0, 1, 2, 3]], [[1, 2, 3, 0]])
    for tokens in ("bytes", "char"):
        with pytest.raises(
            ConfigError, match=rf"data.tokens = '{tokens}' has other tokens(.|\n)*leave data.tokens out"
        ):
            make_config(folder, {**text, "tokens": tokens})
        assert make_config(folder, {**text, "tokens": tokens}, pretrained=False)


def test_a_pretrained_model_without_a_tokenizer_needs_a_word_of_the_user(folder: Path, text: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer, and data.tokens is not set(.|\n)*or set data.tokens"):
        make_config(folder, text)
    assert data_of(make_config(folder, {**text, "tokens": "bytes"})).shape.vocab_size == 256
    assert data_of(make_config(folder, text, pretrained=False)).shape.vocab_size == len(set("the cat sat on mat\n"))
    ByteTokenizer().save(folder)  # a model that was trained on bytes says so
    assert data_of(make_config(folder, {**text, "tokens": "bytes"})).shape.vocab_size == 256


@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_tokens_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    write_tokenizer(folder, WORDS)
    same, other = write_tokenizer(tmp_path / "same", WORDS), write_tokenizer(tmp_path / "other", [*WORDS, "dog"])
    values = json.loads((same / "tokenizer.json").read_text())
    (same / "tokenizer.json").write_text(json.dumps({**values, "version": "2.0"}, indent=7))
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n' * 8)
    rows = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "context": 4}

    def of(place: Path | str) -> dict[str, Any]:
        return {**rows, "tokenizer": str(place)} if kind == "rows" else {"kind": "tokens", "path": str(place)}

    assert make_config(folder, of(same))
    with pytest.raises(ConfigError, match="has other tokens than the tokenizer of the pretrained model"):
        make_config(folder, of(other))
    if kind == "rows":
        inputs, _ = fetch_batch(data_of(make_config(folder, rows)).train, np.arange(1))
        assert inputs.tolist() == [[0, 1, 0, 0]]


PREPROCESSOR = {
    "do_resize": True,
    "size": {"height": 8, "width": 8},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.4],
    "image_std": [0.5, 0.25, 0.5],
}
NAMES = ["bird", "dog", "cat"]


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Any]:
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for each in range(2):
            Image.new("RGB", (9, 9), (100 * number,) * 3).save(tmp_path / "images" / name / f"{each}.png")
    return {"kind": "images", "path": str(tmp_path / "images"), "eval_fraction": 0.0}


def write_vit(folder: Path, names: list[str]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    labels = {str(number): name for number, name in enumerate(names)}
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 8, "patch_size": 4}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, "id2label": labels}))


def test_images_are_those_that_the_model_knows(folder: Path, images: dict[str, Any]) -> None:
    write_vit(folder, NAMES)
    data = data_of(make_config(folder, images))
    assert (data.shape.size, data.shape.classes, data.shape.class_names) == (8, 3, tuple(NAMES))
    torch.testing.assert_close(torch.tensor(data.shape.mean), torch.tensor([127.5, 127.5, 102.0]))
    torch.testing.assert_close(torch.tensor(data.shape.std), torch.tensor([127.5, 63.75, 127.5]))
    _, targets = fetch_batch(data.train, np.arange(4))
    assert targets.tolist() == [2, 2, 1, 1], "the model's numbers, not those of the folders"
    with pytest.raises(ConfigError, match=r"data.size = 16, and the model in model.path reads images of 8"):
        make_config(folder, {**images, "size": 16})
    write_vit(folder, ["bird", "dog", "fish"])
    with pytest.raises(DataError, match=r"'cat' is no class of the model(.|\n)*bird, dog, fish(.|\n)*model.fresh"):
        data_of(make_config(folder, images))


def test_classes_of_rows_have_the_numbers_of_the_model(folder: Path, tmp_path: Path) -> None:
    write_vit(folder, NAMES)
    (tmp_path / "rows").mkdir()
    table = pyarrow.table({"x": [[0.5]] * 4, "y": [0, 1, 1, 2]})
    with (
        pyarrow.OSFile(str(tmp_path / "rows" / "a.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (tmp_path / "rows" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    info = {"features": {"y": {"names": ["cat", "bird"], "_type": "ClassLabel"}}}
    (tmp_path / "rows" / "dataset_info.json").write_text(json.dumps(info))
    rows = {"kind": "hf_dataset", "path": str(tmp_path / "rows"), "inputs": "x", "targets": "y", "eval_fraction": 0.0}
    data = data_of(make_config(folder, {**rows, "classes": 5}))
    assert (data.shape.classes, data.shape.class_names) == (5, tuple(NAMES))
    assert fetch_batch(data.train, np.arange(3))[1].tolist() == [2, 0, 0]
    with pytest.raises(DataError, match="row 3 cannot be used: 'y' is 2, and there are 2 classes"):
        fetch_batch(data.train, np.arange(4))


@pytest.mark.parametrize("has_file", [True, False])
def test_classes_and_images_are_exported_as_they_were_used(
    folder: Path, images: dict[str, Any], tmp_path: Path, has_file: bool
) -> None:
    import transformers  # here: to load it takes seconds

    write_vit(folder, NAMES)
    if not has_file:
        (folder / "preprocessor_config.json").unlink()
    work = build_workload(make_config(folder, images, pretrained=False))
    for name, content in kept_files(work.model, work.data).items():
        (tmp_path / name.removeprefix(HUGGING_FACE)).write_bytes(content)
    assert transformers.AutoConfig.from_pretrained(tmp_path).id2label == {0: "cat", 1: "dog"}
    settings = read_image_settings(tmp_path)
    assert settings is not None
    assert (settings.size, settings.mean) == (8, pytest.approx(work.data.shape.mean))
    try:
        made = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} reads image processors with torchvision alone")
    mean = PREPROCESSOR["image_mean"] if has_file else [0.485, 0.456, 0.406]
    torch.testing.assert_close(torch.tensor(made.image_mean), torch.tensor(mean))


def test_a_pretrained_model_that_does_not_say_its_colours(folder: Path, images: dict[str, Any]) -> None:
    write_vit(folder, NAMES)
    (folder / "preprocessor_config.json").unlink()
    with pytest.warns(UserWarning, match=r"has no preprocessor_config\.json: images get the mean .* of ImageNet"):
        assert data_of(make_config(folder, images)).shape.size == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": {"height": 8, "width": 9}}, "is not that of a square"),
        ({"size": {"longest_edge": 8}}, "is not that of a square"),
        ({"image_mean": "grey"}, "image_mean = grey and rescale_factor = .* are no numbers"),
        ({"image_std": None}, "image_std = None"),
        ({"rescale_factor": 0}, "are no numbers"),
    ],
)
def test_images_that_cannot_be_made_are_refused(
    folder: Path, images: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    write_vit(folder, NAMES)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **change}))
    with pytest.raises(ConfigError, match=message):
        make_config(folder, images)
