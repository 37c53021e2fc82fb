"""Tensor parallelism against one plain process: the GPT of this package, in all its options, and what goes wrong."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from engine_cases import assert_near
from gloo_pool import GlooPool
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.comm.base import Communicator, Work, WrappedCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.blocks import checkpoint_blocks
from paceline.engines.tensor.apply import SplitRule, TensorPlan, apply_tensor_parallel, plan_for
from paceline.engines.tensor.layers import ColumnLinear, RowLinear, SplitLogits
from paceline.engines.tensor.plans import ready_plans
from paceline.errors import RankFailedError, UsageError
from paceline.models.gpt import GPT
from paceline.plan.model_shape import ModelShape

TOLERANCE = 1e-10
STEPS = 3
VOCABULARY = 19  # of the degrees here none divides it, nor the MLP's width
SHAPE = {"layers": 2, "heads": 4, "kv_heads": 4, "width": 16, "mlp_width": 22, "context": 8, "vocab_size": VOCABULARY}
CLASSIC = {"norm": "layer", "mlp": "gelu", "positions": "learned", "tied": True}
CURRENT = {"norm": "rms", "mlp": "swiglu", "positions": "rotary", "tied": False}
MODELS: dict[str, dict[str, Any]] = {
    "classic": CLASSIC,
    "current": CURRENT,
    "grouped": {**CURRENT, "heads": 8, "width": 32, "tied": True},
    "mixed": {**CURRENT, "positions": "learned"},
    "mixed too": {**CLASSIC, "positions": "rotary", "tied": False},
    "norms of heads": {**CURRENT, "qk_norm": "head", "head_dim": 6},
    "norms over heads": {**CURRENT, "qk_norm": "whole"},
}
Values = dict[str, torch.Tensor]
Change = Callable[[GPT], Any]


def make(name: str, **options: Any) -> GPT:
    torch.manual_seed(3)
    model = GPT(ModelShape(**{**SHAPE, **MODELS[name], **options})).double()
    with torch.no_grad():  # as large as after some training: no two parts are nearly alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (3, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[step % 3, step:] = -100
    return tokens[:, :-1], targets


def summed_loss(logits: torch.Tensor | SplitLogits, targets: torch.Tensor) -> torch.Tensor:
    if isinstance(logits, SplitLogits):
        return logits.cross_entropy(targets)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def train(model: nn.Module, steps: int = STEPS) -> tuple[list[float], Values]:
    """Trains without adapting to the gradients' size, which would hide one that is too large; gives the last ones."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.003, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        tokens, targets = batch(step)
        loss = summed_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients


def work(
    comm: Communicator, name: str, is_sequence: bool, gathers: bool = False, change: Change | None = None
) -> tuple[list[float], Values, Values]:
    model = make(name)
    layout = apply_tensor_parallel(model, comm, sequence=is_sequence, gathers_logits=gathers)
    if change is not None:
        change(model)
    losses, gradients = train(model)
    whole = {name: layout.full(name, value, comm) for name, value in model.state_dict().items()}
    return losses, whole, {name: layout.full(name, value, comm) for name, value in gradients.items()}


@functools.cache
def one_process(name: str, change: Change | None) -> tuple[list[float], Values, Values]:
    """What one plain process computes: losses, values and gradients, which nobody changes."""
    model = make(name)
    if change is not None:
        change(model)
    losses, gradients = train(model)
    return losses, model.state_dict(), gradients


def assert_same(found: list[tuple[list[float], Values, Values]], name: str, change: Change | None = None) -> None:
    """Every rank has one process's losses, gradients and values; what is not split, the same bits as rank 0."""
    losses, values, gradients = one_process(name, change)
    for result in found:
        torch.testing.assert_close(result[0], losses, rtol=0, atol=TOLERANCE)
        assert list(result[1]) == list(values)
        assert result[2].keys() == gradients.keys()
        for each, expected in ((result[1], values), (result[2], gradients)):
            for key, value in each.items():
                assert_near(value, expected[key], TOLERANCE, key)
        for key, value in result[1].items():
            assert torch.equal(value, found[0][1][key]), key


