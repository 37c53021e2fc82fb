"""Models that compute parts in float32 whatever their own dtype is, as those of Hugging Face do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.config import config_from_dict
from paceline.verify.case import ConfigCase, Settings
from paceline.verify.certificate import Certificate, certify
from paceline.verify.runs import CoarseParts


class RoundedNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class AcrossSamples(nn.Module):
    """Takes the mean over its batch away: what it computes depends on how the batch is cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() - x.float().mean(0, keepdim=True)).to(x.dtype)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :3].argmax(1)


def proof_of(part: nn.Module, **options: Any) -> Certificate:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), part, nn.Tanh(), nn.Linear(8, 3))

    return paceline.verify(make_model, make_batch, F.cross_entropy, ranks=2, accumulate=2, **options)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "mistral", "qwen3"])
@pytest.mark.parametrize(("strategy", "tensor"), [("fsdp", 1), ("ddp", 1), ("ddp", 2)])
def test_verify_passes_on_a_hugging_face_model_and_says_why_it_allows_more(
    tmp_path: Path, kind: str, strategy: str, tensor: int
) -> None:
    import transformers  # here: to load it takes seconds

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 16}
    settings = transformers.AutoConfig.for_model(kind, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    settings.save_pretrained(tmp_path)
    values = {
        "model": {"kind": "hf", "path": str(tmp_path), "pretrained": False, "task": "causal_lm"},
        "data": {"kind": "synthetic_tokens", "vocab_size": 40, "context": 8, "samples": 32},
        "train": {"dtype": "float64", "precision": "fp32", "global_batch": 4, "steps": 2},
    }
    case = ConfigCase(config_from_dict(values, "values"), batch=5)
    found = certify(case, Settings.of(ranks=2, strategy=strategy, tensor=tensor, steps=2))
    assert found.passed, found.divergence
    assert "RMSNorm" in found.bound
    assert found.tolerance < 1e-6
    assert "from the ranks' parameters" in found.reference


def test_a_model_of_float64_is_compared_as_strictly_as_before() -> None:
    found = proof_of(nn.Identity())
    assert (found.passed, found.tolerance, found.bound) == (True, 1e-10, "sums in another order, in float64")
    with CoarseParts(nn.Identity()) as coarse:
        torch.ones(3, dtype=torch.float64).exp()
    assert (coarse.unit, coarse.names) == (0.0, {})


def test_results_that_depend_on_how_the_batch_is_cut_are_no_noise() -> None:
    found = proof_of(AcrossSamples())
    assert not found.passed
    assert found.tolerance == 1e-10


def test_a_tolerance_that_was_asked_for_is_kept() -> None:
    found = proof_of(RoundedNorm(), tolerance=1e-3)
    assert (found.passed, found.tolerance, found.measure) == (True, 1e-3, "absolute")
