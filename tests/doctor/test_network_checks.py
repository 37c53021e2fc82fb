"""Which interface each backend takes, and what this host's name means for ranks of other hosts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.config import config_settings, exported_settings, load_config
from paceline.doctor.findings import DoctorInputs
from paceline.doctor.network import (
    Interface,
    Resolution,
    find_interfaces,
    gloo_interface,
    launcher,
    name_finding,
    nccl_files,
    nccl_interfaces,
    resolve_host,
    run,
    variables,
)
from paceline.doctor.self_test import shake_hands
from paceline.run.processes import loopback_interface

LOOPBACK = Interface(name="lo", addresses=("127.0.0.1", "::1"))
ETHERNET = Interface(name="eth0", addresses=("192.0.2.7", "fe80::1%eth0"))
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",))
INFINIBAND = Interface(name="ib0", addresses=("198.51.100.7",))


def resolution(*addresses: str, usable: str | None, seconds: float = 0.0, error: str = "") -> Resolution:
    return Resolution(host="node1", addresses=addresses, usable=usable, seconds=seconds, error=error)


@pytest.mark.parametrize(
    ("found", "status", "part"),
    [
        (resolution("192.0.2.7", usable="192.0.2.7"), "ok", "other hosts reach this one"),
        (resolution("127.0.1.1", usable="127.0.1.1"), "note", "told to call themselves"),
        (resolution("203.0.113.9", usable=None), "note", "no address of this host"),
        (resolution(usable=None, error="Name or service not known"), "note", "ranks of other hosts would hang"),
        (resolution("192.0.2.7", usable="192.0.2.7", seconds=3.0), "note", "slows every start down"),
        (resolution(usable=None, seconds=5.0, error="no answer within 5 s"), "problem", "stands still"),
    ],
)
def test_what_a_host_name_means(found: Resolution, status: str, part: str) -> None:
    finding = name_finding(found)
    assert finding.status == status
    assert part in finding.meaning
    assert bool(finding.fix) == (status != "ok")
    assert "node1" in finding.found


def test_names_are_really_looked_up() -> None:
    local = resolve_host("localhost")
    assert local.usable in local.addresses
    assert name_finding(local).status == "note"  # a loopback
    unknown = resolve_host("no-such-host.invalid")
    assert unknown.usable is None
    assert unknown.error


@pytest.mark.parametrize(
    ("exported", "usable", "chosen"),
    [
        ({}, "192.0.2.7", "eth0"),
        ({}, "fe80::1%eth0", "eth0"),
        ({}, "127.0.0.1", "lo"),
        ({}, "127.0.1.1", "lo"),  # of the loopback too, though not listed
        ({}, None, "lo"),  # Gloo's fallback
        ({"GLOO_SOCKET_IFNAME": "eth0,lo"}, "127.0.0.1", "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "127.0.0.1", None),
    ],
)
def test_the_interface_that_gloo_takes(exported: dict[str, str], usable: str | None, chosen: str | None) -> None:
    assert gloo_interface(exported_settings(exported), [LOOPBACK, ETHERNET, DOCKER], usable) == chosen


@pytest.mark.parametrize(
    ("exported", "present", "chosen"),
    [
        ({}, [LOOPBACK, DOCKER, ETHERNET, INFINIBAND], ["ib0"]),
        ({}, [LOOPBACK, DOCKER, ETHERNET], ["eth0"]),
        ({}, [LOOPBACK, DOCKER], ["docker0"]),
        ({}, [LOOPBACK], ["lo"]),
        ({"NCCL_SOCKET_IFNAME": "^ib"}, [LOOPBACK, ETHERNET, INFINIBAND], ["lo", "eth0"]),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, [LOOPBACK, ETHERNET], []),
    ],
)
def test_the_interfaces_that_nccl_takes(exported: dict[str, str], present: list[Interface], chosen: list[str]) -> None:
    assert nccl_interfaces(exported_settings(exported), present) == chosen


def test_the_interfaces_of_this_host_are_found() -> None:
    found = find_interfaces()
    assert loopback_interface() in [each.name for each in found if each.is_loopback]
    assert {each.name for each in found} <= {name for _, name in socket.if_nameindex()}


# Variables, and the run that is meant.


def surroundings(*overrides: str, **environment: str) -> DoctorInputs:
    config = load_config(None, ["model.kind=mlp", "data.kind=digits", *overrides])
    return DoctorInputs(environment=environment, config=config)


def test_all_variables_are_shown_with_who_said_them() -> None:
    (shown,) = variables(surroundings("comm.nccl.max_channels=2", NCCL_NET_PLUGIN="none", HOME="/root"))
    assert shown.found == "NCCL_NET_PLUGIN=none (exported), NCCL_MAX_NCHANNELS=2 (comm.nccl.max_channels)"
    (none,) = variables(DoctorInputs(environment={"PATH": "/bin"}))
    assert none.status == "ok"
    assert none.found.startswith("none")


def test_contradictions_of_both_sides_are_problems_and_typos_are_notes() -> None:
    told = surroundings(
        "comm.nccl.p2p_level=NVL",
        "comm.interface=lo",
        NCCL_P2P_DISABLE="1",
        GLOO_SOCKET_IFNAME="eth0",
        NCCL_DEBUG="loud",
        NCCL_P2P_LEVL="SYS",
    )
    found = list(variables(told))[1:]
    assert [each.status for each in found] == ["problem"] * 3 + ["note"]
    text = "\n".join(each.found for each in found)
    for part in ("NCCL_DEBUG=loud", "NCCL_P2P_DISABLE=1 (exported) and", "GLOO_SOCKET_IFNAME=eth0 (exported)"):
        assert part in text
    assert found[-1].fix == "did you mean NCCL_P2P_LEVEL?"


def test_files_that_nccl_reads_are_shown(tmp_path: Path) -> None:
    assert [
        each for each in nccl_files(DoctorInputs(environment={"HOME": str(tmp_path)})) if str(tmp_path) in each.found
    ] == []
    (tmp_path / ".nccl.conf").write_text("# ours\nNCCL_SOCKET_IFNAME==ens1f0\n\nNCCL_DEBUG = WARN\nnonsense\n")
    found = list(nccl_files(DoctorInputs(environment={"HOME": str(tmp_path)})))[-1]
    assert found.status == "note"
    assert found.found == f"{tmp_path}/.nccl.conf: NCCL_SOCKET_IFNAME==ens1f0, NCCL_DEBUG=WARN"
    (missing, *_) = nccl_files(DoctorInputs(environment={"NCCL_CONF_FILE": str(tmp_path / "none")}))
    assert missing.status == "problem"


def test_a_run_that_asks_for_more_than_there_is_is_told() -> None:
    (crowded,) = run(surroundings("parallel={ranks: 64, device: cpu}"))
    assert crowded.status == "note"
    assert "no gain in time" in crowded.meaning
    (fine,) = run(surroundings("parallel={ranks: 1, device: cpu}"))
    assert fine.status == "ok"
    (absent,) = [each for each in run(surroundings("comm.interface=nope0", "parallel.device=cpu")) if each.fix]
    assert absent.status == "problem"
    assert config_settings(surroundings("comm.interface=lo").config.comm)  # type: ignore[union-attr]
    assert list(run(DoctorInputs(environment={}))) == []


def test_gpus_that_are_not_there_are_told() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    found = list(run(surroundings("parallel={ranks: 2, device: cuda}", "comm.backend=nccl")))
    assert [each.status for each in found] == ["problem", "problem"]
    assert "on 0 GPUs" in found[0].found
    assert "comm.backend = nccl without a GPU" in found[1].found


# The handshake.


def test_ranks_that_do_not_answer_in_time_are_a_problem_and_not_a_hang() -> None:
    (found,) = shake_hands(None, timeout_s=0.01)
    assert found.status == "problem"
    assert "did not finish within 0.01 s" in found.found
    assert found.fix


def test_the_launcher_of_this_process_is_told() -> None:
    hosts = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "host1"}
    (found,) = launcher(DoctorInputs(environment=hosts))
    assert (found.status, "host 1 of 2, meeting at host1:29500" in found.found) == ("ok", True)
    (found,) = launcher(DoctorInputs(environment={"NODE_RANK": "1"}))
    assert (found.status, "neither NNODES nor WORLD_SIZE" in found.found) == ("problem", True)
