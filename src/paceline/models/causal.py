"""Causal language models as Hugging Face builds them, with a loss that never holds the logits.

Such a model is a base model that makes hidden states, and an output layer. It is recognised by what it has
(``base_model``, ``get_output_embeddings()``, ``config.vocab_size``), not by its class: transformers is no dependency.
What some models do to their logits behind the output layer (a soft cap, a scale) would be lost without a sound, so the
logits of two tokens are compared first.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.head_loss import head_loss
from paceline.models.lora import output_layer

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # keys of Hugging Face's configs


class _WithHeadLoss(nn.Module):
    """Mixed into the class of a model: names, parameters and all other methods stay as they are."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None, *, counts: bool = False) -> Any:
        """Returns the logits; with ``targets`` their summed cross entropy, with ``counts`` right answers too."""
        hidden, head = _hidden(self, tokens), output_layer(self)
        return head(hidden) if targets is None else head_loss(hidden, head.weight, targets, counts=counts)

    def loss_vocabulary(self) -> int:
        """Returns the number of logits of a token."""
        return int(output_layer(self).weight.shape[0])


def is_causal(model: nn.Module) -> bool:
    """Says whether a model has the parts of a causal language model of Hugging Face."""
    base, config = getattr(model, "base_model", None), getattr(model, "config", None)
    has_parts = isinstance(base, nn.Module) and base is not model and hasattr(config, "vocab_size")
    return has_parts and isinstance(output_layer(model), nn.Linear)


def with_head_loss(model: nn.Module) -> nn.Module:
    """Changes a causal language model in place, so that ``model(tokens, targets=targets)`` is its summed loss.

    ``model(tokens)`` returns the logits themselves from then on. Targets are those of each position: shifted already.
    Raises UsageError for a model that lacks the parts, or whose logits are more than its output layer's products.
    """
    name = type(model).__name__
    if not is_causal(model):
        raise UsageError(
            f"{name} has no output layer that can be found\n"
            "  it needs base_model, get_output_embeddings() that returns a linear layer, and config.vocab_size\n"
            "  give it loss_vocabulary() and a forward that takes targets: see docs/fused-loss.md"
        )
    head: nn.Linear = output_layer(model)
    bias: Tensor | None = head.bias
    if bias is not None or not _is_product(model, head):
        raise UsageError(
            f"the logits of {name} are not the products of its hidden states with its output layer alone\n"
            "  the fused loss computes these, and would leave out a bias, a scale or a cap\n"
            "  set train.fused_loss = false, or give the model a forward of its own that takes targets"
        )
    model.__class__ = type(name, (_WithHeadLoss, type(model)), {"__module__": type(model).__module__})
    return model


def _hidden(model: Any, tokens: Tensor) -> Tensor:
    return cast("Tensor", model.base_model(tokens, use_cache=False, return_dict=True).last_hidden_state)


@torch.no_grad()
def _is_product(model: nn.Module, head: nn.Linear) -> bool:
    """Compares logits with products, on two tokens. Of what has no values, the config says it."""
    if head.weight.is_meta:
        return not any(getattr(model.config, name, None) for name in _CHANGES_LOGITS)
    was_training = model.training
    model.eval()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=head.weight.device)
    try:
        logits, products = model(tokens).logits.float(), head(_hidden(model, tokens)).float()
    except (AttributeError, TypeError):  # its parts are called in another way
        return False
    finally:
        model.train(was_training)
    return torch.allclose(logits, products, rtol=1e-4, atol=1e-5)
