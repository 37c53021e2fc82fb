"""The path of a run through its samples is followed from segment to segment: what is wrong, and gaps with a reason."""

from __future__ import annotations

import pytest

from paceline.checkpoint.tools.audit import consume_again, follow
from paceline.data.order import DataOrder, Segment

ORDER = DataOrder(length=10, global_batch=4, seed=1)
DROPPED = DataOrder(length=10, global_batch=4, seed=1, drop_last=True)


def segments(*pairs: tuple[int, int], order: DataOrder = ORDER) -> list[Segment]:
    return [Segment(order=order, first=first, last=last) for first, last in pairs]


@pytest.mark.parametrize(("first", "last"), [(4, 4), (4, 3)])
def test_a_segment_without_samples_is_no_segment(first: int, last: int) -> None:
    with pytest.raises(ValueError, match=f"^a segment from {first} to {last}$"):
        follow(segments((first, last)), [], 4)


LEFT_OUT = "were left out by a roll-back, as it noted"


@pytest.mark.parametrize(
    ("pairs", "skipped", "position", "problems", "gaps"),
    [
        ([(0, 4)], [], 4, 0, 0),
        ([(0, 4), (4, 8)], [], 8, 0, 0),
        ([], [], 0, 0, 0),
        ([(0, 4), (8, 12)], [(4, 8)], 12, 0, 1),
        ([(0, 4)], [(4, 8)], 8, 0, 1),
        ([(4, 8)], [(0, 4)], 8, 0, 1),
        ([(0, 4), (8, 12)], [], 12, 1, 0),
        ([(0, 4), (3, 8)], [], 8, 1, 0),
        ([(0, 8), (4, 6)], [], 8, 1, 0),
        ([(0, 4)], [], 3, 1, 0),
        ([(0, 4)], [], 5, 1, 0),
        ([(0, 4)], [(2, 3)], 4, 1, 0),
        ([(0, 4), (8, 12)], [(4, 7)], 12, 2, 0),
    ],
)
def test_gaps_have_a_reason_or_are_problems(
    pairs: list[tuple[int, int]], skipped: list[tuple[int, int]], position: int, problems: int, gaps: int
) -> None:
    wrong, told = follow(segments(*pairs), skipped, position)
    assert (len(wrong), len(told)) == (problems, gaps), (wrong, told)
    assert all(each.endswith(LEFT_OUT) for each in told)


def test_what_is_wrong_is_told_with_its_positions() -> None:
    assert follow(segments((0, 4), (3, 8)), [(20, 24)], 7) == (
        [
            "positions 3 to 4 were consumed twice: a segment begins before the one before it has ended",
            "the last sample was at position 8, and the run goes on at 7: positions 7 to 8 would be consumed twice",
            "positions 20 to 24 are noted as left out, and are no gap in what was consumed",
        ],
        [],
    )
    assert follow(segments((1000, 1004)), [], 2000)[0] == [
        "positions 0 to 1,000 were never consumed, and nothing noted says why",
        "the last sample was at position 1,004, and the run goes on at 2,000: "
        "positions 1,004 to 2,000 would never be consumed",
    ]


def test_the_end_of_an_epoch_that_is_dropped_is_a_gap_with_a_reason() -> None:
    wrong, gaps = follow(segments((0, 6), (8, 12), order=DROPPED), [], 12)
    assert (wrong, len(gaps)) == ([], 1)
    assert gaps[0].endswith("are the end of an epoch that data.last_batch = drop leaves out")
    wrong, gaps = follow(segments((0, 6), (7, 12), order=DROPPED), [], 12)
    assert (len(wrong), gaps) == (1, [])


def test_samples_are_consumed_again_and_counted() -> None:
    found, batches, wrong = consume_again(segments((0, 10)))
    assert (len(found), batches, wrong) == (32, 3, [])
    assert consume_again(segments((0, 4), (4, 10)))[:2] == (found, batches)
    assert consume_again([]) == ("0" * 32, 0, [])
    assert len(consume_again(segments((0, 4), (0, 4)))[2]) == 1  # ids that come twice
    (cut,) = consume_again(segments((0, 6)))[2]
    assert cut.startswith("a segment ends at position 6, and the batch of 4 there")
