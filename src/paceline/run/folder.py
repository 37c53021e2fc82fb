"""A run's folder: made whole under its final name, or not at all, never overwritten by accident, and used by one.

runs/<name>/   config.yaml plan.json  records/  checkpoints/  logs/  health/  tensorboard/
               prediction.json        what a step was expected to take, where that can be told
               .name                  the name that was asked for, where the folder has a number: digits in digits-2
               .lock                  held by the process that runs it, and let go by the system when that ends
               .config.yaml           while a resumed run is set up: becomes config.yaml when that has worked;
               .plan.json, .prediction.json   so do these
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from paceline.config import Config
from paceline.errors import RunFolderError
from paceline.plan.plan import Plan
from paceline.untrusted import parse_json_object, read_regular

_PARTS = ("records", "checkpoints", "logs")
_LEFTOVER_S = 60.0
_CONFIG, _PLAN, _PREDICTION, _NAME = "config.yaml", "plan.json", "prediction.json", ".name"


class RunFolder(contextlib.AbstractContextManager["RunFolder"]):
    """A folder that this process has claimed: no other run can use it until it is released."""

    def __init__(self, path: Path, lock: int, *, is_new: bool) -> None:
        self.path = path
        self.is_new = is_new
        self._lock = lock
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # open: no other folder gets its number

    def write_prediction(self, text: str) -> None:
        """Writes the prediction of the run; that of a resumed run waits until its set-up has worked."""
        path = self.path / _PREDICTION if self.is_new else _pending(self.path, _PREDICTION)
        path.write_text(text, encoding="utf-8")

    def discard(self) -> None:
        """Forgets a run that was refused before it began: a new folder goes, an older one is as it was."""
        if self.is_new:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            for name in (_CONFIG, _PLAN, _PREDICTION):
                _pending(self.path, name).unlink(missing_ok=True)

    def is_gone(self) -> bool:
        """Says whether the folder was removed, moved away or replaced; a save may keep it there without its lock."""
        try:
            is_same = os.path.samestat(self.path.stat(), os.fstat(self._folder))
            return not is_same or os.fstat(self._lock).st_nlink == 0
        except FileNotFoundError:
            return True
        except OSError:
            return False  # a file system that does not answer now

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)
        os.close(self._lock)


def check_folder(path: Path, *, force: bool = False, resume: bool = False) -> None:
    """Raises RunFolderError if a run may not be started in ``path``: cheap, for before anything else is done."""
    try:
        in_the_way = next((each for each in path.parents if each.exists() and not each.is_dir()), None)
    except OSError as error:  # a folder that this user may not look into
        raise _cannot_make(path, f"{error.filename}: {error.strerror}") from error
    if in_the_way is not None:
        raise _cannot_make(path, f"{in_the_way} is a file")
    if resume or not is_taken(path):
        return
    if not force:
        raise _exists(path)
    if not (path / "config.yaml").is_file():
        what = "has no config.yaml" if path.is_dir() else "is a file"
        text, rule = f"{path} exists and is not a run's folder: it {what}", "--force replaces runs alone"
        raise RunFolderError(f"{text}\n  {rule}\n  choose another name (name=...), or remove it by hand")


def find_write_error(folder: Path) -> OSError | None:
    """Returns the error of making a folder and writing into it; None if that works. Leaves nothing behind."""
    whole = folder.absolute()
    try:
        above = next(each for each in (whole, *whole.parents) if each.exists())
        with TemporaryDirectory(prefix=".paceline-", dir=above):
            return None
    except OSError as error:
        return error


def claim_folder(
    path: Path, config_yaml: str, plan_json: str = "", *, force: bool = False, resume: bool = False, name: str = ""
) -> RunFolder:
    """Makes a run's folder with its config and plan, and keeps others from it.

    ``force`` replaces an older run, at the last moment; ``resume`` keeps it. ``name`` was asked for, where the folder
    has another. Raises RunFolderError.
    """
    check_folder(path, force=force, resume=resume)
    try:
        if resume and path.is_dir():
            lock = _lock(path, path)
            for part in _PARTS:
                (path / part).mkdir(exist_ok=True)
            change_config(path, config_yaml, plan_json)
            return RunFolder(path, lock, is_new=False)
        asked = "" if name == path.name else name
        return _make(path, {_CONFIG: config_yaml, _PLAN: plan_json, _NAME: asked}, force=force)
    except OSError as error:
        raise _cannot_make(path, error.strerror or str(error)) from error


def name_of(path: Path) -> str:
    """Returns the name that was asked for when a run got its folder: what is in ``.name``, or that of the folder."""
    try:
        return read_regular(path / _NAME).decode("utf-8", "replace")
    except (OSError, ValueError):
        return path.name


def is_in_use(path: Path) -> bool:
    with contextlib.suppress(OSError), (path / ".lock").open("r+b") as lock:
        return not _try_lock(lock.fileno())
    return False


def checkpoint_folder(config: Config, folder: Path) -> Path:
    """Returns where a run in ``folder`` keeps its checkpoints."""
    return folder / "checkpoints" if config.checkpoint.folder is None else Path(config.checkpoint.folder)


def config_of(path: Path, name: str = _CONFIG) -> Path:
    """Returns the config that an attempt is to read."""
    pending = _pending(path, name)
    return pending if pending.is_file() else path / name


def read_plan(path: Path) -> Plan | None:
    """Returns the plan that an attempt is to carry out; None: ranks make it, as where hosts come and go."""
    try:
        return Plan.from_json(parse_json_object(read_regular(config_of(path, _PLAN))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def change_config(path: Path, config_yaml: str, plan_json: str) -> None:
    """Gives the next attempt another config and plan, which replace the old ones once the set-up has worked."""
    _pending(path, _CONFIG).write_text(config_yaml, encoding="utf-8")
    _pending(path, _PLAN).unlink(missing_ok=True)
    if plan_json:
        _pending(path, _PLAN).write_text(plan_json, encoding="utf-8")


def adopt_config(path: Path) -> None:
    """Lets config and prediction of a resumed run replace the old ones, once it is set up. Safe to call twice."""
    for name in (_CONFIG, _PLAN, _PREDICTION):
        with contextlib.suppress(FileNotFoundError):
            _pending(path, name).replace(path / name)


def _pending(path: Path, name: str) -> Path:
    return path / f".{name}"


def _make(path: Path, texts: Mapping[str, str], *, force: bool) -> RunFolder:
    _remove_leftovers(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that had the same number
    try:
        for part in _PARTS:
            (partial / part).mkdir(parents=True)
        for name, text in texts.items():
            if text:
                (partial / name).write_text(text, encoding="utf-8")
        lock = _lock(partial, path)  # before others can see it
        if force and is_taken(path):
            _replace(path, partial)
        else:
            partial.rename(path)
    except (OSError, RunFolderError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if getattr(error, "errno", None) in (errno.EEXIST, errno.ENOTEMPTY) and is_taken(path):
            raise _exists(path) from None  # another run came first
        raise
    return RunFolder(path, lock, is_new=True)


def _replace(path: Path, partial: Path) -> None:
    old_lock = _lock(path, path)
    try:
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        path.rename(old)
        try:
            partial.rename(path)
        except OSError:
            with contextlib.suppress(OSError):  # another run may have taken the name
                old.rename(path)
            raise
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old)
    finally:
        os.close(old_lock)


def _lock(folder: Path, path: Path) -> int:
    """Locks a folder; ``path`` is its name for messages. Raises RunFolderError if another process has it."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    if not _try_lock(lock):
        owner = os.read(lock, 100).decode(errors="replace").strip()
        os.close(lock)
        rule, fix = "two runs cannot share a folder", "wait for its end, end it, or choose another name (name=...)"
        raise RunFolderError(f"a run is going on in {path}{f': process {owner}' if owner else ''}\n  {rule}\n  {fix}")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return lock


def _try_lock(lock: int) -> bool:
    """Locks an open file if no other process has; without locks, as on some networks, names must keep runs apart."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_taken(path: Path) -> bool:
    """Says whether something is there that may not be overwritten: anything but an empty folder."""
    return any(path.iterdir()) if path.is_dir() else path.exists() or path.is_symlink()


def _exists(path: Path) -> RunFolderError:
    fix = "choose another name (name=...), continue it with --resume auto, or replace it with --force"
    return RunFolderError(f"the run's folder {path} exists already\n  a run never overwrites another\n  {fix}")


def _cannot_make(path: Path, why: str) -> RunFolderError:
    return RunFolderError(f"cannot make the run's folder {path}: {why}\n  set monitor.folder=... elsewhere")


def _remove_leftovers(path: Path) -> None:
    """Removes the partial folders of processes that were killed while they made this one."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*"):
        number = leftover.name.removeprefix(f".{path.name}.").removesuffix(".old")
        if not number.isdecimal() or psutil.pid_exists(int(number)):
            continue
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                shutil.rmtree(leftover)
