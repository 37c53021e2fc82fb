"""One rank's attempt, in a world of one inside this process: what it writes when it works, is refused, or fails."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.storage import snapshots_in
from paceline.comm.control import kept
from paceline.comm.control.wire import SECRET_FILE, write_secret
from paceline.comm.torch_dist import connect
from paceline.config import load_config
from paceline.errors import CheckpointError, DataError, LostRankError, TrainingError, UsageError
from paceline.health.failure import Failure
from paceline.records.records import EndRecord, EventRecord, RunRecord, StepRecord, read_records
from paceline.run.folder import claim_folder
from paceline.run.keeper import keeping
from paceline.run.worker import RankRunner, load_start

Try = Callable[..., Failure | None]


@pytest.fixture
def attempt(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Try]:
    """Attempts a run with changes to the config; returns how it failed, if it did."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])

    def run(*overrides: str, resume: Path | None = None, expect: type[BaseException] | None = None) -> Failure | None:
        config = load_config(project / "tiny.yaml", ["parallel.ranks=1", *overrides])
        with claim_folder(project / "run", "name: old\n", resume=resume is not None):
            made = RankRunner(project / "run", 0)
            comm = connect("gloo", device="cpu")
            if expect is None:
                made.run(config, comm, resume=resume)
                return None
            with pytest.raises(expect) as raised:
                made.run(config, comm, resume=resume)
            return made.describe(raised.value.with_traceback(raised.tb.tb_next))  # without this frame of the user's

    yield run
    sys.modules.pop("user_code", None)


def records(project: Path) -> list[Any]:
    path = project / "run" / "records" / "rank-0.jsonl"
    return list(read_records(path)) if path.exists() else []


def test_a_run_leaves_its_plan_its_records_and_a_checkpoint(attempt: Try, project: Path) -> None:
    attempt()
    kinds = [type(record) for record in records(project)]
    assert kinds[0] is RunRecord
    assert kinds.count(StepRecord) == 3
    end = records(project)[-1]
    assert isinstance(end, EndRecord)
    assert (end.status, end.step, end.message) == ("done", 3, "")
    assert (project / "run" / "plan.json").is_file()
    assert (project / "run" / "checkpoints" / "step-00000003").is_dir()


def test_a_factory_that_changes_the_folder_does_not_move_the_run(attempt: Try, project: Path) -> None:
    attempt("model.args.wander=true")
    assert {path.name[:4] for path in (project / "elsewhere").iterdir()} == {"pid-"}
    assert isinstance(records(project)[-1], EndRecord)


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["data.args.lock=true", "data.workers=1", "data.worker_start=spawn"], DataError, "cannot be pickled"),
        (["data.args.samples=0"], DataError, "empty training set"),
        (["data.args.sample=3"], DataError, "cannot be called with data.args"),
        (["model.factory=user_code:ned"], UsageError, "did you mean net?"),
        (["model.factory=nowhere_at_all:net"], UsageError, "there is no module 'nowhere_at_all'"),
        (["optim.kind=user_code:net"], UsageError, "optim.kind"),
    ],
)
def test_what_cannot_be_is_refused_without_a_trace(
    attempt: Try, project: Path, overrides: list[str], kind: type[Exception], message: str
) -> None:
    failure = attempt(*overrides, expect=kind)
    assert failure is not None
    assert message in failure.message
    assert failure.is_refusal
    assert failure.traceback == ""
    assert records(project) == []
    assert not (project / "run" / "plan.json").exists()


def test_code_of_the_user_that_fails_in_the_set_up_is_a_failure_with_records(attempt: Try, project: Path) -> None:
    failure = attempt("model.args.plot=factory:raise", expect=UsageError)
    assert failure is not None
    assert not failure.is_refusal
    assert failure.message.startswith("model.factory = 'user_code:net' raised ValueError: a mistake of the user")
    assert failure.traceback.count("  File ") == failure.traceback.count("user_code.py") == 2
    (start,) = records(project)
    assert isinstance(start, RunRecord)
    assert (start.total_steps, start.num_parameters) == (0, 0)


def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(attempt: Try, project: Path) -> None:
    failure = attempt("model.args.plot=nan", expect=TrainingError)
    assert failure is not None
    assert (failure.is_refusal, failure.traceback) == (False, "")
    assert failure.message.startswith("3 steps in a row had gradients that are not finite, up to step 3")
    assert "the first numbers that are not finite: the model (" in failure.message
    assert [record.step for record in records(project) if isinstance(record, StepRecord)] == [1, 2, 3]
    assert not list((project / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_with_the_users_line(attempt: Try, workers: int) -> None:
    failure = attempt("data.args.plot=data:raise", f"data.workers={workers}", expect=DataError)
    assert failure is not None
    assert not failure.is_refusal
    assert "of the data set cannot be read: ValueError: a mistake of the user" in failure.message
    assert 'misbehave(self.plot, "data")' in failure.traceback


def test_a_run_goes_on_from_a_checkpoint_and_takes_the_longer_config(attempt: Try, project: Path) -> None:
    attempt()
    attempt("train.steps=5", resume=project / "run" / "checkpoints" / "step-00000003")
    second = records(project)[[type(record) for record in records(project)].index(EndRecord) + 1 :]
    assert isinstance(second[0], RunRecord)
    assert isinstance(second[1], EventRecord)
    assert (second[1].name, second[1].step) == ("resume", 3)
    assert [record.step for record in second if isinstance(record, StepRecord)] == [4, 5]


def test_a_checkpoint_of_another_model_is_refused_and_the_run_stays_as_it_was(attempt: Try, project: Path) -> None:
    attempt()
    before = records(project)
    plan = (project / "run" / "plan.json").read_text()
    checkpoint = project / "run" / "checkpoints" / "step-00000003"
    failure = attempt("model.args.width=5", "train.steps=9", resume=checkpoint, expect=CheckpointError)
    assert failure is not None
    assert failure.is_refusal
    assert "size mismatch" in failure.message
    assert records(project) == before
    assert (project / "run" / "plan.json").read_text() == plan
    assert (project / "run" / "config.yaml").read_text() == "name: old\n"


def test_memory_that_is_gone_since_it_was_chosen_is_no_refusal(tmp_path: Path) -> None:
    """Another host may die in between: the next attempt chooses again."""
    nobody: Any = None
    with pytest.raises(LostRankError, match="what hosts held in memory is gone"):
        load_start(nobody, snapshots_in(tmp_path / "snapshots") / "step-00000010")
    with pytest.raises(CheckpointError):
        load_start(nobody, tmp_path / "step-00000010")


def test_a_keeper_has_the_secret_that_the_hosts_of_a_round_have_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host may have left another one while this host started."""
    alone: Any = None
    path = tmp_path / "secret"
    write_secret(path)
    monkeypatch.setenv(SECRET_FILE, str(path))
    with keeping(None) as keeper:
        assert keeper is not None
        old = kept.Kept(keeper.root).secret()
        write_secret(path)
        keeper.meet(0, 1, alone)
        known = path.read_bytes() + str(keeper.address).encode()  # by which a keeper of another run is refused
        assert old != kept.Kept(keeper.root).secret() == hashlib.sha256(known).hexdigest().encode()
