"""What there is to run on: devices, links, nodes, networks and clusters as values, by the names people use.

    load_cluster("4x dgx-h100")                    4 nodes of that kind
    load_cluster("32x h100-sxm")                   32 devices: as few equal nodes of the usual kind as hold them
    load_cluster("p4d.24xlarge x 2")               the same, the count behind
    load_cluster("8x dgx-a100 over roce-4x100g")   on another network than the usual
    load_cluster("2x ./mine.yaml")                 two cores of the host that ``paceline calibrate`` measured
    load_cluster("2x cpu-host over ethernet-10g")  two such hosts: without a network it would be two cores of one

All is in seconds, bytes, bytes per second and FLOP per second. Figures are in ``catalog/``, each with its source.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.cluster import entries as written
from paceline.errors import UsageError
from paceline.units import GIB

# The least share of the dense peak that products reached on A100, H100 and B200: for devices that nobody measured.
UNMEASURED_SHARE = 0.78
MOST_DEVICES = 2**18
_MEASURED = ("shapes", "memory_rates", "operation_s", "tensor_s", "step_s", "loop_s")  # what tables_of copies
_LOOP_OPERATIONS = 10  # of a run's loop, where nobody measured it: about what one takes that was
_COUNT_FIRST = re.compile(r"^\s*(\d+)\s*[x*]\s*(\S.*)$", re.IGNORECASE)
_COUNT_LAST = re.compile(r"^(.*\S)\s+[x*]\s*(\d+)\s*$", re.IGNORECASE)
Key = TypeVar("Key")
_OVER = re.compile(r"^(.*\S)\s+(?:over|on)\s+(\S.*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRate:
    """FLOP per second of one shape: (rows, inner, columns) of a product, (batch, heads, sequence, head size)."""

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    flops: float
    layout: str = ""  # of a product: nn, nt, tn; empty where it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or the processors of a host.

    ``peak_flops`` are dense, by dtype; ``matmul_ceiling`` the most that products were measured to reach;
    ``memory_share`` what streaming kernels reach of the bandwidth; ``launch_s`` what the host pays for one eager kernel
    and ``compiled_launch_s`` for one of a compiled block.

    What ``paceline calibrate`` measured besides: ``shapes``; ``memory_rates``, bytes per second of families of kernels
    by bytes; the host's time for one operation of a training step (``operation_s``), for each further tensor of one
    over lists (``tensor_s``), for a step whatever is in it (``step_s``) and what surrounds it in a run (``loop_s``);
    ``factor``, what a run took over what its kernels add up to, as ``calibrate --from`` fits it; ``kernels``, seconds
    of single ones, which ``calibrate --for`` has timed.
    """

    name: str
    vendor: str
    generation: written.Generation
    memory_bytes: float
    memory_bandwidth: float
    memory_share: float
    peak_flops: Mapping[str, float] = field(hash=False)
    matmul_ceiling: Mapping[str, float] = field(hash=False)
    launch_s: float
    compiled_launch_s: float
    sm_count: int
    shapes: tuple[ShapeRate, ...] = ()
    memory_rates: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict, hash=False)
    operation_s: float | None = None
    tensor_s: float = 0.0
    step_s: float = 0.0
    loop_s: float = 0.0
    factor: float = 1.0
    kernels: Mapping[str, float] = field(default_factory=dict, hash=False)

    def peak(self, dtype: str) -> float:
        """Returns the dense peak of a dtype, or of what it may be computed in where that is faster."""
        kinds = (dtype, *_COMPUTED_AS.get(dtype, ()))
        if found := [self.peak_flops[each] for each in kinds if each in self.peak_flops]:
            return max(found)
        rule, known = "dtypes are fp32, tf32, fp16, bf16 and fp8", ", ".join(self.peak_flops)
        raise UsageError(f"{self.name} has no figure for {dtype}\n  {rule}\n  take one of {known}")

    def ceiling(self, dtype: str) -> float:
        """Returns the most that a product reaches: as measured, else the usual share of the peak."""
        for each in (dtype, *_COMPUTED_AS.get(dtype, ())):
            if each in self.matmul_ceiling:
                return self.matmul_ceiling[each]
            if each in self.peak_flops:
                return self.peak_flops[each] * (UNMEASURED_SHARE if each != "fp32" or self.is_cpu else 0.9)
        return self.peak(dtype)

    @property
    def is_cpu(self) -> bool:
        return self.generation == "cpu"

    def emulates(self, dtype: str) -> bool:
        """Says whether products of a dtype are slower than in fp32: they were measured on a device without units."""
        return self.ceiling(dtype) < self.ceiling("fp32")


