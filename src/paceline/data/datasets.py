"""Data sets in memory: what one must offer, what a model must know of it, the digits, and three synthetic ones.

A data set is map-style: ``len(dataset)`` and ``dataset[i]``. Where it also has ``__getitems__(indices)``, a batch is
read in one call: a list is taken for a list of samples (PyTorch's convention), anything else for the finished batch.

Images may be bytes (uint8). A data set that says ``mean`` and ``std`` in its shape has them normalised on the device.

Every synthetic set can be learned, and is a pure function of its arguments, drawn in bulk from one numpy generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, IterableDataset

from paceline.config.data_sections import DataShape as DataShape
from paceline.data.order import Indices, shuffled_index
from paceline.errors import DataError

Batch: TypeAlias = Any
"""``(inputs, targets)`` for our data sets; any nested structure of tensors for the user's."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

IGNORED = -100  # targets that do not count
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, in bytes
# Epochs count from 0, so this order is never that of training.
_SPLIT_EPOCH = -1
# The distance between centres in standard deviations of the noise: about 5 % of the samples lie nearer to a wrong one.
_CENTRE_DISTANCE = 5.0
PATTERN_AMPLITUDE = 0.5
_DARKEST, _DIGIT_SIDE = 16, 8  # of scikit-learn's digits
_NUM_SUCCESSORS = 4
_TOKEN_NOISE = 0.1
_ROWS = 1024  # sequences that are made at a time


class MapDataset(Protocol):
    """What a data set must offer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class EpochDataset(Dataset[Any], ABC):
    """A data set of (seed, epoch, index). ``reads_ahead``: so quick that a thread reads, in place of workers."""

    reads_ahead: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: Indices, epoch: int) -> Batch:
        """Returns the batch of these samples in an epoch. Raises ``DataError`` with file and place for bad data."""

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = self.read(np.array([index % len(self)], dtype=np.int64), 0)
        return tree_map(lambda value: value[0], batch)


class InMemoryDataset(EpochDataset):
    """A data set whose batches are gathered from tensors, without a Python call per sample; the same in every epoch."""

    reads_ahead = True

    @abstractmethod
    def take(self, index: torch.Tensor, *, pinned: bool = False) -> Pair:
        """Returns the inputs and targets of the samples in ``index`` (int64), as new tensors; large ones ``pinned``."""

    def read(self, indices: Indices, epoch: int) -> Pair:  # noqa: ARG002
        return self.take(torch.from_numpy(indices))

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        return self.take(torch.as_tensor(indices, dtype=torch.int64))


class TensorPairs(InMemoryDataset):
    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{len(inputs)} inputs and {len(targets)} targets\n  every input has one target")
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: torch.Tensor, *, pinned: bool = False) -> Pair:
        return gather(self.inputs, index, pinned=pinned), gather(self.targets, index, pinned=pinned)


def gather(rows: torch.Tensor, index: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
    """Returns some rows of a tensor; ``pinned``: straight into memory that a GPU can copy from without waiting."""
    if not pinned:
        return rows.index_select(0, index)
    found = torch.empty((len(index), *rows.shape[1:]), dtype=rows.dtype, pin_memory=True)
    return torch.index_select(rows, 0, index, out=found)


class SampleSubset:
    """Some samples of another data set. Batches are read from that set directly (see ``fetch.py``)."""

    def __init__(self, dataset: MapDataset, indices: Indices) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]


def check_map_style(dataset: Any, name: str = "the data set") -> int:
    """Returns the number of samples; raises ``DataError`` for what has no length or no access by index."""
    is_indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not is_indexed or not hasattr(dataset, "__len__"):
        missing = "__len__" if is_indexed else "access by index"
        rule = "a map-style data set is required: samples are asked for by index, so that a run can resume anywhere"
        fix = "give it __len__(self) and __getitem__(self, index), or name its factory in data: {kind: stream, ...}"
        raise DataError(f"{name} is a {type(dataset).__name__} without {missing}\n  {rule}\n  {fix}")
    return len(dataset)


def check_enough(length: int, ranks: int) -> None:
    if length < 1:
        fix = "check the path or the factory of the data, or lower data.eval_fraction"
        raise DataError(f"the training set is empty\n  a run needs at least one sample for each rank\n  {fix}")
    if length < ranks:
        what = f"parallel.ranks = {ranks} is more than the {length} samples of the training set"
        rule = "every rank needs at least one sample in an epoch"
        raise DataError(f"{what}\n  {rule}\n  set parallel.ranks = {length} or less, or bring more data")


def split_indices(length: int, eval_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Returns the samples for training and for evaluation, each ascending and one at least; 0: all for training."""
    everything = np.arange(length, dtype=np.int64)
    if eval_fraction == 0:
        return everything, everything[:0]
    if length < 2:
        rule = "training and evaluation need at least one sample each"
        fix = "set data.eval_fraction = 0, or bring more data"
        raise DataError(f"{length} samples and data.eval_fraction = {eval_fraction}\n  {rule}\n  {fix}")
    num_eval = min(max(round(length * eval_fraction), 1), length - 1)
    order = shuffled_index(everything, length, seed, _SPLIT_EPOCH)
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])


def split_pairs(dataset: TensorPairs, eval_fraction: float, seed: int) -> tuple[TensorPairs, TensorPairs | None]:
    """Returns the two parts of a data set as data sets of their own; no second one with ``eval_fraction`` 0."""
    train, evaluation = split_indices(len(dataset), eval_fraction, seed)
    if not len(evaluation):
        return dataset, None
    return TensorPairs(*dataset.take(torch.from_numpy(train))), TensorPairs(*dataset.take(torch.from_numpy(evaluation)))


