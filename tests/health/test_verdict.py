"""What is said of ranks that stand still, for every way in which they can."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView, views_from_text, views_to_text
from paceline.health.verdict import HangLimits, HangVerdict, judge

WORLD = GroupName((0, 1, 2))
PAIR = GroupName((1, 2))
LIMITS = HangLimits(step_s=5.0, setup_s=50.0)
SUM = LedgerCall(kind="all_reduce", shape=(4,), dtype="float32", op="sum")
ROOT = LedgerCall(kind="broadcast", shape=(4,), dtype="float32", peer=0)
BARRIER = LedgerCall(kind="barrier")


def rank(number: int, *calls: LedgerCall, group: GroupName = WORLD, **values: object) -> LedgerView:
    """A rank that has issued ``calls`` and passed all of them, unless ``waiting`` says otherwise."""
    entries = tuple(
        LedgerEntry(
            number=place + 1, group=group, sequence=place, call=call, site=f"train.py:{10 + place} in step", done_s=1.0
        )
        for place, call in enumerate(calls)
    )
    view = LedgerView(rank=number, step=3, phase="backward", entries=entries, issued={group: len(entries)})
    return replace(view, **values)


def waits(number: int, *calls: LedgerCall, group: GroupName = WORLD, **values: object) -> LedgerView:
    """A rank that waits in the last of its calls."""
    return rank(number, *calls, group=group, waiting=len(calls), **values)


def hung(*views: LedgerView) -> HangVerdict:
    found = judge(views, 10.0, LIMITS)
    assert found is not None
    return found


def test_nothing_is_wrong_while_ranks_move_or_before_the_limit() -> None:
    views = [waits(0, SUM), rank(1), waits(2, SUM)]
    assert judge(views, 4.9, LIMITS) is None
    assert judge([*views[:2], replace(views[2], changed_s=8.0)], 10.0, LIMITS) is None
    assert judge([], 10.0, LIMITS) is None
    assert judge([rank(0, SUM, state="finished"), rank(1, SUM, state="finished")], 99.0, LIMITS) is None


@pytest.mark.parametrize("slow", [{"step": 0}, {"phase": "setup"}, {"phase": "evaluation"}, {"phase": "checkpoint"}])
def test_what_takes_long_by_nature_has_a_limit_of_its_own(slow: dict[str, object]) -> None:
    views = [waits(0, SUM), rank(1, **slow), waits(2, SUM)]
    assert judge(views, 49.0, LIMITS) is None
    assert hung_at(views, 50.0).ranks == (1,)


def hung_at(views: list[LedgerView], now: float) -> HangVerdict:
    found = judge(views, now, LIMITS)
    assert found is not None
    return found


def test_a_rank_that_sleeps_is_missing_and_its_line_is_told() -> None:
    found = hung(waits(0, SUM, SUM), rank(1, SUM, stands_at="user.py:7 in slow", phase="forward"), waits(2, SUM, SUM))
    assert found.sentence == (
        "rank 1 is missing from all_reduce(sum, float32 [4]), operation 1 of group [0, 1, 2]: it stands at "
        "user.py:7 in slow and is in phase forward (step 3, for 10.0 s); ranks 0 and 2 wait for it at "
        "train.py:11 in step"
    )
    assert (found.kind, found.ranks, found.group, found.sequence) == ("missing", (1,), (0, 1, 2), 1)


def test_a_blocked_data_loader_is_told_as_such() -> None:
    found = hung(waits(0, SUM), rank(1, phase="data", stands_at="data.py:3 in read"), waits(2, SUM))
    assert "it stands at data.py:3 in read and waits for data" in found.sentence


def test_several_missing_ranks_are_told_each_with_its_line() -> None:
    found = hung(rank(0, stands_at="a.py:1 in f"), rank(1, stands_at="b.py:2 in g"), waits(2, SUM))
    assert found.ranks == (0, 1)
    assert found.sentence.startswith("ranks 0 and 1 are missing from all_reduce")
    assert "rank 0 stands at a.py:1 in f" in found.sentence
    assert "rank 1 stands at b.py:2 in g" in found.sentence


def test_a_rank_that_has_finished_is_told_as_such() -> None:
    found = hung(waits(0, SUM, SUM), rank(1, SUM, state="finished"), waits(2, SUM, SUM))
    assert (found.kind, found.ranks) == ("left", (1,))
    assert "it has finished" in found.sentence


def test_a_dead_rank_is_told_before_the_limit() -> None:
    found = judge([waits(0, BARRIER, SUM), rank(1, BARRIER, state="dead", pid=77), rank(2, BARRIER)], 0.1, LIMITS)
    assert found is not None
    assert (found.kind, found.ranks) == ("dead", (1,))
    assert (
        "rank 1 is dead: its process is gone (step 3, phase backward, after barrier() at train.py:10" in found.sentence
    )


def test_the_blame_follows_the_waits_to_who_waits_for_nobody() -> None:
    """Rank 0 waits for 1 and 2, rank 1 waits for 2 in another group, and 2 loops."""
    one = replace(waits(1, SUM, group=PAIR), issued={PAIR: 1, WORLD: 0})
    two = rank(2, stands_at="loop.py:5 in spin", group=PAIR)
    found = hung(waits(0, SUM), one, two)
    assert found.ranks == (2,)
    assert "loop.py:5 in spin" in found.sentence


def test_ranks_that_wait_for_one_another_are_a_deadlock() -> None:
    other = GroupName((0, 1), 1)
    first = replace(waits(0, SUM, group=GroupName((0, 1))), issued={GroupName((0, 1)): 1})
    second = replace(waits(1, SUM, group=other), issued={other: 1})
    found = hung(first, second)
    assert (found.kind, found.ranks) == ("deadlock", (0, 1))
    assert "rank 0 waits for rank 1 in all_reduce" in found.sentence
    assert "rank 1 waits for rank 0 in all_reduce" in found.sentence


def test_all_in_one_operation_points_at_the_network() -> None:
    found = hung(waits(0, SUM), waits(1, SUM), waits(2, SUM))
    assert (found.kind, found.ranks) == ("silent", ())
    assert "look at the network" in found.sentence


def test_a_rank_alone_is_told_with_its_line() -> None:
    found = hung(rank(0, phase="data", stands_at="data.py:3 in read"))
    assert found.sentence == "rank 0 stands at data.py:3 in read and waits for data (step 3, for 10.0 s)"


def test_where_no_host_waits_the_numbers_issued_tell_who_is_behind() -> None:
    """On CUDA the host does not wait in an operation."""
    found = hung(rank(0, SUM, SUM, stands_at="x.py:1 in f"), rank(1, SUM, stands_at="y.py:2 in g"), rank(2, SUM, SUM))
    assert (found.kind, found.ranks, found.sequence) == ("missing", (1,), 1)
    assert "it stands at y.py:2 in g" in found.sentence


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(SUM, shape=(5,)), "with another shape"),
        (replace(SUM, dtype="float64"), "with another dtype"),
        (replace(SUM, op="avg"), "with another op"),
        (BARRIER, "called different operations"),
    ],
)
def test_a_mismatch_is_told_at_once(other: LedgerCall, what: str) -> None:
    views = [waits(0, BARRIER, SUM), waits(1, BARRIER, other), waits(2, BARRIER, SUM)]
    found = judge(views, 0.0, LIMITS)
    assert found is not None
    assert (found.kind, found.ranks, found.sequence) == ("mismatch", (1,), 1)
    assert what in found.sentence
    assert f"rank 1 called {other} at train.py:11 in step, ranks 0 and 2 called {SUM}" in found.sentence


def test_another_root_is_a_mismatch() -> None:
    found = judge([waits(0, ROOT), waits(1, replace(ROOT, peer=1)), waits(2, ROOT)], 0.0, LIMITS)
    assert found is not None
    assert "with another root" in found.sentence


def test_a_swapped_order_is_told_as_such_where_it_is_seen() -> None:
    found = judge([waits(0, SUM, BARRIER), waits(1, BARRIER, SUM), waits(2, SUM)], 0.0, LIMITS)
    assert found is not None
    assert "in another order (operation 0 of group [0, 1, 2])" in found.sentence


def test_of_two_ranks_that_disagree_neither_is_blamed_alone() -> None:
    found = judge([waits(0, SUM), waits(1, BARRIER)], 0.0, LIMITS)
    assert found is not None
    assert found.ranks == (0, 1)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (replace(SUM, shape=(2, 2)), SUM),
        (
            LedgerCall(kind="all_to_all", shape=(4,), dtype="int64"),
            LedgerCall(kind="all_to_all", shape=(9,), dtype="int64"),
        ),
    ],
)
def test_what_ranks_may_differ_in_is_no_mismatch(one: LedgerCall, two: LedgerCall) -> None:
    assert judge([rank(0, one), rank(1, two)], 0.0, LIMITS) is None


def message(kind: str, peer: int, sequence: int = 0, tag: int = 0) -> LedgerEntry:
    call = LedgerCall(kind=kind, shape=(2,), dtype="float32", peer=peer, tag=tag)
    return LedgerEntry(number=1, group=WORLD, sequence=sequence, call=call, site="stage.py:4 in pass_on")


def test_a_receive_without_its_send_names_the_sender() -> None:
    receiver = replace(rank(0), entries=(message("recv", 1),), waiting=1)
    found = hung(receiver, rank(1, stands_at="stage.py:9 in work"), rank(2, state="finished"))
    assert (found.kind, found.ranks) == ("missing", (1,))
    assert "recv(from rank 1, float32 [2]), message 0" in found.sentence


def test_a_send_that_was_posted_is_not_missing() -> None:
    receiver = replace(rank(0), entries=(message("recv", 1),), waiting=1)
    sender = replace(rank(1, stands_at="x.py:1 in f"), entries=(message("send", 0),))
    assert hung(receiver, sender).kind == "silent"
    of_another_tag = replace(sender, entries=(message("send", 0, tag=3),))
    assert hung(receiver, of_another_tag).ranks == (1,)


def test_a_ring_of_receives_is_a_deadlock() -> None:
    views = [replace(rank(r), entries=(message("recv", (r + 1) % 3),), waiting=1) for r in range(3)]
    found = hung(*views)
    assert (found.kind, found.ranks) == ("deadlock", (0, 1, 2))


def test_a_verdict_is_plain_text_and_plain_json_with_a_line_for_every_rank() -> None:
    found = hung(waits(0, SUM), rank(1, stands_at="u.py:1 in f"), rank(2, state="finished"))
    assert len(found.to_text().splitlines()) == 4
    assert "rank 1, step 3, phase backward: runs; stands at u.py:1 in f" in found.to_text()
    payload = json.loads(json.dumps(found.to_json()))
    assert payload["ranks"] == [1, 2]
    assert [state["rank"] for state in payload["states"]] == [0, 1, 2]


@given(st.integers(2, 40), st.data())
def test_whoever_is_behind_is_blamed_whatever_the_others_wait_in(size: int, data: st.DataObject) -> None:
    """Ranks that stop at some number each: those with the fewest operations are missing, and nobody else."""
    group = GroupName(tuple(range(size)))
    counts = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    least = min(counts)
    views = [
        rank(r, *[SUM] * count, group=group) if count == least else waits(r, *[SUM] * (least + 1), group=group)
        for r, count in enumerate(counts)
    ]
    found = hung(*views)
    behind = tuple(r for r, count in enumerate(counts) if count == least)
    assert found.kind == ("silent" if len(behind) == size else "missing")
    assert found.ranks == behind


def test_a_verdict_and_its_ledgers_survive_the_way_to_another_host() -> None:
    views = [waits(0, SUM, ROOT), replace(rank(1, SUM, stands_at="u.py:1 in f"), changed_s=2.0), rank(2, state="dead")]
    read = views_from_text(views_to_text(views, 10.0), 1000.0)
    assert [replace(view, changed_s=view.changed_s - 990.0) for view in read] == views
    found = judge(read[:2], 1000.0, LIMITS)
    assert found is not None
    assert HangVerdict.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_the_operation_that_a_rank_waits_in_is_sent_however_old_it_is() -> None:
    view = replace(rank(0, *[SUM] * 30), waiting=2)
    (read,) = views_from_text(views_to_text([view], 0.0), 0.0)
    assert read.waits_in == view.waits_in
    assert len(read.entries) < len(view.entries)


def test_a_stopped_rank_is_told_with_the_line_that_it_wrote_down_last() -> None:
    """In the operation that all are in, where it would seem to be the network's fault."""
    views = [waits(0, SUM, SUM), waits(1, SUM, SUM, halted="stopped (SIGSTOP)", halted_s=4.0, pid=77)]
    found = hung(*views)
    assert found.sentence == (
        "rank 1 is stopped (SIGSTOP) at train.py:11 in step, in all_reduce(sum, float32 [4]), operation 1 of group "
        "[0, 1, 2], in phase backward (step 3), for 6.0 s (process 77); rank 0 waits for it at train.py:11 in step"
    )
    assert (found.kind, found.ranks) == ("stopped", (1,))
    views[0] = replace(views[0], changed_s=8.0)  # which may go on for a while
    assert judge(views, 8.9, LIMITS) is None
    assert hung_at(views, 9.0).ranks == (1,)
    (copy,) = views_from_text(views_to_text(views[1:], 10.0), 10.0)
    assert copy == views[1]


def test_one_host_has_no_network_to_look_at() -> None:
    found = hung(waits(0, SUM, host="a"), waits(1, SUM, host="a"))
    assert "network" not in found.sentence
    found = hung(waits(0, SUM, host="a"), waits(1, SUM, host="a", blocked="its memory is swapped out"))
    assert (found.kind, found.ranks) == ("silent", (1,))
    assert "its memory is swapped out" in found.sentence
    assert "network" in hung(waits(0, SUM, host="a"), waits(1, SUM, host="b")).sentence
