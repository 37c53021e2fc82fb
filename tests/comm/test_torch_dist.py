"""Real Gloo processes: every verb gives what virtual ranks give, and failures say who is missing."""

from __future__ import annotations

import datetime
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from rank_functions import groups_in_any_order

from paceline.comm.base import Communicator
from paceline.comm.meeting import _own_store, join_store
from paceline.comm.shared.segment import FOLDER
from paceline.comm.solo import SoloCommunicator
from paceline.comm.torch_dist import Backend, TorchCommunicator, connect, disconnect
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CommunicationError, UsageError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
Results = dict[str, torch.Tensor]


# What ranks do. Values are small whole numbers, so that no order of summation rounds.


def every_verb(comm: Communicator, numel: int) -> Results:
    found: Results = {}
    for dtype in DTYPES:
        for name, tensor in verbs_of(comm, dtype, numel).items():
            found[f"{name} {dtype}"] = tensor
    return found


def verbs_of(comm: Communicator, dtype: torch.dtype, numel: int) -> Results:
    whole = ((torch.arange(numel * comm.size) * (comm.rank + 2)) % 5).to(dtype)
    found: Results = {}
    for op in ("sum", "min", "max") + (("avg",) if dtype.is_floating_point else ()):
        found[f"all_reduce {op}"] = whole.clone()
        comm.all_reduce(found[f"all_reduce {op}"], op).wait()  # type: ignore[arg-type]
        found[f"reduce_scatter {op}"] = torch.empty(numel, dtype=dtype)
        comm.reduce_scatter(found[f"reduce_scatter {op}"], whole.clone(), op).wait()  # type: ignore[arg-type]
    found["all_gather"] = torch.empty(numel * comm.size, dtype=dtype)
    comm.all_gather(found["all_gather"], whole[:numel].clone()).wait()
    found["broadcast"] = whole.clone()
    comm.broadcast(found["broadcast"], source=comm.size - 1).wait()
    found["all_to_all"] = torch.empty_like(whole)
    comm.all_to_all(found["all_to_all"], whole).wait()
    found["all_to_all uneven"], splits = uneven_input(comm, dtype)
    received = [rows_between(source, comm.rank) for source in range(comm.size)]
    output = torch.empty(sum(received), 2, dtype=dtype)
    comm.all_to_all(output, found["all_to_all uneven"], received, splits).wait()
    found["all_to_all uneven"] = output
    found["recv"] = torch.empty(numel, dtype=dtype)
    works = [
        comm.recv(found["recv"], source=(comm.rank - 1) % comm.size, tag=3),
        comm.send(whole[:numel], to=(comm.rank + 1) % comm.size, tag=3),
    ]
    for work in works:
        work.wait()
    comm.barrier()
    return found


def rows_between(source: int, target: int) -> int:
    return (source + 2 * target) % 3


