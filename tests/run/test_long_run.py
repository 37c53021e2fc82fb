"""The config of long texts as it ships, made small: two real ranks share each sample, and one goes on alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kept_records import Kept

from paceline.checkpoint import Checkpoint, open_checkpoint
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import load_config
from paceline.records.records import EvalRecord, EventRecord, StepRecord, read_records
from paceline.train.assemble import build_trainer
from paceline.train.trainer import EvaluateHook, Every

ROOT = Path(__file__).parents[2]
SMALL = [
    *("model.layers=1", "model.heads=2", "model.width=16", "model.context=30", "train.dtype=float64"),
    *("data.eval_fraction=0.2", "comm.backend=gloo", "parallel.threads=1", "optim.schedule.warmup=1"),
    *("optim.schedule.length=4", "train.eval_every=2"),
]


def on_one_rank(changes: list[str], state: Checkpoint | None = None) -> list[EvalRecord]:
    """Trains to the fourth step; returns the evaluations."""
    alone = ["parallel.ranks=1", "parallel.context=1", "train.steps=4"]
    config, sink = load_config(str(ROOT / "configs" / "gpt_long.yaml"), [*changes, *alone]), Kept()

    def work(comm: object) -> None:
        trainer = build_trainer(config, comm, hooks=[Every(2, EvaluateHook())], sink=sink)  # type: ignore[arg-type]
        if state is not None:
            trainer.load_state(state)
        trainer.run()

    run_virtual(work, 1)
    return [each for each in sink.records if isinstance(each, EvalRecord)]


def test_a_run_of_two_ranks_is_that_of_one_which_goes_on_with_it(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a line of riders who take turns in the wind, all of them faster. " * 30)
    changes = [*SMALL, f"data.path={tmp_path / 'long.txt'}"]
    command = [sys.executable, "-m", "paceline", "train", "configs/gpt_long.yaml", *changes]
    command += ["train.steps=2", f"monitor.folder={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)

    shared = tmp_path / "gpt-long"
    first, second = (list(read_records(shared / "records" / f"rank-{rank}.jsonl")) for rank in (0, 1))
    steps = [[each for each in records if isinstance(each, StepRecord)] for records in (first, second)]
    assert [[each.samples for each in rank] for rank in steps] == [[4, 4], [0, 0]]  # counted once
    assert [[each.count for each in rank] for rank in steps] == [[4 * 15, 4 * 15], [4 * 15, 4 * 15]]
    (how,) = [each.detail for each in first if isinstance(each, EventRecord) and each.name == "context"]
    assert how["ranks"] == 2
    saved = open_checkpoint(shared / "checkpoints" / "step-00000002")
    assert saved.manifest.about["mesh"]["context"] == 2

    alone = on_one_rank(changes)
    found = [each for each in first if isinstance(each, EvalRecord)] + on_one_rank(changes, saved)
    assert [each.samples for each in found] == [each.samples for each in alone]
    assert [each.loss for each in found] == pytest.approx([each.loss for each in alone], abs=1e-10)
