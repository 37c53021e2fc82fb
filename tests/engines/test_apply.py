"""From a module to an engine: the strategy that fits, and engines that leave nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines import apply
from paceline.engines.apply import layout_from, parallelize
from paceline.engines.engine import Engine
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout
from paceline.plan.plan import MARGIN
from paceline.search.automatic import Choice

CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(gpt_config("gpt-nano", context=16, vocab_size=32))


def train(engine: Engine, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, fused=True)
    tokens = torch.arange(16)[None]
    for _ in range(steps):
        F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@covering(strategy=["ddp", "zero1", "zero2", "fsdp"], precision=["fp32", "bf16_master"], ranks=[2, 1])
def test_an_engine_that_nobody_holds_is_freed(strategy: str, precision: str, ranks: int) -> None:
    """Hooks of torch refer to the engine where the collector cannot look: a cycle there would stay."""

    def work(comm: Communicator) -> weakref.ref[Engine]:
        engine = parallelize(make_model(), comm, strategy, precision=precision)
        train(engine)
        return weakref.ref(engine)

    for reference in run_virtual(work, ranks=ranks):
        gc.collect()
        assert reference() is None


def test_auto_takes_data_parallelism_where_it_fits() -> None:
    engine = parallelize(make_model(), SoloCommunicator(CPU), "auto")
    assert type(engine).__name__ == "DataParallel"
    train(engine, 1)


def test_auto_shards_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less room than data parallelism needs, and more than full sharding does, the ranks share the model out."""
    monkeypatch.setattr(apply, "_FOR_ACTIVATIONS", 0.0)

    def choose() -> list[Choice]:
        return run_virtual(lambda comm: apply.choose_for_module(make_model(), comm), ranks=4)

    needs = {each.label: each.memory.device_bytes for each in choose()[0].ladder}
    room = round((needs["ddp"] + needs["fsdp"]) / 2 / (1 - MARGIN))
    measure = apply.measure_machine
    monkeypatch.setattr(
        apply, "measure_machine", lambda *where: dataclasses.replace(measure(*where), device_bytes=room)
    )
    assert {each.chosen.label for each in choose()} <= {"zero1", "zero2", "fsdp"}
    engines = run_virtual(lambda comm: type(parallelize(make_model(), comm, "auto")).__name__, ranks=4)
    assert set(engines) <= {"ZeroParallel", "FullySharded"}


def test_arguments_of_another_type_are_refused_with_the_fix() -> None:
    comm = SoloCommunicator(CPU)
    with pytest.raises(UsageError, match=r"give what paceline\.connect"):
        parallelize(make_model(), "ddp")  # type: ignore[arg-type]
    for wrong in ({"strategy": Layout()}, {"layout": {"strategy": "fsdp"}}):
        with pytest.raises(UsageError, match=r"a layout is given as layout=paceline\.Layout"):
            parallelize(make_model(), comm, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean fsdp"):
        parallelize(make_model(), comm, layout=Layout(strategy="fdsp"))  # type: ignore[arg-type]


def test_options_are_taken_as_a_config_writes_them() -> None:
    assert layout_from({"offload": ["optimizer"]}).offload == layout_from({"offload": "optimizer"}).offload
    assert layout_from({"compression": "topk"}).compression.policy == "topk"


def test_a_loss_may_be_a_plain_pair() -> None:
    tokens = torch.arange(16)[None]

    def loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten(), reduction="sum"), batch.numel()

    (value,) = parallelize(make_model(), SoloCommunicator(CPU)).run_microbatches([tokens], loss, 1 / 16)
    assert (float(value.total.detach()) > 0, value.count) == (True, 16)
    with pytest.raises(UsageError, match="a loss returned a Tensor"):
        parallelize(make_model(), SoloCommunicator(CPU)).run_microbatches([tokens], lambda *_: torch.ones(()))


@pytest.mark.parametrize("spread", [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"pipeline": 2}, {"tensor": 2}], ids=str)
def test_every_engine_counts_the_parameters_that_train(spread: dict[str, Any]) -> None:
    def work(comm: Communicator) -> tuple[int, int]:
        model = GPT(gpt_config("gpt-nano"))
        model.get_parameter("layers.0.attention.query.weight").requires_grad_(False)
        engine = parallelize(model, comm, **spread)
        return engine.num_parameters, engine.num_trained

    model = GPT(gpt_config("gpt-nano"))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert (
        run_virtual(work, ranks=2)
        == [(total, total - model.get_parameter("layers.0.attention.query.weight").numel())] * 2
    )
