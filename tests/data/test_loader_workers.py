"""``data.workers: auto``: how many processes, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.data import loader
from paceline.data.datasets import SampleSubset, TensorPairs
from paceline.data.loader import choose_workers


class Slow:
    """Takes ``seconds`` for each sample, by the clock of the test."""

    def __init__(self, seconds: float, device: str = "cpu") -> None:
        self.seconds = seconds
        self.device = device
        self.now = 0.0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        self.now += self.seconds
        return torch.tensor([index], device=self.device)


def chosen(dataset: Any, monkeypatch: pytest.MonkeyPatch, *, batch: int = 32, cores: int = 16) -> tuple[int, str]:
    monkeypatch.setattr(loader.time, "perf_counter", lambda: getattr(dataset, "now", 0.0))
    choice = choose_workers(dataset, batch, cores=cores, worker_start="auto")
    assert choice._asdict() == {"workers": choice.workers, "reason": choice.reason}
    return choice.workers, choice.reason


def test_data_in_memory_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = TensorPairs(torch.arange(4), torch.arange(4))
    subset = SampleSubset(pairs, torch.arange(3).numpy())
    for dataset in (pairs, subset, torch.utils.data.TensorDataset(torch.arange(4))):
        count, reason = chosen(dataset, monkeypatch)
        assert count == 0
        assert "in memory" in reason


@pytest.mark.parametrize(
    ("seconds", "cores", "expected"),
    [(0.0, 16, 1), (0.0001, 16, 1), (0.001, 16, 4), (0.1, 16, 15), (0.1, 1, 1), (0.001, 3, 2)],
)
def test_others_get_enough_for_a_batch_every_10_ms(
    seconds: float, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, reason = chosen(Slow(seconds), monkeypatch, cores=cores)
    assert count == expected
    assert f"a batch of 32 takes {32 * seconds * 1e3:.3g} ms" in reason
    assert f"{cores} cores" in reason


def test_what_cannot_go_to_workers_stays_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Slow):
        def __getitem__(self, index: int) -> Any:
            raise OSError("no such file")

    assert chosen(Slow(1.0, device="meta"), monkeypatch) == (0, "its samples are on a device already")
    count, reason = chosen(Broken(0.0), monkeypatch)
    assert count == 0
    assert "no such file" in reason
    local = Slow(1.0)
    local.handle = lambda: None  # type: ignore[attr-defined]
    choice = choose_workers(local, 4, cores=4, worker_start="spawn")
    assert choice.workers == 0
    assert "cannot be pickled" in choice.reason


def test_every_trial_reads_other_samples() -> None:
    class Noted(Slow):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return super().__getitem__(index)

        def __len__(self) -> int:
            return 100

    seen: list[int] = []
    choose_workers(Noted(0.0), 4, cores=4, worker_start="auto")
    assert seen == list(range(24))
