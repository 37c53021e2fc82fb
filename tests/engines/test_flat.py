"""Flat groups: where parameters lie, who owns which slice, and what comes back when slices are put together."""

from __future__ import annotations

import copy

import pytest
import torch
from gloo_pool import GlooPool
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.flat.shard import dense_stride, full_shape
from paceline.engines.groups import ParameterGroups, make_groups
from paceline.engines.precision import PRECISIONS, Precision
from paceline.models.hugging_face import mark_unfilled
from paceline.plan.layout import Layout, Offload

FP32 = PRECISIONS["fp32"]
MASTER = PRECISIONS["bf16_master"]
SHAPES = ((7, 5), (), (0, 3), (64,), (3, 4, 3, 3), (1,))
RANKS = [1, 2, 3, 4]


def slices(comm: Communicator) -> ParameterGroups:
    """Every rank of ``comm`` has a slice."""
    return make_groups(comm, Layout(strategy="fsdp")).of(nn.Parameter(torch.empty(0)))


def make_parameters(dtype: torch.dtype = torch.float64) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(5)
    named = []
    for number, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        if len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        named.append((f"p{number}", nn.Parameter(value)))
    return named


def make_group(
    comm: Communicator, named: list[tuple[str, nn.Parameter]] | None = None, *, dtype: torch.dtype = torch.float64
) -> FlatGroup:
    group = FlatGroup(named or make_parameters(dtype), slices(comm), FP32, Offload())
    group.keep_slice()
    return group


