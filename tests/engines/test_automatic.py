"""``strategy="auto"`` without a config: by parameters and memory, the same on every rank."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import choose_for_module, parallelize
from paceline.errors import RankFailedError, UsageError
from paceline.plan.plan import RunMachine
from paceline.units import MIB


def make_model() -> nn.Sequential:
    """16 MiB of parameters in four blocks."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


def choose(comm: Communicator, precision: str = "fp32") -> str:
    model = make_model()
    return choose_for_module(model, comm, list(model), precision).chosen.label


def with_memory(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    def measure(device: str, ranks: int, node_ranks: int) -> RunMachine:
        return RunMachine(
            device=device, device_bytes=mib * MIB, host_bytes=ranks * mib * MIB, ranks=ranks, node_ranks=node_ranks
        )

    monkeypatch.setattr("paceline.engines.apply.measure_machine", measure)


@pytest.mark.parametrize(
    ("mib", "expected"), [(2000, "ddp"), (910, "zero1"), (880, "zero2"), (855, "fsdp")]
)  # half of it for activations, and a tenth free
def test_less_memory_takes_more_sharing(monkeypatch: pytest.MonkeyPatch, mib: int, expected: str) -> None:
    with_memory(monkeypatch, mib)
    assert run_virtual(choose, ranks=4) == [expected] * 4


def test_precision_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 960)
    assert run_virtual(choose, ranks=4)[0] == "ddp"
    assert run_virtual(functools.partial(choose, precision="bf16_master"), ranks=4)[0] != "ddp"


def test_a_layout_that_spreads_the_model_leaves_nothing_to_choose() -> None:
    for degree in ("pipeline", "tensor", "expert"):
        with pytest.raises(RankFailedError, match="'auto' with pipeline, tensor or expert"):
            run_virtual(lambda comm, degree=degree: parallelize(nn.Linear(2, 2), comm, "auto", **{degree: 2}), ranks=2)


def test_all_ranks_hear_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 500)
    with pytest.raises(RankFailedError) as caught:
        run_virtual(choose, ranks=2)
    assert isinstance(caught.value.error, UsageError)
    assert "nothing fits" in str(caught.value.error)
