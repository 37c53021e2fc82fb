"""Attention over real ranks that share each sequence: on NCCL, where a message waits for those before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gloo_pool import GlooPool
from nccl_cases import GLOO_TOO, NCCL
from shared_attention import AttentionCase, attend_alone, attend_together, largest_error, what_is_sent
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.schedule.ring import SEQUENCE_METHODS, SequenceMethod

CASES = {
    "causal": AttentionCase(length=391, kv_heads=2, width=64),
    "documents": AttentionCase(length=512, kv_heads=4, width=64, documents=((300, 1, 1, 127, 83), (500, 12))),
    "large messages": AttentionCase(length=16384, heads=4, kv_heads=4, width=128, dtype=torch.bfloat16),
}
TOLERANCES = {torch.float64: 1e-10, torch.bfloat16: 5e-2}


def attend_here(comm: Communicator, case: AttentionCase, method: SequenceMethod) -> list[Tensor]:
    for _ in range(2):  # the second time all is connected
        found = attend_together(comm, replace(case, device=comm.device.type), method)
    return found


@pytest.mark.parametrize("pool", [GLOO_TOO, NCCL], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", SEQUENCE_METHODS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_methods(pool: GlooPool, ranks: int, method: SequenceMethod, dtype: torch.dtype, name: str) -> None:
    case = replace(CASES[name], dtype=dtype)
    expected = attend_alone(case)
    for found in pool.run(attend_here, case, method, ranks=ranks):
        assert largest_error(found, expected) < TOLERANCES[dtype]


def sends_here(comm: Communicator, case: AttentionCase) -> list[list[tuple[str, int]]]:
    return list(what_is_sent(comm, replace(case, device=comm.device.type), "ring"))


@pytest.mark.parametrize("pool", [GLOO_TOO, NCCL], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_and_bytes_are_those_of_the_formula(pool: GlooPool, ranks: int) -> None:
    """Of two rows: keys and values to each other rank, once more in backward, and their gradients home, in fp32."""
    case = AttentionCase(length=48, heads=8, kv_heads=4, width=64, dtype=torch.bfloat16)
    pair = 2 * 2 * case.kv_heads * case.length // ranks * case.width * 2
    for forward, backward in pool.run(sends_here, case, ranks=ranks):
        assert forward == [("send", pair)] * (ranks - 1)
        assert sorted(backward) == sorted([("send", pair), ("send", 2 * pair)] * (ranks - 1))


@pytest.mark.parametrize("pool", [NCCL], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4])
def test_large_messages_do_not_wait_in_a_circle(pool: GlooPool, ranks: int) -> None:
    """Of 32 MiB each, which no buffer of NCCL takes: a send is over when its receive is there."""
    found = pool.run(attend_here, CASES["large messages"], "ring", ranks=ranks)
    assert all(torch.isfinite(each).all() for each in found[0])
