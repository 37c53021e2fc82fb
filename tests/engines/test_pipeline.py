"""Pipelines compute what one process does: every schedule, with data and tensor parallelism, ragged and tied."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from gloo_pool import GlooPool
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.combined import CombinedParallel
from paceline.errors import PacelineError, RankFailedError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.plan import RunMachine
from paceline.schedule.grid import Action, Schedule
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import make_schedule
from paceline.train.loss import LossValue
from paceline.verify.case import FunctionCase, Settings, complete
from paceline.verify.certificate import certify
from paceline.verify.measure import absolute, compare
from paceline.verify.runs import run_distributed, run_reference

exhaustive = pytest.mark.exhaustive
LAYERS = 4  # with the two ends, one for each of the six stages that three ranks have at most
CONTEXT, VOCABULARY = 6, 20


def make_gpt() -> nn.Module:
    return make_gpt_of(LAYERS)


def make_small_gpt() -> nn.Module:
    return make_gpt_of(2)


def make_gpt_of(layers: int) -> nn.Module:
    sizes = {"layers": layers, "heads": 4, "kv_heads": 2, "width": 16, "context": CONTEXT, "vocab_size": VOCABULARY}
    return GPT(gpt_config(None, **sizes, tied=True))


def make_tokens(samples: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (samples, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Tokens:
    """Batches of so many samples. An object, not a closure: it goes to other processes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __call__(self, step: int) -> Any:
        return make_tokens(self.samples, step)


def token_loss(logits: Any, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
    if not isinstance(logits, torch.Tensor):  # split over tensor ranks
        return logits.cross_entropy(targets), float(targets.numel())
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, float(targets.numel())


def settings_of(ranks: int, microbatches: int, strategy: str = "ddp", steps: int = 2, **spread: Any) -> Settings:
    return complete(Settings.of(strategy=strategy, ranks=ranks, steps=steps, accumulate=microbatches, **spread))


def check(settings: Settings, samples: int | None = None, layers: int = 3) -> None:
    """Verifies on virtual ranks; one sample too many makes the microbatches ragged."""
    size = samples or 2 * settings.data_ranks * settings.accumulate + 1
    make = functools.partial(make_gpt_of, layers)
    found = certify(FunctionCase(model=make, batch=Tokens(size), loss=token_loss), settings)
    assert found.passed, found
    assert found.max_abs_error < 1e-10


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


# Every schedule by default, and each of the numbers of microbatches at the edges with one of them; interleaved below.
BY_DEFAULT = {("gpipe", 2, 5), ("1f1b", 3, 3), ("zb-h1", 2, 5), ("zb-v", 2, 1)}


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches"),
    [
        pytest.param(*row, marks=() if row in BY_DEFAULT else exhaustive)
        for row in itertools.product(SCHEDULES, (2, 3, 4), (1, 2, 3, 5, 9))
    ],
)
def test_every_schedule_computes_what_one_process_does(schedule: str, ranks: int, microbatches: int) -> None:
    check(settings_of(ranks, microbatches, pipeline=ranks, schedule=schedule), layers=max(3, 2 * ranks - 2))


# The other strategies share the batch of the tests below, one in each.
@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        pytest.param("ddp", "1f1b", marks=exhaustive),
        pytest.param("zero1", "zb-h1", marks=exhaustive),
        pytest.param("zero2", "zb-v", marks=exhaustive),
        ("fsdp", "interleaved"),
        pytest.param("zero1", "interleaved", marks=exhaustive),
        pytest.param("zero2", "1f1b", marks=exhaustive),
        pytest.param("fsdp", "1f1b", marks=exhaustive),
        pytest.param("ddp", "gpipe", marks=exhaustive),
        pytest.param("zero1", "1f1b", marks=exhaustive),
        pytest.param("zero1", "gpipe", marks=exhaustive),
        pytest.param("zero2", "gpipe", marks=exhaustive),
        pytest.param("fsdp", "gpipe", marks=exhaustive),
    ],
)
def test_stages_share_the_batch_by_any_strategy(strategy: str, schedule: str) -> None:
    check(settings_of(4, 3, strategy, pipeline=2, schedule=schedule))


