"""Loops of the user's own: ``connect()`` joins the ranks of a launcher, and they watch themselves from then on.

    comm = paceline.connect()                                                     # verdicts within timeout_s
    comm = paceline.watch_ranks(paceline.connect(), "runs/mine", hang_s=60)       # another limit, another folder
    found = paceline.run_ranks(train, 2)                       # of a notebook: train(comm) on 2 new processes

Nobody times the phases of such a loop, so that the ledger is told by what every loop calls: the engine when its module
runs, and torch's optimizers before and after an update. Nothing stays or is printed, unless there is a verdict, in
``runs/<script>/verdict.txt``. Ledgers lie in a temporary folder of this user, and go with the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline import errors
from paceline.cluster.detect import usable_cores
from paceline.comm import torch_dist
from paceline.comm.base import Communicator
from paceline.comm.ledger.file import ISSUED, NUM_UPDATES, WORLD_GROUP, LedgerReader, ledger_path
from paceline.comm.ledger.ledger import Ledger, UpdateNotes
from paceline.comm.meeting import does_first_rank_hold_store
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.comm.traced import LedgerCommunicator
from paceline.health.ledger_view import DATA, OPTIMIZER
from paceline.health.pairing import PairedRanks, Update, UpdateHistory, pairing_verdict
from paceline.health.verdict import AT_ONCE, MISMATCHES, HangLimits, HangVerdict, judge
from paceline.run.function_ranks import run_processes
from paceline.run.notes import VERDICTS, forget
from paceline.run.other_hosts import LeftRanks, PairedHosts
from paceline.run.seen_ranks import look_at_process, stack_path
from paceline.run.warm import CPU_RANKS
from paceline.run.watch import Watch, WatchPolicy, make_ledger, start_watch
from paceline.run.whereami import recognise
from paceline.terminal import echo

_SOONER = 0.9  # a verdict comes before the operation that waits gives up
_STOPPED_S = 60.0
_SELDOM_S = 0.25  # updates are compared at least so often, and every sixteenth or so of faster loops
_DIES_S, _ASK_S = 0.5, 0.01


def connect(
    backend: Literal["auto", "nccl", "gloo", "shared_memory"] = "auto",
    *,
    device: str | torch.device | None = None,
    timeout_s: float = 300.0,
    is_watched: bool = True,
) -> Communicator:
    """Joins the ranks that a launcher started, or makes a world of one where none did.

    Returns on no rank before all have joined, so that a rank with little to do may leave at once. ``auto`` takes
    NCCL where this rank has a GPU to itself; else shared memory, if all ranks are on one host and there is room for it,
    or Gloo. Raises CommunicationError when the launcher's environment is incomplete, the others do not come within
    ``timeout_s``, or the ranks cannot share the memory that was asked for.

    Several ranks watch themselves (docs/verdicts.md), unless ``is_watched`` is False: where ranks wait for another one
    for nearly ``timeout_s``, a verdict says which, at which line and why, and ends them.
    """
    _join_launcher()
    comm = torch_dist.connect(backend, device=device, timeout_s=timeout_s)
    if comm.size == 1 or not is_watched:
        return comm
    limit_s = _SOONER * timeout_s
    limits = HangLimits(step_s=limit_s, setup_s=limit_s, stopped_s=min(limit_s, _STOPPED_S), needs_waiting=True)
    number = broadcast_object(comm, f"{time.time_ns()}-{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}" / number
    problem = ""
    try:
        _make_private(folder)
        kept = WatchedCommunicator(comm, make_ledger(comm, folder, is_own_loop=True))
    except OSError as error:
        problem = str(error)
    problems = [each for each in gather_objects(comm, problem) if each]
    if problems:
        if comm.rank == 0:
            echo(f"paceline: the ranks are not watched: {problems[0]}", err=True)
        return comm
    script = Path(sys.argv[0] or "loop").absolute()
    name = script.parent.name if script.stem == "__main__" else script.stem
    told = Path.cwd() / "runs" / (name or "loop")
    return _follow(kept, folder, told, WatchPolicy(limits=limits), is_temporary=True)


def run_ranks(
    function: Callable[..., Any],
    ranks: int | None = None,
    *,
    args: Sequence[Any] = (),
    backend: Literal["auto", "nccl", "gloo", "shared_memory"] = "auto",
    device: str | None = None,
    timeout_s: float = math.inf,
    restarts: int = 0,
) -> list[Any]:
    """Runs ``function(comm, *args)`` on new processes of this machine; returns what each returned, by rank.

    For a notebook or a script: the function, and models and data sets that it uses, may be defined in a cell. ``ranks``
    is one for each GPU by default, and 2 without GPUs. ``comm`` is what ``paceline.connect(backend, device=device)``
    returns. What ranks print is seen in the cell. The first rank to fail ends the others, and RankFailedError has its
    traceback. A script calls this below ``if __name__ == "__main__":``, since every rank imports it.

    A call of ``function`` is one attempt. When a rank dies, up to ``restarts`` times, a new process takes its place and
    all ranks call ``function`` again, with a new ``comm``; it goes on from what it has saved, say by ``run.resume()``.
    The processes of the other ranks stay, with what they have loaded and compiled.
    """
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    count = (gpus or CPU_RANKS) if ranks is None else ranks
    threads = max(1, len(usable_cores()) // max(1, count))
    join = partial(connect, backend, device=device)
    return run_processes(function, count, args=args, timeout_s=timeout_s, threads=threads, join=join, restarts=restarts)


def setup_distributed(
    rank: int, world_size: int, backend: Literal["auto", "nccl", "gloo", "shared_memory"] = "auto"
) -> Communicator:
    """Joins processes that a script started by itself on one host, such as those of ``torch.multiprocessing.spawn``.

    As ``connect()``, with the number of this process and of all of them; torch's own ``DistributedDataParallel`` works
    in them too. They meet at 127.0.0.1:29500, or where MASTER_ADDR and MASTER_PORT say. ``cleanup_distributed()`` ends
    it. Raises UsageError for a rank that is not below ``world_size``, or not the one that a launcher has given.
    """
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        what = f"setup_distributed got rank = {rank!r} and world_size = {world_size!r}"
        rule = "ranks are numbered from 0 to world_size - 1"
        raise errors.UsageError(f"{what}\n  {rule}\n  pass what spawn gives each process, and how many they are")
    asked = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    given = {name: os.environ[name] for name in asked if os.environ.get(name, asked[name]) != asked[name]}
    if given:
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        what = f"setup_distributed got rank = {rank} and world_size = {world_size}, and a launcher has set {told}"
        rule = "one of them says which rank this is"
        raise errors.UsageError(f"{what}\n  {rule}\n  under a launcher call paceline.connect()")
    os.environ.update(asked)
    for name, value in {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    return connect(backend)


def _join_launcher() -> None:
    if torch_dist.is_connected():
        return
    try:
        around = recognise(os.environ)
    except errors.ConfigError as error:
        raise errors.CommunicationError(str(error)) from error
    if around.kind == "host" and (around.host_ranks or 1) > 1:
        what = f"{around} has {around.host_ranks} ranks on each host, and this process is one"
        fix = "start it by torchrun on each host, or one process for each rank"
        raise errors.CommunicationError(f"{what}\n  a loop of your own is one rank\n  {fix}")
    os.environ.update(around.rank_variables())


def watch(*args: Any, **options: Any) -> LedgerCommunicator:
    """Does what ``watch_ranks`` does, under the name that it had: ``paceline watch`` is the live page."""
    warnings.warn("paceline.watch is called paceline.watch_ranks now", DeprecationWarning, stacklevel=2)
    return watch_ranks(*args, **options)


def watch_ranks(
    comm: Communicator, folder: str | Path, *, hang_s: float = 300.0, hang_setup_s: float | None = None
) -> LedgerCommunicator:
    """Ends the ranks with a verdict when none of them makes progress for ``hang_s`` seconds; all ranks call it.

    Returns the communicator to go on with, around ``comm``. ``folder`` is that of the run, where the verdict will be;
    ``hang_setup_s`` is the limit before the first update, as long as ``hang_s`` if it is not given.
    """
    if isinstance(comm, WatchedCommunicator):
        comm.loop.close()
        comm = comm.inner
    elif isinstance(comm, LedgerCommunicator):
        return comm  # its launcher watches
    where = Path(folder).absolute()
    ledger_path(where, comm.ranks[comm.rank]).unlink(missing_ok=True)
    (where / "logs").mkdir(parents=True, exist_ok=True)
    limits = HangLimits(step_s=hang_s, setup_s=hang_s if hang_setup_s is None else hang_setup_s)
    kept = WatchedCommunicator(comm, make_ledger(comm, where, is_own_loop=True))
    return _follow(kept, where, where, WatchPolicy(limits=limits))


class WatchedCommunicator(LedgerCommunicator):
    """A communicator of a loop of the user's own, with what follows that loop."""

    loop: OwnLoop


