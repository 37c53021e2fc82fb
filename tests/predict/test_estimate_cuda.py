"""On a GPU: formulas against what autograd saves there, the estimate against the peak, and a real lack of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, config_from_dict, layout_of
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.train.assemble import build_trainer
from paceline.train.resolve import measure_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KNOWN_ERROR = 0.01

GPT: dict[str, Any] = {"kind": "gpt", "size": "gpt-124m"}
CASES = [
    ({**GPT, "layers": 4}, "fp32"),
    ({**GPT, "layers": 4}, "bf16"),
    ({**GPT, "layers": 4}, "bf16_master"),
    ({"kind": "gpt", "size": "gpt-1.1b", "layers": 2}, "bf16"),
    ({"kind": "gpt", "size": "gpt-1.1b", "layers": 2}, "bf16_master"),
]


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def make_config(model: dict[str, Any], precision: str = "fp32", **train: Any) -> Config:
    return config_from_dict(
        {
            "model": model,
            "data": {
                "kind": "synthetic_tokens",
                "samples": 64,
                "vocab_size": 1024,
                "context": 512,
                "eval_fraction": 0.0,
            },
            "parallel": {"ranks": 1, "device": "cuda"},
            "train": {"precision": precision, "steps": 3, **train},
        }
    )


def per_sample(facts: ModelFacts) -> float:
    return facts.root.saved_bytes + sum(block.saved_bytes for block in facts.blocks)


@pytest.mark.parametrize(("model", "precision"), CASES)
def test_formula_against_measurement(model: dict[str, Any], precision: str) -> None:
    config = make_config(model, precision)
    facts, measured = describe_model(config, "cuda"), measure_config(config, "cuda")
    assert facts is not None
    assert facts.parameters == measured.parameters
    assert per_sample(facts) == pytest.approx(per_sample(measured), rel=KNOWN_ERROR)


@pytest.mark.parametrize("checkpoint", ["none", "full", "matmuls"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
def test_estimate_against_the_peak(precision: str, checkpoint: str) -> None:
    config = make_config({**GPT, "layers": 6}, precision, global_batch=16)
    memory = config.memory.model_copy(update={"checkpoint_activations": checkpoint})
    config = config.model_copy(update={"memory": memory})
    facts = describe_model(config, "cuda")
    assert facts is not None
    layout = replace(layout_of(config, 1), microbatch=16)
    need = estimate_memory(facts, layout, StateFacts.of(config, "cuda"))
    gc.collect()  # what other tests left must not go while this one is measured
    before = torch.cuda.memory_allocated()
    trainer = build_trainer(config, SoloCommunicator(torch.device("cuda", 0)))
    torch.cuda.reset_peak_memory_stats()
    trainer.run()
    peak = torch.cuda.max_memory_allocated() - before
    # Gradients come as activations go; the estimate counts both. So it is never less, and two fifths more at most. What
    # cuBLAS works in, 32 MiB for each of the two threads, lies in the allocator's pool, and is the framework's share.
    assert peak - 64 * 2**20 <= need.device_bytes - need.framework <= 1.4 * peak


def test_the_microbatch_fits_into_what_there_is() -> None:
    """In four gigabytes: 32 samples at once would take about ten."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)
    config = make_config(GPT, "bf16", global_batch=32, microbatch=32)
    with pytest.raises(Exception, match="ran out of memory with a microbatch of 32"):
        build_trainer(config, SoloCommunicator(torch.device("cuda", 0))).run()
    gc.collect()
    torch.cuda.empty_cache()
    auto = make_config(GPT, "bf16", global_batch=32, microbatch="auto")
    trainer = build_trainer(auto, SoloCommunicator(torch.device("cuda", 0)))
    trainer.run()
    assert trainer.step == 3
    assert 1 <= trainer.parts.plan.batch.microbatch < 32
    assert trainer.parts.passes is not None
    assert trainer.parts.passes.microbatch <= trainer.parts.plan.batch.microbatch
