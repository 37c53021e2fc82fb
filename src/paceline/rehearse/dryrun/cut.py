"""What every rank of a layout writes into a checkpoint: its engine is asked, on a model without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from paceline.checkpoint.write import own_shares
from paceline.comm.dry.communicator import DryWorld
from paceline.config import Config
from paceline.engines.apply import parallelize
from paceline.plan.layout import Layout
from paceline.rehearse.dryrun.parts import empty_model, few_data
from paceline.shards import Region


def cut_of_run(config: Config, layout: Layout) -> list[Mapping[str, Region]]:
    """Returns what the ranks of a layout would write of the model that a config trains."""
    data = few_data(config)
    return cut_of_training(lambda: empty_model(config, data), layout)


def cut_of_training(make_model: Callable[[], nn.Module], layout: Layout) -> list[Mapping[str, Region]]:
    """Returns by rank the regions that it writes of the model's parameters and buffers, by their names.

    ``make_model`` makes the model on the meta device.
    """
    world, found = DryWorld(layout.ranks), list[Mapping[str, Region]]()
    for rank in range(layout.ranks):  # the first one tells the others where the model is cut
        engine = parallelize(make_model(), world.rank(rank), layout=layout)
        found.append({share.name: share.region for share in own_shares(engine.shards())})
    return found
