"""How one batch is read: from every form of data set, with failures that name their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from paceline.data.datasets import SampleSubset, TensorPairs
from paceline.data.fetch import BatchRequest, DirectSource, LoaderOptions, LoaderSource, fetch_batch
from paceline.errors import DataError

INPUTS, TARGETS = torch.arange(20.0).reshape(10, 2), torch.arange(10)


class Each:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert type(index) is int
        return INPUTS[index], index


class Together(Each):
    """PyTorch's convention: a list of samples."""

    def __getitems__(self, indices: list[int]) -> Any:
        assert all(type(index) is int for index in indices)
        return [self[index] for index in indices]


class Finished(Each):
    def __getitems__(self, indices: list[int]) -> Any:
        return INPUTS[indices], TARGETS[indices]


class Doubled(TensorDataset):
    """A subclass that changes what a sample is: its own access must be used."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class Broken(Each):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            raise ValueError("bad JPEG")
        return super().__getitem__(index)


class BrokenTogether(Each):
    def __getitems__(self, indices: list[int]) -> Any:
        raise OSError("disk gone")


class Ragged(Each):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index + 1)


class WrongCount(Each):
    def __getitems__(self, indices: list[int]) -> Any:
        return [INPUTS[indices], TARGETS[indices]]


@pytest.mark.parametrize(
    "dataset",
    [
        TensorPairs(INPUTS, TARGETS),
        TensorDataset(INPUTS, TARGETS),
        Each(),
        Together(),
        Finished(),
        Subset(TensorPairs(INPUTS, TARGETS), range(10)),
        Subset(Each(), range(10)),  # type: ignore[arg-type]
        [(INPUTS[index], index) for index in range(10)],
        SampleSubset(Each(), np.arange(10)),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_every_form_of_data_set_gives_the_same_batch(dataset: Any) -> None:
    batch = fetch_batch(dataset, np.array([3, 9, 3, 0]))
    assert isinstance(batch, tuple)
    torch.testing.assert_close(batch[0], INPUTS[[3, 9, 3, 0]])
    torch.testing.assert_close(batch[1], TARGETS[[3, 9, 3, 0]])


def test_a_part_reads_from_the_set_behind_it() -> None:
    for whole in (Each(), Finished(), TensorPairs(INPUTS, TARGETS)):
        batch = fetch_batch(SampleSubset(whole, np.array([8, 6, 4])), np.array([2, 0]))
        assert batch[1].tolist() == [4, 8]


def test_a_subclass_of_a_known_set_keeps_its_own_access() -> None:
    assert fetch_batch(Doubled(TARGETS), np.array([1, 4]))[0].tolist() == [2, 8]


def test_nested_samples_keep_their_structure() -> None:
    samples = [{"image": INPUTS[index], "label": index} for index in range(10)]
    batch = fetch_batch(samples, np.array([1, 2]))
    assert batch["label"].tolist() == [1, 2]
    assert batch["image"].shape == (2, 2)


def test_a_sample_that_fails_is_named_with_its_cause() -> None:
    with pytest.raises(DataError, match="sample 7 of the data set cannot be read: ValueError: bad JPEG") as raised:
        fetch_batch(Broken(), np.array([1, 7, 2]))
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(DataError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7, ... \(9 in all\) .*OSError: disk gone"):
        fetch_batch(BrokenTogether(), np.arange(9))


def test_samples_of_different_shapes_are_refused_with_the_fix() -> None:
    with pytest.raises(DataError, match=r"samples 1, 2 cannot be joined(.|\n)*__getitems__"):
        fetch_batch(Ragged(), np.array([1, 2]))


def test_a_list_is_one_sample_per_index() -> None:
    with pytest.raises(DataError, match=r"a list of 2 for 3 samples\n(.|\n)*as a tuple or a dict"):
        fetch_batch(WrongCount(), np.array([1, 2, 3]))


def test_a_loader_in_this_process_reads_as_directly() -> None:
    """The form that pins memory: no workers, no seeding, errors as they are."""
    requests = [BatchRequest(np.array([3, 1]), 0), BatchRequest(np.array([2]), 0), BatchRequest(np.array([7, 0]), 1)]

    def loader(dataset: Any) -> LoaderSource:
        return LoaderSource(dataset, LoaderOptions(worker_start="fork"), seed=0)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = [batch[1].tolist() for batch in loader(Each()).stream(iter(requests))]
    assert (
        found == [batch[1].tolist() for batch in DirectSource(Each()).stream(iter(requests))] == [[3, 1], [2], [7, 0]]
    )
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(DataError, match="sample 7") as raised:
        list(loader(Broken()).stream(iter(requests)))
    assert isinstance(raised.value.__cause__, ValueError)
