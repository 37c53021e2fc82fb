"""The models of torch's own tests of FSDP and of DTensor on a GPU: NCCL ranks, float64 and bf16, and split by tensor.

As in ``torch_models``, against one process on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from model_cases import MODELS, PLANS, STRATEGIES, assert_trained, train_a_part, train_alone, train_on_a_rank
from oracle import Numbers

pytestmark = [pytest.mark.judge, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
TwoRanks = Callable[..., list[Any]]
NCCL = pytest.mark.parametrize("two_ranks", ["nccl"], indirect=True)
ADDS_A_BUFFER = ("shared parameters",)  # to what its layers compute
PRECISIONS = dict(zip(STRATEGIES, ("float64", "bf16_master", "bf16", "bf16_master", "float64"), strict=True))


@NCCL
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_torchs_tests_trains_on_nccl_ranks(
    name: str, strategy: str, device: str, two_ranks: TwoRanks
) -> None:
    numbers = Numbers(device=device, precision=PRECISIONS[strategy], casts_buffers=name in ADDS_A_BUFFER)
    alone = train_alone(name, 2, numbers)
    for state in two_ranks(train_on_a_rank, name, strategy, numbers):
        assert_trained(name, state, alone)


@pytest.mark.parametrize("two_ranks", ["virtual"], indirect=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_torchs_tests_trains_on_virtual_ranks(
    name: str, strategy: str, device: str, two_ranks: TwoRanks
) -> None:
    precision = "bf16" if PRECISIONS[strategy] == "bf16_master" else "bf16_master"
    numbers = Numbers(device=device, precision=precision, casts_buffers=name in ADDS_A_BUFFER)
    alone = train_alone(name, 2, numbers)
    for state in two_ranks(train_on_a_rank, name, strategy, numbers):
        assert_trained(name, state, alone)


@NCCL
@pytest.mark.parametrize("name", PLANS)
def test_a_model_of_torchs_tests_trains_under_tensor_parallelism(name: str, device: str, two_ranks: TwoRanks) -> None:
    numbers = Numbers(device=device)
    alone = train_alone(name, 1, numbers)
    for state in two_ranks(train_a_part, name, numbers):
        assert_trained(name, state, alone)
