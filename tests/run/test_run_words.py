"""What a run says of itself: the name of its strategy, its hosts, the description of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.schema import Config
from paceline.errors import UsageError
from paceline.run.decide import entry_problem
from paceline.run.records import name_strategy
from paceline.run.train import _hosts_around
from paceline.run.whereami import Surroundings

BASE = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1, "global_batch": 8}}


def config(**parallel: object) -> Config:
    return Config.model_validate({**BASE, "parallel": {"device": "cpu", **parallel}})


@pytest.mark.parametrize(
    ("parallel", "ranks", "name"),
    [
        ({"strategy": "ddp"}, 2, "ddp"),
        ({"strategy": "zero2"}, 2, "zero2"),
        ({"strategy": "zero2"}, 1, "ddp"),
        ({"strategy": "zero1", "pipeline": 2}, 4, "pipeline 2 x zero1"),
        ({"strategy": "ddp", "pipeline": 2}, 2, "pipeline 2"),
        ({"strategy": "ddp", "pipeline": 2, "tensor": 2}, 4, "pipeline 2 x tensor 2"),
        ({"strategy": "ddp", "expert": 2}, 2, "expert 2 x ddp"),
        ({"strategy": "zero1", "pipeline": 2, "tensor": 2}, 8, "pipeline 2 x tensor 2 x zero1"),
    ],
)
def test_a_strategy_is_named_with_the_axes_that_it_has(parallel: dict[str, object], ranks: int, name: str) -> None:
    assert name_strategy(config(ranks=ranks, **parallel), ranks) == name


def hosts(count: int, host_ranks: int | None = None) -> Surroundings:
    return Surroundings(launcher="srun", kind="host", number=1, count=count, host_ranks=host_ranks)


def test_ranks_are_dealt_to_hosts_alike() -> None:
    assert _hosts_around(config(ranks=4), hosts(2)).host_ranks == 2
    assert _hosts_around(config(ranks=4), hosts(2, 2)).host_ranks == 2
    assert _hosts_around(config(ranks="auto", node_ranks=3), hosts(2)).host_ranks == 3
    assert _hosts_around(config(ranks="auto"), hosts(2, 2)).host_ranks == 2


@pytest.mark.parametrize(
    ("ranks", "around", "told"),
    [(3, hosts(2), "auto, or 2"), (4, hosts(2, 1), "2 hosts with 1 ranks each"), (1, hosts(2), "auto, or 2")],
)
def test_ranks_that_hosts_cannot_share_alike_are_refused(ranks: int, around: Surroundings, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        _hosts_around(config(ranks=ranks), around)


def test_a_machine_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_MACHINE", raising=False)
    assert entry_problem() is None
    path = tmp_path / "machine.yaml"
    path.write_text("nothing: of use\n")
    monkeypatch.setenv("PACELINE_MACHINE", str(path))
    assert "is of no use, and the run is not predicted" in str(entry_problem())
