"""Brings batches to a device while it computes on earlier ones.

    thread    | read 3  | read 4  |              data in memory alone: read ahead, straight into pinned memory
    copies         | copy 3  | copy 4  |         a stream of its own
    compute   | step 1       | step 2       | step 3

A batch is handed out as soon as its copy is issued: what the step computes waits for the copy on the device, and the
host waits for nothing. Where the copy ends before the step begins, feeding costs a step nothing.

Only data in memory is read by the thread. To read it draws no random numbers and runs no code of a user, so nobody can
tell when it was read. Worker processes run ahead by themselves; and what a rank reads itself, it reads when it is
asked for, because an augmentation draws from the rank's own generators, whose states are in checkpoints.

[Note: lifetime] Batches are allocated on the stream of the copies, and read on that of the step: ``record_stream``
keeps the memory of one that is dropped until the step has read it. The host stays at most ``2 x ahead`` batches in
front of the device, so that only so many are alive. Pinned memory is torch's, which reuses it after the copy has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_leaves, tree_map

from paceline.data.datasets import Batch
from paceline.data.fetch import BatchRequest, BatchSource

T = TypeVar("T")
_GATHER_THREADS = 4  # to gather is bound by memory, and takes no cores from whoever starts kernels


class FeedSource:
    """Reads batches from another source, and hands them out on a device, in the same order.

    ``ahead`` is how many batches may be read before they are asked for, where ``reads_ahead``.
    """

    def __init__(self, source: BatchSource, device: torch.device, *, reads_ahead: bool, ahead: int) -> None:
        self._source = source
        self._device = device
        self._reads_ahead = reads_ahead
        self._ahead = ahead
        self._streams: WeakSet[Generator[Batch, None, None]] = WeakSet()  # those that somebody still reads

    def stream(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        stream = self._feed(requests)
        self._streams.add(stream)
        return stream

    def close(self) -> None:
        for stream in list(self._streams):
            stream.close()
        self._source.close()

    def _feed(self, requests: Iterator[BatchRequest]) -> Generator[Batch, None, None]:
        batches = self._source.stream(requests)
        if self._device.type != "cuda":
            yield from read_ahead(batches, self._ahead) if self._reads_ahead else batches
            return
        copies = _Copies(self._device, limit=2 * self._ahead)
        sent = map(copies.send, batches)
        if not self._reads_ahead:
            for each in sent:
                yield copies.hand_out(each)
            return
        ahead = read_ahead(sent, self._ahead, partial(_prepare_thread, self._device, torch.get_num_threads()))
        try:
            for each in ahead:
                yield copies.hand_out(each)
        finally:
            ahead.close()


def read_ahead(items: Iterator[T], ahead: int, prepare: Callable[[], None] = lambda: None) -> Generator[T, None, None]:
    """Yields the items in order, while a thread reads up to ``ahead`` of those that come after.

    An exception of the iterator is raised where its item would have come. The thread ends with the generator: when it
    is exhausted, closed or dropped. It calls ``prepare`` first.
    """
    ready: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()  # an item, what was raised, or the end
    room = threading.Semaphore(ahead)
    is_closed = threading.Event()

    def read() -> None:
        try:
            prepare()
            while room.acquire() and not is_closed.is_set():
                ready.put((next(items),))
        except StopIteration:
            ready.put(None)
        except BaseException as error:  # raised again in the thread that asks
            ready.put(error)

    thread = threading.Thread(target=read, name="paceline-feed", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            room.release()
            if isinstance(found, BaseException):
                raise found
            yield found[0]
    finally:
        is_closed.set()
        room.release()
        thread.join()


def _prepare_thread(device: torch.device, threads: int) -> None:
    """Makes a new thread work for a device, with few of the ``threads`` that the rank computes with."""
    if device.index is not None:
        torch.cuda.set_device(device)
    if threads > _GATHER_THREADS:
        torch.set_num_threads(_GATHER_THREADS)  # of operators that this thread runs on the host


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch on the device, and the end of its copy."""

    batch: Batch
    copied: torch.cuda.Event


class _Copies:
    """Copies batches to a CUDA device on a stream of its own. See [Note: lifetime]."""

    def __init__(self, device: torch.device, *, limit: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._limit = limit
        self._handed_out: deque[torch.cuda.Event] = deque()

    def send(self, batch: Batch) -> _Sent:
        """Starts the copy of a batch. Any thread may call it."""
        with torch.cuda.stream(self._stream):
            try:
                placed = tree_map(self._copy, batch)
            except torch.OutOfMemoryError:
                placed = batch  # the step copies it when its turn comes, and knows what to do without memory
            return _Sent(placed, self._stream.record_event())

    def hand_out(self, sent: _Sent) -> Batch:
        """Returns the batch for what the caller's stream computes from here on."""
        compute = torch.cuda.current_stream(self._device)
        # Before the step waits for the copy: this event says that the device is done with all earlier batches.
        passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        passed.record(compute)
        self._handed_out.append(passed)
        compute.wait_event(sent.copied)
        for leaf in tree_leaves(sent.batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(compute)
        if len(self._handed_out) > self._limit:
            self._handed_out.popleft().synchronize()
        return sent.batch

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if value.layout is torch.strided and not value.is_pinned():
            value = value.pin_memory()
        return value.to(self._device, non_blocking=True)
