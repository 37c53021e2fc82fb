"""The benchmark on real links: its theory, its names, its refusals, and on a Linux with root one small real run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from loaded_script import load_script

from paceline.cluster.costs import Placement
from paceline.errors import UsageError
from slow_links.arms import COMPUTE, ONE_BY_ONE
from slow_links.meeting import Meeting
from slow_links.network import NoNetworkError, _existing, check_able, hosts, stale, stem_of
from slow_links.plot import draw
from slow_links.speed_ups import speed_ups
from slow_links.suite import GIGABIT, KIB, MIB, WAYS, Schedule, measure
from slow_links.table import show
from slow_links.theory import latency_bound, least_seconds, link_bytes
from slow_links.turns import Sample, median_and_spread, slowest_rank

SCRIPT = Path(__file__).parents[2] / "bench" / "links.py"
TWO_BY_TWO = Placement(ranks=4, hosts=2)

# Theory


def test_an_all_reduce_leaves_the_busiest_host_as_its_algorithm_says() -> None:
    size = {"all_reduce": 400.0}
    assert link_bytes(size, "native", TWO_BY_TWO) == link_bytes(size, "ring", TWO_BY_TWO) == 600
    assert link_bytes(size, "hierarchical", TWO_BY_TWO) == 400
    assert link_bytes(size, "halving_doubling", TWO_BY_TWO) == 800
    assert link_bytes(size, "halving_doubling", Placement(ranks=4, hosts=4)) == 600


@pytest.mark.parametrize("where", [TWO_BY_TWO, Placement(ranks=4, hosts=4), Placement(ranks=6, hosts=2)])
def test_gathered_pieces_leave_a_host_once_for_every_rank_elsewhere(where: Placement) -> None:
    piece = 10.0
    leaving = sum(
        piece
        for sender in range(where.node_ranks)
        for receiver in range(where.ranks)
        if where.host(sender) != where.host(receiver)
    )
    assert link_bytes({"all_gather": piece * where.ranks}, "ring", where) == leaving
    assert link_bytes({"all_to_all": piece * where.ranks}, "native", where) == leaving


def test_bytes_that_no_formula_knows_are_an_error() -> None:
    assert link_bytes({"barrier": 0.0}, "native", TWO_BY_TWO) == 0
    with pytest.raises(UsageError, match="12 bytes of broadcast"):
        link_bytes({"broadcast": 12.0}, "native", TWO_BY_TWO)


def test_bounds_are_bytes_over_the_rate_and_latencies() -> None:
    assert least_seconds(125e6, 1e9) == 1
    assert latency_bound(50, 0.001, 0.05) == pytest.approx(0.1 / 0.051)


# Rows


def row(part: str, arm: str, ms: float, **more: Any) -> dict[str, Any]:
    place = {"hosts": 2, "ranks": 4, "bits_per_second": 10**9, "size_bytes": None}
    theory = more.get("theory_bytes", 1e6)
    known = {"theory_bytes": theory, "link_bytes": 1.01 * theory, "bytes_ratio": 1.01, "bound_ms": 8.0, "fraction": 0.9}
    return place | {"part": part, "arm": arm, "median_ms": ms} | known | more


ROWS = [
    row("all_reduce", "ring", 99.0, size_bytes=64 * KIB),
    row("all_reduce", "hierarchical", 1.0, size_bytes=64 * KIB),
    row("all_reduce", "ring", 30.0, size_bytes=MIB, theory_bytes=3e6),
    row("all_reduce", "hierarchical", 20.0, size_bytes=MIB, theory_bytes=2e6),
    row("training", "native", 40.0),
    row("training", ONE_BY_ONE, 60.0),
    row("training", COMPUTE, 10.0, theory_bytes=0, bound_ms=None, bytes_ratio=None, fraction=None),
]


def test_speed_ups_are_those_of_the_largest_size_with_the_bound_beside() -> None:
    reduced, trained = speed_ups(ROWS)
    assert (reduced["of"], reduced["arm"], reduced["baseline"]) == ("all_reduce", "hierarchical", "ring")
    assert reduced["speed_up"] == reduced["bound"] == reduced["bytes_fewer"] == 1.5
    assert (trained["arm"], trained["baseline"], trained["speed_up"]) == ("native", ONE_BY_ONE, 1.5)
    assert trained["bound"] == 6  # 60 ms against the 10 ms of its compute, which its bytes do not exceed


def test_rows_are_shown_as_a_table_and_as_a_picture(tmp_path: Path) -> None:
    rows = ROWS + speed_ups(ROWS)
    text = show(rows)
    assert "2 x 2      1000  all_reduce        1  hierarchical" in text
    assert "hierarchical against ring: 1.50 (at most 1.50" in text
    draw(rows, tmp_path / "links.svg")
    picture = ElementTree.parse(tmp_path / "links.svg")
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("ring") == 1  # of the largest size alone
    assert {"hierarchical", "native", COMPUTE, "90.0%"} <= set(words)


def test_an_operation_takes_as_long_as_its_slowest_rank() -> None:
    def sample(*seconds: float) -> Sample:
        return Sample(arm="a", way="native", seconds=seconds, sent=0, received=0, wire=0, num_bytes={})

    assert slowest_rank([sample(1.0, 5.0), sample(2.0, 3.0)]) == [2.0, 5.0]
    assert median_and_spread([4.0]) == (4.0, 0.0)


def test_no_rank_passes_a_meeting_before_all_have_come(tmp_path: Path) -> None:
    Meeting.prepare(tmp_path / "page", 3)
    came = [0, 0, 0]
    early: list[tuple[int, int]] = []

    def work(rank: int) -> None:
        meeting = Meeting(tmp_path / "page", rank, 3)
        for number in range(1, 20):
            came[rank] = number
            meeting()
            if min(came) < number:
                early.append((rank, number))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [19] * 3
    assert not early


# Names


def test_only_what_a_process_that_is_gone_has_left_is_stale() -> None:
    ours = stem_of(os.getpid())
    of_an_older_process = f"paceline-links-{os.getpid()}-1"
    never_was = f"paceline-links-{2**22 + 1}-1700000000"
    left = [f"{of_an_older_process}-h0", f"{never_was}-router"]
    others = ["web", "paceline-links", "paceline-links-x-1-h0", f"{never_was}-backup", f"{ours}-h0", f"{ours}-router"]
    assert stale(left + others) == left


# What it refuses


@pytest.fixture
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_without_root_it_says_so_and_ends_with_a_code_of_its_own(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    output = tmp_path / "links.json"
    monkeypatch.setattr(sys, "argv", ["links.py", "--quick", "--output", str(output)])
    assert script.main() == 3
    shown = capsys.readouterr()
    assert "user 1000, not root" in shown.err
    assert "sudo" in shown.err
    assert not shown.out
    assert not output.exists()


def test_without_its_tools_it_says_which_and_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NoNetworkError, match=r"tc not found(.|\n)*apt-get install iproute2"):
        check_able()


def test_an_unknown_argument_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["links.py", "--quik"])
    with pytest.raises(SystemExit, match="2"):
        script.main()


# The real thing


@pytest.fixture
def root() -> Iterator[None]:
    """Skips where no network can be made, and checks that nothing is left of those that were made here."""
    try:
        check_able()
        with hosts(1):
            pass
    except NoNetworkError as error:
        pytest.skip(str(error).splitlines()[0])
    yield
    assert not left_of(stem_of(os.getpid()))


def left_of(stem: str) -> list[str]:
    return [name for name in _existing() if name.startswith(f"{stem}-")]


@pytest.mark.usefixtures("root")
@pytest.mark.exhaustive
def test_the_links_carry_the_bytes_of_theory_and_no_host_is_left() -> None:
    where = Placement(ranks=2, hosts=2)
    schedule = Schedule(sizes={GIGABIT: (64 * KIB,)}, rounds=1, parts=("all_reduce",))
    rows = measure(where, schedule)
    assert [each["arm"] for each in rows] == list(WAYS)
    for each in rows:
        assert each["theory_bytes"] == 64 * KIB
        assert 1 < each["bytes_ratio"] < 1.1
        assert each["wire_bytes"] > each["theory_bytes"]
        assert each["fraction"] > 0


@pytest.mark.usefixtures("root")
def test_what_goes_wrong_meanwhile_leaves_no_host() -> None:
    def fail() -> None:
        with hosts(2) as network:
            assert {network.host(0), network.host(1), network.router} <= set(_existing())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not left_of(stem_of(os.getpid()))


HOLD = """
import sys
from slow_links.network import hosts
with hosts(1):
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("root")
def test_the_next_start_removes_what_a_killed_run_left() -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, cwd=SCRIPT.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        stem = stem_of(process.pid)
        with hosts(1):
            assert left_of(stem) == [f"{stem}-h0", f"{stem}-router"]  # it is alive
        process.kill()
    with hosts(1):
        assert not left_of(stem)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("root")
def test_a_run_that_is_told_to_end_takes_its_hosts_down() -> None:
    with subprocess.Popen([sys.executable, SCRIPT, "--quick"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"hosts are up" in process.stderr.readline()
        stem = stem_of(process.pid)
        assert f"{stem}-h0" in left_of(stem)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert not left_of(stem)
