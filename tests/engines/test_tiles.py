"""MLPs in tiles: what a whole one computes, with the hidden features of one tile."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_cases import LiveBytes, check_bits, train
from test_tensor_hf import gpt2, llama
from torch import nn

import paceline
from paceline.comm.base import Communicator
from paceline.engines import tiles
from paceline.engines.blocks import checkpoint_blocks, compile_model, take_notes
from paceline.engines.float8 import swap_linears
from paceline.engines.tiles import tile_mlps
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.models.lora import add_lora
from paceline.models.registry import model_blocks, model_mlps
from paceline.plan.layout import TILE_BYTES, Layout, tile_rows

TOKENS = torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(9))
WIDTH, HIDDEN = 16, 48


def gpt(dropout: float = 0.0, mlp: str = "swiglu") -> nn.Module:
    sizes = {"layers": 3, "heads": 2, "width": WIDTH, "mlp_width": HIDDEN, "context": 12, "vocab_size": 11}
    return GPT(gpt_config(**sizes, dropout=dropout, mlp=mlp))


def lora() -> nn.Module:
    model = llama()
    add_lora(model, rank=2, alpha=4.0, dropout=0.0, targets=(), trained=())
    return model


class Words(nn.Module):
    """Gives the logits of a library's model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).logits  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swiglu": gpt,
    "gelu": lambda: gpt(mlp="gelu"),
    "llama": lambda: Words(llama()),
    "gpt2": lambda: Words(gpt2()),
    "lora": lambda: Words(lora()),
}


def make(factory: Callable[[], nn.Module], count: int, policy: str = "none", *, with_norms: bool = False) -> nn.Module:
    torch.manual_seed(4)
    model = factory().double()
    if count != 1:
        tile_mlps(model, count, with_norms=with_norms)
    checkpoint_blocks(model_blocks(model), policy)
    return model


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


# The same results.


@pytest.mark.parametrize(
    ("name", "count", "policy"),
    [
        ("swiglu", 2, "none"),
        ("swiglu", 5, "full"),
        ("gelu", 24, "every_2"),
        ("llama", 3, "full"),
        ("gpt2", 3, "none"),
        ("lora", 2, "full"),
    ],
)
def test_gradients_are_those_of_whole_mlps(name: str, count: int, policy: str) -> None:
    found, expected = (train(make(MODELS[name], each, policy), TOKENS) for each in (count, 1))
    assert largest_difference(found, expected) < 1e-12


SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"strategy": "fsdp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "pipeline": (2, {"pipeline": 2, "schedule": "zb-h1"}),
    "tensor": (2, {"tensor": 2, "gathers_logits": True}),
    "tensor over fsdp": (4, {"tensor": 2, "strategy": "fsdp", "gathers_logits": True}),
    "units inside of blocks": (2, {"strategy": "fsdp", "units": ("layers.0.mlp", "layers.1.attention", "layers.2")}),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", SPREAD)
def test_every_engine_trains_as_with_whole_mlps(name: str, policy: str) -> None:
    ranks, options = SPREAD[name]

    def states(count: int) -> dict[str, torch.Tensor]:
        def work(comm: Communicator) -> dict[str, torch.Tensor]:
            torch.manual_seed(4)
            layout = Layout(accumulate=2, checkpoint_activations=policy, mlp_tiles=count, **options)
            engine = paceline.parallelize(gpt().double(), comm, layout=layout)
            optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
            for _ in range(2):
                batches = [TOKENS.roll(engine.batch_comm.rank + shift, 0) for shift in range(2)]
                engine.run_microbatches(batches, lambda model, x: (model(x).pow(2).sum(), 1.0), 0.01)
                optimizer.step()
                optimizer.zero_grad()
            return engine.full_state_dict()

        return paceline.run_virtual(work, ranks=ranks)[0]

    assert largest_difference(states(3), states(1)) < 1e-12


class Plainly(nn.Module):
    """The tiles as plain operations, which autograd sees through."""

    def __init__(self, mlp: nn.Module, rows: int) -> None:
        super().__init__()
        self.mlp, self.rows = mlp, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.reshape(-1, 1, x.shape[-1]).split(self.rows)
        return torch.cat([self.mlp(part) for part in parts]).reshape(x.shape)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_random_numbers_and_autocast_come_back_in_the_second_run(policy: str) -> None:
    def with_dropout() -> nn.Module:
        model = gpt()
        for block in model.layers:
            block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.5))
        return model

    model, plain = make(with_dropout, 3, policy).float(), make(with_dropout, 1).float()
    for block in plain.layers:
        block.mlp = Plainly(block.mlp, 8)
    found = train(model, TOKENS, autocast=True)
    expected = {name.replace("mlp.mlp.", "mlp."): each for name, each in train(plain, TOKENS, autocast=True).items()}
    assert torch.equal(found["random"], expected["random"])
    assert largest_difference(found, expected) < 1e-2  # tiles of bf16 are added in float32, and there in bf16


