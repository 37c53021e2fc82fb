"""Brings batches to a device while it computes on earlier ones.

    thread    | read 3  | read 4  |              data in memory alone: read ahead, straight into pinned memory
    copies         | copy 3  | copy 4  |         a stream of its own
    compute   | step 1       | step 2       | step 3

A batch is handed out as soon as its copy is issued: the step waits for the copy on the device, the host for nothing.

Only data in memory is read by the thread: that draws no random numbers and runs no code of a user. What else a rank
reads itself, it reads when it is asked for: an augmentation draws from the rank's generators, which checkpoints hold.

[Note: lifetime] Batches are allocated on the stream of the copies, and read on that of the step: ``record_stream``
keeps the memory of one that is dropped until the step has read it. The host stays at most ``2 x ahead`` batches in
front of the device, so that only so many are alive. Pinned memory is torch's, which reuses it after the copy has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
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
    """Hands out batches of another source on a device; if ``reads_ahead``, up to ``ahead`` are read early."""

    def __init__(self, source: BatchSource, device: torch.device, *, reads_ahead: bool, ahead: int) -> None:
        self._source, self._device, self._reads_ahead, self._ahead = source, device, reads_ahead, ahead
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
            yield from map(copies.hand_out, sent)
            return
        prepare = partial(_prepare_thread, self._device, torch.get_num_threads())
        with contextlib.closing(read_ahead(sent, self._ahead, prepare)) as ahead:
            yield from map(copies.hand_out, ahead)


def read_ahead(items: Iterator[T], ahead: int, prepare: Callable[[], None] = lambda: None) -> Generator[T, None, None]:
    """Yields the items in order, while a thread, which calls ``prepare`` first, reads up to ``ahead`` of the next.

    An exception is raised where its item would have come. The thread ends with the generator, however that ends.
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


class _Copies:
    """Copies batches to a CUDA device on a stream of its own. See [Note: lifetime]."""

    def __init__(self, device: torch.device, *, limit: int) -> None:
        self._device, self._limit = device, limit
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handed_out: deque[torch.cuda.Event] = deque()

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        """Starts the copy of a batch; returns it with the end of the copy. Any thread may call it."""
        with torch.cuda.stream(self._stream):
            try:
                placed = tree_map(self._copy, batch)
            except torch.OutOfMemoryError:
                placed = batch  # the step copies it when its turn comes, and knows what to do without memory
            return placed, self._stream.record_event()

    def hand_out(self, sent: tuple[Batch, torch.cuda.Event]) -> Batch:
        """Returns the batch for what the caller's stream computes from here on."""
        batch, copied = sent
        compute = torch.cuda.current_stream(self._device)
        # Before the step waits for the copy: this event says that the device is done with all earlier batches.
        passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        passed.record(compute)
        self._handed_out.append(passed)
        compute.wait_event(copied)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(compute)
        if len(self._handed_out) > self._limit:
            self._handed_out.popleft().synchronize()
        return batch

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if value.layout is torch.strided and not value.is_pinned():
            value = value.pin_memory()
        return value.to(self._device, non_blocking=True)
