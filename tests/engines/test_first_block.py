"""A large first block in parts: the same training, and smaller collectives where a step begins and ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from covering import covering

from paceline.comm.base import Communicator
from paceline.comm.dry.communicator import DryWorld
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines import apply
from paceline.engines.apply import parallelize
from paceline.engines.blocks import compiled_inside
from paceline.models.gpt import GPT, gpt_config
from paceline.models.registry import model_blocks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
PARTS = ["layers.0.attention", "layers.0.mlp"]
REST = [f"layers.{number}" for number in (1, 2, 3)]


@pytest.fixture(autouse=True)
def every_block_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_LARGE_BLOCK", 1)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def train(comm: Communicator, strategy: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of three steps and an evaluation, and what the model is then."""
    torch.manual_seed(0)
    model = GPT(gpt_config("gpt-nano", dropout=0.0, vocab_size=32, context=8, tied=False)).double()
    engine = parallelize(model, comm, strategy, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        tokens = torch.arange(32).reshape(4, 8).roll(step)
        mine = tokens[comm.rank :: comm.size]
        loss = engine(mine).logsumexp(-1).mean()
        loss.backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(engine(torch.arange(8)[None]).sum().item())
    return losses, engine.state_dict()


@covering(strategy=["ddp", "zero2", "fsdp", "hybrid"], compiled=["none", "blocks"])
def test_parts_of_a_block_train_as_one_process(strategy: str, compiled: str) -> None:
    options = {"shard_ranks": 2} if strategy == "hybrid" else {}
    alone = train(SoloCommunicator(torch.device("cpu")), "ddp")
    found = run_virtual(lambda comm: train(comm, strategy, compile=compiled, **options), ranks=4)
    for place, loss in enumerate(alone[0]):
        mean = sum(losses[place] for losses, _ in found) / len(found)
        assert mean == pytest.approx(loss, rel=1e-12)
    for _, state in found:
        torch.testing.assert_close(state, alone[1], rtol=1e-10, atol=1e-12)


def units_of(**options: Any) -> list[str]:
    def work(comm: Communicator) -> list[str]:
        engine: Any = parallelize(GPT(gpt_config("gpt-nano", dropout=0.0)), comm, "fsdp", **options)
        return [unit.name for unit in engine._units[:-1]]

    return run_virtual(work, ranks=2)[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [*PARTS, *REST]),
        ({"compile": "blocks"}, [*PARTS, *REST]),
        ({"units": ("layers.1",)}, ["layers.1"]),
        ({"checkpoint_activations": "full"}, ["layers.0", *REST]),
        ({"precision": "bf16_master"}, [*PARTS, *REST]),
    ],
    ids=lambda each: "-".join(map(str, each)) or "as it is",
)
def test_the_first_block_is_two_units_unless_another_cut_was_asked_for(
    options: dict[str, Any], expected: list[str]
) -> None:
    assert units_of(**options) == expected


def test_a_small_first_block_and_one_that_is_compiled_already_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_LARGE_BLOCK", 2**27)
    assert units_of() == ["layers.0", *REST]
    monkeypatch.setattr(apply, "_LARGE_BLOCK", 1)

    def work(comm: Communicator) -> list[bool]:
        model = GPT(gpt_config("gpt-nano", dropout=0.0))
        apply.compile_model(model, whole=False)
        parallelize(model, comm, "fsdp")
        return [compiled_inside(block.forward) is not None for block in model_blocks(model)]

    assert run_virtual(work, ranks=2)[0] == [True] * 4


def test_parts_are_compiled_one_by_one_and_other_blocks_whole() -> None:
    def work(comm: Communicator) -> list[str]:
        model = GPT(gpt_config("gpt-nano", dropout=0.0, tied=False, vocab_size=4096))
        parallelize(model, comm, "fsdp", compile="blocks")
        return [name for name, module in model.named_modules() if compiled_inside(module.forward) is not None]

    assert run_virtual(work, ranks=2)[0] == [*PARTS, *REST]


@pytest.mark.parametrize(
    ("kind", "vocabulary", "expected"),
    [("cuda", 2**17, ["token_embedding", "head"]), ("cuda", 4096, []), ("cpu", 4096, ["token_embedding", "head"])],
    ids=["large", "small", "small, on a CPU"],
)
def test_a_gpu_gathers_a_small_embedding_and_head_with_the_root(
    kind: str, vocabulary: int, expected: list[str]
) -> None:
    with torch.device("meta"):
        model = GPT(gpt_config("gpt-nano", vocab_size=vocabulary, tied=False))
    engine: Any = parallelize(model, DryWorld(2, kind).rank(0), "fsdp")
    assert {unit.name for unit in engine._units[:-1]} == {*PARTS, *REST, *expected}
