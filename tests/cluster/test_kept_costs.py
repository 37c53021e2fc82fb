"""Kept figures of clusters: every collective, algorithm, size and group on links of all kinds; kernels; the catalog."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from kept_figures import assert_kept, told

from paceline.cluster import costs
from paceline.cluster.costs import ALGORITHMS, Placement, Wire, Wires
from paceline.cluster.detect import Machine, alone_device, detect_cluster, read_smi
from paceline.cluster.devices import Catalog, Device, find_peaks, load_cluster
from paceline.cluster.entries import find_name, near_names, shipped
from paceline.cluster.kernels import (
    MEMORY_FAMILIES,
    KernelRates,
    Operation,
    attention_rate,
    attention_seconds,
    ceiling,
    host_seconds,
    matmul_rate,
    matmul_seconds,
    memory_rate,
    work_seconds,
)
from paceline.cluster.wires import (
    Collective,
    Group,
    algorithm_cost,
    bus_bandwidth,
    collective_seconds,
    group_of,
    over_backend,
    wire_cost,
)

PLACES = [Placement(ranks=ranks) for ranks in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13)]
PLACES += [
    Placement(ranks=ranks, hosts=hosts) for ranks, hosts in ((2, 2), (4, 2), (6, 3), (8, 4), (12, 2), (12, 3), (5, 5))
]
LINKS = {
    "usual": Wires(),
    "slow": Wires(inside=Wire(alpha_s=1e-5, bandwidth=5e9), across=Wire(alpha_s=3e-4, bandwidth=1e8)),
}
LINKS["slow inside"] = Wires(inside=Wire(alpha_s=9e-4, bandwidth=1e8), across=Wire(alpha_s=1e-5, bandwidth=1e9))
SIZES = (1.0, 40_000.0, 3e6, 4e8)
CLUSTERS = ("1x dgx-h100", "40x dgx-h100", "4x dgx-a100", "2x dgx-1", "20x p4d.24xlarge over roce-8x200")
CLUSTERS += ("8x l40s", "1x gb200-nvl72", "2x dgx-b200", "1x h200-measured", "2x g4dn.12xlarge", "4x cpu-host")
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


def figures() -> dict[str, object]:
    parts = (_of_messages(), _of_trees(), _of_nccl(), _of_wires(), _of_kernels(), _of_catalog(), _of_machines())
    return {name: value for part in parts for name, value in part}


def test_costs_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _of_messages() -> Iterator[tuple[str, object]]:
    """The algorithms made of messages."""
    for (name, links), where in product(LINKS.items(), PLACES):
        found: dict[str, object] = {}
        for algorithm in ALGORITHMS:
            found[f"all_reduce {algorithm}"] = [
                costs.all_reduce_seconds(algorithm, size, where, links) for size in SIZES
            ]
            if algorithm != "tree":
                found[f"scatter {algorithm}"] = [costs.scatter_seconds(algorithm, size, where, links) for size in SIZES]
        for algorithm in ("ring", "tree"):
            found[f"broadcast {algorithm}"] = [costs.broadcast_seconds(algorithm, size, where, links) for size in SIZES]
        found["fastest"] = [
            f"{costs.fastest_all_reduce(size, where, links)} {costs.fastest_scatter(size, where, links)} "
            f"{costs.fastest_broadcast(size, where, links)}"
            for size in SIZES
        ]
        yield f"{name} {where.ranks} on {where.hosts}", found
    for where, algorithm in product(PLACES, ALGORITHMS):
        sent = [costs.sent_bytes(algorithm, 840.0, where, rank) for rank in range(where.ranks)]
        link = costs.host_link_bytes(algorithm, 840.0, where)
        pairs = sorted((sender, receiver) for sender, receiver, _ in costs.all_reduce_messages(algorithm, 840.0, where))
        yield f"sent {algorithm} {where.ranks} on {where.hosts}", [sent, link, [str(pair) for pair in pairs]]


def _of_trees() -> Iterator[tuple[str, object]]:
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17):
        trees = (*costs.double_tree(size), costs.rooted_tree(size, size // 2), costs.chain(size, size // 3))
        for place, tree in enumerate(trees):
            yield f"tree {size} {place}", [tree, [tree.children(rank) for rank in range(size)]]
        yield f"halving {size}", [[str(each) for each in messages] for messages in costs.halving(size)]


def _of_nccl() -> Iterator[tuple[str, object]]:
    """NCCL's collectives on GPUs."""
    for name in CLUSTERS:
        cluster = load_cluster(name)
        groups = {Group(1), Group(2), group_of(cluster, min(4, cluster.devices)), group_of(cluster, cluster.devices)}
        groups |= {group_of(cluster, max(2, cluster.devices // 4), 4), Group(2, 2), Group(8, 2), Group(24, 3)}
        for group in sorted(groups, key=str):
            found: dict[str, object] = {"bus": bus_bandwidth(group, cluster), "group": group}
            for kind in COLLECTIVES:
                found[kind] = [collective_seconds(kind, size, group, cluster) for size in (0.0, 64.0, 1e5, 5e6, 1e9)]
            yield f"{name} {group.ranks} {group.nodes}", found


def _of_wires() -> Iterator[tuple[str, object]]:
    """What a simulation and a replay ask."""
    groups = ((0, 1), (0, 1, 2, 3), (0, 2), (0, 1, 2), (1,))
    kinds = (*COLLECTIVES, "broadcast", "barrier", "recv")
    for name in (None, "1x dgx-a100", "2x dgx-h100", "4x cpu-host", "2x cpu-host over ethernet-10g"):
        cluster = None if name is None else load_cluster(name)
        price = wire_cost(cluster, 4, 2)
        known = [kind for kind in kinds if kind != "all_to_all"]
        yield (
            f"wires {name}",
            {
                f"{kind} {ranks}": [price(kind, size, ranks) for size in (4, 70_000, 10**8)]
                for kind in known
                for ranks in groups
            },
        )
        if cluster is not None:
            made = {
                f"{algorithm} {kind} {ranks}": algorithm_cost(cluster, algorithm, kind, 10**6, ranks)
                for algorithm in ALGORITHMS
                for kind in ("all_reduce", "all_gather", "broadcast")
                for ranks in groups
                if algorithm != "tree" or kind != "all_gather"
            }
            yield f"made {name}", made
            for backend in ("nccl", "gloo", "shared_memory", "auto"):
                found = told(lambda cluster=cluster, backend=backend: over_backend(cluster, backend))
                yield f"{backend} {name}", found if isinstance(found, str) else found.node.inside.name
    yield "too many", told(lambda: wire_cost(load_cluster("1x dgx-a100"), 9))
    yield "no algorithm", told(lambda: algorithm_cost(load_cluster("1x dgx-a100"), "star", "all_reduce", 1, (0, 1)))
    yield (
        "places",
        [
            told(lambda pair=pair: Placement(ranks=pair[0], hosts=pair[1]).node_ranks)
            for pair in ((0, 1), (1, 0), (3, 2), (4, 2))
        ],
    )


def _operations() -> Iterator[Operation]:
    given: dict[str, Any]
    for family, size in product(MEMORY_FAMILIES, (100, 10**6)):
        given = {"reads": ((1, size), (2, 7)), "writes": ((3, size // 2),), "tensors": 1 + size % 7}
        yield Operation(name=family, family=family, **given)
    for dtype, layout, sizes in product(
        ("fp32", "bf16"), ("", "nt", "tn"), ((1, 1, 1), (128, 512, 384), (2048, 4096, 1))
    ):
        yield Operation(name="mm", family="matmul", dtype=dtype, sizes=sizes, layout=layout, batch=len(sizes[0:1]))
    for family, is_causal, dtype in product(("attention", "attention_backward"), (True, False), ("fp32", "bf16")):
        yield Operation(name=family, family=family, sizes=(2, 4, 100, 64), is_causal=is_causal, dtype=dtype)
    for name, sizes in product(("convolution", "convolution_backward"), ((64, 3, 16), (64, 16, 3), (64, 16, 16))):
        yield Operation(name=name, family="matmul", dtype="bf16", sizes=sizes, reads=((1, 5000),))
    yield Operation(name="max_pool2d_with_indices_backward", family="reduction", reads=((1, 5000),))
    yield Operation(name="native_batch_norm", family="norm", reads=((1, 5000),))


def _of_kernels() -> Iterator[tuple[str, object]]:
    rates = KernelRates()
    measured = load_cluster("1x h200-measured").device
    slower = {**measured.matmul_ceiling, "bf16": 1e9}
    devices: list[Device] = [load_cluster(f"1x {name}").device for name in ("h100-sxm", "v100-sxm-16gb", "cpu-host")]
    host = devices[-1]
    devices += [measured, replace(host, name="emulating", matmul_ceiling={**host.matmul_ceiling, "bf16": 1e9})]
    devices += [
        replace(measured, name="slower", matmul_ceiling=slower),
        replace(devices[0], name="no units", sm_count=0),
    ]
    for device in devices:
        for place, operation in enumerate(_operations()):
            yield (
                f"{device.name} {place} {operation.name}",
                [
                    work_seconds(device, operation),
                    [host_seconds(device, operation, is_compiled=each) for each in (True, False)],
                    [operation.flops, operation.num_bytes, operation.has_few_channels],
                ],
            )
        for dtype in DTYPES if device.is_cpu else (*DTYPES, "fp4"):
            sizes = ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1), (100, 300, 50), (4096, 4096, 11008), (128, 128, 64))
            yield (
                f"{device.name} {dtype}",
                [
                    [matmul_seconds(device, rates, *each, dtype, batch) for each in sizes for batch in (1, 7)],
                    [attention_seconds(device, rates, 1e12, length, dtype) for length in (64, 8192)],
                    ceiling(device, dtype),
                    device.emulates(dtype) if dtype != "fp4" else None,
                    told(lambda device=device, dtype=dtype: device.peak(dtype)),
                    matmul_rate(device, (100, 200, 300), dtype, "nt"),
                    matmul_rate(device, (100, 200, 300), dtype),
                    attention_rate(device, (2, 3, 77, 64), dtype=dtype) if dtype != "fp4" else None,
                ],
            )
        sizes_of_memory = [memory_rate(device, family, size) for family in ("norm", "odd") for size in (1e3, 1e7)]
        yield f"{device.name} memory", sizes_of_memory
    points = [(10, 2.0), (1000, 8.0), (10000, 1.0)]
    yield "between", [costs.figure_between(points, size) for size in (1, 10, 99, 1000, 5000, 10000, 10**6)]
    yield "seconds between", [costs.seconds_between(points, size) for size in (1, 10, 99, 1000, 5000, 10000, 10**6)]


def _of_catalog() -> Iterator[tuple[str, object]]:
    """Every entry as values, and what names find."""
    catalog, entries = Catalog(), shipped()
    for name in entries.devices:
        device = catalog.device(name)
        yield (
            f"device {name}",
            [
                replace(device, shapes=device.shapes[:2], memory_rates={}),
                len(device.shapes),
                {family: rates[:2] for family, rates in device.memory_rates.items()},
                [device.ceiling(dtype) for dtype in DTYPES if dtype != "fp8"],
            ],
        )
    for name in entries.links:
        link = catalog.link(name)
        counts = (1, 2, 4, 6, 8, 72)
        tables = [[link.ring_bandwidth(count), link.nvls_bandwidth(count)] for count in counts]
        yield f"link {name}", [link.reached, link.latency_s, link.nvls, link.busy, tables, len(link.all_reduce)]
    yield (
        "networks",
        {name: [catalog.network(name).reached, catalog.network(name).latency_s] for name in entries.networks},
    )
    yield (
        "nodes",
        {
            name: [found.device.name, found.devices, found.inside.name, found.gloo and found.gloo.name]
            for name, found in ((name, catalog.node(name)) for name in entries.nodes)
        },
    )
    texts = ("4x dgx-h100", "32x h100-sxm", "p4d.24xlarge x 2", "8 x dgx-a100 over roce-4x100", "12x A100 SXM4 80GB")
    texts += ("2x cpu-host", "2x cpu-host over ethernet-10g", "dgx-1", "17x h100-sxm", "20x h100-sxm", "0x dgx-1", "x")
    texts += (
        "3x t4",
        "9x h100-sxm",
        "300000x h100-sxm",
        "2x h200-measured",
        "5x dgx-h101",
        "zzz",
        "NVIDIA H100 80GB HBM3",
    )
    for text in texts:
        found = told(lambda text=text: load_cluster(text))
        if not isinstance(found, str):
            cluster: Any = found
            between = cluster.between and cluster.between.name
            parts = [cluster.name, cluster.nodes, cluster.node.devices, between, cluster.devices, cluster.memory_bytes]
            yield f"cluster {text}", parts
        else:
            yield f"cluster {text}", found
    yield (
        "names",
        {
            word: [find_name(word, entries.devices), near_names(word, entries.devices)]
            for word in ("h100_sxm_80gb", "A100-SXM4-40GB", "Tesla V100-SXM2-16GB", "h10", "l4s", "b200 gpu")
        },
    )


def _of_machines() -> Iterator[tuple[str, object]]:
    host = Machine(processor="p", cores=6, memory_bytes=48 * 2.0**30)
    gpus = replace(host, gpus=("NVIDIA H100 80GB HBM3",) * 3 + ("Tesla T4",), gpu_memory_bytes=(8e10,) * 4)
    for name, machine in {"host": host, "gpus": gpus, "odd": replace(host, gpus=("Z9",))}.items():
        found = detect_cluster(machine)
        cluster = found.cluster
        parts = cluster and [cluster.name, cluster.node.devices, cluster.device.memory_bytes, cluster.device.name]
        yield f"detected {name}", [parts, found.assumed]
    text = "NVIDIA H100 80GB HBM3, 81559\nNo devices\n, 5\nA, x\n B , 16 \n"
    yield "smi", [[name, size] for name, size in read_smi(text)]
    alone = alone_device()
    yield "alone", alone and [alone.name, alone.launch_s, alone.loop_s]
    yield (
        "peaks",
        [list(find_peaks(name, dtype)) for name in ("H100 SXM", "cpu-host", "Z9") for dtype in ("bf16", "fp3")],
    )
    yield from _of_tables()


def _of_tables() -> Iterator[tuple[str, object]]:
    """Records of benchmarks: of links, and of communicators."""
    links = [
        {"part": "all_reduce", "arm": arm, "ranks": 4, "hosts": 2, "size_bytes": size, "median_ms": size / 1e3 + wait}
        for arm, wait in (("ring", 1.0), ("native", 9.0), ("other", 0.0))
        for size in (1000, 10, 50000)
    ]
    local = [
        {"backend": backend, "algorithm": algorithm, "ranks": 4, "bytes": size, "median_us": 3.0 * size + 7}
        for backend, algorithm in (("gloo", "tree"), ("gloo", "hierarchical"), ("shared", "ring"), ("gloo", "odd"))
        for size in (10, 1000)
    ]
    files = {"rows": {"rows": [*links, *local, {"part": "send"}]}, "twice": {"rows": links + links}, "none": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, f"{name}.json")
            path.write_text(json.dumps(content))
            for where in (Placement(ranks=4, hosts=2), Placement(ranks=4), Placement(ranks=3)):
                table = told(lambda path=path, where=where: costs.read_table(path, where))
                told_of = f"table {name} {where.ranks} on {where.hosts}"
                if isinstance(table, costs.MeasuredTable):
                    sizes = {size: table.fastest(size) for size in (1, 100, 10**6)}
                    yield told_of, [table.points, sizes, [table.seconds(choice, 99) for choice in table.points]]
                else:
                    yield told_of, str(table).replace(folder, "FOLDER")
