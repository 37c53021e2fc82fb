"""What is said of ranks whose replicas have drifted apart: three names, and more are counted."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.torch_dist import SoloCommunicator
from paceline.engines.groups import ReplicaWatch


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a"], r"1 parameters \(a\)"),
        (["a", "b", "c"], r"3 parameters \(a, b, c\)"),
        (["a", "b", "c", "d"], r"4 parameters \(a, b, c, \.\.\.\)"),
    ],
)
def test_three_parameters_are_named(names: list[str], words: str) -> None:
    watch = ReplicaWatch(SoloCommunicator(torch.device("cpu")))
    with pytest.warns(UserWarning, match=words):
        watch._warn_of_drift(1, names, [[0.1], [0.1]])
    with pytest.warns(UserWarning, match=r"the learning rates 0\.2, and rank 0 0\.1"):
        watch._warn_of_drift(1, [], [[0.1], [0.2]])
