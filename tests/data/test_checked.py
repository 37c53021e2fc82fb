"""Samples of the user's own code: what is wrong is told with the number of the sample, when it is first read."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.config import config_from_dict
from paceline.data.checked import SampleRules, find_bad
from paceline.data.fetch import fetch_batch
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.order import DataOrder
from paceline.data.registry import data_of
from paceline.errors import BadSampleError


def pair(**wrong: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes 20 samples; sample 13 is wrong."""
    inputs, targets = torch.ones(20, 3), torch.arange(20) % 4
    if "input" in wrong:
        inputs[13, 1] = wrong["input"]
    if "target" in wrong:
        targets = targets.to(torch.tensor(wrong["target"]).dtype)
        targets[13] = wrong["target"]
    return inputs, targets


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"input": torch.nan}, r"'inputs'\[1\] is nan"),
        ({"input": -torch.inf}, r"'inputs'\[1\] is -inf"),
        ({"target": 4}, "'targets' is 4, and there are 4 classes, from 0"),
        ({"target": -1}, "'targets' is -1, and there are 4 classes, from 0"),
        ({"target": 1.5}, "'targets' is .* of type torch.float32, and a class is of an integer type"),
    ],
)
@pytest.mark.parametrize("part", ["training", "evaluation"])
def test_a_run_names_the_sample_that_is_wrong(
    wrong: dict[str, Any], reason: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = TensorDataset(*pair()), TensorDataset(*pair(**wrong))
    module = types.ModuleType("a_users_data")
    module.make = lambda: (bad, good) if part == "training" else (good, bad)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_data", module)
    values = {
        "model": {"kind": "mlp", "input_dim": 3, "num_classes": 4},
        "data": {"kind": "factory", "factory": "a_users_data:make"},
        "train": {"steps": 1, "global_batch": 4},
    }
    data = data_of(config_from_dict(values))
    order = DataOrder(length=20, global_batch=4, seed=0)
    number = "[0-9]+" if "float" in reason else "13"
    told = rf"the {part} set of data.factory = 'a_users_data:make': sample {number} cannot be used: {reason}"
    is_training = part == "training"
    loader: Any = TrainLoader(data.train, order).steps(num_steps=5) if is_training else EvalLoader(data.eval, 4)  # type: ignore[arg-type]
    with pytest.raises(BadSampleError, match=told):
        list(loader)
    assert fetch_batch(data.train, np.arange(4), epoch=1)  # what was looked at once is only read
    own = data_of(config_from_dict({**values, "train": {**values["train"], "loss": "a_users_data:make"}}))
    assert fetch_batch(own.train, np.array([13])), "a loss of the user's may know what to do with it"


def test_a_stream_is_looked_at_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_users_data")
    module.make = lambda: iter(zip(*pair(input=torch.nan), strict=True))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_data", module)
    values = {
        "model": {"kind": "mlp", "input_dim": 3, "num_classes": 4},
        "data": {"kind": "stream", "factory": "a_users_data:make", "samples": 10},
        "train": {"steps": 1, "global_batch": 4},
    }
    data = data_of(config_from_dict(values))
    with pytest.raises(BadSampleError, match=r"a_users_data:make': sample 13 cannot be used: 'inputs'\[1\] is nan"):
        fetch_batch(data.train, np.arange(5), epoch=1)


def test_what_a_batch_may_hold() -> None:
    tokens = torch.tensor([[0, 7], [3, 9], [-1, 2]])
    rules = SampleRules(vocab_size=9, classes=9)
    assert find_bad((tokens, torch.full((3, 2), -100)), rules) == {
        1: "'inputs'[1] is 9, and there are 9 tokens, from 0",
        2: "'inputs'[0] is -1, and there are 9 tokens, from 0",
    }
    images = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    assert find_bad((images, torch.tensor([0, 1])), SampleRules(classes=2)) == {}
    assert find_bad((torch.full((2, 1), 3e38), torch.tensor([0, 1])), SampleRules()) == {}  # whose sum is too large
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert find_bad({"inputs": mask, "mask": mask}, SampleRules()) == {}
    assert find_bad({"inputs": [mask, mask * 0]}, SampleRules()) == {0: "a value[1] is nan"}
