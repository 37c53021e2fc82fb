"""The sharded engines on a GPU: virtual ranks that share it, masters, offload, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import SHARES, Recipe, assert_same, run_engine, run_single, token_losses
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Offload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STRATEGIES = ("zero1", "zero2", "fsdp", "hybrid")


def make_engine(module: nn.Module, comm: Communicator, strategy: str) -> Engine:
    units = tuple(name for name, child in module.named_children() if any(True for _ in child.parameters()))
    options = {"units": units} if strategy in ("fsdp", "hybrid") else {}
    return parallelize(module, comm, strategy, shard_ranks=2 if strategy == "hybrid" else 0, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ["plain", "tied", "unused", "reused", "checkpointed", "branches", "odd shapes"])
def test_virtual_ranks_on_one_gpu_train_as_one_process(case: str, strategy: str) -> None:
    recipe = Recipe(shares=SHARES["ragged"])
    expected = run_single(case, recipe)
    for result in run_engine(lambda module, comm: make_engine(module, comm, strategy), case, recipe, device="cuda"):
        assert_same(result, expected)


def losses(comm: Communicator, strategy: str, steps: int = 4, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = GPT(gpt_config("gpt-nano", context=16, vocab_size=32))
    engine = parallelize(model, comm, strategy, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
    tokens = [torch.randint(0, 32, (8, 16), generator=torch.Generator().manual_seed(step)) for step in range(steps)]
    return token_losses(engine, optimizer, comm, [(each, each) for each in tokens], max_norm=1.0)


OFFLOADS = {
    "optimizer": Offload(optimizer=True),
    "gradients": Offload(gradients=True),
    "parameters": Offload(optimizer=True, parameters=True),
}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_offload_gives_the_same_losses(strategy: str, precision: str, offload: str, ranks: int) -> None:
    if offload != "optimizer" and strategy != "fsdp":
        pytest.skip("whole parameters stay on the device, and gradients where the optimizer is")
    expected = run_virtual(lambda comm: losses(comm, strategy, precision=precision), ranks=ranks, device="cuda")[0]
    found = run_virtual(
        lambda comm: losses(comm, strategy, precision=precision, offload=OFFLOADS[offload]), ranks=ranks, device="cuda"
    )[0]
    assert found == pytest.approx(expected, abs=2e-5 if precision == "fp32" else 2e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_blocks_may_be_compiled_and_checkpointed(strategy: str) -> None:
    expected = run_virtual(lambda comm: losses(comm, "ddp", precision="bf16_master"), ranks=1, device="cuda")[0]
    found = run_virtual(
        lambda comm: losses(comm, strategy, precision="bf16_master", compile=True, checkpoint_activations="full"),
        ranks=1,
        device="cuda",
    )[0]
    assert found == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("change", ["none", "in place", "another tensor", "removed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_taken_in_backward_are_those_of_the_gradients_now(ranks: int, precision: str, change: str) -> None:
    """Norms are taken beside backward, and again where a user has touched a gradient since."""

    def work(comm: Communicator) -> tuple[float, float]:
        torch.manual_seed(0)
        model = GPT(gpt_config("gpt-nano", context=16, vocab_size=32))
        engine = parallelize(model, comm, "fsdp", precision=precision)
        tokens = torch.randint(0, 32, (8, 16), device=comm.device)
        norm = torch.zeros(())
        for _ in range(2):
            engine.module.zero_grad()
            for parameter in engine.parameters():
                parameter.grad = None
            F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
            first = next(p for p in engine.parameters() if p.grad is not None)
            assert first.grad is not None
            if change == "in place":
                first.grad.mul_(100.0)
            elif change == "another tensor":
                first.grad = first.grad * 100.0
            elif change == "removed":
                first.grad = None
            norm = engine.clip_grad_norm_(float("inf"))
        gradients = engine.full_gradients().values()
        expected = torch.stack([g.double().square().sum() for g in gradients if g is not None]).sum().sqrt()
        return float(norm), float(expected)

    for norm, expected in run_virtual(work, ranks=ranks, device="cuda"):
        assert norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_no_step_waits_for_the_device(strategy: str, precision: str) -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(
            GPT(gpt_config("gpt-nano", context=16, vocab_size=32)), comm, strategy, precision=precision
        )
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(0, 32, (8, 16), device=comm.device)
        for step in range(4):
            if step == 2:  # the first ones learn, and allocate
                torch.cuda.set_sync_debug_mode("error")
            try:
                F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    run_virtual(work, ranks=1, device="cuda")


def test_memory_is_what_was_offloaded_less() -> None:
    """A GPT whose optimizer lives on the host leaves the parameters, and one unit's temporary memory, on the device."""

    def peak(offload: Offload) -> int:
        def work(comm: Communicator) -> int:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            config = gpt_config("gpt-124m", context=64)
            with torch.device("meta"):
                model = GPT(config)
            engine = parallelize(model, comm, "fsdp", precision="bf16_master", offload=offload)
            optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
            tokens = torch.randint(0, 100, (1, 64), device=comm.device)
            for _ in range(2):
                F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return torch.cuda.max_memory_allocated() - base

        return run_virtual(work, ranks=1, device="cuda")[0]

    everything, none = peak(Offload()), peak(Offload(optimizer=True, parameters=True))
    assert none < everything / 3
