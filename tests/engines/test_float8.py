"""Linear layers with operands of 8 bits: their numbers, which layers they are, and training with them."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from engine_cases import token_losses
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines import float8
from paceline.engines.apply import parallelize
from paceline.engines.float8 import Float8Linear, choose_float8, float8_linear, scales_of, swap_linears
from paceline.engines.precision import PRECISIONS, Precision, check_precision
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.models.registry import model_blocks

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("by_row", [False, True], ids=["tensor", "row"])
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def far_apart(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


def gradients(y: Tensor, x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, (x, weight), g)


def make_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab_size": 48, "tied": False, **options}
    return GPT(gpt_config(**sizes))


# Scales.


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_the_largest_powers_of_two_that_fit(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    numbers = [1e-30, 1.0, 1.74, 1.75, math.nextafter(1.76, 2), 2.0, 447.0, 448.0, 449.0, 6e4, 1e30]
    scale, inverse = scales_of(torch.tensor(numbers), dtype)
    assert scale.tolist() == [2.0 ** math.floor(math.log2(top / torch.tensor(n).item())) for n in numbers]
    assert torch.equal(scale * inverse, torch.ones(len(numbers)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_smallest_numbers_have_a_finite_scale_and_others_are_not_hidden(dtype: torch.dtype) -> None:
    scale, inverse = scales_of(torch.tensor([0.0, 1e-45, 3e38]), dtype)
    assert scale.isfinite().all()
    assert (inverse >= torch.finfo(torch.float32).tiny).all()
    assert scales_of(torch.tensor([math.inf, math.nan]), dtype)[0].isnan().all()


# Products.


@BOTH
def test_a_product_and_its_gradients_are_as_close_as_three_bits_of_a_fraction(by_row: bool) -> None:
    """A number of e4m3 is off by 2^-5 at most, 2^-4 in e5m2: two of them by 0.037 on average, or 0.06."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 128, dtype=torch.bfloat16, requires_grad=True) for n in (64, 96))
    bias = torch.randn(96, dtype=torch.bfloat16)
    y = float8_linear(x.view(4, 16, 128), weight, bias, by_row=by_row)
    assert (y.shape, y.dtype) == ((4, 16, 96), torch.bfloat16)
    g = torch.randn_like(y)
    plain = F.linear(x.float().view(4, 16, 128), weight.float(), bias.float())
    assert 0.01 < far_apart(y, plain) < 0.045
    bound = 0.045 if by_row else 0.07
    for found, expected in zip(gradients(y, x, weight, g), gradients(plain, x, weight, g.float()), strict=True):
        assert found.dtype is torch.bfloat16
        assert 0.01 < far_apart(found, expected) < bound


@BOTH
@pytest.mark.parametrize("case", ["input", "weight", "gradient", "all"])
def test_zeros_give_zeros(case: str, by_row: bool) -> None:
    x, weight = (torch.randn(n, 32, dtype=torch.bfloat16, requires_grad=True) for n in (16, 16))
    with torch.no_grad():
        for name, tensor in {"input": x, "weight": weight}.items():
            tensor.mul_(0.0 if case in (name, "all") else 1.0)
    y = float8_linear(x, weight, None, by_row=by_row)
    g = torch.randn_like(y) * (0.0 if case in ("gradient", "all") else 1.0)
    for tensor in (y, *gradients(y, x, weight, g)):
        assert tensor.isfinite().all()
    assert bool(y.any()) == (case == "gradient")


@BOTH
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_huge_and_tiny_numbers_keep_their_digits(by_row: bool, size: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64), torch.randn(32, 64)
    y = float8_linear((x * size).requires_grad_(), weight, None, by_row=by_row)
    assert far_apart(y / size, F.linear(x, weight)) < 0.045


@BOTH
def test_what_is_not_finite_is_not_hidden(by_row: bool) -> None:
    for value in (math.inf, math.nan):
        x, weight = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
        x[3, 5] = value
        assert not float8_linear(x, weight, None, by_row=by_row)[3].isfinite().any()


def test_rows_with_scales_of_their_own_forgive_an_outlier() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64), torch.randn(32, 64)
    x[0] *= 2.0**16
    errors = [far_apart(float8_linear(x, weight, None, by_row=each)[1:], F.linear(x, weight)[1:]) for each in (0, 1)]
    assert errors[1] < 0.045 < 0.2 < errors[0]


