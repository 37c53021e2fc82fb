"""Steps that were made again: inside and at the ends of lines that add up several, and files too short to add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import END, RUN, STEP

from paceline.records.records import Record, SpanRecord, StepRecord, parse_line, to_line
from paceline.records.summary import final_steps, split_attempts
from paceline.records.thin import add_steps, thin_lines


def step(number: int, loss: float = 1.0) -> StepRecord:
    return replace(STEP, step=number, loss=loss, loss_sum=32 * loss, step_s=loss)


def span(first: int, last: int) -> SpanRecord:
    return add_steps([step(number) for number in range(first, last + 1)])


# What a rank wrote, and what counts of it: (last step of a line, steps in it, its loss).
GONE_BACK: dict[str, tuple[list[Record], list[tuple[int, int, float]]]] = {
    "nowhere": ([step(1), step(2), span(3, 6), step(7)], [(1, 1, 1.0), (2, 1, 1.0), (6, 4, 1.0), (7, 1, 1.0)]),
    "to the last of a line": (
        [step(1), span(2, 5), step(5, 2.0), step(6)],
        [(1, 1, 1), (4, 3, 1), (5, 1, 2), (6, 1, 1)],
    ),
    "to the second of a line": ([span(2, 5), step(3, 2.0), step(4)], [(2, 1, 1), (3, 1, 2), (4, 1, 1)]),
    "to the first of a line": ([step(1), span(2, 5), step(2, 2.0)], [(1, 1, 1), (2, 1, 2)]),
    "behind a line": ([span(2, 5), step(6), step(7), step(6, 2.0)], [(5, 4, 1), (6, 1, 2)]),
    "to before all": ([step(3), step(4), step(1, 2.0)], [(1, 1, 2)]),
    "twice": ([step(1), step(2), step(2, 2.0), step(2, 3.0)], [(1, 1, 1), (2, 1, 3)]),
}


@pytest.mark.parametrize("name", GONE_BACK)
@pytest.mark.parametrize("attempts", [1, 2])
def test_what_was_made_again_counts_once(name: str, attempts: int) -> None:
    records, expected = GONE_BACK[name]
    again = [RUN] if attempts == 2 else []
    found = final_steps(split_attempts([RUN, *records[:-1], *again, records[-1]]))
    assert [(record.step, record.steps, record.loss) for record in found.values()] == expected
    assert list(found) == [record.step for record in found.values()]
    sums = [(record.samples, record.count, record.loss_sum) for record in found.values()]
    assert sums == [(32 * steps, 32 * steps, pytest.approx(32 * steps * loss)) for _, steps, loss in expected]


def lines_of(last: int) -> bytes:
    return "".join(map(to_line, [RUN, *(step(number) for number in range(1, last + 1)), END])).encode()


@pytest.mark.parametrize(("most", "last"), [(40, 19), (40, 20), (40, 39), (64, 31), (64, 0), (6, 20)])
def test_a_file_with_little_to_add_up_stays_as_it_is(most: int, last: int) -> None:
    assert thin_lines(lines_of(last), most) is None


@pytest.mark.parametrize(
    ("most", "last", "expected"),
    [
        (40, 40, [1] * 40),  # up to step 24 one line each
        (64, 32, [1] * 32),
        (6, 21, [1, 1, 1, 1, 1, *[1] * 16]),
        (6, 30, [1, 1, 1, 1, 4, 4, 2, *[1] * 16]),
        (4, 64, [1, 1, 1, 1, 12, 16, 16, *[1] * 16]),
    ],
)
def test_older_steps_are_added_up(most: int, last: int, expected: list[int]) -> None:
    data = thin_lines(lines_of(last), most)
    assert data is not None
    lines = [parse_line(line) for line in data.splitlines()]
    assert [each.steps for each in lines if isinstance(each, StepRecord)] == expected
    assert sum(expected) == last
    told = lines[1]
    assert (told.name, told.step) == ("thinned", last // (most // 2) * (most // 2) - 16)  # type: ignore[union-attr]
    assert [type(each).__name__ for each in (lines[0], lines[-1])] == ["RunRecord", "EndRecord"]
