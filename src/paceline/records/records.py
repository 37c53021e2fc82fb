"""What a run writes down: one frozen record per step and per event, one line of JSON each.

    {"type":"step","schema":1,"step":7,"epoch":0.5, ...}\\n

A record is complete when its newline is there: readers leave out the half line that a killed process leaves behind.
Lines are strict JSON: a float that is not finite is the string "nan", "inf" or "-inf", and read back as the float
(inside an event's detail, where no type is declared, it stays the string).

[Note: schema] New fields may join a record at any time, and a reader ignores those that it does not know.
``SCHEMA_VERSION`` rises only when a field changes its meaning or goes away; readers refuse lines of a higher one.
"""

from __future__ import annotations

import io
import json
import math
import numbers
import operator
import time as clock
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, get_args

from pydantic_core import from_json, to_json

from paceline.terminal import excerpt
from paceline.untrusted import is_count, open_regular, parse_json, parse_json_object

SCHEMA_VERSION = 1
_MOST_BYTES = 2**20  # of a line
STEPS = (b'{"type":"step"', b'{"type":"span"')
_MANY = (*STEPS, b'{"type":"comm"', b'{"type":"host"')
_LONG = b"0" * 60  # digits, each taken as a zero: a search by a pattern is slow
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
THINNED = b'"name":"thinned"'