@pytest.mark.parametrize("by_row", [False, True])
def test_products_of_8_bits(by_row: bool) -> None:
    def model(count: int) -> nn.Module:
        torch.manual_seed(4)
        made = gpt()
        swap_linears(made, model_blocks(made), by_row=by_row)
        if count != 1:
            tile_mlps(made, count)
        return made

    tokens = TOKENS.repeat(4, 1)  # 96: tiles of 32 rows
    found, expected = train(model(3), tokens), train(model(1), tokens)
    # A scale is that of a tile: powers of two, so that only numbers near the end of the range are rounded otherwise.
    assert largest_difference(found, expected) < 1e-3


def test_weight_gradients_of_16_bits_are_added_in_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def error() -> float:
        torch.manual_seed(0)
        model, x = Row(mlp=nn.Linear(8, 8)).bfloat16(), torch.rand(4096, 8, dtype=torch.bfloat16)
        tile_mlps(model, 512)
        mlp = model.layers[0]["mlp"]
        mlp(x).sum().backward()
        exact = x.double().sum(0)
        return float(((mlp.weight.grad.double() - exact) / exact).abs().max())

    assert error() < 2**-8
    monkeypatch.setattr(tiles, "_add", lambda total, term: term if total is None else total + term)
    assert error() > 2**-5  # a long sum in 8 digits stops to grow


# What it takes.


@pytest.mark.parametrize("policy", ["none", "full"])
def test_hidden_features_are_those_of_one_tile(policy: str) -> None:
    def most(count: int, size: int) -> int:
        """Returns how many tensors with the hidden features of so many tokens there were at the same time."""
        model = make(gpt, count, policy)
        with LiveBytes(model) as live:
            model(TOKENS).sum().backward()
        return live.largest[8 * HIDDEN * size]

    tokens = TOKENS.numel()
    assert most(1, tokens) >= 4
    assert most(4, tokens) == 0
    assert 3 <= most(4, tokens // 4) <= 7


@pytest.mark.parametrize(("policy", "runs"), [("none", 2), ("full", 2)])
def test_an_mlp_runs_twice_whether_its_block_is_checkpointed_or_not(policy: str, runs: int) -> None:
    model = make(gpt, 4, policy)
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith("mlp.down"):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model(TOKENS).sum().backward()
    assert list(calls.values()) == [4 * runs] * 3


def test_norms_of_a_library_run_in_tiles_too() -> None:
    def most(model: nn.Module) -> int:
        """Returns how many tensors in fp32, as large as the stream of all tokens, there were at the same time."""
        with LiveBytes(model.bfloat16()) as live:
            model(TOKENS).sum().backward()
        return live.largest[4 * 16 * TOKENS.numel()]

    found = train(make(MODELS["llama"], 3, "full", with_norms=True), TOKENS)
    assert largest_difference(found, train(make(MODELS["llama"], 1), TOKENS)) < 1e-12
    without, within = (make(MODELS["llama"], 3, "full", with_norms=each) for each in (False, True))
    assert most(within) <= most(without) - 4


def test_sizes_follow_from_what_a_tile_has() -> None:
    assert tile_rows(131_072, 2 * 5632, 0) == 16_384
    assert tile_rows(131_072, 2 * 5632, 3) == 43_691
    assert tile_rows(1000, 2 * 5632, 0) == 1000
    assert tile_rows(10**6, TILE_BYTES, 0) == 128
    whole, by_size = make(gpt, 1), make(gpt, 0)
    check_bits(train(by_size, TOKENS), train(whole, TOKENS))  # below the size, an MLP is left alone


def test_frozen_parameters_and_inputs_without_gradients() -> None:
    def parts(count: int) -> nn.Module:
        model = make(gpt, count)
        model.token_embedding.requires_grad_(False)
        model.layers[0].attention.requires_grad_(False)
        model.layers[0].attention_norm.requires_grad_(False)
        model.layers[0].mlp_norm.requires_grad_(False)
        model.layers[0].mlp.up.requires_grad_(False)
        return model

    found, expected = train(parts(3), TOKENS), train(parts(1), TOKENS)
    assert "layers.0.mlp.gate.weight.grad" in found
    assert "layers.0.mlp.up.weight.grad" not in found
    assert largest_difference(found, expected) < 1e-12


def test_a_copy_runs_its_own_mlps_and_a_graph_may_be_walked_twice() -> None:
    model = make(gpt, 3, "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2.0)
    loss = twin(TOKENS).sum()
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in twin.named_parameters()}
    loss.backward()
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("policy", ["full", "none"])
def test_tiles_and_blocks_are_compiled(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # here: to load it takes seconds

    compiler = CompileCounterWithBackend("aot_eager")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=compiler))
    model = make(gpt, 3, policy)
    compile_model(model, whole=False)
    found = train(model, TOKENS)
    assert largest_difference(found, train(make(gpt, 1), TOKENS)) < 1e-12
    assert compiler.frame_count == 4  # around the MLP, and the MLP with gradients and without, for all blocks
    notes = take_notes(model)
    assert not any(note.problem for note in notes)
    assert {"block 1 of 3", "MLP 1 of 3, without gradients", "MLP 3 of 3"} <= {note.what for note in notes}