# What a dtype is computed in where there are no units for it, in order.
_COMPUTED_AS = {
    "fp8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp32",),  # V100 and T4: emulated, at the rate of fp32 at best
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins nodes: bytes/s one way per NODE, over all its cards; what collectives reach of it; a hop's latency."""

    name: str
    kind: str
    bandwidth: float
    efficiency: float
    latency_s: float
    cards: int = 1

    @property
    def reached(self) -> float:
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Network):
    """What joins the devices of a node: the same one way per DEVICE.

    ``ring`` and ``nvls_ring`` are measured bus bandwidths by the number of devices that take part. ``all_reduce`` holds
    measured seconds by bytes, by ranks; ``busy`` is what collectives take while the ranks compute, over what alone.
    """

    kind: written.LinkKind
    nvls: bool
    ring: Mapping[int, float] = field(default_factory=dict, hash=False)
    nvls_ring: Mapping[int, float] = field(default_factory=dict, hash=False)
    all_reduce: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict, hash=False)
    busy: float = 1.0

    def ring_bandwidth(self, devices: int) -> float:
        """Returns the bus bandwidth of a ring: as measured for the nearest count not above, else by efficiency."""
        return _by_count(self.ring, devices, self.reached)

    def nvls_bandwidth(self, devices: int) -> float:
        """Returns the bus bandwidth of an all-reduce in the switch; a ring's where there is none."""
        return _by_count(self.nvls_ring, devices, self.ring_bandwidth(devices)) if self.nvls else 0.0


def _by_count(table: Mapping[int, float], devices: int, otherwise: float) -> float:
    known = [count for count in table if count <= devices]
    return table[max(known)] if known else otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host: so many devices of one kind, and the link between them; ``gloo`` is that link over Gloo, if measured."""

    name: str
    device: Device
    devices: int
    inside: Link
    gloo: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes on a network; ``between`` may be None where there is one."""

    name: str
    node: Node
    nodes: int
    between: Network | None

    def __post_init__(self) -> None:
        if self.devices > MOST_DEVICES:
            rule = f"a cluster has {MOST_DEVICES:,} at most: no run is known with more"
            raise UsageError(f"{self.name}: {self.devices:,} devices\n  {rule}\n  take fewer")
        if self.nodes < 1 or self.node.devices < 1 or (self.nodes > 1 and self.between is None):
            what = f"{self.nodes} nodes of {self.node.devices} devices on {self.between and self.between.name}"
            rule = "a cluster has one of each at least, and several nodes need a network"
            raise UsageError(f"{what}: {rule}\n  name one: 'NAME over infiniband-ndr-8x'")

    @property
    def device(self) -> Device:
        return self.node.device

    @property
    def devices(self) -> int:
        return self.nodes * self.node.devices

    @property
    def memory_bytes(self) -> float:
        return self.devices * self.device.memory_bytes


