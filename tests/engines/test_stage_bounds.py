"""Where a model is cut: the best cut by trying all of them, memory, counts and names."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.engines.stages.stages import bounds_from_layers, bounds_from_names
from paceline.errors import UsageError
from paceline.models.gpt import GPT
from paceline.models.layers import model_layers
from paceline.models.mlp import MLPClassifier
from paceline.models.registry import model_blocks
from paceline.plan.model_shape import ModelShape
from paceline.predict.memory.facts import LayerCost, choose_bounds


def costs(*times: float, state: int = 0, kept: int = 0) -> list[LayerCost]:
    return [
        LayerCost(name=str(i), forward=time / 3, backward=2 * time / 3, state_bytes=state, activation_bytes=kept)
        for i, time in enumerate(times)
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_the_slowest_stage_is_as_fast_as_in_the_best_of_all_cuts(times: list[int], stages: int) -> None:
    layers = costs(*map(float, times))
    if stages > len(times):
        with pytest.raises(UsageError, match=f"{stages} stages of a model with {len(times)} layers"):
            choose_bounds(layers, stages)
        return
    bounds = choose_bounds(layers, stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(times)
    assert all(begin < end for begin, end in itertools.pairwise(bounds))
    every = [(0, *cut, len(times)) for cut in itertools.combinations(range(1, len(times)), stages - 1)]

    def slowest(cut: tuple[int, ...]) -> float:
        return max(sum(each.total for each in layers[begin:end]) for begin, end in itertools.pairwise(cut))

    assert slowest(bounds) == pytest.approx(min(map(slowest, every)))


def test_memory_moves_the_cut() -> None:
    layers = [
        LayerCost(name="wide", forward=1.0, backward=2.0, state_bytes=80),
        *(LayerCost(name=f"l{i}", forward=1.0, backward=2.0, state_bytes=20) for i in range(3)),
    ]
    assert choose_bounds(layers, 2) == (0, 2, 4)
    assert choose_bounds(layers, 2, memory_bytes=90) == (0, 1, 4)
    with pytest.raises(UsageError, match="no cut into 2 stages fits"):
        choose_bounds(layers, 2, memory_bytes=79)


def test_microbatches_in_flight_count() -> None:
    layers = costs(1, 1, 1, 1, kept=10)
    assert choose_bounds(layers, 2, memory_bytes=30, in_flight=[3, 1]) == (0, 1, 4)
    assert choose_bounds(layers, 2, memory_bytes=math.inf, in_flight=[3, 1]) == (0, 2, 4)


def small_gpt(layers: int = 4) -> GPT:
    return GPT(
        ModelShape(layers=layers, heads=2, kv_heads=1, width=8, mlp_width=8, context=8, vocab_size=11, tied=True)
    )


@pytest.mark.parametrize(
    ("counts", "bounds"),
    [
        ([2, 2], (0, 3, 6)),
        ([1, 3], (0, 2, 6)),
        ([0, 4], (0, 1, 6)),
        ([4, 0], (0, 5, 6)),
        ([0, 2, 2, 0], (0, 1, 3, 5, 6)),
        ([4], (0, 6)),
    ],
)
def test_counts_are_of_blocks_and_the_ends_join(counts: list[int], bounds: tuple[int, ...]) -> None:
    model = small_gpt()
    assert bounds_from_layers(model_layers(model), counts, model_blocks(model)) == bounds


def test_without_blocks_every_layer_counts() -> None:
    model = MLPClassifier(12, 8, 3)
    assert bounds_from_layers(model_layers(model), [1, 2], model_blocks(model)) == (0, 1, 3)


@pytest.mark.parametrize(
    ("counts", "stages", "text"),
    [
        ([2, 3], None, "adds up to 5, and the model has 4 blocks"),
        ([2, 2], 3, "is for 2 stages, and there are 3"),
        ([5, -1], None, "has -1"),
        ([2, 0, 2], None, "leaves nothing for stage 1"),
        ([0, 0, 4], None, "leaves nothing for stage 1"),
    ],
)
def test_counts_that_do_not_fit_are_named(counts: list[int], stages: int | None, text: str) -> None:
    model = small_gpt()
    with pytest.raises(UsageError) as caught:
        bounds_from_layers(model_layers(model), counts, model_blocks(model), stages=stages)
    assert text in str(caught.value)
    assert "try [" in str(caught.value)


def test_names_say_where_stages_begin() -> None:
    layers = model_layers(small_gpt())
    assert bounds_from_names(layers, ["layers.3", "layers.1"]) == (0, 2, 4, 6)
    assert bounds_from_names(layers, ["norm"], stages=2) == (0, 5, 6)
    sequential = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    assert bounds_from_names(model_layers(sequential), ["2"]) == (0, 1, 2)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.9"], "'layers.9' is no layer to cut before"),
        (["token_embedding"], "'token_embedding' is no layer to cut before"),
        (["layers.1", "layers.1"], "'layers.1' is named twice"),
        (["layers.1", "layers.2"], "2 split points for 2 stages"),
    ],
)
def test_names_that_do_not_fit_are_named(names: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        bounds_from_names(model_layers(small_gpt()), names, stages=2)
    assert text in str(caught.value)
    assert "layers.0, layers.1" in str(caught.value)
