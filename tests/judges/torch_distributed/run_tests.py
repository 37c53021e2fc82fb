"""Runs tests of torch's ``distributed_test.py`` with ours in the place of torch's; started by the judges' tests.

    python run_tests.py NAMES FOLDER OUTPUT gloo|nccl

Writes a line for each to the file that it is given: the name, the outcome, and why. Ranks of NCCL share the first GPU:
a test that asks for its rank's GPU gets that one. They are forked, which CUDA does not survive: this process must not
begin it, and each rank does, before it is told of more GPUs than there are.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

BACKEND = sys.argv[4]
RANKS = {"gloo": 3, "nccl": 2}[BACKEND]
os.environ.update(BACKEND=BACKEND, WORLD_SIZE=str(RANKS), TEMP_DIR=sys.argv[2])
# A test that hangs must not use up the others' time.
os.environ.update(DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60" if RANKS == 2 else "300")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "pool")]
warnings.simplefilter("ignore")

import torch  # noqa: E402

if BACKEND == "nccl":  # whoever starts this has looked: torch's tests ask when they are loaded, and need not ask CUDA
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1

import in_place_of_torch  # noqa: E402
from nccl_pool import own_host  # noqa: E402

in_place_of_torch.replace_process_groups(torch.device("cuda", 0) if BACKEND == "nccl" else torch.device("cpu"))
in_place_of_torch.replace_data_parallel()

from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

# The list of tests that torch's own machines leave out, which is empty here: to look there begins CUDA.
common_utils.check_if_enable = lambda _: None

# Some tests also look for Gloo's own events in a profile.
for _backends in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
    setattr(distributed_test, _backends, [])


def share_the_gpu() -> None:
    """Lets torch's tests take the first GPU for that of every rank, once CUDA has begun with what there is."""
    torch.cuda.init()
    torch.cuda.set_device(0)
    torch.cuda.device_count = lambda: RANKS
    torch.cuda.set_device = lambda _: None
    move = torch.Tensor.to

    def move_to_the_first(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return move(tensor, *((0, *args[1:]) if args and isinstance(args[0], int) else args), **options)

    torch.Tensor.to = move_to_the_first  # type: ignore[assignment, method-assign]
    distributed_test.init_multigpu_helper = lambda ranks, _: {rank: [0] for rank in range(ranks)}


class OurTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests as torch runs them, with processes that are forked."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
        if BACKEND == "nccl":
            os.environ.update(own_host(rank))
            share_the_gpu()
        super()._run(rank, *args, **kwargs)


def outcome_of(name: str) -> tuple[str, str]:
    result = unittest.TestResult()
    OurTests(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    trouble: list[Any] = [*result.failures, *result.errors]
    return ("failed", trouble[0][1]) if trouble else ("passed", "")


def main() -> None:
    names, output = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[3])
    for name in names:
        outcome = outcome_of(name)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, *outcome]) + "\n")


main()
