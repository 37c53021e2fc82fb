"""The largest model within a budget, on a CPU: exact counts of what a real training step holds."""

from __future__ import annotations

import pytest
import torch

from measures.memory import OPTIONS, Budget, Family, bench_memory, make_budget, select_options
from paceline.errors import UsageError
from paceline.models.gpt import GPT
from paceline.units import GIB

CPU = torch.device("cpu")
NANO = Family(size="gpt-nano", context=8)
BUDGET = Budget(device_bytes=2_500_000, host_bytes=GIB)

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # on CPUs without bf16


def num_parameters(layers: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(NANO.config(layers)).parameters())


@pytest.mark.some(1)
# Parameters, gradients and two moments; with masters the parameters besides, in bf16, which sharding frees.
@pytest.mark.parametrize(
    ("name", "bytes_each"), [("ddp fp32", 16), ("ddp bf16", 16), ("ddp bf16_master", 18), ("fsdp bf16_master", 16)]
)
def test_the_largest_model_is_what_the_bytes_of_its_state_allow(name: str, bytes_each: int) -> None:
    (option,) = [option for option in OPTIONS if option.name == name]
    row = bench_memory(option, NANO, BUDGET, CPU)
    layers = row["layers"]
    assert (row["limit"], row["too_many_layers"]) == ("device", layers + 1)
    assert row["parameters"] == num_parameters(layers)
    # Besides: tables of positions, padding to cache lines, numbers of the optimizer.
    assert 0 <= row["device_bytes"] - bytes_each * num_parameters(layers) < 20_000
    assert row["device_bytes"] <= BUDGET.device_bytes < bytes_each * num_parameters(layers + 1) + 20_000
    assert len(row["tried_layers"]) <= 5


@pytest.mark.some(1)
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_row_trains(option: object) -> None:
    row = bench_memory(option, NANO, Budget(device_bytes=GIB, host_bytes=GIB, max_layers=2), CPU)  # type: ignore[arg-type]
    assert (row["layers"], row["limit"], row["tried_layers"]) == (2, "search", [1, 2])
    assert row["tokens_per_s"] > 0


def test_a_budget_too_small_for_one_layer_gives_a_row_all_the_same() -> None:
    row = bench_memory(OPTIONS[0], NANO, Budget(device_bytes=1000, host_bytes=GIB), CPU)
    assert (row["layers"], row["parameters"], row["device_bytes"], row["limit"]) == (0, 0, None, "device")


def test_nothing_of_a_trial_stays_in_memory() -> None:
    small = Budget(device_bytes=600_000, host_bytes=GIB)
    first, second = (bench_memory(OPTIONS[0], NANO, small, CPU) for _ in range(2))
    assert first["device_bytes"] == second["device_bytes"]


def test_rows_are_chosen_by_words() -> None:
    assert [option.name for option in select_options(["ddp"])] == ["ddp fp32", "ddp bf16", "ddp bf16_master"]
    assert select_options([]) == list(OPTIONS)
    with pytest.raises(UsageError, match="--options zero9: no row is called so"):
        select_options(["zero9"])


def test_a_budget_that_cannot_be_is_refused() -> None:
    assert make_budget(CPU, 0.5, 2.0) == Budget(device_bytes=GIB // 2, host_bytes=2 * GIB)
    with pytest.raises(UsageError, match="--budget-gb is needed on a CPU"):
        make_budget(CPU, None, 1.0)
    with pytest.raises(UsageError, match="--budget-gb -1"):
        make_budget(CPU, -1.0, 1.0)
    with pytest.raises(UsageError, match="--host-gb 0"):
        make_budget(CPU, 1.0, 0.0)
