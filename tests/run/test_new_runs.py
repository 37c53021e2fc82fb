"""Where a new run will live, and what is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import Config, load_config
from paceline.errors import CheckpointError, RunFolderError
from paceline.run.location import locate_run


@pytest.fixture
def config(project: Path) -> Config:
    return load_config(project / "tiny.yaml")


def test_a_name_that_is_taken_gets_a_number_or_is_replaced(project: Path, config: Config) -> None:
    runs = project / "runs"
    first = locate_run(config, force=False, resume=None)
    assert (first.folder.resolve(), first.is_continued, first.checkpoint) == (runs / "tiny", False, None)
    assert not runs.exists()  # nothing was written
    (runs / "tiny").mkdir(parents=True)
    (runs / "tiny" / "config.yaml").write_text("name: tiny\n")
    assert locate_run(config, force=False, resume=None).folder.name == "tiny-2"
    assert locate_run(config, force=True, resume=None).folder.name == "tiny"
    with pytest.raises(RunFolderError, match="tiny"):
        locate_run(config, force=False, resume=None, may_number=False)


def test_a_folder_for_checkpoints_must_be_one(project: Path, config: Config) -> None:
    (project / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint\.folder"):
        locate_run(config.with_values("checkpoint", folder=str(project / "file")), force=False, resume=None)
    found = locate_run(config.with_values("checkpoint", folder=str(project / "kept")), force=False, resume=None)
    assert found.folder.name == "tiny"


def test_a_run_without_a_checkpoint_is_begun_only_where_that_is_asked_for(project: Path, config: Config) -> None:
    with pytest.raises(CheckpointError):
        locate_run(config, force=False, resume="auto")
    begun = locate_run(config, force=False, resume="auto", may_begin=True)
    assert (begun.checkpoint, begun.is_continued) == (None, False)
    with pytest.raises(CheckpointError):
        locate_run(config, force=False, resume="best", may_begin=True)
    assert not (project / "runs").exists()
