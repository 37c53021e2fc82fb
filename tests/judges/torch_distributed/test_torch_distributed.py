"""torch's own distributed tests: those of collectives and of data parallelism that need no GPU, on three ranks.

Our communicator through shared memory is the backend of its process groups, and an engine of ours stands in the place
of ``DistributedDataParallel`` (``in_place_of_torch.py``). The tests are torch's, unchanged.
"""

from __future__ import annotations

import pytest
from judging import chosen, end_as
from torchs_tests import needs_of_tests, run_torchs_tests

pytestmark = [pytest.mark.judge, pytest.mark.timeout(600)]
NOT_OURS = {
    "any_source": "our communicators name the rank that they receive from",
    "monitored_barrier": "it is a function of Gloo's own",
    "allreduce_hook": "an engine takes a compression in the place of torch's hooks",
    "with_then_hook": "an engine takes a compression in the place of torch's hooks",
    "logging_data": "it reads the logging data of torch's class",
    "barrier_timeout_full_group": "it looks for Gloo's words; our error names the ranks that ended",
    "DataParallel_requires_grad": "it wants a frozen model refused; here such a model is sharded, as a reference is",
    "static_graph_api": "it sets a private flag of torch's class",
}


NEEDS = needs_of_tests()


def own_reason(name: str) -> str:
    if NEEDS[name]:
        return f"torch's own words: {NEEDS[name]}"
    return next((why for part, why in NOT_OURS.items() if part in name), "")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """How each test ended that was chosen."""

    names = [name for name in chosen(request, "name") if not own_reason(name)]
    return run_torchs_tests(tmp_path_factory.getbasetemp(), "torch_distributed", names, "gloo")


@pytest.mark.parametrize("name", NEEDS)
def test_torchs_own_test_passes(name: str, outcomes: dict[str, tuple[str, str]]) -> None:
    if why := own_reason(name):
        pytest.skip(why)
    end_as(*outcomes[name])
