"""Machines by the names people use: the catalog, counts, networks, files of one's own, and names that are wrong."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.cluster import devices
from paceline.cluster.devices import Catalog, Cluster, Device, Node, ShapeRate, load_cluster
from paceline.cluster.entries import _key, find_name, parse_catalog, shipped
from paceline.cluster.kernels import attention_rate, matmul_rate
from paceline.cluster.wires import algorithm_cost, wire_cost
from paceline.errors import UsageError

CATALOG = Path(devices.__file__).parent / "catalog"
MINE = """
devices:
  mine:
    vendor: host
    generation: cpu
    memory_gib: 4
    memory_gb_per_s: 10
    peak_tflops: {fp32: 0.1}
    launch_us: 3
    multiprocessors: 1
    node: mine
links:
  mine-shm: {kind: shared_memory, gb_per_s: 2, efficiency: 1.0, latency_us: 10}
nodes:
  mine: {device: mine, devices: 2, inside: mine-shm}
"""


@pytest.mark.parametrize(
    ("text", "nodes", "each", "device", "network"),
    [
        ("4x dgx-h100", 4, 8, "h100-sxm", "infiniband-ndr-8x"),
        ("dgx-h100", 1, 8, "h100-sxm", "infiniband-ndr-8x"),
        ("32x h100-sxm", 4, 8, "h100-sxm", "infiniband-ndr-8x"),
        ("32 X H100 SXM5 80GB", 4, 8, "h100-sxm", "infiniband-ndr-8x"),
        ("p4d.24xlarge x 2", 2, 8, "a100-sxm-40gb", "efa-v1-4x100"),
        ("2x p4de", 2, 8, "a100-sxm-80gb", "efa-v1-4x100"),
        ("4x A10G", 1, 4, "a10g", "ethernet-100g"),
        ("12x a100", 2, 6, "a100-sxm-80gb", "infiniband-hdr-8x"),
        ("h200", 1, 1, "h200", "infiniband-ndr-8x"),
        ("144x gb200", 2, 72, "gb200", "infiniband-ndr-1x-per-gpu-72"),
        ("8x dgx-a100 over roce-4x100g", 8, 8, "a100-sxm-80gb", "roce-4x100"),
        ("16x v100 over ethernet", 2, 8, "v100-sxm-32gb", "ethernet-10g"),
    ],
)
def test_a_cluster_is_read_from_a_count_and_a_name(text: str, nodes: int, each: int, device: str, network: str) -> None:
    found = load_cluster(text)
    assert (found.nodes, found.node.devices, found.device.name) == (nodes, each, device)
    assert found.between is not None
    assert found.between.name == network
    assert found.devices == nodes * each


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4x dgx-h10", "did you mean dgx-h100"),
        ("h300", "h200"),
        ("4x dgx-h100 over infiniband-nd", "infiniband-ndr-8x"),
        ("zzz", "none is like it"),
        ("0x h200", "0 of h200"),
        ("", "1 of nothing"),
        ("13x h100", "take 8 or 16"),
        ("2x no_such_file.yaml", "paceline calibrate --output no_such_file.yaml"),
    ],
)
def test_a_cluster_that_is_not_known_is_refused_with_what_is_near(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_cluster(text)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100-80GB-SXM", "h100-sxm"),
        ("H100-SXM-80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100-96GB-HBM2e-500W", "h100-sxm-96gb-500w"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("A100-SXM-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100 (memory size not stated)", "a100-sxm-80gb"),
        ("H200-141GB-SXM", "h200"),
        ("V100-16GB-SXM", "v100-sxm-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("V100-32GB-SXM (DGX-2H)", "v100-sxm3-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("GB300", "gb300"),
    ],
)
def test_devices_are_found_by_the_names_of_sources_and_drivers(written: str, name: str) -> None:
    assert Catalog().device(written).name == name


def test_no_name_means_two_things_of_a_kind_nor_a_node_and_a_device() -> None:
    known = shipped()
    for kind in (known.devices, known.links, known.networks, known.nodes):
        owners: dict[tuple[str, ...], str] = {}
        for name, entry in kind.items():
            for key in {_key(name), *map(_key, entry.aliases)}:
                assert owners.setdefault(key, name) == name
    measured = {name for name, each in known.devices.items() if each.generation == "cpu" or each.measured is not None}
    assert [name for name in known.devices if name not in measured and find_name(name, known.nodes)] == []


def test_every_entry_of_the_catalog_makes_a_cluster_whose_figures_agree() -> None:
    known = shipped()
    for name in known.nodes:
        found = load_cluster(name)
        assert found.devices == known.nodes[name].devices
        assert json.loads(json.dumps(asdict(found)))["node"]["name"] == name
    for name in known.devices:
        device = Catalog().device(name)
        assert load_cluster(f"1x {name}").device == device
        assert hash(device) == hash(Catalog().device(name))
        for dtype, most in device.matmul_ceiling.items():
            assert most <= device.peak(dtype)
        assert "fp32" in device.peak_flops
    for name in known.networks:
        assert Catalog().network(name).bandwidth > 0


def test_every_figure_of_the_shipped_catalog_has_a_source_beside_it() -> None:
    bare = []
    for path in (CATALOG / "devices.yaml", CATALOG / "links.yaml"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        for above, line in pairwise(lines):
            figure = re.match(r"(\w+_gib|\w*gb_per_s|\w+_tflops|\w+_us|efficiency|multiprocessors):", line)
            if figure and "#" not in line and not above.startswith("#"):
                bare.append(f"{path.name}: {line}")
    assert bare == []


def test_a_dtype_without_units_is_computed_in_another() -> None:
    volta = Catalog().device("v100-sxm-32gb")
    assert volta.peak("bf16") == volta.peak("fp32") == 15.7e12
    assert volta.ceiling("fp16") == pytest.approx(0.78 * 125e12)
    hopper = Catalog().device("h100-sxm")
    assert hopper.ceiling("bf16") == 794.5e12
    with pytest.raises(UsageError, match="no figure for int7"):
        hopper.peak("int7")


def test_the_ring_of_a_link_depends_on_how_many_take_part() -> None:
    inside = Catalog().node("dgx-a100").inside
    assert [inside.ring_bandwidth(count) / 1e9 for count in (2, 5, 8, 16)] == [194, 224, 230, 230]
    assert inside.nvls_bandwidth(8) == 0
    hopper = Catalog().node("dgx-h200").inside
    assert hopper.nvls_bandwidth(8) == pytest.approx(473.1e9)
    assert hopper.ring_bandwidth(2) == pytest.approx(0.813 * 450e9)


def test_devices_are_put_on_nodes_and_a_network_as_wanted() -> None:
    found = Catalog().of_devices("A100-80GB-SXM", 16, node_devices=4, network="roce-4x100")
    assert (found.nodes, found.node.devices, found.between and found.between.bandwidth) == (4, 4, 50e9)
    assert found.memory_bytes == 16 * found.device.memory_bytes
    with pytest.raises(UsageError, match="several nodes need a network"):
        replace(found, between=None)
    with pytest.raises(UsageError, match="0 devices"):
        Catalog().of_devices("h100", 0)


def test_four_devices_without_a_switch_share_their_links_among_pairs() -> None:
    board, part = (Catalog().of_devices("H200", 4, node_devices=each).node.inside for each in (4, 8))
    assert (board.name, part.name) == ("nvlink4-mesh", "nvlink4")
    assert board.ring_bandwidth(4) == part.ring_bandwidth(4)
    assert [board.ring_bandwidth(4) / board.ring_bandwidth(each) for each in (2, 3)] == pytest.approx(
        [3, 1.5], rel=0.03
    )
    assert Catalog().of_devices("H200", 2, node_devices=4).node.inside == board


def test_a_file_of_ones_own_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    found = load_cluster(str(path))
    assert (found.name, found.devices, found.between, found.device.is_cpu) == ("1x mine", 2, None, True)
    assert load_cluster(f"3x {path} over ethernet-1g").devices == 6
    cores = load_cluster(f"3x {path}")  # without a network, of one host
    assert (cores.nodes, cores.devices) == (1, 3)
    with pytest.raises(UsageError, match="no network is known between them"):
        load_cluster("3x cpu-host-gloo")
    path.write_text("networks: {}\n")
    with pytest.raises(UsageError, match="has no nodes and no devices"):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("devices: [", "is not YAML: line 1, column 11: "),
        ("- 1", "the file: is no section of named values"),
        ("nodse: {}", "nodse: there is no such key"),
        ("devices: {x: {vendor: y}}", "devices.x.generation"),
        (MINE.replace("memory_gib: 4", "memory_gib: -4"), "devices.mine.memory_gib"),
        (MINE.replace("launch_us", "launch_ms"), "devices.mine.launch_us"),
        (MINE.replace("efficiency: 1.0", "efficiency: 1.5"), "links.mine-shm.efficiency"),
        (MINE.replace("cpu", "quantum"), "devices.mine.generation"),
    ],
)
def test_a_file_that_is_no_catalog_is_refused_with_the_field(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_catalog(text, "mine.yaml")


def test_a_node_of_a_file_may_name_what_is_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace("inside: mine-shm", "inside: nvlnk4"))
    with pytest.raises(UsageError, match="no link is called 'nvlnk4': did you mean nvlink4"):
        load_cluster(str(path))


def _measured(*rates: tuple[str, tuple[int, ...], float]) -> Device:
    shapes = tuple(ShapeRate(kind=kind, dtype="fp32", sizes=sizes, flops=flops) for kind, sizes, flops in rates)
    return replace(Catalog().device("h100-sxm"), shapes=shapes)


def test_rates_are_found_between_measured_shapes() -> None:
    device = _measured(
        ("matmul", (64, 64, 64), 1e9), ("matmul", (1024, 1024, 1024), 1e11), ("attention", (2, 4, 128, 32), 5e9)
    )
    assert matmul_rate(device, (64, 64, 64), "fp32") == 1e9
    assert matmul_rate(device, (256, 256, 256), "fp32") == pytest.approx(1e10)
    assert 1e10 < (matmul_rate(device, (512, 512, 512), "fp32") or 0) < 1e11
    assert matmul_rate(device, (64, 64, 64), "bf16") is None
    assert attention_rate(device, (4, 2, 128, 32)) == 5e9
    assert attention_rate(Catalog().device("h100-sxm"), (4, 2, 128, 32)) is None


def test_a_cluster_ends_somewhere() -> None:
    assert load_cluster("32768x dgx-h100").devices == 2**18
    with pytest.raises(UsageError, match="262,152 devices\n  a cluster has 262,144 at most"):
        load_cluster("32769x dgx-h100")


def test_a_cluster_has_one_node_at_least() -> None:
    node: Node = Catalog().node("dgx-h100")
    with pytest.raises(UsageError, match="0 nodes of 8 devices"):
        Cluster(name="none", node=node, nodes=0, between=None)


def test_a_processors_loop_is_what_was_measured_or_a_few_of_its_operations(tmp_path: Path) -> None:
    def loop_s(**keys: float) -> float:
        lines = "".join(f"    {key}: {value}\n" for key, value in keys.items())
        path = tmp_path / "mine.yaml"
        path.write_text(MINE.replace("    launch_us: 3\n", f"    launch_us: 3\n{lines}"))
        return load_cluster(str(path)).device.loop_s

    assert loop_s(loop_us=250.0) == pytest.approx(250e-6)
    assert loop_s(loop_us=0.0) == 0.0
    assert loop_s() == pytest.approx(30e-6)
    assert loop_s(operation_us=20.0) == pytest.approx(200e-6)
    assert Catalog().device("h100-sxm").loop_s == 0.0
    assert Catalog().device("h100-sxm").step_s == 0.0


def test_networks_that_are_named_after_their_cards_have_so_many() -> None:
    for name, entry in shipped().networks.items():
        found = re.search(r"(\d+)x", name)
        per_gpu = re.search(r"-per-gpu-(\d+)", name)
        assert entry.cards == int(per_gpu[1] if per_gpu else found[1] if found else 1), name


def test_one_ring_between_nodes_goes_through_one_card() -> None:
    """NCCL has one for each card, and all of them are what the hierarchical algorithm uses."""
    cluster = load_cluster("10x dgx-h100")
    ranks = tuple(range(80))
    seconds = {
        each: algorithm_cost(cluster, each, "all_reduce", 10**9, ranks) for each in ("ring", "tree", "hierarchical")
    }
    card = 400e9 * 0.9 / 8
    assert seconds["ring"] == pytest.approx(2 * 1e9 * 79 / 80 / card, rel=0.1)
    assert seconds["hierarchical"] < seconds["tree"] / 4
    assert wire_cost(cluster, 80)("all_reduce", 10**9, ranks) < seconds["hierarchical"]
    one_card = load_cluster("10x dgx-h100 over ethernet-100g")
    ring = algorithm_cost(one_card, "ring", "all_reduce", 10**9, ranks)
    assert ring == pytest.approx(2 * 1e9 * 79 / 80 / 10e9, rel=0.1)
