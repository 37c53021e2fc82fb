"""A run's folder: whole or not there, never overwritten by accident, and never shared."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from paceline.checkpoint.storage import LocalFiles
from paceline.errors import LaunchError, RunFolderError, UsageError
from paceline.health.failure import Failure
from paceline.run import folder as folder_module
from paceline.run.folder import RunFolder, adopt_config, check_folder, claim_folder, config_of
from paceline.run.notes import StepNote, write_failure
from paceline.run.train import explain_end


class Claim(Protocol):
    def __call__(
        self, path: Path, config: str = "name: a\n", *, force: bool = False, resume: bool = False
    ) -> RunFolder:
        """Claims a folder until the test is over."""


@pytest.fixture
def claim() -> Iterator[Claim]:
    with ExitStack() as stack:

        def make(path: Path, config: str = "name: a\n", *, force: bool = False, resume: bool = False) -> RunFolder:
            return stack.enter_context(claim_folder(path, config, force=force, resume=resume))

        yield make


def finished(path: Path, config: str = "name: old\n") -> Path:
    """Makes the folder of a run that is over, with something in it to lose."""
    with claim_folder(path, config):
        (path / "checkpoints" / "step-00000001").mkdir()
    return path


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_a_new_folder_is_complete_and_alone(tmp_path: Path, claim: Claim) -> None:
    claimed = claim(tmp_path / "runs" / "a")
    assert claimed.is_new
    assert names(tmp_path / "runs") == ["a"]
    assert names(claimed.path) == [".lock", "checkpoints", "config.yaml", "logs", "records"]
    assert config_of(claimed.path).read_text() == "name: a\n"


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_permissions_follow_the_umask(tmp_path: Path, claim: Claim, umask: int) -> None:
    before = os.umask(umask)
    try:
        claimed = claim(tmp_path / "a")
        LocalFiles().write(claimed.path / "weights", [memoryview(b"1")])
        write_failure(claimed.path, Failure(rank=0, cause="raised", message="", time=0.0))
        StepNote(claimed.path, 0, 0)
    finally:
        os.umask(before)
    for path in [claimed.path, *claimed.path.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_a_folder_that_is_removed_or_replaced_is_noticed(tmp_path: Path, claim: Claim) -> None:
    claimed = claim(tmp_path / "a")
    assert not claimed.is_gone()
    shutil.rmtree(claimed.path)
    assert claimed.is_gone()
    claimed.path.mkdir()
    assert claimed.is_gone()
    again = claim(tmp_path / "b")
    again.path.rename(tmp_path / "c")
    with pytest.raises(LaunchError, match="b was removed, or moved away, while the run"), explain_end(again):
        raise UsageError("config.yaml does not exist")
    with pytest.raises(LaunchError, match="was removed"), explain_end(again):
        pass


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path, claim: Claim) -> None:
    (tmp_path / "a").mkdir()
    claim(tmp_path / "a")
    assert (tmp_path / "a" / "config.yaml").is_file()


def test_a_folder_that_cannot_be_looked_into_is_told(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300) / "run"
    with pytest.raises(
        RunFolderError, match=r"cannot make the run's folder .*: File name too long\n  set monitor.folder"
    ):
        check_folder(path, resume=True)


def test_an_older_run_is_kept_without_force(tmp_path: Path, claim: Claim) -> None:
    path = finished(tmp_path / "a")
    for refuse in (check_folder, lambda path: claim(path)):
        with pytest.raises(RunFolderError, match=r"a exists already\n.*\n.*name=.*--resume auto.*--force"):
            refuse(path)
    assert (path / "checkpoints" / "step-00000001").is_dir()
    assert names(tmp_path) == ["a"]


def test_force_replaces_an_older_run_and_leaves_nothing_of_it(tmp_path: Path, claim: Claim) -> None:
    path = finished(tmp_path / "a")
    check_folder(path, force=True)
    assert claim(path, "name: new\n", force=True).is_new
    assert names(tmp_path) == ["a"]
    assert names(path / "checkpoints") == []
    assert (path / "config.yaml").read_text() == "name: new\n"


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path: Path, claim: Claim) -> None:
    target = finished(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(target)
    claim(tmp_path / "runs" / "a", force=True)
    assert names(tmp_path / "runs") == ["a"]
    assert (target / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.parametrize("is_file", [True, False])
def test_force_replaces_runs_alone(tmp_path: Path, claim: Claim, is_file: bool) -> None:
    path = tmp_path / "a"
    mine = path if is_file else path / "thesis.tex"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("precious")
    for refuse in (lambda path: check_folder(path, force=True), lambda path: claim(path, force=True)):
        with pytest.raises(RunFolderError, match=r"is not a run's folder: it (is a file|has no config\.yaml)"):
            refuse(path)
    assert mine.read_text() == "precious"
    assert names(tmp_path) == ["a"]


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path, claim: Claim) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "runs" / "a"
    for refuse in (check_folder, lambda path: check_folder(path, resume=True), lambda path: claim(path)):
        with pytest.raises(RunFolderError, match=r"cannot make .*a: .*file is a file\n  set monitor.folder=") as raised:
            refuse(path)
        assert "Errno" not in str(raised.value)


def test_a_disk_error_names_the_folder_and_leaves_nothing(
    tmp_path: Path, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "some/partial/name")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(RunFolderError, match=r"cannot make the run's folder .*/a: No space left on device\n"):
        claim(tmp_path / "a")
    assert names(tmp_path) == []


# Two at once


def test_of_two_runs_with_one_name_the_second_is_refused_whatever_it_says(tmp_path: Path, claim: Claim) -> None:
    claim(tmp_path / "a")
    with pytest.raises(RunFolderError, match="exists already"):
        claim(tmp_path / "a")
    owner = f"{os.getpid()} on {os.uname().nodename}"
    for force, resume in ((True, False), (False, True)):
        with pytest.raises(RunFolderError, match=rf"a run is going on in .*/a: process {owner}"):
            claim(tmp_path / "a", "name: b\n", force=force, resume=resume)
    assert names(tmp_path) == ["a"]
    assert config_of(tmp_path / "a").read_text() == "name: a\n"


def test_a_run_that_comes_between_the_check_and_the_claim_wins(
    tmp_path: Path, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "a")
    monkeypatch.setattr(folder_module, "check_folder", lambda *_, **__: None)  # as if it had looked before
    with pytest.raises(RunFolderError, match="exists already"):
        claim(tmp_path / "a")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "config.yaml").read_text() == "name: old\n"


def test_a_run_that_ended_lets_go(tmp_path: Path, claim: Claim) -> None:
    path = finished(tmp_path / "a")
    claim(path, resume=True)


def test_a_file_system_without_locks_is_good_enough(
    tmp_path: Path, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", fail)
    claim(tmp_path / "a")
    with pytest.raises(RunFolderError, match="exists already"):
        claim(tmp_path / "a")


def test_what_a_killed_process_left_half_made_is_removed_later(tmp_path: Path, claim: Claim) -> None:
    gone, namesake, fresh = ".a.999999999", f".a.{os.getpid()}", ".a.999999998.old"
    for name in (gone, namesake, fresh, ".a.notes", ".ab.999999999"):
        (tmp_path / name / "records").mkdir(parents=True)
    hour_ago = time.time() - 3600
    for name in (gone, ".a.notes", ".ab.999999999"):
        os.utime(tmp_path / name, (hour_ago, hour_ago))
    claim(tmp_path / "a")
    assert names(tmp_path) == [fresh, ".a.notes", ".ab.999999999", "a"]


# Continuing


def test_a_resumed_run_keeps_its_own_config_until_it_has_been_set_up(tmp_path: Path, claim: Claim) -> None:
    path = finished(tmp_path / "a")
    check_folder(path, resume=True)
    claimed = claim(path, "name: longer\n", resume=True)
    assert not claimed.is_new
    assert (path / "checkpoints" / "step-00000001").is_dir()
    assert (path / "config.yaml").read_text() == "name: old\n"
    assert config_of(path).read_text() == "name: longer\n"
    adopt_config(path)
    assert (path / "config.yaml").read_text() == config_of(path).read_text() == "name: longer\n"
    adopt_config(path)


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path, claim: Claim) -> None:
    path = finished(tmp_path / "a")
    before = names(path)
    claim(path, "name: longer\n", resume=True).discard()
    assert names(path) == before
    assert config_of(path).read_text() == "name: old\n"


def test_a_refused_new_run_leaves_nothing(tmp_path: Path, claim: Claim) -> None:
    claim(tmp_path / "a").discard()
    assert names(tmp_path) == []


def test_a_run_from_anothers_checkpoint_makes_a_folder_of_its_own(tmp_path: Path, claim: Claim) -> None:
    assert claim(tmp_path / "a", resume=True).is_new
