"""How the ranks that a launcher started find one another: through a store, at the address in the environment.

``paceline train`` gives them the address of its control server (``control/server.py``); torchrun, Slurm and their like
that of one of torch's stores, which authenticates nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.comm.control.store import ControlClient, ControlStore
from paceline.comm.control.wire import Address, listen, secret_of
from paceline.errors import CommunicationError

_C10D: Any = dist  # its stores are not annotated
_WORLD = "default_pg"  # before all keys of the ranks, as torch names it
_ANSWER = datetime.timedelta(seconds=0.2)  # until a rank looks again which part of a store rank 0 is in
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_kept: list[ControlStore] = []  # of this process's groups, which hold no reference to them


class Meeting:
    def __init__(self, timeout_s: float) -> None:
        missing = [name for name in _ENVIRONMENT if name not in os.environ]
        if missing:
            what = f"the launcher's environment is incomplete: {', '.join(missing)} not set"
            rule = f"ranks find one another through {', '.join(_ENVIRONMENT)}"
            raise CommunicationError(f"{what}\n  {rule}\n  start with paceline train or torchrun")
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store: Any = None

    def initialize(self, backend: str) -> None:
        with self._explained("arrived"), threads_that_do_not_preempt():
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _own_store(world, self._timeout) if rank == 0 else None
            store = store or join_store(self._timeout.total_seconds())
            store = store if isinstance(store, ControlStore) else self._part_of(store, rank, world)
            self._store = _C10D.PrefixStore(_WORLD, store)
            self._store.set(f"paceline arrived {rank}", "")
            # No device_id: bound to a device, NCCL makes subgroups by splitting, in which all ranks of the world must
            # take part, while ours are made by their members alone.
            group_store = _store_for_nccl(store, rank, world) if backend == "nccl" else self._store
            dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=self._timeout)
        if isinstance(store, ControlStore):
            _kept.append(store)
        atexit.unregister(disconnect)  # of an earlier meeting
        atexit.register(disconnect)

    def _part_of(self, store: Any, rank: int, world: int) -> Any:
        """Agrees on a part of a store that may be an agent's, with what ranks left there before they were restarted.

        Rank 0 names the part, and answers each rank that comes there: in the part of an earlier meeting nobody does.
        """
        own, deadline = secrets.token_hex(4), time.monotonic() + self._timeout.total_seconds()
        if rank == 0:
            store.set("attempt", own)
        while True:
            part = _C10D.PrefixStore(store.get("attempt").decode(), store)
            self._store = _C10D.PrefixStore(_WORLD, part)
            self._store.set(f"paceline arrived {rank}", own)
            try:
                if rank:
                    self._store.wait([f"answers {own}"], _ANSWER)
                for other in range(1, 1 if rank else world):
                    self._store.set(f"answers {self._store.get(f'paceline arrived {other}').decode()}", "")
                return part
            except RuntimeError:
                if rank == 0 or time.monotonic() > deadline:
                    raise

    def wait_until_all_joined(self) -> None:
        with self._explained("joined"):
            wait_until_all_joined(self._store, "", dist.get_world_size(), self._timeout)

    @contextlib.contextmanager
    def _explained(self, stage: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch raises its DistErrors as RuntimeErrors
            address = os.environ["MASTER_ADDR"]
            address = address if Address.parse(address) else f"{address}:{os.environ['MASTER_PORT']}"
            rank, text = f"rank {os.environ['RANK']}", str(error)
            who, first = f"{rank} of {os.environ['WORLD_SIZE']}", (text.splitlines() or [""])[0]
            what = f"{who} cannot join at {address}\n  {first}"
            if "EADDRINUSE" in text or "already in use" in text.lower():
                what = f"{rank} cannot listen on {address}: the port is in use\n"
                what += "  choose another MASTER_PORT, or end its user"
            elif "timed out" in text.lower() or "timeout" in text.lower():
                what = f"{who} waited in vain for {self._missing(stage)} at {address}\n  {first}"
            raise CommunicationError(what) from error

    def _missing(self, stage: str) -> str:
        """Names the ranks that have not come so far, if the store can still be asked."""
        ranks: list[int] = []
        with contextlib.suppress(RuntimeError, ValueError):
            if self._store is not None:
                world = range(int(os.environ["WORLD_SIZE"]))
                ranks = [rank for rank in world if not self._store.check([f"paceline {stage} {rank}"])]
        if not ranks:
            return "the others"
        named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def join_store(timeout_s: float) -> Any:
    """Returns a new connection to the store at which the ranks meet; in our control server, MASTER_PORT numbers it."""
    place, number = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address, timeout = Address.parse(place), datetime.timedelta(seconds=timeout_s)
    if address is None:
        store = _C10D.TCPStore(place, number, None, False, timeout, wait_for_workers=False)
    else:
        store = ControlStore(ControlClient(address, lambda: secret_of(os.environ)), prefix=f"ranks/{number}/")
    store.set_timeout(timeout)
    return store


def _store_for_nccl(store: Any, rank: int, world: int) -> Any:
    """Returns the store of a group of NCCL, whose own threads read it while Python may be busy or gone.

    For ranks of one host it is a file beside our launcher's socket, which needs no Python. Between hosts it is ours;
    then what those threads would read once a second, whether to dump what they know, is turned off.
    """
    address = Address.parse(os.environ["MASTER_ADDR"])
    if address is not None and address.is_path:
        # Ranks may meet again, and a file that is left from before would mislead them.
        number = store.add(f"paceline nccl {rank}", 1)
        file = Path(address.host).with_name(f"nccl-{os.environ['MASTER_PORT']}-{number}")
        store = _C10D.FileStore(str(file), world)
    elif address is not None:
        for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ.setdefault(name, "0")
    return _C10D.PrefixStore(_WORLD, store)


def does_first_rank_hold_store() -> bool:
    """Says whether the store is in the process of rank 0, and goes with it: no launcher has made one."""
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return Address.parse(os.environ["MASTER_ADDR"]) is None and not is_agents


def _own_store(world: int, timeout: datetime.timedelta) -> Any:
    """Makes torch's store on rank 0, at MASTER_ADDR and no other address; None where the launcher has one."""
    place, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not does_first_rank_hold_store():
        return None
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    try:
        with listen(Address(place, port)) as listener:
            port = listener.getsockname()[1]
            return _C10D.TCPStore(place, port, world, True, master_listen_fd=os.dup(listener.fileno()), **options)
    except OSError:  # an address that is translated on the way here, or the store of an earlier meeting
        return _C10D.TCPStore(place, port, world, True, **options)


