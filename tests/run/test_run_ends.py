"""How a run ends around its ranks: refused, failed, stopped, or without its folder; and who may join one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.manifest import Manifest, manifest_text
from paceline.config import Config, load_config
from paceline.errors import LaunchError, RunFolderError, UsageError
from paceline.run import train as module
from paceline.run.folder import RunFolder, claim_folder
from paceline.run.location import RunOptions
from paceline.run.notes import RunStoppedError
from paceline.run.train import clearing_saves, explain_end, train
from paceline.run.whereami import Surroundings

NODES = Surroundings(launcher="--nnodes", kind="host", least=1, count=2, host_ranks=1, address="127.0.0.1", port=1)


@pytest.fixture
def claimed(tmp_path: Path) -> Iterator[RunFolder]:
    with claim_folder(tmp_path / "run", "name: run\n") as found:
        yield found


def saved(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    whole = Manifest(step=step, position=0, world=0, tensors={}, files={})
    (path / "manifest.json").write_text(manifest_text(whole))


def ended(claimed: RunFolder, error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as raised, explain_end(claimed):
        raise error
    return raised.value


def test_a_run_that_failed_says_how_to_go_on(claimed: RunFolder) -> None:
    assert str(ended(claimed, LaunchError("rank 1 failed"))) == "rank 1 failed"
    saved(claimed.path, 30)
    how = f"to go on from step 30:  paceline train {claimed.path / 'config.yaml'} --resume auto"
    assert str(ended(claimed, LaunchError("rank 1 failed"))) == f"rank 1 failed\n  {how}"
    assert str(ended(claimed, RunStoppedError(signal.SIGINT))) == f"ended by SIGINT (Ctrl-C); no rank is left; {how}"
    assert str(ended(claimed, OSError("disk"))) == "disk"
    assert str(ended(claimed, KeyError("own"))) == "'own'"
    assert claimed.path.is_dir()


def test_a_run_that_was_refused_leaves_nothing(claimed: RunFolder) -> None:
    assert str(ended(claimed, UsageError("too many ranks"))) == "too many ranks"
    assert not claimed.path.exists()


@pytest.mark.parametrize("error", [None, LaunchError("x"), OSError("x")])
def test_a_run_whose_folder_is_gone_says_so(claimed: RunFolder, error: Exception | None) -> None:
    def move() -> None:
        claimed.path.rename(claimed.path.with_name("moved"))
        if error is not None:
            raise error

    with pytest.raises(LaunchError) as raised, explain_end(claimed):
        move()
    assert str(raised.value).splitlines() == [
        f"the run's folder {claimed.path} was removed, or moved away, while the run was going on",
        "  its records, checkpoints and logs are kept there as they are written",
        "  start it again, and leave the folder alone until the run has ended",
    ]
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("has_ranks", [True, False])
def test_ranks_of_a_folder_that_is_gone_are_ended(
    claimed: RunFolder, monkeypatch: pytest.MonkeyPatch, has_ranks: bool
) -> None:
    ended_groups: list[list[int]] = []
    killed: list[tuple[int, int]] = []
    looks: list[Any] = []

    class Polling:
        """Has the test look by itself."""

        def __init__(self, look: Any, **_: Any) -> None:
            looks.append(look)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(module, "polling", Polling)
    monkeypatch.setattr(module, "end_groups", lambda ranks, patience_s: ended_groups.append([*ranks, int(patience_s)]))
    monkeypatch.setattr(os, "kill", lambda *told: killed.append(told))
    monkeypatch.setattr(module, "noted_processes", lambda *_: {0: 77} if has_ranks else {})

    def move() -> None:
        assert looks[0]() is False
        claimed.path.rename(claimed.path.with_name("moved"))
        assert looks[0]() is True

    with pytest.raises(LaunchError), explain_end(claimed):
        move()
    assert ended_groups == [[77, 0] if has_ranks else [0]]
    assert killed == ([] if has_ranks else [(os.getpid(), signal.SIGTERM)])


def test_what_is_left_of_a_save_goes_where_a_run_fails(tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / ".step-00000003.1a2b3c4d"

    partial.mkdir(parents=True)
    with clearing_saves(partial.parent):
        pass
    with pytest.raises(KeyError), clearing_saves(partial.parent):
        raise KeyError
    assert partial.exists()
    with pytest.raises(LaunchError, match="rank 1 failed"), clearing_saves(partial.parent):
        raise LaunchError("rank 1 failed")
    assert not partial.exists()


# Several hosts


@pytest.fixture
def config(project: Path) -> Config:
    return load_config(project / "tiny.yaml")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Notes the ranks that would be started."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "_run_host", lambda *told: found.append(told))
    monkeypatch.setattr(module.runs, "read_result", lambda *told: told)
    for name in ("PACELINE_SECRET", "PACELINE_SECRET_FILE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return found


def quiet(config: Config) -> Config:
    return config.with_values("recovery", warm=False).with_values("monitor", sample_s=None, tensorboard=False)


def test_the_first_host_claims_the_folder_and_the_next_joins(
    config: Config, started: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = quiet(config)
    result: Any = train(asked, options=RunOptions(hosts=NODES, is_quiet=True))
    folder = Path("runs/tiny")
    assert result[0] == folder
    assert (folder / ".secret").stat().st_mode & 0o777 == 0o600
    (named, where, nodes, secret, warm, as_asked) = started[0]
    assert (where, nodes, warm, as_asked) == (folder, NODES, None, asked)
    assert named.parallel.ranks == 2
    assert secret == {"PACELINE_SECRET_FILE": str(folder.absolute() / ".secret")}
    assert "joining" not in capsys.readouterr().err
    with claim_folder(folder, "name: tiny\n", resume=True):
        assert train(asked, options=RunOptions(hosts=NODES, is_quiet=True)) is None
    assert f"joining the run in {folder} with 1 ranks" in capsys.readouterr().err
    assert len(started) == 2


def test_a_secret_that_is_given_is_not_made(
    config: Config, started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "s" * 32)
    train(quiet(config), options=RunOptions(hosts=NODES, is_quiet=True))
    assert started[0][3] == {}
    assert not Path("runs/tiny/.secret").exists()


@pytest.mark.usefixtures("started")
def test_hosts_begin_from_the_newest_checkpoint_alone(config: Config) -> None:
    with pytest.raises(UsageError, match="--resume best with --nnodes"):
        train(quiet(config), options=RunOptions(hosts=NODES, resume="best"))
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/own").touch()
    with pytest.raises(RunFolderError, match="is not a run's folder"):
        train(quiet(config), options=RunOptions(hosts=NODES, force=True))


def test_a_rank_of_another_launcher_starts_no_hosts(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7"}
    monkeypatch.setattr(os, "environ", {**os.environ, **values})
    with pytest.raises(UsageError, match="--nnodes in a rank of another launcher"):
        train(config, options=RunOptions(hosts=NODES))
