"""Processes that share memory: every verb gives the bits of virtual ranks, failures name the rank, no file stays."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from gloo_pool import GlooPool
from gone_processes import wait_until_gone
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_functions import groups_in_any_order

from paceline.comm.base import Communicator, ReduceOp, Work
from paceline.comm.shared import segment as segment_module
from paceline.comm.shared.communicator import SharedMemoryCommunicator, share_memory
from paceline.comm.shared.segment import FOLDER, Process, SharedSegment, remove_stale_segments
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CommunicationError, UsageError
from paceline.run.function_ranks import run_processes

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the system has no /dev/shm")

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
# Around the sizes at which an operation is cut into slices, chunks and cells, for several widths of element.
SIZES = (7, 8191, 8192, 8193, 16385, 65535, 65536, 65537, 131073, 200003)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation: ``numel`` is that of a rank's piece where there are pieces."""

    verb: str
    dtype: torch.dtype
    op: ReduceOp
    numel: int
    source: int
    is_strided: bool


WAYS = ("compiled", "python")
VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "sendrecv")
cases = st.builds(
    Case,
    verb=st.sampled_from(VERBS),
    dtype=st.sampled_from(FLOATS + OTHERS),
    op=st.sampled_from(("sum", "avg", "min", "max", "product")),
    numel=st.integers(0, 40) | st.sampled_from(SIZES),
    source=st.integers(0, 3),
    is_strided=st.booleans(),
)


def values(comm: Communicator, case: Case, number: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + comm.rank)
    made = (torch.randn(numel, generator=generator, dtype=torch.float64) * 50).abs().to(case.dtype)
    return strided(made, case)


def strided(tensor: torch.Tensor, case: Case) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=1)[:, 0] if case.is_strided else tensor


def start(comm: Communicator, case: Case, number: int) -> tuple[list[Work], torch.Tensor]:
    """Issues a case; returns its works, and the tensor in which the result will be."""
    op: ReduceOp = case.op if case.dtype in FLOATS else "sum"
    whole = values(comm, case, number, comm.size * case.numel)
    piece = strided(torch.zeros(case.numel, dtype=case.dtype), case)
    if case.verb == "all_reduce":
        tensor = values(comm, case, number, case.numel)
        return [comm.all_reduce(tensor, op)], tensor
    if case.verb == "reduce_scatter":
        return [comm.reduce_scatter(piece, whole, op)], piece
    if case.verb == "all_gather":
        whole = strided(torch.zeros(comm.size * case.numel, dtype=case.dtype), case)
        return [comm.all_gather(whole, values(comm, case, number, case.numel))], whole
    if case.verb == "broadcast":
        return [comm.broadcast(whole, case.source % comm.size)], whole
    if case.verb == "all_to_all":
        output = strided(torch.zeros(comm.size * case.numel, dtype=case.dtype), case)
        return [comm.all_to_all(output, whole)], output
    works = [
        comm.send(values(comm, case, number, case.numel), (comm.rank + 1) % comm.size, tag=case.source),
        comm.recv(piece, (comm.rank - 1) % comm.size, tag=case.source),
    ]
    return works, piece


def joined(comm: Communicator, how: str) -> Communicator:
    """Returns the ranks as they are, or sharing memory through compiled code or in Python."""
    return comm if how == "as they are" else SharedMemoryCommunicator.join(comm, compiled=how == "compiled")


def all_in_flight(comm: Communicator, asked: list[Case], how: str) -> list[torch.Tensor]:
    """Issues all cases, then waits for them from the last to the first."""
    comm = joined(comm, how)
    started = [start(comm, case, number) for number, case in enumerate(asked)]
    for works, _ in reversed(started):
        for work in works:
            work.wait()
            work.wait()
    return [result.contiguous() for _, result in started]


