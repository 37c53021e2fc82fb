"""accelerate's own test scripts: synchronisation, training, data loops and collectives, on two processes.

``Accelerator.prepare`` gets an engine of ours where it would build ``DistributedDataParallel``, and its collectives go
through our communicator (``in_place_of_torch.py``). Each function of the scripts runs as accelerate wrote it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from judging import chosen, end_as, run_once

pytestmark = [
    pytest.mark.judge,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate"),
]
RUNNER = "run_functions"  # beside this file; by name, so that the tests' server may fork it
FLAGS = list(itertools.product((False, True), repeat=3))
SCRIPTS: dict[str, list[tuple[Any, ...]]] = {
    "test_sync": [
        ("test_dataloader_break",),
        ("test_distributed_sync", "Accelerator"),
        ("test_distributed_sync_multiple_fwd", "Accelerator"),
        *(("test_gradient_accumulation", *flags) for flags in FLAGS),
        *(("test_gradient_accumulation_with_opt_and_scheduler", *flags) for flags in FLAGS),
    ],
    "test_script": [
        *((name,) for name in ("init_state_check", "process_execution_check", "test_split_between_processes_list")),
        *((f"test_split_between_processes_{name}",) for name in ("nested_dict", "tensor", "evenly")),
        *((name,) for name in ("rng_sync_check", "dl_preparation_check", "central_dl_preparation_check")),
        *((name,) for name in ("custom_sampler_check", "check_seedable_sampler")),
        *((f"check_seedable_sampler_{name}",) for name in ("with_data_seed", "in_batch_sampler_shard")),
        ("training_check", False),
        ("training_check", True),
        ("test_trigger",),
        ("test_reinstantiated_state",),
    ],
    "test_distributed_data_loop": [
        ("test_default_ensures_even_batch_sizes",),
        ("test_can_disable_even_batches",),
        ("test_can_join_uneven_inputs",),
        ("test_join_can_override_even_batches",),
        ("test_join_can_override_for_mixed_type_dataloaders",),
        ("test_join_raises_warning_for_iterable_when_overriding_even_batches",),
        ("test_pickle_accelerator",),
    ],
    "test_ops": [
        (f"test_{name}", "PartialState")
        for name in (
            *("gather", "gather_object", "gather_non_contiguous", "broadcast", "pad_across_processes"),
            *("reduce_sum", "reduce_mean", "reduce_max", "op_checker", "copy_tensor_to_devices"),
        )
    ],
}
NOT_OURS = {
    "multiple_fwd": "it sets private flags of torch's reducer",
    "join": "it is for torch's Joinable; an engine of ours lets a rank without a batch join by itself",
}
CASES = [(script, *call) for script, calls in SCRIPTS.items() for call in calls]


def own_reason(case: tuple[Any, ...]) -> str:
    return next((why for part, why in NOT_OURS.items() if part in case[1]), "")


def run_calls(calls: list[tuple[Any, ...]], output: Path) -> None:
    """Runs some functions of the scripts by torchrun; behind one that fails it starts anew."""
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    rows: list[Any] = []
    while len(rows) < len(calls):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", *launcher, "localhost:0", "--module", RUNNER, f"{folder}/out"]
            left = json.dumps(calls[len(rows) :])
            done = subprocess.run(
                [*command, left], env=environment, cwd=folder, capture_output=True, text=True, timeout=550, check=False
            )
            files = [Path(folder) / f"out.{rank}" for rank in range(2)]
            found = [file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files]
        pairs = [[json.loads(line)[1] for line in each] for each in zip(*found, strict=False)]
        rows += [next(filter(None, pair), "") for pair in pairs]
        if done.returncode != 0 and not (pairs and any(pairs[-1])):
            rows.append(f"torchrun ended with {done.returncode}\n{done.stderr}")
    lines = [json.dumps([call, "failed" if why else "passed", why]) for call, why in zip(calls, rows, strict=True)]
    output.write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_accelerates_own_function_passes(
    case: tuple[Any, ...], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if why := own_reason(case):
        pytest.skip(why)
    calls = [each for each in chosen(request, "case") if not own_reason(each)]
    rows = run_once(tmp_path_factory.getbasetemp(), "accelerate_scripts", lambda output: run_calls(calls, output))
    end_as(*next((outcome, why) for found, outcome, why in rows if found == list(case)))