@pytest.mark.some(2)
@covering(
    always={"case": ["current on 4"]},
    case={
        "classic on 2": ("classic", 2),
        "current on 4": ("current", 4),
        "grouped on 2": ("grouped", 2),
        "grouped on 4": ("grouped", 4),
        "mixed on 2": ("mixed", 2),
        "mixed too on 4": ("mixed too", 4),
        "current on 1": ("current", 1),
        "norms of heads on 2": ("norms of heads", 2),
        "norms over heads on 4": ("norms over heads", 4),
    },
    is_sequence=[False, True],
)
def test_every_gpt_trains_as_on_one_process(case: tuple[str, int], is_sequence: bool) -> None:
    name, ranks = case
    assert_same(run_virtual(lambda comm: work(comm, name, is_sequence), ranks), name)


@pytest.mark.parametrize(("name", "is_sequence", "ranks"), [("classic", True, 2), ("current", False, 2)])
@pytest.mark.exhaustive
def test_the_same_on_gloo_ranks(gloo_pool: GlooPool, name: str, is_sequence: bool, ranks: int) -> None:
    assert_same(gloo_pool.run(work, name, is_sequence, ranks=ranks, timeout_s=90.0), name)


@pytest.mark.parametrize(("name", "is_sequence"), [("norms of heads", True), ("norms over heads", False)])
def test_norms_of_queries_and_keys_are_those_of_all_heads(name: str, is_sequence: bool) -> None:
    assert_same(run_virtual(lambda comm: work(comm, name, is_sequence), 2), name)


def test_logits_may_be_gathered() -> None:
    assert_same(run_virtual(lambda comm: work(comm, "current", False, True), 2), "current")


def freeze(model: GPT) -> None:
    model.token_embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model.layers[1].attention.query.requires_grad_(False)
    model.norm.requires_grad_(False)


CHANGES: dict[str, Change] = {
    "frozen": freeze,
    "checkpointed": lambda model: checkpoint_blocks(model.blocks(), "full"),
    "products kept": lambda model: checkpoint_blocks(model.blocks(), "matmuls"),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_models_that_are_changed_after_being_split(change: str, is_sequence: bool) -> None:
    found = run_virtual(lambda comm: work(comm, "current", is_sequence, False, CHANGES[change]), 2)
    assert_same(found, "current", CHANGES[change])


def compiled_work(comm: Communicator, is_sequence: bool) -> tuple[list[float], Values, Values]:
    def compile_blocks(model: GPT) -> None:
        for block in model.blocks():
            block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]

    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
    return work(comm, "current", is_sequence, False, compile_blocks)


@pytest.mark.exhaustive
def test_blocks_may_be_compiled(gloo_pool: GlooPool) -> None:
    assert_same(gloo_pool.run(compiled_work, True, ranks=2, timeout_s=170.0), "current")


def test_evaluation_gives_the_logits_and_tokens_of_one_process() -> None:
    tokens, targets = batch(1)
    with torch.no_grad():
        expected = make("classic").eval()(tokens)

    def evaluate(comm: VirtualCommunicator) -> tuple[Any, ...]:
        model = make("classic").eval()
        apply_tensor_parallel(model, comm, sequence=True)
        with torch.no_grad():
            logits = model(tokens)
        assert not logits.local.requires_grad
        return logits.gather(), logits.argmax(-1), logits.cross_entropy(targets), logits.shape

    for logits, best, loss, shape in run_virtual(evaluate, 4):
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(best, expected.argmax(-1))
        torch.testing.assert_close(loss, summed_loss(expected, targets), rtol=0, atol=TOLERANCE)
        assert shape == expected.shape


