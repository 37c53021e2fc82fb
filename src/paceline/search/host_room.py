"""Whether a host has room for what its ranks offload to it.

    bytes of a rank on the host  x  ranks of the host  <=  what is free there

The bytes are those of the estimate (``predict/memory/memory.py``): masters, gradients and optimizer state of its shard.
"""

from __future__ import annotations

from paceline.config import Config, config_batch, shard_group
from paceline.errors import Problem
from paceline.plan.plan import rank_memory
from paceline.predict.memory.activations import describe_model
from paceline.units import format_bytes


def host_problems(config: Config, *, node_ranks: int, free_bytes: int) -> list[Problem]:
    """Lists why a host cannot hold what is offloaded, for a config whose device, ranks and strategy are settled.

    Nothing is offloaded on CPU ranks. What a model of the user's own code needs, each rank finds when it is set up.
    """
    parallel, ranks, offload = config.parallel, config.parallel.ranks, config.memory.offload
    assert isinstance(ranks, int)
    if not offload or parallel.device != "cuda":
        return []
    model = describe_model(config, "cuda")
    group = shard_group(parallel, ranks, node_ranks)
    found = rank_memory(config, model, config_batch(config, ranks), group, "cuda")
    if found is None or found.host * node_ranks <= free_bytes:
        return []
    needed, each = format_bytes(found.host * node_ranks), format_bytes(found.host)
    count = "1 rank keeps" if node_ranks == 1 else f"{node_ranks} ranks keep"
    return [
        Problem(
            what=f"memory.offload = [{', '.join(offload)}]: {count} {needed} on this host ({each} each), "
            f"and {format_bytes(free_bytes)} are free",
            rule="ranks share the memory of their host, and what is offloaded stays there for the whole run",
            fix="spread the ranks over more hosts, offload less, or remove memory.offload and set "
            "parallel.strategy = auto, which takes what fits",
        )
    ]
