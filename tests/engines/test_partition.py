"""Units: which modules are gathered together, and who owns a parameter."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.engines.flat.materialize import choose_units, owned_parameters
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.models.registry import model_apart, model_blocks, model_ends


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.rows = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)


def names(units: list[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, _ in units]


def test_blocks_are_units_in_the_order_of_definition() -> None:
    model = Model()
    assert names(choose_units(model, model_blocks(model))) == ["rows.0", "rows.1", "rows.2"]
    assert names(choose_units(model, [])) == []


def test_units_by_name_keep_the_order_of_definition() -> None:
    assert names(choose_units(Model(), [], names=["rows.1", "embed"])) == ["embed", "rows.1"]


def test_units_by_size_are_the_largest_modules_that_are_small_enough() -> None:
    model = Model()
    block = sum(p.numel() for p in model.rows[0].parameters()) * 4 / 2**20
    assert names(choose_units(model, [], unit_mb=block)) == ["embed", "rows.0", "rows.1", "rows.2", "head"]
    assert names(choose_units(model, [], unit_mb=block / 2)) == [
        "embed",
        *(f"rows.{i}.{j}" for i in range(3) for j in (0, 1)),
        "head",
    ]
    assert names(choose_units(model, [], unit_mb=1e-9))[1:3] == ["rows.0.0", "rows.0.1"], "a leaf is not cut"


def test_by_size_a_weight_that_is_read_apart_is_left_to_the_root() -> None:
    tied = GPT(gpt_config("gpt-nano", tied=True))
    found = names(choose_units(tied, [], unit_mb=64.0, apart=model_apart(tied)))
    assert found == ["layers.0", "layers.1", "layers.2", "layers.3", "norm"]
    assert names(choose_units(GPT(gpt_config("gpt-nano", tied=False)), [], unit_mb=64.0))[0] == "token_embedding"


def test_attention_of_torch_is_not_cut() -> None:
    """It reads the weights of its output layer without calling it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    assert names(choose_units(model, [], unit_mb=1e-9)) == ["0", "1"]


@pytest.mark.parametrize("wrong", ["row.1", "", "rows.3"])
def test_a_name_that_is_no_module_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"no module is called .*\n.*\n  the first modules are embed, rows"):
        choose_units(Model(), [], names=["embed", wrong])


def test_one_module_under_two_names_is_one_unit() -> None:
    model = Model()
    model.other = model.rows[0]
    with pytest.raises(UsageError, match=r"'rows\.0' and 'other' are one and the same module"):
        choose_units(model, [], names=["rows.0", "other"])


def test_a_parameter_belongs_to_the_innermost_unit_and_a_shared_one_to_the_root() -> None:
    model = Model()
    model.rows[2][0].weight = model.rows[0][0].weight
    model.head.weight = model.embed.weight
    units = choose_units(model, [], names=["rows.0", "rows.0.1", "rows.2", "embed"])
    owned = {
        name: [n for n, _ in own]
        for name, own in zip([*names(units), "root"], owned_parameters(model, units), strict=True)
    }
    assert owned["rows.0"] == ["rows.0.0.bias"]
    assert owned["rows.0.1"] == ["rows.0.1.weight", "rows.0.1.bias"]
    assert owned["embed"] == []
    assert owned["root"] == [
        "embed.weight",
        "rows.0.0.weight",
        *(f"rows.1.{i}.{p}" for i in (0, 1) for p in ("weight", "bias")),
    ]


@pytest.mark.parametrize(
    ("tied", "vocabulary", "expected"),
    [(False, 4096, ["token_embedding", "head"]), (False, 16, []), (True, 4096, [])],
    ids=["as large as a block", "smaller than one", "read past its call"],
)
def test_large_ends_of_a_gpt_are_units_of_their_own(tied: bool, vocabulary: int, expected: list[str]) -> None:
    model = GPT(gpt_config("gpt-nano", vocab_size=vocabulary, tied=tied))
    units = names(choose_units(model, model_blocks(model), model_ends(model)))
    blocks = [f"layers.{number}" for number in range(4)]
    assert sorted(units) == sorted([*blocks, *expected])
