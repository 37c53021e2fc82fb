"""What is told of a model whose own code breaks: where, in which part, who makes it, and what its data are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor

from paceline.config import config_from_dict
from paceline.config.data_sections import DataShape
from paceline.config.hf_folder import parse_image_settings
from paceline.train.resolve import RULE, first_line, has_own_code, is_users, made_at, misfit, needs_values, raised_at
from paceline.train.run_state import _preprocessor


class Inner(nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such thing.\nand more")


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.plain = Inner(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(self.plain(x))
        return result


def error_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_the_line_and_the_part_of_the_model_are_told() -> None:
    model = Outer()
    error = error_of(lambda: model(torch.zeros(1, 2)))
    line = Inner.forward.__code__.co_firstlineno + 1
    assert raised_at(error, model) == f"at test_own_errors.py:{line} in forward, where inner is Inner()"
    assert raised_at(error) == f"at test_own_errors.py:{line} in forward"
    assert raised_at(error, nn.Linear(1, 1)) == f"at test_own_errors.py:{line} in forward"
    wrong = error_of(lambda: model(torch.zeros(1, 3)))
    line = Outer.forward.__code__.co_firstlineno + 1
    told = f"at test_own_errors.py:{line} in forward, where plain is {model.plain!r}"
    assert raised_at(wrong, model) == told


def misfit_of(sample: Any, place: str, made: str = "") -> list[str]:
    data: Any = SimpleNamespace(train=[sample])
    return str(misfit(error_of(lambda: Inner()(None)), "it cannot be", data, place, made=made)).splitlines()


def test_a_misfit_has_the_error_the_place_the_maker_and_the_data() -> None:
    assert misfit_of((torch.zeros(3, 4), 1), "at a.py:7 in forward", "b.py:1") == [
        "it cannot be: RuntimeError: no such thing",
        "  it is raised at a.py:7 in forward; b.py:1 makes the model",
        f"  {RULE}; the inputs of its data are [3, 4] a sample",
        "  mend the model, or take the data that it is made for",
    ]
    assert misfit_of((torch.zeros(3), 1), "at a.py:7", "a.py:1")[1] == "  it is raised at a.py:7"
    assert misfit_of((torch.zeros(3), 1), "at a.py:7")[1] == "  it is raised at a.py:7"
    others = [(torch.zeros(2), "[2] a sample"), ((), "of type tuple"), (["a"], "of type str"), (3, "of type int")]
    for sample, words in others:
        assert misfit_of(sample, "there")[2].endswith(f"its data are {words}")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotImplementedError("x"), True),
        (fake_tensor.DataDependentOutputException("x"), True),
        (RuntimeError("Cannot copy out of meta tensor; no data!"), True),
        (RuntimeError("on the meta device"), True),
        (TypeError("can't call .numpy()"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_a_model_that_looks_at_values_is_told_apart(error: Exception, expected: bool) -> None:
    assert needs_values(error) == expected
    assert first_line(ValueError()) == ""
    assert first_line(ValueError("a.\nb")) == "a"


def config_of(**sections: Any) -> Any:
    values: dict[str, Any] = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
    return config_from_dict({**values, "train": {"steps": 1, "global_batch": 4}, **sections})


def test_code_of_the_user_s_own_is_known() -> None:
    own = {"kind": "factory", "factory": "own_model:Own"}
    plain, factory = config_of(), config_of(model=own)
    loss = config_of(train={"steps": 1, "global_batch": 4, "loss": "own_model:Own"})
    assert [(has_own_code(each), is_users(each)) for each in (plain, factory, loss)] == [
        (False, False),
        (True, True),
        (False, True),
    ]
    assert made_at(plain) == ""
    assert made_at(factory).startswith("own_model.py:")
    assert made_at(config_of(model={**own, "factory": "no_such_module:make"})) == ""
    assert made_at(plain, Outer).startswith("test_own_errors.py:")
    assert made_at(plain, len) == ""  # type: ignore[arg-type]


def test_images_are_described_in_the_library_s_words() -> None:
    shape = DataShape(kind="classes", size=8, mean=[127.5, 0.0, 255.0], std=[51.0, 255.0, 510.0])
    found = parse_image_settings(_preprocessor(shape))
    assert (found.size, found.mean) == (8, pytest.approx((127.5, 0.0, 255.0)))
    assert found.std == pytest.approx((51.0, 255.0, 510.0))
