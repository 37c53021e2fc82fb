"""Configs of models that cannot be planned for are refused with what they lack; the smallest microbatch of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import config_from_dict
from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline.search import automatic
from paceline.search.request import read_hugging_face


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"hidden_size": 8, "num_hidden_layers": 2}, "the config lacks model_type\n  it says how the other fields"),
        ({"hidden_size": 8}, "the config lacks model_type: it is not the config.json of a Hugging Face model\n"),
        ({"num_hidden_layers": 8}, "the config lacks model_type: it is not the config.json of a Hugging Face model\n"),
        ({}, "the config lacks model_type: it is not the config.json of a Hugging Face model\n"),
        ({"text_config": {"hidden_size": 8, "num_hidden_layers": 2}}, "the config lacks model_type\n  it says"),
        ({"model_type": "lama"}, "the config: model_type 'lama' is not known\n  plans are for transformers"),
        ({"model_type": "zzzz"}, "the config: model_type 'zzzz' is not known\n  plans are for transformers"),
    ],
)
def test_a_config_without_a_known_type_is_refused(values: dict[str, Any], lines: str) -> None:
    with pytest.raises(UsageError) as told:
        read_hugging_face(values)
    assert str(told.value).startswith(lines)
    hints = {"lama": "did you mean llama?", "zzzz": "describe it as model.kind: gpt in a config"}
    hint = hints.get(values.get("model_type", ""))
    assert hint is None or str(told.value).endswith(f"\n  {hint}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "holds a list\n  a config.json is an object with fields"),
        (b"{", "is no JSON: "),
        (b"\xff\xfe", "cannot be read: it is no text"),
        (None, "cannot be read: No such file or directory\n  name the config.json of a Hugging Face model"),
    ],
)
def test_a_file_that_is_no_config_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as told:
        read_hugging_face(path)
    assert str(told.value).startswith(f"{path} {words}")


@pytest.mark.parametrize(("microbatch", "expected"), [("auto", (1, 24)), (8, (8, 3))])
def test_a_microbatch_that_is_found_later_is_judged_at_its_smallest(
    microbatch: int | str, expected: tuple[int, int]
) -> None:
    values = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
    config = config_from_dict({**values, "train": {"steps": 1, "global_batch": 24, "microbatch": microbatch}})
    found = automatic._smallest(Layout(microbatch=8, accumulate=3), config)
    assert (found.microbatch, found.accumulate) == expected
