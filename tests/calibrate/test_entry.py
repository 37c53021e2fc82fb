"""What was measured becomes an entry that is read back: of a CPU host alone and with ranks, and of a known GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.calibrate.entry import make_entry, suggest_name
from paceline.calibrate.kernels import FamilyFigures, KernelFigures
from paceline.calibrate.machine import LinkFigures, MachineFigures, median_figures
from paceline.cli.options import write_output
from paceline.cluster.detect import Machine, alone_device
from paceline.cluster.devices import ShapeRate, load_cluster
from paceline.cluster.entries import read_catalog
from paceline.config import load_config
from paceline.errors import UsageError
from paceline.search.expect import present_cluster
from paceline.units import GIB

HOST = Machine(processor="a processor", cores=2, memory_bytes=8.0 * GIB)
RATES = (
    ShapeRate(kind="matmul", dtype="fp32", sizes=(64, 64, 64), flops=1e10),
    ShapeRate(kind="matmul", dtype="fp32", sizes=(512, 512, 512), flops=5.00049e10),
    ShapeRate(kind="attention", dtype="fp32", sizes=(1, 2, 64, 32), flops=2e10),
)
KERNELS = KernelFigures(
    rates=RATES, memory_bandwidth=1.2e10, launch_s=4e-6, compiled_launch_s=None, spreads={"memory": 0.02}
)
LINK = LinkFigures(latency_s=2e-5, bandwidth=3e9, worst=0.1, points=((4096, 1e-4),), spreads={"gloo 4 KiB": 0.1})
ABOUT = {"torch": "x"}


def _measured(**changes: object) -> MachineFigures:
    found = MachineFigures(device="cpu", ranks=1, threads=2, kernels=KERNELS, links={}, spread=0.02)
    return replace(found, **changes)  # type: ignore[arg-type]


def _entry(tmp_path: Path, measured: MachineFigures, machine: Machine = HOST) -> Path:
    path = tmp_path / "mine.yaml"
    name = suggest_name(machine, measured)
    path.write_text(make_entry(name, machine, measured, "paceline calibrate", ABOUT))
    return path


def test_a_host_alone_is_one_device(tmp_path: Path) -> None:
    found = load_cluster(str(_entry(tmp_path, _measured())))
    assert (found.name, found.devices, found.device.is_cpu) == ("1x cpu-1x2", 1, True)
    assert found.device.memory_bytes == 8 * GIB
    assert found.device.ceiling("fp32") == pytest.approx(5e10)  # rounded
    assert found.device.launch_s == found.device.compiled_launch_s == pytest.approx(4e-6)
    assert [each.sizes for each in found.device.shapes] == [rate.sizes for rate in RATES]


def test_ranks_share_the_memory_and_each_link_is_a_node(tmp_path: Path) -> None:
    measured = _measured(ranks=2, threads=1, links={"shared_memory": LINK, "loopback": replace(LINK, bandwidth=1e9)})
    path = _entry(tmp_path, measured)
    found = load_cluster(str(path))
    assert (found.devices, found.device.memory_bytes) == (2, 4 * GIB)
    assert (found.node.inside.kind, found.node.inside.ring_bandwidth(2)) == ("shared_memory", 3e9)
    text = path.read_text()
    assert "cpu-2x1-gloo:" in text
    assert text.startswith("# Measured by: paceline calibrate\n# on a processor, 2 cores; 2 ranks")


def test_one_rank_with_all_cores_is_a_device_and_a_node_of_its_own(tmp_path: Path) -> None:
    faster = replace(KERNELS, rates=(replace(RATES[0], flops=2e10), *RATES[1:]), launch_s=9e-6)
    alone = _measured(threads=2, kernels=faster)
    path = _entry(tmp_path, _measured(ranks=2, threads=1, links={"shared_memory": LINK}, alone=alone))
    assert load_cluster(str(path)).device.name == "cpu-2x1"  # the first node is still that of several ranks
    found = alone_device(path)
    assert found is not None
    assert (found.name, found.sm_count, found.memory_bytes) == ("cpu-2x1-alone", 2, HOST.memory_bytes)
    assert found.launch_s == pytest.approx(9e-6)
    config = load_config(None, ["model.kind=mlp", "data.kind=digits", "parallel.device=cpu", "parallel.ranks=1"])
    cluster, assumed = present_cluster(config, HOST, 1, None, path)
    assert (cluster.device.name, cluster.device.memory_bytes) == ("cpu-2x1-alone", HOST.memory_bytes)
    assert not any("times as fast" in line for line in assumed)
    one_thread, _ = present_cluster(config, HOST, 1, 1, path)
    assert one_thread.device.name == "cpu-2x1"
    more_cores, assumed = present_cluster(config, replace(HOST, cores=8), 1, None, path)
    assert more_cores.device.name == "cpu-2x1"
    assert any("8 times as fast" in line for line in assumed)
    _, assumed = present_cluster(config, HOST, 4, None, path)
    assert any("take turns on 2 cores" in line for line in assumed)


def test_a_known_gpu_keeps_its_data_sheet_beside_what_was_measured(tmp_path: Path) -> None:
    machine = replace(HOST, gpus=("NVIDIA A100-SXM4-40GB",))
    rate = ShapeRate(kind="matmul", dtype="bf16", sizes=(8192, 8192, 8192), flops=2.5e14)
    kernels = replace(KERNELS, rates=(rate,), memory_bandwidth=1.4e12, compiled_launch_s=2e-6)
    found = load_cluster(str(_entry(tmp_path, _measured(device="cuda", kernels=kernels), machine))).device
    assert (found.name, found.generation, found.peak("bf16"), found.ceiling("bf16")) == (
        "a100-sxm-40gb-measured",
        "ampere",
        312e12,
        2.5e14,
    )
    assert found.memory_share == pytest.approx(0.9003)
    assert found.compiled_launch_s == pytest.approx(2e-6)


def test_tables_and_their_origin_are_written_and_read_back(tmp_path: Path) -> None:
    families = FamilyFigures(rates={"softmax": ((1024, 2e9), (4096, 1e9))}, operation_s=2e-5, tensor_s=1e-6)
    families = replace(families, step_s=3e-4, loop_s=2e-4)
    rates = (replace(RATES[0], layout="nt"), *RATES[1:])
    link = replace(LINK, by_ranks={2: ((4096, 1e-4),), 4: ((4096, 3e-4),)}, busy=0.8)
    kernels = replace(KERNELS, families=families, rates=rates)
    measured = _measured(ranks=2, threads=1, kernels=kernels, links={"shared_memory": link})
    about = {**ABOUT, "time": "2026-01-01T00:00:00Z", "python": "3.12"}
    text = make_entry("mine", HOST, measured, "paceline calibrate", about)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    found = load_cluster(str(path))
    device, inside = found.device, found.node.inside
    assert device.memory_rates == {"softmax": ((1024, 2e9), (4096, 1e9))}
    assert (device.operation_s, device.tensor_s) == (pytest.approx(2e-5), pytest.approx(1e-6))
    assert (device.step_s, device.loop_s) == (pytest.approx(3e-4), pytest.approx(2e-4))
    assert [each.layout for each in device.shapes] == ["nt", "", ""]
    assert inside.all_reduce == {2: ((4096, pytest.approx(1e-4)),), 4: ((4096, pytest.approx(3e-4)),)}
    assert inside.busy == 0.8
    entry = read_catalog(path).devices["mine"].measured
    assert entry is not None
    assert (entry.time, entry.torch, entry.threads, entry.ranks) == ("2026-01-01T00:00:00Z", "x", 1, 2)


def test_an_entry_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_output(tmp_path / "no" / "folder.yaml", "", "entry")


def test_the_median_rank_counts_and_the_worst_noise() -> None:
    others = [
        replace(KERNELS, launch_s=launch, spreads={"memory": spread}, compiled_launch_s=compiled)
        for launch, spread, compiled in ((1e-6, 0.1, 3e-6), (2e-6, 0.3, None), (9e-6, 0.2, None))
    ]
    found = median_figures(others)
    assert (found.launch_s, found.spreads, found.compiled_launch_s) == (2e-6, {"memory": 0.3}, 3e-6)
