"""Snapshots in the memory of hosts, which are folders here, each with the server of a keeper."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from covering import covering

from paceline.checkpoint import State, find_checkpoint, list_checkpoints, open_checkpoint, verify_checkpoint
from paceline.checkpoint.storage import SnapshotFiles, is_snapshot, on_this_host, snapshots_in
from paceline.checkpoint.write import SaveTarget
from paceline.checkpoint.writer import StagingBuffer
from paceline.comm.control.kept import ROOT, Kept
from paceline.comm.control.server import ControlServer
from paceline.comm.control.wire import Address, listen
from paceline.errors import CheckpointError
from paceline.shards import Region, Shard, whole_region
from paceline.train.survive.snapshots import HostMemory, Snapshot

HOSTS, RANKS = 3, 6  # two ranks each


@dataclass
class Host:
    kept: Kept
    server: ControlServer
    address: Address

    def die(self) -> None:
        self.server.__exit__()
        shutil.rmtree(self.kept.root)


Hosts = list[Host]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    secret, found = secrets.token_hex(32).encode(), Hosts()
    with contextlib.ExitStack() as stack:
        for number in range(HOSTS):
            kept = Kept(tmp_path / f"host{number}" / ROOT)
            kept.root.parent.mkdir()
            kept.make(secret)
            listener = listen(Address("127.0.0.1"))
            server = stack.enter_context(ControlServer([listener], kept.secret, operations=kept.operations()))
            found.append(Host(kept, server, Address("127.0.0.1", listener.getsockname()[1])))
        meet(found)
        yield found


def meet(hosts: Hosts) -> None:
    for place, host in enumerate(hosts):
        host.kept.write_keepers(place, [each.address for each in hosts])


def state_of(rank: int, step: int, size: int = RANKS) -> State:
    """A tensor that ranks hold a part of each, one that all hold, and values of each kind."""
    region = Region(shape=(size, 4), begin=4 * rank, end=4 * rank + 4)
    own = Shard(name="model/cut", region=region, tensor=torch.full((4,), float(rank + step)))
    big = torch.arange(120_000.0) + step
    shared = Shard(name="model/shared", region=whole_region(big.shape), tensor=big, copy=rank, copies=size)
    values, own_values = {"scale": 2.5}, {"random": torch.tensor([rank])}
    return State(
        step=step, position=10 * step, shards=[own, shared], values=values, own=own_values, found={f"by {rank}": rank}
    )


def keep(
    hosts: Hosts, rank: int, step: int, *, token: str = "a", copies: int = 1, stay: frozenset[str] = frozenset()
) -> Snapshot:
    kept = hosts[rank * len(hosts) // RANKS].kept
    target = SaveTarget(folder=kept.root, step=step, rank=rank, world=RANKS, token=token, storage=HostMemory())
    snapshot = Snapshot(target, kept, copies, stay)
    snapshot.start(state_of(rank, step), StagingBuffer(), None)
    snapshot.join()
    return snapshot


def keep_all(hosts: Hosts, step: int, *, copies: int = 1, stay: frozenset[str] = frozenset()) -> None:
    for rank in range(RANKS):
        snapshot = keep(hosts, rank, step, copies=copies, stay=stay)
        assert (snapshot.is_kept, snapshot.problem, snapshot.without_copy) == (True, "", "")


def check(host: Host, step: int) -> None:
    """A whole checkpoint, by its hashes, of which any region can be read."""
    path = snapshots_in(host.kept.root) / f"step-{step:08d}"
    verify_checkpoint(path)
    found = open_checkpoint(path)
    assert (found.step, found.manifest.position, found.manifest.world) == (step, 10 * step, RANKS)
    assert found.read("model/cut").tolist() == [[float(rank + step)] * 4 for rank in range(RANKS)]
    region = Region(shape=(120_000,), begin=19_990, end=99_999)
    assert torch.equal(found.read("model/shared", region), torch.arange(19_990.0, 99_999.0) + step)
    assert (found.values, found.found) == ({"scale": 2.5}, {f"by {rank}": rank for rank in range(RANKS)})
    assert [found.own(rank)["random"].item() for rank in range(RANKS)] == list(range(RANKS))


def found_from(host: Host) -> str:
    root = snapshots_in(host.kept.root)
    return find_checkpoint("auto", root).name


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_every_host_reads_what_all_of_them_hold(hosts: Hosts, copies: int) -> None:
    keep_all(hosts, 10, copies=copies)
    for host in hosts:
        check(host, 10)
        assert len(host.kept.held()[".step-00000010.a"]) in (6 + 6 * copies, 7 + 6 * copies)  # with the head


@pytest.mark.parametrize(("lost", "copies"), [([0], 1), ([1], 1), ([2], 1), ([0, 1], 2), ([2, 1], 2)])
def test_what_lost_hosts_had_comes_from_copies(hosts: Hosts, lost: list[int], copies: int) -> None:
    keep_all(hosts, 10, copies=copies)
    for place in lost:
        hosts[place].die()
    left = [host for place, host in enumerate(hosts) if place not in lost]
    meet(left)
    for host in left:
        check(host, 10)


def test_more_lost_hosts_than_there_are_copies_are_too_many(hosts: Hosts) -> None:
    keep_all(hosts, 10)
    hosts[0].die()
    hosts[1].die()
    meet(hosts[2:])
    with pytest.raises(CheckpointError, match="no checkpoint in snapshot:"):
        found_from(hosts[2])


def test_a_keeper_that_does_not_answer_is_as_good_as_gone(hosts: Hosts) -> None:
    keep_all(hosts, 10)
    hosts[1].die()  # and the others do not know yet
    check(hosts[0], 10)


def test_a_keeper_that_is_started_again_is_waited_for(hosts: Hosts) -> None:
    keep_all(hosts, 10, copies=0)
    killed = hosts[1]
    killed.server.__exit__()

    def start() -> None:
        listener = listen(killed.address)
        killed.server = ControlServer([listener], killed.kept.secret, operations=killed.kept.operations())
        killed.server.__enter__()

    timer = threading.Timer(0.5, start)
    timer.start()
    try:
        check(hosts[0], 10)
    finally:
        timer.join()
        killed.server.__exit__()


@pytest.mark.parametrize("missing", [0, 5])
def test_a_snapshot_of_a_half_dead_world_is_passed_over(hosts: Hosts, missing: int) -> None:
    keep_all(hosts, 10)
    for rank in set(range(RANKS)) - {missing}:
        keep(hosts, rank, 20, stay=frozenset({".step-00000010.a"}))
    told: list[str] = []
    root = snapshots_in(hosts[1].kept.root)
    assert find_checkpoint("auto", root, tell=lambda passed: told.append(str(passed))).name == "step-00000010"
    assert len(told) == 1
    assert told[0].startswith("passed over step-00000020: parts of it are missing in the memory of hosts")
    check(hosts[2], 10)


def test_parts_of_two_attempts_make_no_snapshot(hosts: Hosts) -> None:
    for rank in range(RANKS):
        keep(
            hosts,
            rank,
            10,
            token="a" if rank % 2 else "b",
            copies=0,
            stay=frozenset({".step-00000010.a", ".step-00000010.b"}),
        )
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        found_from(hosts[0])
    for rank in range(RANKS):
        keep(hosts, rank, 10, token="c", copies=0, stay=frozenset({".step-00000010.a", ".step-00000010.b"}))
    check(hosts[0], 10)


def test_what_is_older_goes_when_the_next_is_taken(hosts: Hosts) -> None:
    keep_all(hosts, 10)
    keep_all(hosts, 20, stay=frozenset({".step-00000010.a"}))
    keep_all(hosts, 30, stay=frozenset({".step-00000020.a"}))
    for host in hosts:
        assert sorted(host.kept.held()) == [".step-00000020.a", ".step-00000030.a"]
        assert [path.name for path in list_checkpoints(snapshots_in(host.kept.root))] == [
            "step-00000020",
            "step-00000030",
        ]


@covering(
    name=["rank-00003.f32.safetensors", "rank-00003.json", "rank-00003.json.sha256", "head.json"],
    damage=["a byte", "the end", "all bytes"],
)
def test_damage_is_seen_on_every_host(hosts: Hosts, name: str, damage: str) -> None:
    keep_all(hosts, 10, copies=0)
    keep_all(hosts, 20, copies=0, stay=frozenset({".step-00000010.a"}))
    place = 0 if name == "head.json" else 1
    file = hosts[place].kept.root / ".step-00000020.a" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {"a byte": content, "the end": content[: len(content) // 2], "all bytes": b"\xff" * len(content)}
    file.write_bytes(damaged[damage])
    for host in hosts:
        assert found_from(host) == "step-00000010"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("head.json", "what is in it is of step 10"),
        ("rank-00003.*", "rank-00003.json is of step 10, and not of step 20"),
    ],
)
def test_what_is_of_another_step_is_passed_over(hosts: Hosts, names: str, told: str) -> None:
    keep_all(hosts, 10, copies=0)
    keep_all(hosts, 20, copies=0, stay=frozenset({".step-00000010.a"}))
    for host in hosts:
        for file in (host.kept.root / ".step-00000010.a").glob(names):
            shutil.copy(file, host.kept.root / ".step-00000020.a")
    for host in hosts:
        said: list[str] = []
        root = snapshots_in(host.kept.root)
        assert find_checkpoint("auto", root, tell=lambda passed: said.append(str(passed))).name == "step-00000010"  # noqa: B023
        assert len(said) == 1
        assert told in said[0]


def test_a_host_without_room_tells_so(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all(hosts, 10)
    few = hosts[1].kept.root

    class Usage:
        def __init__(self, path: Path) -> None:
            self.free = 100 if Path(path) == few else 2**40

    monkeypatch.setattr("shutil.disk_usage", Usage)
    stay = frozenset({".step-00000010.a"})
    own, copied = keep(hosts, 2, 20, stay=stay), keep(hosts, 0, 20, stay=stay)
    assert not own.is_kept
    assert "0 MiB of /dev/shm are free" in own.problem
    assert copied.is_kept  # on its own host
    assert f"{hosts[1].address} has no copy" in copied.without_copy
    assert "0 MiB of /dev/shm are free" in copied.without_copy
    monkeypatch.undo()
    check(hosts[2], 10)


def test_who_has_another_secret_is_told_nothing(hosts: Hosts, tmp_path: Path) -> None:
    keep_all(hosts, 10, copies=0)
    stranger = Kept(tmp_path / "stranger" / ROOT)
    stranger.root.parent.mkdir()
    stranger.make(secrets.token_hex(32).encode())
    stranger.write_keepers(0, [hosts[0].address])
    with pytest.raises(OSError, match="the secrets differ"), stranger.asking(hosts[0].address) as ask:
        ask("held")
    stranger.write_keepers(1, [hosts[0].address, Address("127.0.0.1", 1)])
    assert SnapshotFiles(snapshots_in(stranger.root)).names(snapshots_in(stranger.root)) == []


@pytest.mark.parametrize(
    "request_",
    [("read", "..", "secret", 0, 64), ("read", ".step-1.a", "../../secret", 0, 64), ("digest", ".step-1.a", ".x")],
)
def test_a_keeper_gives_files_of_snapshots_alone(hosts: Hosts, request_: tuple[object, ...]) -> None:
    with pytest.raises(OSError, match="the keeper at"), hosts[0].kept.asking(hosts[1].address) as ask:
        ask(*request_)


def test_hosts_that_meet_again_need_no_room(tmp_path: Path) -> None:
    kept, secret = Kept(tmp_path / ROOT), secrets.token_hex(32).encode()
    kept.make(secret)
    files = [kept.root / "secret", kept.root / "keepers.json"]
    before = [file.stat().st_ino for file in files]
    for count in (1, 3, 2):
        addresses = [Address("127.0.0.1", 10**number) for number in range(count)]
        kept.write_secret(secret)
        kept.write_keepers(count - 1, addresses)
        assert kept.keepers() == (count - 1, addresses)
    assert [file.stat().st_ino for file in files] == before
    assert sorted(each.name for each in kept.root.iterdir()) == ["keepers.json", "secret"]


def test_nothing_is_made_in_the_place_of_a_folder_that_is_gone(hosts: Hosts) -> None:
    root = hosts[0].kept.root
    shutil.rmtree(root)
    assert not keep(hosts, 0, 10).is_kept
    assert not root.exists()


def test_each_host_reads_by_its_own_path(hosts: Hosts) -> None:
    keep_all(hosts, 10)
    path = find_checkpoint("auto", snapshots_in(hosts[0].kept.root))
    assert is_snapshot(path)
    here = on_this_host(path, hosts[1].kept.root)
    assert here == snapshots_in(hosts[1].kept.root) / "step-00000010"
    assert on_this_host(Path("runs/a/checkpoints/step-00000010"), hosts[1].kept.root).parts[0] == "runs"
