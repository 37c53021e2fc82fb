"""Fixes that messages propose are found in their words. The tests of each rule paste them."""

from __future__ import annotations

import pytest
from pasted import proposals


@pytest.mark.parametrize(
    ("fix", "found"),
    [
        ("set a.b, or leave it", []),
        ("try train.steps = 3", [["train.steps=3"]]),
        (
            "set parallel.strategy = zero1 or fsdp (on one rank too), or remove memory.offload",
            [["parallel.strategy=zero1"], ["parallel.strategy=fsdp"], ["memory.offload=null"]],
        ),
        (
            "remove train.microbatch and set train.accumulate = 8, or give a number",
            [["train.microbatch=null", "train.accumulate=8"]],
        ),
        ("try data = {kind: text}, or model = {kind: mlp}", [["data={kind: text}"], ["model={kind: mlp}"]]),
        ("did you mean model.factory = torch.nn:Linear?", [["model.factory=torch.nn:Linear"]]),
        ("set parallel.pipeline = 2 with a count for each stage", []),
    ],
)
def test_what_a_fix_proposes_is_read_from_its_words(fix: str, found: list[list[str]]) -> None:
    assert proposals(fix) == found
