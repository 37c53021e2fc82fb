"""Prices of operations: products by their arithmetic, the rest by their bytes, views nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from paceline.cluster.devices import Catalog
from paceline.cluster.kernels import Operation
from paceline.predict.formulas.constants import constants_for, fitted_constants
from paceline.predict.replay.kernel_costs import KernelCosts
from paceline.predict.replay.program import Run
from paceline.rehearse.simulate.prices import KernelPrices, PricedCompute, Rates

HOST = Rates(flops=1e3, half_flops=2e3, bandwidth=1e2, launch_s=0.5)


def price(work: Callable[[], Any], rates: Rates | KernelPrices = HOST) -> list[float]:
    spent: list[float] = []
    with PricedCompute(rates, spent.append):
        work()
    return spent


def test_a_product_takes_its_arithmetic_or_its_bytes() -> None:
    a, b = torch.ones(20, 30), torch.ones(30, 40)
    flops, num_bytes = 2 * 20 * 30 * 40, 4 * (20 * 30 + 30 * 40 + 20 * 40)
    assert price(lambda: a @ b) == [0.5 + max(flops / 1e3, num_bytes / 1e2)]
    arithmetic = Rates(flops=1e3, half_flops=2e3, bandwidth=1e9, launch_s=0.5)
    assert price(lambda: a @ b, arithmetic) == [0.5 + flops / 1e3]
    assert price(lambda: a.bfloat16() @ b.bfloat16(), arithmetic)[-1] == 0.5 + flops / 2e3
    assert price(lambda: a.double() @ b.double(), arithmetic)[-1] == 0.5 + flops / 5e2


def test_other_operations_take_their_bytes_and_views_nothing() -> None:
    a = torch.ones(10)
    assert price(lambda: a + a) == [0.5 + 4 * 30 / 1e2]
    assert price(lambda: (a.view(2, 5).t(), a.detach(), torch.empty(100))) == []


def test_a_device_that_runs_behind_its_host_takes_a_launch_at_least() -> None:
    rates = Rates(flops=1e3, half_flops=1e3, bandwidth=1e2, launch_s=2.0, runs_ahead=True)
    assert price(lambda: torch.ones(10) + 1, rates)[-1] == 2.0
    big = torch.ones(100)
    assert price(lambda: big + big, rates) == [12.0]


def test_backward_and_updates_are_priced_too() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        (torch.ones(4, 8) @ weight).sum().backward()
        optimizer.step()

    free_memory = Rates(flops=1.0, half_flops=1.0, bandwidth=1e12, launch_s=0.0)
    spent = [round(seconds) for seconds in price(step, free_memory) if seconds > 1]
    assert spent == [2 * 4 * 8 * 8, 2 * 8 * 4 * 8]  # forward, and the gradient of the weight
    assert len(price(step)) > 4


def test_attention_is_counted_on_a_host() -> None:
    query = torch.ones(2, 3, 16, 8, requires_grad=True)
    rates = Rates(flops=1.0, half_flops=1.0, bandwidth=1e12, launch_s=0.0)
    forward = 4 * 2 * 3 * 16 * 16 * 8
    spent = price(lambda: F.scaled_dot_product_attention(query, query, query).sum().backward(), rates)
    assert [seconds for seconds in spent if seconds > 1e3] == pytest.approx([forward, 2.5 * forward])


def test_a_device_of_the_catalog_prices_kernels_as_a_replay_does() -> None:
    device = Catalog().device("a100-sxm-80gb")
    constants, _ = constants_for(fitted_constants(), device.generation, "eager")
    costs = KernelCosts(device, constants, is_compiled=False)
    a, b = torch.ones(256, 512), torch.ones(512, 1024)
    product = Operation(name="mm", family="matmul", sizes=(256, 512, 1024), layout="nn")
    (spent,) = price(lambda: a @ b, KernelPrices(device))
    assert spent == max(costs(Run(product)))


def test_attention_is_one_kernel_on_a_host_of_the_catalog() -> None:
    device = Catalog().device("cpu-host")
    constants, _ = constants_for(fitted_constants(), device.generation, "eager")
    costs = KernelCosts(device, constants, is_compiled=False)
    query = torch.ones(2, 3, 64, 8, requires_grad=True)

    def attend() -> None:
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    forward = Operation(name="attention", family="attention", sizes=(2, 3, 64, 8))
    backward = Operation(name="attention_backward", family="attention_backward", sizes=(2, 3, 64, 8))
    spent = price(attend, KernelPrices(device))
    assert spent[0] == pytest.approx(sum(costs(Run(forward))))
    assert sum(costs(Run(backward))) == pytest.approx(max(spent[1:]))
