"""Objects, numbers, means and clocks between ranks, built on the communicator's verbs: not for the step.

An object travels as bytes that are only data: what another rank sends is rebuilt, and nothing of it is run.

    8 bytes, how long the text is; text (JSON); what the text refers to by place and length (tensors, arrays, bytes)

Plain data travels: numbers, texts, containers, tensors, arrays, paths, enums, dataclasses, named tuples, configs, our
errors. Of classes, only those are rebuilt that this process has loaded already, without a call of their constructors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch

from paceline.comm.base import Communicator, ReduceOp, Work, control_device
from paceline.errors import CommunicationError, PacelineError, UsageError

_LENGTH_BYTES = 8
_PLAIN: tuple[Any, ...] = (str, int, float, list, tuple, dict, set, frozenset)


def to_bytes(value: object) -> bytes:
    """Returns a value as bytes. Raises UsageError for what is not plain data."""
    writer = _Writer()
    text = json.dumps(writer.write(value), separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "big"), text, *writer.parts])


def from_bytes(content: bytes) -> Any:
    """Returns the value of some bytes. Raises CommunicationError for what is none."""
    length = int.from_bytes(content[:_LENGTH_BYTES], "big")
    start = _LENGTH_BYTES + length
    try:
        return _Reader(memoryview(content)[start:]).read(json.loads(content[_LENGTH_BYTES:start]))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, RuntimeError) as error:
        raise CommunicationError(f"what another rank sent is damaged: {error}") from error


class _Writer:
    """Describes values in JSON: texts and numbers as they are, all else as an object whose one key says its kind."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._place = 0

    def write(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return self.all(value)
        for kind, (is_one, describe, _) in _KINDS.items():
            if is_one(value):
                return {kind: describe(self, value)}
        for base in _PLAIN:
            if isinstance(value, base):
                return self.write(base(value))  # as its plain kind
        what = f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks"
        rule = "plain data can: numbers, texts, containers, tensors, arrays, paths, dataclasses, named tuples, enums"
        raise UsageError(f"{what}\n  {rule}")

    def all(self, values: Any) -> list[Any]:
        return [self.write(each) for each in values]

    def pairs(self, values: dict[Any, Any]) -> list[Any]:
        return [self.all(pair) for pair in values.items()]

    def part(self, content: bytes) -> list[int]:
        self.parts.append(content)
        self._place += len(content)
        return [self._place - len(content), len(content)]

    def tensor(self, value: torch.Tensor) -> list[Any]:
        flat = value.detach().cpu().contiguous().view(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return [str(value.dtype).removeprefix("torch."), list(value.shape), *self.part(content)]

    def array(self, value: Any) -> list[Any]:
        found = np.asarray(value)
        if found.dtype.hasobject:
            raise UsageError("an array of objects cannot be sent to other ranks")
        return [found.dtype.str, list(found.shape), *self.part(found.tobytes())]

    def record(self, value: Any) -> list[Any]:
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [_name(type(value)), {name: self.write(getattr(value, name)) for name in fields}]

    def model(self, value: Any) -> list[Any]:
        return [_name(type(value)), self.write(value.__getstate__())]

    def error(self, value: PacelineError) -> list[Any]:
        return [_name(type(value)), self.all(value.args), self.write(value.__dict__)]


class _Reader:
    def __init__(self, parts: memoryview) -> None:
        self._parts = parts

    def read(self, text: Any) -> Any:
        if isinstance(text, list):
            return [self.read(each) for each in text]
        if not isinstance(text, dict):
            return text
        ((kind, content),) = text.items()
        return _KINDS[kind][2](self, content)

    def pairs(self, content: Any) -> dict[Any, Any]:
        return {self.read(key): self.read(each) for key, each in content}

    def part(self, place: int, length: int) -> bytes:
        if not 0 <= place <= place + length <= len(self._parts):
            raise ValueError("a part lies outside")
        return bytes(self._parts[place : place + length])

    def tensor(self, content: Any) -> torch.Tensor:
        name, shape, place, length = content
        dtype, raw = _dtype(name), bytearray(self.part(place, length))
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.view(shape)

    def array(self, content: Any) -> Any:
        dtype, shape, place, length = content
        return np.frombuffer(self.part(place, length), dtype=np.dtype(dtype)).reshape(shape).copy()

    def record(self, content: Any) -> Any:
        cls, fields = _class(content[0], dataclasses.is_dataclass), content[1]
        if not fields.keys() <= {field.name for field in dataclasses.fields(cls)}:
            raise TypeError(f"{content[0]} has other fields")
        made = object.__new__(cls)
        for name, each in fields.items():
            object.__setattr__(made, name, self.read(each))
        return made

    def model(self, content: Any) -> Any:
        cls = _class(content[0], _is_model)
        made = cls.__new__(cls)
        made.__setstate__(self.read(content[1]))
        return made

    def error(self, content: Any) -> Any:
        name, arguments, details = content
        cls = _class(name, lambda found: issubclass(found, PacelineError))
        made = cls.__new__(cls)
        made.args = tuple(self.read(arguments))
        made.__dict__.update(self.read(details))
        return made

    def named(self, content: Any) -> Any:
        cls = _class(content[0], lambda found: issubclass(found, tuple) and hasattr(found, "_fields"))
        return tuple.__new__(cls, self.read(content[1]))

    def enum(self, content: Any) -> Any:
        return _class(content[0], lambda found: issubclass(found, Enum))[content[1]]


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class(name: str, is_right: Callable[[type], bool]) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not is_right(found):
        raise TypeError(f"this rank has no {name}")
    return found


def _is_model(cls: type) -> bool:
    """Says whether a class is a section of our config, without loading what those are made with."""
    return cls.__module__.startswith("paceline.") and hasattr(cls, "__pydantic_validator__")


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _is(cls: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, cls)


def _is_just(cls: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is cls


# By kind: which values are of it, how a writer describes them, how a reader rebuilds them.
_Kind: TypeAlias = tuple[Callable[[Any], bool], Callable[[_Writer, Any], Any], Callable[[_Reader, Any], Any]]
_KINDS: dict[str, _Kind] = {
    "enum": (_is(Enum), lambda _, value: [_name(type(value)), value.name], _Reader.enum),
    "tensor": (_is(torch.Tensor), _Writer.tensor, _Reader.tensor),
    "array": (_is(np.ndarray), _Writer.array, _Reader.array),
    "scalar": (_is(np.generic), _Writer.array, lambda reader, content: reader.array(content)[()]),
    "named": (_is_named, lambda writer, value: [_name(type(value)), writer.all(value)], _Reader.named),
    "shape": (_is(torch.Size), lambda _, value: list(value), lambda _, content: torch.Size(content)),
    "tuple": (_is_just(tuple), _Writer.all, lambda reader, content: tuple(reader.read(content))),
    "ordered": (_is_just(OrderedDict), _Writer.pairs, lambda reader, content: OrderedDict(reader.pairs(content))),
    "dict": (_is_just(dict), _Writer.pairs, _Reader.pairs),
    "set": (_is_just(set), _Writer.all, lambda reader, content: set(reader.read(content))),
    "frozenset": (_is_just(frozenset), _Writer.all, lambda reader, content: frozenset(reader.read(content))),
    "bytes": (_is_just(bytes), _Writer.part, lambda reader, content: reader.part(*content)),
    "path": (_is(Path), lambda _, value: str(value), lambda _, content: Path(content)),
    "dtype": (_is(torch.dtype), lambda _, value: str(value).removeprefix("torch."), lambda _, name: _dtype(name)),
    "device": (_is(torch.device), lambda _, value: str(value), lambda _, content: torch.device(content)),
    "complex": (_is_just(complex), lambda _, value: [value.real, value.imag], lambda _, content: complex(*content)),
    "range": (_is_just(range), lambda _, value: [value.start, value.stop, value.step], lambda _, ends: range(*ends)),
    "error": (_is(PacelineError), _Writer.error, _Reader.error),
    "record": (lambda value: dataclasses.is_dataclass(type(value)), _Writer.record, _Reader.record),
    "model": (lambda value: _is_model(type(value)), _Writer.model, _Reader.model),
}

T = TypeVar("T")


def gather_objects(comm: Communicator, value: T) -> list[T]:
    """Returns every rank's ``value`` in rank order, on every rank. Two all-gathers."""
    payload, length = _to_bytes(value, comm)
    lengths = _empty(comm, comm.size, torch.int64)
    comm.all_gather(lengths, length).wait()
    sizes = [int(size) for size in lengths.tolist()]
    longest = max(sizes)
    padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
    everything = _empty(comm, comm.size * longest)
    comm.all_gather(everything, padded).wait()
    return [_from_bytes(row[:size]) for row, size in zip(everything.cpu().view(comm.size, longest), sizes, strict=True)]


def broadcast_object(comm: Communicator, value: T, source: int = 0) -> T:
    """Returns the ``value`` of rank ``source`` on every rank. Two broadcasts."""
    if comm.rank == source:
        payload, length = _to_bytes(value, comm)
    else:
        length = torch.zeros(1, dtype=torch.int64, device=control_device(comm))
    comm.broadcast(length, source).wait()
    if comm.rank != source:
        payload = _empty(comm, int(length.item()))
    comm.broadcast(payload, source).wait()
    result: T = _from_bytes(payload)
    return result


def reduce_number(comm: Communicator, value: float, op: ReduceOp) -> float:
    """Returns the reduction of one number over all ranks, which all call it. One all-reduce; a sync point."""
    number = torch.tensor([value], dtype=torch.float64, device=control_device(comm))
    comm.all_reduce(number, op).wait()
    return float(number.item())


def ask_first_rank(comm: Communicator, function: Callable[[], T]) -> T:
    """Calls ``function`` on rank 0; every rank returns what it returned, or raises the PacelineError that it raised."""
    value: T | None = None
    problem: PacelineError | None = None
    if comm.rank == 0:
        try:
            value = function()
        except PacelineError as error:
            problem = error
    value, problem = broadcast_object(comm, (value, problem))
    if problem is not None:
        raise problem
    return cast(T, value)


def send_object(comm: Communicator, value: object, to: int, tag: int = 0) -> list[Work]:
    """Sends ``value`` to one rank, which calls ``receive_object``; returns the works under way."""
    payload, length = _to_bytes(value, comm)
    return [comm.send(length, to, tag), comm.send(payload, to, tag)]


def receive_object(comm: Communicator, source: int, tag: int = 0) -> Any:
    comm.recv(length := _empty(comm, 1, torch.int64), source, tag).wait()
    comm.recv(payload := _empty(comm, int(length.item())), source, tag).wait()
    return _from_bytes(payload)


def _empty(comm: Communicator, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=control_device(comm))


def _to_bytes(value: object, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    raw = np.frombuffer(to_bytes(value), dtype=np.uint8).copy()
    device = control_device(comm)
    return torch.from_numpy(raw).to(device), torch.tensor([len(raw)], dtype=torch.int64, device=device)


def _from_bytes(payload: torch.Tensor) -> Any:
    return from_bytes(payload.cpu().numpy().tobytes())


def mean(total: float | torch.Tensor, count: float | torch.Tensor, comm: Communicator) -> float:
    """Returns the sum of ``total`` over all ranks by the sum of ``count``: the same number on every rank.

    ``total`` is a *sum* over this rank's samples (or tokens), of which there are ``count``, perhaps none. All ranks
    call it. Added up in float64. Raises UsageError where no rank has a sample, or what is given is not one number.
    """
    values = [torch.as_tensor(value, dtype=torch.float64).detach() for value in (total, count)]
    if any(value.numel() != 1 for value in values):
        what = f"a mean of tensors of the shapes {list(values[0].shape)} and {list(values[1].shape)}"
        rule = "a total and a count are one number each"
        raise UsageError(f"{what}\n  {rule}\n  sum over the samples first: total=losses.sum()")
    sums = torch.stack([value.reshape(()).to(control_device(comm)) for value in values])
    comm.all_reduce(sums).wait()
    added, samples = sums.tolist()
    if samples == 0 or math.isnan(samples):
        fix = "check that the loader has batches, and that count is added up"
        raise UsageError(f"a mean over {samples:g} samples of {comm.size} ranks\n  it needs at least one\n  {fix}")
    return float(added / samples)


def gather(rows: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Returns the rows of all ranks, one rank's after the other's: the same tensor on every rank.

    Ranks may have different numbers of rows, or none; all else of the shape is the same. Rows of a batch that
    ``paceline.loader`` has shared out come in the order that one process has. All ranks call it.
    """
    rows = rows.detach().contiguous()
    if rows.ndim == 0:
        rows = rows.reshape(1)
    told = gather_objects(comm, (list(rows.shape), str(rows.dtype)))
    if any(shape[1:] != told[0][0][1:] or dtype != told[0][1] for shape, dtype in told):
        shapes = ", ".join(f"{shape} of {dtype}" for shape, dtype in told[:4])
        what = f"gather() of tensors of the shapes {shapes}"
        rule = "ranks may differ in the number of rows alone"
        raise UsageError(f"{what}\n  {rule}\n  give what one process would join along the first dim")
    counts = [shape[0] for shape, _ in told]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    everything = rows.new_empty(comm.size, *padded.shape)
    comm.all_gather(everything, padded).wait()
    return torch.cat([everything[rank, :count] for rank, count in enumerate(counts)])


_ROUNDS = 10


def clock_offset(comm: Communicator, read: Callable[[], float] = time.time) -> tuple[float, float]:
    """Returns how far this rank's clock is ahead of rank 0's, and the largest error. All call it; 20 messages each."""
    best = (float("inf"), 0.0)
    ball = torch.zeros(1, dtype=torch.float64, device=comm.device)
    for rank in range(1, comm.size):
        for _ in range(_ROUNDS):
            if comm.rank == 0:
                comm.recv(ball, rank).wait()
                ball.fill_(read())
                comm.send(ball, rank).wait()
            elif comm.rank == rank:
                start = read()
                comm.send(ball, 0).wait()
                comm.recv(ball, 0).wait()
                reading, end = float(ball.item()), read()
                best = min(best, (end - start, (start + end) / 2 - reading))
    return (0.0, 0.0) if comm.rank == 0 else (best[1], best[0] / 2)