def disconnect() -> None:
    """Leaves the process group, if there is one. Safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()
    while _kept:
        _kept.pop().close()


def abort(only: str = "") -> None:
    """Leaves the process group though others may not; for NCCL from any thread, and devices wait for nobody any more.

    ``only``: where that is the backend. Safe to call twice.
    """
    if not (dist.is_initialized() or only):
        world = _C10D.distributed_c10d._world
        if world.pg_names:
            raise CommunicationError("torch has left half a process group")
        world.group_count = 0  # torch has counted a group that was interrupted: the next one would have another name
    if not dist.is_initialized() or dist.get_backend() != (only or dist.get_backend()):
        return
    if dist.get_backend() == "nccl":
        _C10D.distributed_c10d._abort_process_group()
    disconnect()


def wait_until_all_joined(store: Any, group: str, size: int, timeout: datetime.timedelta) -> None:
    """Returns when all ranks of a group have called it; on rank 0 of the world, which may hold the store, last.

    Torch makes a group on a rank as soon as this one is connected: others may be connecting, and fail if it leaves.
    """
    rank = dist.get_rank()
    if _kept:  # the store is our launcher's
        _kept[-1].meet(f"{_WORLD}/{group}paceline joined", rank, size, timeout)
        return
    store.set(f"paceline joined {rank}", "")
    if store.add("paceline joined", 1) == size:
        store.set("paceline all joined", "")
    store.wait(["paceline all joined"], timeout)
    if rank == 0 and size > 1:
        store.wait(["paceline all told"], timeout)
    elif store.add("paceline told", 1) == size - 1:
        store.set("paceline all told", "")


@contextlib.contextmanager
def threads_that_do_not_preempt() -> Iterator[None]:
    """Threads that start here wait for a free core, or the scheduler's tick, when they are woken (SCHED_BATCH).

    Gloo's event loop only tries the lock of a connection, and asks again at once while it is taken. Where it preempts
    the very thread that holds the lock, which is usual with as many ranks as cores, it spins until the tick, up to 4 ms
    later, and both ranks wait.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
