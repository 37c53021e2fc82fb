"""What a run is expected to take by a dry run: figures where the machine was measured, and else the formulas'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.calibrate.entry import rescale
from paceline.cluster.detect import Machine
from paceline.config import Config, config_from_dict
from paceline.rehearse.dryrun.expected import Background, better_of, expect_by_dry_run, plain_start
from paceline.run.decide import is_worth_dry_run
from paceline.search.expectation import Expectation
from paceline.units import GIB

HOST = Machine(processor="a processor", cores=2, memory_bytes=8.0 * GIB)
ENTRY = """
devices:
  mine: {vendor: host, generation: cpu, memory_gib: 4, memory_gb_per_s: 10, peak_tflops: {fp32: 0.03}, launch_us: 10,
    operation_us: 20, multiprocessors: 1, node: mine, memory_rates: {pointwise: {1000: 20.0}}}
links:
  mine-shm: {kind: shared_memory, gb_per_s: 4, efficiency: 1.0, latency_us: 20, all_reduce_us: {2: {1024: 5000}}}
  mine-gloo: {kind: loopback, gb_per_s: 2, efficiency: 1.0, latency_us: 100, all_reduce_us: {2: {1024: 9000}}}
nodes:
  mine: {device: mine, devices: 2, inside: mine-shm}
  mine-gloo: {device: mine, devices: 2, inside: mine-gloo}
"""


def _config(**sections: dict[str, object]) -> Config:
    values: dict[str, dict[str, object]] = {
        "model": {"kind": "mlp", "hidden_dim": 32},
        "data": {"kind": "synthetic_classification", "samples": 64, "features": 16, "classes": 4},
        "parallel": {"ranks": 2, "device": "cpu", "strategy": "ddp"},
        "train": {"steps": 50, "global_batch": 8},
        "optim": {"kind": "adamw", "lr": 1e-3},
    }
    return config_from_dict({key: {**value, **sections.pop(key, {})} for key, value in values.items()} | sections)


def test_any_model_is_priced_kernel_by_kernel_on_an_entry(tmp_path: Path) -> None:
    entry = tmp_path / "mine.yaml"
    entry.write_text(ENTRY)
    found = expect_by_dry_run(_config(), HOST, entry=entry)
    assert found.reason == ""
    assert (found.ranks, found.cluster) == (2, f"2x {entry}")  # which predict --cluster reads
    assert found.step_s is not None
    assert found.step_s > 0.005  # an all-reduce alone takes that long
    over_gloo = expect_by_dry_run(_config(comm={"backend": "gloo"}), HOST, entry=entry)
    assert over_gloo.step_s is not None
    assert over_gloo.step_s > found.step_s + 0.003
    entry.write_text(rescale(ENTRY, 2.0, 1.0, "shared_memory", "run"))
    slower = expect_by_dry_run(_config(), HOST, entry=entry)
    assert slower.step_s is not None
    assert slower.step_s > found.step_s


def test_what_cannot_be_said_has_a_reason(tmp_path: Path) -> None:
    entry = tmp_path / "mine.yaml"
    entry.write_text(ENTRY.replace(", memory_rates: {pointwise: {1000: 20.0}}", ""))
    assert "no measured kernels" in expect_by_dry_run(_config(), HOST, entry=entry).reason
    assert expect_by_dry_run(_config(), HOST, entry=tmp_path / "none.yaml").reason
    assert "virtual" in expect_by_dry_run(_config(comm={"backend": "virtual"}), HOST).reason


def test_the_dry_runs_time_and_the_estimates_memory_are_taken() -> None:
    formula = Expectation(ranks=2, step_s=1.0, memory_bytes=5.0)
    dry = Expectation(ranks=2, step_s=2.0)
    assert better_of(formula, None) == formula
    best = better_of(formula, dry)
    assert best is not None
    assert (best.step_s, best.memory_bytes) == (2.0, 5.0)
    assert better_of(None, dry) == dry
    on_gpu = Expectation(ranks=2, step_s=2.0, memory_bytes=7.0)
    assert better_of(formula, on_gpu) == on_gpu


def test_what_the_dry_run_could_not_do_is_told_beside_the_formulas_reason() -> None:
    failed = Expectation(reason="a network is not known")
    assert better_of(Expectation(ranks=2, step_s=1.0), failed) == Expectation(ranks=2, step_s=1.0)
    both = better_of(Expectation(ranks=2, memory_bytes=5.0, reason="no gpt"), failed)
    assert both == Expectation(ranks=2, memory_bytes=5.0, reason="no gpt; a network is not known")
    assert better_of(None, failed) == failed


def test_a_process_that_fails_says_so_and_is_gone() -> None:
    # On a busy machine, one that gets only what nobody else wants takes minutes to fail: here it gets its share.
    code = "from paceline.rehearse.dryrun import expected; expected._step_back = lambda _: None; expected.main()"
    background = Background("this is no config", start=lambda command: ["-c", code, command[1]])
    found = background.result(timeout_s=240)
    assert (found.step_s, found.reason) == (None, "the dry run failed: paceline predict says why")
    background.stop()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="keeps no process to a core")
@pytest.mark.exhaustive
def test_a_dry_run_keeps_to_the_cores_of_the_run() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cases = {(): [allowed[-1]], tuple(allowed): allowed, (allowed[0],): [allowed[0]]}
    code = (
        "import os; from paceline.rehearse.dryrun.expected import _step_back\n"
        f"for cores in {list(cases)}:\n"
        f"    os.sched_setaffinity(0, [{allowed[-1]}]); _step_back(cores); print(sorted(os.sched_getaffinity(0)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [str(cores) for cores in cases.values()]


def test_a_process_that_is_not_done_is_not_waited_for() -> None:
    background = Background("name: mine", start=lambda _: ["-c", "import time; time.sleep(600)"])
    assert "the machine was busy" in background.result(timeout_s=0.1).reason


def test_short_runs_and_threads_are_not_worth_a_process() -> None:
    assert is_worth_dry_run(_config())
    assert not is_worth_dry_run(_config(train={"steps": 10}))
    assert not is_worth_dry_run(_config(comm={"backend": "virtual"}))


def test_a_dry_run_is_started_as_somebody_says_and_gets_the_config(tmp_path: Path) -> None:
    entry = tmp_path / "mine.yaml"
    wanted = Expectation(ranks=2, step_s=3.0)
    started: list[list[str]] = []

    def start(command: Sequence[str]) -> list[str]:
        started.append(list(command))
        return ["-c", f"print({wanted.to_text()!r})"]

    background = Background("name: mine", threads=2, cores=(1, 3), entry=entry, start=start)
    assert background.result(timeout_s=240) == wanted
    asked = {"config": "name: mine", "threads": 2, "cores": [1, 3], "entry": str(entry.absolute())}
    assert [(module, json.loads(text)) for module, text in started] == [("paceline.rehearse.dryrun.expected", asked)]
    assert plain_start(["module", "word"]) == ["-m", "module", "word"]


def test_a_dry_run_ends_with_its_launcher() -> None:
    """A process whose parent is another one than at its start has lost its launcher."""
    code = "from paceline.rehearse.dryrun.expected import _end_with; _end_with(-1); print('goes on')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
