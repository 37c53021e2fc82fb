"""What a run's first record says of its speed: the dtype of products, what a sample takes, what the device could do."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.solo import SoloCommunicator
from paceline.config import config_from_dict
from paceline.engines.precision import Precision, precision_named
from paceline.records.records import Record, StepRecord
from paceline.run.records import compute_dtype, run_record, write_start
from paceline.train.assemble import build_trainer

CPU = torch.device("cpu")
CONFIG = config_from_dict(
    {
        "model": {"kind": "gpt", "size": "gpt-nano", "context": 16},
        "data": {"kind": "synthetic_tokens", "samples": 8, "context": 16, "eval_fraction": 0.0},
        "train": {"steps": 2, "global_batch": 2},
    }
)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16_master", "bf16"), ("fp16", "fp16")]
)
def test_products_run_in_the_dtype_of_the_precision(name: str, dtype: str) -> None:
    assert compute_dtype(precision_named(name), CPU) == dtype
    assert compute_dtype(Precision(name="fp8", param_dtype=torch.bfloat16), CPU) == "fp8"


def test_the_first_record_says_what_a_sample_takes_and_steps_are_rated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_MACHINE", raising=False)
    comm = SoloCommunicator(CPU)
    trainer = build_trainer(CONFIG, comm)
    run = run_record(CONFIG, comm, trainer)
    assert (run.unit, run.units_per_sample, run.flops_per_sample) == ("tokens", 16.0, trainer.parts.sample.flops)
    assert (run.compute, run.peak_flops, run.measured_peak_flops) == ("fp32", None, None)
    sink = trainer.sink = Kept()
    write_start(CONFIG, comm, trainer)
    trainer.run()
    assert len(sink.steps) == 2
    for record in sink.steps:
        assert record.flops_per_s == pytest.approx(2 * (run.flops_per_sample or 0) / record.step_s)
        assert record.mfu is None


class Kept:
    """Keeps the steps of a run."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def write(self, *records: Record) -> None:
        self.steps += [each for each in records if isinstance(each, StepRecord)]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
