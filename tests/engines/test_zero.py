"""ZeRO stages 1 and 2 against one process: the checklist that every engine passes, and what sharding adds to it."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import engine_cases
import pytest
import torch
from covering import covering
from engine_cases import (
    MODELS,
    SHARES,
    Branches,
    Outcome,
    Plain,
    Recipe,
    Reentrant,
    assert_same,
    run_engine,
    run_single,
    sized,
)
from gloo_pool import GlooPool
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.utils.checkpoint import checkpoint

from paceline.comm.base import Communicator, Work
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.baton import Baton
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.blocks import compile_model
from paceline.engines.buckets.buckets import BucketPolicy
from paceline.engines.buckets.gradients import SlicedBucket
from paceline.engines.ddp import DataParallel
from paceline.engines.flat.gathering import Gathering, _tell_of_step
from paceline.engines.groups import make_groups
from paceline.engines.precision import precision_named
from paceline.engines.zero import ZeroParallel
from paceline.errors import RankFailedError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout

SMALL = BucketPolicy(bucket_bytes=200, first_bucket_bytes=100)  # a bucket for one or two parameters
OTHERS = ("two ranks", "accumulated", "a rank without samples")
STAGES = pytest.mark.parametrize("stage", [1, 2])
ZERO = 1e-12


def make_zero(
    module: nn.Module, comm: Communicator, stage: Any = 1, buckets: BucketPolicy = SMALL, **options: Any
) -> ZeroParallel:
    layout = sized(buckets.bucket_bytes, buckets.first_bucket_bytes, strategy=f"zero{stage}", **options)
    return ZeroParallel(module, make_groups(comm, layout), layout)


def stage_maker(stage: int, **options: Any) -> Callable[[nn.Module, Communicator], ZeroParallel]:
    return functools.partial(make_zero, stage=stage, **options)


@functools.cache
def expected(case: str, shares: str, clip: float | None = 0.5, optimizer: str = "adamw") -> Outcome:
    return run_single(case, Recipe(shares=SHARES[shares], clip=clip, optimizer=optimizer))


# Training gives what one process gives.


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "shares", ["ragged", *(pytest.param(shares, marks=pytest.mark.exhaustive) for shares in OTHERS)]
)
@covering(always={"case": ["branches", "tied", "reentrant"]}, stage=[1, 2], case=list(MODELS))
def test_training_equals_one_process(stage: int, case: str, shares: str) -> None:
    for outcome in run_engine(stage_maker(stage), case, Recipe(shares=SHARES[shares])):
        assert_same(outcome, expected(case, shares))


@covering(stage=[1, 2], shares=["one rank, accumulated", "accumulated", "ragged"])
def test_without_clipping(stage: int, shares: str) -> None:
    for outcome in run_engine(stage_maker(stage), "tied", Recipe(shares=SHARES[shares], clip=None)):
        assert_same(outcome, expected("tied", shares, None))


@covering(stage=[1, 2], case=["branches", "odd shapes"], optimizer=["groups", "sgd", "foreach", "fused"])
def test_plain_optimizers_with_parameter_groups(stage: int, case: str, optimizer: str) -> None:
    recipe = Recipe(shares=SHARES["ragged"], optimizer=optimizer)
    for outcome in run_engine(stage_maker(stage), case, recipe):
        assert_same(outcome, expected(case, "ragged", 0.5, optimizer))


@pytest.mark.some(2)
@pytest.mark.parametrize("bucket_bytes", [0, 10**6])
@pytest.mark.parametrize("overlap", [True, False])
@STAGES
def test_neither_buckets_nor_overlap_change_the_numbers(stage: int, overlap: bool, bucket_bytes: int) -> None:
    buckets = BucketPolicy(bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    make = stage_maker(stage, buckets=buckets, overlap=overlap)
    for outcome in run_engine(make, "reused", Recipe(shares=SHARES["accumulated"])):
        assert_same(outcome, expected("reused", "accumulated"))


def train_on_real_ranks(comm: Communicator, stage: int, case: str, recipe: Recipe) -> Outcome:
    return engine_cases.train(comm, stage_maker(stage), case, recipe)


@pytest.mark.some(1)
@covering(always={"case": ["branches"]}, stage=[1, 2], case=["tied", "reentrant", "branches"])
def test_real_ranks(gloo_pool: GlooPool, stage: int, case: str) -> None:
    shares = "two ranks" if case == "tied" else "ragged"
    recipe, patience = Recipe(shares=SHARES[shares]), {"group_timeout_s": 60.0, "timeout_s": 120.0}
    for outcome in gloo_pool.run(train_on_real_ranks, stage, case, recipe, ranks=recipe.ranks, **patience):
        assert_same(outcome, expected(case, shares))


# What is updated.


@STAGES
def test_pieces_have_the_modules_names_and_add_up_to_it(stage: int) -> None:
    def work(comm: Communicator) -> tuple[list[str], list[int], list[bool]]:
        module = engine_cases.make("frozen")
        engine = make_zero(module, comm, stage)
        named = dict(engine.named_parameters())
        assert named["first.weight"] is module.get_parameter("first.weight"), "a frozen one stays as it is"
        assert [id(p) for p in engine.parameters()] == [id(p) for p in named.values()]
        trained = [piece for name, piece in named.items() if name != "first.weight"]
        return list(named), [piece.numel() for piece in trained], [p.dim() == 1 for p in trained]

    results = run_virtual(work, ranks=3)
    module = engine_cases.make("frozen")
    assert all(names == [name for name, _ in module.named_parameters()] for names, _, _ in results)
    sizes = [p.numel() for name, p in module.named_parameters() if name != "first.weight"]
    assert [sum(parts) for parts in zip(*(s for _, s, _ in results), strict=True)] == sizes
    assert all(all(are_flat) for _, _, are_flat in results)


def test_one_rank_alone_costs_nothing() -> None:
    module = engine_cases.make("plain")
    engine = ZeroParallel(module, make_groups(SoloCommunicator(torch.device("cpu"))), Layout(strategy="zero1"))
    assert [id(p) for p in engine.parameters()] == [id(p) for p in module.parameters()]
    hooks = [m._forward_pre_hooks or m._forward_hooks for m in module.modules()]
    hooks += [p._post_accumulate_grad_hooks for p in module.parameters()]  # type: ignore[attr-defined]
    assert not any(hooks)
    engine(engine_cases.data(0)[0]).sum().backward()
    engine.join_pass()
    assert engine.full_gradients()["first.weight"] is not None


@pytest.mark.parametrize("wrong", ["module", "other"])
def test_an_optimizer_of_whole_parameters_is_refused(wrong: str) -> None:
    def work(comm: Communicator) -> None:
        module = engine_cases.make("plain")
        engine = make_zero(module, comm)
        others = module if wrong == "module" else engine_cases.make("plain")
        engine.check_optimizer(torch.optim.SGD(others.parameters(), lr=0.1))

    assert "SGD(engine.parameters(), ...)" in refusal(work)


def refusal(work: Callable[[VirtualCommunicator], Any], ranks: int = 2) -> str:
    with pytest.raises(RankFailedError) as failure:
        run_virtual(work, ranks=ranks)
    assert isinstance(failure.value.__cause__, UsageError)
    return str(failure.value.__cause__)


# Memory and communication, counted.


class Wide(nn.Module):
    """Nine buckets of the same size, no padding on 1, 2 or 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


