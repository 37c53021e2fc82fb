"""Ranks of other hosts that have left: who is told, and how long rank 0 keeps the store."""

from __future__ import annotations

import threading
from dataclasses import replace

from memory_channel import MemoryChannel

from paceline.health.ledger_view import BACKWARD, GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.run.other_hosts import LeftRanks

HOSTS = {"a": [0, 1], "b": [2, 3]}
EVERYBODY = GroupName((0, 1, 2, 3))
CALL = LedgerCall(kind="all_reduce", shape=(8,), dtype="float32", op="sum")


def left_ranks(channel: MemoryChannel, host: str, *, has_store: bool = True) -> LeftRanks:
    return LeftRanks(channel=channel, host=host, hosts=HOSTS, has_store=has_store)


def view(rank: int, issued: int, step: int) -> LedgerView:
    """Returns a rank that has issued so many operations."""
    entries = tuple(
        LedgerEntry(number=number + 1, group=EVERYBODY, sequence=number, call=CALL, site=f"loop.py:{10 + rank} in main")
        for number in range(max(0, issued - 3), issued)
    )
    return LedgerView(rank=rank, step=step, phase=BACKWARD, entries=entries, issued={EVERYBODY: issued})


def left(rank: int, issued: int, step: int) -> LedgerView:
    return replace(view(rank, issued, step), state="finished")


def waiting(rank: int, issued: int, step: int) -> LedgerView:
    return replace(view(rank, issued, step), waiting=issued)


def test_a_rank_that_waits_for_one_that_has_left_says_so_with_both_steps_and_lines() -> None:
    channel = MemoryChannel()
    left_ranks(channel, "b").leave(left(3, 7, 5), 100.0)
    verdict = left_ranks(channel, "a").explain([waiting(0, 8, 6), waiting(1, 8, 6)], 50.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("left", (3,))
    assert verdict.sentence == (
        "rank 3 is missing from all_reduce(sum, float32 [8]), operation 7 of group [0, 1, 2, 3]: it has finished after"
        " step 5, its last operation all_reduce(sum, float32 [8]) at loop.py:13 in main; ranks 0 and 1 wait for it"
        " after step 6: rank 0 at loop.py:10 in main, rank 1 at loop.py:11 in main"
    )


def test_nobody_is_blamed_who_has_issued_as_much_or_has_failed() -> None:
    channel = MemoryChannel()
    left_ranks(channel, "b").leave(left(3, 8, 6), 100.0)
    assert left_ranks(channel, "a").explain([waiting(0, 8, 6), waiting(1, 8, 6)], 50.0) is None
    left_ranks(channel, "b").leave(replace(left(2, 7, 5), state="failed"), 100.0)
    assert left_ranks(channel, "a").explain([waiting(0, 8, 6), waiting(1, 8, 6)], 50.0) is None


def test_a_host_has_left_when_all_its_ranks_have() -> None:
    channel = MemoryChannel()
    here, there = left_ranks(channel, "a"), left_ranks(channel, "b")
    there.leave(left(3, 7, 5), 100.0)
    assert here.of_host("b", 50.0) == []
    there.leave(left(2, 7, 5), 100.0)
    assert [each.rank for each in here.of_host("b", 50.0)] == [2, 3]


def test_rank_0_keeps_its_store_until_the_others_know_that_it_goes() -> None:
    channel = MemoryChannel()
    here, there = left_ranks(channel, "a"), left_ranks(channel, "b")
    leaving = threading.Thread(target=here.leave, args=(left(0, 7, 5), 100.0))
    leaving.start()
    while not there.is_store_gone:
        there.look(50.0)
    leaving.join()
    assert channel.texts["seen/b"]
    del channel.texts["left/0"]
    there.leave(left(2, 7, 5), 100.0)  # nobody asks the store any more
    assert "left/2" not in channel.texts


def test_rank_0_goes_at_once_where_the_store_is_its_launchers() -> None:
    channel = MemoryChannel()
    left_ranks(channel, "a", has_store=False).leave(left(0, 7, 5), 100.0)
    there = left_ranks(channel, "b", has_store=False)
    there.look(50.0)
    assert not there.is_store_gone
    assert "seen/b" not in channel.texts
