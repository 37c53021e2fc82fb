"""The mutation check, of activations on the host and MLPs in tiles: planted mistakes are found by the certificate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted_bugs import Bug, case, check_found, replacing
from torch import nn

from paceline.engines import tiles
from paceline.engines.activations import HostActivations
from paceline.plan.layout import Offload
from paceline.verify.case import Settings

HOW = {"ranks": 2, "steps": 2, "accumulate": 2, "checkpoint_activations": "full"}
AWAY = Settings.of(**HOW, offload=Offload(activations=True))
IN_TILES = Settings.of(**HOW, mlp_tiles=3)


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 3)
        self.rows = nn.ModuleList(Row() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for row in self.rows:
            x = row(x)
        return self.last(x)


def reused_too_early(original: Callable[..., Any]) -> Callable[..., Any]:
    """Memory of the host is free again as soon as it is written."""

    def take(self: HostActivations, num_bytes: int) -> list[torch.Tensor]:
        pieces: list[torch.Tensor] = original(self, num_bytes)
        self.give(pieces)
        return pieces

    return take


def one_tile_lost(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tile's weight gradient takes the place of the one before."""
    return lambda _total, term: original(None, term)


ROWS = case(Rows)
BUGS = {
    "memory of the host is used again too early": Bug(
        plant=replacing(HostActivations, "take", reused_too_early), case=ROWS, shows="gradient", settings=AWAY
    ),
    "the weight gradient of a tile is lost": Bug(
        plant=replacing(tiles, "_add", one_tile_lost), case=ROWS, shows="gradient", settings=IN_TILES
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_every_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(BUGS[name], monkeypatch)
