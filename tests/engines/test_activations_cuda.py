"""Activations on the host and MLPs in tiles on a GPU: the same bits, less memory, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.blocks import take_notes
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout, Offload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS, WIDTH, HIDDEN, LAYERS = 16_384, 512, 2048, 12
STREAM = 4 * ROWS * WIDTH  # bytes of a block's input
AWAY = Offload(activations=True)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Products and a norm alone, whose kernels give the same bits every time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), MLP(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def train(comm: Communicator, steps: int = 3, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the state after some steps of two microbatches, and the most memory of the last step."""
    torch.manual_seed(0)
    layout = Layout(checkpoint_activations="full", accumulate=2, **options)
    engine = parallelize(Stack(), comm, layout=layout)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator(comm.device).manual_seed(comm.rank)
    for _ in range(steps):
        batches = [torch.randn(ROWS, WIDTH, device=comm.device, generator=generator) for _ in range(2)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.run_microbatches(batches, lambda model, x: (model(x).float().pow(2).sum(), 1.0), 1e-6)
        most = torch.cuda.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    return engine.full_state_dict(), most


def both(ranks: int = 1, **options: Any) -> list[tuple[dict[str, torch.Tensor], int]]:
    changes = options.pop("changes")
    return [
        run_virtual(lambda comm, each=each: train(comm, **options, **each), ranks=ranks, device="cuda")[0]
        for each in ({}, changes)
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (1, "fsdp"), (2, "zero2"), (2, "fsdp")])
def test_offload_gives_the_same_bits(ranks: int, strategy: str, precision: str) -> None:
    (expected, _), (found, _) = both(ranks, strategy=strategy, precision=precision, changes={"offload": AWAY})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_offload_leaves_two_inputs_on_the_device() -> None:
    (_, whole), (_, less) = both(changes={"offload": AWAY})
    assert whole - less >= (LAYERS - 4) * STREAM


def test_tiles_compute_what_a_whole_mlp_does_and_take_less() -> None:
    (expected, whole), (found, less) = both(changes={"mlp_tiles": 8})
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-4, rtol=1e-3)
    hidden = 4 * ROWS * HIDDEN
    assert whole - less >= 1.5 * hidden


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("options", [{"offload": AWAY}, {"mlp_tiles": 8}, {"offload": AWAY, "mlp_tiles": 8}])
def test_no_step_waits_for_the_device(options: dict[str, Any]) -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(Stack(), comm, layout=Layout(checkpoint_activations="full", **options))
        x = torch.randn(ROWS, WIDTH, device=comm.device)
        for step in range(4):
            if step == 2:  # the first ones make the memory of the host
                torch.cuda.set_sync_debug_mode("error")
            try:
                engine(x).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    run_virtual(work, ranks=1, device="cuda")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_gpt_with_both() -> None:
    def losses(comm: Communicator, **options: Any) -> list[float]:
        torch.manual_seed(0)
        config = gpt_config(layers=4, heads=4, width=256, mlp_width=704, context=1024, vocab_size=64)
        layout = Layout(checkpoint_activations="full", precision="bf16_master", **options)
        engine = parallelize(GPT(config), comm, layout=layout)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(0, 64, (4, 1024), device=comm.device)
        found = []
        for _ in range(4):
            loss = F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert not any(note.problem for note in take_notes(engine.module))
        return found

    def run(**options: Any) -> list[float]:
        found: list[float] = run_virtual(lambda comm: losses(comm, **options), ranks=1, device="cuda")[0]
        return found

    expected = run(compile="blocks")
    assert run(compile="whole", offload=AWAY) == pytest.approx(expected, abs=5e-3)
    assert run(compile="blocks", offload=AWAY, mlp_tiles=4) == pytest.approx(expected, abs=2e-2)
