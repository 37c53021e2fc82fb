"""Parts of a model without blocks that are worth a second run, and who reports the samples of a mesh."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.models.gpt import GPT, gpt_config
from paceline_classic.config import parts_by_size


def part() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


PLAIN = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (nn.Sequential(part(), part()), 2),
        (nn.Sequential(nn.Sequential(part(), part(), part())), 3),
        (nn.Sequential(part(), nn.ReLU(), PLAIN, part()), 2),
        (nn.Sequential(part(), PLAIN), 0),
        (nn.Sequential(PLAIN, PLAIN), 0),
        (nn.Sequential(nn.Sequential(PLAIN), nn.Sequential(PLAIN)), 0),
        (nn.Sequential(nn.ReLU()), 0),
        (PLAIN, 0),
    ],
)
def test_two_or_more_parts_with_layers_are_run_again(model: nn.Module, count: int) -> None:
    assert len(parts_by_size(model)) == count


@pytest.mark.parametrize(
    ("ranks", "options", "reporting", "streams"),
    [
        (2, {}, [True, True], [0, 1]),
        (2, {"pipeline": 2}, [True, False], [0, 1]),
        (2, {"tensor": 2}, [True, False], [0, 0]),
        (4, {"pipeline": 2, "data": 2}, [True, True, False, False], [0, 1, 2, 3]),
    ],
)
def test_one_rank_of_those_that_share_samples_reports_them(
    ranks: int, options: dict[str, int], reporting: list[bool], streams: list[int]
) -> None:
    def work(comm: Communicator) -> tuple[bool, int]:
        sizes = {"layers": 2, "heads": 2, "width": 8, "context": 4, "vocab_size": 8}
        engine = parallelize(GPT(gpt_config(None, **sizes)), comm, **options)
        return engine.reports_samples, engine.random_stream

    found = run_virtual(work, ranks)
    assert [each[0] for each in found] == reporting
    assert [each[1] for each in found] == streams