class Seen(TorchFunctionMode):
    """Counts calls of ``F.linear``, as who computes weight gradients later does."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


def test_whoever_watches_for_products_sees_each_with_its_parameter() -> None:
    def watched(comm: VirtualCommunicator) -> tuple[int, int, Values]:
        model = make("current")
        layout = apply_tensor_parallel(model, comm)
        tokens, targets = batch(0)
        with Seen() as seen:
            loss = summed_loss(model(tokens), targets)
        loss.backward()
        own = {id(p) for p in model.parameters()}
        gradients = {
            name: layout.full(name, p.grad, comm) for name, p in model.named_parameters() if p.grad is not None
        }
        return len(seen.weights), sum(id(weight) in own for weight in seen.weights), gradients

    _, expected = train(make("current"), steps=1)
    for calls, own, gradients in run_virtual(watched, 2):
        assert calls == own == 2 * 7 + 1  # of a block: query, key, value, output, gate, up, down; and the head
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=TOLERANCE)


def test_a_backward_for_inputs_alone_leaves_nothing_behind() -> None:
    def twice(comm: VirtualCommunicator) -> Values:
        model = make("current")
        layout = apply_tensor_parallel(model, comm)
        tokens, targets = batch(0)
        stream = model.embed(tokens).detach().requires_grad_()
        x = stream
        for block in model.layers:
            x = block(x)
        loss = summed_loss(model.unembed(x), targets)
        (alone,) = torch.autograd.grad(loss, [stream], retain_graph=True)
        loss.backward()
        assert stream.grad is not None
        assert torch.equal(alone, stream.grad)
        return {n: layout.full(n, p.grad, comm) for n, p in model.named_parameters() if p.grad is not None}

    _, expected = train(make("current"), steps=1)
    for gradients in run_virtual(twice, 2):
        assert gradients.keys() == expected.keys() - {"token_embedding.weight"}
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_sequence", [False, True])
def test_autocast_computes_in_bf16_with_gradients_in_float32(is_sequence: bool) -> None:
    def half(comm: VirtualCommunicator) -> tuple[Values, torch.dtype]:
        model = make("classic").float()
        layout = apply_tensor_parallel(model, comm, sequence=is_sequence)
        tokens, targets = batch(0)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        logits.cross_entropy(targets).backward()
        return {n: layout.full(n, p.grad, comm) for n, p in model.named_parameters()}, logits.local.dtype

    plain = make("classic").float()
    tokens, targets = batch(0)
    summed_loss(plain(tokens), targets).backward()
    for gradients, dtype in run_virtual(half, 2):
        assert dtype == torch.bfloat16
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert gradients[name].dtype == torch.float32
            difference = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert difference < 0.05, (name, difference)


# What is sent, and when.


@pytest.mark.parametrize("is_sequence", [False, True])
def test_a_block_takes_two_sums_each_way(is_sequence: bool) -> None:
    def counted(comm: VirtualCommunicator) -> tuple[list[str], list[str]]:
        traces = Trace(torch.device("cpu"), keep=True)
        model = make("current", layers=1)
        apply_tensor_parallel(model, TracedCommunicator(comm, traces), sequence=is_sequence)
        block = model.layers[0]
        x = torch.randn(3, 8 // comm.size if is_sequence else 8, 16, dtype=torch.float64, requires_grad=True)
        y = block(x)
        forward = [each.kind for each in traces.operations]
        y.sum().backward()
        return forward, [each.kind for each in traces.operations][len(forward) :]

    for forward, backward in run_virtual(counted, 2):
        if is_sequence:
            assert forward == ["all_gather", "reduce_scatter"] * 2
            # Those of the norms' weights are the all-reduces.
            assert backward == ["all_gather", "reduce_scatter", "all_reduce"] * 2
        else:
            assert forward == backward == ["all_reduce"] * 2


class Watched(WrappedCommunicator):
    """A communicator that notes when an all-reduce starts and when it is awaited."""

    def __init__(self, inner: VirtualCommunicator, notes: list[str]) -> None:
        super().__init__(inner)
        self.notes = notes

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> Work:
        self.notes.append("start")
        return Noted(self.inner.all_reduce(tensor, op), self.notes)


class Noted:
    def __init__(self, inner: Work, notes: list[str]) -> None:
        self.inner = inner
        self.notes = notes

    def wait(self) -> None:
        self.notes.append("wait")
        self.inner.wait()


def test_weight_gradients_are_computed_while_the_inputs_gradient_is_summed() -> None:
    def watched(comm: VirtualCommunicator) -> list[str]:
        notes: list[str] = []
        model = make("current", layers=1)
        apply_tensor_parallel(model, Watched(comm, notes))  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            note = name.removesuffix(".weight").rpartition(".")[2]
            parameter.register_post_accumulate_grad_hook(lambda _, note=note: notes.append(note))
        tokens, targets = batch(0)
        loss = model(tokens).cross_entropy(targets)
        notes.clear()
        loss.backward()
        return notes

    for notes in run_virtual(watched, 2):
        parts = " ".join(notes).split("start ")[1:]
        assert [set(part.split(" wait")[0].split()) for part in parts] == [
            {"head"},
            {"gate", "up"},
            {"query", "key", "value"},
        ]


# Models of others.


class Perceptron(nn.Module):
    """Plain linear layers with biases; one of them is called twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mlp = nn.ModuleDict({"up": nn.Linear(6, 7), "never": nn.Linear(6, 7), "down": nn.Linear(7, 6)})
        self.body = Body(self.mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


class Body(nn.Module):
    def __init__(self, mlp: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = mlp
        self.uses_never = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_never:
            return self.layers["down"](self.layers["never"](x))
        return self.layers["down"](torch.tanh(self.layers["up"](x)) * self.layers["up"](0.5 * x))


PERCEPTRON = TensorPlan(
    name="perceptron",
    rules=(
        SplitRule(pattern="body", role="input"),
        SplitRule(pattern="up", role="column"),
        SplitRule(pattern="never", role="column"),
        SplitRule(pattern="down", role="row"),
        SplitRule(pattern="norm", role="between"),
    ),
)


@pytest.mark.parametrize("is_sequence", [False, True])
def test_a_plan_of_ones_own_for_layers_with_biases(is_sequence: bool) -> None:
    def run(model: Perceptron, part: slice) -> Values:
        x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        weights = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        for _ in range(2):
            (model(x[:, part]) * weights[:, part]).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def build() -> Perceptron:
        torch.manual_seed(2)
        return Perceptron().double()

    expected = run(build(), slice(None))

    def work(comm: VirtualCommunicator) -> Values:
        model = build()
        layout = apply_tensor_parallel(model, comm, PERCEPTRON, sequence=is_sequence)
        part = slice(2 * comm.rank, 2 * comm.rank + 2) if is_sequence else slice(None)
        return {name: layout.full(name, gradient, comm) for name, gradient in run(model, part).items()}

    for found in run_virtual(work, 2):
        assert found.keys() == expected.keys()
        assert "mlp.never.weight" not in found
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n} {m}"
            )


