"""Hugging Face's architectures on a GPU: in bf16 on virtual ranks and those of NCCL, some of them compiled.

As in ``hugging_face``, against one process on the same GPU, which compiles nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from oracle import Numbers
from small_models import ARCHITECTURES, assert_trained, on_a_rank, trained_alone

pytestmark = [
    pytest.mark.judge,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
TwoRanks = Callable[..., list[Any]]
NCCL = pytest.mark.parametrize("two_ranks", ["nccl"], indirect=True)
COMPILED = ("gpt2", "llama", "qwen3", "gemma2", "olmo2", "gpt_neox", "bert", "modernbert", "vit", "t5")


def check(name: str, strategy: str, numbers: Numbers, two_ranks: TwoRanks) -> None:
    try:
        loss, alone = trained_alone(name, numbers)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"one process cannot either: {str(error).partition(chr(10))[0]}")
    assert_trained(name, two_ranks(on_a_rank, name, strategy, numbers), loss, alone)


@pytest.mark.parametrize("two_ranks", ["virtual"], indirect=True)
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "bf16_master"), ("fsdp", "bf16"), ("zero2", "float64")])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_as_in_one_process(
    name: str, strategy: str, precision: str, device: str, two_ranks: TwoRanks
) -> None:
    check(name, strategy, Numbers(device=device, precision=precision), two_ranks)


@NCCL
@pytest.mark.parametrize(("strategy", "precision"), [("zero2", "bf16"), ("fsdp", "bf16_master")])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_on_nccl_ranks_as_in_one_process(
    name: str, strategy: str, precision: str, device: str, two_ranks: TwoRanks
) -> None:
    check(name, strategy, Numbers(device=device, precision=precision), two_ranks)


@NCCL
@pytest.mark.parametrize(("name", "strategy"), [(name, ("ddp", "fsdp")[i % 2]) for i, name in enumerate(COMPILED)])
def test_a_compiled_architecture_trains_as_one_process_does_that_compiles_nothing(
    name: str, strategy: str, device: str, two_ranks: TwoRanks
) -> None:
    check(name, strategy, Numbers(device=device, precision="bf16_master", is_compiled=True), two_ranks)