def _follow(
    comm: WatchedCommunicator, folder: Path, told: Path, policy: WatchPolicy, *, is_temporary: bool = False
) -> WatchedCommunicator:
    if comm.size == 1:
        return comm
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            forget(told, VERDICTS)  # of an earlier run
    comm.loop = OwnLoop(comm.ledger, start_watch(comm, folder, policy, told=told), is_temporary=is_temporary)
    return comm


class OwnLoop:
    """Tells the ledger of a rank's phases and updates, and gives its last words when it fails."""

    def __init__(self, ledger: Ledger, watch: Watch, *, is_temporary: bool) -> None:
        self._ledger, self._watch, self._pid = ledger, watch, os.getpid()
        self._is_temporary = is_temporary
        self._first: int | None = None  # the optimizer whose updates are counted as steps
        self._pairing = StepPairing(ledger, watch)
        if watch.channel is not None:
            has_store = does_first_rank_hold_store()
            watch.left = LeftRanks(channel=watch.channel, host=watch.host, hosts=watch.hosts, has_store=has_store)
        self._is_open = True
        before = register_optimizer_step_pre_hook(self._begin_update)
        self._hooks = [before, register_optimizer_step_post_hook(self._end_update)]
        self._hook_before = sys.excepthook
        sys.excepthook = self._explain
        atexit.register(self._leave)

    def tell_in(self, folder: Path) -> None:
        """Has verdicts told in the folder of the loop's run, from now on."""
        self._watch.told = folder

    def close(self) -> None:
        """Stops following; safe to call twice. Raises CollectiveMismatchError where ranks end in other steps."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._release()
        verdict = self._pairing.finish()
        self._ledger.finish()
        try:
            self._raise(verdict)
        finally:
            self._watch.leave()
            self._clear()

    def abandon(self) -> None:
        """Stops following without a word: another rank has failed, and this process stays."""
        if self._is_open:
            self._release()
            self._watch.stop()
            self._clear()

    def _release(self) -> None:
        self._is_open = False
        atexit.unregister(self._leave)
        for hook in self._hooks:
            hook.remove()
        if sys.excepthook == self._explain:
            sys.excepthook = self._hook_before
        self._watch.end_thread()

    def _leave(self) -> None:
        """Closes at the end of the process; what is raised there would not change its exit code."""
        try:
            self.close()
        except errors.CollectiveMismatchError:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)

    def _begin_update(self, *_: Any) -> None:
        if self._ledger.is_own_loop:
            self._ledger.enter(OPTIMIZER)

    def _end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._ledger.is_own_loop:
            return
        trained = self._ledger.trained  # by all ranks together, as far as that is known
        is_shared = not trained.has_any() or trained.are_updated_by(optimizer)
        if self._first is None and is_shared:  # not one of those that engines try out on small tensors
            self._first = id(optimizer)
        if self._first == id(optimizer):
            self._ledger.count_step()
        self._ledger.enter(DATA)
        if is_shared:
            self._raise(self._pairing.note(sys._getframe(1)))

    def _raise(self, verdict: HangVerdict | None) -> None:
        if verdict is not None:
            self._watch.tell(replace(verdict, states=tuple(self._watch.states())))
            raise errors.CollectiveMismatchError(verdict.sentence)

    def _explain(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not self._is_open or os.getpid() != self._pid:
            self._hook_before(kind, error, traceback)
            return
        self._is_open = False
        self._ledger.fail()
        with contextlib.suppress(OSError):
            verdict = self._judge(error) if isinstance(error, errors.CommunicationError) else None
            if verdict is not None:
                self._watch.tell(verdict)
            self._clear()
        self._hook_before(kind, error, traceback)
        self._watch.leave()

    def _judge(self, error: errors.CommunicationError) -> HangVerdict | None:
        own = self._ledger.reader().rank
        deadline = time.monotonic() + (_DIES_S if isinstance(error, errors.LostRankError) else 0.0)
        while True:
            now = time.monotonic()
            self._watch.observe(now)
            views = [replace(each, state="running") if each.rank == own else each for each in self._watch.views(now)]
            verdict = judge(views, now, MISMATCHES)
            if verdict is not None:
                return verdict
            is_dead = any(each.state == "running" and look_at_process(each.pid) is None for each in views)
            if is_dead or now >= deadline or any(each.state != "running" for each in views):
                break
            time.sleep(_ASK_S)  # a process that is killed closes its connections before it is gone
        # A rank that failed or died has said why, or its launcher will.
        is_told = is_dead or any(each.state == "failed" for each in views)
        if is_told or not isinstance(error, errors.LateRankError | errors.LostRankError):
            return None
        if self._watch.left is not None:
            return self._watch.left.explain(views, now)
        others = {view.rank: view for view in self._watch.with_lines([each for each in views if each.rank != own])}
        return judge([others.get(view.rank, view) for view in views], now, AT_ONCE)

    def _clear(self) -> None:
        if self._is_temporary:
            folder = self._watch.folder
            with contextlib.suppress(OSError):
                stack_path(folder, self._pid).unlink(missing_ok=True)
                if self._ledger.path is not None:
                    self._ledger.path.unlink(missing_ok=True)
                for each in (folder / "health", folder):
                    each.rmdir()


class StepPairing:
    """Compares at updates whether ranks of this host are in the same step, as far as the others have come."""

    def __init__(self, ledger: Ledger, watch: Watch) -> None:
        self._ledger, self._watch, self._mine = ledger, watch, ledger.reader()
        self._notes = UpdateNotes(seldom_s=_SELDOM_S)
        self._issued = 0  # operations before the last update
        self._pairs: dict[int, PairedRanks] = {}
        self._own: deque[Update] = deque(maxlen=NUM_UPDATES)
        self._history: UpdateHistory | None = None
        if watch.channel is not None and self._mine.rank == watch.hosts[watch.host][0]:
            here, hosts, reader, names = watch.host, watch.hosts, ledger.reader(), self._notes.name_of
            watch.paired = PairedHosts(channel=watch.channel, host=here, hosts=hosts, ledger=reader, name_of=names)
            self._history = watch.paired.history

    def note(self, frame: FrameType) -> HangVerdict | None:
        """Notes an update, made by the code at ``frame``; returns a verdict if ranks are not in the same step."""
        self._issued = self._ledger.cells[ISSUED]
        return self._compare(frame) if self._notes.count(self._ledger.counts[WORLD_GROUP]) else None

    def finish(self) -> HangVerdict | None:
        """Notes the last update, if it was not; of two ranks the one that is done later finds a difference."""
        found = None if self._notes.is_noted else self._compare(None)
        paired, left = self._watch.paired, self._watch.left
        if found is None and paired is not None and left is not None and not left.is_store_gone:
            with contextlib.suppress(errors.CommunicationError):
                found = paired.finish()
        return found

    def _compare(self, frame: FrameType | None) -> HangVerdict | None:
        own = self._notes.note(self._ledger.last_place(self._issued), frame)
        self._ledger.note_update(own)
        self._own.append(own)
        if self._history is not None:
            self._history.add(own)
        found = (self._compare_with(reader) for reader in self._watch.readers())
        return next((verdict for verdict in found if verdict is not None), None)

    def _compare_with(self, reader: LedgerReader) -> HangVerdict | None:
        """Compares all updates that both ranks have made since the last comparison."""
        pair = self._pairs.setdefault(reader.rank, PairedRanks())
        new = list(takewhile(lambda each: each.collectives > pair.compared, reversed(self._own)))
        for own in reversed(new):
            other = reader.update_at(own.collectives)
            if other is None:
                continue
            found = pair.compare(own, other)
            if found is not None:
                entries = self._mine.collective_before(own), reader.collective_before(other)
                name = self._notes.name_of(found.counter)
                return pairing_verdict(found, (self._mine.rank, reader.rank), entries, name)
        return None


def _make_private(folder: Path) -> None:
    """Makes a folder that nobody else can enter. Raises OSError where somebody else has made the one above it."""
    above = folder.parent
    above.mkdir(mode=0o700, exist_ok=True)
    about = above.lstat()
    if about.st_uid != os.getuid() or above.is_symlink() or about.st_mode & 0o077:
        raise PermissionError(f"{above} must belong to this user alone")
    for other in above.iterdir():  # of ranks that were killed
        readers = [LedgerReader.open(path) for path in other.glob("health/rank-*.ledger")]
        if readers and all(each is not None and look_at_process(each.pid) is None for each in readers):
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
