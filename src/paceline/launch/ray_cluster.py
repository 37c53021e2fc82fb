"""What this package calls of Ray, in one place: the nodes of a cluster, placement groups, and actors in their bundles.

Ray is an extra (``pip install 'paceline[ray]'``) without types of its own here, so that it is loaded by name.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.devices import load_cluster
from paceline.errors import LaunchError, UsageError
from paceline.launch.ray_settings import RayOptions
from paceline.launch.remote import give_order
from paceline.untrusted import parse_json_object

_NAMESPACE = "paceline"
_CALLS = 4  # of an actor at once: one waits for output while others signal
_ANSWER_S = 120.0
_LISTEN_S = 10.0
_ACCELERATOR = "accelerator_type:"
_NEWS_S = 1.0  # that a call waits for output
_MOST_LINES = 1000
_END_S = 10.0


class LostWorkerError(Exception):
    """An actor died, or its Ray node did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A machine of the cluster that lives: its address and what Ray may give away of it."""

    id: str
    address: str
    resources: Mapping[str, float]

    def num_bundles(self, bundle: Mapping[str, float]) -> int:
        """Returns how many bundles would fit on this node if nothing else were there."""
        return min(int(self.resources.get(name, 0.0) // amount) if amount else 2**16 for name, amount in bundle.items())

    @property
    def gpu_bytes(self) -> float | None:
        """The memory of its GPUs, if the catalog knows the kind that Ray has found."""
        kinds = [name.removeprefix(_ACCELERATOR) for name in self.resources if name.startswith(_ACCELERATOR)]
        for kind in kinds:
            with contextlib.suppress(UsageError):
                return float(load_cluster(f"1x {kind.lower()}").device.memory_bytes)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    """An actor, and the node that it is on."""

    actor: Any
    node: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(slots=True)
class RayCluster:
    """A connection to a Ray cluster. Everything that was placed ends with it."""

    ray: Any
    address: str
    _groups: list[Any] = field(default_factory=list)

    @classmethod
    def connect(cls, address: str) -> RayCluster:
        """Connects to the cluster at ``address``. Raises LaunchError where none answers or Ray is not installed."""
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise LaunchError(
                "Ray is not installed here\n  --on ray starts actors on a Ray cluster\n  pip install 'paceline[ray]'"
            ) from error
        if not ray.is_initialized():
            try:
                _check_listens(address)
                ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
            except (OSError, RuntimeError, ValueError, TimeoutError) as error:  # ConnectionError is an OSError
                said = str(error).strip().splitlines()
                raise UsageError(
                    f"no Ray cluster answers at address {address}: {said[0] if said else type(error).__name__}\n"
                    "  --on ray uses a cluster that runs already\n"
                    "  start one (ray start --head), or name it: --set address=HOST:6379, or RAY_ADDRESS"
                ) from error
        return cls(ray, str(ray.get_runtime_context().gcs_address))

    def nodes(self) -> list[RayNode]:
        """Returns the nodes that live, in the order of their addresses."""
        found = [
            RayNode(id=str(each["NodeID"]), address=str(each["NodeManagerAddress"]), resources=each["Resources"])
            for each in self.ray.nodes()
            if each["Alive"]
        ]
        return sorted(found, key=lambda node: (node.address, node.id))

    def reserve(self, options: RayOptions, count: int) -> Any:
        """Asks Ray for ``count`` bundles, which it sets aside together or not at all."""
        util = importlib.import_module("ray.util")
        group = util.placement_group([options.bundle] * count, strategy=options.strategy)
        self._groups.append(group)
        return group

    def is_reserved(self, group: Any, wait_s: float) -> bool:
        """Waits for the bundles; says whether they are there."""
        return bool(group.wait(timeout_seconds=wait_s))

    def start_workers(
        self, group: Any, options: RayOptions, command: Sequence[str], workdir: str
    ) -> list[PlacedWorker]:
        """Starts an actor in each bundle. Raises LostWorkerError where one does not start."""
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        kind = self.ray.remote(RemoteWorker)
        actors = [
            kind.options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                max_concurrency=_CALLS,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
                **({"runtime_env": {"env_vars": {"PYTHONPATH": path}}} if (path := options.pythonpath) else {}),
            ).remote(list(command), workdir)
            for index in range(len(group.bundle_specs))
        ]
        places = [self.call(actor.place.remote(), _ANSWER_S) for actor in actors]
        placed = [
            PlacedWorker(actor=actor, node=node, address=address, gpus=tuple(gpus))
            for actor, (node, address, gpus) in zip(actors, places, strict=True)
        ]
        return sorted(placed, key=lambda worker: (worker.address, worker.node))

    def call(self, reference: Any, within_s: float) -> Any:
        """Returns what a call of an actor returned. Raises LostWorkerError if the actor is gone or does not answer."""
        errors = importlib.import_module("ray.exceptions")
        try:
            return self.ray.get(reference, timeout=within_s)
        except errors.GetTimeoutError as error:
            raise LostWorkerError(f"did not answer within {within_s:g} s") from error
        except errors.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise LostWorkerError(lines[-1] if lines else type(error).__name__) from error

    def release(self, workers: Sequence[PlacedWorker]) -> None:
        """Ends actors, and gives their bundles back."""
        for worker in workers:
            with contextlib.suppress(Exception):  # it is gone already, in whichever words Ray says so
                self.ray.kill(worker.actor)
        util = importlib.import_module("ray.util")
        while self._groups:
            group = self._groups.pop()
            util.remove_placement_group(group)
            self._wait_removed(util, group)

    def _wait_removed(self, util: Any, group: Any) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while util.placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline:
            time.sleep(0.1)


def _check_listens(address: str) -> None:
    """Raises OSError at once where nothing listens at HOST:PORT: Ray itself tries for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_LISTEN_S).close()