WIDE_BUCKET = 64 * 64 * 4
WIDE = 9 * WIDE_BUCKET
ONE_LAYER = BucketPolicy(bucket_bytes=WIDE_BUCKET, first_bucket_bytes=WIDE_BUCKET)
SKIPPED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, VirtualCommunicator, Baton)


def live_bytes(*roots: Any) -> int:
    """Counts the storages of all tensors that can be reached from ``roots``, each once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    stack = list(roots)
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, SKIPPED):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.size()
            stack += [] if not found.is_leaf or found.grad is None else [found.grad]
        stack += gc.get_referents(found)
    return sum(storages.values())


@covering(stage=[1, 2], ranks=[2, 4])
def test_memory_is_that_of_the_table(stage: int, ranks: int) -> None:
    """P parameters in fp32: 8 P + 8 P / N bytes in stage 1, 4 P + 12 P / N and two buckets in stage 2."""

    def work(comm: Communicator) -> tuple[int, int, int]:
        torch.manual_seed(0)
        engine = make_zero(Wide(), comm, stage, ONE_LAYER)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)
        most = most_of_autograd = 0
        send = SlicedBucket.send

        def watch(bucket: SlicedBucket) -> None:
            nonlocal most, most_of_autograd
            send(bucket)
            most = max(most, sum(each._buffer is not None for each in engine._fixed))
            most_of_autograd = max(most_of_autograd, sum(p.grad is not None for p in engine.module.parameters()))

        for bucket in engine._fixed:
            bucket.send = functools.partial(watch, bucket)  # type: ignore[method-assign]
        for step in range(3):
            with engine.no_sync():
                engine(torch.randn(2, 64)).sum().backward()
            engine(torch.randn(2, 64)).sum().backward()
            engine.clip_grad_norm_(1.0)  # waits for what the others tell
            optimizer.step()
            if step < 2:
                optimizer.zero_grad()
        for bucket in engine._fixed:
            del bucket.send
        return live_bytes(engine, optimizer), most, most_of_autograd

    num_told, num_counts = (1 + 9) * 4, 9 * 4  # squares and a flag for each parameter, and Adam's count of its steps
    whole, sharded = (8, 8) if stage == 1 else (4, 12)
    table = whole * WIDE // 4 + sharded * WIDE // 4 // ranks + (0 if stage == 1 else 2 * WIDE_BUCKET)
    for found, most, most_of_autograd in run_virtual(work, ranks=ranks):
        assert found == table + num_told + num_counts
        assert most == (9 if stage == 1 else 2)
        assert most_of_autograd == 0, "gradients are freed as they are brought in, in the first backward too"


@pytest.mark.parametrize("accumulate", [1, 3])
@STAGES
def test_count_and_bytes_of_collectives(stage: int, accumulate: int) -> None:
    """A step reduces and gathers every bucket once, and asks once who used what; stage 2 reduces every microbatch."""

    def work(comm: Communicator) -> tuple[dict[str, int], dict[str, int]]:
        traced = TracedCommunicator(comm, Trace(comm.device))
        engine = make_zero(Wide(), traced, stage, ONE_LAYER)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for _ in range(3):
            traced.trace.num_operations.clear()
            traced.trace.num_bytes.clear()
            for _ in range(accumulate - 1):
                with engine.no_sync():
                    engine(torch.ones(1, 64)).sum().backward()
            engine(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # gathers once, and not again
            for _ in range(3):
                engine(torch.ones(1, 64))
        return dict(traced.trace.num_operations), dict(traced.trace.num_bytes)

    times = accumulate if stage == 2 else 1
    for operations, num_bytes in run_virtual(work, ranks=2):
        assert operations == {"reduce_scatter": 9 * times, "all_gather": 18, "all_reduce": 1}
        assert num_bytes == {"reduce_scatter": WIDE * times, "all_gather": 2 * WIDE, "all_reduce": 10 * 4}


@covering(stage=[1, 2], touch=["nothing", "scales", "drops", "asks twice", "another norm"])
def test_the_norm_travels_with_the_flags_unless_gradients_change(stage: int, touch: str) -> None:
    """Clipping asks the others nothing more, and is right all the same where gradients are not as they came."""

    def work(comm: Communicator) -> tuple[int, float, float]:
        traced = TracedCommunicator(comm, Trace(comm.device))
        torch.manual_seed(0)
        engine = make_zero(Wide(), traced, stage, ONE_LAYER)
        engine(torch.full((1, 64), 1.0 + comm.rank)).sum().backward()
        if touch == "scales":
            for piece in engine.parameters():
                assert piece.grad is not None
                piece.grad *= 3.0
        elif touch == "drops":
            next(engine.parameters()).grad = None
        elif touch == "asks twice":
            engine.clip_grad_norm_(math.inf)
        kind = 1.0 if touch == "another norm" else 2.0
        whole = [gradient for gradient in engine.full_gradients().values() if gradient is not None]
        traced.trace.num_operations.clear()
        norm = engine.clip_grad_norm_(math.inf, kind)
        wanted = torch.nn.utils.get_total_norm(whole, kind)
        return traced.trace.num_operations.get("all_reduce", 0), float(norm), float(wanted)

    for asked, norm, wanted in run_virtual(work, ranks=2):
        assert asked == (0 if touch == "nothing" else 1)
        assert norm == pytest.approx(wanted, rel=1e-5)


def test_buckets_leave_while_backward_runs() -> None:
    """From the second step on, a bucket is on its way before earlier layers have their gradients."""

    def work(comm: Communicator) -> list[str]:
        events: list[str] = []
        engine = make_zero(engine_cases.make("defined backwards"), comm)
        first = engine._arrivals.buckets[0]
        for bucket in engine._fixed:
            bucket.send = functools.partial(_note, events, "send", bucket.send)  # type: ignore[method-assign]
        for _ in range(2):
            events.clear()
            output = engine(engine_cases.data(0)[0])
            weight = engine.module.get_parameter("first.weight")
            hook = weight.register_hook(lambda _: events.append("first layer"))
            output.sum().backward()
            hook.remove()
        assert engine._arrivals.buckets[0] is not first, "the order is that in which gradients arrive"
        return events

    for events in run_virtual(work, ranks=2):
        assert events.index("send") < events.index("first layer")


def _note(events: list[str], name: str, call: Callable[[], None]) -> None:
    events.append(name)
    call()


def test_forward_begins_before_everything_is_gathered() -> None:
    def work(comm: VirtualCommunicator) -> list[int]:
        engine = make_zero(Wide(), comm, 1, ONE_LAYER)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        ready: list[int] = []
        for layer in engine.module.get_submodule("layers"):
            layer.register_forward_hook(lambda *_: ready.append(engine._gathering._num_ready))
        for _ in range(3):
            ready.clear()
            engine(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return ready

    for ready in run_virtual(work, ranks=2):
        assert ready == list(range(1, 10)), "a layer waits for its own bucket, and for those before it"


# Reading parameters.


def trained(comm: Communicator, module: nn.Module, stage: int = 1, **options: Any) -> tuple[ZeroParallel, Any]:
    """An engine after a step: this rank's pieces are newer than what the module computes with."""
    engine = make_zero(module, comm, stage, **options)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    engine(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine, optimizer


def single_after_a_step(case: str) -> nn.Module:
    module = engine_cases.make(case)
    module(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return module


def test_a_module_called_by_itself_has_current_parameters() -> None:
    x = torch.ones(2, 5, dtype=torch.float64)

    def work(comm: Communicator) -> list[torch.Tensor]:
        engine, _ = trained(comm, engine_cases.make("plain"))
        found = [engine.module.get_submodule("first")(x).detach()]
        with torch.no_grad():
            for piece in engine.parameters():
                piece.mul_(2.0)  # as weight averaging does, before it evaluates
            found.append(engine(x))
            for piece in engine.parameters():
                piece.mul_(0.5)
            found.append(engine.module(x))
        return found

    single = single_after_a_step("plain")
    doubled = copy.deepcopy(single)
    for parameter in doubled.parameters():
        parameter.data.mul_(2.0)
    for first, twice, again in run_virtual(work, ranks=3):
        torch.testing.assert_close(first, single.get_submodule("first")(x), rtol=0, atol=ZERO)
        torch.testing.assert_close(twice, doubled(x), rtol=0, atol=ZERO)
        torch.testing.assert_close(again, single(x), rtol=0, atol=ZERO)


class Reads(Plain):
    """Reads parameters of others in every way there is, before their owners run. All ranks own a part of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.last = nn.Linear(3, 40)
        self.kept = [self.last.weight] if way == "kept" else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {
            "attribute": lambda: self.last.weight.sum(),
            "iteration": lambda: sum(p.sum() for p in self.parameters()),
            "names": lambda: dict(self.named_parameters())["last.weight"].sum(),
            "getattr": lambda: self.get_parameter("last.weight").sum(),
            "kept": lambda: self.kept[0].sum(),
        }[self.way]()
        return self.last(super().forward(x)) * found


@pytest.mark.parametrize("way", ["attribute", "iteration", "names", "getattr", "kept"])
def test_nobody_reads_a_parameter_that_is_still_under_way(way: str) -> None:
    x = torch.ones(2, 5, dtype=torch.float64)

    def work(comm: Communicator) -> torch.Tensor:
        torch.manual_seed(0)
        engine, _ = trained(comm, Reads(way).double())
        return engine(x).detach()

    torch.manual_seed(0)
    single = Reads(way).double()
    single(x).sum().backward()
    torch.optim.SGD(single.parameters(), lr=0.1).step()
    for output in run_virtual(work, ranks=2):
        torch.testing.assert_close(output, single(x), rtol=0, atol=ZERO)


def test_copies_of_the_module_are_plain_modules() -> None:
    """As weight averaging makes them: they know nothing of the engine."""

    def work(comm: Communicator) -> bool:
        engine, _ = trained(comm, engine_cases.make("plain"))
        x = torch.ones(2, 5, dtype=torch.float64)
        output = engine(x)
        copies = [copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))]
        if comm.rank == 0:  # without the others
            engine._gathering.may_have_changed = True
            assert all(torch.equal(each(x), output) for each in copies)
        for each in copies:
            each(x).sum().backward()
        return all(p.grad is not None for each in copies for p in each.parameters())

    assert all(run_virtual(work, ranks=2))


def test_a_failed_forward_leaves_the_module_as_it_was() -> None:
    def work(comm: Communicator) -> bool:
        engine, _ = trained(comm, engine_cases.make("plain"))
        tables = [type(module._parameters) for module in engine.module.modules()]
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            engine(torch.ones(2, 4, dtype=torch.float64))
        engine(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        return tables == [type(module._parameters) for module in engine.module.modules()]

    assert all(run_virtual(work, ranks=2))


@pytest.mark.parametrize("fused", [True, False])
@STAGES
def test_an_evaluation_between_backward_and_update(stage: int, fused: bool) -> None:
    """A fused update raises no version: what it changes must be gathered all the same."""
    x = torch.ones(2, 5, dtype=torch.float64)

    def work(comm: Communicator) -> torch.Tensor:
        engine = make_zero(engine_cases.make("plain"), comm, stage)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1, fused=fused)
        engine(x).sum().backward()
        with torch.no_grad():
            engine(x)
        optimizer.step()
        with torch.no_grad():
            return engine(x)

    single = engine_cases.make("plain")
    single(x).sum().backward()
    torch.optim.AdamW(single.parameters(), lr=0.1, fused=fused).step()
    for output in run_virtual(work, ranks=2):
        torch.testing.assert_close(output, single(x), rtol=0, atol=ZERO)


def test_the_module_keeps_its_engine() -> None:
    def work(comm: Communicator) -> bool:
        module = engine_cases.make("plain")
        pieces = list(make_zero(module, comm).parameters())
        gc.collect()
        module(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        return all(piece.grad is not None for piece in pieces)

    assert all(run_virtual(work, ranks=2))


def test_an_engine_that_is_gone_hears_of_no_steps() -> None:
    def work(comm: Communicator) -> int:
        trained(comm, engine_cases.make("plain"))
        comm.barrier()
        return len(Gathering.alive)

    gc.collect()
    before = len(Gathering.alive)
    assert max(run_virtual(work, ranks=2)) == before + 2
    gc.collect()
    assert len(Gathering.alive) == before
    assert sum(hook is _tell_of_step for hook in hooks.values()) == 1


def test_an_update_between_forward_and_backward_is_refused() -> None:
    def work(comm: Communicator) -> None:
        engine, optimizer = trained(comm, engine_cases.make("plain"))
        x = torch.ones(2, 5, dtype=torch.float64)
        engine(x).sum().backward()
        output = engine(x)
        optimizer.step()
        output.sum().backward()

    assert "call optimizer.step() after the backward" in refusal(work)


# Accumulation and zero_grad.


def accumulated(engine: ZeroParallel, steps: list[str]) -> list[engine_cases.Values]:
    """Carries out a list of passes; returns the gradients after it."""
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    for number, step in enumerate(steps):
        x = engine_cases.data(number)[0].split(6)[engine.comm.rank]
        if step == "none":
            optimizer.zero_grad(set_to_none=True)
        elif step == "zero":
            optimizer.zero_grad(set_to_none=False)
        elif step == "sit out":
            engine.join_pass() if engine.comm.rank else engine(x).sum().backward()
        elif step == "local":
            with engine.no_sync():
                engine(x).sum().backward()
        elif step == "twice":
            loss = engine(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        elif step == "two forwards":
            (engine(x).sum() + engine(2 * x).sum()).backward()
        elif step == "forward only":
            engine(x)
        else:
            engine(x).sum().backward()
    return [engine.full_gradients()]


def summed_by_one(steps: list[str], ranks: int) -> engine_cases.Values:
    """What the gradients should be: every pass's mean over ranks, added up since the last zero_grad."""
    module = engine_cases.make("plain")
    for number, step in enumerate(steps):
        for rank in range(ranks):
            x = engine_cases.data(number)[0].split(6)[rank]
            if step in ("none", "zero"):
                module.zero_grad(set_to_none=step == "none")
            elif step in ("both", "local") or (step == "sit out" and rank == 0):
                (module(x).sum() / ranks).backward()
            elif step == "twice":
                (2 * module(x).sum() / ranks).backward()
            elif step == "two forwards":
                ((module(x).sum() + module(2 * x).sum()) / ranks).backward()
    return {name: p.grad for name, p in module.named_parameters()}


@covering(
    stage=[1, 2],
    steps=[
        ["both", "both"],
        ["both", "zero", "both"],
        ["both", "local", "both"],
        ["both", "local", "none", "local", "both"],
        ["local", "none", "both"],
        ["local", "local", "sit out"],
        ["both", "none", "sit out", "local", "both"],
        ["twice", "both"],
        ["two forwards", "forward only", "both"],
        ["forward only", "both"],
    ],
)
def test_gradients_add_up_until_they_are_zeroed(stage: int, steps: list[str]) -> None:
    def work(comm: Communicator) -> engine_cases.Values:
        return accumulated(make_zero(engine_cases.make("plain"), comm, stage), steps)[0]

    for gradients in run_virtual(work, ranks=2):
        torch.testing.assert_close(gradients, summed_by_one(steps, 2), rtol=0, atol=ZERO)


@STAGES
def test_gradients_may_be_zeroed_between_forward_and_backward(stage: int) -> None:
    """A rank without samples zeroes before or after: what is gathered must not depend on it."""

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = make_zero(engine_cases.make("plain"), comm, stage)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1, fused=True)
        for step in range(3):
            for slot in range(4):
                with engine.no_sync() if slot < 3 else contextlib.nullcontext():
                    has_samples = comm.rank == 0 or slot == 3
                    output = engine(engine_cases.data(step)[0]) if has_samples else None
                    if slot == 0:
                        optimizer.zero_grad()
                    if output is None:
                        engine.join_pass()
                    else:
                        output.sum().backward()
            optimizer.step()
        return engine.full_state_dict()

    single = engine_cases.make("plain")
    optimizer = torch.optim.AdamW(single.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (single(engine_cases.data(step)[0]).sum() * 2.5).backward()
        optimizer.step()
    for state in run_virtual(work, ranks=2):
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=0, atol=1e-10)


def test_local_sums_that_were_changed_in_place_are_refused() -> None:
    def work(comm: Communicator) -> None:
        accumulated(make_zero(engine_cases.make("plain"), comm), ["local", "zero", "both"])

    assert "zero_grad(set_to_none=True)" in refusal(work)


# Parameters that come and go.


@pytest.mark.parametrize("through", ["the module", "the engine"])
@STAGES
def test_freezing_between_steps(stage: int, through: str) -> None:
    def freeze(named: dict[str, nn.Parameter], step: int) -> None:
        named["first.weight"].requires_grad_(step != 1)
        named["second.bias"].requires_grad_(step < 2)

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = make_zero(engine_cases.make("plain"), comm, stage)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)
        for step in range(4):
            owner = engine if through == "the engine" else engine.module
            freeze(dict(owner.named_parameters()), step)
            engine(engine_cases.data(step)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    single = engine_cases.make("plain")
    optimizer = torch.optim.AdamW(single.parameters(), lr=0.1)
    for step in range(4):
        freeze(dict(single.named_parameters()), step)
        single(engine_cases.data(step)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_virtual(work, ranks=2):
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=0, atol=1e-10)


def test_unfreezing_what_was_frozen_from_the_start_is_refused() -> None:
    def work(comm: Communicator) -> None:
        engine = make_zero(engine_cases.make("frozen"), comm)
        engine.module.get_parameter("first.weight").requires_grad_(True)
        engine(engine_cases.data(0)[0])

    assert "first.weight was frozen when the engine was built" in refusal(work)


def test_a_rank_that_has_all_gradients_does_not_wait_for_the_others_flags() -> None:
    class Waits:
        """Counts how often an operation is waited for."""

        def __init__(self, work: Work) -> None:
            self.work = work

        def wait(self) -> None:
            events.append(current[0])
            self.work.wait()

    events: list[int] = []
    current = [-1]

    def work(comm: VirtualCommunicator) -> bool:
        engine = make_zero(engine_cases.make("branches"), comm)
        all_reduce = comm.all_reduce
        comm.all_reduce = lambda tensor, op="sum": Waits(all_reduce(tensor, op))  # type: ignore[method-assign]
        output = engine(engine_cases.data(0)[0], "left")
        if comm.rank == 0:
            output = engine.module.get_submodule("right")(output) * engine.module.get_parameter("never").sum()
        current[0] = comm.rank
        output.sum().backward()
        return engine.full_gradients()["never"] is not None

    assert run_virtual(work, ranks=2) == [True, True]
    assert set(events) == {1}


# Failures.


def raise_no_room(_: torch.Tensor) -> None:
    raise MemoryError("no room")


@STAGES
def test_a_failed_backward_does_not_poison_the_next(stage: int) -> None:
    def work(comm: Communicator) -> engine_cases.Values:
        engine = make_zero(engine_cases.make("plain"), comm, stage)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.0)
        for attempt in range(3):
            optimizer.zero_grad()
            output = engine(engine_cases.data(0)[0])
            if attempt == 1:
                hook = engine.module.get_parameter("first.weight").register_hook(raise_no_room)
                with pytest.raises(MemoryError):
                    output.sum().backward()
                hook.remove()
                continue
            output.sum().backward()
        return engine.full_gradients()

    single = engine_cases.make("plain")
    single(engine_cases.data(0)[0]).sum().backward()
    for gradients in run_virtual(work, ranks=2):
        torch.testing.assert_close(gradients, {n: p.grad for n, p in single.named_parameters()}, rtol=0, atol=ZERO)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@STAGES
