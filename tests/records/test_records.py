"""Records survive the trip through a line, and readers survive what a crash leaves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.records.records import (
    SCHEMA_VERSION,
    EndRecord,
    EvalRecord,
    EventRecord,
    Record,
    RunRecord,
    StepRecord,
    follow_records,
    parse_line,
    read_records,
    to_line,
)

_integers = st.integers(min_value=-(2**70), max_value=2**70)
_by_annotation = {
    "int": _integers,
    "float": st.floats(),
    "float | None": st.none() | st.floats(),
    "int | None": st.none() | _integers,
    "str": st.text(),
    "EndStatus": st.sampled_from(["done", "failed", "stopped"]),
    "dict[str, float]": st.dictionaries(st.text(), st.floats(allow_nan=False)),
    "dict[str, Any]": st.dictionaries(
        st.text(), st.none() | st.booleans() | _integers | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    ),
}


def _records_of(record_class: type[Record]) -> st.SearchStrategy[Record]:
    return st.builds(record_class, **{field.name: _by_annotation[str(field.type)] for field in fields(record_class)})


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not strict JSON")


def _same(left: Any, right: Any) -> bool:
    both_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return type(left) is type(right) and (both_nan or left == right)


@pytest.mark.parametrize("record_class", [RunRecord, StepRecord, EvalRecord, EventRecord, EndRecord])
@given(data=st.data())
def test_any_record_comes_back_from_its_line(record_class: type[Record], data: st.DataObject) -> None:
    record = data.draw(_records_of(record_class))
    line = to_line(record)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    json.loads(line, parse_constant=_refuse_constant)
    back = parse_line(line)
    assert type(back) is record_class
    for name, value in asdict(record).items():
        assert _same(getattr(back, name), value), name


def test_a_line_names_its_type_and_schema(step_record: StepRecord, end_record: EndRecord) -> None:
    assert to_line(step_record).startswith('{"type":"step","schema":1,"step":1,"epoch":0.5,')
    assert '"lr":0.0003,' in to_line(step_record)
    assert json.loads(to_line(end_record)) == {"type": "end", "schema": 1, **asdict(end_record)}


def test_floats_that_are_not_finite_are_strings(step_record: StepRecord, event_record: EventRecord) -> None:
    payload = json.loads(to_line(replace(step_record, loss=math.nan, grad_norm=math.inf, loss_sum=-math.inf)))
    assert (payload["loss"], payload["grad_norm"], payload["loss_sum"]) == ("nan", "inf", "-inf")
    payload = json.loads(to_line(replace(event_record, detail={"losses": [1.0, math.nan]})))
    assert payload["detail"] == {"losses": [1.0, "nan"]}


def test_a_float_of_another_library_is_written_as_a_number(step_record: StepRecord) -> None:
    class Double(float):
        def __repr__(self) -> str:
            return "Double()"

    assert parse_line(to_line(replace(step_record, lr=Double(0.125)))) == replace(step_record, lr=0.125)


def test_numbers_of_numpy_are_written_as_numbers(step_record: StepRecord, event_record: EventRecord) -> None:
    step = replace(step_record, position=cast("int", np.int64(64)), loss=cast("float", np.float32("nan")))
    back = parse_line(to_line(step))
    assert isinstance(back, StepRecord)
    assert (type(back.position), back.position) == (int, 64)
    assert back.loss is not None
    assert math.isnan(back.loss)
    event = replace(event_record, detail={"ranks": (np.int32(1), np.float64(0.5), True)})
    assert parse_line(to_line(event)) == replace(event_record, detail={"ranks": [1, 0.5, True]})


def test_a_fraction_in_a_count_is_not_cut_off(step_record: StepRecord) -> None:
    assert '"count":2.5,' in to_line(replace(step_record, count=cast("int", 2.5)))


def test_fields_of_the_future_are_ignored(eval_record: EvalRecord) -> None:
    payload = json.loads(to_line(eval_record)) | {"perplexity": 3.0}
    assert parse_line(json.dumps(payload)) == eval_record


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"type": "weather"}, "unknown record type 'weather'.*known types are run, step, span, eval, event, end"),
        ({"type": None}, "unknown record type None"),
        ({"schema": SCHEMA_VERSION + 1}, "schema 2.*reads up to 1"),
        ({"step": "seven"}, "step = 'seven'"),
        ({"loss": None}, "loss = None"),
        ({"loss": "high"}, "loss = 'high'"),
    ],
)
def test_a_line_that_cannot_be_read_says_why(eval_record: EvalRecord, change: dict[str, Any], text: str) -> None:
    payload = json.loads(to_line(eval_record)) | change
    with pytest.raises(ValueError, match=text):
        parse_line(json.dumps(payload))


def test_missing_fields_are_named(eval_record: EvalRecord) -> None:
    payload = json.loads(to_line(eval_record))
    del payload["loss"], payload["samples"]
    with pytest.raises(ValueError, match="type eval lacks loss, samples"):
        parse_line(json.dumps(payload))


@pytest.mark.parametrize("line", ["", "[1]", "{", '{"schema":1}', '{"type":[]}'])
def test_garbage_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_line(line)


def test_a_file_cut_at_any_byte_gives_its_whole_records(
    tmp_path: Path, run_record: RunRecord, eval_record: EvalRecord, end_record: EndRecord
) -> None:
    records: list[Record] = [run_record, eval_record, replace(end_record, message="é\n")]
    lines = [to_line(record).encode() for record in records]
    ends = [sum(map(len, lines[: number + 1])) for number in range(3)]
    path = tmp_path / "rank-0.jsonl"
    for length in range(ends[-1] + 1):
        path.write_bytes(b"".join(lines)[:length])
        assert list(read_records(path)) == records[: sum(end <= length for end in ends)]


def test_a_damaged_line_inside_is_named(tmp_path: Path, eval_record: EvalRecord) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text(to_line(eval_record) + '{"type":"st\n' + to_line(eval_record))
    with pytest.raises(ValueError, match=r"rank-0\.jsonl, line 2"):
        list(read_records(path))


def _script(*actions: Callable[[], object]) -> Callable[[], bool]:
    """Returns a ``stop`` that carries out one action a look, and is true once all are done."""
    left = iter(actions)

    def stop() -> bool:
        action = next(left, None)
        if action is not None:
            action()
        return action is None

    return stop


def test_following_waits_for_the_file_and_for_whole_lines(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "records" / "rank-0.jsonl"
    first, second = to_line(step_record), to_line(replace(step_record, step=2))
    file: list[Any] = []
    seen: list[Record] = []
    counts: list[int] = []

    def append(text: str) -> None:
        counts.append(len(seen))
        file[0].write(text)

    stop = _script(
        lambda: counts.append(len(seen)),
        path.parent.mkdir,
        lambda: file.append(path.open("w", buffering=1, newline="\n")),
        lambda: file[0].reconfigure(write_through=True),
        lambda: append(first[:20]),
        lambda: append(first[20:-1]),
        lambda: append("\n" + second[:5]),
        lambda: append(second[5:] + first[:9]),
        lambda: counts.append(len(seen)),
    )
    seen.extend(follow_records(path, stop, poll_s=0.0))  # grows as records come, which the script looks at
    file[0].close()
    assert seen == [step_record, replace(step_record, step=2)]
    assert counts == [0, 0, 0, 0, 1, 2]


def test_following_yields_what_was_written_just_before_the_stop(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "rank-0.jsonl"

    def stop() -> bool:
        path.write_text(to_line(step_record))
        return True

    assert list(follow_records(path, stop, poll_s=0.0)) == [step_record]


def test_following_a_writer_in_another_thread(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "rank-0.jsonl"
    records = [replace(step_record, step=step) for step in range(1, 6)]
    was_seen, is_written = Event(), Event()

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for record in records:
                line = to_line(record).encode()
                file.write(line[:40])
                file.write(line[40:])
                assert was_seen.wait(120)  # so each record is found while the file is open and growing
                was_seen.clear()
        is_written.set()

    writer = Thread(target=write)
    writer.start()
    found: list[Record] = []
    for record in _limited(follow_records(path, is_written.is_set, poll_s=0.001)):
        found.append(record)
        was_seen.set()
    writer.join(120)
    assert found == records


def _limited(records: Iterator[Record]) -> Iterator[Record]:
    for number, record in enumerate(records):
        assert number < 100, "records are yielded again and again"
        yield record


def test_records_need_neither_torch_nor_pydantic() -> None:
    code = "import sys, paceline.records.records; print({'torch', 'pydantic'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