def test_a_layer_that_was_left_out_is_read_anew() -> None:
    def work(comm: VirtualCommunicator) -> torch.Tensor:
        torch.manual_seed(2)
        model = Perceptron()
        apply_tensor_parallel(model, comm, PERCEPTRON)
        with torch.autocast("cpu", torch.bfloat16):  # reads a copy of the weight
            model(torch.ones(1, 2, 6)).sum().backward()
        model.body.uses_never = True
        with torch.no_grad():
            for parameter in (*model.mlp["never"].parameters(), model.mlp["down"].bias):
                parameter.zero_()
            return model(torch.ones(1, 2, 6))

    for found in run_virtual(work, 2):
        assert torch.equal(found, torch.ones(1, 2, 6))


# Parts of the model.


def test_a_rank_has_its_part_in_memory_of_its_own() -> None:
    def sizes(comm: VirtualCommunicator) -> None:
        model = make("classic")
        before = dict(model.named_parameters())
        whole = {name: tuple(p.shape) for name, p in before.items()}
        layout = apply_tensor_parallel(model, comm)
        after = dict(model.named_parameters())
        assert all(after[name] is before[name] for name in before)  # the same objects: an optimizer keeps its own
        assert {name: split.shape for name, split in layout.splits.items()} == whole
        for name, parameter in after.items():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * 8
            assert tuple(parameter.shape) == layout.splits[name].local_shape(comm.rank, comm.size)
        assert isinstance(model.layers[0].mlp.up, ColumnLinear)
        assert isinstance(model.layers[0].mlp.down, RowLinear)
        assert isinstance(model.layers[0].mlp.up, nn.Linear)
        assert model.layers[0].mlp.up.out_features == after["layers.0.mlp.up.weight"].shape[0]

    run_virtual(sizes, 4)