def test_a_pass_that_fails_on_one_rank_is_completed_by_sitting_out(stage: int, fails_in: str) -> None:
    """As for a rank that runs out of memory: the others are not left waiting, and all try again."""

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = make_zero(engine_cases.make("plain"), comm, stage)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step, fails in enumerate([False, True, False]):
            x = engine_cases.data(step)[0].split(6)[comm.rank]
            failing = fails and comm.rank == 1
            weight = engine.module.get_parameter("first.weight")
            hook = weight.register_hook(raise_no_room) if failing and fails_in == "backward" else None
            try:
                engine(x[:, :4] if failing and fails_in == "forward" else x).sum().backward()
            except (MemoryError, RuntimeError):
                engine.join_pass()
            if hook is not None:
                hook.remove()
            if fails:
                optimizer.zero_grad()
                engine(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    single = engine_cases.make("plain")
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (single(engine_cases.data(step)[0]).sum() / 2).backward()
        optimizer.step()
    for state in run_virtual(work, ranks=2):
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=0, atol=1e-10)


@STAGES
def test_a_microbatch_that_fails_on_one_rank_is_dropped(stage: int) -> None:
    """The rank sits out the rest of the step, the others finish it; then all drop it and train on."""

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = make_zero(engine_cases.make("plain"), comm, stage)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        x = engine_cases.data(0)[0].split(6)[comm.rank]
        engine(x).sum().backward()
        optimizer.zero_grad()
        hook = engine.module.get_parameter("first.weight").register_hook(raise_no_room) if comm.rank else None
        for is_last in (False, False, True):
            with contextlib.nullcontext() if is_last else engine.no_sync():
                if hook is not None and not is_last:
                    with pytest.raises(MemoryError):
                        engine(x).sum().backward()
                if hook is not None:
                    engine.join_pass()
                else:
                    engine(x).sum().backward()
        if hook is not None:
            hook.remove()
        optimizer.zero_grad()
        engine(x).sum().backward()
        optimizer.step()
        return engine.full_state_dict()

    single = engine_cases.make("plain")
    (single(engine_cases.data(0)[0]).sum() / 2).backward()
    torch.optim.SGD(single.parameters(), lr=0.1).step()
    for state in run_virtual(work, ranks=2):
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=0, atol=1e-10)