@pytest.mark.exhaustive
def test_hybrid_sharding_inside_a_pipeline() -> None:
    check(settings_of(8, 2, "hybrid", pipeline=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "spread"),
    [
        pytest.param("zero1", {"schedule": "1f1b"}, marks=exhaustive),
        ("ddp", {"schedule": "zb-v", "sequence_parallel": True}),
        pytest.param("zero2", {"schedule": "zb-h1"}, marks=exhaustive),
        pytest.param("fsdp", {"schedule": "interleaved"}, marks=exhaustive),
    ],
)
def test_three_dimensions(strategy: str, spread: dict[str, Any]) -> None:
    check(settings_of(8, 3, strategy, pipeline=2, tensor=2, data=2, **spread))


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2"])
def test_tensor_parallelism_alone(strategy: str) -> None:
    check(settings_of(4, 2, strategy, tensor=2), layers=2)


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_ranks_without_samples_in_some_microbatches(strategy: str) -> None:
    check(settings_of(4, 4, strategy, pipeline=2), samples=3)


@pytest.mark.some(1)
@covering(strategy=["zero2", "zero1", "ddp"], samples=[3, 7])
def test_ranks_without_samples_where_two_stages_of_a_rank_share_a_weight(strategy: str, samples: int) -> None:
    check(settings_of(4, 4, strategy, pipeline=2, schedule="zb-v"), samples=samples)


@pytest.mark.some(1)
@pytest.mark.parametrize(("strategy", "schedule"), [("zero1", "zb-h1"), ("fsdp", "1f1b")])
def test_stages_may_compute_their_activations_again(strategy: str, schedule: str) -> None:
    settings = settings_of(4, 2, strategy, pipeline=2, schedule=schedule)
    found = certify(
        FunctionCase(model=make_small_gpt, batch=Tokens(9), loss=token_loss),
        complete(settings.with_layout(checkpoint_activations="full")),
    )
    assert found.passed, found


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16_master", marks=exhaustive)])
def test_mixed_precision_in_a_pipeline(precision: str) -> None:
    settings = settings_of(2, 2, pipeline=2, schedule="zb-h1")
    case = FunctionCase(model=make_small_gpt, batch=Tokens(5), loss=token_loss)
    found = certify(case, complete(settings.with_layout(precision=precision)))
    assert found.passed, found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "strategy", "spread"),
    [
        (2, "ddp", {"pipeline": 2, "schedule": "zb-v"}),
        (4, "zero1", {"pipeline": 2, "schedule": "1f1b"}),
        pytest.param(4, "fsdp", {"pipeline": 2, "schedule": "gpipe"}, marks=exhaustive),
        (4, "ddp", {"pipeline": 2, "tensor": 2}),
    ],
)
def test_the_same_on_real_ranks(gloo_pool: GlooPool, ranks: int, strategy: str, spread: dict[str, Any]) -> None:
    settings = settings_of(ranks, 3, strategy, **spread)
    case = FunctionCase(model=make_gpt, batch=Tokens(2 * settings.data_ranks * 3 + 1), loss=token_loss)
    expected = run_reference(case, settings).steps
    for history in gloo_pool.run(run_distributed, case, settings, ranks=ranks, timeout_s=150.0):
        for step, values in enumerate(history):
            assert compare(values, expected[step], absolute).largest < 1e-10


# What was done, and held.


def train_once(comm: Communicator, schedule: str | Schedule, microbatches: int, **spread: Any) -> CombinedParallel:
    torch.manual_seed(0)
    engine = parallelize(make_gpt(), comm, pipeline=comm.size, schedule=schedule, **spread)
    assert isinstance(engine, CombinedParallel)
    engine.run_microbatches([make_tokens(2, number) for number in range(microbatches)], summed_loss)
    return engine


def summed_loss(model: Callable[..., Any], batch: Any) -> LossValue:
    total, count = token_loss(model(batch[0]), batch[1])
    return LossValue(total, count)


@pytest.mark.some(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_do_what_the_schedule_says_and_the_bubble_is_that_of_the_formula(schedule: str) -> None:
    ranks, microbatches = 3, 6
    planned = make_schedule(schedule, ranks, microbatches)
    engines = run_virtual(lambda comm: train_once(comm, schedule, microbatches), ranks)
    done = tuple(tuple(a for a in engine.pipeline.journal if a.is_compute) for engine in engines)
    assert done == planned.compute_orders()
    ran = Schedule(name="ran", rows=done, placement=planned.placement, microbatches=microbatches)
    per_step = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 3, "zb-v": 6}[schedule]
    assert measure_schedule(ran).overhead == pytest.approx((ranks - 1) / (per_step * microbatches))


