"""A small GPT with experts, whose choices differ from token to token, for tests of experts over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.experts import Mixture
from paceline.models.gpt import GPT, gpt_config
from paceline.verify.case import FunctionCase

EXPERTS, TOKENS, VOCABULARY = 4, 8, 19


def make_model(**changes: Any) -> GPT:
    """Three blocks: a dense one, and two with experts and a shared one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 3, "heads": 2, "width": 16, "context": TOKENS, "vocab_size": VOCABULARY}
    mixture: dict[str, Any] = {"experts": EXPERTS, "active": 2, "expert_width": 10, "dense_layers": 1}
    model = GPT(gpt_config(**{**sizes, "shared_experts": 1, **mixture, **changes}))
    with torch.no_grad():
        for mixed in mixtures(model):
            mixed.router.weight.mul_(30)
    return model


def make_one_sided() -> GPT:
    """All tokens choose the same two experts in the first step: they are equally good to its router."""
    model = make_model()
    with torch.no_grad():
        for mixed in mixtures(model):
            mixed.router.weight.zero_()
    return model


def mixtures(model: torch.nn.Module) -> list[Mixture]:
    return [module for module in model.modules() if isinstance(module, Mixture)]


def make_batch(step: int, samples: int = 7) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def summed(outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
    if hasattr(outputs, "cross_entropy"):  # split over tensor ranks
        return outputs.cross_entropy(targets), targets.numel()
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def case_of(samples: int = 7, make: Any = make_model, **changes: Any) -> FunctionCase:
    model = partial(make, **changes) if changes else make
    return FunctionCase(model=model, batch=partial(make_batch, samples=samples), loss=summed)
