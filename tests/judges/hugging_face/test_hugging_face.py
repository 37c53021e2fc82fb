"""Hugging Face's architectures: trained on two ranks, with LoRA and tensor parallelism, saved, exported, loaded again.

The models are small and random, in float64; the oracle is one process with the batch of both ranks. Tensor
parallelism is judged where the library has a plan for the architecture. What fsdp saved is exported as safetensors,
which the library's own ``from_pretrained`` loads: its logits must be those of the process.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import outcome_of
from oracle import Alone, State
from small_models import (
    ALL,
    ARCHITECTURES,
    CLASSES_OF,
    FLOAT64,
    RANKS,
    assert_trained,
    batch_of,
    build,
    config_of,
    logits_of,
    on_a_rank,
    tolerance_of,
    train_step,
    trained_alone,
)

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
STRATEGIES = ("ddp", "zero2", "fsdp")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_as_in_one_process(name: str, strategy: str) -> None:
    found = outcome_of(lambda: run_virtual(lambda comm: on_a_rank(comm, name, strategy), RANKS))
    assert_trained(name, found, *trained_alone(name))


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
        alone = Alone(adapted(), FLOAT64)
    except ValueError as error:
        pytest.skip(f"PEFT refuses: {error}")
    found = outcome_of(lambda: run_virtual(work, RANKS))
    assert_trained(name, found, train_step(alone.module, name, ALL), alone)


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
    judged = f"{name}, split" if name in ("mixtral", "olmoe") else name
    assert_trained(judged, found, *trained_alone(name))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_saved_architecture_is_exported_and_loaded_by_the_library(name: str, tmp_path: Path) -> None:
    import transformers

    outcome_of(lambda: run_virtual(lambda comm: on_a_rank(comm, name, "fsdp", folder=tmp_path / "saved"), RANKS))
    config_of(name).save_pretrained(tmp_path / "model")
    saved = open_checkpoint(tmp_path / "saved" / "step-00000001")
    export(saved, tmp_path / "model" / "model.safetensors", ExportOptions())
    kind = getattr(transformers, CLASSES_OF[name])
    theirs = (
        kind.from_pretrained(tmp_path / "model", dtype=torch.float64, experts_implementation="eager").double().eval()
    )
    ours = copy.deepcopy(trained_alone(name)[1].module).eval()
    with torch.no_grad():
        batch = batch_of(name, ALL)
        torch.testing.assert_close(logits_of(theirs, batch), logits_of(ours, batch), **tolerance_of(name))