@STAGES
def test_an_extra_arrival_is_refused_with_overlap_and_right_without(stage: int) -> None:
    class Changing(Reentrant):
        num_uses = 1

        def forward(self, x: torch.Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            for _ in range(self.num_uses):
                hidden = checkpoint(self.middle, torch.tanh(hidden), use_reentrant=True)
            return self.second(hidden)

    def work(comm: Communicator, overlap: bool) -> engine_cases.Values:
        torch.manual_seed(3)
        module = Changing().double()
        engine = make_zero(module, comm, stage, overlap=overlap)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for uses in (1, 1, 3):
            module.num_uses = uses
            optimizer.zero_grad()
            engine(engine_cases.data(0)[0].requires_grad_()).sum().backward()
        return engine.full_gradients()

    assert "overlap = false" in refusal(lambda comm: work(comm, overlap=True))
    torch.manual_seed(3)
    single = Changing().double()
    single.num_uses = 3
    single(engine_cases.data(0)[0].requires_grad_()).sum().backward()
    for gradients in run_virtual(lambda comm: work(comm, overlap=False), ranks=2):
        torch.testing.assert_close(gradients, {n: p.grad for n, p in single.named_parameters()}, rtol=0, atol=ZERO)


def test_gradients_that_cannot_be_reduced_are_refused() -> None:
    def twice(comm: Communicator) -> None:
        make_zero(engine_cases.make("plain"), comm)(engine_cases.data(0)[0]).sum().backward(create_graph=True)

    def sparse(comm: Communicator) -> None:
        make_zero(nn.Embedding(4, 2, sparse=True), comm)(torch.tensor([1])).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about create_graph, once in a process
        assert "torch.autograd.grad" in refusal(twice)
    assert "sparse=False" in refusal(sparse)


# Buffers.


@pytest.mark.parametrize("policy", ["broadcast", "local"])
def test_buffer_policy(policy: str) -> None:
    def work(comm: Communicator) -> torch.Tensor:
        module = nn.BatchNorm1d(2)
        engine = make_zero(module, comm, buffers=policy)
        for step in range(3):
            if comm.rank == 1 and step == 1:
                engine.join_pass()
            else:
                engine(torch.full((4, 2), float(comm.rank + 1)) + torch.arange(4.0)[:, None]).sum().backward()
        engine.share_buffers()
        mean = module.get_buffer("running_mean").clone()
        module.running_mean = torch.full((2,), float(comm.rank))  # another tensor in its place
        engine.share_buffers()
        return torch.cat([mean, module.get_buffer("running_mean")])

    first, second = run_virtual(work, ranks=2)
    assert torch.equal(first, second) == (policy == "broadcast")


# Norms.


@covering(stage=[1, 2], max_norm=[0.5, math.inf], norm_type=[1.0, 2.0, 3.0, math.inf])
def test_norms(stage: int, max_norm: float, norm_type: float) -> None:
    def work(comm: Communicator) -> tuple[float, engine_cases.Values]:
        engine = make_zero(engine_cases.make("odd shapes"), comm, stage)
        engine(engine_cases.data(0)[0]).sum().backward()
        return float(engine.clip_grad_norm_(max_norm, norm_type)), engine.full_gradients()

    single = engine_cases.make("odd shapes")
    single(engine_cases.data(0)[0]).sum().backward()
    sizable = [p for p in single.parameters() if p.numel()]  # torch has no largest element of nothing
    norm = nn.utils.clip_grad_norm_(sizable, max_norm, norm_type)
    for found, gradients in run_virtual(work, ranks=4):
        assert found == pytest.approx(float(norm), abs=1e-10)
        torch.testing.assert_close(gradients, {n: p.grad for n, p in single.named_parameters()}, rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_on_every_rank(value: float, norm_type: float) -> None:
    def work(comm: Communicator) -> bool:
        engine = make_zero(engine_cases.make("plain"), comm)
        scale = value if comm.rank == 1 else 1.0
        (engine(engine_cases.data(0)[0])[0, 0] * scale).backward()
        return math.isfinite(float(engine.clip_grad_norm_(math.inf, norm_type)))

    assert run_virtual(work, ranks=3) == [False] * 3


def norm_of_infinities(comm: Communicator) -> list[bool]:
    found = []
    for value in (math.nan, math.inf, -math.inf):
        engine = make_zero(engine_cases.make("plain"), comm)
        engine(engine_cases.data(0)[0]).sum().backward()
        if comm.rank == 1:
            for piece in engine.parameters():
                assert piece.grad is not None
                piece.grad.fill_(value)
        found.append(math.isfinite(float(engine.clip_grad_norm_(math.inf, math.inf))))
    return found


def test_a_backend_that_drops_what_is_no_number_does_not_hide_it(gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(norm_of_infinities, ranks=2, group_timeout_s=60.0, timeout_s=120.0)
    assert found == [[False] * 3] * 2


# State.


def continue_training(comm: Communicator, make: Any, saved: Any, steps: range) -> tuple[Any, Any]:
    engine = make(engine_cases.make("tied"), comm)
    named = engine.named_parameters()
    optimizer = engine_cases.make_optimizer("groups", named)
    if saved is not None:
        engine.load_full_state_dict(saved[0])
        engine.load_full_optimizer_state(optimizer, saved[1])
    for step in steps:
        x, y = (t.tensor_split(comm.size)[comm.rank] for t in engine_cases.data(step))
        scale = engine.loss_scale(len(x))
        (nn.functional.cross_entropy(engine(x), y, reduction="sum") * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict(rank0_only=True), engine.full_optimizer_state(optimizer, rank0_only=True)
    assert comm.rank == 0 or state == ({}, {})
    return state


def make_ddp(module: nn.Module, comm: Communicator) -> DataParallel:
    return DataParallel(module, make_groups(comm))


MAKERS = {"zero1": stage_maker(1), "zero2": stage_maker(2), "ddp": make_ddp}


@pytest.mark.parametrize(
    ("first", "ranks", "second", "more_ranks"),
    [("zero1", 3, "zero2", 2), ("zero2", 2, "ddp", 3), ("ddp", 2, "zero1", 4), ("zero2", 4, "zero1", 1)],
)
def test_state_moves_to_other_ranks_and_engines(first: str, ranks: int, second: str, more_ranks: int) -> None:
    saved = run_virtual(lambda comm: continue_training(comm, MAKERS[first], None, range(2)), ranks=ranks)[0]
    results = run_virtual(lambda c: continue_training(c, MAKERS[second], saved, range(2, 5)), ranks=more_ranks)
    solo = SoloCommunicator(torch.device("cpu"))
    state, optimizer = continue_training(solo, make_ddp, None, range(5))
    torch.testing.assert_close(results[0][0], state, rtol=0, atol=1e-10)
    torch.testing.assert_close(results[0][1]["state"], optimizer["state"], rtol=0, atol=1e-10)


def test_the_state_is_that_of_the_module() -> None:
    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        return make_zero(engine_cases.make("tied"), comm).full_state_dict()

    expected_state = engine_cases.make("tied").state_dict()
    for state in run_virtual(work, ranks=3):
        assert list(state) == list(expected_state)
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    def work(comm: Communicator) -> bool:
        engine = make_zero(engine_cases.make("plain"), comm)
        before = engine.full_state_dict()
        for wrong in (
            {**before, "other": torch.ones(1)},
            {name: value for name, value in before.items() if name != "second.bias"},
            {**before, "second.bias": torch.ones(1, dtype=torch.float64)},
        ):
            zeros = {name: torch.zeros_like(value) for name, value in wrong.items()}
            with pytest.raises(RuntimeError):
                engine.load_full_state_dict(zeros)
        after = engine.full_state_dict()
        return all(torch.equal(after[name], value) for name, value in before.items())

    assert all(run_virtual(work, ranks=2))


# Precision.


def train_in_bf16(comm: Communicator, engine: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        x, y = (t.split(6)[comm.rank % 2] for t in engine_cases.data(step))
        output = engine(x.float())
        assert output.dtype == torch.bfloat16
        loss = nn.functional.cross_entropy(output.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, engine.full_state_dict()


@pytest.mark.parametrize("name", ["bf16", "bf16_master"])
@STAGES
def test_mixed_precision_is_that_of_data_parallelism(stage: int, name: str) -> None:
    precision = precision_named(name)

    def work(comm: Communicator, is_zero: bool) -> Any:
        module = engine_cases.make("frozen").float()
        if is_zero:
            policy = sized(200, 100, strategy=f"zero{stage}")
            return train_in_bf16(comm, ZeroParallel(module, make_groups(comm, policy), policy, precision))
        return train_in_bf16(comm, DataParallel(module, make_groups(comm), None, precision))

    for (losses, state), (ddp_losses, ddp_state) in zip(
        run_virtual(lambda comm: work(comm, True), ranks=2),
        run_virtual(lambda comm: work(comm, False), ranks=2),
        strict=True,
    ):
        assert losses == pytest.approx(ddp_losses, abs=2e-2)
        for parameter, value in ddp_state.items():
            torch.testing.assert_close(state[parameter].float(), value.float(), rtol=0, atol=5e-3)
        assert state["second.weight"].dtype == torch.float32


@STAGES
def test_masters_keep_what_bf16_would_lose(stage: int) -> None:
    """One rank with masters: an update far below the distance of two bf16 numbers is not lost."""
    comm = SoloCommunicator(torch.device("cpu"))
    module = engine_cases.make("plain").float()
    nn.init.ones_(module.get_parameter("second.bias"))
    layout = Layout(strategy=f"zero{stage}")
    engine = ZeroParallel(module, make_groups(comm, layout), layout, precision_named("bf16_master"))
    optimizer = torch.optim.SGD(engine.parameters(), lr=1e-4)
    for _ in range(3):
        engine(torch.ones(1, 5)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert module.get_parameter("second.bias").dtype == torch.bfloat16
    assert engine.full_state_dict()["second.bias"].tolist() == pytest.approx([0.9997] * 3, abs=1e-6)
    with pytest.raises(UsageError, match="SGD"):
        engine.check_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))


def test_norms_with_statistics_stay_as_they_were_built() -> None:
    def work(comm: Communicator) -> list[torch.dtype]:
        module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        layout = Layout(strategy="zero1")
        engine = ZeroParallel(module, make_groups(comm, layout), layout, precision_named("bf16_master"))
        engine(torch.randn(4, 5)).float().sum().backward()
        return [parameter.dtype for parameter in module.parameters()]

    half, full = [torch.bfloat16] * 2, [torch.float32] * 2
    assert run_virtual(work, ranks=2) == [[*half, *full, *half]] * 2


# Compiled blocks.


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@STAGES
@pytest.mark.exhaustive
def test_compiled_blocks_keep_the_numbers_and_the_overlap(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Traced and differentiated block by block (without code generation, which needs a compiler on the machine)."""
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_function(function, backend="aot_eager"))

    def work(comm: Communicator, compiled: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
        ready: list[int] = []
        torch.manual_seed(0)
        model = GPT(gpt_config("gpt-nano", dropout=0.0, vocab_size=32, context=16)).double()
        if compiled:
            compile_model(model, whole=False)
        engine = make_zero(model, comm, stage, BucketPolicy(bucket_bytes=10**5, first_bucket_bytes=5 * 10**4))
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        arrived: list[int] = []
        for layer in model.get_submodule("layers").children():
            layer.register_forward_pre_hook(lambda *_: ready.append(engine._gathering._num_ready))
        launch = engine._launch
        engine._launch = lambda bucket: (arrived.append(sum(engine._arrivals.counts)), launch(bucket))[1]  # type: ignore[method-assign]
        for _ in range(3):
            arrived.clear()
            ready.clear()
            tokens = torch.arange(32).reshape(2, 16) if comm.rank else torch.arange(32).flip(0).reshape(2, 16)
            engine(tokens).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if compiled:
            assert [place + 1 for place in engine._gathering._place_of_compiled.values()] == ready
            assert sorted(set(ready)) == ready, "each block waits for its own parameters"
        return engine.full_state_dict(), arrived

    plain = run_virtual(lambda comm: work(comm, compiled=False), ranks=2)[0][0]
    for state, arrived in run_virtual(lambda comm: work(comm, compiled=True), ranks=2):
        torch.testing.assert_close(state, plain, rtol=0, atol=1e-10)
        assert len(set(arrived)) > 2, "buckets must leave at different moments of backward"


def test_the_branches_of_the_cases_differ_by_rank() -> None:
    """The case is only worth its name if some parameter is used on one rank alone."""
    used = [{Branches: engine_cases.branch_of(step, rank)}[Branches] for step in range(4) for rank in range(2)]
    assert len(set(used)) == 3


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_frozen_parameters_are_saved_as_they_were_built(stage: str) -> None:
    """The module computes with a bf16 copy; a state dict has the digits that were there before, or what came since."""

    def work(comm: Communicator) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        built = model[0].weight.detach().clone()
        engine = parallelize(model, comm, stage, precision="bf16_master")
        assert model[0].weight.dtype == torch.bfloat16
        state = engine.full_state_dict()
        assert torch.equal(state["0.weight"], built)
        state["0.weight"] += 1e-5
        engine.load_full_state_dict(state)
        assert torch.equal(engine.full_state_dict()["0.weight"], state["0.weight"])
        with torch.no_grad():
            model[0].weight.fill_(3.0)
        assert engine.full_state_dict()["0.weight"].eq(3.0).all()

    run_virtual(work, ranks=2)
