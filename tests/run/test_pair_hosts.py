"""Hosts that compare the updates of their ranks through the store: what they find, whenever they look."""

from __future__ import annotations

import pytest
from memory_channel import MemoryChannel

from paceline.comm.ledger.ledger import Ledger
from paceline.health.pairing import Update, UpdateHistory
from paceline.health.verdict import HangVerdict
from paceline.run.other_hosts import PairedHosts

STEP = 1
HOSTS = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


def paired(channel: MemoryChannel) -> list[PairedHosts]:
    return [
        PairedHosts(
            channel=channel,
            host=host,
            hosts=HOSTS,
            ledger=Ledger(rank=ranks[0], world=6).reader(),
            name_of=lambda _: "step",
        )
        for host, ranks in HOSTS.items()
    ]


def update(number: int, *, left_out: int = 0, more: int = 0, idle: int = 0) -> Update:
    counters = {STEP: number + left_out} if number > 2 else {}
    return Update(collectives=3 * number, updates=number + more, idle=idle, counters=counters)


def train(channel: MemoryChannel, guilty: int, fault: dict[str, int], every: int, lag: int) -> HangVerdict | None:
    """Trains 1,500 steps, of which one goes wrong; hosts look every so many steps, each later than the one before."""
    hosts = paired(channel)
    for number in range(1, 1500):
        for place, host in enumerate(hosts):
            is_bad = place == guilty and number > 700
            host.history.add(update(number, **(fault if is_bad else {})))
            found = host.look(float(number)) if (number - lag * place) % every == 0 else None
            if found is not None:
                return found
    return None


@pytest.mark.some(2)
@pytest.mark.parametrize(("every", "lag"), [(12, 5), (150, 45)])
@pytest.mark.parametrize("guilty", [0, 1, 2])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"left_out": 1}, "left out a step of its loop"),
        ({"more": 1, "idle": 1}, "made an update without a backward pass"),
        ({"more": -1}, "left out an update"),
    ],
)
def test_a_fault_of_any_host_is_found_however_seldom_they_look(
    guilty: int, fault: dict[str, int], told: str, every: int, lag: int
) -> None:
    found = train(MemoryChannel(), guilty, fault, every, lag)
    assert found is not None
    assert found.ranks == (2 * guilty,)
    assert found.sentence.startswith(f"rank {2 * guilty} {told}")
    assert train(MemoryChannel(), guilty, {}, every, lag) is None


def test_what_nobody_of_ours_left_is_passed_over() -> None:
    channel = MemoryChannel()
    hosts = paired(channel)
    hosts[1].history.add(update(1))
    for number, text in enumerate(["no JSON", "[]", '[["{}"], [[1, 1, 0, [], 0]]]', "[[], [[1]]]", "7"]):
        channel.texts["updates/a"] = text
        assert hosts[1].look(10.0 * number) is None


@pytest.mark.parametrize("lag", [0, 1, 30, 100])
def test_two_histories_have_something_in_common_whenever_one_is_read(lag: int) -> None:
    one, other = UpdateHistory(), UpdateHistory()
    for number in range(1, 1500):
        one.add(update(number))
        if number <= lag:
            continue
        other.add(update(number - lag))
        kept = {each.collectives for each in one.updates()} & {each.collectives for each in other.updates()}
        assert max(kept) > 3 * (number - lag) - 1100
        assert len(one.updates()) <= 40


@pytest.mark.parametrize("last", [0, 1, 2])
def test_an_update_left_out_at_the_end_is_found_by_the_host_that_ends_later(last: int) -> None:
    hosts = paired(MemoryChannel())
    for number in range(1, 41):
        for place, host in enumerate(hosts):
            host.history.add(update(number, more=-1 if place == 1 and number == 40 else 0))
    order = [place for place in range(3) if place != last] + [last]
    found = [verdict for place in order if (verdict := hosts[place].finish()) is not None]
    assert found
    assert {each.ranks for each in found} == {(2,)}
    assert found[0].sentence.startswith("rank 2 left out an update")


def test_hosts_that_end_alike_find_nothing() -> None:
    hosts = paired(MemoryChannel())
    for number in range(1, 41):
        for host in hosts:
            host.history.add(update(number))
    assert [host.finish() for host in hosts] == [None] * 3