@BOTH
def test_a_cast_does_not_depend_on_what_lies_beside(by_row: bool) -> None:
    """Scales are powers of two: parts of a batch round as the whole does, whatever its largest number."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 32) * torch.rand(64, 1), torch.randn(32, 32)
    whole = float8_linear(x, weight, None, by_row=by_row)
    parts = [float8_linear(part, weight, None, by_row=by_row) for part in x.split(16)]
    assert torch.equal(torch.cat(parts), whole)


def test_rows_that_are_no_multiple_of_sixteen_and_none_at_all_are_computed_as_ever() -> None:
    weight = torch.randn(32, 16, requires_grad=True)
    for shape in ((3, 5, 16), (0, 16), (16,), (4, 0, 16)):
        x = torch.randn(shape)
        assert torch.equal(float8_linear(x, weight, None, by_row=False), F.linear(x, weight))


@BOTH
def test_frozen_weights_and_inputs_without_gradients_cost_no_product(by_row: bool, monkeypatch: Any) -> None:
    calls: list[int] = []
    product = float8._product
    monkeypatch.setattr(float8, "_product", lambda *args, **kwargs: calls.append(1) or product(*args, **kwargs))
    for needs_x, needs_weight in ((True, False), (False, True)):
        x, weight = torch.randn(16, 16, requires_grad=needs_x), torch.randn(16, 16, requires_grad=needs_weight)
        float8_linear(x, weight, None, by_row=by_row).sum().backward()
    assert len(calls) == 4


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@BOTH
def test_layers_that_read_the_same_input_share_its_cast(by_row: bool) -> None:
    """Compilers compute once what has the same operators and constants."""
    x = torch.randn(16, 32, requires_grad=True)
    weights = [torch.randn(48, 32, requires_grad=True) for _ in range(2)]

    def work(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.stack([float8_linear(x, each, None, by_row=by_row) for each in weights])

    casts: list[int] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        found = [node.meta.get("val") for node in graph.graph.nodes if "_to_copy" in str(node.target)]
        casts.append([each.shape for each in found if isinstance(each, Tensor) and each.dtype in DTYPES].count(x.shape))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition)
    torch.compile(work, backend=backend, fullgraph=True)(x, *weights)
    assert casts[0] == (2 if by_row else 1)  # with scales of rows, one cast for each dimension


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@pytest.mark.some(1)
@BOTH
def test_compiled_code_gives_the_same_bits(by_row: bool) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 32, dtype=torch.bfloat16, requires_grad=True) for n in (48, 16))

    def work(x: Tensor, weight: Tensor) -> Tensor:
        return float8_linear(torch.tanh(x), weight, None, by_row=by_row)

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    for rows in (48, 32):  # a dynamic number of rows
        part = x.detach()[:rows].clone().requires_grad_()
        plain, found = work(part, weight), compiled(part, weight)
        assert torch.equal(plain, found)
        for one, other in zip(*(gradients(y, part, weight, torch.ones_like(y)) for y in (plain, found)), strict=True):
            assert torch.equal(one, other)


# Which layers.


class Block(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.plain = nn.Linear(16, 32)
        self.odd = nn.Linear(32, 20)
        self.own = Own(16, 16)
        self.wrapped = nn.Linear(16, 16)
        self.wrapped.forward = lambda x: x  # type: ignore[method-assign]
        self.tied = nn.Linear(16, 64, bias=False)
        self.tied.weight = embedding.weight
        self.attention = nn.MultiheadAttention(16, 2)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block(self.embedding) for _ in range(2))
        self.head = nn.Linear(16, 64)


def test_only_plain_linear_layers_inside_blocks_are_swapped_and_the_rest_is_said_why() -> None:
    model = Model()
    found = choose_float8(model, model_blocks(model))
    assert found.chosen == ("layers.0.plain", "layers.1.plain")
    assert {name: why for name, why in found.left.items() if name.startswith(("layers.0", "head"))} == {
        "layers.0.odd": "sizes that are no multiples of 16",
        "layers.0.own": "a forward of its own",
        "layers.0.wrapped": "a forward of its own",
        "layers.0.tied": "tied to another layer",
        "layers.0.attention.out_proj": "a forward of its own",
        "head": "outside the blocks",
    }
    assert str(found).startswith("2 of 13 linear layers in fp8; in bf16: layers.0.odd, layers.1.odd (sizes that")
    assert "(a forward of its own)" in str(found)


def test_a_swapped_model_keeps_its_names_values_parameters_and_kind() -> None:
    model = make_gpt()
    state, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    found = swap_linears(model, model_blocks(model), by_row=True)
    assert (len(found.chosen), list(found.left)) == (14, ["head"])
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    query = model.layers[0].attention.query  # type: ignore[union-attr]
    assert isinstance(query, Float8Linear)
    assert query.by_row
    assert type(query) is type(model.layers[1].mlp.down)  # type: ignore[union-attr]
    query.reset_parameters()  # as its own class draws
    assert query.weight.std().item() == pytest.approx(0.02, rel=0.2)
    again = copy.deepcopy(model)
    tokens = torch.randint(0, 48, (1, 16))
    assert torch.equal(again(tokens), model(tokens))


def test_a_model_without_such_layers_is_refused() -> None:
    models = {"for there is none": nn.Sequential(nn.Conv2d(1, 1, 1)), "outside the blocks": nn.Linear(16, 16)}
    for reason, model in models.items():
        with pytest.raises(UsageError, match=rf"no linear layer of \w+ can compute in fp8.*{reason}(.|\n)*bf16_master"):
            parallelize(model, SoloCommunicator(CPU), precision="fp8")


def test_an_old_gpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UsageError, match=r"capability 8\.0, and tensor cores have such numbers from 8\.9(.|\n)*master"):
        check_precision(PRECISIONS["fp8"], torch.device("cuda"))
    check_precision(PRECISIONS["fp8_row"], CPU)  # emulated


# Training.


def train(comm: Communicator, strategy: str, steps: int = 3, layers: int = 2, **options: Any) -> list[float]:
    """Trains a GPT on sequences that go on as they began; returns the mean losses."""
    engine = parallelize(make_gpt(layers=layers), comm, strategy, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    first = [torch.randint(0, 48, (8, 1), generator=torch.Generator().manual_seed(step)) for step in range(steps)]
    tokens = [(each + 5 * torch.arange(17)) % 48 for each in first]
    return token_losses(engine, optimizer, comm, [(each[:, :-1], each[:, 1:]) for each in tokens], max_norm=1.0)


@pytest.mark.parametrize("recipe", ["tensor", pytest.param("row", marks=pytest.mark.exhaustive)])
def test_forty_steps_end_where_those_without_do(recipe: Any) -> None:
    """Within 1 % of the first loss, whatever is left of it. In fp32 besides, which CPUs are faster in than in bf16."""
    policies = [Precision(), Precision(name="own", float8=recipe)]
    plain, found = (train(SoloCommunicator(CPU), "ddp", steps=40, layers=1, precision=policy) for policy in policies)
    assert plain[-1] < 0.6 * plain[0]
    assert found != plain
    assert found[-1] == pytest.approx(plain[-1], abs=0.01 * plain[0])


@functools.cache
def one_process_losses(precision: str) -> list[float]:
    return train(SoloCommunicator(CPU), "ddp", precision=precision)


@pytest.mark.some(1)
@covering(
    strategy=["ddp", "zero1", "zero2", "fsdp", "hybrid"],
    precision=["fp8", "fp8_row"],
    checkpoint_activations=["none", "full", "matmuls"],
)
def test_ranks_train_as_one_process(strategy: str, precision: str, checkpoint_activations: str) -> None:
    """A rank's part of the batch is rounded as the whole batch is, but for numbers far below its largest."""
    options = {"precision": precision, "checkpoint_activations": checkpoint_activations}
    more, ranks = ({"shard_ranks": 2}, 4) if strategy == "hybrid" else ({}, 2)
    for found in run_virtual(lambda comm: train(comm, strategy, **options, **more), ranks):
        assert found == pytest.approx(one_process_losses(precision), rel=1e-3)