EndStatus = Literal["done", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The first line of an attempt: who writes, where, and what was planned. A resumed run has one per attempt.

    Throughput counts ``unit``, of which a sample has ``units_per_sample``. ``flops_per_sample`` are the whole model's,
    forward and backward; the peaks are those of one device in the dtype ``compute``, of its data sheet and as measured.
    None where nobody knows.
    """

    rank: int
    world_size: int
    local_rank: int
    device: str
    host: str
    pid: int
    python: str
    torch: str
    paceline: str
    num_parameters: int
    strategy: str
    backend: str
    global_batch: int
    microbatch: int
    accumulate: int
    total_steps: int
    time: float
    unit: str = "samples"
    units_per_sample: float = 1.0
    flops_per_sample: float | None = None
    compute: str = ""
    peak_flops: float | None = None
    measured_peak_flops: float | None = None
    num_trained: int | None = None  # of the parameters; None: all of them, as far as is known

    @property
    def is_own_loop(self) -> bool:
        """Whether a loop of the user's own made the batches: no config says how."""
        return self.microbatch == 0


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class StepRecord:
    """One optimizer update, as this rank saw it. Nobody changes it; not frozen, since that takes four times as long.

    ``step`` counts from 1, after the update. ``position`` is the number of samples consumed by all ranks so far; every
    other count is this rank's. ``loss`` is ``loss_sum / count``, or None when the rank had no samples in the step.
    ``comm_s`` is exposed communication: the time that the step waited for other ranks. ``grad_norm`` is that of all
    ranks, before clipping; where it is not finite, the update was left out. ``loss_scale`` is 1 where losses are not
    scaled. ``host_s`` is the time that the host took to issue the step, if the device had nothing left to do by then,
    and 0 if it had; None on a CPU. ``flops_per_s`` and ``mfu`` are this rank's share of the model, and the share of its
    device's peak that this comes to; None where they are not known. ``memory_bytes`` and ``peak_bytes`` are the most
    memory that the rank has held, ``allocated_bytes`` what it held lately, and ``reserved_bytes`` what CUDA's allocator
    kept of the device, free blocks among it; None where nobody asked.
    """

    steps: ClassVar[int] = 1  # that the record stands for

    step: int
    epoch: float
    position: int
    loss: float | None
    loss_sum: float
    count: int
    lr: float
    grad_norm: float | None
    samples: int
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    comm_s: float
    optimizer_s: float
    samples_per_s: float
    memory_bytes: int
    time: float
    loss_scale: float = 1.0
    host_s: float | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def is_skipped(self) -> bool:
        """Whether the update was left out, on all ranks, because a gradient was not finite."""
        return self.grad_norm is not None and not math.isfinite(self.grad_norm)

    @property
    def num_skipped(self) -> int:
        return int(self.is_skipped)


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SpanRecord(StepRecord):
    """So many ``steps`` in a row, up to ``step``, added up by ``thin.py``: what it says of one step holds for them.

    ``loss_sum``, ``count`` and ``samples`` are sums, ``position``, ``epoch`` and ``time`` those of the last step,
    memory the most; anything else is the mean. ``lengths`` has classes of ``step_s``, 5 % wide, with how many steps are
    in each: ``-48:15 -47:1``.
    """

    steps: int  # type: ignore[misc]
    skipped: int
    slowest_s: float
    least_loss: float | None
    most_loss: float | None
    lengths: str

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"record of type span has steps = {self.steps}")

    @property
    def num_skipped(self) -> int:
        return self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One evaluation over all ranks, after ``step`` updates. ``metrics``: perplexity, and those of one's own."""

    step: int
    loss: float
    accuracy: float | None
    samples: int
    seconds: float
    time: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float]:
        """Loss, accuracy where it was counted, and metrics, by name."""
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {"loss": self.loss, **accuracy, **self.metrics}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened at a step: a checkpoint, a resume, a straggler. ``detail`` holds JSON values only."""

    name: str
    step: int
    detail: dict[str, Any]
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """The last line of an attempt that could still speak when it ended."""

    status: EndStatus
    step: int
    seconds: float
    message: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """What the sampler of a host (``host.py``) read at one time. Names are those of OpenTelemetry where it has one.

    ``/`` and the index of the device follow where there are several: ``hw.gpu.utilization/0``, a share of 1. An old
    record is the mean of several ``samples``.
    """

    host: str
    values: dict[str, float]
    time: float
    samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommRecord:
    """The operations of one kind and group that this rank finished since its record before: a ledger in short.

    ``group`` names the mesh axis (``world``, ``data``, ...) and ``ranks`` its size. ``bytes`` are those of the tensors
    (``paceline.comm``'s count, not what an algorithm sends). ``seconds`` add up the time from the start of each
    operation until the compute had its result: where communication hides behind compute, bandwidths are lower bounds.
    """

    step: int
    kind: str
    group: str
    ranks: int
    calls: int
    bytes: int
    seconds: float
    time: float

    @property
    def bandwidth(self) -> float:
        """The bytes of the tensors over the seconds; 0 where none passed."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """The bytes on each link over the seconds: an all-reduce of n ranks sends 2 (n - 1) / n of its bytes."""
        if self.ranks < 2:
            return 0.0
        times = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}.get(self.kind)
        return self.bandwidth * (1.0 if times is None else times * (self.ranks - 1) / self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRecord:
    """What the router of one layer did in training over so many ``steps``, up to ``step``, of all samples together.

    ``choices`` says how often each expert was chosen, and ``dropped`` how many of these were beyond a capacity. Over
    ``tokens`` the rest is a mean: ``entropy`` of the scores as a share of the most that it can be, and ``auxiliary``,
    the auxiliary loss without its weight, 1 where experts are chosen evenly. ``ranks`` hold neighbouring experts each.
    """

    step: int
    layer: str
    steps: int
    tokens: int
    choices: tuple[int, ...]
    dropped: int
    entropy: float
    auxiliary: float
    ranks: int
    time: float

    @property
    def loads(self) -> list[float]:
        """What fell on each expert, over its fair share."""
        fair = sum(self.choices) / max(1, len(self.choices))
        return [count / fair if fair else 0.0 for count in self.choices]


Record = (
    RunRecord | StepRecord | SpanRecord | EvalRecord | EventRecord | EndRecord | HostRecord | CommRecord | ExpertsRecord
)


def to_line(record: Record) -> str:
    """Writes a record as a line of strict JSON; pydantic writes a step's finite numbers in an eighth of the time."""
    form = _FORMS_BY_CLASS[type(record)]
    values = form.values(record)
    if form is _STEP_FORM:
        numbers = to_json(values, fallback=strict_json)
        if b"N" not in numbers and b"I" not in numbers:  # NaN and Infinity, which JSON has not
            return (_STEP_LINE % tuple(numbers[1:-1].split(b","))).decode()
    payload = dict(zip(form.keys, (form.name, SCHEMA_VERSION, *values), strict=True))
    return _ENCODE(strict_json(payload)) + "\n"


def parse_line(line: str | bytes) -> Record:
    """Reads one line back. Raises ValueError for another JSON value, type or schema, and where a field is missing."""
    # Of those that are many a shorter way will do: they are short, and have no long numbers.
    is_many = isinstance(line, bytes) and line.startswith(_MANY) and len(line) < 2048
    is_plain = is_many and _LONG not in line.translate(_AS_ZEROS)
    payload = from_json(line) if is_plain else parse_json(line, _MOST_BYTES)
    if not isinstance(payload, dict):
        raise ValueError(f"a record is a JSON object, not {_excerpt(line)}")
    kind = payload.get("type")
    form = _FORMS_BY_NAME.get(str(kind))
    if form is None:
        known = ", ".join(_FORMS_BY_NAME)
        raise ValueError(f"unknown record type {kind!r} in {_excerpt(line)}; known types are {known}")
    schema = payload.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION:
        what = (
            f"record of type {form.name} has schema {schema!r}, this version of Paceline reads up to {SCHEMA_VERSION}"
        )
        raise ValueError(f"{what}; read it with the version that wrote it, or a newer one")
    return form.read(payload)


def read_records(path: Path) -> Iterator[Record]:
    """Yields the complete records of a file. Raises ValueError, with file and line, if one cannot be read."""
    for number, line in enumerate(GrowingFile(path).lines(), start=1):
        try:
            yield parse_line(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error


def follow_records(path: Path, stop: Callable[[], bool], poll_s: float = 0.2) -> Iterator[Record]:
    """Waits for a file and yields its records, and those to come, until ``stop()`` is true: all written before that."""
    file = GrowingFile(path)
    while True:
        is_last_look = stop()  # asked before reading, so that nothing slips in between
        if path.exists():
            yield from map(parse_line, file.lines())
        if is_last_look:
            return
        clock.sleep(poll_s)


def strict_json(value: Any) -> Any:
    """Returns the value with numbers that JSON can hold, at any depth: plain ones, and texts for what is not finite."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else repr(number)
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


class GrowingFile:
    """A file of records that is read as it grows, from ``offset`` on.

    Opened anew for each look: on network file systems, opening is what fetches another host's writes. A file whose
    older records were added up (``thin.py``) is shorter than before, and says in its second line how much: reading goes
    on where it was, or behind what was added up.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self._mark = b""
        if offset:
            with open_regular(path) as file:
                self._mark = thinned_mark(file)

    def lines(self) -> Iterator[bytes]:
        """Yields each line that has come since and ends in a newline. Raises OSError, or ValueError for a long one."""
        with open_regular(self.path) as raw, io.BufferedReader(raw) as file:
            if (mark := thinned_mark(file)) != self._mark and self.offset:
                gone = marked(mark, "removed") - len(mark) - marked(self._mark, "removed") + len(self._mark)
                self.offset = max(marked(mark, "body") + len(mark), self.offset - gone) if mark else 0
            self._mark = mark
            file.seek(self.offset)
            while line := file.readline(_MOST_BYTES + 1):
                if not line.endswith(b"\n"):
                    if len(line) > _MOST_BYTES:
                        what = f"{self.path} has a line of more than {_MOST_BYTES:,} bytes, and a record has less"
                        raise ValueError(what)
                    return
                self.offset += len(line)
                yield line


def thinned_mark(file: IO[bytes]) -> bytes:
    """Returns the second line of a file of records if it says that older ones were added up, else nothing."""
    file.seek(0)
    file.readline(_MOST_BYTES)
    line = file.readline(_MOST_BYTES)
    return line if THINNED in line[:200] else b""


def marked(mark: bytes, name: str) -> int:
    """Returns a number of the mark of a file: how many bytes were ``removed``, how many the added-up ``body`` has."""
    detail = parse_json_object(mark).get("detail") if mark else None
    found = detail.get(name) if isinstance(detail, dict) else None
    return found if is_count(found) else 0


def _excerpt(line: str | bytes) -> str:
    text = (line if isinstance(line, str) else line.decode("utf-8", "replace")).strip()
    return repr(excerpt(text, 80))


class _Form:
    """How one record class looks as JSON; made once a class, so that writing a step costs microseconds."""

    def __init__(self, record_class: type[Record]) -> None:
        declared = fields(record_class)
        self.name, self.record_class = record_class.__name__.removesuffix("Record").lower(), record_class
        self.keys = ("type", "schema", *(each.name for each in declared))
        self.values: Callable[[Record], tuple[Any, ...]] = operator.attrgetter(*(each.name for each in declared))
        # Annotations are strings here (see the __future__ import), which is all that is needed to pick a reader.
        kinds = {each.name: str(each.type) for each in declared}
        self._readers = tuple(
            (name, _PLAIN.get(kind.removesuffix(" | None")), _READERS.get(kind, lambda value: value))
            for name, kind in kinds.items()
        )
        self._needed = [each.name for each in declared if each.default is each.default_factory is MISSING]

    def read(self, payload: dict[str, Any]) -> Record:
        if missing := [name for name in self._needed if name not in payload]:
            raise ValueError(f"record of type {self.name} lacks {', '.join(missing)}")
        values: dict[str, Any] = {}
        for name, plain, reader in self._readers:
            if type(value := payload.get(name)) is plain:
                values[name] = value
            elif name in payload:
                try:
                    values[name] = reader(value)
                except (TypeError, ValueError, OverflowError, AttributeError):
                    shown = repr(value)[:80]
                    raise ValueError(f"record of type {self.name} has {name} = {shown}") from None
        return self.record_class(**values)


_END_STATUSES = get_args(EndStatus)
_PLAIN = {"int": int, "float": float, "str": str}  # values of these types need no reader: most of a step are such
_READERS: dict[str, Callable[[Any], Any]] = {
    "EndStatus": lambda value: _END_STATUSES[_END_STATUSES.index(value)],
    "int": operator.index,
    "int | None": lambda value: None if value is None else operator.index(value),
    "float": float,
    "float | None": lambda value: None if value is None else float(value),
    "str": str,
    "tuple[int, ...]": lambda value: tuple(map(operator.index, value)),
    "dict[str, Any]": dict,
    "dict[str, float]": lambda value: {str(name): float(number) for name, number in value.items()},
}

_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode

_FORMS_BY_CLASS = {record_class: _Form(record_class) for record_class in get_args(Record)}
_FORMS_BY_NAME = {form.name: form for form in _FORMS_BY_CLASS.values()}
_STEP_FORM = _FORMS_BY_NAME["step"]
_NUMBERS = ",".join(f'"{key}":%b' for key in _STEP_FORM.keys[2:])
_STEP_LINE = f'{{"type":"step","schema":{SCHEMA_VERSION},{_NUMBERS}}}\n'.encode()