# Mistakes that a test must see.


def one_tile_lost(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _total, term: original(None, term)


def other_random_numbers(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda surroundings: surroundings.autocast()


@pytest.mark.parametrize(
    ("owner", "name", "bug", "dropout"),
    [(tiles, "_add", one_tile_lost, 0.0), (tiles._Surroundings, "again", other_random_numbers, 0.5)],
)
def test_mistakes_are_seen(
    owner: Any, name: str, bug: Callable[..., Any], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factory() -> nn.Module:
        model = gpt()
        for block in model.layers:
            block.mlp = nn.Sequential(block.mlp, nn.Dropout(dropout))
        return model

    right = train(make(factory, 3), TOKENS)
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))
    assert largest_difference(train(make(factory, 3), TOKENS), right) > 1e-6


# Which modules, and bad input.


class Parts(nn.ModuleDict):
    """A block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.values():
            x = part(x)
        return x


class Row(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parts(parts) for _ in range(2))


class TwoInputs(nn.Linear):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + residual


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


def test_mlps_are_found_by_name_or_named_by_the_model() -> None:
    model = gpt()
    assert model_mlps(model) == [block.mlp for block in model.layers]
    inner = Parts({"ffn": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    row = Row(inside=inner)
    assert model_mlps(row) == [inner["ffn"]]  # once, though two blocks have it
    row.mlps = lambda: [inner["norm"]]  # type: ignore[method-assign, assignment]
    assert model_mlps(row) == [inner["norm"]]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), r"mlp_tiles = 2, and no MLP is found.*method mlps\(\)"),
        (Row(mlp=nn.Sequential(nn.Conv1d(4, 4, 3))), "has a Conv1d.*each token by itself"),
        (Row(mlp=nn.BatchNorm1d(4)), "has a BatchNorm1d"),
        (Row(mlp=Parts({"experts": nn.Linear(4, 4)})), "has experts"),
        (Row(ffn=TwoInputs(4, 4)), "takes x, residual"),
    ],
)
def test_what_is_no_mlp_is_refused(model: nn.Module, told: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){told}"):
        tile_mlps(model, 2)


def test_what_returns_more_is_refused_when_it_runs() -> None:
    model = Row(mlp=Pair(4, 4))
    tile_mlps(model, 2)
    with pytest.raises(UsageError, match="returns a tuple"):
        model.layers[0]["mlp"](torch.randn(6, 4))
    with pytest.raises(UsageError, match="in tiles already"):
        tile_mlps(model, 2)


def test_a_tile_of_one_dim_and_evaluation() -> None:
    model = make(gpt, 3).eval()
    with torch.no_grad():
        assert torch.allclose(model(TOKENS), make(gpt, 1).eval()(TOKENS), atol=1e-12)
    mlp = model.layers[0].mlp
    assert torch.allclose(mlp(torch.ones(WIDTH).double()), mlp(torch.ones(1, WIDTH).double())[0])
    assert F.mse_loss(mlp(torch.ones(6, WIDTH).double())[0], mlp(torch.ones(1, WIDTH).double())[0]) < 1e-24


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
