"""Reading on with kept keys and values: the logits of reading everything at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.models.gpt import GPT, KeyValues, gpt_config

SHAPES: dict[str, dict[str, Any]] = {
    "current": {"kv_heads": 1},
    "classic": {"norm": "layer", "mlp": "gelu", "positions": "learned", "tied": True, "dropout": 0.1},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cuts", [(4, 1, 1, 1), (1, 5, 1), (3, 4)])
def test_parts_of_any_length_give_the_logits_of_the_whole(shape: str, cuts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    config = gpt_config(layers=2, heads=2, width=16, context=8, vocab_size=11, **SHAPES[shape])
    model = GPT(config).double().eval()
    tokens = torch.randint(0, 11, (2, sum(cuts)))
    cache = KeyValues()
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-12, atol=1e-12)
    assert cache.length == 7
    with pytest.raises(UsageError, match="the tokens are 9 long, but the model's context is 8"):
        model(tokens[:, :2], cache=cache)
