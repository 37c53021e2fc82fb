"""A rank that is late in every step of a real run: named while the run goes on, with the phase, and in the report."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from paceline.config import dump_yaml, load_config
from paceline.health.straggler import LatenessPolicy
from paceline.health.verdict import HangLimits
from paceline.records.records import EventRecord, read_records
from paceline.records.report import summarize
from paceline.run.folder import claim_folder
from paceline.run.supervise import LocalRanks, launching, rank_command
from paceline.run.watch import WatchPolicy

# torch leaves the files of redirected output to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.usefixtures("plain_rendezvous"),
]

ROOT = Path(__file__).parents[2]
POOL = ROOT / "tests" / "pool"
SECONDS = 0.1  # far more than a step takes besides, on a machine that is busy too


def train(folder: Path, phase: str, *, ranks: int, late: int, steps: int, backend: str = "gloo") -> list[EventRecord]:
    """Trains with a rank that is late, and returns the events that tell of it."""
    told = f"{{phase: {phase}, rank: {late}, seconds: {SECONDS}}}"
    config = load_config(
        ROOT / "configs" / "digits.yaml",
        [
            f"model={{kind: factory, factory: 'late_parts:make_model', args: {told}}}",
            f"data={{kind: factory, factory: 'late_parts:make_data', args: {told}}}",
            f"train={{global_batch: {8 * ranks}, steps: {steps}}}",
            f"parallel={{strategy: ddp, ranks: {ranks}, device: cpu, threads: 1}}",
            f"comm.backend={backend}",
            "checkpoint={at_end: false}",
        ],
    )
    watch = WatchPolicy(
        limits=HangLimits(step_s=60.0, setup_s=100.0), compare_s=0.2, late=LatenessPolicy(windows=3, min_steps=3)
    )
    with claim_folder(folder, dump_yaml(config), force=False, resume=False):
        asked = LocalRanks(
            ranks=ranks,
            threads=1,
            variables={"PYTHONPATH": os.pathsep.join([str(POOL), os.environ.get("PYTHONPATH", "")])},
            watch=watch,
        )
        with launching(folder, asked) as launcher:
            launcher.start(rank_command(launcher, None))
    gc.collect()
    events = [record for record in read_records(folder / "records" / "rank-0.jsonl") if isinstance(record, EventRecord)]
    return [event for event in events if event.name == "straggler"]


def check(folder: Path, events: list[EventRecord], phase: str, late: int) -> None:
    assert [(event.detail["rank"], event.detail["phase"]) for event in events] == [(late, phase)]
    assert events[0].detail["lost_s"] > SECONDS / 2
    assert events[0].step > 0
    summary = summarize(folder)
    assert summary.late == (f"at step {events[0].step}: {events[0].detail['sentence']}",)
    found = summary.straggler
    assert found is not None
    assert (found.rank, found.phase) == (late, phase)
    assert found.lost_s > SECONDS / 2


@pytest.mark.soak
def test_a_late_rank_is_named_while_the_run_goes_on(tmp_path: Path) -> None:
    events = train(tmp_path / "run", "forward", ranks=2, late=1, steps=30)
    check(tmp_path / "run", events, "forward", 1)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "late"), [(2, 0), (4, 2)])
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
def test_the_rank_and_the_phase_are_named(tmp_path: Path, phase: str, ranks: int, late: int, backend: str) -> None:
    events = train(tmp_path / "run", phase, ranks=ranks, late=late, steps=60, backend=backend)
    check(tmp_path / "run", events, phase, late)
