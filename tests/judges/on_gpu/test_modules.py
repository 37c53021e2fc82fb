"""torch's own catalogue of modules on a GPU: float64, bf16, and bf16 with masters, on virtual and on NCCL ranks.

As in ``torch_modules``, against one process on the same GPU. Of a module's inputs a case takes some, and another
strategy or precision others.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from module_cases import (
    STRATEGIES,
    cases_of,
    catalogued_names,
    evaluated_alone,
    evaluated_on_a_rank,
    trained_alone,
    trained_on_a_rank,
)
from oracle import Numbers

pytestmark = [pytest.mark.judge, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
T = TypeVar("T")
TwoRanks = Callable[..., list[Any]]
PRECISIONS = ("float64", "bf16", "bf16_master")
INPUTS = 4  # of which a case takes as many, spread over all
VIRTUAL = pytest.mark.parametrize("two_ranks", ["virtual"], indirect=True)
NCCL = pytest.mark.parametrize("two_ranks", ["nccl"], indirect=True)
# Those that are left have no parameters in any of their cases; torch_modules, on the CPU, looks at all.
WITH_PARAMETERS = sorted(
    name
    for name in catalogued_names()
    if any(part in name for part in ("Conv", "Linear", "Norm", "RNN", "LSTM", "GRU", "Transformer", "Attention"))
    or name in ("nn.Bilinear", "nn.Embedding", "nn.EmbeddingBag", "nn.PReLU")
)


def some_of(name: str, numbers: Numbers, salt: str, *, training: bool) -> list[int]:
    """The numbers of a few cases of a module."""
    count = len(cases_of(name, numbers, training=training))
    if not count:
        pytest.skip("the module has no parameters")
    step = max(1, count // INPUTS)
    return list(range(zlib.crc32(salt.encode()) % step, count, step))[:INPUTS]


def in_one_process(work: Callable[[], T]) -> T:
    """Returns what the oracle returns; where torch itself cannot, the case is none."""
    try:
        return work()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        pytest.skip(f"one process cannot either: {str(error).partition(chr(10))[0]}")


def check_training(name: str, strategy: str, numbers: Numbers, two_ranks: TwoRanks) -> None:
    chosen = some_of(name, numbers, strategy + numbers.precision, training=True)
    cases = cases_of(name, numbers, training=True)
    wanted = in_one_process(lambda: [trained_alone(name, cases[each], 2, numbers) for each in chosen])
    for states in two_ranks(trained_on_a_rank, name, chosen, strategy, numbers):
        for state, alone in zip(states, wanted, strict=True):
            numbers.assert_trained(state, alone, rtol=1e-10, atol=1e-12)


@VIRTUAL
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_a_module_trains_as_in_one_process(
    name: str, strategy: str, precision: str, device: str, two_ranks: TwoRanks
) -> None:
    check_training(name, strategy, Numbers(device=device, precision=precision), two_ranks)


@NCCL
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "bf16"), ("zero1", "bf16_master"), ("zero2", "float64"), ("fsdp", "bf16_master")],
)
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_a_module_trains_on_nccl_ranks_as_in_one_process(
    name: str, strategy: str, precision: str, device: str, two_ranks: TwoRanks
) -> None:
    check_training(name, strategy, Numbers(device=device, precision=precision), two_ranks)


@VIRTUAL
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_a_module_evaluates_as_in_one_process(
    name: str, strategy: str, precision: str, device: str, two_ranks: TwoRanks
) -> None:
    numbers = Numbers(device=device, precision=precision)
    chosen = some_of(name, numbers, strategy + precision, training=False)
    cases = cases_of(name, numbers, training=False)
    alone = functools.partial(evaluated_alone, name, numbers=numbers)
    wanted = in_one_process(lambda: [[alone(cases[each], rank) for each in chosen] for rank in range(2)])
    for rank, found in enumerate(two_ranks(evaluated_on_a_rank, name, chosen, strategy, numbers)):
        for ours, theirs in zip(found, wanted[rank], strict=True):
            numbers.assert_outputs(ours, theirs)