def load_digits() -> TensorPairs:
    """Reads the 1,797 handwritten digits of scikit-learn: 64 pixels from 0 to 16, 10 classes."""
    # Imported here because scikit-learn takes a second to load, and only this data set needs it.
    from sklearn.datasets import load_digits as read_digits

    pixels, classes = read_digits(return_X_y=True)
    return TensorPairs(torch.from_numpy(pixels.astype(np.float32)), torch.from_numpy(classes.astype(np.int64)))


def standardized(dataset: TensorPairs, reference: TensorPairs) -> TensorPairs:
    """Returns each feature with mean 0 and variance 1 in ``reference``; one that is constant there is only centred."""
    mean, deviation = _scales(reference)
    return TensorPairs(((dataset.inputs.double() - mean) / deviation).float(), dataset.targets)


def digit_pictures(inputs: torch.Tensor, reference: TensorPairs | None) -> torch.Tensor:
    """Returns digits as images from 0 to 1; ``reference``: the data that standardized them, None of plain ones."""
    pixels = inputs.double()
    if reference is not None:
        mean, deviation = _scales(reference)
        pixels = pixels * deviation + mean
    return (pixels / _DARKEST).clamp(0, 1).float().reshape(len(inputs), 1, _DIGIT_SIDE, _DIGIT_SIDE)


def _scales(reference: TensorPairs) -> tuple[torch.Tensor, torch.Tensor]:
    values = reference.inputs.double()
    deviation = values.std(0, correction=0)
    return values.mean(0), torch.where(deviation == 0, torch.ones_like(deviation), deviation)


def synthetic_classification(*, samples: int, features: int, classes: int, seed: int) -> TensorPairs:
    """Makes vectors with unit noise around one random centre per class; a linear model gets about 95 % right."""
    generator = np.random.default_rng(seed)
    scale = _CENTRE_DISTANCE / np.sqrt(2 * features)
    centres = generator.standard_normal((classes, features), dtype=np.float32) * np.float32(scale)
    targets = generator.integers(classes, size=samples)
    inputs = generator.standard_normal((samples, features), dtype=np.float32)
    inputs += centres[targets]
    return TensorPairs(torch.from_numpy(inputs), torch.from_numpy(targets))


def synthetic_images(*, samples: int, classes: int, channels: int, size: int, seed: int) -> TensorPairs:
    """Makes images of unit noise over a faint wave, whose direction, length and phases belong to the class."""
    generator = np.random.default_rng(seed)
    across, down, phases = draw_waves(generator, classes, channels, size)
    targets = generator.integers(classes, size=samples)
    inputs = generator.standard_normal((samples, channels, size, size), dtype=np.float32)
    there, places = np.unique(targets, return_inverse=True)  # no pattern is made of a class that has no sample
    inputs += _patterns(across[there], down[there], phases[there], size=size)[places.reshape(-1)]
    return TensorPairs(torch.from_numpy(inputs), torch.from_numpy(targets))


def synthetic_tokens(*, samples: int, vocab_size: int, context: int, seed: int) -> TensorPairs:
    """Makes sequences of a noisy Markov chain: one of four successors, or one time in ten any token."""
    generator = np.random.default_rng(seed)
    successors = generator.integers(vocab_size, size=vocab_size * _NUM_SUCCESSORS)
    first = generator.integers(vocab_size, size=samples)
    choices = generator.integers(_NUM_SUCCESSORS, size=(samples, context))
    is_noise = generator.random((samples, context)) < _TOKEN_NOISE
    targets = generator.integers(vocab_size, size=(samples, context))  # all of them noise so far
    inputs = np.empty_like(targets)
    for start in range(0, samples, _ROWS):
        # Place by place for some sequences side by side, which lie together in a cache.
        rows = slice(start, start + _ROWS)
        chosen, noise, is_kept = (np.ascontiguousarray(each[rows].T) for each in (choices, targets, is_noise))
        tokens = np.empty((context + 1, chosen.shape[1]), dtype=np.int64)
        tokens[0] = first[rows]
        for place in range(context):
            chosen[place] += tokens[place] * _NUM_SUCCESSORS
            np.take(successors, chosen[place], out=tokens[place + 1], mode="clip")  # else it goes through a copy
            np.copyto(tokens[place + 1], noise[place], where=is_kept[place])
        inputs[rows], targets[rows] = tokens[:-1].T, tokens[1:].T
    return TensorPairs(torch.from_numpy(inputs), torch.from_numpy(targets))


def draw_waves(
    generator: np.random.Generator, classes: int, channels: int, size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Draws a wave for each class: how often it goes across and down, which no other has, and a phase by channel."""
    most = max(2, size // 4, int(np.ceil(np.sqrt(classes))))
    vectors = generator.permutation(most * most)[:classes]
    phases = generator.uniform(0, 2 * np.pi, size=(classes, channels))
    return vectors % most, vectors // most, phases


def _patterns(
    across: NDArray[np.int64], down: NDArray[np.int64], phases: NDArray[np.float64], *, size: int
) -> NDArray[np.float32]:
    grid = np.arange(size) * (2 * np.pi / size)
    angles = across[:, None, None] * grid[None, None, :] + down[:, None, None] * grid[None, :, None]
    waves = np.cos(angles[:, None] + phases[:, :, None, None])
    return (PATTERN_AMPLITUDE * waves).astype(np.float32)
