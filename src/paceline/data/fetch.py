"""How a batch is read: in this process, or ahead of time by worker processes, in the order of the requests.

With workers, a ``DataLoader`` gets the requests as its sampler, in one iteration for all epochs. An exception in a
worker travels as a value: re-raised by the ``DataLoader`` it would lose its cause, and some cannot be rebuilt. Each
request seeds its worker's random states from (seed, epoch, first sample): random augmentation does not depend on the
number of workers or on a resume, but on microbatches; without workers a rank draws from its own generators.

``FeedSource`` brings batches to a device while it computes on earlier ones; the host waits for no copy:

    thread    | read 3  | read 4  |              data in memory alone: no random numbers, no code of a user
    copies         | copy 3  | copy 4  |         a stream of its own
    compute   | step 1       | step 2       | step 3

[Note: lifetime] Batches are allocated on the stream of the copies, and read on that of the step: ``record_stream``
keeps the memory of one that is dropped until the step has read it. At most ``2 x ahead`` batches are alive.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import pickle
import random
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakSet

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Sampler, TensorDataset, default_collate, get_worker_info

from paceline.data.checked import CheckedSamples, check_own
from paceline.data.datasets import Batch, EpochDataset, InMemoryDataset, MapDataset, SampleSubset, gather
from paceline.data.order import Indices, mix_seed
from paceline.errors import BadSampleError, DataError, UsageError

WorkerStart: TypeAlias = Literal["auto", "fork", "spawn", "forkserver"]
_NUM_NAMED_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How batches are read. With a ``device`` they are brought there before they are asked for."""

    workers: int = 0
    prefetch: int = 2
    worker_start: WorkerStart = "auto"
    pin_memory: bool = False
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if self.workers < 0 or self.prefetch < 1:
            rule = "there are 0 or more workers, and each reads at least 1 batch ahead"
            raise UsageError(f"workers = {self.workers}, prefetch = {self.prefetch}\n  {rule}")
        if self.pin_memory and not torch.cuda.is_available():
            rule = "pinned memory is for copies to a GPU"
            fix = "set pin_memory = (device.type == 'cuda')"
            raise UsageError(f"pin_memory = True without a CUDA device\n  {rule}\n  {fix}")


class BatchRequest(NamedTuple):
    """The samples of one microbatch, at least one, and the epoch that they are read in."""

    indices: Indices
    epoch: int