def test_full_sharding_gathers_weights_with_eight_bits() -> None:
    """A byte for each weight inside blocks, in forward and in backward but for the last block; the rest in bf16."""

    def sent(comm: Communicator, precision: str) -> int:
        trace = Trace(comm.device)
        engine = parallelize(make_gpt(), TracedCommunicator(comm, trace), "fsdp", precision=precision)
        for _ in range(2):  # the first pass learns the order
            trace.num_bytes.clear()
            engine(torch.zeros(1, 16, dtype=torch.int64)).float().sum().backward()
        return trace.num_bytes["all_gather"]

    found = {each: run_virtual(lambda comm, each=each: sent(comm, each), 2)[0] for each in ("fp8", "fp8_row")}
    weights = [module.weight.numel() for module in make_gpt().layers.modules() if isinstance(module, nn.Linear)]
    saved = found["fp8_row"] - found["fp8"]
    assert saved == pytest.approx(1.5 * sum(weights), rel=0.05)  # of two blocks: both in forward, one in backward


def test_gathered_weights_are_those_of_the_masters_in_eight_bits() -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        engine = parallelize(make_gpt(), comm, "fsdp", precision="fp8")
        seen: list[Tensor] = []
        down = engine.module.get_submodule("layers.1.mlp.down")
        down.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
        engine(torch.zeros(1, 16, dtype=torch.int64)).float().sum().backward()
        return seen[0], engine.full_state_dict()["layers.1.mlp.down.weight"]

    for found, master in run_virtual(work, 3):
        scale, inverse = scales_of(master.bfloat16().abs().amax(), torch.float8_e4m3fn)
        expected = float8.round_to(master.bfloat16(), scale, torch.float8_e4m3fn).float() * inverse
        assert found.dtype is torch.bfloat16
        # Each rank's slice has a scale of its own: numbers far below the largest keep more digits.
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=float(inverse) * 2.0**-9)
