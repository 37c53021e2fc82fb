from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError, UsageError
from paceline.models.gpt import GPT, SIZES, Attention, Rotary, gpt_config
from paceline.models.registry import model_blocks, num_parameters
from paceline.plan.model_shape import ModelShape

# parameters in millions, least and most
CLASSES = {
    "gpt-nano": (0.1, 0.2),
    "gpt-micro": (0.5, 1.0),
    "gpt-mini": (2.0, 4.0),
    "gpt-11m": (10.5, 11.5),
    "gpt-124m": (124.0, 125.0),
    "gpt-350m": (345.0, 360.0),
    "gpt-1.1b": (1000.0, 1300.0),
    "gpt-3b": (2900.0, 3100.0),
    "gpt-7b": (6500.0, 7000.0),
}

FORMS = list(itertools.product(["rotary", "learned"], [4, 2, 1]))


def make(**overrides: Any) -> GPT:
    torch.manual_seed(0)
    small: dict[str, Any] = {"layers": 2, "context": 16, "vocab_size": 11}
    return GPT(gpt_config("gpt-nano", **(small | overrides)))


def random_tokens(batch: int = 2, length: int = 10) -> Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))


def excited(model: GPT) -> GPT:
    """Scales all weights up, so that no path through the model is too faint for a test to see."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    return model


# Sizes


@pytest.mark.some(2)
@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_the_parameters_that_its_name_says(size: str) -> None:
    with torch.device("meta"):
        millions = num_parameters(GPT(SIZES[size])) / 1e6
    least, most = CLASSES[size]
    assert least <= millions <= most


def test_the_classic_size_counts_as_the_formula() -> None:
    with torch.device("meta"):
        model = GPT(SIZES["gpt-124m"])
    assert num_parameters(model) == 12 * (12 * 768**2 + 2 * 768) + 768 + (50304 + 1024) * 768


def test_overrides_replace_fields_and_none_does_not() -> None:
    config = gpt_config("gpt-11m", dropout=0.2, layers=None, vocab_size=65)
    assert (config.dropout, config.layers, config.vocab_size) == (0.2, 6, 65)


def test_kv_heads_and_mlp_width_keep_their_proportion_unless_given() -> None:
    config = gpt_config("gpt-nano", heads=8, width=128)
    assert (config.kv_heads, config.mlp_width) == (4, 256)
    config = gpt_config("gpt-nano", heads=8, width=128, kv_heads=8, mlp_width=99)
    assert (config.kv_heads, config.mlp_width) == (8, 99)


def test_a_gpt_without_size_follows_the_current_family() -> None:
    config = gpt_config(layers=2, heads=3, width=96, context=8, vocab_size=5)
    assert (config.kv_heads, config.mlp_width, config.norm, config.positions) == (3, 256, "rms", "rotary")
    assert gpt_config(layers=2, heads=3, width=96, context=8, vocab_size=5, mlp="gelu").mlp_width == 384


def test_a_gpt_without_size_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"lacks model\.heads, model\.context\n"):
        gpt_config(layers=2, width=96, vocab_size=5)


def test_an_unknown_size_or_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no GPT size 'gpt-125m'; did you mean 'gpt-124m'\? there are gpt-nano, "):
        gpt_config("gpt-125m")
    with pytest.raises(UsageError, match="no field 'n_layers'; did you mean 'layers'"):
        gpt_config("gpt-nano", n_layers=3)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"width": 66}, ["width = 66 is not a multiple of model.heads = 4", "try model.width = 64 or 72"]),
        ({"width": 60}, ["model.width / model.heads = 60 / 4 = 15 is odd", "model.positions = learned"]),
        ({"kv_heads": 3}, ["heads = 4 is not a multiple of model.kv_heads = 3", "try model.kv_heads = 1"]),
        ({"layers": 0, "norm": "batch"}, ["layers = 0", "norm = 'batch'", "one of rms, layer", "2 problems"]),
        ({"vocab_size": 0}, ["model.vocab_size = 0 is less than 1"]),
        ({"dropout": 1.0}, ["model.dropout = 1.0", "below 1"]),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_all_problems(overrides: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        gpt_config("gpt-nano", **overrides)
    for text in says:
        assert text in str(raised.value)


def test_learned_positions_take_odd_heads() -> None:
    assert gpt_config("gpt-nano", width=60, positions="learned").head_width == 15


# Forward


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("tied", [True, False])
def test_tokens_become_logits(norm: Any, mlp: Any, tied: bool) -> None:
    model = make(norm=norm, mlp=mlp, tied=tied)
    for batch, length in ((2, 10), (1, 1), (3, 16), (0, 4)):
        assert model(random_tokens(batch, length)).shape == (batch, length, 11)


def test_it_starts_near_the_uniform_guess() -> None:
    logits = make(tied=False)(random_tokens(8, 16))
    loss = F.cross_entropy(logits.flatten(0, 1), random_tokens(8, 16).flatten())
    assert loss.item() == pytest.approx(math.log(11), abs=0.1)


def test_tokens_beyond_the_context_are_refused() -> None:
    with pytest.raises(UsageError, match="17 long, but the model's context is 16"):
        make()(random_tokens(1, 17))


@pytest.mark.parametrize(("positions", "kv_heads"), FORMS)
def test_a_later_token_leaves_earlier_logits_unchanged(positions: Any, kv_heads: int) -> None:
    model = excited(make(positions=positions, kv_heads=kv_heads)).double()
    tokens = random_tokens()
    before = model(tokens)
    for changed in (1, 5, 9):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 11
        after = model(other)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-13)
        differs = (after[:, changed:] - before[:, changed:]).abs().amax(dim=(0, 2))
        assert (differs > 1e-6).all(), "every position from the change on sees it"


@pytest.mark.parametrize(("positions", "kv_heads"), FORMS)
def test_the_order_of_earlier_tokens_matters(positions: Any, kv_heads: int) -> None:
    model = excited(make(positions=positions, kv_heads=kv_heads, layers=1)).double()
    tokens = torch.tensor([[3, 7, 5, 1], [7, 3, 5, 1]])
    last = model(tokens)[:, -1]
    assert not torch.allclose(last[0], last[1])


@pytest.mark.parametrize(("positions", "kv_heads"), FORMS)
def test_grouped_attention_is_that_of_its_definition(positions: Any, kv_heads: int) -> None:
    config = gpt_config("gpt-nano", kv_heads=kv_heads, positions=positions)
    attention = Attention(config).double()
    torch.nn.init.normal_(attention.query.weight)
    torch.nn.init.normal_(attention.key.weight)
    x = torch.randn(2, 7, config.width, dtype=torch.float64)
    turn = attention.rotary or torch.nn.Identity()
    heads = []
    for head in range(4):
        kv_head = head * kv_heads // 4
        query = turn(attention.query(x)[..., head * 16 : (head + 1) * 16].unsqueeze(1))[:, 0]
        key = turn(attention.key(x)[..., kv_head * 16 : (kv_head + 1) * 16].unsqueeze(1))[:, 0]
        value = attention.value(x)[..., kv_head * 16 : (kv_head + 1) * 16]
        scores = query @ key.transpose(1, 2) / 4
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
        heads.append(scores.softmax(-1) @ value)
    torch.testing.assert_close(attention(x), attention.output(torch.cat(heads, dim=-1)))


# Rotary positions


def score(rotary: Rotary, query: Tensor, key: Tensor, i: int, j: int) -> float:
    """Returns the dot product of a query at position i with a key at position j."""
    rows = torch.zeros(2, 1, 64, 8, dtype=torch.float64)
    rows[0, 0, i], rows[1, 0, j] = query, key
    turned = rotary(rows)
    return float(turned[0, 0, i] @ turned[1, 0, j])


@settings(deadline=None)  # the first call pays for torch
@given(st.integers(0, 31), st.integers(0, 31), st.integers(0, 32))
def test_rotary_scores_depend_on_distance_only(i: int, j: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    rotary = Rotary(64, 8).double()
    rotary.reset_parameters()
    assert score(rotary, query, key, i, j) == pytest.approx(score(rotary, query, key, i + shift, j + shift), abs=1e-10)


def test_rotary_keeps_lengths_and_the_first_position_and_tells_distances_apart() -> None:
    rotary = Rotary(64, 8)
    x = torch.randn(2, 3, 64, 8)
    turned = rotary(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    ones = torch.ones(8, dtype=torch.float64)
    assert len({round(score(rotary, ones, ones, i, 0), 6) for i in range(64)}) == 64


def test_rotary_keeps_the_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert Rotary(16, 8)(torch.randn(1, 1, 4, 8, dtype=dtype)).dtype == dtype


def test_rotary_tables_are_in_no_state_dict() -> None:
    model = make()
    assert [name for name, _ in model.named_buffers()]
    assert not [name for name in model.state_dict() if "rotary" in name]


# Parameters, gradients, dropout


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied, untied = make(tied=True), make(tied=False)
    assert [name for name, _ in tied.named_parameters() if "head" in name] == []
    assert num_parameters(untied) - num_parameters(tied) == 11 * 64
    with torch.no_grad():
        before = tied(torch.tensor([[1]]))
        tied.token_embedding.weight[5] *= 3
        after = tied(torch.tensor([[1]]))
    changed = (before != after).flatten().nonzero().flatten().tolist()
    assert changed == [5]


def test_a_tied_weight_gets_the_gradients_of_both_uses() -> None:
    tied = excited(make(tied=True)).double()
    untied = GPT(gpt_config("gpt-nano", layers=2, context=16, vocab_size=11, tied=False)).double()
    weights = tied.state_dict()
    untied.load_state_dict({**weights, "head.weight": weights["token_embedding.weight"]})
    for model in (tied, untied):
        F.cross_entropy(model(random_tokens()).flatten(0, 1), random_tokens().flatten()).backward()
    assert untied.head is not None
    both = untied.token_embedding.weight.grad + untied.head.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(tied.token_embedding.weight.grad, both)


def test_there_are_no_biases() -> None:
    for overrides in ({}, {"norm": "layer", "mlp": "gelu", "positions": "learned"}):
        assert not [name for name, _ in make(**overrides).named_parameters() if "bias" in name]


def test_residual_projections_start_smaller_with_depth() -> None:
    model = GPT(gpt_config("gpt-11m", layers=8))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
            continue
        residual = name.endswith(("output.weight", "down.weight"))
        assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.02), name


@pytest.mark.some(2)
@pytest.mark.parametrize(("positions", "kv_heads"), FORMS)
def test_float64_gradients_are_those_of_finite_differences(positions: Any, kv_heads: int) -> None:
    model = excited(make(positions=positions, kv_heads=kv_heads, width=16, layers=1)).double()
    tokens = random_tokens(1, 5)
    names = [name for name, _ in model.named_parameters()]

    def loss(*parameters: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (tokens,))
        return F.cross_entropy(logits[0], tokens[0])

    assert torch.autograd.gradcheck(loss, tuple(model.parameters()), fast_mode=True)


def test_dropout_acts_in_training_only() -> None:
    model, tokens = make(dropout=0.5), random_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), make().eval()(tokens)), "dropout changes nothing else"


def test_dropout_reaches_the_attention_weights() -> None:
    attention = Attention(gpt_config("gpt-nano", dropout=0.5))
    x = torch.randn(2, 8, 64)
    assert not torch.equal(attention(x), attention(x))


# What other rooms rely on


def test_blocks_hold_all_but_embeddings_norm_and_head() -> None:
    model = make(tied=False)
    blocks = model_blocks(model)
    assert blocks == list(model.layers)
    outside = {name.split(".")[0] for name, _ in model.named_parameters()} - {"layers"}
    assert outside == {"token_embedding", "norm", "head"}


# dynamo looks at .grad of the block's input, which is no leaf
@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("positions", "kv_heads", "backend"),
    [("rotary", 2, "eager"), ("rotary", 2, "aot_eager"), ("learned", 4, "aot_eager")],
)
def test_a_block_compiles_as_one_graph(positions: Any, kv_heads: int, backend: str) -> None:
    model = make(positions=positions, kv_heads=kv_heads)
    tokens = random_tokens()
    expected = model(tokens)
    torch._dynamo.reset()
    for block in model_blocks(model):
        block.compile(backend=backend, fullgraph=True)
    found = model(tokens)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_it_runs_forward_and_backward_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT(gpt_config("gpt-1.1b", layers=2))
        logits = model(torch.zeros(2, 64, dtype=torch.long))
        logits.sum().backward()
    assert logits.shape == (2, 64, 32000)
    assert all(parameter.grad is not None for parameter in model.parameters())


# torch says so on a CPU that has no instructions for bfloat16
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_it_runs_in_bfloat16_and_under_autocast() -> None:
    tokens = random_tokens()
    assert make().bfloat16()(tokens).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert make()(tokens).dtype == torch.bfloat16


def test_a_config_is_frozen_and_compares_by_value() -> None:
    config = SIZES["gpt-nano"]
    assert isinstance(config, ModelShape)
    assert config == gpt_config("gpt-nano")
    with pytest.raises(AttributeError):
        config.layers = 3  # type: ignore[misc]
