"""Full sharding: what one process computes, from slices; with the memory and collectives that its formula promises."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from engine_cases import MODELS, SHARES, Recipe, assert_same, make, run_engine, run_single, train
from gloo_pool import GlooPool
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.engines.fsdp import FullySharded
from paceline.errors import RankFailedError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape

POLICIES = {
    "freed": Layout(),
    "kept": Layout(reshard_after_forward=False),
    "far ahead": Layout(prefetch=3),
    "not ahead": Layout(prefetch=0),
}


def shard_layers(module: nn.Module, comm: Communicator, policy: Layout, strategy: str = "fsdp") -> Engine:
    """Makes a unit of every child with parameters; the root has what hangs on the model itself."""
    units = tuple(name for name, child in module.named_children() if any(True for _ in child.parameters()))
    options = {name: getattr(policy, name) for name in ("reshard_after_forward", "prefetch", "shard_ranks")}
    return parallelize(module, comm, strategy, units=units, **options)


def make_sharded(module: nn.Module, comm: Communicator) -> Engine:
    return shard_layers(module, comm, Layout())


def make_hybrid(module: nn.Module, comm: Communicator) -> Engine:
    return shard_layers(module, comm, Layout(shard_ranks=2), "hybrid")


@functools.cache
def single(case: str, recipe: Recipe) -> Any:
    return run_single(case, recipe)


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 4, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.rows = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, skip: int | None = None, times: int = 1) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            for number, block in enumerate(self.rows):
                if number != skip:
                    x = block(x)
        out: torch.Tensor = self.last(x)
        return out


# Parity with one process.


@covering(case=[case for case in MODELS if case != "borrowed"], shares=list(SHARES))
def test_every_case_trains_as_one_process(case: str, shares: str) -> None:
    recipe = Recipe(shares=SHARES[shares])
    for result in run_engine(make_sharded, case, recipe):
        assert_same(result, single(case, recipe))


@covering(case=["plain", "reused", "reentrant", "branches", "unused"], policy=list(POLICIES))
def test_every_policy_trains_as_one_process(case: str, policy: str) -> None:
    recipe = Recipe(shares=SHARES["ragged"], clip=None, optimizer="groups")
    for result in run_engine(lambda module, comm: shard_layers(module, comm, POLICIES[policy]), case, recipe):
        assert_same(result, single(case, recipe))


@covering(case=["plain", "reused", "branches"], reshard=[1, 2, 4])
def test_a_smaller_group_may_keep_what_backward_needs(case: str, reshard: int) -> None:
    recipe, policy = Recipe(shares=SHARES["ragged"]), Layout(reshard_after_forward=reshard)
    for result in run_engine(lambda module, comm: shard_layers(module, comm, policy), case, recipe):
        assert_same(result, single(case, recipe))


# Full sharding has all models above: here those whose gradients come in an order of their own, and one of odd shapes.
ORDERS = ("branches", "tied", "reentrant", "unused", "odd shapes")


@pytest.mark.some(2)
@pytest.mark.parametrize("clip", [0.5, pytest.param(None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "case",
    [
        *ORDERS,
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MODELS if case not in ("borrowed", *ORDERS)),
    ],
)
def test_hybrid_trains_as_one_process(case: str, clip: float | None) -> None:
    recipe = Recipe(shares=SHARES["ragged"], clip=clip)
    for result in run_engine(make_hybrid, case, recipe):
        assert_same(result, single(case, recipe))


@pytest.mark.some(1)  # ZeRO's pieces, which are made likewise, have the others
@pytest.mark.parametrize("optimizer", ["sgd", "foreach", "fused", "groups"])
def test_plain_optimizers_work_on_pieces(optimizer: str) -> None:
    recipe = Recipe(shares=SHARES["accumulated"], optimizer=optimizer)
    for result in run_engine(make_sharded, "odd shapes", recipe):
        assert_same(result, single("odd shapes", recipe))


@pytest.mark.some(1)
@pytest.mark.parametrize("case", ["plain", "tied", "branches", "odd shapes"])
def test_real_ranks_train_as_one_process(case: str, gloo_pool: GlooPool) -> None:
    recipe = Recipe(shares=((3, 3), (6, 0)))
    for result in gloo_pool.run(train, make_sharded, case, recipe, ranks=2):
        assert_same(result, single(case, recipe))


# Passes of all kinds.


def losses_of(model: Any, steps: int, call: Any) -> list[float]:
    found = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    for step in range(steps):
        torch.manual_seed(step)
        loss = call(model, torch.randn(4, 5, dtype=torch.float64), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def two_forwards(model: Any, x: torch.Tensor, step: int) -> Any:
    return (model(x) ** 2).mean() + (model(x * 0.5).sin() if step % 2 else model(x)).mean()


def sometimes_evaluates(model: Any, x: torch.Tensor, step: int) -> Any:
    with torch.no_grad():
        before = model(x).mean() if step != 1 else torch.zeros(())
    model(x)  # a forward whose backward never comes
    return (model(x) ** 2).mean() + before


def skips(model: Any, x: torch.Tensor, step: int) -> Any:
    return (model(x, skip=step) ** 2).mean()


def calls_a_part(model: Any, x: torch.Tensor, _step: int) -> Any:
    module = model.module if isinstance(model, FullySharded) else model
    return (model(x) ** 2).mean() + module.rows[1](x[:, :1].expand(-1, 6)).mean()


def loops(model: Any, x: torch.Tensor, step: int) -> Any:
    return (model(x, times=2 + step % 2) ** 2).mean()


@pytest.mark.some(3)
@covering(
    always={"reshard": [True]},
    call=[two_forwards, sometimes_evaluates, skips, calls_a_part, loops],
    reshard=[2, False, True],
)
def test_passes_of_all_kinds_give_the_losses_of_one_process(call: Any, reshard: bool | int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Stack().double()

    # Each of the four blocks is skipped once, and then none; two ranks of four are a smaller group.
    steps, ranks = 5 if call is skips else 3, 4 if reshard == 2 and reshard is not True else 2

    def work(comm: Communicator) -> list[float]:
        return losses_of(parallelize(build(), comm, "fsdp", reshard_after_forward=reshard), steps, call)

    expected = losses_of(build(), steps, call)
    for found in run_virtual(work, ranks=ranks):
        assert found == pytest.approx(expected, abs=1e-10)


def test_a_parameter_can_be_frozen_and_unfrozen_between_steps() -> None:
    def run(model: Any, module: nn.Module) -> list[float]:
        def call(model: Any, x: torch.Tensor, step: int) -> Any:
            module.rows[0].up.weight.requires_grad_(step % 2 == 0)  # type: ignore[index, union-attr]
            return (model(x) ** 2).mean()

        return losses_of(model, 4, call)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Stack().double()

    plain = build()
    expected = run(plain, plain)

    def work(comm: Communicator) -> list[float]:
        module = build()
        return run(parallelize(module, comm, "fsdp"), module)

    for found in run_virtual(work, ranks=2):
        assert found == pytest.approx(expected, abs=1e-10)


def test_the_forward_of_a_model_can_raise_and_training_goes_on() -> None:
    def work(comm: Communicator) -> list[float]:
        torch.manual_seed(0)
        engine = parallelize(Stack().double(), comm, "fsdp")
        with pytest.raises(RuntimeError, match="shapes"):
            engine(torch.zeros(2, 7, dtype=torch.float64))
        return losses_of(engine, 2, lambda model, x, _step: (model(x) ** 2).mean())

    torch.manual_seed(0)
    expected = losses_of(Stack().double(), 2, lambda model, x, _step: (model(x) ** 2).mean())
    for found in run_virtual(work, ranks=2):
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_blocks_keep_the_numbers(monkeypatch: pytest.MonkeyPatch, checkpointing: str) -> None:
    """Traced and differentiated block by block (without code generation, which needs a compiler on the machine)."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def work(comm: Communicator, compiled: bool) -> list[float]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"compile": True, "checkpoint_activations": checkpointing} if compiled else {}
        engine = parallelize(Stack().double(), comm, "fsdp", **options)
        return losses_of(engine, 3, lambda model, x, _step: (model(x) ** 2).mean())

    expected = run_virtual(lambda comm: work(comm, compiled=False), ranks=2)[0]
    for found in run_virtual(lambda comm: work(comm, compiled=True), ranks=2):
        assert found == pytest.approx(expected, abs=1e-10)


