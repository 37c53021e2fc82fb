"""torch's own catalogue of optimizers on a GPU: every configuration, plain, foreach and fused, under zero and fsdp.

As in ``torch_optimizers``: three steps in float64 on two virtual ranks, against one process on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import alone, configurations, on_a_rank
from oracle import to_host

pytestmark = [pytest.mark.judge, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CONFIGURATIONS = configurations("cuda")


@pytest.mark.parametrize("two_ranks", ["virtual"], indirect=True)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_optimizer_updates_as_in_one_process(
    name: str, strategy: str, device: str, two_ranks: Callable[..., list[Any]]
) -> None:
    kind, settings = CONFIGURATIONS[name]
    if kind is torch.optim.Muon and strategy != "ddp":
        pytest.skip("torch's Muon refuses flat pieces itself, in its constructor; optim.kind = muon is ours, sharded")
    if device == "cpu" and settings.get("capturable"):
        pytest.skip("torch has it on GPUs alone")
    try:
        wanted = to_host(alone(kind, settings, 2, device))  # as an engine gives its state
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"one process cannot either: {str(error).partition(chr(10))[0]}")
    for state in two_ranks(on_a_rank, kind, settings, strategy, False):
        torch.testing.assert_close(state, wanted, rtol=1e-10, atol=1e-12)
