"""A small run's folder, and a calibrated entry of a small host that runs it: what entries are fitted to in tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made_records as records

from paceline.cluster.detect import Machine
from paceline.config import config_from_dict, dump_yaml
from paceline.records.records import StepRecord
from paceline.records.sinks import JsonlSink
from paceline.units import GIB

HOST = Machine(processor="a processor", cores=2, memory_bytes=8.0 * GIB)
RUN = replace(records.RUN, backend="shared_memory")
STEP = replace(records.STEP, step_s=0.001, data_s=0.0001, comm_s=0.0003)


def make_run(folder: Path, num_steps: int = 20, *, backend: str = "shared_memory", step: StepRecord = STEP) -> Path:
    values = {
        "name": "small",
        "model": {"kind": "mlp", "hidden_dim": 32},
        "data": {"kind": "synthetic_classification", "samples": 64, "features": 16, "classes": 4},
        "parallel": {"ranks": 2, "device": "cpu", "strategy": "ddp"},
        "train": {"steps": num_steps, "global_batch": 8},
        "optim": {"kind": "adamw", "lr": 1e-3},
    }
    (folder / "records").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config_from_dict(values)))
    for rank in range(2):
        sink = JsonlSink(folder / "records" / f"rank-{rank}.jsonl")
        sink.write(replace(RUN, rank=rank, backend=backend))
        for number in range(1, num_steps + 1):
            slow = 9.0 if number == 1 else 1.0 + 0.2 * rank
            sink.write(replace(step, step=number, step_s=step.step_s * slow))
        sink.close()
    return folder


ENTRY = """
# Measured by: somebody
devices:
  mine: {vendor: host, generation: cpu, memory_gib: 4, memory_gb_per_s: 10, peak_tflops: {fp32: 0.03}, launch_us: 10,
    operation_us: 20, multiprocessors: 1, node: mine, memory_rates: {pointwise: {1000: 20.0}}}
links:
  mine-shm: {kind: shared_memory, gb_per_s: 4, efficiency: 1.0, latency_us: 20, all_reduce_us: {2: {1024: 50}}}
  mine-gloo: {kind: loopback, gb_per_s: 2, efficiency: 1.0, latency_us: 100}
nodes:
  mine: {device: mine, devices: 2, inside: mine-shm}
"""
