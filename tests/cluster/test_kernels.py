"""What kernels take: never less than the device allows."""

from __future__ import annotations

from paceline.cluster.devices import Catalog
from paceline.cluster.kernels import (
    KernelRates,
    attention_seconds,
    ceiling,
    matmul_rate,
    matmul_seconds,
    memory_seconds,
)

A100, H100 = Catalog().device("A100-80GB-SXM"), Catalog().device("H100-80GB-SXM")
RATES = KernelRates()


def test_a_large_product_is_bound_by_the_ceiling() -> None:
    size = 8192
    seconds = matmul_seconds(A100, RATES, size, size, size, "bf16")
    rate = 2 * size**3 / seconds
    assert 0.75 * 271e12 < rate < 271e12


def test_a_thin_product_is_bound_by_memory() -> None:
    seconds = matmul_seconds(A100, RATES, 8192, 8192, 1, "bf16")
    assert seconds >= 2 * 8192 * 8192 / 2039e9


def test_few_tiles_leave_multiprocessors_idle() -> None:
    small = matmul_seconds(A100, RATES, 128, 128, 8192, "bf16")
    large = matmul_seconds(A100, RATES, 128 * 108, 128, 8192, "bf16")
    assert large < 3 * small


def test_fewer_bits_are_faster_where_there_are_units_for_them() -> None:
    assert ceiling(H100, "fp4") > ceiling(H100, "fp8") > ceiling(H100, "bf16") > ceiling(H100, "tf32")
    assert ceiling(A100, "fp8") == ceiling(A100, "bf16")


def test_short_sequences_use_attention_less() -> None:
    assert attention_seconds(A100, RATES, 1e12, 128, "bf16") > attention_seconds(A100, RATES, 1e12, 8192, "bf16")
    assert memory_seconds(A100, RATES, 2039e9) > 1.0


def test_nothing_takes_nothing() -> None:
    assert matmul_seconds(A100, RATES, 0, 8, 8, "bf16") == 0.0


def test_a_product_without_a_layout_has_a_rate_on_a_measured_processor() -> None:
    """Convolutions are such: products of several layouts were timed, and some took less than those of the first."""
    host = Catalog().device("cpu-host")
    assert {each.layout for each in host.shapes if each.kind == "matmul"} > {"", "nt"}
    rates = [matmul_rate(host, (size, size, size), "fp32") for size in (1, 100, 3000)]
    assert all(rate is not None and 0 < rate <= 1.5 * host.ceiling("fp32") for rate in rates)
