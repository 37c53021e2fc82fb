"""Cutting tensors and putting them together again, and the arithmetic of logits that stay split."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.tensor.layers import SplitLogits
from paceline.engines.tensor.layout import Split, TensorLayout, split_range
from paceline.errors import RankFailedError, UsageError
from paceline.models.lora import matches


@given(st.integers(0, 40), st.integers(1, 9))
def test_ranges_follow_one_another_and_differ_by_one_at_most(extent: int, size: int) -> None:
    ranges = [split_range(extent, size, rank) for rank in range(size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == extent
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    lengths = [last - first for first, last in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.data())
def test_pieces_make_up_the_whole(data: st.DataObject) -> None:
    size, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(0, 1))
    shape = [data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))]
    shape[dim] = groups * data.draw(st.integers(size, size + 5))
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    split = Split(shape=tuple(shape), dim=dim, groups=groups)
    pieces = [split.cut(whole, rank, size) for rank in range(size)]
    assert [tuple(piece.shape) for piece in pieces] == [split.local_shape(rank, size) for rank in range(size)]
    assert torch.equal(split.join(pieces), whole)


def test_each_matrix_of_a_fused_one_is_cut() -> None:
    split = Split(shape=(6,), dim=0, groups=3)
    assert split.cut(torch.tensor([10, 11, 20, 21, 30, 31]), 1, 2).tolist() == [11, 21, 31]


def test_a_layout_gathers_pieces_of_different_size() -> None:
    layout = TensorLayout(splits={"split": Split(shape=(5, 2), dim=0), "whole": Split(shape=(3,))})
    full = torch.arange(10.0).view(5, 2)

    def work(comm: VirtualCommunicator) -> torch.Tensor:
        local = layout.splits["split"].cut(full, comm.rank, comm.size)
        assert local.untyped_storage().nbytes() == local.numel() * 4
        same = torch.arange(3.0)
        assert torch.equal(layout.full("whole", same, comm), same)
        return layout.full("split", local, comm)

    for found in run_virtual(work, 4):
        assert torch.equal(found, full)


def test_a_layout_refuses_other_names_and_shapes() -> None:
    layout = TensorLayout(splits={"weight": Split(shape=(4, 2), dim=0)})
    with pytest.raises(UsageError, match="bias is no tensor of the model; there are weight"):
        layout.full_shape("bias")
    with pytest.raises(RankFailedError, match=r"has the shape \[4, 2\], but rank 0 of 2 holds \[2, 2\] of \[4, 2\]"):
        run_virtual(lambda comm: layout.full("weight", torch.zeros(4, 2), comm), 2)


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*.mlp.up", "layers.11.mlp.up", True),
        ("layers.*.mlp.up", "model.layers.0.mlp.up", True),
        ("layers.*.mlp.up", "layers.0.1.mlp.up", False),
        ("layers.*.mlp.up", "mylayers.0.mlp.up", False),
        ("norm", "model.norm", True),
        ("norm", "layers.0.attention_norm", False),
        ("layers.0", "layers.10", False),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    assert matches(name, pattern) is fits


# Logits.


def split_logits(whole: torch.Tensor, comm: VirtualCommunicator) -> SplitLogits:
    first, last = split_range(whole.shape[-1], comm.size, comm.rank)
    return SplitLogits(whole[..., first:last].clone().requires_grad_(), comm, first, whole.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_of_large_logits_and_ignored_targets(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = (torch.randn(2, 5, 11, generator=generator, dtype=torch.float64) * 300).to(dtype)
    targets = torch.randint(0, 11, (2, 5), generator=generator)
    targets[1, 3:] = -7
    plain = whole.clone().requires_grad_()
    rows = plain.flatten(0, 1) if dtype == torch.float64 else plain.flatten(0, 1).float()
    expected = F.cross_entropy(rows, targets.flatten(), reduction="sum", ignore_index=-7)
    (3 * expected).backward()
    assert plain.grad is not None

    def work(comm: VirtualCommunicator) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        trace = Trace(comm.device)
        logits = split_logits(whole, comm)
        traced = SplitLogits(logits.local, TracedCommunicator(comm, trace), logits.first, logits.vocab_size)
        loss = traced.cross_entropy(targets, -7)
        sent = sum(trace.num_bytes.values())
        (3 * loss).backward()
        assert sent == sum(trace.num_bytes.values()) == 3 * 10 * (8 if dtype == torch.float64 else 4)
        assert logits.local.grad is not None
        return loss.detach(), logits.local.grad, [logits.first]

    found = run_virtual(work, 3)
    for loss, _, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in found], -1), plain.grad)


def test_the_first_of_equal_logits_is_the_best() -> None:
    whole = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0], [-3.0, -2.0, -9.0, -5.0, -1.0]])
    for best in run_virtual(lambda comm: split_logits(whole, comm).argmax(), 3):
        assert best.tolist() == [1, 4]


def test_split_logits_say_what_they_are_not() -> None:
    def work(comm: VirtualCommunicator) -> None:
        logits = split_logits(torch.zeros(2, 3, 6), comm)
        assert logits.shape == (2, 3, 6)
        with pytest.raises(AttributeError, match=r"no 'softmax'.*cross_entropy.*gathers_logits=True"):
            logits.softmax(-1)
        with pytest.raises(UsageError, match=r"argmax\(dim=1\)"):
            logits.argmax(1)
        with pytest.raises(UsageError, match="a target is 6, but the vocabulary has 6 tokens"):
            logits.cross_entropy(torch.full((2, 3), 6))
        with pytest.raises(UsageError, match="5 targets for the logits of 6 tokens"):
            logits.cross_entropy(torch.zeros(5, dtype=torch.long))

    run_virtual(work, 2)
