"""The tensors of a folder are matched with those of a model by name, and what differs is told all at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.checkpoint.tools.pretrained import MisfitError, open_pretrained
from paceline.models.lora import A, B


class Model(nn.Module):
    """Two layers, of which the second may have the weight of the first, behind a prefix that files may leave out."""

    base_model_prefix = "base"

    def __init__(self, *, tied: bool = False, ignored: list[str] | None = None) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"first": nn.Linear(2, 3, bias=False)})
        self.head = nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.base["first"].weight
        self._keys_to_ignore_on_load_unexpected = ignored
        self.config = SimpleNamespace(model_type="two layers")  # transformers 5.5 asks for it


OTHER, RIGHT = torch.zeros(3, 3), torch.zeros(3, 2)
FIRST, HEAD = "base.first.weight", "head.weight"


def names_of(folder: Path, saved: dict[str, torch.Tensor], model: nn.Module, fresh: list[str] | None = None) -> Any:
    save_file({name: tensor.clone() for name, tensor in saved.items()}, folder / "model.safetensors")
    try:
        return dict(open_pretrained(folder, model, fresh or []).names)
    except MisfitError as error:
        return [line.strip() for line in str(error).splitlines()[1:-1]]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({FIRST: RIGHT, HEAD: RIGHT}, {FIRST: FIRST, HEAD: HEAD}),
        ({"first.weight": RIGHT, HEAD: RIGHT}, {FIRST: "first.weight", HEAD: HEAD}),
        ({FIRST: RIGHT, "base.head.weight": RIGHT}, {FIRST: FIRST, HEAD: "base.head.weight"}),
        ({FIRST: RIGHT}, ["missing: head.weight [3, 2]"]),
        (
            {FIRST: OTHER, HEAD: RIGHT},
            ["shape: base.first.weight is [3, 3], and base.first.weight of the model [3, 2]"],
        ),
        ({FIRST: RIGHT, HEAD: RIGHT, "more": OTHER}, ["unexpected: more [3, 3]"]),
        ({FIRST: RIGHT, HEAD: RIGHT, "h.0.attn.bias": OTHER}, {FIRST: FIRST, HEAD: HEAD}),
        ({"more": OTHER}, [f"missing: {FIRST} [3, 2]", f"missing: {HEAD} [3, 2]", "unexpected: more [3, 3]"]),
    ],
)
def test_each_tensor_has_its_own(saved: dict[str, torch.Tensor], expected: Any, tmp_path: Path) -> None:
    assert names_of(tmp_path, saved, Model()) == expected


def test_what_begins_afresh_is_not_looked_for(tmp_path: Path) -> None:
    assert names_of(tmp_path, {FIRST: RIGHT}, Model(), ["head.*"]) == {FIRST: FIRST}
    assert names_of(tmp_path, {FIRST: RIGHT, HEAD: OTHER, "more": OTHER}, Model(), ["head.*"]) == {FIRST: FIRST}
    assert names_of(tmp_path, {}, Model(), ["*"]) == {}


def test_a_tensor_with_two_names_is_read_once(tmp_path: Path) -> None:
    both = {FIRST: HEAD, HEAD: HEAD}
    assert names_of(tmp_path, {HEAD: RIGHT}, Model(tied=True)) == both
    assert names_of(tmp_path, {FIRST: RIGHT, HEAD: RIGHT}, Model(tied=True)) == dict.fromkeys(both, FIRST)


def test_what_the_model_s_class_ignores_is_not_unexpected(tmp_path: Path) -> None:
    saved = {FIRST: RIGHT, HEAD: RIGHT, "pooler.weight": OTHER}
    assert names_of(tmp_path, saved, Model(ignored=["^pooler"])) == {FIRST: FIRST, HEAD: HEAD}
    assert names_of(tmp_path, saved, Model(ignored=["^weight"])) == ["unexpected: pooler.weight [3, 3]"]


def test_adapters_are_not_in_the_folder(tmp_path: Path) -> None:
    model = Model()
    for name in (A, B):
        model.head.register_parameter(name, nn.Parameter(torch.zeros(1)))
    assert names_of(tmp_path, {FIRST: RIGHT, HEAD: RIGHT}, model) == {FIRST: FIRST, HEAD: HEAD}


def test_the_refusal_names_folder_model_and_fix(tmp_path: Path) -> None:
    save_file({FIRST: RIGHT}, tmp_path / "model.safetensors")
    with pytest.raises(MisfitError) as told:
        open_pretrained(tmp_path, Model())
    assert str(told.value) == (
        f"the weights in {tmp_path} are not those of Model\n  missing: head.weight [3, 2]\n"
        "  name what begins with random values in model.fresh (also: head), "
        "or take the folder that this model was saved to"
    )


class Holder:
    """Holds nothing of a model."""

    is_loaded = False

    def shards(self) -> list[Any]:
        return []

    def mark_loaded(self) -> None:
        self.is_loaded = True


def test_whoever_was_filled_is_told_so(tmp_path: Path) -> None:
    save_file({FIRST: RIGHT, HEAD: RIGHT.clone()}, tmp_path / "model.safetensors")
    holder = Holder()
    open_pretrained(tmp_path, Model()).fill(holder)
    assert holder.is_loaded