def load_cluster(text: str) -> Cluster:
    """Reads a cluster from a name and a count, as the top of this file shows. Raises UsageError with the nearest."""
    over = _OVER.match(text)
    wanted = over[1] if over else text.strip()
    first, last = _COUNT_FIRST.match(wanted), _COUNT_LAST.match(wanted)
    count = int(first[1] if first else last[2] if last else 1)
    name = (first[2] if first else last[1] if last else wanted).strip()
    if count < 1 or not name:
        rule = "a cluster is a count and a name"
        fix = "write '4x dgx-h100' or '32x h100-sxm'; names: paceline cluster ls"
        raise UsageError(f"{wanted!r} is no cluster: it has {count} of {name or 'nothing'}\n  {rule}\n  {fix}")
    catalog, path = Catalog(), Path(name)
    if path.suffix in (".yaml", ".yml"):
        found = written.read_catalog(path)
        catalog = Catalog(entries=catalog.entries.with_file(found))
        if not (found.nodes or found.devices):
            raise UsageError(f"{path} has no nodes and no devices\n  a cluster is made of them\n  see docs/clusters.md")
        name = next(iter(found.nodes or found.devices))
    return catalog.cluster(name, count, over[2].strip() if over else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Entries, of this package unless told otherwise, made into values. Raises UsageError with the nearest names."""

    entries: written.CatalogFile = field(default_factory=written.shipped)

    def cluster(self, name: str, count: int, network: str | None) -> Cluster:
        found = written.find_name(name, self.entries.nodes)
        if found is None:
            if written.find_name(name, self.entries.devices) is None:
                raise _unknown(name, "cluster", [*self.entries.nodes, *self.entries.devices])
            return self.of_devices(name, count, network=network)
        entry = self.entries.nodes[found]
        is_cores = found in self.entries.devices and self.device(found).is_cpu  # a host whose device has its name
        if count > 1 and network is None and entry.network is None and is_cores:
            return self.of_devices(found, count, node_devices=count)
        between = self._between(network or entry.network, count)
        return Cluster(name=f"{count}x {found}", node=self._node(found, entry), nodes=count, between=between)

    def of_devices(
        self, name: str, count: int, *, node_devices: int | None = None, network: str | None = None
    ) -> Cluster:
        """Returns so many devices in nodes of ``node_devices`` (None: the usual), on ``network`` (None: the usual).

        Nodes of that size are as the catalog has them with this device; where it has none, a part of the usual one.
        """
        if count < 1:
            raise UsageError(f"{count} devices: a cluster has one at least\n  say how many: '8x {name}'")
        node, usual = self._usual_node(name, node_devices)
        name, most = f"{count}x {node.device.name}", node_devices or node.devices
        least = -(-count // most)  # nodes; where equal ones would stand half empty, it is refused
        nodes = next((nodes for nodes in range(least, 2 * least + 1) if count % nodes == 0), 0)
        if not nodes:
            rule = f"nodes of a cluster are equal\n  take {most * (count // most)} or {most * least}"
            raise UsageError(f"{name}: no equal nodes of up to {most} devices hold {count}\n  {rule}")
        between = self._between(network or usual, nodes)
        return Cluster(name=name, node=replace(node, devices=count // nodes), nodes=nodes, between=between)

    def device(self, name: str) -> Device:
        found, entry = _find(name, "device", self.entries.devices)
        device = _device(found, entry)
        if entry.tables_of is None:
            return device
        measured = self.device(entry.tables_of)
        return replace(device, **{name: getattr(measured, name) for name in _MEASURED})

    def node(self, name: str) -> Node:
        found = written.find_name(name, self.entries.nodes)
        if found is not None:
            return self._node(found, self.entries.nodes[found])
        if written.find_name(name, self.entries.devices) is None:
            raise _unknown(name, "node", [*self.entries.nodes, *self.entries.devices])
        return self._usual_node(name)[0]

    def link(self, name: str) -> Link:
        found, entry = _find(name, "link", self.entries.links)
        return Link(
            **_wire(found, entry),
            nvls=entry.nvls,
            ring={count: rate * 1e9 for count, rate in entry.ring_gb_per_s.items()},
            nvls_ring={count: rate * 1e9 for count, rate in entry.nvls_gb_per_s.items()},
            all_reduce=_points(entry.all_reduce_us, 1e-6),
            busy=entry.busy,
        )

    def network(self, name: str) -> Network:
        return Network(**_wire(*_find(name, "network", self.entries.networks)))

    def _node(self, name: str, entry: written.NodeEntry) -> Node:
        inside, over_gloo = self.link(entry.inside), self.entries.nodes.get(f"{name}-gloo")
        gloo = self.link(over_gloo.inside) if over_gloo is not None else inside if inside.kind == "loopback" else None
        return Node(name=name, device=self.device(entry.device), devices=entry.devices, inside=inside, gloo=gloo)

    def _usual_node(self, device: str, devices: int | None = None) -> tuple[Node, str | None]:
        """Returns the node that a device is in with so many, else usually; with this very device, and its network."""
        found = self.device(device)
        name = self.entries.devices[found.name].node
        same = (each for each, entry in self.entries.nodes.items() if entry.device == found.name)
        name = next((each for each in same if self.entries.nodes[each].devices == devices), name)
        if name is None or name not in self.entries.nodes:
            rule = "a cluster is made of nodes"
            raise UsageError(f"no node is known with {found.name}\n  {rule}\n  name one of them: paceline cluster ls")
        entry = self.entries.nodes[name]
        return replace(self._node(name, entry), device=found), entry.network

    def _between(self, name: str | None, nodes: int) -> Network | None:
        if name is None and nodes > 1:
            fix = f"name it: 'NAME over NETWORK', one of {', '.join(self.entries.networks)}"
            raise UsageError(f"{nodes} nodes, and no network is known between them\n  several nodes need one\n  {fix}")
        return None if name is None else self.network(name)


def _wire(name: str, entry: written.NetworkEntry) -> dict[str, Any]:
    rates = {"bandwidth": entry.gb_per_s * 1e9, "efficiency": entry.efficiency, "latency_s": entry.latency_us * 1e-6}
    return {"name": name, "kind": entry.kind, "cards": entry.cards, **rates}


def _points(tables: Mapping[Key, Mapping[int, float]], unit: float) -> dict[Key, tuple[tuple[int, float], ...]]:
    return {key: tuple(sorted((size, x * unit) for size, x in points.items())) for key, points in tables.items()}


def _device(name: str, entry: written.DeviceEntry) -> Device:
    compiled = entry.compiled_launch_us if entry.compiled_launch_us is not None else entry.launch_us
    return Device(
        name=name,
        vendor=entry.vendor,
        generation=entry.generation,
        memory_bytes=entry.memory_gib * GIB,
        memory_bandwidth=entry.memory_gb_per_s * 1e9,
        memory_share=entry.memory_share,
        peak_flops={dtype: rate * 1e12 for dtype, rate in entry.peak_tflops.items()},
        matmul_ceiling={dtype: rate * 1e12 for dtype, rate in entry.measured_tflops.items()},
        launch_s=entry.launch_us * 1e-6,
        compiled_launch_s=compiled * 1e-6,
        sm_count=entry.multiprocessors,
        shapes=tuple(
            ShapeRate(kind=e.kind, dtype=e.dtype, sizes=e.sizes, flops=e.tflops * 1e12, layout=e.layout or "")
            for e in entry.shapes
        ),
        memory_rates=_points(entry.memory_rates, 1e9),
        operation_s=None if entry.operation_us is None else entry.operation_us * 1e-6,
        tensor_s=entry.tensor_us * 1e-6,
        step_s=entry.step_us * 1e-6,
        loop_s=loop_us(entry) * 1e-6,
        factor=entry.factor,
        kernels={label: micros * 1e-6 for label, micros in entry.kernels_us.items()},
    )


def loop_us(entry: written.DeviceEntry) -> float:
    """Returns what a run's loop takes a step: as measured, else a few operations; 0 beside a GPU."""
    if entry.loop_us is not None:
        return entry.loop_us
    return _LOOP_OPERATIONS * (entry.operation_us or entry.launch_us) if entry.generation == "cpu" else 0.0


def _find(name: str, what: str, entries: Mapping[str, written.AnyEntry]) -> tuple[str, written.AnyEntry]:
    found = written.find_name(name, entries)
    if found is None:
        raise _unknown(name, what, entries)
    return found, entries[found]


def _unknown(name: str, what: str, known: Mapping[str, object] | list[str]) -> UsageError:
    near = written.near_names(name, known)
    hint = f"did you mean {', '.join(near)}?" if near else "none is like it"
    rule = "names are those of the catalog, or a YAML file of your own"
    fix = "list them: paceline cluster ls; measure this machine: paceline calibrate --output mine.yaml"
    return UsageError(f"no {what} is called {name!r}: {hint}\n  {rule}\n  {fix}")


class Peaks(NamedTuple):
    """FLOP per second of one device in one dtype: of the data sheet, and as measured. None where nobody knows."""

    sheet: float | None = None
    measured: float | None = None


def find_peaks(name: str, compute: str, entry: Path | None = None) -> Peaks:
    """Returns the peaks of a GPU by its driver's name, or of an ``entry``'s device; a CPU of the catalog has none."""
    try:
        device = Catalog().device(name) if entry is None else load_cluster(str(entry)).device
    except UsageError:  # unknown, or a file that is of no use, which is told of elsewhere
        return Peaks()
    if entry is None and device.is_cpu:
        return Peaks()
    measured = device.matmul_ceiling.get(compute)
    with contextlib.suppress(UsageError):  # there is no figure for this dtype
        return Peaks(sheet=device.peak(compute), measured=measured)
    return Peaks(measured=measured)