# Memory and collectives.


def test_a_rank_keeps_a_slice_of_everything() -> None:
    """16 P / N with Adam between steps: parameters, gradients and two moments, fp32."""
    width, ranks = 64, 4

    def work(comm: Communicator) -> tuple[int, int]:
        engine = parallelize(Stack(width=width), comm, "fsdp")
        assert isinstance(engine, FullySharded)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        (engine(torch.ones(2, 5)) ** 2).mean().backward()
        optimizer.step()
        tensors = [group.master for unit in engine._units for group in unit.groups]
        tensors += [group.full for unit in engine._units for group in unit.groups]
        tensors += [p.grad for p in engine.parameters() if p.grad is not None]
        tensors += [v for state in optimizer.state.values() for v in state.values() if v.ndim]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        padded = sum(group.layout.length for unit in engine._units for group in unit.groups)
        return sum(storages.values()), padded

    num_parameters = sum(p.numel() for p in Stack(width=width).parameters())
    for num_bytes, padded in run_virtual(work, ranks=ranks):
        assert num_bytes <= 16 * padded / ranks
        assert padded <= num_parameters + 5 * 8 * 32 + 32 * ranks * 5


def test_at_most_two_units_are_whole_at_a_time() -> None:
    """Counted at every module call and gradient: whole parameters of two units (and the root), gradients of two."""
    width, num_blocks = 64, 6
    unit_bytes = 4 * sum(p.numel() for p in Block(width).parameters()) + 4 * 6 * 32 + 4 * 64

    def work(comm: Communicator) -> tuple[int, int]:
        engine = parallelize(Stack(num_blocks=num_blocks, width=width), comm, "fsdp")
        assert isinstance(engine, FullySharded)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.01)
        most_parameters = most_gradients = 0

        def look(*_: Any) -> None:
            nonlocal most_parameters, most_gradients
            blocks = engine._units[:-1]
            whole = sum(group.full.untyped_storage().nbytes() for unit in blocks for group in unit.groups)
            loose = [p.grad for unit in blocks for group in unit.groups for p in group.parameters if p.grad is not None]
            flat = [
                buffer for unit in blocks for _, kept, _, _ in unit._reductions for buffer in kept if buffer is not None
            ]
            most_parameters = max(most_parameters, whole)
            most_gradients = max(most_gradients, sum(t.untyped_storage().nbytes() for t in (*loose, *flat)))

        for step in range(3):
            if step == 2:  # the first pass asks before every collective and keeps nothing ahead
                for module in engine.module.modules():
                    module.register_forward_hook(look)
                    module.register_full_backward_hook(look)
            (engine(torch.ones(2, 5, requires_grad=True)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return most_parameters, most_gradients

    for parameters, gradients in run_virtual(work, ranks=2):
        assert unit_bytes < parameters <= 2 * unit_bytes
        assert gradients <= 2 * unit_bytes


@pytest.mark.parametrize(("reshard", "num_gathers"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("strategy", ["fsdp", "hybrid"])
def test_collectives_are_those_of_the_formula(strategy: str, reshard: bool, num_gathers: int) -> None:
    """3 P (N-1)/N: all-gather twice, reduce-scatter once; hybrid adds an all-reduce of the slice."""
    ranks, shard_ranks, num_blocks = 4, (2 if strategy == "hybrid" else 4), 3

    def work(comm: Communicator) -> Any:
        trace = Trace(comm.device, keep=True)
        options = {"reshard_after_forward": reshard, "shard_ranks": 2 if strategy == "hybrid" else 0}
        engine = parallelize(
            Stack(num_blocks=num_blocks, width=32), TracedCommunicator(comm, trace), strategy, **options
        )
        assert isinstance(engine, FullySharded)
        lengths = [group.layout.length for unit in engine._units for group in unit.groups]
        for _ in range(2):
            trace.operations.clear()
            (engine(torch.ones(2, 5)) ** 2).mean().backward()
        return lengths, [(op.kind, op.num_bytes) for op in trace.operations]

    for lengths, operations in run_virtual(work, ranks=ranks):
        by_kind: dict[str, list[int]] = {}
        for kind, num_bytes in operations:
            by_kind.setdefault(kind, []).append(num_bytes)
        *blocks, root = (4 * length for length in lengths)
        # The last block and the root stay gathered between forward and backward.
        gathered = [*blocks, root] + (blocks[:-1] if num_gathers == 2 else [])
        assert sorted(by_kind.pop("all_gather")) == sorted(gathered)
        assert sorted(by_kind.pop("reduce_scatter")) == sorted([*blocks, root])
        reduced = by_kind.pop("all_reduce")
        flags = 4 + 6 * num_blocks
        slices = [size // shard_ranks for size in (*blocks, root)] if strategy == "hybrid" else []
        assert sorted(reduced) == sorted([flags, *slices])
        assert not by_kind


def test_nothing_is_sent_that_is_not_sharded_when_accumulating() -> None:
    """Inside no_sync a backward reduces too; only flags and replicas wait for the last one."""

    def work(comm: Communicator) -> list[str]:
        trace = Trace(comm.device, keep=True)
        engine = parallelize(Stack(num_blocks=2), TracedCommunicator(comm, trace), "hybrid", shard_ranks=2)
        engine(torch.ones(2, 5)).sum().backward()
        trace.operations.clear()
        with engine.no_sync():
            engine(torch.ones(2, 5)).sum().backward()
        return [op.kind for op in trace.operations]

    for kinds in run_virtual(work, ranks=4):
        assert kinds.count("reduce_scatter") == 3
        assert "all_reduce" not in kinds


# State.


def test_state_goes_from_any_engine_into_any_other() -> None:
    recipe = Recipe(shares=SHARES["two ranks"], steps=2)
    trained = run_engine(make_sharded, "tied", recipe)[0].state

    def work(comm: Communicator) -> bool:
        for strategy in ("ddp", "fsdp"):
            engine = parallelize(make("tied"), comm, strategy)
            engine.load_full_state_dict(trained)
            again = engine.full_state_dict()
            assert list(again) == list(trained)
            assert all(torch.equal(again[name], trained[name]) for name in trained)
            assert engine.full_state_dict(rank0_only=True).keys() == (trained.keys() if comm.rank == 0 else set())
        return True

    assert all(run_virtual(work, ranks=3))


def test_state_that_does_not_fit_changes_nothing() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make("plain"), comm, "fsdp")
        before = engine.full_state_dict()
        wrong = {**before, "first.weight": torch.zeros(2, 2), "more": torch.zeros(1)}
        del wrong["second.bias"]
        with pytest.raises(
            RuntimeError, match=r"missing second\.bias; unexpected more; first\.weight has shape \(2, 2\)"
        ):
            engine.load_full_state_dict(wrong)
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())

    run_virtual(work, ranks=2)


def test_training_goes_on_from_a_state_at_another_world_size() -> None:
    def start(comm: Communicator) -> Any:
        engine = parallelize(make("plain"), comm, "fsdp")
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.05)
        for step in range(2):
            _train(engine, optimizer, step)
        return engine.full_state_dict(), engine.full_optimizer_state(optimizer)

    def go_on(comm: Communicator, strategy: str, model: Any, optim: Any) -> Any:
        engine = parallelize(make("plain"), comm, strategy)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.05)
        engine.load_full_state_dict(model)
        engine.load_full_optimizer_state(optimizer, optim)
        for step in range(2, 4):
            _train(engine, optimizer, step)
        return engine.full_state_dict()

    def whole(comm: Communicator) -> Any:
        engine = parallelize(make("plain"), comm, "ddp")
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.05)
        for step in range(4):
            _train(engine, optimizer, step)
        return engine.full_state_dict()

    expected = run_virtual(whole, ranks=1)[0]
    model, optim = run_virtual(start, ranks=3)[0]
    for strategy, ranks in (("fsdp", 2), ("ddp", 2), ("fsdp", 1), ("fsdp", 4)):
        for found in run_virtual(lambda comm, s=strategy: go_on(comm, s, model, optim), ranks=ranks):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def _train(engine: Engine, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    (engine(torch.randn(6, 5, dtype=torch.float64)) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# Construction on the meta device.


def test_a_model_built_on_meta_gets_the_values_of_one_process() -> None:
    config = ModelShape(layers=3, heads=2, kv_heads=1, width=16, mlp_width=24, context=8, vocab_size=11, tied=True)
    torch.manual_seed(5)
    expected = GPT(config).state_dict()

    def work(comm: Communicator) -> Any:
        with torch.device("meta"):
            model = GPT(config)
        torch.manual_seed(5)
        engine = parallelize(model, comm, "fsdp")
        assert not any(p.is_meta for p in engine.parameters())
        return engine.full_state_dict()

    for found in run_virtual(work, ranks=3):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tied_layers_on_meta_keep_the_first_ones_values() -> None:
    def build() -> nn.Module:
        model = Stack(num_blocks=2)
        model.rows[1].up.weight = model.rows[0].up.weight  # type: ignore[union-attr]
        return model

    torch.manual_seed(5)
    expected = build().state_dict()

    def work(comm: Communicator) -> Any:
        with torch.device("meta"):
            model = build()
        torch.manual_seed(5)
        return parallelize(model, comm, "fsdp").full_state_dict()

    for found in run_virtual(work, ranks=2):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_meta_module_that_cannot_be_initialised_is_named() -> None:
    def work(comm: Communicator) -> None:
        with torch.device("meta"):
            model = make("odd shapes")
        parallelize(model, comm, "fsdp")

    with pytest.raises(RankFailedError, match=r"OddShapes cannot be initialised\n.*reset_parameters"):
        run_virtual(work, ranks=1)


# Bad input.


def test_an_optimizer_over_whole_parameters_is_refused() -> None:
    def work(comm: Communicator) -> None:
        module = make("plain")
        whole = list(module.parameters())
        engine = parallelize(module, comm, "fsdp")
        with pytest.raises(UsageError, match="4 of the optimizer's 4 tensors are not parameters of this engine"):
            engine.check_optimizer(torch.optim.SGD(whole, lr=0.1))
        engine.check_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))  # by now these are the pieces

    run_virtual(work, ranks=2)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("hybrid", {}, "strategy = hybrid on 4 ranks of one host, without shard_ranks"),
        ("hybrid", {"shard_ranks": 3}, "shard_ranks = 3 does not divide ranks = 4"),
        ("fsdp", {"reshard_after_forward": 3}, "reshard_after_forward = 3 does not divide the 4 ranks"),
        ("fsdp", {"prefetch": -1}, "prefetch = -1"),
        ("fsdp", {"units": ("rows",)}, "no module is called 'rows'"),
        ("fsdp", {"prefech": 2}, "did you mean prefetch"),
        ("fsdp", {"layout": Layout(strategy="zero1")}, "strategy = 'fsdp' beside layout"),
        ("zero9", {}, "unknown"),
    ],
)
def test_options_that_cannot_work_are_refused(strategy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_virtual(lambda comm: parallelize(make("plain"), comm, strategy, **options), ranks=4)


def test_a_unit_that_only_some_ranks_call_more_often_is_an_error_not_a_hang() -> None:
    def work(comm: Communicator) -> None:
        torch.manual_seed(0)
        engine = parallelize(Stack(), comm, "fsdp")
        for step in range(2):
            engine(torch.ones(2, 5), times=1 + (step == 1 and comm.rank == 1)).sum().backward()

    with pytest.raises(RankFailedError, match=r"rank 1 needs unit rows\.0 again"):
        run_virtual(work, ranks=2)


def test_functional_losses_see_pieces_outside_of_forward() -> None:
    def work(comm: Communicator) -> tuple[int, ...]:
        engine = parallelize(make("plain"), comm, "fsdp")
        with pytest.raises(RuntimeError):
            F.linear(torch.ones(1, 5, dtype=torch.float64), engine.module.first.weight)  # type: ignore[union-attr, arg-type]
        return tuple(engine.module.first.weight.shape)  # type: ignore[union-attr, return-value]

    assert all(len(shape) == 1 for shape in run_virtual(work, ranks=2))


def test_a_gpt_whose_ends_are_units_trains_as_data_parallel() -> None:
    """The embedding and the head are gathered when they are called, and not through all of forward and backward."""

    def work(comm: Communicator, strategy: str) -> tuple[list[str], list[float]]:
        torch.manual_seed(0)
        model = GPT(gpt_config("gpt-nano", context=8, vocab_size=2048, tied=False)).double()
        engine = parallelize(model, comm, strategy)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            tokens = torch.randint(0, 2048, (4, 8), generator=torch.Generator().manual_seed(step))
            mine = tokens.chunk(comm.size)[comm.rank]
            loss = F.cross_entropy(engine(mine).flatten(0, 1), mine.flatten())
            loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        units = [unit.name for unit in engine._units] if isinstance(engine, FullySharded) else []
        return units, losses

    expected = run_virtual(lambda comm: work(comm, "ddp"), ranks=2)
    for (units, losses), (_, same) in zip(run_virtual(lambda comm: work(comm, "fsdp"), ranks=2), expected, strict=True):
        assert {"token_embedding", "head"} < set(units)
        assert losses == pytest.approx(same, abs=1e-10)
