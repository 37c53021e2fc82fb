"""Virtual ranks that pair different steps: told at once, with both ranks and the lines of their updates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.errors import CollectiveMismatchError

BAD_STEP, GUILTY = 8, 1


def train(comm: paceline.Communicator, strategy: str, fault: str) -> int:
    engine = paceline.parallelize(paceline.MLPClassifier(8, 8, 4), comm, strategy=strategy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    alone = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1e-3)
    for step in range(12):
        inputs = torch.randn(4, 8)
        is_bad = comm.rank == GUILTY and step == BAD_STEP
        if is_bad and fault == "step":
            continue
        if fault == "none" and strategy == "ddp":
            for _ in range(comm.rank):
                with engine.no_sync():
                    engine(inputs).sum().backward()
        if fault == "none" and comm.rank == 0:
            alone.step()  # what only one rank trains
        loss = F.cross_entropy(engine(inputs), inputs.argmax(1) % 4)
        if not (is_bad and fault == "backward"):
            loss.backward()
        if not (is_bad and fault == "update"):
            optimizer.step()  # stands here
        optimizer.zero_grad()
    return step


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("fault", ["step", "backward", "update"])
def test_a_rank_that_leaves_out_a_part_of_a_step_is_told(strategy: str, fault: str) -> None:
    with pytest.raises(CollectiveMismatchError) as raised:
        paceline.run_virtual(lambda comm: train(comm, strategy, fault), ranks=3)
    told = str(raised.value)
    assert "rank 1 " in told
    assert "rank 0 " in told or "rank 2 " in told
    if fault == "step":
        assert told.startswith("rank 1 left out a step of its loop")
        assert f"rank 1 at step = {BAD_STEP + 1}" in told
    if fault == "step" or fault == "update":
        assert told.count(__file__) == 4  # of each rank the line that called the operation, and that of its update


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_what_ranks_may_do_differently_is_no_difference(strategy: str) -> None:
    assert paceline.run_virtual(lambda comm: train(comm, strategy, "none"), ranks=3) == [11, 11, 11]
