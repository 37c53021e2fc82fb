"""Simulated runs whose ranks share one GPU: the numbers of a run without clocks, and times of the device."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.records.records import StepRecord
from paceline.rehearse.simulate.recording import KeptRecords
from paceline.rehearse.simulate.run import Conditions, prepare, simulate
from paceline.train.assemble import build_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compute", ["measured", "modelled"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_clocks_change_no_number_on_a_gpu(strategy: str, compute: str) -> None:
    values = {
        "name": "tiny",
        "model": {"kind": "mlp", "hidden_dim": 64, "num_classes": 4},
        "data": {"kind": "synthetic_classification", "samples": 40, "features": 6, "classes": 4},
        "train": {"steps": 3, "global_batch": 8},
        "parallel": {"strategy": strategy},
    }
    config = prepare(config_from_dict(values, source="test"), ranks=2, device="cuda")

    def plain(comm: Communicator) -> list[float]:
        sink = KeptRecords()
        build_trainer(config, comm, sink=sink).run()
        return [each.loss_sum for each in sink.records if isinstance(each, StepRecord)]

    found = simulate(config, Conditions(compute=compute))  # type: ignore[arg-type]
    steps = [[each for each in own if isinstance(each, StepRecord)] for own in found.records]
    assert [[each.loss_sum for each in own] for own in steps] == run_virtual(plain, 2, device="cuda")
    assert all(each.step_s > each.comm_s >= 0 for own in steps for each in own)
