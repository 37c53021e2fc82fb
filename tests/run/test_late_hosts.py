"""A late rank on another host, whose clock is another: real stores, and hosts that are threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.comm.control.server import private_server
from paceline.comm.control.store import ControlClient, ControlStore, SideChannel
from paceline.comm.control.wire import read_secret
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.straggler import Lateness, LatenessPolicy, PhaseTimes, RankLook, Straggler
from paceline.run.other_hosts import LateHosts, clock_ahead

HOSTS = {"a": (0, 1), "b": (2,), "c": (3,)}
AHEAD = {"a": 0.0, "b": 5000.0, "c": -300.0}
PERIOD_S = 10.0
LATE, LATE_S = 2, 3.0


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[dict[str, SideChannel]]:
    with private_server(tmp_path) as (address, secret):
        clients = {host: ControlClient(address, lambda: read_secret(secret)) for host in HOSTS}
        made = {host: SideChannel(ControlStore(client), "test") for host, client in clients.items()}
        yield made
        for channel in made.values():
            channel.close()
        for client in clients.values():
            client.close()


def test_clocks_are_compared_through_the_store(channels: dict[str, SideChannel]) -> None:
    def work(host: str) -> float | None:
        return clock_ahead(channels[host], host, tuple(HOSTS), lambda: time.time() + AHEAD[host])

    with ThreadPoolExecutor(len(HOSTS)) as pool:
        found = dict(zip(HOSTS, pool.map(work, HOSTS), strict=True))
    assert found["a"] == 0.0
    for host, ahead in AHEAD.items():
        assert found[host] == pytest.approx(ahead, abs=10.0)  # as long as a text may take


class Hosts:
    """Hosts that look at their ranks in turn, at a time of day that the test sets."""

    def __init__(self, channels: dict[str, SideChannel], *, late_s: float) -> None:
        self._origin, self._elapsed = time.time(), 0.0
        self._late_s = late_s
        policy = LatenessPolicy(windows=2, min_steps=4)
        self.parts = {
            host: LateHosts(
                channels[host],
                host,
                tuple(HOSTS),
                lambda host=host: [self._rank(rank, host) for rank in HOSTS[host]],  # type: ignore[misc]
                Lateness(policy),
                period_s=PERIOD_S,
                now=lambda host=host: self._origin + self._elapsed + AHEAD[host],  # type: ignore[misc]
            )
            for host in HOSTS
        }

    def _rank(self, rank: int, host: str) -> RankLook:
        """A rank that makes a step in five seconds, and comes late to its collective, or not."""
        more = self._late_s if rank == LATE else 0.0
        steps = int(self._elapsed // 5.0)
        clock = time.perf_counter() - self._elapsed  # when the first step began
        entries = tuple(
            LedgerEntry(
                number=step + 1,
                group=GroupName((0, 1, 2, 3)),
                sequence=step,
                call=LedgerCall(kind="barrier"),
                step=step,
                issued_s=clock + 5.0 * step + 1.0 + more,
            )
            for step in range(steps)
        )
        times = PhaseTimes(
            steps=steps, step_s=5.0 * steps, phases={"data": steps * (1.0 + more), "forward": steps * 1.0}
        )
        return RankLook(view=LedgerView(rank=rank, entries=entries, host=host, pid=1), times=times)

    def run(self) -> list[Straggler]:
        with ThreadPoolExecutor(len(HOSTS)) as pool:
            list(pool.map(LateHosts.compare_clocks, self.parts.values()))
        found = []
        for self._elapsed in range(200):
            found += [late for host in reversed(HOSTS) if (late := self.parts[host].look()) is not None]
        return found


def test_a_late_rank_of_another_host_is_named(channels: dict[str, SideChannel]) -> None:
    (found,) = Hosts(channels, late_s=LATE_S).run()
    assert (found.rank, found.phase) == (LATE, "data")
    assert found.lost_s == pytest.approx(LATE_S)


def test_nobody_is_named_where_all_are_alike(channels: dict[str, SideChannel]) -> None:
    assert Hosts(channels, late_s=0.0).run() == []
