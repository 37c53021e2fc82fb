"""``CommunicationOptimizer``: compressed averages with what they owe, and averages over two groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from hypothesis import given
from hypothesis import strategies as st

from paceline import CommunicationOptimizer
from paceline.comm.algorithms.rounds import state_topology
from paceline.comm.base import Communicator
from paceline.comm.compress.policies import num_kept
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import RankFailedError, UsageError

if TYPE_CHECKING:
    from gloo_pool import GlooPool


def gradient(rank: int, step: int, shape: tuple[int, ...] = (40, 25)) -> torch.Tensor:
    seed = 1000 * step + rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def largest(vector: torch.Tensor, ratio: float, piece: int) -> torch.Tensor:
    """Keeps the largest elements of each piece of a flat vector."""
    kept = torch.zeros_like(vector)
    for start in range(0, vector.numel(), piece):
        part = vector[start : start + piece]
        chosen = part.abs().topk(num_kept(ratio, part.numel())).indices + start
        kept[chosen] = vector[chosen]
    return kept


def expected_averages(ranks: int, steps: int, ratio: float, piece: int = 10**9) -> list[torch.Tensor]:
    """Does by hand what the ranks do together."""
    residuals = [torch.zeros(1000, dtype=torch.float64) for _ in range(ranks)]
    averages = []
    for step in range(steps):
        sent = []
        for rank in range(ranks):
            vector = gradient(rank, step).view(-1) + residuals[rank]
            sent.append(largest(vector, ratio, piece))
            residuals[rank] = vector - sent[rank]
        averages.append(torch.stack(sent).mean(0).view(40, 25))
    return averages


def compressed_steps(comm: Communicator, steps: int, settings: dict[str, Any], name: str | None) -> list[torch.Tensor]:
    """Reduces the gradient of each step: under a name, or without one as the ``.grad`` of a parameter."""
    optimizer = CommunicationOptimizer(**settings, comm=comm)
    parameter = torch.nn.Parameter(torch.zeros(40, 25, dtype=torch.float64))
    averages = []
    for step in range(steps):
        own = gradient(comm.rank, step)
        before = own.clone()
        parameter.grad = own if name is None else None
        averages.append(optimizer.all_reduce_compressed(own, name=name))
        assert torch.equal(own, before)
    return averages


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [None, "weight"])
@pytest.mark.parametrize("overlap", [True, False])
def test_averages_are_those_of_the_largest_elements_with_what_was_owed(
    ranks: int, name: str | None, overlap: bool
) -> None:
    settings = {"compression_ratio": 0.05, "enable_overlap": overlap}
    results = run_virtual(lambda comm: compressed_steps(comm, 4, settings, name), ranks)
    for step, expected in enumerate(expected_averages(ranks, 4, 0.05)):
        assert all(torch.equal(result[step], results[0][step]) for result in results)
        torch.testing.assert_close(results[0][step], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_tensor_travels_in_pieces_of_the_bucket_size(overlap: bool) -> None:
    settings = {"compression_ratio": 0.05, "bucket_size_mb": 300 * 8 / 2**20, "enable_overlap": overlap}
    results = run_virtual(lambda comm: compressed_steps(comm, 3, settings, None), 2)
    for step, expected in enumerate(expected_averages(2, 3, 0.05, piece=300)):
        torch.testing.assert_close(results[1][step], expected, rtol=1e-12, atol=1e-12)


def test_the_seam_between_ratio_1_and_one_rank_is_the_plain_average() -> None:
    mean = torch.stack([gradient(rank, 0) for rank in range(3)]).mean(0)
    for result in run_virtual(lambda comm: compressed_steps(comm, 1, {"compression_ratio": 1}, None), 3):
        torch.testing.assert_close(result[0], mean, rtol=1e-14, atol=1e-14)
    alone = CommunicationOptimizer(compression_ratio=0.01, comm=SoloCommunicator(torch.device("cpu")))
    assert torch.equal(alone.all_reduce_compressed(gradient(0, 0)), gradient(0, 0))


@given(
    st.integers(0, 40), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.sampled_from([0.01, 0.3, 1])
)
def test_what_is_not_sent_comes_later(length: int, dtype: torch.dtype, ratio: float) -> None:
    """The same gradient again and again: the averages add up to it, but for what one call may still owe."""
    steps = 12

    def work(comm: Communicator) -> torch.Tensor:
        optimizer = CommunicationOptimizer(compression_ratio=ratio, comm=comm)
        own = torch.linspace(1, 2, length).to(dtype) * (comm.rank + 1)
        total = torch.zeros(length, dtype=torch.float64)
        for _ in range(steps):
            total += optimizer.all_reduce_compressed(own, name="g").double()
        return total

    total, same = run_virtual(work, 2)
    assert torch.equal(total, same)
    mean = torch.linspace(1, 2, length).double() * 1.5
    owed = math.ceil(1 / max(num_kept(ratio, length), 1) * length) if length else 0
    assert torch.all(total <= mean * (steps + 0.5) * 1.01)
    assert torch.all(total >= mean * (steps - 2 * owed - 2) * 0.99)


def test_bytes_on_the_wire_are_those_of_the_ratio() -> None:
    def work(comm: Communicator) -> int:
        trace = Trace(comm.device)
        optimizer = CommunicationOptimizer(compression_ratio=0.01, comm=TracedCommunicator(comm, trace))
        optimizer.all_reduce_compressed(torch.randn(100_000), name="g")
        assert set(trace.num_bytes) == {"all_gather"}
        return trace.num_bytes["all_gather"]

    # Of two ranks, each sends half of what is gathered, and as much as it has in an all-reduce.
    assert all(4 * 100_000 / (gathered / 2) > 60 for gathered in run_virtual(work, 2))


def test_several_are_under_way_at_once() -> None:
    def work(comm: Communicator) -> list[torch.Tensor]:
        optimizer = CommunicationOptimizer(compression_ratio=0.05, comm=comm)
        found = []
        for step in range(3):
            started = [
                optimizer.start_compressed(gradient(comm.rank, step), name="first"),
                optimizer.start_compressed(gradient(comm.rank, step), name="second"),
            ]
            found += [each.result() for each in reversed(started)]
            started[0].wait()  # a second time
        return found

    expected = expected_averages(2, 3, 0.05)
    for result in run_virtual(work, 2):
        for number, average in enumerate(result):
            torch.testing.assert_close(average, expected[number // 2], rtol=1e-12, atol=1e-12)


# Two groups.


def levels_of(comm: Communicator, hosts: list[list[int]], form: str) -> tuple[Communicator, Communicator | None]:
    """Splits ranks into the group of their host, and one across: of the leaders, or of each place."""
    host = next(each for each in hosts if comm.rank in each)
    inside = comm.split(host)
    place = host.index(comm.rank)
    if form == "leaders":
        return inside, comm.split([each[0] for each in hosts]) if place == 0 else None
    return inside, comm.split([each[place] for each in hosts])


def two_level_average(comm: Communicator, hosts: list[list[int]], form: str, settings: dict[str, Any]) -> Any:
    inside, across = levels_of(comm, hosts, form)
    optimizer = CommunicationOptimizer(**settings)
    own = gradient(comm.rank, 0, (7, 5))
    first = optimizer.hierarchical_all_reduce(own, intra_node_group=inside, inter_node_group=across)
    second = optimizer.start_hierarchical(own[0], inside, across)
    third = optimizer.start_hierarchical(own.t(), inside, across)
    return first, second.result(), third.result().t()


HOSTS: dict[str, tuple[list[list[int]], str]] = {
    "places": ([[0, 1], [2, 3]], "places"),
    "leaders": ([[0, 1], [2, 3]], "leaders"),
    "places of three": ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], "places"),
    "leaders of any": ([[0, 2], [1, 3, 4], [5]], "leaders"),
    "each alone": ([[0], [1], [2]], "places"),
    "one host": ([[0, 1, 2]], "leaders"),
}


@covering(
    always={"hosts": ["leaders of any"]},
    hosts=HOSTS,
    settings={"usual": {}, "small buckets": {"bucket_size_mb": 32 / 2**20}, "no overlap": {"enable_overlap": False}},
)
def test_two_levels_make_the_plain_average(hosts: tuple[list[list[int]], str], settings: dict[str, Any]) -> None:
    places, form = hosts
    ranks = sum(len(host) for host in places)
    mean = torch.stack([gradient(rank, 0, (7, 5)) for rank in range(ranks)]).mean(0)
    results = run_virtual(lambda comm: two_level_average(comm, places, form, settings), ranks)
    for whole, row, turned in results:
        torch.testing.assert_close(whole, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(row, mean[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(turned, mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(whole, results[0][0])


def test_across_hosts_every_rank_sends_its_slice_alone() -> None:
    def work(comm: Communicator) -> tuple[int, int]:
        inside, across = levels_of(comm, [[0, 1], [2, 3]], "places")
        assert across is not None
        near, far = Trace(comm.device), Trace(comm.device)
        optimizer = CommunicationOptimizer()
        groups = TracedCommunicator(inside, near), TracedCommunicator(across, far)
        optimizer.hierarchical_all_reduce(torch.ones(1000), *groups)
        return near.num_bytes["reduce_scatter"], far.num_bytes["all_reduce"]

    assert run_virtual(work, 4) == [(4000, 2000)] * 4


@pytest.mark.parametrize("node_ranks", [1, 2, 4])
def test_without_groups_the_hosts_are_asked_for(node_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Virtual ranks are all on this host.
    monkeypatch.setattr(
        "paceline_classic.communication.detect_topology", lambda comm: state_topology(comm.size, node_ranks)
    )

    def work(comm: Communicator) -> torch.Tensor:
        return CommunicationOptimizer(comm=comm).hierarchical_all_reduce(gradient(comm.rank, 0))

    mean = torch.stack([gradient(rank, 0) for rank in range(4)]).mean(0)
    for result in run_virtual(work, 4):
        torch.testing.assert_close(result, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("hosts", "members", "message"),
    [
        ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4]], "2 of the 3 ranks of a host have a group across hosts"),
        ([[0, 1], [2, 3]], [], "0 of the 2 ranks of a host"),
        ([[0, 1], [2]], [[0, 2], [1]], r"hosts of \[1, 2\] ranks, with a group across for every rank"),
    ],
)
def test_groups_that_do_not_fit_are_refused_on_every_rank(
    hosts: list[list[int]], members: list[list[int]], message: str
) -> None:
    def work(comm: Communicator) -> None:
        inside = comm.split(next(host for host in hosts if comm.rank in host))
        mine = [group for group in members if comm.rank in group]
        across = comm.split(mine[0]) if mine else None
        with pytest.raises(UsageError, match=message):
            CommunicationOptimizer().hierarchical_all_reduce(torch.ones(8), inside, across)

    run_virtual(work, sum(len(host) for host in hosts))


# Torch's own groups.


def with_torch_groups(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two hosts of two ranks, as a script that knows torch alone has them."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][comm.rank // 2]
    leaders = dist.new_group([0, 2])  # on the others, what torch gives to those outside
    by_place = [dist.new_group([0, 2]), dist.new_group([1, 3])][comm.rank % 2]
    comm_opt = CommunicationOptimizer(compression_ratio=0.05, bucket_size_mb=25, enable_overlap=True)
    own = gradient(comm.rank, 0)
    compressed = comm_opt.all_reduce_compressed(own, name="own")
    by_leaders = comm_opt.hierarchical_all_reduce(own, intra_node_group=inside, inter_node_group=leaders)
    by_slices = comm_opt.hierarchical_all_reduce(own, intra_node_group=inside, inter_node_group=by_place)
    part = comm_opt.all_reduce_compressed(own, inside, name="of the host")
    assert part.shape == own.shape
    if comm.rank in (1, 3):
        with pytest.raises(UsageError, match="not a member of the group"):
            comm_opt.all_reduce_compressed(own, leaders)
    return compressed, by_leaders, by_slices


def test_it_works_on_process_groups_of_torch(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(with_torch_groups, ranks=4)
    (expected,) = expected_averages(4, 1, 0.05)
    mean = torch.stack([gradient(rank, 0) for rank in range(4)]).mean(0)
    for compressed, by_leaders, by_slices in results:
        torch.testing.assert_close(compressed, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(by_leaders, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(by_slices, mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(compressed, results[0][0])
        assert torch.equal(by_leaders, results[0][1])
        assert torch.equal(by_slices, results[0][2])


def on_real_ranks(comm: Communicator) -> list[torch.Tensor]:
    return compressed_steps(comm, 3, {"compression_ratio": 0.05, "bucket_size_mb": 300 * 8 / 2**20}, "weight")


def test_what_is_owed_is_kept_on_real_ranks(gloo_pool: GlooPool) -> None:
    expected = expected_averages(2, 3, 0.05, piece=300)
    for result in gloo_pool.run(on_real_ranks, ranks=2):
        for average, by_hand in zip(result, expected, strict=True):
            torch.testing.assert_close(average, by_hand, rtol=1e-12, atol=1e-12)


# Bad input.


@pytest.mark.parametrize(
    "settings",
    [
        {"compression_ratio": 0},
        {"compression_ratio": 1.5},
        {"compression_ratio": True},
        {"compression_ratio": "0.01"},
        {"compression_ratio": math.nan},
        {"bucket_size_mb": 0},
        {"bucket_size_mb": math.inf},
        {"enable_overlap": 1},
    ],
)
def test_arguments_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(UsageError, match="CommunicationOptimizer: 1 problem") as caught:
        CommunicationOptimizer(**settings)
    assert f"{name} = {value!r}" in str(caught.value)


def test_all_wrong_arguments_are_told_at_once() -> None:
    with pytest.raises(UsageError, match="3 problems"):
        CommunicationOptimizer(compression_ratio=-1, bucket_size_mb=-1, enable_overlap=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "group", "message"),
    [
        (torch.ones(3, dtype=torch.int64), None, "averages are of dense floating-point tensors"),
        (torch.eye(3).to_sparse(), None, "to_dense"),
        ([1.0], None, "a list cannot be reduced"),
        (torch.ones(3), "world", "a str is no group"),
    ],
)
def test_what_cannot_be_reduced_is_refused(tensor: Any, group: Any, message: str) -> None:
    optimizer = CommunicationOptimizer(comm=SoloCommunicator(torch.device("cpu")))
    with pytest.raises(UsageError, match=message):
        optimizer.all_reduce_compressed(tensor, group)


def on_two_ranks(work: Any) -> None:
    try:
        run_virtual(work, 2)
    except RankFailedError as error:
        raise error.error from None


def test_a_name_belongs_to_a_tensor_of_one_size() -> None:
    def work(comm: Communicator) -> None:
        optimizer = CommunicationOptimizer(comm=comm)
        optimizer.all_reduce_compressed(torch.ones(10), name="a")
        optimizer.all_reduce_compressed(torch.ones(12), name="a")

    with pytest.raises(UsageError, match=r"'a' on ranks \[0, 1\] had 10 elements .* now has 12"):
        on_two_ranks(work)


def test_a_tensor_under_way_is_not_sent_again() -> None:
    def work(comm: Communicator) -> None:
        optimizer = CommunicationOptimizer(comm=comm)
        first = optimizer.start_compressed(torch.ones(10), name="a")
        try:
            optimizer.start_compressed(torch.ones(10), name="a")
        finally:
            first.wait()

    with pytest.raises(UsageError, match="still on its way"):
        on_two_ranks(work)


# Tensors without a name.


def test_a_zero_gradient_stays_zero_after_another_of_its_shape() -> None:
    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        optimizer = CommunicationOptimizer(compression_ratio=0.25, comm=comm)
        first = optimizer.start_compressed(torch.tensor([[10.0, 3.0], [2.0, 1.0]]))
        second = optimizer.start_compressed(torch.zeros(2, 2))  # both are on their way
        return first.result(), second.result(), optimizer.all_reduce_compressed(torch.zeros(2, 2))

    with pytest.warns(UserWarning, match=r"shape \[2, 2\] .* is dropped\n.*\n  give each a name") as told:
        results = run_virtual(work, 2)
    assert len(told) == 2, "once on each rank"
    for first, second, third in results:
        assert first.tolist() == [[10.0, 0.0], [0.0, 0.0]]
        assert not second.any()
        assert not third.any()


@pytest.mark.parametrize("form", ["grad", "data", "flat", "left out"])
def test_equal_layers_without_names_learn_what_they_learn_with_names(form: str) -> None:
    """Four equal layers; where one is left out in some steps, the order of calls would hand its debt to the next."""

    def work(comm: Communicator, named: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 6, bias=False) for _ in range(4)]
        optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.1)
        reducer = CommunicationOptimizer(compression_ratio=0.1, comm=comm)
        for step in range(6):
            x = gradient(comm.rank, step, (5, 6)).float()
            for number, layer in enumerate(layers):
                if form != "left out" or number != step % 3:
                    x = x + torch.tanh(layer(x))
            x.square().mean().backward()
            for number, layer in enumerate(layers):
                grad = layer.weight.grad
                if grad is not None:
                    given = {"data": grad.data, "flat": grad.view(-1)}.get(form, grad)
                    average = reducer.all_reduce_compressed(given, name=str(number) if named else None)
                    layer.weight.grad = average.view(6, 6)
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([layer.weight.detach() for layer in layers])

    with_names = run_virtual(lambda comm: work(comm, True), 2)
    without = run_virtual(lambda comm: work(comm, False), 2)
    assert torch.equal(without[0], with_names[0])
    assert torch.equal(without[1], with_names[0])


def test_parameters_of_a_later_model_are_found_and_those_of_an_earlier_one_forgotten() -> None:
    def work(comm: Communicator) -> int:
        optimizer = CommunicationOptimizer(compression_ratio=0.5, comm=comm)
        for _ in range(3):
            parameter = torch.nn.Parameter(torch.zeros(2))
            for _ in range(2):
                parameter.grad = torch.tensor([2.0, 1.0])
                average = optimizer.all_reduce_compressed(parameter.grad)
            assert average.tolist() in ([2.0, 0.0], [0.0, 2.0])
        return len(optimizer._owned)

    assert run_virtual(work, 2) == [1, 1]