@settings(max_examples=settings.default.max_examples // 2)
@given(asked=st.lists(cases, min_size=6, max_size=14), ranks=st.sampled_from((2, 3, 4)), how=st.sampled_from(WAYS))
def test_any_operations_in_flight_give_the_bits_of_virtual_ranks(
    gloo_pool: GlooPool, asked: list[Case], ranks: int, how: str
) -> None:
    virtual = run_virtual(lambda comm: all_in_flight(comm, asked, "as they are"), ranks)
    assert_same(gloo_pool.run(all_in_flight, asked, how, ranks=ranks), virtual)


@pytest.mark.some(1)
@covering(ranks=[2, 4], how=WAYS)
def test_every_verb_in_large(gloo_pool: GlooPool, ranks: int, how: str) -> None:
    asked = [Case(verb, torch.float32, "avg", 350_001, 1, False) for verb in VERBS]  # more than goes at once
    virtual = run_virtual(lambda comm: all_in_flight(comm, asked, "as they are"), ranks)
    assert_same(gloo_pool.run(all_in_flight, asked, how, ranks=ranks), virtual)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("ranks", [5, 7, 9])
def test_more_ranks_than_cores(ranks: int, how: str) -> None:
    numels = (0, 1, ranks - 1, ranks, ranks + 1, 20_001)
    dtypes = (torch.float64, torch.bfloat16)
    asked = [Case(verb, dtype, "avg", n, 1, False) for verb in VERBS for dtype in dtypes for n in numels]
    virtual = run_virtual(lambda comm: all_in_flight(comm, asked, "as they are"), ranks)
    assert_same(run_processes(all_in_flight, ranks, args=(asked, how), threads=1), virtual)


def plain_sums(comm: Communicator, how: str) -> dict[int, bool]:
    """Says by length whether a sum is right; the longest needs every slot twice."""
    shared = joined(comm, how)
    found = {}
    for numel in (0, 1, 2, 3, 4, 5, 9000, 70_000, 2_700_000):
        inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
        total = inputs[comm.rank].clone()
        shared.all_reduce(total).wait()
        expected = inputs[0].clone()
        for other in inputs[1:]:
            expected += other
        found[numel] = torch.equal(total, expected)
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_taken_in_rank_order(gloo_pool: GlooPool, ranks: int, how: str) -> None:
    for found in gloo_pool.run(plain_sums, how, ranks=ranks):
        assert all(found.values()), found


# Buffers that all ranks can reach.


@dataclass(frozen=True, slots=True)
class Buffered:
    """An all-reduce of tensors of which some ranks' lie in a common buffer, from ``start`` on."""

    dtype: torch.dtype
    op: ReduceOp
    numel: int
    start: int
    plain_ranks: frozenset[int]


buffered = st.builds(
    Buffered,
    dtype=st.sampled_from((*FLOATS, torch.int32, torch.bool)),
    op=st.sampled_from(("sum", "avg", "min", "max", "product")),
    numel=st.integers(1, 40) | st.sampled_from(SIZES),
    start=st.integers(0, 40),
    plain_ranks=st.just(frozenset[int]()) | st.frozensets(st.integers(0, 3), max_size=2),
)


def reduce_buffers(comm: Communicator, asked: list[Buffered], how: str) -> list[torch.Tensor]:
    """Issues all, as ``how`` says, then waits for them from the last to the first."""
    comm = joined(comm, how)
    works, tensors = [], []
    for number, case in enumerate(asked):
        generator = torch.Generator().manual_seed(1000 * number + comm.rank)
        content = (torch.randn(case.numel, generator=generator, dtype=torch.float64) * 50).to(case.dtype)
        tensor = comm.shared_buffer(case.start + case.numel, case.dtype)
        if tensor is not None and comm.rank not in case.plain_ranks:
            content = tensor[case.start :].copy_(content)
        op: ReduceOp = case.op if case.dtype in FLOATS else "sum"
        works.append(comm.all_reduce(content, op))
        tensors.append(content)
    for work in reversed(works):
        work.wait()
    return [tensor.clone() for tensor in tensors]


@settings(max_examples=settings.default.max_examples // 2)
@given(asked=st.lists(buffered, min_size=4, max_size=8), ranks=st.sampled_from((2, 3, 4)))
def test_common_buffers_give_the_bits_of_virtual_ranks(gloo_pool: GlooPool, asked: list[Buffered], ranks: int) -> None:
    virtual = run_virtual(lambda comm: reduce_buffers(comm, asked, "as they are"), ranks)
    assert_same(gloo_pool.run(reduce_buffers, asked, "compiled", ranks=ranks), virtual)


def use_and_free_buffers(comm: Communicator) -> tuple[bool, list[float], list[int]]:
    """Keeps one of three buffers on this rank, another one on each rank, and reduces it and a new one."""
    shared = SharedMemoryCommunicator.join(comm)
    if not shared.is_compiled:
        return False, [], []
    gc.collect()  # what earlier tasks left must not go in between
    before = shared_mappings()
    made = [shared.shared_buffer(100_000, torch.float32) for _ in range(3)]
    held = [shared_mappings() - before]
    kept = made[comm.rank]
    made.clear()
    held.append(shared_mappings() - before)
    made.append(shared.shared_buffer(100_000, torch.float32))
    found = []
    for tensor in (kept, made[0]):
        assert tensor is not None
        shared.all_reduce(tensor.fill_(comm.rank + 1.0)).wait()
        found.append(float(tensor.sum()) / 100_000)
    del tensor, kept
    made.clear()
    held.append(shared_mappings() - before)
    return True, found, held


def shared_mappings() -> int:
    """Counts the pieces of shared memory of ours that this process maps."""
    return sum("/dev/shm/paceline-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_buffer_lives_as_long_as_a_tensor_in_it(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(use_and_free_buffers) == [(True, [3.0, 3.0], [3, 1, 0])] * 2


def ask_for_too_much(comm: Communicator) -> tuple[bool, float]:
    shared = SharedMemoryCommunicator.join(comm)
    nothing = shared.shared_buffer(2**52, torch.float32)
    shared.all_reduce(tensor := torch.ones(1)).wait()
    return nothing is None, tensor.item()


def test_without_room_there_is_no_buffer_and_the_group_lives_on(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(ask_for_too_much) == [(True, 2.0)] * 2


def in_place(comm: Communicator, how: str) -> list[torch.Tensor]:
    comm = joined(comm, how)
    found = []
    for each in (2, 100_000):
        own = slice(each * comm.rank, each * comm.rank + each)
        gathered = torch.full((each * comm.size,), -1.0)
        gathered[own] = float(comm.rank)
        comm.all_gather(gathered, gathered[own]).wait()
        reduced = torch.arange(float(each * comm.size)) / 7 + comm.rank
        comm.reduce_scatter(reduced[own], reduced).wait()
        found += [gathered, reduced[own].clone()]
    parameter = torch.nn.Parameter(torch.full((2, 2), float(comm.rank)))
    comm.all_reduce(parameter).wait()
    comm.barrier()
    return [*found, parameter.detach()]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_may_overlap_and_be_parameters(gloo_pool: GlooPool, ranks: int, how: str) -> None:
    assert_same(
        gloo_pool.run(in_place, how, ranks=ranks), run_virtual(lambda comm: in_place(comm, "as they are"), ranks)
    )


def uneven(comm: Communicator, how: str) -> list[torch.Tensor]:
    comm = joined(comm, how)

    def rows(source: int, to: int) -> int:
        return (source + 2 * to) % 3 * 40_000

    given_rows = [rows(comm.rank, to) for to in range(comm.size)]
    wanted = [rows(source, comm.rank) for source in range(comm.size)]
    tensor = torch.arange(2 * sum(given_rows)).view(-1, 2) + 7 * comm.rank
    output = torch.empty(sum(wanted), 2, dtype=tensor.dtype)
    comm.all_to_all(output, tensor, wanted, given_rows).wait()
    return [output]


def test_pieces_of_an_all_to_all_may_differ(gloo_pool: GlooPool) -> None:
    assert_same(gloo_pool.run(uneven, "compiled", ranks=3), run_virtual(lambda comm: uneven(comm, "as they are"), 3))


# Messages.


def messages(comm: Communicator, how: str) -> list[torch.Tensor]:
    """Tags in another order than they were sent, longer than what fits between two ranks, collectives in between."""
    comm = joined(comm, how)
    other = 1 - comm.rank
    got = [torch.zeros(600_000 if tag == 2 else 5) for tag in (1, 2, 1, 2, 3)]
    sent = [torch.full_like(tensor, 10.0 * comm.rank + i) for i, tensor in enumerate(got)]
    total = torch.ones(100_000)
    sends = [(1, 0), (2, 1), (1, 2), (2, 3), (3, 4)]
    if comm.rank == 0:
        works = [comm.all_reduce(total), *(comm.send(sent[i], other, tag) for tag, i in sends)]
        works += [comm.recv(got[i], other, tag) for tag, i in sends]
    else:
        works = [comm.recv(got[i], other, tag) for tag, i in ((3, 4), (2, 1), (2, 3), (1, 0), (1, 2))]
        works += [*(comm.send(sent[i], other, tag) for tag, i in sends), comm.all_reduce(total)]
    for work in works:
        work.wait()
    return [*got, total]


def test_messages_are_matched_by_tag_and_then_by_order(gloo_pool: GlooPool) -> None:
    virtual = run_virtual(lambda comm: messages(comm, "as they are"), 2)
    assert [tensor[0].item() for tensor in virtual[1]] == [0.0, 1.0, 2.0, 3.0, 4.0, 2.0]
    assert_same(gloo_pool.run(messages, "compiled"), virtual)


def message_to_itself(comm: Communicator) -> bool:
    shared = SharedMemoryCommunicator.join(comm)
    sent, got = torch.randn(700_000), torch.empty(700_000)
    works = [shared.send(sent, comm.rank), shared.recv(got, comm.rank)]
    for work in works:
        work.wait()
    return torch.equal(sent, got)


def test_a_rank_may_write_to_itself(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(message_to_itself) == [True, True]


# Groups.


def groups(comm: Communicator, how: str) -> list[tuple[int, tuple[int, ...], list[float]]]:
    return groups_in_any_order(joined(comm, how))


def test_groups_may_be_made_in_any_order_and_number(gloo_pool: GlooPool) -> None:
    virtual = run_virtual(lambda comm: groups(comm, "as they are"), 4)
    assert virtual[3] == [(1, (2, 3), [2.0, 3.0]), (0, (3, 0), [3.0, 0.0])]
    assert gloo_pool.run(groups, "compiled", ranks=4) == virtual


def rows_and_columns(comm: Communicator) -> list[float]:
    """Large operations of three groups in flight, waited for in another order on each rank."""
    world = SharedMemoryCommunicator.join(comm)
    row = world.split([0, 1] if comm.rank < 2 else [2, 3])
    column = world.split([comm.rank % 2, comm.rank % 2 + 2])
    tensors = [torch.full((900_000,), float(comm.rank + 1)) for _ in range(3)]
    order = [0, 1, 2] if comm.rank % 2 else [2, 1, 0]
    issued = {number: (world, row, column)[number].all_reduce(tensors[number]) for number in order}
    for number in order if comm.rank < 2 else reversed(order):
        issued[number].wait()
    return [tensor[-1].item() for tensor in tensors]


def test_groups_may_be_waited_for_in_any_order(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(rows_and_columns, ranks=4) == [[10, 3, 4], [10, 3, 6], [10, 7, 4], [10, 7, 6]]


def alone_in_a_group(comm: Communicator) -> tuple[str, tuple[int, ...]]:
    group = SharedMemoryCommunicator.join(comm).split([comm.rank])
    return type(group).__name__, group.ranks


def test_a_group_of_one_needs_no_memory(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(alone_in_a_group) == [("SoloCommunicator", (0,)), ("SoloCommunicator", (1,))]


# What is refused.


def refused(comm: Communicator, how: str) -> list[str]:
    comm = joined(comm, how)
    attempts: list[Callable[[], Any]] = [
        lambda: comm.broadcast(torch.ones(1), source=2),
        lambda: comm.send(torch.ones(1), to=-1),
        lambda: comm.recv(torch.ones(1), source=9),
        lambda: comm.all_gather(torch.ones(3), torch.ones(2)),
        lambda: comm.all_gather(torch.ones(2, dtype=torch.float64), torch.ones(1)),
        lambda: comm.reduce_scatter(torch.ones(2), torch.ones(2)),
        lambda: comm.all_to_all(torch.ones(3), torch.ones(3)),
        lambda: comm.split([1 - comm.rank]),
        lambda: comm.split([0, 1, 2]),
    ]
    return [message_of(UsageError, attempt) for attempt in attempts]


def test_wrong_arguments_are_refused_in_the_same_words(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(refused, "compiled") == run_virtual(lambda comm: refused(comm, "as they are"), 2)


def refused_reductions(comm: Communicator) -> list[str]:
    shared = SharedMemoryCommunicator.join(comm)
    attempts: list[Callable[[], Any]] = [
        lambda: shared.all_reduce(torch.ones(1, dtype=torch.int64), "avg"),
        lambda: shared.all_reduce(torch.ones(1, dtype=torch.complex64), "max"),
        lambda: shared.all_reduce(torch.ones(1).to(torch.float8_e4m3fn)),
        lambda: shared.all_reduce(torch.ones(1), "mean"),  # type: ignore[arg-type]
        lambda: shared.all_reduce(torch.ones(1, device="meta")),
    ]
    found = [message_of(UsageError, attempt) for attempt in attempts]
    shared.barrier()
    return found


def test_reductions_that_make_no_sense_are_refused_and_the_group_lives_on(gloo_pool: GlooPool) -> None:
    messages, _ = gloo_pool.run(refused_reductions)
    for message, part in zip(
        messages, ["'avg'", "no order", "float8", "sum, avg, min, max, product", "meta"], strict=True
    ):
        assert part in message


def call_different_things(comm: Communicator, which: str) -> str:
    shared = SharedMemoryCommunicator.join(comm)
    is_first = comm.rank == 0
    attempts: dict[str, Callable[[], Any]] = {
        "verb": lambda: (shared.all_reduce if is_first else shared.broadcast)(torch.ones(4)).wait(),
        "length": lambda: shared.all_reduce(torch.ones(4 if is_first else 5)).wait(),
        "dtype": lambda: shared.all_reduce(torch.ones(4, dtype=torch.float32 if is_first else torch.int32)).wait(),
        "op": lambda: shared.all_reduce(torch.ones(4), "sum" if is_first else "max").wait(),
        "message": lambda: (shared.send if is_first else shared.recv)(torch.ones(4 if is_first else 5), comm.rank ^ 1),
    }
    message = ""
    try:
        work = attempts[which]()
        if which == "message":
            work.wait()
            shared.barrier()
    except CommunicationError as error:
        message = f"{type(error).__name__}: {error}"
    assert "broken since" in message_of(CommunicationError, lambda: shared.all_reduce(torch.ones(1)))
    return message


@pytest.mark.parametrize("which", ["verb", "length", "dtype", "op", "message"])
def test_ranks_that_call_different_things_are_told(gloo_pool: GlooPool, which: str) -> None:
    found = gloo_pool.run(call_different_things, which)
    assert any(message.startswith("CollectiveMismatchError") for message in found), found
    for message in found:
        assert "this rank" in message or "an operation failed on rank" in message


# Ranks that do not come.


def die_in_an_operation(comm: Communicator, how: str) -> tuple[dict[str, str], list[str]]:
    shared = SharedMemoryCommunicator.join(comm)
    creator = torch.tensor([os.getpid()])
    comm.broadcast(creator).wait()
    victim = torch.tensor([os.getpid()])
    comm.broadcast(victim, source=comm.size - 1).wait()
    large = torch.ones(3_000_000)
    if comm.rank == comm.size - 1:
        if how == "during":  # the first chunks are in
            shared.all_reduce(large)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "during":  # else the others might take all its chunks before it dies
        wait_until_gone([int(victim)])
    found = {"all_reduce": message_of(CommunicationError, lambda: shared.all_reduce(large).wait())}
    found["later"] = message_of(CommunicationError, lambda: shared.all_reduce(large).wait())
    return found, files_of(int(creator))


@pytest.mark.parametrize("how", ["before", "during"])
def test_a_killed_rank_is_named_by_the_others_and_no_file_stays(gloo_pool: GlooPool, how: str) -> None:
    *survivors, dead = gloo_pool.outcomes(die_in_an_operation, how, ranks=3)
    assert str(dead.error) == "rank 2 died with exit code -9"
    for rank, outcome in enumerate(survivors):
        assert outcome.error is None
        found, files = outcome.value
        head = f"rank {rank}: all_reduce in group [0, 1, 2] failed: "
        assert found["all_reduce"].startswith(head)
        assert "rank 2 is gone" in found["all_reduce"]
        assert found["later"].startswith(f"{head}the group is broken since\n  {found['all_reduce']}")
        assert files == []


def wait_for_a_dead_one(comm: Communicator) -> list[str]:
    shared = SharedMemoryCommunicator.join(comm)
    pair = shared.split([0, 1])
    if comm.rank == 1:
        works = [shared.send(torch.full((3,), 5.0), to=0)]  # done before its end, and so it counts
        works[0].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    shared.recv(got := torch.empty(3), source=1).wait()
    assert got.tolist() == [5.0, 5.0, 5.0]
    return [
        message_of(CommunicationError, lambda: shared.recv(torch.empty(3), source=1).wait()),
        message_of(CommunicationError, pair.barrier),
    ]


def test_messages_of_a_dead_rank_arrive_and_others_do_not_hang(gloo_pool: GlooPool) -> None:
    survivor, _ = gloo_pool.outcomes(wait_for_a_dead_one)
    assert survivor.error is None
    assert survivor.value[0].startswith("rank 0: recv from rank 1 in group [0, 1] failed: rank 1 is gone")
    assert survivor.value[1].startswith("rank 0: barrier in group [0, 1] failed: rank 1 is gone")


def come_alone(comm: Communicator) -> dict[str, str]:
    groups = {name: SharedMemoryCommunicator.join(comm, timeout_s=0.3) for name in ("recv", "barrier", "split")}
    messages: dict[str, str] = {}
    gave_up = torch.zeros(1)
    if comm.rank == 0:
        recv, barrier, split = groups.values()
        messages["recv from rank 1"] = message_of(CommunicationError, lambda: recv.recv(torch.ones(1), source=1).wait())
        messages["barrier"] = message_of(CommunicationError, barrier.barrier)
        messages["recv from rank 1 "] = message_of(CommunicationError, lambda: split.split([0, 1]))
    comm.broadcast(gave_up).wait()
    return messages


def test_a_peer_that_does_not_come_is_told_after_the_timeout(gloo_pool: GlooPool) -> None:
    waited, _ = gloo_pool.run(come_alone)
    for verb, message in waited.items():
        head = f"rank 0: {verb.strip()} in group [0, 1] failed"
        assert message == f"{head}: rank 1 did not come within 0.3 s"


# The segment.


def names_left(comm: Communicator) -> list[str]:
    shared = SharedMemoryCommunicator.join(comm)
    shared.split([0, 1]).barrier()
    return files_of(os.getpid())


def test_the_name_is_gone_as_soon_as_all_have_joined(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(names_left) == [[], []]


# In a folder of the test's own: in the common one, whoever else starts removes the files of a killed creator.


def join_in_folder(comm: Communicator, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_module, "FOLDER", folder)
        SharedMemoryCommunicator.join(comm)


def die_while_joining(comm: Communicator, rank: int, folder: Path) -> tuple[int, str, list[str]]:
    pid = torch.tensor([os.getpid()])
    pids = torch.empty(2, dtype=torch.int64)
    comm.all_gather(pids, pid).wait()
    if comm.rank == rank:
        name = "create" if rank == 0 else "open"
        original = getattr(SharedSegment, name)

        def die(*arguments: Any) -> None:
            original(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(SharedSegment, name, die)
    message = message_of(CommunicationError, lambda: join_in_folder(comm, folder))
    return int(pids[0]), message, files_of(int(pids[0]), folder)


def test_a_rank_that_dies_while_joining_leaves_no_file(gloo_pool: GlooPool, tmp_path: Path) -> None:
    survivor, _ = gloo_pool.outcomes(die_while_joining, 1, tmp_path)
    assert survivor.error is None
    assert survivor.value[2] == []


def test_the_file_of_a_killed_creator_is_removed_at_the_next_start(gloo_pool: GlooPool, tmp_path: Path) -> None:
    _, survivor = gloo_pool.outcomes(die_while_joining, 0, tmp_path)
    assert survivor.error is None
    creator, _, files = survivor.value
    assert len(files) == 1
    gloo_pool.run(join_in_folder, tmp_path)
    assert files_of(creator, tmp_path) == []


def test_files_of_the_living_and_of_others_are_left_alone() -> None:
    segment = SharedSegment.create(4096)
    foreign = FOLDER / f"paceline-1-1-1-notours{os.getpid()}"
    odd = FOLDER / f"{segment.name.rsplit('-', 3)[0]}-x-y-z"
    foreign.touch()
    odd.touch()
    try:
        remove_stale_segments()
        assert (FOLDER / segment.name).exists()
        assert foreign.exists()
        assert odd.exists()
    finally:
        for path in (foreign, odd):
            path.unlink()
        segment.unlink()
        segment.unlink()


def test_both_ends_of_a_segment_are_one_memory() -> None:
    segment = SharedSegment.create(8192)
    other = SharedSegment.open(segment.name, 8192)
    segment.unlink()
    segment.words(64, 2)[1] = -5
    assert other.bytes(72, 8).view(torch.int64).tolist() == [-5]
    with pytest.raises(CommunicationError, match="cannot open"):
        SharedSegment.open(segment.name, 8192)


def test_a_process_that_ended_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    process = Process(pid=child.pid, started=int(stat[19]))
    assert process.is_alive()
    assert not Process(pid=child.pid, started=process.started + 1).is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert not process.is_alive()
    child.communicate()
    assert not process.is_alive()
    assert Process.this().is_alive()


@dataclass(frozen=True)
class Nearly:
    """A file system with hardly any room."""

    f_bavail: int = 2
    f_frsize: int = 4096


def join_without_room(comm: Communicator) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: Nearly())
        return [
            message_of(CommunicationError, lambda: SharedMemoryCommunicator.join(comm)),
            message_of(CommunicationError, lambda: share_memory(comm)),
        ]


def test_too_little_shared_memory_is_told_on_every_rank(gloo_pool: GlooPool) -> None:
    for messages in gloo_pool.run(join_without_room):
        for message in messages:
            assert message.startswith("ranks [0, 1] cannot share memory; rank 0 says: shared memory needs ")
            assert "/dev/shm has 0.0 MiB free" in message
            assert "--shm-size" in message


# Choosing it.


def choose(comm: Communicator, host: str | None) -> tuple[str, bool, str]:
    with pytest.MonkeyPatch.context() as patch:
        if host is not None and comm.rank == 1:
            patch.setattr(socket, "gethostname", lambda: host)
        chosen = share_memory(comm)
        message = message_of(CommunicationError, lambda: SharedMemoryCommunicator.join(comm)) if host else ""
    total = torch.ones(3)
    chosen.all_reduce(total).wait()
    assert total.tolist() == [2.0] * 3
    assert (chosen.rank, chosen.size, chosen.ranks, chosen.device) == (comm.rank, 2, (0, 1), comm.device)
    return type(chosen).__name__, chosen is comm, message


def test_ranks_of_one_host_share_memory(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(choose, None) == [("SharedMemoryCommunicator", False, "")] * 2


def test_ranks_of_two_hosts_stay_as_they_are(gloo_pool: GlooPool) -> None:
    for name, is_same, message in gloo_pool.run(choose, "elsewhere"):
        assert (name, is_same) == ("TorchCommunicator", True)
        assert message.startswith("ranks 0 and 1 do not share a host: ")
        assert "elsewhere" in message


def test_a_world_of_one_stays_as_it_is() -> None:
    solo = SoloCommunicator(torch.device("cpu"))
    assert share_memory(solo) is solo
    with pytest.raises(UsageError, match="two or more ranks"):
        SharedMemoryCommunicator.join(solo)


def files_of(pid: int, folder: Path = FOLDER) -> list[str]:
    return [path.name for path in folder.glob(f"paceline-*-{pid}-*")]


def message_of(kind: type[Exception], attempt: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        attempt()
    return str(caught.value)


def assert_same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for number, (one, two) in enumerate(zip(mine, other, strict=True)):
            assert one.dtype == two.dtype
            assert torch.equal(one, two), f"operation {number} on rank {rank}"