def uneven_input(comm: Communicator, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    splits = [rows_between(comm.rank, target) for target in range(comm.size)]
    return ((torch.arange(sum(splits) * 2) + comm.rank) % 5).to(dtype).view(-1, 2), splits


def in_place_and_in_flight(comm: Communicator) -> Results:
    own = slice(2 * comm.rank, 2 * comm.rank + 2)
    gathered = torch.full((2 * comm.size,), -1.0)
    gathered[own] = float(comm.rank)
    comm.all_gather(gathered, gathered[own]).wait()
    reduced = torch.arange(2.0 * comm.size) + comm.rank
    comm.reduce_scatter(reduced[own], reduced).wait()
    many = [torch.full((3,), float(comm.rank + i)) for i in range(20)]
    for work in reversed([comm.all_reduce(tensor) for tensor in many]):
        work.wait()
    parameter = torch.nn.Parameter(torch.full((2, 2), float(comm.rank)))
    work = comm.all_reduce(parameter)
    work.wait()
    work.wait()
    return {
        "all_gather": gathered,
        "reduce_scatter": reduced[own].clone(),
        "many": torch.stack(many),
        "parameter": parameter.detach(),
    }


def sums_of_any_numbers(comm: Communicator) -> Results:
    """Sums that round differently in another order, into another tensor and in place, beside other operations."""
    generator = torch.Generator().manual_seed(comm.rank)
    found: Results = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for op in ("sum", "avg", "max"):
            whole = (torch.randn(comm.size * 9, generator=generator, dtype=torch.float64) * 9).to(dtype)
            other, own = whole.clone(), slice(9 * comm.rank, 9 * comm.rank + 9)
            output, gathered = torch.empty(9, dtype=dtype), torch.empty_like(whole)
            works = [
                comm.reduce_scatter(output, whole, op),  # type: ignore[arg-type]
                comm.all_gather(gathered, whole[own]),
                comm.reduce_scatter(other[own], other, op),  # type: ignore[arg-type]
            ]
            for work in reversed(works):
                work.wait()
                work.wait()
            assert torch.equal(output, other[own])
            found |= {f"{dtype} {op}": output, f"{dtype} {op} gathered": gathered, f"{dtype} {op} input": whole}
    return found


def messages_by_tag(comm: Communicator) -> Results:
    if comm.rank == 0:
        works = [comm.send(torch.tensor([float(10 * tag + i)]), to=1, tag=tag) for tag in (1, 2) for i in (0, 1)]
        got = torch.empty(0)
    else:
        got = torch.empty(4)
        works = [comm.recv(got[i : i + 1], source=0, tag=tag) for i, tag in enumerate((2, 1, 2, 1))]
    for work in works:
        work.wait()
    return {"got": got}


def two_groups_of_the_same_ranks(comm: Communicator) -> list[float]:
    first, second = comm.split([0, 1]), comm.split([0, 1])
    one, two = torch.tensor([1.0 + comm.rank]), torch.tensor([10.0 + comm.rank])
    pair = [(first, one), (second, two)]
    for work in [group.all_reduce(tensor) for group, tensor in (pair if comm.rank == 0 else reversed(pair))]:
        work.wait()
    return [one.item(), two.item()]


def messages_around_a_ring(comm: Communicator) -> Results:
    """Each rank sends to the next one, twice, in the order that NCCL needs: lower ranks send first.

    A subgroup is made in between, and sends too. On Gloo, messages go the way that they go on NCCL.
    """
    found: Results = {}
    for name, group in (("all", comm), ("first two", comm.split([1, 0]) if comm.rank < 2 else None), ("again", comm)):
        if group is None:
            continue
        if isinstance(group, TorchCommunicator):
            group._is_nccl = True
        following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sent, got = torch.arange(3.0) + 10 * group.rank, torch.empty(3)
        works = [group.send(sent, following)] if following > group.rank else []
        works.append(group.recv(got, before))
        works += [group.send(sent, following)] if following < group.rank else []
        for work in works:
            work.wait()
        found[name] = got
    return found


def kind_of_world(comm: Communicator) -> tuple[str, int, tuple[int, ...], bool]:
    again = connect("gloo", device="cpu")
    return type(comm).__name__, again.size, again.ranks, dist.is_initialized()


def ways_to_talk(comm: Communicator) -> dict[str, tuple[str, float]]:
    """Says by which backend each choice talks, and what a one of each rank sums up to."""
    found = {}
    backends: tuple[Backend, ...] = ("auto", "gloo", "shared_memory")
    for backend in backends:
        made = connect(backend, device="cpu")
        assert made.ranks == comm.ranks
        made.all_reduce(tensor := torch.ones(1)).wait()
        found[backend] = made.backend, tensor.item()
    return found


def meet_again(comm: Communicator) -> dist.TCPStore:
    """Leaves the group and sets out for another one, whose store rank 0 holds, as without a launcher's agent."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    comm.broadcast(port := torch.tensor([store.port if store else 0])).wait()
    comm.barrier()
    disconnect()
    os.environ["MASTER_PORT"] = str(port.item())
    return store or dist.TCPStore("127.0.0.1", int(port.item()), is_master=False)


def looks_at(flag: Path) -> list[bool]:
    """Looks 50 times, in half a second, whether a file is there."""
    looks = []
    for _ in range(50):
        looks.append(flag.exists())
        time.sleep(0.01)
    return looks


def join_and_leave_at_once(comm: Communicator, flag: Path) -> list[bool]:
    """Rank 1 joins slowly; returns at which of its looks rank 0 had gone on."""
    store, make_group = meet_again(comm), dist.init_process_group
    looks: list[bool] = []

    def make_group_slowly(*args: Any, **keywords: Any) -> None:
        make_group(*args, **keywords)
        looks.extend(looks_at(flag))

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(dist, "init_process_group", make_group_slowly)
        connect("gloo", device="cpu", timeout_s=60)
    if comm.rank == 0:
        flag.touch()
    disconnect()
    del store
    return looks


def split_and_go_on_at_once(comm: Communicator, flag: Path) -> list[bool]:
    """Rank 1 joins a subgroup slowly; returns at which of its looks rank 0 had gone on."""
    c10d: Any = dist.distributed_c10d
    make_group = c10d._new_process_group_helper
    looks: list[bool] = []

    def make_group_slowly(*args: Any, **keywords: Any) -> Any:
        made = make_group(*args, **keywords)
        looks.extend(looks_at(flag))
        return made

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(c10d, "_new_process_group_helper", make_group_slowly)
        comm.split([1, 0])
    if comm.rank == 0:
        flag.touch()
    return looks


def join_and_leave_many_times(comm: Communicator) -> list[int]:
    """Returns the sizes of the worlds that were joined."""
    sizes = []
    for _ in range(4):
        store = meet_again(comm)
        comm = connect("gloo", device="cpu", timeout_s=60)
        sizes.append(comm.size)
        if comm.rank != 0:
            del store
    return sizes


def come_while_only_the_earlier_attempt_is_there(comm: Communicator) -> float:
    """Ranks meet again at an agent, whose store knows where they were; rank 0 comes when the other one waits for it."""
    store = join_store(60.0)
    arrived = f"{store.get('attempt').decode()}/default_pg/paceline arrived 1"
    before = store.get(arrived)
    comm.barrier()
    disconnect()
    while comm.rank == 0 and store.get(arrived) == before:
        time.sleep(0.001)
    again = connect("gloo", device="cpu", timeout_s=60)
    again.all_reduce(total := torch.ones(1)).wait()
    return total.item()


def stay_away(comm: Communicator) -> None:
    """Rank 1 does not join before rank 0 has given up."""
    store = meet_again(comm)
    if comm.rank == 1:
        store.wait(["rank 0 gave up"], datetime.timedelta(seconds=100))
        store.set("rank 1 knows", "")
        return
    try:
        connect("gloo", device="cpu", timeout_s=4)  # a store may take seconds to answer a new client
    finally:
        store.set("rank 0 gave up", "")
        store.wait(["rank 1 knows"], datetime.timedelta(seconds=100))  # the store ends with rank 0


def alone_in_a_group(comm: Communicator) -> tuple[str, tuple[int, ...]]:
    group = comm.split([comm.rank])
    return type(group).__name__, group.ranks


def refused(comm: Communicator) -> list[str]:
    attempts = [
        lambda: comm.broadcast(torch.ones(1), source=2),
        lambda: comm.send(torch.ones(1), to=-1),
        lambda: comm.recv(torch.ones(1), source=9),
        lambda: comm.all_reduce(torch.ones(1), "median"),  # type: ignore[arg-type]
        lambda: comm.all_gather(torch.ones(3), torch.ones(2)),
        lambda: comm.all_gather(torch.ones(2, dtype=torch.float64), torch.ones(1)),
        lambda: comm.reduce_scatter(torch.ones(2), torch.ones(2)),
        lambda: comm.all_to_all(torch.ones(3), torch.ones(3)),
        lambda: comm.all_to_all(torch.ones(3), torch.ones(3), [1, 1], [2, 1]),
        lambda: comm.split([1 - comm.rank]),
        lambda: comm.split([0, 1, 1]),
        lambda: comm.split([0, 1, 2]),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(UsageError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def lose_the_other(comm: Communicator) -> dict[str, str]:
    store = dist.distributed_c10d._get_default_store()
    comm.barrier()
    if comm.rank == 1:
        store.wait(["rank 0 has passed the barrier"], datetime.timedelta(seconds=100))
        os._exit(3)
    store.set("rank 0 has passed the barrier", "")
    tensor = torch.ones(4)
    attempts = {
        "all_reduce": lambda: comm.all_reduce(tensor).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor[:2].clone(), tensor).wait(),
        "all_gather": lambda: comm.all_gather(tensor, tensor[:2].clone()).wait(),
        "send to rank 1": lambda: comm.send(tensor, to=1).wait(),
        "recv from rank 1": lambda: comm.recv(tensor, source=1).wait(),
        "barrier": comm.barrier,
    }
    messages = {}
    for verb, attempt in attempts.items():
        with pytest.raises(CommunicationError) as caught:
            attempt()
        messages[verb] = str(caught.value)
    return messages


def come_alone(comm: Communicator) -> dict[str, str]:
    """Rank 0 waits for rank 1, which is alive but does something else until it hears that rank 0 gave up."""
    store, world = dist.distributed_c10d._get_default_store(), dist.group.WORLD
    assert world is not None
    comm.barrier()
    messages: dict[str, str] = {}
    if comm.rank == 1:
        store.wait(["rank 0 gave up"], datetime.timedelta(seconds=100))
        return messages
    # The timeout becomes short only now, so that a busy machine has time to start.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public since torch 2.15
    set_timeout(datetime.timedelta(seconds=0.5), world)
    impatient = TorchCommunicator(world, comm.device, timeout_s=0.5)
    attempts = {
        "split([0, 1])": lambda: impatient.split([0, 1]),
        "all_reduce": lambda: impatient.all_reduce(torch.ones(1)).wait(),
        "reduce_scatter": lambda: impatient.reduce_scatter(torch.ones(1), torch.ones(2)).wait(),
        "all_gather": lambda: impatient.all_gather(torch.ones(2), torch.ones(1)).wait(),
    }
    for verb, attempt in attempts.items():
        with pytest.raises(CommunicationError) as caught:
            attempt()
        messages[verb] = str(caught.value)
    store.set("rank 0 gave up", "")
    return messages


# The same on virtual ranks.


@pytest.mark.some(1)
@pytest.mark.parametrize(("ranks", "numel"), [(2, 3), (2, 0), (4, 1), (3, 5)])
def test_every_verb_and_dtype_gives_what_virtual_ranks_give(gloo_pool: GlooPool, ranks: int, numel: int) -> None:
    assert_same(gloo_pool.run(every_verb, numel, ranks=ranks), run_virtual(lambda comm: every_verb(comm, numel), ranks))


def test_tensors_may_overlap_and_many_operations_be_in_flight(gloo_pool: GlooPool) -> None:
    assert_same(gloo_pool.run(in_place_and_in_flight, ranks=2), run_virtual(in_place_and_in_flight, 2))


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_taken_in_rank_order(gloo_pool: GlooPool, ranks: int) -> None:
    assert_same(gloo_pool.run(sums_of_any_numbers, ranks=ranks), run_virtual(sums_of_any_numbers, ranks=ranks))


def test_messages_are_matched_by_tag_and_then_by_order(gloo_pool: GlooPool) -> None:
    virtual = run_virtual(messages_by_tag, 2)
    assert virtual[1]["got"].tolist() == [20.0, 10.0, 21.0, 11.0]
    assert_same(gloo_pool.run(messages_by_tag, ranks=2), virtual)


def test_groups_may_be_made_in_any_order_and_number(gloo_pool: GlooPool) -> None:
    virtual = run_virtual(groups_in_any_order, 4)
    assert virtual[3] == [(1, (2, 3), [2.0, 3.0]), (0, (3, 0), [3.0, 0.0])]
    assert gloo_pool.run(groups_in_any_order, ranks=4) == virtual


def test_messages_in_groups_of_two_arrive_as_others_do(gloo_pool: GlooPool) -> None:
    assert_same(gloo_pool.run(messages_around_a_ring, ranks=3), run_virtual(messages_around_a_ring, 3))


def test_two_groups_of_the_same_ranks_do_not_mix(gloo_pool: GlooPool) -> None:
    assert run_virtual(two_groups_of_the_same_ranks, 2) == [[3.0, 21.0]] * 2
    assert gloo_pool.run(two_groups_of_the_same_ranks, ranks=2) == [[3.0, 21.0]] * 2


def test_wrong_arguments_are_refused_in_the_same_words(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(refused, ranks=2) == run_virtual(refused, 2)


def test_a_group_of_one_needs_no_backend(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(alone_in_a_group, ranks=2) == [("SoloCommunicator", (0,)), ("SoloCommunicator", (1,))]


# Connecting.


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    disconnect()


def set_environment(launcher: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        launcher.setenv(name, str(value))


@pytest.mark.usefixtures("launcher")
def test_without_a_launcher_it_is_a_world_of_one() -> None:
    comm = connect(device="cpu")
    assert isinstance(comm, SoloCommunicator)
    assert (comm.rank, comm.size, comm.ranks, comm.device) == (0, 1, (0,), torch.device("cpu"))
    assert not dist.is_initialized()
    disconnect()
    disconnect()


def test_a_launcher_may_start_one_rank(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(kind_of_world, ranks=1) == [("SoloCommunicator", 1, (0,), True)]


def test_connecting_again_gives_the_same_world(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(kind_of_world, ranks=2) == [("TorchCommunicator", 2, (0, 1), True)] * 2


def test_no_rank_goes_on_before_all_have_joined(gloo_pool: GlooPool, tmp_path: Path) -> None:
    assert gloo_pool.run(join_and_leave_at_once, tmp_path / "rank 0 went on", ranks=2) == [[], [False] * 50]


def test_no_rank_goes_on_before_all_have_joined_a_subgroup(gloo_pool: GlooPool, tmp_path: Path) -> None:
    assert gloo_pool.run(split_and_go_on_at_once, tmp_path / "rank 0 went on", ranks=2) == [[], [False] * 50]


def test_the_rank_that_holds_the_store_leaves_last(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(join_and_leave_many_times, ranks=3) == [[3] * 4] * 3


def test_ranks_that_an_agent_has_restarted_do_not_look_for_those_before_them(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(come_while_only_the_earlier_attempt_is_there, ranks=2) == [2.0, 2.0]


def test_a_rank_that_never_joins_is_named(gloo_pool: GlooPool) -> None:
    waited, other = gloo_pool.outcomes(stay_away, ranks=2)
    assert str(waited.error).startswith("rank 0 of 2 waited in vain for rank 1 at 127.0.0.1:")
    assert other.error is None


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the system has no /dev/shm")
def test_ranks_of_one_host_share_memory_unless_told_otherwise(gloo_pool: GlooPool) -> None:
    shared = ("shared_memory", 2.0)
    assert gloo_pool.run(ways_to_talk) == [{"auto": shared, "gloo": ("gloo", 2.0), "shared_memory": shared}] * 2


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"RANK": 0}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": 2, "MASTER_ADDR": "x"}, "RANK, MASTER_PORT"),
    ],
)
def test_an_incomplete_environment_is_named(
    launcher: pytest.MonkeyPatch, given: dict[str, object], missing: str
) -> None:
    set_environment(launcher, **given)
    with pytest.raises(CommunicationError, match=f"{missing} not set"):
        connect(device="cpu")


def test_a_rank_that_is_no_number_is_refused(launcher: pytest.MonkeyPatch) -> None:
    set_environment(launcher, RANK="first", WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(CommunicationError, match=r"rank first of 2 cannot join at 127\.0\.0\.1:1"):
        connect(device="cpu")


def test_a_port_in_use_is_named(launcher: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        set_environment(launcher, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(CommunicationError, match=f"rank 0 cannot listen on 127.0.0.1:{port}: the port is in use"):
            connect(device="cpu", timeout_s=5)
    assert not dist.is_initialized()


def test_others_that_never_come_are_told_after_the_timeout(launcher: pytest.MonkeyPatch) -> None:
    set_environment(launcher, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    with pytest.raises(CommunicationError, match="rank 0 of 2 waited in vain for rank 1"):
        connect(device="cpu", timeout_s=0.5)


@pytest.mark.usefixtures("launcher")
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(CommunicationError, match="'nccl' needs a CUDA device"):
        connect("nccl", device="cpu")


# Failures.


def test_a_peer_that_does_not_come_is_told_after_the_timeout(gloo_pool: GlooPool) -> None:
    waited, _ = gloo_pool.run(come_alone, ranks=2)
    for verb, message in waited.items():
        assert message.startswith(f"rank 0: {verb} in group [0, 1] failed: another rank did not come within 0.5 s")


def test_a_peer_that_dies_is_told_as_gone(gloo_pool: GlooPool) -> None:
    survivor, dead = gloo_pool.outcomes(lose_the_other, ranks=2)
    assert str(dead.error) == "rank 1 died with exit code 3"
    assert survivor.error is None
    for verb, message in survivor.value.items():
        assert message.startswith(f"rank 0: {verb} in group [0, 1] failed: another rank is gone")


def assert_same(ours: list[Results], theirs: list[Results]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == other[name].dtype, f"{name} on rank {rank}"
            assert torch.equal(tensor, other[name]), f"{name} on rank {rank}: {tensor} is not {other[name]}"


def fall_back(_: Communicator) -> tuple[str, str, list[str]]:
    """Asks for the best way to talk where there is no room to share memory."""

    def refuse(*_: object, **__: object) -> Communicator:
        raise CommunicationError("shared memory needs 9.0 MiB, and /dev/shm has 1.0 MiB free\n  make it larger")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr("paceline.comm.torch_dist.share_memory", refuse)
        made = connect("auto", device="cpu")
    assert isinstance(made, TorchCommunicator)
    return made.backend, made.why_gloo, [str(each.message).partition("\n")[0] for each in told]


def test_gloo_instead_of_shared_memory_is_told_with_its_reason(gloo_pool: GlooPool) -> None:
    why = "shared memory needs 9.0 MiB, and /dev/shm has 1.0 MiB free"
    warning = f"ranks talk through Gloo, which is slower than shared memory: {why}"
    assert gloo_pool.run(fall_back) == [("gloo", why, [warning]), ("gloo", why, [])]


def test_rank_0_listens_at_the_address_of_the_environment_alone(launcher: pytest.MonkeyPatch) -> None:
    set_environment(launcher, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    store = _own_store(2, datetime.timedelta(seconds=5))
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    assert [row[1] for row in rows if row[1].endswith(f":{store.port:04X}") and row[3] == "0A"] == [
        f"0100007F:{store.port:04X}"
    ]
