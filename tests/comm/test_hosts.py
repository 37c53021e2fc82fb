"""The hosts of a run, as the server counts them: who waits, who is of the round, who is gone."""

from __future__ import annotations

from paceline.comm.control.server import Hosts


def begun(*names: str, least: int, most: int) -> Hosts:
    hosts = Hosts(least=least, most=most, last_call_s=3.0, silence_s=3.0)
    for name in names:
        hosts.join(name, 0.0)
    hosts.update(0.0)
    return hosts


def test_a_round_begins_when_all_are_there_and_counts_who_has_left() -> None:
    hosts = begun("a", "b", least=2, most=2)
    assert (hosts.round, hosts.members, hosts.num_gone, hosts.num_waiting) == (1, ("a", "b"), 0, 0)
    hosts.leave("b")
    assert (hosts.num_gone, hosts.present) == (1, {"a"})
    hosts.join("c", 1.0)
    assert (hosts.num_waiting, hosts.num_gone, hosts.round) == (1, 1, 1)


def test_enough_hosts_wait_for_the_rest_as_long_as_the_last_call() -> None:
    hosts = begun("a", "b", least=2, most=3)
    assert hosts.round == 0
    for now in (1.0, 2.0, 2.9):
        hosts.hear("a", now)
        hosts.hear("b", now)
        hosts.update(now)
        assert hosts.round == 0
    hosts.update(3.1)
    assert (hosts.round, hosts.members) == (1, ("a", "b"))


def test_a_host_that_is_not_heard_of_is_gone() -> None:
    hosts = begun("a", "b", least=2, most=2)
    hosts.hear("a", 3.5)
    hosts.update(3.0)
    assert hosts.num_gone == 0
    hosts.update(3.1)
    assert (hosts.num_gone, hosts.present) == (1, {"a"})


def test_more_hosts_than_there_is_room_for_are_not_counted_as_waiting() -> None:
    hosts = begun("a", "b", least=1, most=2)
    for name in ("c", "d", "e"):
        hosts.join(name, 1.0)
    assert hosts.num_waiting == 0
    hosts.leave("a")
    assert hosts.num_waiting == 1
