"""Settings of NCCL and Gloo: keys as variables, what contradicts, and what was exported beside them."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import (
    Config,
    check_exported,
    check_interfaces,
    config_settings,
    dump_yaml,
    explain,
    exported_settings,
    load_config,
)
from paceline.config.schema import NcclAlgorithm, NcclConfig, NcclSubsystem, descriptions
from paceline.config.settings import contradictions, matching, nccl_variables, unknown_variables, variables_of
from paceline.errors import ConfigError, Problem

MLP = ["model.kind=mlp", "data.kind=digits"]
PRESENT = ("lo", "eth0", "eth1", "docker0", "ib0")


def config(*overrides: str) -> Config:
    return load_config(None, [*MLP, *overrides])


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    return caught.value.problems


def exported(**variables: str) -> list[Problem]:
    return contradictions(exported_settings(variables))


def test_every_key_has_a_variable_and_says_so() -> None:
    known = nccl_variables()
    assert [row["key"] for row in known.values()] == list(NcclConfig.model_fields)
    for variable, row in known.items():
        assert descriptions()["NcclConfig"][row["key"]].endswith(f"({variable})")
    assert tuple(known["NCCL_ALGO"]["words"]) == get_args(NcclAlgorithm)
    assert tuple(known["NCCL_DEBUG_SUBSYS"]["words"]) == get_args(NcclSubsystem)


@pytest.mark.parametrize(
    ("override", "variable", "value"),
    [
        ("comm.nccl.p2p=false", "NCCL_P2P_DISABLE", "1"),
        ("comm.nccl.p2p=true", "NCCL_P2P_DISABLE", "0"),
        ("comm.nccl.shared_memory=false", "NCCL_SHM_DISABLE", "1"),
        ("comm.nccl.ib=false", "NCCL_IB_DISABLE", "1"),
        ("comm.nccl.p2p_level=NVL", "NCCL_P2P_LEVEL", "NVL"),
        ("comm.nccl.max_channels=4", "NCCL_MAX_NCHANNELS", "4"),
        ("comm.nccl.cross_nic=0", "NCCL_CROSS_NIC", "0"),
        ("comm.nccl.algorithms=[Ring, Tree]", "NCCL_ALGO", "Ring,Tree"),
        ("comm.nccl.ib_hca==mlx5_0:1,mlx5_1:1", "NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ("comm.nccl.socket_interface=^docker,lo", "NCCL_SOCKET_IFNAME", "^docker,lo"),
    ],
)
def test_a_key_becomes_its_variable(override: str, variable: str, value: str) -> None:
    asked = config(override)
    assert variables_of(asked.comm, uses_nccl=True) == {variable: value}
    assert variables_of(asked.comm, uses_nccl=False) == {}
    (row,) = [row for row in explain(asked) if row.key == f"derived.{variable}"]
    assert row.value == value
    assert override.partition("=")[0] in row.origin


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("comm.nccl.socket_ifname", "comm.nccl.socket_interface"),
        ("comm.nccl.NCCL_IB_DISABLE", "comm.nccl.ib"),
        ("comm.NCCL_P2P_LEVEL", "comm.nccl.p2p_level"),
        ("comm.nccl.p2p_levl", "comm.nccl.p2p_level"),
        ("comm.interfase", "comm.interface"),
    ],
)
def test_the_name_of_a_variable_points_at_its_key(written: str, meant: str) -> None:
    (problem,) = problems(f"{written}=1")
    assert problem.fix == f"did you mean {meant}?"


def test_without_settings_nothing_is_set_and_nothing_derived() -> None:
    assert config_settings(config().comm) == {}
    assert not [row for row in explain(config()) if row.key.startswith(("derived.NCCL", "derived.GLOO"))]


def test_one_interface_is_exact_for_both_backends() -> None:
    comm = config("comm.interface=eth0,eth1").comm
    assert variables_of(comm, uses_nccl=False) == {"GLOO_SOCKET_IFNAME": "eth0,eth1"}
    both = {"GLOO_SOCKET_IFNAME": "eth0,eth1", "NCCL_SOCKET_IFNAME": "=eth0,eth1"}
    assert variables_of(comm, uses_nccl=True) == both


def test_a_dump_with_settings_reads_back_on_a_machine_without_gpus() -> None:
    asked = config("comm.nccl={p2p_level: NVL, protocols: [LL, Simple]}", "parallel.device=cpu")
    import yaml

    from paceline.config import config_from_dict

    assert config_from_dict(yaml.safe_load(dump_yaml(asked))) == asked


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ("{p2p: false, p2p_level: NVL}", ("comm.nccl.p2p = false and comm.nccl.p2p_level = NVL", "may not at all")),
        ("{p2p: true, p2p_level: LOC}", ("comm.nccl.p2p = true", "LOC means")),
        ("{min_channels: 8, max_channels: 4}", ("min_channels = 8 is more than", "set comm.nccl.min_channels to 4")),
        ("{socket_threads: 16, sockets_per_thread: 8}", ("make 128 sockets", "sockets_per_thread to 4 or less")),
        ("{ib: false, ib_hca: mlx5}", ("comm.nccl.ib = false and comm.nccl.ib_hca = mlx5", "remove comm.nccl.ib_hca")),
        ("{ib: false, ib_timeout: 22}", ("ib_timeout = 22", "InfiniBand and RoCE")),
        ("{ib: false, ib_gid_index: 3}", ("ib_gid_index = 3",)),
        ("{algorithms: [Tree]}", ("leaves out Ring", "set comm.nccl.algorithms to [Ring, Tree]")),
        ("{debug: WARN, debug_subsystems: [NET]}", ("with comm.nccl.debug = WARN", "set comm.nccl.debug = INFO")),
        ("{debug_subsystems: [NET]}", ("[NET] without a level",)),
        ("{socket_interface: '=^eth0'}", ("cannot be read", "^ before =: ^=eth0")),
        ("{socket_interface: '-eth0'}", ("'-eth0' is no name",)),
        ("{socket_interface: 'eth0,,eth1'}", ("'' is no name", "in front, ^ before =: eth0,eth1")),
        ("{socket_interface: '^docker,^lo'}", ("'^lo' is no name", "^docker,lo")),
        ("{ib_hca: '=mlx5_0:one'}", ("'mlx5_0:one' is no name", "with a port if need be")),
    ],
)
def test_what_contradicts_is_told_with_both_values_and_a_fix(settings: str, parts: tuple[str, ...]) -> None:
    (problem,) = problems(f"comm.nccl={settings}")
    assert all(part in str(problem) for part in parts), str(problem)
    assert problem.rule
    assert problem.fix


@pytest.mark.parametrize(
    "settings",
    [
        "{p2p: false, p2p_level: LOC}",
        "{p2p: true, p2p_level: SYS}",
        "{min_channels: 4, max_channels: 4}",
        "{socket_threads: 16, sockets_per_thread: 4}",
        "{ib: true, ib_hca: ^=mlx5_1, ib_timeout: 22}",
        "{debug: INFO, debug_subsystems: [INIT, NET]}",
        "{algorithms: [Ring], protocols: [Simple]}",
    ],
)
def test_what_goes_together_passes(settings: str) -> None:
    config(f"comm.nccl={settings}")


def test_all_problems_come_at_once_and_gloo_is_explained() -> None:
    found = problems("comm={backend: gloo, interface: ^eth0, nccl: {p2p: false, p2p_level: SYS}}")
    assert len(found) == 3
    assert "Gloo takes names" in found[0].rule
    assert found[0].fix == "write eth0"
    last = found[-1]
    assert last.what == "comm.nccl.p2p = false, comm.nccl.p2p_level = SYS with comm.backend = gloo"
    assert "comm.interface" in last.fix


def test_settings_of_nccl_are_for_nccl() -> None:
    (problem,) = problems("comm={backend: shared_memory, nccl: {p2p: false}}")
    assert problem.what == "comm.nccl.p2p = false with comm.backend = shared_memory"


def test_an_interface_is_said_once() -> None:
    (problem,) = problems("comm.interface=eth0", "comm.nccl.socket_interface=ib")
    assert problem.fix == "keep one of them"


# What was exported.


@pytest.mark.parametrize(
    ("overrides", "environment", "parts"),
    [
        (
            ["comm.nccl.p2p_level=NVL"],
            {"NCCL_P2P_LEVEL": "SYS"},
            ("NCCL_P2P_LEVEL=NVL", "NCCL_P2P_LEVEL=SYS (exported)"),
        ),
        (["comm.nccl.max_channels=4"], {"NCCL_MAX_CTAS": "8"}, ("NCCL_MAX_CTAS=8 (exported)", "unset NCCL_MAX_CTAS")),
        (["comm.nccl.p2p_level=NVL"], {"NCCL_P2P_DISABLE": "1"}, ("may not at all", "unset NCCL_P2P_DISABLE")),
        (["comm.nccl.min_channels=8"], {"NCCL_MAX_NCHANNELS": "4"}, ("is more than NCCL_MAX_NCHANNELS=4",)),
    ],
)
def test_an_exported_variable_that_contradicts_the_config_is_named_with_it(
    overrides: list[str], environment: dict[str, str], parts: tuple[str, ...]
) -> None:
    asked = config(*overrides)
    (problem,) = check_exported(asked, environment, uses_nccl=True)
    assert all(part in str(problem) for part in parts), str(problem)
    assert check_exported(asked, environment, uses_nccl=False) == []  # nobody reads it


def test_what_is_exported_alike_or_beside_the_config_passes() -> None:
    asked = config("comm.nccl={p2p_level: NVL, algorithms: [Ring, Tree]}")
    same = {"NCCL_P2P_LEVEL": "nvl", "NCCL_ALGO": "tree,ring", "NCCL_DEBUG": "INFO", "HOME": "/", "NCCL_MAX_CTAS": ""}
    assert check_exported(asked, same, uses_nccl=True) == []
    # A contradiction of the environment's own is not the config's: the doctor tells it.
    assert check_exported(config(), {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, uses_nccl=True) == []


def test_gloo_obeys_one_interface() -> None:
    (problem,) = check_exported(config("comm.interface=eth0"), {"GLOO_SOCKET_IFNAME": "lo"}, uses_nccl=False)
    assert (
        problem.what == "comm.interface = eth0 asks for GLOO_SOCKET_IFNAME=eth0, and GLOO_SOCKET_IFNAME=lo (exported)"
    )


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("NCCL_DEBUG", "debug", "one of VERSION, WARN, INFO, TRACE"),
        ("NCCL_P2P_LEVEL", "NVLINK", "did you mean NVL?"),
        ("NCCL_IB_DISABLE", "true", "from 0 to 1"),
        ("NCCL_IB_TIMEOUT", "32", "from 1 to 31"),
        ("NCCL_ALGO", "ring,tre", "did you mean TREE?"),
        ("NCCL_SOCKET_IFNAME", "eth0 eth1", "is no name"),
    ],
)
def test_an_exported_value_that_nccl_cannot_read_is_told(variable: str, value: str, part: str) -> None:
    (problem,) = exported(**{variable: value})
    assert problem.what.startswith(f"{variable}={value} (exported) cannot be read")
    assert part in str(problem)


def test_values_that_nccl_documents_pass() -> None:
    assert exported(NCCL_P2P_LEVEL="4", NCCL_ALGO="ring,tree;allreduce:tree", NCCL_DEBUG="info") == []
    assert exported(NCCL_ALGO="^tree", NCCL_PROTO="^LL128", NCCL_NET_PLUGIN="none") == []


def test_a_misspelt_variable_is_told() -> None:
    found = unknown_variables(exported_settings({"NCCL_SOCKET_IFNAM": "eth0", "NCCL_MAX_CTAS": "2", "NCCL_NET": "IB"}))
    assert [problem.fix for problem in found] == ["did you mean NCCL_SOCKET_IFNAME?"]


# Interfaces.


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=docker0", ["lo", "eth0", "eth1", "ib0"]),
        ("=eth", []),
    ],
)
def test_interfaces_are_selected_as_nccl_does(wanted: str, found: list[str]) -> None:
    assert matching(wanted, PRESENT) == found


@pytest.mark.parametrize("uses_nccl", [False, True])
def test_an_interface_that_is_not_there_is_told_with_those_that_are(uses_nccl: bool) -> None:
    settings = config_settings(config("comm.interface=eth3").comm)
    (problem,) = check_interfaces(settings, PRESENT, uses_nccl=uses_nccl)
    assert problem.what == "comm.interface = eth3: this host has no network interface eth3"
    assert "lo, eth0, eth1" in problem.rule
    assert problem.fix.startswith("did you mean eth")
    assert check_interfaces(config_settings(config("comm.interface=ib0").comm), PRESENT, uses_nccl=uses_nccl) == []


def test_a_filter_that_matches_nothing_is_told_where_nccl_reads_it() -> None:
    settings = config_settings(config("comm.nccl.socket_interface=wlan").comm)
    (problem,) = check_interfaces(settings, PRESENT, uses_nccl=True)
    assert "matches" in problem.what
    assert check_interfaces(settings, PRESENT, uses_nccl=False) == []


LEGAL: dict[str, Any] = {
    "p2p": st.booleans(),
    "p2p_level": st.sampled_from(["LOC", "NVL", "SYS"]),
    "min_channels": st.integers(1, 32),
    "max_channels": st.integers(1, 64),
    "ib": st.booleans(),
    "ib_hca": st.sampled_from(["mlx5", "=mlx5_0:1"]),
    "debug": st.sampled_from(["WARN", "INFO"]),
}


@given(st.fixed_dictionaries({}, optional=LEGAL))
def test_a_contradiction_is_the_same_whoever_says_its_halves(settings: dict[str, Any]) -> None:
    """Exporting what the config says, and splitting it between the two, finds the same number of contradictions."""
    comm = config().comm.model_copy(update={"nccl": NcclConfig(**settings)})
    asked = config_settings(comm)
    variables = {name: each.value for name, each in asked.items()}
    expected = len(contradictions(asked))
    assert len(contradictions(exported_settings(variables))) == expected
    first = dict(itertools.islice(asked.items(), len(asked) // 2))
    rest = exported_settings({name: value for name, value in variables.items() if name not in first})
    assert len(contradictions({**first, **rest})) == expected
