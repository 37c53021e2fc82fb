"""Every policy against its definition on small vectors; what surrounds them: feedback, exclusions, bytes, state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compression_states import Saved, saved
from covering import covering
from gloo_pool import GlooPool
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.base import BucketShape, Communicator
from paceline.comm.compress import POLICIES, Compressor
from paceline.comm.compress.policies import BLOCK, dequantise, num_kept, pack, pack_bits, quantise, unpack, unpack_bits
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CheckpointError, UsageError
from paceline.plan.layout import Compression
from paceline.shards import flat_layout

RANKS = st.integers(1, 4)
SHAPES = st.tuples(st.integers(2, 9), st.integers(2, 9))
SEEDS = st.integers(0, 2**16)


def settings(policy: str, **changes: Any) -> Compression:
    """A policy that takes the smallest matrix."""
    return Compression(**{"policy": policy, "min_size": 1, "factor_rank": 1, **changes})


def shape_of(*shapes: tuple[int, ...], tail: int = 0) -> BucketShape:
    names = tuple(f"t{i}" for i in range(len(shapes)))
    return BucketShape(names=names, layout=flat_layout(shapes, align=4, tail=tail), tail=tail)


def gradient(seed: int, rank: int, step: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + rank * 31 + step)
    return torch.randn(length, generator=generator, dtype=torch.float64)


def reduce(
    comm: Communicator, compressor: Compressor, shape: BucketShape, gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Averages one bucket over several steps."""
    (bucket,) = compressor.bind([shape])
    results = []
    for each in gradients:
        buffer = each.clone()
        bucket.start(buffer, comm).wait()
        compressor.end_pass()
        results.append(buffer)
    compressor.apply_ended_pass()
    return results


def on_ranks(
    ranks: int, chosen: Compression, shape: BucketShape, make: Callable[[int, int], torch.Tensor], steps: int = 1
) -> list[tuple[list[torch.Tensor], Compressor]]:
    """Returns each rank's averages and compressor."""

    def work(comm: Communicator) -> tuple[list[torch.Tensor], Compressor]:
        compressor = Compressor(chosen)
        return reduce(comm, compressor, shape, [make(comm.rank, step) for step in range(steps)]), compressor

    return run_virtual(work, ranks)


def mean_of(ranks: int, make: Callable[[int, int], torch.Tensor], step: int = 0) -> torch.Tensor:
    return torch.stack([make(rank, step) for rank in range(ranks)]).mean(0)


def residual_of(compressor: Compressor) -> torch.Tensor:
    return torch.cat([compressor.residuals[name] for name in sorted(compressor.residuals)])


# What holds for all policies.


