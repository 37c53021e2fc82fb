"""The hosts of a run, as the server counts them: who waits, who is of the round, who is gone."""

from __future__ import annotations

from paceline.comm.control.server import Hosts


def begun(*names: str, least: int, most: int) -> Hosts:
    hosts = Hosts(least=least, most=most, last_call_s=3.0, silence_s=3.0)
    for name in names:
        hosts.join(name, 0.0)
    hosts.update(0.0)
    return hosts


def test_a_round_begins_when_all_are_there_and_says_who_has_left() -> None:
    hosts = begun("a/1", "b/2", least=2, most=2)
    assert (hosts.round, hosts.members, hosts.gone, hosts.newcomers) == (1, ("a/1", "b/2"), [], [])
    hosts.leave("b/2", "its launcher was killed")
    assert (hosts.gone, hosts.present) == (["b (its launcher was killed)"], {"a/1"})
    hosts.join("c/3", 1.0)
    assert (hosts.newcomers, len(hosts.gone), hosts.round) == (["c"], 1, 1)


def test_enough_hosts_wait_for_the_rest_as_long_as_the_last_call() -> None:
    hosts = begun("a", "b", least=2, most=3)
    assert hosts.round == 0
    for now in (1.0, 2.0, 2.9):
        hosts.hear("a", now)
        hosts.hear("b", now)
        assert not hosts.update(now)
        assert hosts.round == 0
    assert hosts.update(3.0)
    assert (hosts.round, hosts.members) == (1, ("a", "b"))


def test_a_host_that_is_not_heard_of_is_gone() -> None:
    hosts = begun("a", "b", least=2, most=2)
    hosts.hear("a", 3.5)
    hosts.update(3.0)
    assert hosts.gone == []
    hosts.update(3.1)
    assert (hosts.gone, hosts.present) == (["b (nothing was heard of it for 3 s)"], {"a"})


def test_a_host_is_not_missed_for_a_time_in_which_nobody_listened() -> None:
    hosts = begun("a", "b", least=2, most=2)
    hosts.forgive(5.0)
    hosts.update(8.0)
    assert hosts.gone == []
    hosts.update(8.1)
    assert len(hosts.gone) == 2


def test_more_hosts_than_there_is_room_for_are_no_newcomers() -> None:
    hosts = begun("a", "b", least=1, most=2)
    for name in ("c", "d", "e"):
        hosts.join(name, 1.0)
    assert hosts.newcomers == []
    hosts.leave("a", "it was ended")
    assert hosts.newcomers == ["c"]
