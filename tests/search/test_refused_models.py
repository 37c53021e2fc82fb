"""Configs of models that cannot be planned for are refused with what they lack; the smallest microbatch of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import config_from_dict
from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline.search import automatic
from paceline.search.request import read_hugging_face, why_no_config


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


DENSE = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
DENSE |= {"vocab_size": 32, "max_position_embeddings": 64}
EXPERTS = {"model_type": "qwen2_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, **DENSE}
OF_EXPERTS = 3 * 8 * 3 * 4 + 8 * 3  # of a layer: the experts, and who chooses among them
OF_SHARED = 3 * 8 * 8 + 8  # a shared one with a gate
OF_DENSE = 3 * 8 * 16


@pytest.mark.parametrize(
    ("changes", "active", "shared", "sparse", "is_ours"),
    [
        ({}, 2, 0, 4, True),
        ({"decoder_sparse_step": 2}, 2, 0, 2, False),
        ({"mlp_only_layers": [0, 3]}, 2, 0, 2, False),
        ({"mlp_only_layers": [0, 1]}, 2, 0, 2, True),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, 2, 0, 1, True),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, 2, 0, 1, False),
        ({"shared_expert_intermediate_size": 8}, 2, 2, 4, False),
        ({"num_experts_per_tok": 3}, 3, 0, 4, True),
    ],
)
def test_parameters_of_a_mixture_are_counted_layer_by_layer(
    changes: dict[str, Any], active: int, shared: int, sparse: int, is_ours: bool
) -> None:
    dense, _ = read_hugging_face({"model_type": "qwen2", **DENSE})
    found, _ = read_hugging_face({**EXPERTS, **changes})
    rest = dense.layers * dense.attention_params + dense.end_params
    assert (found.experts, found.active, found.inner_width, found.mlp_width) == (3, active, 4, 16)
    assert (found.shared_experts, found.num_sparse, bool(found.total_params)) == (shared, sparse, not is_ours)
    of_layer = OF_EXPERTS + (OF_SHARED if shared else 0)
    assert found.params == rest + sparse * of_layer + (4 - sparse) * OF_DENSE
    assert why_no_config(found) == (
        "" if is_ours else "its 3 experts have dense layers between them, or a shared one with a gate"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 4}, "num_experts_per_tok = 4 of 3 experts"),
        ({"num_attention_heads": 3}, "3 heads do not divide a width of 8"),
        ({"num_key_value_heads": 4}, "4 heads of keys and values do not divide 2 heads"),
        ({"hidden_size": 0}, "hidden_size = 0 is no whole number above 0"),
        ({"vocab_size": True}, "vocab_size = True is no whole number above 0"),
        ({"vocab_size": None, "hidden_size": None}, "lacks hidden_size, vocab_size"),
        ({"model_type": "qwen2"}, "num_experts = 3: a qwen2 has no mixture of experts"),
    ],
)
def test_sizes_that_make_no_model_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as told:
        read_hugging_face({**EXPERTS, **changes})
    assert words in str(told.value)
    assert str(told.value).endswith("take the whole config.json of the model")
