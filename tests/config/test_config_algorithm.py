"""``comm.algorithm``: known names, and hosts where it needs them."""

from __future__ import annotations

from typing import get_args

import pytest

from paceline.comm.algorithms.communicator import AlgorithmName
from paceline.config import check_ranks, load_config
from paceline.config.schema import CommConfig
from paceline.errors import ConfigError

MLP = ["model.kind=mlp", "data.kind=digits"]


def test_the_schema_knows_the_algorithms_that_there_are() -> None:
    assert set(get_args(CommConfig.model_fields["algorithm"].annotation)) == {"native", *get_args(AlgorithmName)}
    assert load_config(None, MLP).comm.algorithm == "native"


@pytest.mark.parametrize(
    ("value", "meant"), [("rign", "ring"), ("halving-doubling", "halving_doubling"), ("hierarchicl", "hierarchical")]
)
def test_a_wrong_name_is_answered_with_the_one_that_was_meant(value: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*MLP, f"comm.algorithm={value}"])
    assert caught.value.problems[0].fix == f"did you mean comm.algorithm = {meant}?"


def test_hierarchical_needs_two_hosts_where_they_are_given() -> None:
    asked = [*MLP, "comm.algorithm=hierarchical"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*asked, "parallel={ranks: 4, node_ranks: 4}"])
    (problem,) = caught.value.problems
    assert problem.what == "comm.algorithm = hierarchical on 4 ranks with parallel.node_ranks = 4"
    assert "parallel.node_ranks = 2" in problem.fix
    assert load_config(None, [*asked, "parallel={ranks: 4, node_ranks: 2}"]).parallel.node_ranks == 2
    load_config(None, [*asked, "parallel.ranks=4"])  # hosts are known when the run starts


def test_hierarchical_needs_two_hosts_when_they_are_known() -> None:
    config = load_config(None, [*MLP, "comm.algorithm=hierarchical"])
    assert check_ranks(config, 8, node_ranks=4) == check_ranks(config, 1) == []
    (problem,) = check_ranks(config, 8)
    assert problem.what == "comm.algorithm = hierarchical on 8 ranks with one host"
    assert "two hosts" in problem.rule
    other = load_config(None, [*MLP, "comm.algorithm=auto"])
    assert check_ranks(other, 8) == []


def test_a_table_is_given_to_somebody_who_asks_it() -> None:
    asked = [*MLP, "comm.algorithm_table=table.json"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*asked, "comm.algorithm=ring"])
    (problem,) = caught.value.problems
    assert problem.what == "comm.algorithm_table = table.json with comm.algorithm = ring"
    assert "comm.algorithm = auto" in problem.fix
    assert load_config(None, [*asked, "comm.algorithm=auto"]).comm.algorithm_table == "table.json"
