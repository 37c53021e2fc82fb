"""A run that is saved on some real ranks and goes on on others is the run that never stopped, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_pool import GlooPool
from kept_records import Kept
from nccl_cases import GLOO_TOO, NCCL, mean_losses, to_host
from saved_runs import save_now

from paceline.checkpoint import find_checkpoint, list_checkpoints, open_checkpoint
from paceline.comm.base import Communicator
from paceline.config import config_from_dict
from paceline.records.records import StepRecord
from paceline.train.assemble import build_trainer

STEPS, HALF = 6, 3


State = dict[str, torch.Tensor]


def train(comm: Communicator, folder: str, strategy: str, last: int) -> tuple[list[StepRecord], State]:
    """Trains from the newest checkpoint of the folder to step ``last`` and saves; returns records and parameters."""
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 16, "context": 8},
            "data": {"kind": "synthetic_tokens", "samples": 40, "vocab_size": 16, "context": 8},
            "train": {"steps": STEPS, "global_batch": 6, "dtype": "float64", "precision": "fp32"},
            "optim": {"lr": 1e-2, "eps": 1e-4},
            "parallel": {"ranks": comm.size, "strategy": strategy},
        }
    )
    sink, where = Kept(), Path(folder)
    trainer = build_trainer(config, comm, hooks=[], sink=sink)
    if list_checkpoints(where):
        trainer.load_state(open_checkpoint(find_checkpoint("auto", where)))
    for result in trainer.steps():
        if result.step == last:
            break
    save_now(trainer, where)
    trainer.flush(wait=True)
    return sink.steps, to_host(trainer.parts.engine.full_state_dict())


@pytest.mark.parametrize("pool", [GLOO_TOO, NCCL], indirect=True)
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_a_run_goes_on_at_another_number_of_ranks(pool: GlooPool, tmp_path: Path, first: int, second: int) -> None:
    def run(ranks: int, name: str, strategy: str, last: int) -> tuple[list[float], State]:
        found = pool.run(train, str(tmp_path / name), strategy, last, ranks=ranks)
        return mean_losses([records for records, _ in found]), found[0][1]

    losses, expected = run(1, "straight", "ddp", STEPS)
    begun, _ = run(first, "resized", "fsdp", HALF)
    ended, found = run(second, "resized", "zero1", STEPS)
    assert begun + ended == pytest.approx(losses, rel=0, abs=1e-12)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
