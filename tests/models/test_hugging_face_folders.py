"""Models of Hugging Face folders as they are built: classes, room for the data, values, adapters, the fused loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kept_figures import told
from torch import nn

from paceline.config.sections import HFModelConfig
from paceline.data.datasets import DataShape
from paceline.errors import UsageError
from paceline.models.hugging_face import (
    allocate_unfilled,
    build_hugging_face,
    is_causal,
    is_unfilled,
    mark_unfilled,
    parameters_on_meta,
    with_head_loss,
)
from paceline.models.layers import model_layers

TOKENS = DataShape(kind="tokens", vocab_size=40, context=8)
CLASSES = DataShape(kind="classes", classes=3, class_names=("cat", "dog", "owl"))
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 40,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 2,
}

pytestmark = pytest.mark.filterwarnings("ignore")  # what the library thinks of tiny sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers  # here: to load it takes seconds

    path = tmp_path_factory.mktemp("gpt2")
    given = {name: value for name, value in GPT2.items() if name != "model_type"}
    transformers.GPT2Config(**given).save_pretrained(path)
    return path


def config(folder: Path, **options: Any) -> HFModelConfig:
    return HFModelConfig(kind="hf", path=str(folder), **{"pretrained": False, **options})


def test_the_class_is_that_of_the_config_or_of_the_task(folder: Path) -> None:
    own = build_hugging_face(config(folder), TOKENS)
    assert type(own).__name__ == "GPT2LMHeadModel"
    assert own.training
    assert not own.config.use_cache
    other = build_hugging_face(config(folder, task="sequence_classification"), CLASSES)
    assert type(other).__name__ == "GPT2ForSequenceClassification"
    assert "image_classification" in str(
        told(lambda: build_hugging_face(config(folder, task="image_classification"), CLASSES))
    )


def test_a_new_head_has_the_classes_of_the_data(folder: Path) -> None:
    task = {"task": "sequence_classification"}
    new = build_hugging_face(config(folder, **task), CLASSES)
    assert (new.config.num_labels, new.config.id2label[1], new.config.label2id["owl"]) == (3, "dog", 2)
    fresh = config(folder, **task, pretrained=True, fresh=["score"])
    assert build_hugging_face(fresh, CLASSES, is_unfilled=True).config.num_labels == 3
    kept = config(folder, **task, pretrained=True)
    assert "has 2 classes, and the data 3" in str(told(lambda: build_hugging_face(kept, CLASSES, is_unfilled=True)))
    fits = DataShape(kind="classes", classes=2)
    assert build_hugging_face(kept, fits, is_unfilled=True).config.num_labels == 2
    # What says nothing of classes changes nothing.
    assert build_hugging_face(config(folder, **task), DataShape(kind="classes")).config.num_labels == 2
    assert build_hugging_face(config(folder), TOKENS).config.num_labels == 2


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (DataShape(kind="tokens", vocab_size=41, context=8), "vocab_size = 40 in config.json, but the data has 41"),
        (DataShape(kind="tokens", vocab_size=40, context=17), "max_position_embeddings = 16"),
        (DataShape(kind="tokens", vocab_size=40, context=16), ""),
        (DataShape(kind="tokens"), ""),
    ],
)
def test_the_model_has_room_for_the_data(folder: Path, shape: DataShape, problem: str) -> None:
    found = told(lambda: type(build_hugging_face(config(folder), shape)).__name__)
    assert problem in str(found) if problem else found == "GPT2LMHeadModel"


def test_a_pretrained_model_has_no_values_but_for_what_is_fresh(folder: Path) -> None:
    task = {"task": "sequence_classification", "pretrained": True, "fresh": ["score"]}
    model = build_hugging_face(config(folder, **task), CLASSES, is_unfilled=True)
    filled = [name for name, each in model.named_parameters() if not each.is_meta]
    assert filled == ["score.weight"]
    assert float(model.score.weight.detach().abs().sum()) > 0
    assert all(is_unfilled(each) == each.is_meta for each in model.parameters())
    adapted = config(folder, **task, lora={"rank": 2})
    trained = [
        n for n, p in build_hugging_face(adapted, CLASSES, is_unfilled=True).named_parameters() if p.requires_grad
    ]
    assert "score.weight" in trained
    assert all("lora" in name or name == "score.weight" for name in trained)


def test_unfilled_parameters_get_memory_and_stay_tied() -> None:
    with parameters_on_meta(mark=3):
        one, other = nn.Linear(2, 3, bias=False), nn.Linear(2, 3)
    assert all(each.is_meta and each.mark == 3 for each in (one.weight, other.weight))
    other.weight = one.weight
    other.bias.requires_grad_(False)
    mark_unfilled([one.weight, other.bias])
    plain = nn.Linear(2, 2)
    value = plain.weight
    allocate_unfilled([one, other, plain], torch.device("cpu"))
    assert one.weight is other.weight
    assert (one.weight.shape, one.weight.mark, is_unfilled(one.weight)) == ((3, 2), 3, True)
    assert not other.bias.is_meta
    assert not other.bias.requires_grad
    assert plain.weight is value
    assert not is_unfilled(plain.weight)
    assert not nn.Linear(2, 2).weight.is_meta  # outside, all is as it was


def test_the_loss_of_a_model_is_that_of_its_logits(folder: Path) -> None:
    model = build_hugging_face(config(folder), TOKENS).eval()
    assert is_causal(model)
    tokens = torch.arange(12).reshape(2, 6)
    logits = model(tokens).logits
    changed: Any = with_head_loss(model)
    assert changed is model
    assert changed.loss_vocabulary() == 40
    torch.testing.assert_close(changed(tokens), logits)
    loss, correct = changed(tokens, tokens, counts=True)
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(loss, plain)
    assert int(correct) == int((logits.argmax(-1) == tokens).sum())


def test_logits_that_are_more_than_products_have_no_fused_loss(folder: Path) -> None:
    model: Any = build_hugging_face(config(folder), TOKENS)
    model.lm_head = nn.Linear(16, 40)
    with pytest.raises(UsageError, match="not the products"):
        with_head_loss(model)
    assert model.training  # it was looked at in evaluation, and goes on training
    assert not is_causal(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="no output layer"):
        with_head_loss(nn.Linear(2, 2))


def test_stages_of_a_model_compute_what_it_does(folder: Path) -> None:
    model = build_hugging_face(config(folder), TOKENS).eval()
    x: Any = torch.arange(12).reshape(2, 6)
    logits = model(x).logits
    layers = model_layers(model)
    for layer in layers:
        x = layer.run(x)
    torch.testing.assert_close(x, logits)
    assert [layer.name for layer in layers] == [
        "transformer.wte",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f",
    ]
    assert [len(layer.modules) for layer in layers] == [3, 1, 1, 2]