@pytest.mark.parametrize("name", ["classic", "current"])
def test_a_model_on_the_meta_device_is_initialised_as_the_plain_one(name: str) -> None:
    def plain() -> GPT:
        return GPT(ModelShape(**{**SHAPE, **MODELS[name]}))

    torch.manual_seed(8)
    expected = plain().state_dict()

    def built(comm: VirtualCommunicator) -> Values:
        with torch.device("meta"):
            model = plain()
        layout = apply_tensor_parallel(model, comm, sequence=True)
        assert all(parameter.is_meta for parameter in model.parameters())
        torch.manual_seed(8)
        for module in model.modules():
            if module._parameters or module._buffers:
                module.to_empty(device="cpu", recurse=False)
                module.reset_parameters()
        return {name: layout.full(name, value, comm) for name, value in model.state_dict().items()}

    for found in run_virtual(built, 2):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_row_of_padding_stays_zero() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embedding = nn.Embedding(7, 4, padding_idx=5)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.token_embedding(tokens)

    plan = TensorPlan(name="tokens", rules=(SplitRule(pattern="token_embedding", role="embedding"),))
    tokens = torch.tensor([[0, 5, 6, 3]])

    def work(comm: VirtualCommunicator) -> Values:
        torch.manual_seed(1)
        model = Tokens()
        layout = apply_tensor_parallel(model, comm, plan)
        torch.manual_seed(1)
        model.token_embedding.reset_parameters()
        model(tokens).sum().backward()
        weight = model.token_embedding.weight
        assert weight.grad is not None
        return {"weight": layout.full("token_embedding.weight", weight, comm),
                "gradient": layout.full("token_embedding.weight", weight.grad, comm)}  # fmt: skip

    torch.manual_seed(1)
    plain = Tokens()
    plain(tokens).sum().backward()
    for found in run_virtual(work, 3):
        assert torch.equal(found["weight"], plain.token_embedding.weight)
        assert torch.equal(found["gradient"], plain.token_embedding.weight.grad)


