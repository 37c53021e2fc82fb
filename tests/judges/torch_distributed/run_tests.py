"""Runs tests of torch's ``distributed_test.py`` with ours in the place of torch's; started by the judge's test.

Writes a line for each to the file that it is given: the name, the outcome, and why.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

os.environ.update(BACKEND="gloo", WORLD_SIZE="3", TEMP_DIR=sys.argv[2])
sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")

import in_place_of_torch  # noqa: E402
import torch  # noqa: E402

in_place_of_torch.replace_process_groups()
in_place_of_torch.replace_data_parallel()

from torch.testing._internal.distributed import distributed_test  # noqa: E402

# Some tests also look for Gloo's own events in a profile.
for _backends in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
    setattr(distributed_test, _backends, [])


class OurTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests as torch runs them, with processes that are forked."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


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