def values(group: FlatGroup) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in group.parameters]


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [tuple(t.shape) for t in found] == [tuple(t.shape) for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def originals(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [parameter.detach() for _, parameter in make_parameters(dtype)]


# Layout.


@pytest.mark.parametrize("ranks", RANKS)
def test_parameters_are_views_into_one_aligned_buffer(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        named = make_parameters()
        group = make_group(comm, named)
        storage = group.full.untyped_storage()
        for (_, parameter), slot, original in zip(named, group.layout.slots, originals(), strict=True):
            assert parameter.untyped_storage().data_ptr() == storage.data_ptr()
            assert parameter.storage_offset() == slot.offset
            assert slot.offset % 32 == 0
            assert parameter.stride() == original.stride()
        assert [p for _, p in named] == group.parameters, "the module's own parameter objects stay"
        check_equal(values(group), originals())
        assert group.layout.length % (32 * comm.size) == 0
        assert group.layout.shard_length == group.layout.length // comm.size
        assert group.size_bytes == storage.size()

    run_virtual(work, ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_pieces_of_all_ranks_are_the_parameters_and_nothing_twice(ranks: int) -> None:
    def work(comm: Communicator) -> list[torch.Tensor]:
        group = make_group(comm)
        assert [full_shape(piece) for piece in group.pieces] == list(SHAPES)
        assert all(piece.ndim == 1 and piece.is_contiguous() for piece in group.pieces)
        assert all(piece.untyped_storage().data_ptr() == group.master.data_ptr() for piece in group.pieces)
        return [piece.detach().clone() for piece in group.pieces]

    by_rank = run_virtual(work, ranks)
    for place, original in enumerate(originals()):
        together = torch.cat([pieces[place] for pieces in by_rank])
        in_memory_order = original.as_strided((original.numel(),), (1,))
        assert torch.equal(together, in_memory_order)


def test_a_tiny_group_leaves_some_ranks_with_nothing() -> None:
    def work(comm: Communicator) -> tuple[int, list[torch.Tensor]]:
        group = make_group(comm, [("scale", nn.Parameter(torch.tensor([2.5, -1.0], dtype=torch.float64)))])
        group.free()
        group.gather().wait()
        return group.pieces[0].numel(), values(group)

    results = run_virtual(work, 4)
    assert [count for count, _ in results] == [2, 0, 0, 0]
    for _, found in results:
        check_equal(found, [torch.tensor([2.5, -1.0], dtype=torch.float64)])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_group_without_elements_works(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        group = make_group(comm, [("empty", nn.Parameter(torch.zeros(0, 4)))])
        group.free()
        assert group.full.untyped_storage().size() or group.layout.length == 0
        group.gather().wait()
        gradient = group.gradients.new_buffer()
        mine, done = group.gradients.reduce_scatter(gradient)
        done.wait()
        group.gradients.add(mine)
        assert group.pieces[0].grad is not None
        assert group.pieces[0].grad.shape == (0,)
        assert group.gather_whole(group.pieces)[0].shape == (0, 4)

    run_virtual(work, ranks)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4), (4, 1)),
        (torch.zeros(4, 3).t(), (1, 3)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.zeros(3, 8)[:, ::2], (4, 1)),  # holes
        (torch.zeros(3, 1).expand(3, 4), (4, 1)),  # the same element many times
        (torch.zeros(9).as_strided((3, 3), (2, 2)), (3, 1)),  # overlap, though it spans as many elements as it has
        (torch.zeros(()), ()),
    ],
)
def test_dense_strides_are_kept_and_others_become_row_major(tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    assert dense_stride(tensor) == expected


# Parameters: free and gather.


@pytest.mark.parametrize("ranks", RANKS)
def test_gather_brings_back_what_was_freed_and_what_was_updated(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        group = make_group(comm)
        group.free()
        assert bool(group.full.untyped_storage().size()) == (comm.size == 1), (
            "one rank's slice is the whole buffer: there is nothing to free"
        )
        group.free()
        group.gather().wait()
        check_equal(values(group), originals())
        with torch.no_grad():
            for piece in group.pieces:
                piece.mul_(3.0)
        group.gather().wait()
        check_equal(values(group), [original * 3.0 for original in originals()])

    run_virtual(work, ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_autograd_reads_views_that_were_freed_and_gathered_again(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        torch.manual_seed(1)
        layer = nn.Linear(6, 5, dtype=torch.float64)
        plain = copy.deepcopy(layer)
        group = make_group(comm, list(layer.named_parameters()))
        x = torch.randn(3, 6, dtype=torch.float64)
        saved = (layer(x) @ layer.weight[:, 1:]).tanh() * layer.bias  # saves transposed, sliced and whole views
        group.free()
        group.gather().wait()
        saved.sum().backward()
        ((plain(x) @ plain.weight[:, 1:]).tanh() * plain.bias).sum().backward()
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)

    run_virtual(work, ranks)


def test_a_kept_larger_slice_is_gathered_among_fewer_ranks() -> None:
    def work(comm: Communicator) -> None:
        group = make_group(comm)
        pair = comm.rank // 2
        small = comm.split([2 * pair, 2 * pair + 1])
        group.keep_within(small)
        group.free()
        with torch.no_grad():
            for piece in group.pieces:
                piece.zero_()  # not seen: what was kept is what the forward computed with
        group.gather_within(small).wait()
        check_equal(values(group), originals())
        group.kept = None

    run_virtual(work, 4)


def test_memory_is_really_given_back() -> None:
    def work(comm: Communicator) -> None:
        group = make_group(comm)
        group.free()
        assert group.full.untyped_storage().nbytes() == 0
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in group.parameters)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [group.master, *group.pieces]}
        assert sum(held.values()) == group.size_bytes // comm.size

    run_virtual(work, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_masters_keep_more_than_the_parameters_show(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        group = FlatGroup(make_parameters(torch.float32), slices(comm), MASTER, Offload())
        group.keep_slice()
        assert group.has_copy
        assert group.full.dtype == torch.bfloat16
        assert {parameter.dtype for parameter in group.parameters} == {torch.bfloat16}
        assert {piece.dtype for piece in group.pieces} == {torch.float32}
        check_equal(values(group), [original.bfloat16() for original in originals(torch.float32)])
        check_equal(group.gather_whole(group.pieces), originals(torch.float32))
        with torch.no_grad():  # each update is lost in bf16; a hundred of them are not
            for _ in range(100):
                for piece in group.pieces:
                    piece.add_(1e-3)
        group.free()
        group.gather().wait()
        expected = originals(torch.float32)
        for _ in range(100):
            expected = [value + 1e-3 for value in expected]
        check_equal(values(group), [value.bfloat16() for value in expected])
        gradient = group.gradients.new_buffer()
        assert gradient.dtype == torch.float32
        mine, done = group.gradients.reduce_scatter(gradient.fill_(0.25))
        done.wait()
        group.gradients.add(mine)
        assert all(piece.grad is not None and piece.grad.dtype == torch.float32 for piece in group.pieces)

    run_virtual(work, ranks)


def test_integer_and_meta_parameters() -> None:
    group = make_group(
        SoloCommunicator(torch.device("cpu")), [("table", nn.Parameter(torch.arange(5), requires_grad=False))]
    )
    assert not group.pieces[0].requires_grad
    with torch.device("meta"):
        meta = nn.Parameter(torch.empty(4, 3))
    group = FlatGroup([("w", meta)], slices(SoloCommunicator(torch.device("cpu"))), FP32, Offload())
    assert group.parameters[0] is not meta
    nn.init.constant_(group.parameters[0], 2.0)
    group.keep_slice()
    assert torch.equal(group.pieces[0].detach(), torch.full((12,), 2.0))


# Gradients.


def contribution(rank: int, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64) * (rank + 1) + rank


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("in_place", [True, False])
def test_reduce_scatter_gives_this_ranks_slice_of_the_mean(ranks: int, in_place: bool) -> None:
    def work(comm: Communicator) -> None:
        group = make_group(comm)
        length = group.layout.length
        gradient = group.gradients.new_buffer()
        gradient.copy_(contribution(comm.rank, length) * group.shared.scale)
        output = None if in_place else torch.empty(group.layout.shard_length, dtype=torch.float64)
        mine, done = group.gradients.reduce_scatter(gradient, output)
        done.wait()
        expected = sum(contribution(r, length) * group.shared.scale for r in range(comm.size))
        assert torch.equal(mine, expected[group.layout.start : group.layout.stop])
        shares = mine.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()
        assert shares == in_place
        if output is not None:
            assert mine is output

    run_virtual(work, ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_of_pieces_add_up_and_gather_to_whole_ones(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        group = make_group(comm)
        expected = [torch.zeros_like(original) for original in originals()]
        for round_number in range(2):
            gradient = group.gradients.new_buffer()
            for slot, original, total in zip(group.layout.slots, originals(), expected, strict=True):
                slot.view(gradient).copy_(original * (round_number + 1) / comm.size)
                for _ in range(comm.size):
                    total += original * (round_number + 1) / comm.size
            mine, done = group.gradients.reduce_scatter(gradient)
            done.wait()
            group.gradients.add(mine)
        whole = group.gather_whole([piece.grad for piece in group.pieces])
        for found, value, original in zip(whole, expected, originals(), strict=True):
            assert found.stride() == original.stride()
            torch.testing.assert_close(found, value, rtol=1e-14, atol=1e-14)

    run_virtual(work, ranks)


@pytest.mark.parametrize("precision", [FP32, MASTER])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradients_are_brought_in_scaled_and_freed(precision: Precision, scale: float) -> None:
    group = FlatGroup(
        make_parameters(torch.float32), slices(SoloCommunicator(torch.device("cpu"))), precision, Offload()
    )
    group.keep_slice()
    for parameter in group.parameters[1:]:
        parameter.grad = torch.full_like(parameter, 3.0)
    gradient = group.gradients.new_buffer().fill_(7.0)
    taken = [parameter.grad for parameter in group.parameters]
    group.gradients.copy_in(gradient, taken, scale)
    assert taken == [None] * len(SHAPES)
    for slot, expected in zip(group.layout.slots, [0.0] + [3.0 * scale] * (len(SHAPES) - 1), strict=True):
        assert torch.equal(slot.view(gradient), torch.full(slot.shape, expected))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_slice_is_reused_only_when_no_gradient_is_in_it(ranks: int) -> None:
    def reduce_ones(group: FlatGroup) -> torch.Tensor:
        output = group.gradients.new_slice()
        mine, done = group.gradients.reduce_scatter(group.gradients.new_buffer().fill_(group.shared.scale), output)
        done.wait()
        group.gradients.add(mine)
        return output

    def work(comm: Communicator) -> None:
        group = make_group(comm)
        first = reduce_ones(group)
        second = reduce_ones(group)
        assert second.data_ptr() != first.data_ptr() or first.numel() == 0
        check_equal([p.grad for p in group.pieces], [torch.full_like(p, 2.0) for p in group.pieces])
        for piece in group.pieces:
            piece.grad = None
        assert reduce_ones(group) is group.gradients.slice
        group.pieces[0].grad = torch.full_like(group.pieces[0], 5.0)  # a user's own
        group.pieces[3].grad = None
        reduce_ones(group)
        expected = [6.0, 2.0, 2.0, 1.0, 2.0, 2.0]
        for piece, value in zip(group.pieces, expected, strict=True):
            torch.testing.assert_close(piece.grad, torch.full_like(piece, value))

    run_virtual(work, ranks)


# Whole tensors.


@pytest.mark.parametrize("ranks", RANKS)
def test_cut_pieces_are_the_pieces_whatever_the_strides_of_the_whole(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        group = make_group(comm)
        for place, original in enumerate(originals()):
            for whole in (original, original.contiguous(), torch.stack([original, original], -1)[..., 0]):
                assert torch.equal(group.layout.cut_piece(place, whole), group.pieces[place].detach())

    run_virtual(work, ranks)


def test_a_whole_tensor_of_another_shape_is_refused() -> None:
    group = make_group(SoloCommunicator(torch.device("cpu")))
    with pytest.raises(ValueError, match=r"p0 has the shape \[7, 5\], not \[5\]"):
        group.layout.cut_piece(0, torch.zeros(5))


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6), ranks=st.integers(1, 5)
)
def test_any_shapes_on_any_ranks_come_back(shapes: list[tuple[int, ...]], ranks: int) -> None:
    def parameters() -> list[tuple[str, nn.Parameter]]:
        return [
            (f"p{i}", nn.Parameter(torch.arange(torch.Size(s).numel()).view(s) + 100.0 * i))
            for i, s in enumerate(shapes)
        ]

    def work(comm: Communicator) -> None:
        group = make_group(comm, parameters())
        expected = [parameter.detach() for _, parameter in parameters()]
        group.free()
        group.gather().wait()
        check_equal(values(group), expected)
        check_equal(group.gather_whole(group.pieces), expected)
        for place, whole in enumerate(expected):
            assert torch.equal(group.layout.cut_piece(place, whole), group.pieces[place].detach())

    run_virtual(work, ranks)


# Real ranks.


def gather_and_reduce(comm: Communicator) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    group = make_group(comm)
    group.free()
    group.gather().wait()
    found = values(group)
    gradient = group.gradients.new_buffer()
    gradient.copy_(contribution(comm.rank, group.layout.length) * group.shared.scale)
    mine, done = group.gradients.reduce_scatter(gradient)
    done.wait()
    empty = make_group(comm, [("empty", nn.Parameter(torch.zeros(0, 4)))])
    empty.gather().wait()
    empty.gradients.reduce_scatter(empty.gradients.new_buffer())[1].wait()
    return found, mine.clone(), group.layout.start


def test_the_same_on_gloo_ranks(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(gather_and_reduce, ranks=2)
    for found, _, _ in results:
        check_equal(found, originals())
    length = 2 * results[0][1].numel()
    mean = contribution(0, length) * 0.5 + contribution(1, length) * 0.5
    for _, mine, start in results:
        assert torch.equal(mine, mean[start : start + length // 2])


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_filled_later_has_zeros_between_parameters(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def dirty(like: torch.Tensor, **options: object) -> torch.Tensor:
        return torch.full_like(like, torch.nan, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty_like", dirty)

    def work(comm: Communicator) -> tuple[torch.Tensor, int]:
        named = [(name, nn.Parameter(parameter.to("meta"))) for name, parameter in make_parameters()]
        mark_unfilled(parameter for _, parameter in named)
        group = make_group(comm, named)
        assert group.is_unfilled
        with torch.no_grad():
            for piece in group.pieces:
                piece.fill_(1.0)
        return group.master, group.layout.length

    found = run_virtual(work, ranks)
    whole = torch.cat([master for master, _ in found])
    assert len(whole) == found[0][1]
    assert whole.sum() == sum(parameter.numel() for _, parameter in make_parameters())