def test_one_forward_one_backward_holds_no_more_microbatches_than_stages() -> None:
    engines = run_virtual(lambda comm: train_once(comm, "1f1b", 8), 3)
    assert [engine.pipeline.peak_in_flight for engine in engines] == [3, 2, 1]
    engines = run_virtual(lambda comm: train_once(comm, "gpipe", 8), 3)
    assert [engine.pipeline.peak_in_flight for engine in engines] == [8, 8, 8]


def test_a_schedule_of_ones_own() -> None:
    # Two microbatches forward, then backward in the order of their forward: neither GPipe nor 1F1B.
    rows = tuple(
        tuple(Action(kind, stage, number) for kind in ("F", "B") for number in range(2))  # type: ignore[arg-type]
        for stage in range(2)
    )
    own = Schedule(name="own", rows=rows, placement=(0, 1), microbatches=2)
    check(settings_of(2, 2, pipeline=2, schedule=own))
    with pytest.raises(RankFailedError, match="3 microbatches with a schedule of 2"):
        run_virtual(lambda comm: train_once(comm, own, 3), 2)


# States.


def trained(comm: Communicator, strategy: str, steps: int, **spread: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    engine = parallelize(make_small_gpt(), comm, strategy, **spread)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    train(engine, optimizer, range(steps))
    return engine, optimizer


def train(engine: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Trains with the whole batch on every rank that shares it: their mean is the same whatever their number."""
    for step in steps:
        batch = make_tokens(2, step)
        if isinstance(engine, CombinedParallel) and engine.pipeline is not None:
            engine.run_microbatches([batch], summed_loss, 1 / batch[1].numel())
        else:
            value = summed_loss(engine, batch)
            (value.total / value.count).backward()
        optimizer.step()
        optimizer.zero_grad()


MESHES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "ddp", {}),
    (2, "fsdp", {}),
    (2, "ddp", {"pipeline": 2, "schedule": "zb-v"}),
    (4, "zero1", {"pipeline": 2}),
    (4, "zero2", {"tensor": 2}),
    (8, "fsdp", {"pipeline": 2, "tensor": 2}),
]


# By default from stages to tensor parallelism.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(MESHES[i], MESHES[j], marks=() if (i, j) == (3, 4) else exhaustive)
        for i in range(6)
        for j in range(6)
    ],
    ids=str,
)
def test_a_state_of_one_mesh_goes_on_in_another(
    before: tuple[int, str, dict[str, Any]], after: tuple[int, str, dict[str, Any]]
) -> None:
    def save(comm: Communicator) -> Any:
        engine, optimizer = trained(comm, before[1], 2, **before[2])
        state = engine.full_state_dict(rank0_only=True), engine.full_optimizer_state(optimizer, rank0_only=True)
        train(engine, optimizer, range(2, 4))
        return state, engine.full_state_dict()

    saved, *_ = run_virtual(save, before[0])
    (model, optimizer_state), expected = saved

    def load(comm: Communicator) -> dict[str, torch.Tensor]:
        engine, optimizer = trained(comm, after[1], 1, **after[2])
        engine.load_full_state_dict(model)
        engine.load_full_optimizer_state(optimizer, optimizer_state)
        train(engine, optimizer, range(2, 4))
        found: dict[str, torch.Tensor] = engine.full_state_dict()
        return found

    for found in run_virtual(load, after[0]):
        assert list(found) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_state_of_another_shape_is_refused_before_anything_has_changed() -> None:
    def work(comm: Communicator) -> bool:
        engine = parallelize(make_small_gpt(), comm, tensor=2)
        before = engine.full_state_dict()
        name = next(name for name in before if name.endswith("mlp.up.weight"))
        wrong = {each: torch.zeros_like(value) for each, value in before.items()}
        wrong[name] = torch.zeros(3, 5)
        with pytest.raises(RuntimeError, match=rf"does not fit the model: {name} has shape \(3, 5\), the model's is"):
            engine.load_full_state_dict(wrong)
        after = engine.full_state_dict()
        return all(torch.equal(after[each], value) for each, value in before.items())

    assert all(run_virtual(work, 2))


def test_every_rank_gets_the_output_of_an_inference() -> None:
    tokens = make_tokens(3, 0)[0]
    torch.manual_seed(0)
    model = make_gpt()
    expected = model(tokens)

    def infer(comm: Communicator) -> torch.Tensor:
        torch.manual_seed(0)
        engine = parallelize(make_gpt(), comm, pipeline=3, schedule="interleaved")
        with torch.no_grad():
            output: torch.Tensor = engine(tokens)
        return output

    for output in run_virtual(infer, 3):
        torch.testing.assert_close(output, expected)


class Head(nn.Module):
    """Returns a nested tree: tensors with and without a gradient, a number, a name, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return {"features": (y, y.relu()), "rows": torch.arange(len(x)), "scale": 0.5, "name": "a", "nothing": None}


class Tail(nn.Module):
    """Uses some of it: the second tensor's gradient comes from nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, tree: Any) -> torch.Tensor:
        first, _ = tree["features"]
        assert (tree["name"], tree["nothing"]) == ("a", None)
        return self.linear(first) * tree["scale"] + tree["rows"].unsqueeze(1)


def make_nested() -> nn.Module:
    return nn.Sequential(Head(), Tail())


def make_rows(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 3, generator=generator), torch.randn(5, 1, generator=generator)


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
    return (outputs - targets).square().sum(), float(len(targets))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_may_hand_on_nested_trees(schedule: str) -> None:
    case = FunctionCase(model=make_nested, batch=make_rows, loss=squared)
    # One microbatch: the number of a row is that within its microbatch.
    found = certify(case, settings_of(2, 1, pipeline=2, schedule=schedule))
    assert found.passed, found


def test_an_automatic_cut_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(comm: Communicator) -> list[str]:
        engine = parallelize(make_gpt_of(5), comm, "zero1", pipeline=2, data=1)
        assert isinstance(engine, CombinedParallel)
        return [layer.name for stage in engine.stages.values() for layer in stage.module.layers]

    whole = sum(p.numel() for p in make_gpt_of(5).parameters()) * 16
    assert [len(names) for names in run_virtual(cut, 2)] in ([4, 3], [3, 4])  # seven layers
    small = RunMachine(device="cpu", device_bytes=whole // 4, host_bytes=whole, ranks=2, node_ranks=2)
    monkeypatch.setattr("paceline.engines.combined.measure_machine", lambda *_: small)
    with pytest.raises(PacelineError, match="2 stages"):
        run_virtual(cut, 2)


# Bad input.


def refusal(model: Callable[[], nn.Module], ranks: int = 2, strategy: str = "ddp", **spread: Any) -> str:
    with pytest.raises(PacelineError) as refused:
        run_virtual(lambda comm: parallelize(model(), comm, strategy, **spread), ranks)
    return str(refused.value)


def test_what_cannot_be_spread_is_refused_with_the_reason() -> None:
    assert "pipeline = 3 does not divide ranks = 2" in refusal(make_gpt, pipeline=3)
    assert "data = 2 with pipeline = 2" in refusal(make_gpt, pipeline=2, data=2)
    assert "'pipelines' is no option" in refusal(make_gpt, pipelines=2)
    assert "there is no schedule '1f1d'" in refusal(make_gpt, pipeline=2, schedule="1f1d")
    text = refusal(make_gpt, strategy="fsdp", pipeline=2, schedule="zb-h1")
    assert "full sharding frees the weights between them\n  set strategy = zero2, or schedule = 1f1b" in text
    assert "stages of a model with 6 layers" in refusal(make_gpt, ranks=9, pipeline=9)
    assert "has no method pipeline_layers()" in refusal(lambda: nn.Bilinear(2, 2, 2), pipeline=2)


class Odd(nn.Module):
    """Returns something that no stage can send."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), object()


def test_a_layer_that_returns_what_cannot_be_sent_is_named() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(nn.Sequential(Odd(), nn.Linear(2, 2)), comm, pipeline=2)
        assert isinstance(engine, CombinedParallel)
        engine.run_microbatches([(torch.ones(1, 2), torch.zeros(1))], summed_loss)

    with pytest.raises(RankFailedError, match="stage 0 returns a object, which cannot be sent to stage 1"):
        run_virtual(work, 2)


def test_a_forward_with_gradients_is_refused() -> None:
    def work(comm: Communicator) -> None:
        parallelize(make_gpt(), comm, pipeline=2)(make_tokens(1, 0)[0])

    with pytest.raises(PacelineError, match="run_microbatches"):
        run_virtual(work, 2)