class BatchSource(Protocol):
    def stream(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        """Yields the batch of each request, in order. A new stream ends the one before."""

    def close(self) -> None:
        """Ends the workers, if any; a later stream starts new ones. Safe to call twice."""


class DirectSource:
    """Reads batches in this process; data in memory into pinned memory, if ``pinned``."""

    def __init__(self, dataset: MapDataset, *, pinned: bool = False) -> None:
        self._fetch = partial(fetch_batch, dataset, pinned=pinned)

    def stream(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        return (self._fetch(request.indices, request.epoch) for request in requests)

    def close(self) -> None:
        """Does nothing."""


class LoaderSource:
    """Reads through a ``DataLoader``: in workers that live until ``close``, into pinned memory, or both."""

    def __init__(self, dataset: MapDataset, options: LoaderOptions, seed: int) -> None:
        self._sampler = _RequestSampler()
        self._settings: dict[str, Any] = {"num_workers": options.workers, "pin_memory": options.pin_memory}
        if options.workers > 0:
            self._settings |= {"persistent_workers": True, "prefetch_factor": options.prefetch}
            self._settings["multiprocessing_context"] = start_method(options.worker_start)
            self._settings["worker_init_fn"] = _outlive_requests
        self._reader = _SampleReader(dataset, seed)
        self._loader: DataLoader[Any] | None = None
        self._stream_number = 0

    def stream(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        self._stream_number += 1
        number = self._stream_number
        self._sampler.requests = requests
        batches = iter(self._started())
        while True:
            if number != self._stream_number:
                what = "this iteration over the data was ended by a newer one, or by close()"
                rule = "one loader's workers serve one iteration at a time"
                raise UsageError(f"{what}\n  {rule}\n  make a second loader to read twice at once")
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                self.close()
                if "DataLoader worker" not in str(error):
                    raise
                what = f"a loader worker died: {error}"
                fix = "it may have run out of memory (dmesg says so), or of shared memory (df /dev/shm); try fewer"
                more = "data.workers, or data.workers = 0 to see its own error"
                raise DataError(f"{what}\n  workers end only when the loader is closed\n  {fix}\n  {more}") from error
            if isinstance(batch, _UnreadBatch):
                self.close()
                raise (BadSampleError if batch.is_permanent else DataError)(batch.message) from batch.cause
            yield batch

    def close(self) -> None:
        loader, self._loader = self._loader, None
        self._stream_number += 1
        batches = getattr(loader, "_iterator", None)
        if batches is not None:
            # torch has no public way. Dropping the references is not enough: a traceback may hold a frame that holds
            # the iterator, and the workers would live on with it.
            batches._shutdown_workers()

    def _started(self) -> DataLoader[Any]:
        if self._loader is None:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                gc.collect()  # garbage on a GPU must not be left to a forked worker, which cannot free it
            self._loader = DataLoader(
                self._reader,  # type: ignore[arg-type]  # asked for by request, not by int
                sampler=self._sampler,
                batch_size=None,
                collate_fn=_unchanged,
                # torch would draw the workers' first seed from the rank's generator, and so change what the model draws
                generator=torch.Generator().manual_seed(self._reader.seed),
                **self._settings,
            )
        return self._loader


def _outlive_requests(_: int) -> None:
    """Has a worker end a minute after SIGTERM: schedulers signal all processes of a job, and its rank saves first."""
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))


def start_method(worker_start: WorkerStart) -> str:
    """Returns how workers start; ``auto`` is what plain PyTorch does: Python's own choice for this platform."""
    if worker_start != "auto":
        return worker_start
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def is_in_memory(dataset: Any) -> bool:
    """Says whether batches are gathered from memory: reading runs no code of a user, and draws no random numbers."""
    while isinstance(dataset, SampleSubset | CheckedSamples):
        dataset = dataset.dataset
    return dataset.reads_ahead if isinstance(dataset, EpochDataset) else type(dataset) is TensorDataset


def fetch_batch(dataset: MapDataset, indices: Indices, epoch: int = 0, *, pinned: bool = False) -> Batch:
    """Reads the samples and joins them into a batch; raises ``DataError`` that names the samples, from the cause."""
    if isinstance(dataset, SampleSubset):
        return fetch_batch(dataset.dataset, dataset.indices[indices], epoch, pinned=pinned)
    if isinstance(dataset, CheckedSamples):
        batch = fetch_batch(dataset.dataset, indices, epoch, pinned=pinned)
        if epoch <= 0:  # the first of a run, and that of evaluations: later ones read the same samples again
            check_own(batch, dataset.rules, dataset.name, indices.tolist())
        return batch
    if isinstance(dataset, InMemoryDataset):
        return dataset.take(torch.from_numpy(indices), pinned=pinned)
    if type(dataset) is TensorDataset:
        index = torch.from_numpy(indices)
        return tuple(gather(tensor, index, pinned=pinned) for tensor in dataset.tensors)
    numbers: list[int] = indices.tolist()
    reading, items = numbers, cast("Any", [])
    try:
        if isinstance(dataset, EpochDataset):
            return dataset.read(indices, epoch)
        if hasattr(dataset, "__getitems__"):
            items = dataset.__getitems__(numbers)
        else:
            for number in numbers:
                reading = [number]
                items.append(dataset[number])
    except Exception as error:
        if isinstance(dataset, EpochDataset) and isinstance(error, DataError):  # names file and place
            raise
        what = f"{_name(reading)} of the data set cannot be read: {type(error).__name__}: {error}"
        raise DataError(f"{what}\n  a data set returns a sample for every index from 0 to its length - 1") from error
    if isinstance(items, list) and len(items) != len(numbers):
        rule = "a list is taken for one sample per index, anything else for the finished batch"
        fix = "return a list of samples, or the batch as a tuple or a dict"
        raise DataError(f"__getitems__ returned a list of {len(items)} for {len(numbers)} samples\n  {rule}\n  {fix}")
    return join_samples(items, numbers) if isinstance(items, list) else items


def join_samples(samples: list[Any], numbers: list[int]) -> Batch:
    """Joins samples into a batch; raises ``DataError`` that names them by their ``numbers``."""
    try:
        batch = default_collate(samples)
    except Exception as error:
        what = f"{_name(numbers)} cannot be joined into a batch: {type(error).__name__}: {error}"
        rule = "samples are tensors, arrays, numbers or nested structures of them, with the same shapes in a batch"
        fix = "pad them to one shape, or give the data set __getitems__(self, indices) that returns the whole batch"
        raise DataError(f"{what}\n  {rule}\n  {fix}") from error
    return tuple(batch) if isinstance(batch, list) else batch


def _name(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"sample {numbers[0]}"
    named = ", ".join(map(str, numbers[:_NUM_NAMED_SAMPLES]))
    return f"samples {named}" + (f", ... ({len(numbers)} in all)" if len(numbers) > _NUM_NAMED_SAMPLES else "")


class _UnreadBatch(NamedTuple):
    message: str
    cause: BaseException | None
    is_permanent: bool


class _RequestSampler(Sampler[BatchRequest]):
    def __init__(self) -> None:
        self.requests: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.requests


class _SampleReader:
    """What a ``DataLoader`` sees as the data set: its index is a request, its item a whole batch."""

    def __init__(self, dataset: MapDataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = mix_seed(seed) >> 1  # torch takes signed words
        self._has_sent = False

    def __getitem__(self, request: BatchRequest) -> Batch | _UnreadBatch:
        if get_worker_info() is None:
            return fetch_batch(self.dataset, request.indices, request.epoch)
        seed = mix_seed(self.seed, request.epoch, int(request.indices[0]))
        random.seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)
        # torch.manual_seed would also queue a seed for each CUDA device, which a worker never uses.
        torch.default_generator.manual_seed(seed >> 1)
        try:
            batch = fetch_batch(self.dataset, request.indices, request.epoch)
            if not self._has_sent:
                _check_sendable(batch)
                self._has_sent = True
        except DataError as error:
            return _UnreadBatch(str(error), _portable(error.__cause__), isinstance(error, BadSampleError))
        return batch


def _unchanged(batch: Batch) -> Batch:
    return batch


def _check_sendable(batch: Batch) -> None:
    """Raises ``DataError`` for a batch that cannot be pickled: the queue would lose it, and the rank would hang."""
    try:
        pickle.dumps(batch)
    except Exception as error:
        what = f"a batch cannot be sent from a loader worker: {type(error).__name__}: {error}"
        rule = "what a data set returns must be picklable with data.workers > 0"
        fix = "return tensors, arrays, numbers and plain containers, or set data.workers = 0"
        raise DataError(f"{what}\n  {rule}\n  {fix}") from error


def _portable(error: BaseException | None) -> BaseException | None:
    """Returns an exception that survives the way to the rank, with the worker's traceback as a note."""
    if error is None:
        return None
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))  # nosec B301  # its own
    except Exception:  # an exception of the user's that cannot be rebuilt; its name and text still can
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note("in a loader worker:\n" + "".join(traceback.format_exception(error)))
    return copy


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
    """Yields items, up to ``ahead`` of which a thread reads after ``prepare``; an exception comes in its turn."""
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
