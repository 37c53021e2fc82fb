"""An entry is fitted to a finished run: what is predicted of that run afterwards is what it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made_records as records
import pytest

from paceline.calibrate.entry import Refit, read_times, refit, rescale
from paceline.cluster.detect import Machine
from paceline.cluster.entries import parse_catalog
from paceline.config import config_from_dict, dump_yaml
from paceline.errors import UsageError
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


def test_the_slowest_rank_counts_and_the_first_steps_do_not(tmp_path: Path) -> None:
    found = read_times(make_run(tmp_path / "run"))
    assert (found.step_s, found.ranks, found.backend, found.steps) == (pytest.approx(0.0012), 2, "shared_memory", 20)
    assert found.compute_s == pytest.approx(0.0012 - 0.0004)


def test_a_fitted_entry_predicts_the_run_that_it_was_fitted_to(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    base = tmp_path / "base.yaml"
    base.write_text(ENTRY)
    found = refit(run, HOST, base)
    assert abs(found.error(found.after_s)) < 0.01 < abs(found.error(found.before_s))
    entry = tmp_path / "mine.yaml"
    entry.write_text(found.text)
    again = refit(run, HOST, entry)  # nothing is left to fit, and the same is found again
    assert again.compute == pytest.approx(1.0, abs=0.02)
    assert again.before_s == pytest.approx(found.after_s)


@pytest.mark.exhaustive
def test_without_an_entry_the_small_host_of_the_catalog_is_fitted(tmp_path: Path) -> None:
    assert refit(make_run(tmp_path / "run"), HOST).before_s > 0


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


def test_kernels_and_the_link_of_the_run_are_changed_and_no_other() -> None:
    text = rescale(ENTRY, 1.5, 2.0, "shared_memory", "a-run")
    found = parse_catalog(text, "the entry")
    device, links = found.devices["mine"], found.links
    assert (device.factor, device.operation_us, device.launch_us) == (1.5, 30, 15)
    assert (links["mine-shm"].gb_per_s, links["mine-shm"].all_reduce_us) == (2, {2: {1024: 100}})
    assert (links["mine-gloo"].gb_per_s, links["mine-gloo"].latency_us) == (2, 100)
    assert text.startswith("# Measured by: somebody\n# Fitted to the run a-run: kernels x 1.500")
    assert parse_catalog(rescale(text, 2.0, 1.0, "gloo", "b"), "again").devices["mine"].factor == 3.0


def test_factors_that_are_plainly_off_are_doubted() -> None:
    usual = Refit(measured_s=2.0, before_s=1.0, after_s=2.0, compute=1.1, communication=2.3, text="", ranks=2, cores=2)
    assert usual.doubts() == []
    slow, other = replace(usual, compute=2.5).doubts()
    assert slow == "kernels 2.5 times what the entry said, and 0.5 to 2 is usual"
    assert other == "something else ran on the machine, or the entry or the run is of another one"
    (_, turns) = replace(usual, communication=5.0, ranks=4).doubts()
    assert turns.startswith("4 ranks took turns on 2 cores")
    assert len(replace(usual, compute=0.1657, communication=0.05).doubts()) == 3


def test_what_no_factor_fits_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(ENTRY)
    waiting = make_run(tmp_path / "waiting", step=replace(STEP, step_s=1.0, comm_s=0.9992))
    with pytest.raises(UsageError, match=r"no factor fits: with kernels .* and collectives 20 times what the entry"):
        refit(waiting, HOST, base)


def test_collectives_that_do_not_count_stay_as_they_were(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(ENTRY.replace("{1024: 50}", "{1024: 0.5}").replace("latency_us: 20", "latency_us: 0.1"))
    found = refit(make_run(tmp_path / "run", step=replace(STEP, step_s=0.1, comm_s=0.0)), HOST, base)
    assert found.communication == 1.0
    assert abs(found.error(found.after_s)) < 0.05


def test_a_run_of_virtual_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is of virtual ranks"):
        refit(make_run(tmp_path / "run", backend="virtual"), HOST)


def test_runs_that_tell_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run: it has no config"):
        refit(tmp_path, HOST)
    with pytest.raises(UsageError, match="holds 3 steps\n"):
        read_times(make_run(tmp_path / "short", num_steps=3))
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"nowhere\.yaml cannot be read"):
        refit(run, HOST, tmp_path / "nowhere.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UsageError, match=r"empty\.yaml has no nodes"):
        refit(run, HOST, tmp_path / "empty.yaml")
    assert Refit(measured_s=2.0, before_s=1.0, after_s=2.0, compute=1.0, communication=1.0, text="").error(1.0) == -0.5