@pytest.mark.some(3)
@pytest.mark.parametrize("policy", POLICIES)
@given(ranks=RANKS, shape=SHAPES, seed=SEEDS)
def test_ranks_get_the_same_bits_and_nothing_is_lost(
    policy: str, ranks: int, shape: tuple[int, int], seed: int
) -> None:
    bucket, steps = shape_of(shape), 3
    length = shape[0] * shape[1]

    def make(rank: int, step: int) -> torch.Tensor:
        return torch.nn.functional.pad(gradient(seed, rank, step, length), (0, bucket.layout.length - length))

    found = on_ranks(ranks, settings(policy, ratio=0.2, threshold=0.7), bucket, make, steps)
    for results, _ in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][0], strict=True))
    sent = torch.stack(found[0][0]).sum(0)[:length]
    owed = [residual_of(c) if c.residuals else torch.zeros(length, dtype=torch.float64) for _, c in found]
    given_in = sum(mean_of(ranks, make, step)[:length] for step in range(steps))
    # Cast messages are added up in their own dtype, and the rounding of that sum is nobody's.
    loss = {"fp16": 1e-2, "bf16": 1e-1}.get(policy, 1e-9)
    torch.testing.assert_close(sent + torch.stack(owed).mean(0), given_in, rtol=0, atol=loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_feedback_nothing_is_kept(policy: str) -> None:
    found = on_ranks(
        2, settings(policy, error_feedback=False), shape_of((8, 8)), lambda rank, step: gradient(1, rank, step, 64), 3
    )
    assert all(compressor.residuals == {} for _, compressor in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_warm_up_steps_are_exact_and_owe_nothing(policy: str) -> None:
    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(2, rank, step, 64)

    found = on_ranks(3, settings(policy, plain_steps=2, ratio=0.1, threshold=0.7), shape_of((8, 8)), make, 3)
    for results, compressor in found:
        for step in range(2):
            torch.testing.assert_close(results[step], mean_of(3, make, step))
        assert not torch.allclose(results[2], mean_of(3, make, 2), rtol=0, atol=1e-6)
        assert compressor.step == 3
        assert compressor.residual_norm() > 0


@covering(policy=POLICIES, bad=[float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_shows_on_all_ranks_and_leaves_no_trace(policy: str, bad: float) -> None:
    def make(rank: int, step: int) -> torch.Tensor:
        values = gradient(3, rank, step, 400)
        if rank == 1 and step == 1:
            values[37] = bad
        return values

    found = on_ranks(2, settings(policy, ratio=0.01), shape_of((20, 20)), make, 2)
    for results, compressor in found:
        assert not results[1].isfinite().all()
        assert residual_of(compressor).isfinite().all()
        assert all(factor.isfinite().all() for factor in compressor.factors.values())
    before = on_ranks(2, settings(policy, ratio=0.01), shape_of((20, 20)), make, 1)
    for (_, after), (_, compressor) in zip(found, before, strict=True):
        assert torch.equal(residual_of(after), residual_of(compressor))


@pytest.mark.parametrize("policy", POLICIES)
def test_narrow_buffers_are_compressed_in_float32(policy: str) -> None:
    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(4, rank, step, 64).to(torch.bfloat16)

    for results, compressor in on_ranks(2, settings(policy), shape_of((8, 8)), make):
        assert results[0].dtype == torch.bfloat16
        assert all(residual.dtype == torch.float32 for residual in compressor.residuals.values())


def test_norms_biases_small_and_excluded_tensors_travel_whole() -> None:
    shape = shape_of((8, 8), (8,), (2, 2), (6, 6), tail=3)
    chosen = Compression(policy="topk", ratio=0.01, min_size=5, exclude=("t3*",))

    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(5, rank, step, shape.layout.length)

    expected = mean_of(2, make)
    for results, compressor in on_ranks(2, chosen, shape, make):
        assert set(compressor.residuals) == {"t0"}
        for slot in shape.layout.slots[1:]:
            torch.testing.assert_close(slot.view(results[0]), slot.view(expected))
        torch.testing.assert_close(results[0][-3:], expected[-3:])
        assert (shape.layout.slots[0].view(results[0]) != 0).sum() <= 2


def test_a_pass_that_is_rolled_back_leaves_no_trace() -> None:
    def work(comm: Communicator) -> tuple[torch.Tensor, int]:
        compressor = Compressor(settings("topk", ratio=0.1))
        (bucket,) = compressor.bind([shape_of((8, 8))])
        for step, is_dropped in enumerate((False, True, False)):
            bucket.start(gradient(6, comm.rank, 5 if is_dropped else step, 64), comm).wait()
            compressor.end_pass()
            if is_dropped:
                compressor.roll_back()
        compressor.apply_ended_pass()
        return residual_of(compressor), compressor.step

    def straight(comm: Communicator) -> torch.Tensor:
        compressor = Compressor(settings("topk", ratio=0.1))
        reduce(comm, compressor, shape_of((8, 8)), [gradient(6, comm.rank, step, 64) for step in (0, 2)])
        return residual_of(compressor)

    for (found, steps), expected in zip(run_virtual(work, 2), run_virtual(straight, 2), strict=True):
        assert steps == 2
        assert torch.equal(found, expected)


def test_an_abandoned_pass_leaves_the_one_before_it_in_force() -> None:
    compressor, comm = Compressor(settings("topk", ratio=0.1)), SoloCommunicator(torch.device("cpu"))
    (bucket,) = compressor.bind([shape_of((8, 8))])
    bucket.start(gradient(7, 0, 0, 64), comm).wait()
    compressor.end_pass()
    compressor.abandon_pass()
    compressor.apply_ended_pass()
    before = residual_of(compressor).clone()
    bucket.start(gradient(7, 0, 1, 64), comm)
    compressor.abandon_pass()
    compressor.apply_ended_pass()
    assert torch.equal(residual_of(compressor), before)
    assert compressor.step == 1


# Sparse.


@given(ranks=RANKS, shape=SHAPES, seed=SEEDS, policy=st.sampled_from(["topk", "randomk"]))
def test_ratio_one_is_the_plain_average(ranks: int, shape: tuple[int, int], seed: int, policy: str) -> None:
    length = shape[0] * shape[1]
    bucket = BucketShape(names=("t0",), layout=flat_layout([shape]))

    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(seed, rank, step, length)

    for results, compressor in on_ranks(ranks, settings(policy, ratio=1.0), bucket, make):
        torch.testing.assert_close(results[0], mean_of(ranks, make))
        assert compressor.residual_norm() == 0


@given(length=st.integers(4, 200), kept=st.floats(0.01, 0.9), seed=SEEDS)
def test_top_k_sends_the_largest(length: int, kept: float, seed: int) -> None:
    values = gradient(seed, 0, 0, 2 * length)
    shape = BucketShape(names=("t0",), layout=flat_layout([(2, length)]))
    ((results, compressor),) = on_ranks(1, settings("topk", ratio=kept), shape, lambda *_: values)
    sent = results[0] != 0
    assert int(sent.sum()) == num_kept(kept, 2 * length)
    assert torch.equal(results[0][sent], values[sent])
    assert values[sent].abs().min() >= values[~sent].abs().max()
    assert torch.equal(residual_of(compressor), torch.where(sent, torch.zeros_like(values), values))


@given(threshold=st.floats(0.01, 4), seed=SEEDS, ranks=RANKS)
def test_threshold_sends_what_is_at_least_as_large(threshold: float, seed: int, ranks: int) -> None:
    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(seed, rank, step, 64) * rank  # rank 0 has nothing to send

    expected = torch.stack([torch.where(make(r, 0).abs() >= threshold, make(r, 0), 0.0) for r in range(ranks)]).mean(0)
    for results, _ in on_ranks(ranks, settings("threshold", threshold=threshold), shape_of((8, 8)), make):
        torch.testing.assert_close(results[0], expected)


@given(ratio=st.floats(0.02, 1), length=st.integers(4, 300))
def test_random_k_draws_as_many_on_all_ranks_and_others_in_each_step(ratio: float, length: int) -> None:
    shape = BucketShape(names=("t0",), layout=flat_layout([(2, length)]))
    found = on_ranks(2, settings("randomk", ratio=ratio), shape, lambda *_: torch.ones(2 * length), 2)
    first = found[0][0][0] != 0
    assert int(first.sum()) == num_kept(ratio, 2 * length)


def test_random_k_reaches_every_element_equally_often() -> None:
    shape, steps = BucketShape(names=("t0",), layout=flat_layout([(10, 10)])), 400
    ((results, _),) = on_ranks(
        1, settings("randomk", ratio=0.2, error_feedback=False), shape, lambda *_: torch.ones(100), steps
    )
    times = torch.stack(results).sum(0)
    assert times.min() > 40  # 80 expected, with a standard deviation of 8
    assert times.max() < 130


@given(data=st.data(), length=st.integers(1, 200_000))
def test_messages_are_read_as_they_were_written(data: st.DataObject, length: int) -> None:
    indices = torch.tensor(sorted(data.draw(st.sets(st.integers(0, length - 1), max_size=20))), dtype=torch.int64)
    slots = len(indices) + data.draw(st.integers(0, 5))
    values = torch.randn(len(indices))
    found, places = unpack(pack(values, indices, length, slots), torch.float32, length, slots)
    dense, expected = torch.zeros(length + 1), torch.zeros(length + 1)
    assert len(found) == len(places) == slots
    dense.index_add_(0, places.clamp(max=length), found)
    expected[indices] = values
    assert torch.equal(dense, expected)
    assert (places < length).all() or slots > len(indices)


# Few bits.


@given(bits=st.lists(st.booleans(), min_size=1, max_size=70))
def test_bits_are_read_as_they_were_written(bits: list[bool]) -> None:
    packed = pack_bits(torch.tensor(bits))
    assert packed.numel() == -(-len(bits) // 8)
    assert unpack_bits(packed, len(bits)).tolist() == [int(bit) for bit in bits]


@given(seed=SEEDS, ranks=RANKS)
def test_sign_sends_signs_and_the_mean_magnitude_of_each_tensor(seed: int, ranks: int) -> None:
    shape = shape_of((4, 4), (8, 8))

    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(seed, rank, step, 80)

    def sent(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece.sign() * piece.abs().mean() for piece in (values[:16], values[16:])])

    expected = torch.stack([sent(make(rank, 0)) for rank in range(ranks)]).mean(0)
    for results, _ in on_ranks(ranks, settings("sign"), shape, make):
        torch.testing.assert_close(results[0], expected)


@given(seed=SEEDS, blocks=st.integers(1, 4), magnitude=st.floats(1e-6, 1e6))
def test_eight_bits_are_off_by_half_a_scale_at_most(seed: int, blocks: int, magnitude: float) -> None:
    values = gradient(seed, 0, 0, blocks * BLOCK) * magnitude
    values[:BLOCK] *= seed % 2  # a block of zeros, now and then
    read = dequantise(quantise(values), values.dtype)
    scales = values.view(-1, BLOCK).abs().amax(1, keepdim=True) / 127
    assert ((read - values).view(-1, BLOCK).abs() <= scales * (0.5 + 1e-4)).all()


@given(seed=SEEDS, ranks=RANKS, length=st.integers(2, 700))
def test_int8_averages_within_its_rounding(seed: int, ranks: int, length: int) -> None:
    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(seed, rank, step, 2 * length)

    shape = BucketShape(names=("t0",), layout=flat_layout([(2, length)]))
    largest = max(make(rank, 0).abs().max().item() for rank in range(ranks))
    for results, _ in on_ranks(ranks, settings("int8"), shape, make):
        assert (results[0] - mean_of(ranks, make)).abs().max() <= largest / 127 * 1.01


# PowerSGD.


@given(seed=SEEDS, ranks=RANKS, rank=st.integers(1, 3), rows=st.integers(8, 12), columns=st.integers(8, 12))
def test_powersgd_is_exact_for_averages_of_low_rank(seed: int, ranks: int, rank: int, rows: int, columns: int) -> None:
    left = gradient(seed, 9, 9, rows * rank).view(rows, rank)

    def make(rank_: int, step: int) -> torch.Tensor:
        return (left @ gradient(seed, rank_, step, rank * columns).view(rank, columns)).view(-1)

    shape = BucketShape(names=("t0",), layout=flat_layout([(rows, columns)]))
    for results, _ in on_ranks(ranks, settings("powersgd", factor_rank=rank, error_feedback=False), shape, make, 2):
        for step in range(2):
            torch.testing.assert_close(results[step], mean_of(ranks, make, step), rtol=1e-6, atol=1e-6)


def test_powersgd_comes_closer_with_every_step_and_recovers_from_zeros() -> None:
    matrix = gradient(8, 0, 0, 32 * 32)
    steps = [matrix, matrix, matrix, matrix, torch.zeros_like(matrix), matrix, matrix]
    compressor = Compressor(settings("powersgd", factor_rank=4, error_feedback=False))
    results = reduce(SoloCommunicator(torch.device("cpu")), compressor, shape_of((32, 32)), steps)
    errors = [float((found - given_in).norm()) for found, given_in in zip(results, steps, strict=True)]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[4] == 0
    assert errors[6] < errors[5] < matrix.norm()


def test_powersgd_sees_a_tensor_as_its_memory_row_by_row() -> None:
    weight = torch.empty(6, 3, 4, 4).to(memory_format=torch.channels_last)
    turned = torch.empty(5, 40).t()
    layout = flat_layout([tuple(weight.shape), tuple(turned.shape)], strides=[weight.stride(), turned.stride()])
    compressor = Compressor(settings("powersgd", factor_rank=1))
    (bucket,) = compressor.bind([BucketShape(names=("conv", "turned"), layout=layout)])
    assert [(part.rows, part.columns) for part in bucket.parts] == [(6, 48), (5, 40)]


def test_powersgd_leaves_matrices_whole_that_its_factors_would_not_shrink() -> None:
    compressor = Compressor(settings("powersgd", factor_rank=4))
    (bucket,) = compressor.bind([shape_of((8, 8), (9, 8))])
    assert [part.name for part in bucket.parts] == ["t1"]


# Bytes, as the tracer counts them.


@functools.cache
def bytes_sent(chosen: Compression | None, side: int = 1000, ranks: int = 2) -> float:
    """What a rank sends of one square float32 matrix, by the bandwidth-optimal collectives."""

    def work(comm: Communicator) -> float:
        traced = TracedCommunicator(comm, Trace(comm.device))
        buffer = gradient(9, comm.rank, 0, side * side).float()
        if chosen is None:
            traced.all_reduce(buffer, "avg").wait()
        else:
            reduce(traced, Compressor(chosen), shape_of((side, side)), [buffer])
        factor = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0}
        share = (ranks - 1) / ranks
        return sum(factor[kind] * share * count for kind, count in traced.trace.num_bytes.items())

    return run_virtual(work, ranks)[0]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("chosen", "least", "most"),
    [
        (settings("topk", ratio=0.01), 66, 67),
        (settings("topk", ratio=0.001), 640, 667),
        (settings("randomk", ratio=0.01), 99, 101),
        (settings("randomk", ratio=0.001), 990, 1010),
        (settings("powersgd", factor_rank=4), 124, 126),
        (settings("sign"), 31, 33),
        (settings("int8"), 3.9, 4),
        (settings("fp16"), 2, 2),
        (settings("bf16"), 2, 2),
        (settings("threshold", threshold=2.5758), 60, 75),  # 1 % of a normal distribution
    ],
    ids=lambda value: f"{value.policy}-{value.ratio}" if isinstance(value, Compression) else str(value),
)
def test_bytes_shrink_as_the_formulas_say(chosen: Compression, least: float, most: float) -> None:
    assert least <= bytes_sent(None) / bytes_sent(chosen) <= most


@pytest.mark.parametrize(("ratio", "least"), [(0.01, 45), (0.001, 400)])
def test_a_top_k_message_is_that_much_smaller_than_the_gradient(ratio: float, least: float) -> None:
    values = gradient(9, 0, 0, 10**6).float()
    chosen = values.abs().topk(num_kept(ratio, 10**6)).indices.sort().values
    assert values.nbytes / pack(values[chosen], chosen, values.numel(), chosen.numel()).nbytes >= least


# State.


def owed(states: list[Compressor]) -> torch.Tensor:
    return torch.stack([residual_of(compressor) for compressor in states]).mean(0)


@pytest.mark.parametrize("policy", ["topk", "randomk", "powersgd", "int8"])
def test_a_run_goes_on_exactly_from_its_state(policy: str) -> None:
    shape = shape_of((8, 8), (12, 10))
    chosen = settings(policy, ratio=0.1)

    def make(comm: Communicator, step: int) -> torch.Tensor:
        return gradient(10, comm.rank, step, shape.layout.length)

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        whole, first, second = Compressor(chosen), Compressor(chosen), Compressor(chosen)
        expected = reduce(comm, whole, shape, [make(comm, step) for step in range(4)])[-1]
        reduce(comm, first, shape, [make(comm, step) for step in range(2)])
        second.load(saved(comm, first), first.step, comm)
        return expected, reduce(comm, second, shape, [make(comm, step) for step in (2, 3)])[-1]

    for expected, found in run_virtual(work, 3):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_other_ranks_owe_what_the_ranks_before_owed_together(ranks: int) -> None:
    shape = shape_of((8, 8))

    def before(comm: Communicator) -> tuple[Saved, Compressor]:
        compressor = Compressor(settings("topk", ratio=0.1))
        reduce(comm, compressor, shape, [gradient(11, comm.rank, step, 64) for step in range(2)])
        return saved(comm, compressor), compressor

    found = run_virtual(before, 3)
    state = found[0][0]

    def after(comm: Communicator) -> Compressor:
        compressor = Compressor(settings("topk", ratio=0.1))
        compressor.load(state, 2, comm)
        return compressor

    later = run_virtual(after, ranks)
    torch.testing.assert_close(owed(later), owed([compressor for _, compressor in found]))
    assert all(compressor.step == 2 for compressor in later)


def test_what_is_owed_to_a_tensor_that_travels_whole_now_is_paid_once() -> None:
    shape = shape_of((8, 8), (6, 6))
    values = [gradient(13, 0, step, shape.layout.length) for step in range(3)]
    comm, before = SoloCommunicator(torch.device("cpu")), Compressor(settings("topk", ratio=0.1))
    reduce(comm, before, shape, values[:1])
    after = Compressor(settings("topk", ratio=0.1, exclude=("t1",)))
    after.load(saved(comm, before), before.step, comm)
    owed, slot = before.residuals["t1"], shape.layout.slots[1]
    first, second = (slot.view(each).reshape(-1) for each in reduce(comm, after, shape, values[1:]))
    assert owed.norm() > 0
    torch.testing.assert_close(first, slot.view(values[1]).reshape(-1) + owed)
    torch.testing.assert_close(second, slot.view(values[2]).reshape(-1))


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    comm = SoloCommunicator(torch.device("cpu"))
    compressor, other = Compressor(settings("topk", ratio=0.1)), Compressor(settings("topk", ratio=0.1))
    reduce(comm, compressor, shape_of((8, 8)), [gradient(12, 0, 0, 64)])
    reduce(comm, other, shape_of((6, 6)), [gradient(12, 0, 0, 36)])
    before = residual_of(compressor).clone()
    with pytest.raises(CheckpointError, match="the residual of t0 has 36 elements, the tensor 64"):
        compressor.load(saved(comm, other), other.step, comm)
    assert torch.equal(residual_of(compressor), before)


# Bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "top_k"}, "did you mean topk\\?"),
        ({"policy": "zip"}, "it is one of topk, randomk"),
        ({"ratio": 0.0}, "ratio = 0\n"),
        ({"ratio": 1.5}, "ratio = 1.5\n"),
        ({"factor_rank": 0}, "factor_rank = 0\n"),
        ({"threshold": 0.0}, "threshold = 0\n"),
        ({"plain_steps": -1}, "plain_steps = -1\n"),
        ({"min_size": -1}, "min_size = -1\n"),
    ],
)
def test_numbers_that_no_policy_can_work_with_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.rstrip("\n")):
        Compressor(Compression(**{"policy": "topk", **changes}))


# Real processes.


def compress_everything(comm: Communicator) -> dict[str, torch.Tensor]:
    """Every policy over three steps; the last average, and what is still owed."""
    shape, found = shape_of((30, 20), (8,), (16, 16), tail=2), {}  # without gaps
    for policy in POLICIES:
        compressor = Compressor(settings(policy, ratio=0.1, threshold=0.7, factor_rank=2))
        steps = [gradient(13, comm.rank, step, shape.layout.length).float() for step in range(3)]
        found[policy] = reduce(comm, compressor, shape, steps)[-1]
        found[f"{policy} owed"] = residual_of(compressor)
    return found


def test_real_ranks_agree_among_themselves_and_with_virtual_ones(gloo_pool: GlooPool) -> None:
    real, virtual = gloo_pool.run(compress_everything, ranks=2), run_virtual(compress_everything, 2)
    for name, expected in virtual[0].items():
        loose = 1e-2 if name.startswith(("fp16", "bf16")) else 1e-5
        torch.testing.assert_close(real[0][name], expected, rtol=loose, atol=loose)
        assert "owed" in name or torch.equal(real[0][name], real[1][name])
