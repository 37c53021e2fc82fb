"""torch's own tests of collectives on GPUs, through our communicator over NCCL: two ranks that share one GPU.

As in ``torch_distributed``: the tests are torch's, unchanged.
"""

from __future__ import annotations

import pytest
from judging import end_as
from torchs_tests import needs_of_tests, run_torchs_tests

pytestmark = [pytest.mark.judge, pytest.mark.gpu, pytest.mark.timeout(600)]
PARTS = 3  # run at the same time: most of a test is the start of its ranks
NOT_OURS = {
    "batch_isend_irecv": "it batches messages by torch's own NCCL backend",
    "coalescing_manager": "it has torch's own NCCL backend coalesce",
    "profiler": "it looks for NCCL's own events in a profile",
    "high_priority_stream": "it sets an option of torch's own NCCL backend",
    "timeout": "it looks for NCCL's own words",
}
NAMES = [name for name in needs_of_tests() if ("_cuda" in name or "_nccl" in name) and "ddp" not in name.lower()]
CASES = [
    pytest.param(name, number % PARTS, id=name, marks=pytest.mark.xdist_group(f"collectives-{number % PARTS}"))
    for number, name in enumerate(NAMES)
]


def own_reason(name: str) -> str:
    return next((why for part, why in NOT_OURS.items() if part in name), "")


@pytest.mark.parametrize(("name", "part"), CASES)
def test_torchs_own_test_passes_over_nccl(
    name: str, part: int, device: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if why := own_reason(name):
        pytest.skip(why)
    if device == "cpu":
        pytest.skip("it needs NCCL: torch_distributed has the tests for Gloo")
    tests = [each for number, each in enumerate(NAMES) if number % PARTS == part and not own_reason(each)]
    found = run_torchs_tests(tmp_path_factory.getbasetemp(), f"collectives-{part}", tests, "nccl")
    outcome, why = found[name]
    if "invalid device ordinal" in why:
        pytest.skip("it wants a GPU for each rank, and ours share one")
    end_as(outcome, why)
