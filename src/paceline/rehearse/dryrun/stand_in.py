"""A GPT in the place of a library's model that cannot be run without values: a rougher prediction, and said so.

It has the width, the layers, the heads and the vocabulary of the model's config.json, and an MLP so wide that both have
as many parameters: for P parameters, L layers of width h and a vocabulary of V (2 V where the ends are not tied)

    mlp_width = (P - V h - 4 L h^2) / (2 L h)

So weights, gradients, optimizer state and traffic are those of the model. A mixture computes with some of its experts
only, and its stand-in with all parameters: its time is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.config import Config
from paceline.config.sections import GPTModelConfig, HFModelConfig
from paceline.errors import UntraceableError, UsageError
from paceline.models.hugging_face import text_settings
from paceline.rehearse.dryrun.parts import empty_model, few_data

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_Found = TypeVar("_Found")


def with_stand_in(config: Config, work: Callable[[Config], _Found]) -> tuple[_Found, str]:
    """Returns ``work(config)`` and nothing more to say; or that of the stand-in, and in words what it stands for.

    Raises UntraceableError for a model of the user's own code that cannot be run without values, UsageError for one of
    transformers that has no stand-in.
    """
    try:
        return work(config), ""
    except UntraceableError as error:
        if not isinstance(config.model, HFModelConfig):
            raise
        other = _stand_in(config, config.model, error)
        return work(other), _in_words(other, error)


def _stand_in(config: Config, model: HFModelConfig, error: UntraceableError) -> Config:
    data = few_data(config)
    settings: Any = text_settings(model) if data.shape.kind == "tokens" else None
    sizes: list[Any] = [getattr(settings, name, None) for name in _SIZES]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _no_way(error)
    width, layers, heads, vocabulary = sizes
    parameters = sum(each.numel() for each in empty_model(config, data).parameters())
    tied = bool(getattr(settings, "tie_word_embeddings", False))
    ends = vocabulary * width * (1 if tied else 2)
    gpt = GPTModelConfig(
        kind="gpt",
        layers=layers,
        width=width,
        heads=math.gcd(heads, width),
        mlp_width=max(1, round((parameters - ends - 4 * layers * width**2) / (2 * layers * width))),
        vocab_size=vocabulary,
        context=data.shape.context,
        tied=tied,
        mlp="gelu",
        positions="learned",
        compile=model.compile,
    )
    return config.model_copy(update={"model": gpt})


def _in_words(other: Config, error: UntraceableError) -> str:
    model: Any = other.model
    sizes = f"{model.layers} layers of width {model.width}"
    return (
        f"a rough figure, of a GPT with {sizes} and as many parameters as the model (with all experts of a mixture at "
        f"work), since {error.headline}"
    )


def _no_way(error: UntraceableError) -> UsageError:
    return UsageError(
        f"{error.headline}\n  it is a model of transformers, and has no GPT of the same size to stand in for it\n"
        "  paceline simulate runs it with values, on virtual ranks"
    )
