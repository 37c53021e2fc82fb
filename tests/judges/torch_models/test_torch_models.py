"""The models of torch's own tests of FSDP and of DTensor: three steps of Adam under each strategy, and split by tensor.

torch's parity tests train these models on several ranks and on one process, and compare losses and parameters; so does
this judge, in float64, on virtual ranks (``model_cases.py``).
"""

from __future__ import annotations

import pytest
from judging import outcome_of
from model_cases import MODELS, PLANS, STRATEGIES, assert_trained, train_a_part, train_alone, train_on_a_rank
from oracle import Numbers

from paceline.comm.virtual.communicator import run_virtual

pytestmark = [pytest.mark.judge, pytest.mark.filterwarnings("ignore")]
NUMBERS = Numbers()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_torchs_tests_trains_as_in_one_process(name: str, strategy: str, ranks: int) -> None:
    alone = train_alone(name, ranks, NUMBERS)
    for state in outcome_of(lambda: run_virtual(lambda comm: train_on_a_rank(comm, name, strategy, NUMBERS), ranks)):
        assert_trained(name, state, alone)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PLANS)
def test_a_model_of_torchs_tests_trains_under_tensor_parallelism(name: str, ranks: int) -> None:
    found = outcome_of(lambda: run_virtual(lambda comm: train_a_part(comm, name, NUMBERS), ranks))
    alone = train_alone(name, 1, NUMBERS)
    for state in found:
        assert_trained(name, state, alone)
