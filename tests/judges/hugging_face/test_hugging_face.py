"""Hugging Face's architectures: trained on two ranks, with LoRA and tensor parallelism, saved, exported, loaded again.

The models are small and random, in float64; the oracle is one process with the batch of both ranks. Tensor
parallelism is judged where the library has a plan for the architecture. What fsdp saved is exported as safetensors,
which the library's own ``from_pretrained`` loads: its logits must be those of the process.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import outcome_of
from small_models import ARCHITECTURES, CLASSES_OF, batch_of, build, config_of, logits_of, loss_of

from paceline import checkpoint
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.tools.outgoing import ExportOptions, export
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.tensor.apply import apply_tensor_parallel

pytestmark = [
    pytest.mark.judge,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
RANKS = 2
STRATEGIES = ("ddp", "zero2", "fsdp")
# They cast to it themselves, whatever dtype they have; Mixtral's router does, whose gradients tensor ranks add up.
FLOAT32_INSIDE = ("gemma", "gemma2", "mamba", "mamba2", "deepseek_v3", "mixtral, split")
ALL = tuple(range(RANKS))
State = dict[str, torch.Tensor]


def train_step(model: Any, name: str, ranks: tuple[int, ...]) -> float:
    """One step of AdamW, whose eps is large enough that a gradient of nothing but rounding moves nothing."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
    loss = loss_of(model, batch_of(name, ranks))
    loss.backward()
    optimizer.step()
    return loss.item()


@functools.cache
def trained_alone(name: str) -> tuple[float, Any]:
    model = build(name).train()
    return train_step(model, name, ALL), model


def on_a_rank(comm: Communicator, name: str, strategy: str, folder: Path | None = None) -> tuple[float, State]:
    engine = parallelize(build(name).train(), comm, strategy)
    loss = train_step(engine, name, (comm.rank,))
    if folder is not None:
        checkpoint.save(folder, engine, step=1)
    return loss, dict(engine.full_state_dict())


def assert_close(name: str, found: Any, wanted: Any) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name in FLOAT32_INSIDE else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found, wanted, **tolerance)


def assert_trained_alike(name: str, found: list[tuple[float, State]], loss: float, wanted: State) -> None:
    assert_close(name, sum(each for each, _ in found) / RANKS, loss)
    for _, state in found:
        assert_close(name, {key: state[key] for key in wanted}, dict(wanted))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_as_in_one_process(name: str, strategy: str) -> None:
    found = outcome_of(lambda: run_virtual(lambda comm: on_a_rank(comm, name, strategy), RANKS))
    loss, model = trained_alone(name)
    assert_trained_alike(name, found, loss, model.state_dict())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_with_adapters_trains_as_in_one_process(name: str) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")

    def adapted() -> Any:
        torch.manual_seed(7)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        return peft.get_peft_model(build(name), config).train()

    def work(comm: Communicator) -> tuple[float, State]:
        engine = parallelize(adapted(), comm, "fsdp")
        return train_step(engine, name, (comm.rank,)), dict(engine.full_state_dict())

    try:
        alone = adapted()
    except ValueError as error:
        pytest.skip(f"PEFT refuses: {error}")
    found = outcome_of(lambda: run_virtual(work, RANKS))
    assert_trained_alike(name, found, train_step(alone, name, ALL), alone.state_dict())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_under_tensor_parallelism(name: str) -> None:
    if not getattr(config_of(name), "base_model_tp_plan", None):
        pytest.skip("the library has no plan of tensor parallelism for this architecture")

    def work(comm: Communicator) -> tuple[float, State]:
        model = build(name).train()
        layout = apply_tensor_parallel(model, comm, gathers_logits=True)
        loss = train_step(model, name, ALL)
        return loss, {key: layout.full(key, value, comm) for key, value in model.state_dict().items()}

    found = outcome_of(lambda: run_virtual(work, RANKS))
    loss, model = trained_alone(name)
    judged = f"{name}, split" if name == "mixtral" else name
    assert_trained_alike(judged, found, loss, model.state_dict())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_saved_architecture_is_exported_and_loaded_by_the_library(name: str, tmp_path: Path) -> None:
    import transformers

    outcome_of(lambda: run_virtual(lambda comm: on_a_rank(comm, name, "fsdp", tmp_path / "saved"), RANKS))
    config_of(name).save_pretrained(tmp_path / "model")
    saved = open_checkpoint(tmp_path / "saved" / "step-00000001")
    export(saved, tmp_path / "model" / "model.safetensors", ExportOptions())
    kind = getattr(transformers, CLASSES_OF[name])
    theirs = (
        kind.from_pretrained(tmp_path / "model", dtype=torch.float64, experts_implementation="eager").double().eval()
    )
    ours = copy.deepcopy(trained_alone(name)[1]).eval()
    with torch.no_grad():
        batch = batch_of(name, ALL)
        assert_close(name, logits_of(theirs, batch), logits_of(ours, batch))
