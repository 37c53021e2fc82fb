"""A config's settings on their way into the environment of ranks, and what stops them."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.config import Config, load_config
from paceline.errors import ConfigError
from paceline.run.decide import rank_variables
from paceline.run.processes import loopback_interface
from paceline.run.records import variables_in_effect


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
        monkeypatch.delenv(name)


def config(*overrides: str) -> Config:
    return load_config(None, ["model.kind=mlp", "data.kind=digits", *overrides])


def test_ranks_get_what_the_config_says_and_nothing_else() -> None:
    asked = config(f"comm.interface={loopback_interface()}", "comm.nccl.p2p_level=NVL")
    assert rank_variables(config(), uses_nccl=True) == {}
    assert rank_variables(asked, uses_nccl=False) == {"GLOO_SOCKET_IFNAME": loopback_interface()}
    assert rank_variables(asked, uses_nccl=True)["NCCL_P2P_LEVEL"] == "NVL"


def test_all_that_stands_in_the_way_is_told_at_once_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    with pytest.raises(ConfigError) as caught:
        rank_variables(config("comm.interface=nope0", "comm.nccl.p2p_level=NVL"), uses_nccl=True)
    assert len(caught.value.problems) == 2
    assert "NCCL_P2P_LEVEL=SYS (exported)" in str(caught.value)
    assert "this host has no network interface nope0" in str(caught.value)
    assert socket.gethostname() in caught.value.source


def test_an_exported_interface_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=nope0 \(exported\)"):
        rank_variables(config(), uses_nccl=False)
    assert rank_variables(config(), uses_nccl=True) == {}  # NCCL does not read it


def test_a_rank_of_another_launcher_sets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "WARN", "PATH": "/bin"})
    asked = config("comm.nccl={max_channels: 2}")
    os.environ.update(rank_variables(asked, uses_nccl=True))
    assert os.environ["NCCL_MAX_NCHANNELS"] == "2"
    assert variables_in_effect(asked, uses_nccl=True) == {"NCCL_DEBUG": "WARN", "NCCL_MAX_NCHANNELS": "2"}
    assert variables_in_effect(asked, uses_nccl=False) == {}