class RemoteWorker:
    """The actor: it has ``paceline.launch.remote`` run on its machine by ``command``, and hands over orders and output.

    Ray calls its methods from several threads at once. When the actor is gone, the pipe to ``remote`` closes, and the
    run on that machine is asked to save and to leave.
    """

    def __init__(self, command: Sequence[str], workdir: str) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            list(command), cwd=workdir, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)

    def place(self) -> tuple[str, str, list[str]]:
        """Returns the Ray node, the address, and the GPUs that Ray gave to this actor."""
        ray = importlib.import_module("ray")
        gpus = [str(each) for each in ray.get_gpu_ids()]
        return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address()), gpus

    def ask(self, order: Mapping[str, object]) -> dict[str, Any] | str:
        """Gives an order that is answered by one line of JSON; returns why there is no answer as a text."""
        assert self._process.stdout is not None
        give_order(self._process, order)
        said = ""
        for line in self._process.stdout:
            said = line.decode("utf-8", "replace").strip() or said
            with contextlib.suppress(ValueError):
                return parse_json_object(line)
        return f"does not start Paceline: {said or f'exit code {self._process.wait()}'}"

    def run(self, order: Mapping[str, object]) -> None:
        """Starts the command of an order. The job's secret is in the order, and so on no command line."""
        give_order(self._process, order)
        self._reader.start()

    def news(self) -> tuple[list[str], int | None]:
        """Returns the lines that the command has printed since, after a second at most; its exit code when it ended."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._lines.get(timeout=_NEWS_S))
            while len(found) < _MOST_LINES:
                found.append(self._lines.get_nowait())
        code = self._process.poll()
        if code is None:
            return found, None
        self._reader.join(_NEWS_S)  # processes that the command left behind may hold its output open
        while not self._lines.empty():
            found.append(self._lines.get_nowait())
        return found, 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """Hands a signal on to the command."""
        give_order(self._process, {"do": "signal", "number": number})

    def stop(self) -> None:
        """Ends the command without a save: at once, or after some seconds by force."""
        for number in (signal.SIGINT, signal.SIGKILL):
            self.signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                return
        self._process.kill()

    def close(self) -> None:
        """Ends the orders, by which the command is asked to save and to leave, and waits for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode("utf-8", "replace").rstrip())
