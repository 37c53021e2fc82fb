"""Shapes of models that tables know by name: parameters by arithmetic against the counts they are published with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_bench.scored.published import known_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLAMA3_8B", 8.03),
        ("LLAMA3_70B", 70.6),
        ("LLAMA3.1_405B", 405.9),
        ("LLAMA2-7B", 6.74),
        ("LLAMA2-13B", 13.02),
        ("LLAMA2-70B", 68.98),
    ],
)
def test_dense_models_have_their_published_parameters(name: str, billions: float) -> None:
    model = known_model(name)
    assert model is not None
    assert model.params / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3_235B_a22B", 235.1, 22.2),
        ("Qwen3_30B_a3B", 30.5, 3.3),
        ("Mixtral 8x7B", 46.7, 12.9),
        ("Mixtral 8x22B", 140.6, 39.1),
        ("DeepSeekV3", 671.0, 37.0),
        ("Kimi_K2", 1026.0, 32.6),
        ("DeepSeekV4 Flash", 284.0, 13.0),
    ],
)
def test_mixtures_have_their_published_active_parameters(name: str, billions: float, active: float) -> None:
    model = known_model(name)
    assert model is not None
    assert model.params / 1e9 == pytest.approx(billions, rel=0.002)
    # Layers that are not alike (three dense ones in DeepSeek-V3) make the sum over equal layers a little larger.
    assert replace(model, total_params=0.0).params / 1e9 == pytest.approx(billions, rel=0.05)
    embedded = model.active_matmul_params + model.end_params - model.vocab_size * model.width
    assert embedded / 1e9 == pytest.approx(active, rel=0.015)


@pytest.mark.parametrize(("name", "active"), [("GPT OSS 120B", 5.1), ("GPT OSS 20B", 3.6)])
def test_some_count_no_embedding_as_active(name: str, active: float) -> None:
    model = known_model(name)
    assert model is not None
    assert model.active_matmul_params / 1e9 == pytest.approx(active, rel=0.01)


def test_latent_attention_has_its_weights_and_scores() -> None:
    model = known_model("DeepSeekV3")
    assert model is not None
    queries, keys = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 512 * 128 * 256
    assert model.attention_params == pytest.approx(queries + keys + 128 * 128 * 7168, rel=0.005)
    assert model.score_width == 128 * (192 + 128) // 2


def test_sentence_models_cost_the_weights_that_a_token_meets() -> None:
    layer = 4 * 1024**2 + 2 * 1024 * 4096
    translation = 6 * layer + 6 * (layer + 4 * 1024**2) + 33708 * 1024
    recurrent = (2 * 8 + 12 + 2 * 8) * 1024**2, (4 * 12 + 2) * 1024**2 + 32320 * 1024
    expected = {"Transformer-big": 2 * translation, "GNMT v2": sum(recurrent)}
    for name, flops in expected.items():
        model = known_model(name)
        assert model is not None
        assert model.flops == pytest.approx(flops, rel=0.03), name
