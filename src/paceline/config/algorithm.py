"""The rules that ``comm.algorithm`` obeys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.config.schema import Config


def check_algorithm(config: Config, ranks: int, node_ranks: int | None = None) -> list[Problem]:
    """Lists what these ranks, ``node_ranks`` of them on a host (None: all), break about the algorithm."""
    local = config.parallel.node_ranks or node_ranks or ranks
    if config.comm.algorithm != "hierarchical" or ranks == 1 or local < ranks:
        return []
    stated = f"parallel.node_ranks = {config.parallel.node_ranks}" if config.parallel.node_ranks else "one host"
    half = next((size for size in range(ranks // 2, 0, -1) if ranks % size == 0), 1)
    return [
        Problem(
            what=f"comm.algorithm = hierarchical on {ranks} ranks with {stated}",
            rule="it reduces inside hosts and then across them, so that it takes two hosts at least",
            fix=f"set parallel.node_ranks = {half} to treat the ranks as several hosts, or comm.algorithm = auto",
        )
    ]


def table_is_asked(config: Config) -> list[Problem]:
    """A table of measured all-reduces is given to somebody who asks it."""
    comm = config.comm
    if comm.algorithm_table is None or comm.algorithm == "auto":
        return []
    return [
        Problem(
            what=f"comm.algorithm_table = {comm.algorithm_table} with comm.algorithm = {comm.algorithm}",
            rule="the table says which algorithm is fastest, and here one is chosen already",
            fix="set comm.algorithm = auto, or leave comm.algorithm_table out",
        )
    ]


def algorithm_fits(config: Config) -> list[Problem]:
    """Hosts fit the algorithm, where ranks and hosts are given; else they are known only when the run starts."""
    parallel = config.parallel
    if parallel.ranks == "auto" or parallel.node_ranks is None:
        return []
    return check_algorithm(config, parallel.ranks)