def test_a_copy_of_a_split_model_is_split() -> None:
    def copied(comm: VirtualCommunicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = make("current")
        apply_tensor_parallel(model, comm)
        other = copy.deepcopy(model)
        tokens, targets = batch(0)
        losses = [summed_loss(each(tokens), targets) for each in (model, other)]
        losses[1].backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(parameter.grad is not None for parameter in other.parameters())
        return losses[0].detach(), losses[1].detach()

    for first, second in run_virtual(copied, 2):
        assert torch.equal(first, second)


# Bad input.


def refused(model: Callable[[], nn.Module], ranks: int = 2, **options: Any) -> str:
    """Returns what a rank was told; its model must be as it was."""

    def attempt(comm: VirtualCommunicator) -> str:
        plain = model()
        before = {name: (parameter, parameter.shape) for name, parameter in plain.named_parameters()}
        with pytest.raises(UsageError) as caught:
            apply_tensor_parallel(plain, comm, **options)
        assert {name: (parameter, parameter.shape) for name, parameter in plain.named_parameters()} == before
        return str(caught.value)

    (message,) = set(run_virtual(attempt, ranks))
    return message


def test_heads_that_do_not_divide_are_named_with_a_degree_that_does() -> None:
    message = refused(lambda: make("current", heads=4, kv_heads=2), ranks=4)
    assert "GPT cannot be split over 4 tensor ranks" in message
    assert "layers.0.attention.key has 2 heads of 4 features" in message
    assert "try parallel.tensor = 2" in message
    assert "query" not in message  # 4 heads do divide
    assert "layers.1.attention.value" in message  # all at once


def test_more_ranks_than_features() -> None:
    assert "layers.0.mlp.up has 3 features for 4 ranks" in refused(lambda: make("classic", mlp_width=3), ranks=4)


def test_a_model_without_a_plan_is_told_what_the_nearest_lacks() -> None:
    class Odd(GPT):
        def __init__(self) -> None:
            super().__init__(ModelShape(**{**SHAPE, **CURRENT}))
            for block in self.layers:
                block.attention.first, block.attention.query = block.attention.query, None

    with pytest.raises(UsageError, match=r"the nearest is 'paceline GPT', and layers\.\*\.attention\.query fit none"):
        plan_for(Odd())
    with pytest.raises(UsageError, match="no tensor-parallel plan for Linear"):
        plan_for(nn.Linear(2, 2))


def test_a_parameter_that_no_rule_covers_inside_a_split_part() -> None:
    def model() -> GPT:
        plain = make("current")
        plain.layers[1].attention.scale = nn.LayerNorm(4)
        return plain

    assert "layers.1.attention.scale.weight works on a part of the stream" in refused(model)


def test_a_parameter_that_no_rule_covers_between_matters_with_sequences_alone() -> None:
    def model() -> GPT:
        plain = make("current")
        plain.adapter = nn.LayerNorm(16).double()
        return plain

    assert "adapter.weight works on a part of the stream" in refused(model, sequence=True)
    run_virtual(lambda comm: apply_tensor_parallel(model(), comm), 2)


def test_a_tied_layer_that_no_rule_covers() -> None:
    def model() -> GPT:
        plain = make("classic")
        plain.other = nn.Linear(16, VOCABULARY, bias=False)
        plain.other.weight = plain.token_embedding.weight
        return plain

    assert "other.weight is tied to a parameter that is split" in refused(model)


def test_a_layer_with_a_forward_of_its_own_or_of_another_kind() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return 2 * super().forward(input)

    def model() -> GPT:
        plain = make("current")
        plain.layers[0].mlp.up = Scaled(16, 22)
        plain.layers[0].mlp.down = nn.Identity()
        return plain

    message = refused(model)
    assert "layers.0.mlp.up is a Scaled" in message
    assert "layers.0.mlp.down is a Identity" in message


def test_a_pattern_that_fits_nothing() -> None:
    plan = TensorPlan(
        name="mine", rules=(*ready_plans()["paceline GPT"].rules, SplitRule(pattern="layers.*.moe", role="input"))
    )
    assert "layers.*.moe fits no module" in refused(lambda: make("current"), plan=plan)


def test_a_split_part_that_begins_at_no_input() -> None:
    rules = [rule for rule in ready_plans()["paceline GPT"].rules if rule.pattern != "layers.*.mlp"]
    plan = TensorPlan(name="mine", rules=tuple(rules))
    message = refused(lambda: make("current"), plan=plan)
    assert "layers.0.mlp.up is inside no module with the role input" in message
    assert "attention" not in message


def test_a_model_that_is_split_already() -> None:
    def twice(comm: VirtualCommunicator) -> None:
        model = make("current")
        apply_tensor_parallel(model, comm)
        with pytest.raises(UsageError, match="is split already"):
            apply_tensor_parallel(model, comm)

    run_virtual(twice, 2)


def test_a_sequence_that_does_not_divide() -> None:
    def run(comm: VirtualCommunicator) -> None:
        model = make("current")
        apply_tensor_parallel(model, comm, sequence=True)
        model(batch(0)[0][:, :7])

    with pytest.raises(RankFailedError, match=r"a sequence of 7 tokens does not divide by the tensor degree 2"):
        run_virtual(run, 2)
