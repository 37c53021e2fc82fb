"""The present machine, as the system tells it, and the cluster it is taken for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cluster.detect import (
    Machine,
    ask_ahead,
    bf16_instructions,
    detect_cluster,
    detect_machine,
    host_memory,
    read_smi,
    usable_cores,
)
from paceline.units import GIB, MIB


def _with_gpus(*names: str) -> Machine:
    return Machine(processor="a processor", cores=8, memory_bytes=32.0 * GIB, gpus=names)


def test_this_machine_has_cores_and_memory() -> None:
    found = detect_machine()
    assert found.cores >= 1
    assert found.memory_bytes > 0
    assert found.processor
    assert len(found.gpus) == len(found.gpu_memory_bytes)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="keeps no process to a core")
def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2})
    assert usable_cores() == (2, 5)
    assert detect_machine(with_gpus=False).cores == 2


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": "1000000"}, 1e6),
        ("0::/user/run", {"user/memory.max": "2000000", "user/run/memory.max": "max"}, 2e6),
        ("0::/../outside", {"memory.max": "3000000"}, 3e6),
        ("5:cpu:/a\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "4000000", "memory.max": "1"}, 4e6),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {"memory.max": "1"}, None),
    ],
)
def test_the_limit_of_a_container_counts(
    groups: str, files: dict[str, str], wanted: float | None, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{groups}\n" if groups else "")
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    found = host_memory(tmp_path / "proc", tmp_path / "cgroup")
    assert found == (wanted or host_memory(tmp_path, tmp_path))  # without a limit: all that there is


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse avx512f avx512_bf16 amx_bf16 amx_tile\n", ("avx512_bf16", "amx_bf16")),
        ("processor\t: 0\nflags\t\t: fpu sse avx2 avx512f\nmodel name\t: bf16\n", ()),
        ("processor\t: 0\nFeatures\t: fp asimd sve svebf16 i8mm bf16\n", ("bf16",)),
        ("processor\t: 0\nFeatures\t: fp asimd asimdhp\n", ()),
        (None, ()),
    ],
)
def test_the_processor_says_at_each_start_the_same_of_its_bf16_instructions(
    text: str | None, found: tuple[str, ...], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert [bf16_instructions(tmp_path) for _ in range(3)] == [found] * 3


def test_what_the_driver_prints_is_read_and_what_it_complains_is_not() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n\nNo devices were found\nX, [N/A]\n"
    assert read_smi(text) == [("NVIDIA H100 80GB HBM3", 81559.0 * MIB)] * 2
    assert read_smi("") == []


def test_known_gpus_are_a_node_of_so_many() -> None:
    found = detect_cluster(_with_gpus(*["NVIDIA A100-SXM4-80GB"] * 4))
    assert found.cluster is not None
    assert (found.cluster.device.name, found.cluster.devices, found.cluster.nodes) == ("a100-sxm-80gb", 4, 1)
    assert "nvlink3" in found.assumed[0]


def test_gpus_of_two_kinds_leave_the_fewer_out_and_say_so() -> None:
    found = detect_cluster(_with_gpus("Tesla T4", "NVIDIA L4", "NVIDIA L4"))
    assert found.cluster is not None
    assert found.cluster.name == "2x l4"
    assert any("1x Tesla T4 is left out" in line for line in found.assumed)


def test_gpus_that_nobody_knows_are_no_cluster_and_the_nearest_are_named() -> None:
    found = detect_cluster(_with_gpus("NVIDIA H100 NVLX"))
    assert found.cluster is None
    assert "h100" in found.assumed[0]


def test_a_host_without_gpus_is_as_many_cores_as_it_has() -> None:
    found = detect_cluster(Machine(processor="a processor", cores=6, memory_bytes=12.0 * GIB))
    if found.cluster is None:
        assert "paceline calibrate" in found.assumed[0]
    else:
        assert found.cluster.devices == 6
        assert found.cluster.device.memory_bytes == 2.0 * GIB
        assert any("measured elsewhere" in line for line in found.assumed)


def test_the_driver_may_be_asked_ahead_and_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    tool.write_text(f"#!/bin/sh\necho x >> {asked}\necho 'NVIDIA H200, 1024'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ask_ahead()
    assert detect_machine().gpus == ("NVIDIA H200",)
    assert asked.read_text() == "x\n"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert detect_machine().gpus == ()
