"""Plain values come back as they were, through JSON text."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.tensors import decode, encode
from paceline.errors import CheckpointError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["tensor", "tuple", "float", "dict", "a"]), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
@pytest.mark.exhaustive
def test_values_come_back(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert found == value
    assert repr(found) == repr(value)  # types, order and signs of zero, too


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 7).to(dtype)
    found = decode(json.loads(json.dumps(encode({"a": [value]}))))["a"][0]
    assert (found.dtype, found.shape) == (dtype, value.shape)
    assert torch.equal(found, value)


def test_numbers_that_json_has_not() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]
    assert decode(encode(np.float64(0.5))) == 0.5
    assert decode(encode(np.int64(3))) == 3


def test_what_cannot_be_saved_is_named_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"the state\.a\[1\] is of type set(.|\n)*leave it out"):
        encode({"a": [1, {2}]})
