"""Samples that come one after another, such as of an ``IterableDataset``: ``data.kind: stream``.

    stream   | kept for evaluation | sample 0 | 1 | 2 | ...          of the run, epoch after epoch
    step                             rank 0's share, rank 1's share   as of any other data

Every rank reads the same stream, takes its share of each batch, and passes over the rest. So the position of a run is
one number, the samples consumed: to resume is to pass over that many, if the iterator has it by ``skip(count)``, which
returns how many it passed over: fewer at its end, which each rank finds by itself.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from paceline.data.checked import SampleRules, check_own
from paceline.data.datasets import Batch, EpochDataset
from paceline.data.fetch import join_samples
from paceline.data.order import Indices
from paceline.errors import BadSampleError, DataError
from paceline.imports import import_from_path

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """Where a stream comes from. Its first ``kept`` samples are for evaluation."""

    factory: str
    args: dict[str, Any]
    kept: int = 0
    on_end: Literal["stop", "repeat"] = "stop"

    @property
    def name(self) -> str:
        return f"the stream of data.factory = {self.factory!r}"

    def open(self) -> Any:
        what = f"data.factory = {self.factory!r}"
        made = call_factory(import_from_path(self.factory, "data.factory"), self.args, what)
        if not hasattr(made, "__iter__") or isinstance(made, str | bytes | dict):
            rule = "the factory of a stream returns an iterable of samples, such as a generator or an IterableDataset"
            raise DataError(f"{what} returned a {type(made).__name__}\n  {rule}")
        return made


class StreamSamples(EpochDataset):
    """``length`` samples of a stream in each epoch: the next ones, or those that are kept for evaluation."""

    def __init__(
        self, source: StreamSource, length: int, *, is_kept: bool = False, rules: SampleRules | None = None
    ) -> None:
        self.source, self.length, self.is_kept, self.rules = source, length, is_kept, rules
        self._cursor = _Cursor(source, is_kept=is_kept)

    def __len__(self) -> int:
        return self.length

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cursor": _Cursor(self.source, is_kept=self.is_kept)}  # each process opens its own

    def read(self, indices: Indices, epoch: int) -> Batch:
        numbers = (indices if self.is_kept else indices + epoch * self.length).tolist()
        batch = join_samples([self._cursor.read(number) for number in numbers], numbers)
        if self.rules is not None:
            check_own(batch, self.rules, self.source.name, numbers)
        return batch


class _Cursor:
    """A place in the passes over a stream. Numbers that rise are read on; a smaller one begins from the start."""

    def __init__(self, source: StreamSource, *, is_kept: bool) -> None:
        self._source, self._is_kept = source, is_kept
        self._kept = 0 if is_kept else source.kept  # that each pass begins with, and that are not counted
        self._samples: Iterator[Any] | None = None
        self._first = self._place = 0
        self._begin(0)

    def read(self, number: int) -> Any:
        if number < self._first + self._place:
            self._begin(0)
        while True:
            if self._samples is None:
                self._samples = iter(self._source.open())
            self._pass_over(self._samples, number - self._first - self._place)
            if self._first + self._place == number:
                sample = self._ask(next, self._samples, _END)
                if sample is not _END:
                    self._place += 1
                    return sample
            self._end(number)

    def _begin(self, number: int) -> None:
        """Begins a pass, whose first sample after those that are kept has this number."""
        self._samples = None
        self._first = number - self._kept
        self._place = 0  # samples of this pass that are behind

    def _pass_over(self, samples: Iterator[Any], count: int) -> None:
        skip = getattr(samples, "skip", None)
        if skip is None or not count:
            for _ in range(count):
                if self._ask(next, samples, _END) is _END:
                    return
                self._place += 1
            return
        done = self._ask(skip, count)
        if not isinstance(done, int) or not 0 <= done <= count:
            rule = "skip(count) of a stream's iterator passes over samples and returns how many: fewer at its end"
            raise DataError(f"{self._source.name}: skip({count}) returned {done!r}\n  {rule}")
        self._place += done

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            what = f"{self._source.name} failed after {self._place} samples: {type(error).__name__}: {error}"
            raise DataError(f"{what}\n  a stream yields samples until its end") from error

    def _end(self, number: int) -> None:
        """Begins the next pass, or raises where the policy says so, or nothing is there to read: no restart helps."""
        ended = f"{self._source.name} ended after {self._place} samples"
        if self._is_kept or self._place <= self._kept:
            rule = "the first ones are kept for evaluation, and a run trains on those that follow"
            fix = "bring more data, or lower data.eval_samples"
            raise BadSampleError(f"{ended}, and data.eval_samples = {self._source.kept}\n  {rule}\n  {fix}")
        if self._source.on_end == "stop":
            rule = "data.on_end = stop: the run ends where the stream ends"
            fix = "bring more data, lower train.steps, or begin the stream anew at its end: data.on_end = repeat"
            raise BadSampleError(f"{ended}, where sample {number} of the run was to follow\n  {rule}\n  {fix}")
        warnings.warn(f"{ended}; it begins anew", stacklevel=2)
        self._begin(self._first + self._place)


def call_factory(factory: Callable[..., Any], args: dict[str, Any], what: str) -> Any:
    """Calls the user's factory. Only arguments that do not fit are our business; its own errors pass as they are."""
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        rule = "data.args are its keyword arguments"
        fix = "give those that it needs, and no others"
        raise DataError(f"{what} cannot be called with data.args = {args}: {error}\n  {rule}\n  {fix}") from error
    except ValueError:  # a factory written in C may have no signature; the call itself will tell
        pass
    return factory(**args)
