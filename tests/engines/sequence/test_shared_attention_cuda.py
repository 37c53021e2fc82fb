"""Attention over ranks that share a GPU: every kernel and method gives what one process gives on the CPU in float64."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from shared_attention import AttentionCase, attend_alone, attend_together, largest_error
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.sequence.part import SequenceRank
from paceline.models import block_attention as kernels
from paceline.models.attention import attention, use_part
from paceline.schedule.ring import SEQUENCE_METHODS, SequenceMethod, split_sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # float32: TF32
CASE = AttentionCase(length=512, heads=4, kv_heads=4, width=64, device="cuda")
CASES = {
    "causal": CASE,
    "odd": replace(CASE, length=391, kv_heads=2),
    "bidirectional": replace(CASE, is_causal=False, kv_heads=1),
    "wide": replace(CASE, width=128, length=1024),
    "no kernel's width": replace(CASE, width=20, length=100),
    "documents": replace(CASE, kv_heads=2, documents=((300, 1, 1, 127, 83), (500, 12), (256, 256))),
    "documents, bidirectional": replace(CASE, documents=((100, 412), (512,)), is_causal=False),
    "short documents": replace(CASE, documents=((8,) * 64, (3, 5) * 64)),
    "cross attention": replace(CASE, is_causal=False, keys=700),
}


def check(case: AttentionCase, ranks: int, method: SequenceMethod, backend: SDPBackend | None = None) -> None:
    expected = attend_alone(replace(case, device="cpu"))
    with nullcontext() if backend is None else sdpa_kernel([backend, SDPBackend.MATH]):
        results = run_virtual(lambda comm: attend_together(comm, case, method), ranks, device="cuda")
    for found in results:
        assert largest_error(found, expected) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", SEQUENCE_METHODS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_ranks_compute_what_one_process_does(dtype: torch.dtype, method: SequenceMethod, name: str) -> None:
    check(replace(CASES[name], dtype=dtype), 4, method)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", ["causal", "odd", "documents"])
def test_numbers_of_ranks(ranks: int, name: str) -> None:
    check(replace(CASES[name], dtype=torch.bfloat16), ranks, "ring")


KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16, "flash_attention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, "cudnn_attention"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32, "efficient_attention"),
    "efficient, half": (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, "efficient_attention"),
    "none": (SDPBackend.MATH, torch.bfloat16, None),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_each_kernel_merges_with_others(kernel: str, kv_heads: int, is_causal: bool) -> None:
    backend, dtype, name = KERNELS[kernel]
    case = replace(CASE, length=391, kv_heads=kv_heads, dtype=dtype, is_causal=is_causal)
    with sdpa_kernel([backend, SDPBackend.MATH]):
        query, key, value = (each.to("cuda", dtype) for each in case.draw()[:3])
        block = kernels.Block(slice(None), slice(None), is_causal)
        found = kernels._choose(block, query, key, value)[0]
        if kv_heads == 4:
            assert found == name
        elif found != name:
            pytest.skip(f"{name} does not share heads in this torch: {found} is taken")
    check(case, 4, "ring", backend)


def test_documents_of_a_batch_take_one_call_a_turn_and_two_on_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES["documents"], dtype=torch.bfloat16)
    joins: list[bool] = []  # whether a call computes several documents
    joined = kernels.attend_block

    def counted(block: kernels.Block, *given: object) -> object:
        joins.append(block.segments is not None)
        return joined(block, *given)  # type: ignore[arg-type]

    monkeypatch.setattr("paceline.engines.sequence.ring.attend_block", counted)
    check(case, 4, "ring")
    assert sum(joins) > len(joins) / 2
    assert len(joins) <= 4 * (2 + 3)


def test_a_ring_and_its_backward_do_not_wait_for_the_device() -> None:
    """The host runs ahead: nothing reads a value of the device once rows are cut."""
    case = replace(CASE, dtype=torch.bfloat16)

    def share(comm: Communicator) -> None:
        rank = SequenceRank(comm, split_sequence("ring", 2, case.heads))
        rank.begin(case.length)
        leaves = [rank.cut(each.to("cuda", case.dtype), 2).requires_grad_() for each in case.draw()[:3]]
        comm.barrier()
        with use_part(rank):
            torch.cuda.set_sync_debug_mode("error")  # of the process: all ranks are here
            attention(*leaves, is_causal=True).sum().backward()

    try:
        run_virtual(share, 2, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
