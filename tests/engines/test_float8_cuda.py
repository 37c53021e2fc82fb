"""Products of 8 bits on a GPU: the numbers of the emulation, compiled and not, and training under the engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import token_losses
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.blocks import FLOAT8_EXPERTS
from paceline.engines.float8 import float8_grouped_product, float8_linear, scales_of
from paceline.models.gpt import GPT, gpt_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs tensor cores with fp8"
    ),
]
BOTH = pytest.mark.parametrize("by_row", [False, True], ids=["tensor", "row"])


def results(by_row: bool, device: str, *, is_compiled: bool, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, g = (torch.randn(n, k, generator=generator) for n, k in ((256, 512), (768, 512), (256, 768)))
    x, weight = (tensor.to(device, dtype).requires_grad_() for tensor in (x, weight))

    def work(x: Tensor, weight: Tensor) -> Tensor:
        return float8_linear(x, weight, None, by_row=by_row)

    y = (torch.compile(work) if is_compiled else work)(x, weight)
    return [each.float().cpu() for each in (y, *torch.autograd.grad(y, (x, weight), g.to(device, dtype)))]


@BOTH
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensor_cores_give_the_numbers_of_the_emulation(by_row: bool, is_compiled: bool, dtype: torch.dtype) -> None:
    """Up to the rounding of results to bf16, and of sums that tensor cores add with fewer bits."""
    expected = results(by_row, "cpu", is_compiled=False, dtype=dtype)
    for found, value in zip(results(by_row, "cuda", is_compiled=is_compiled, dtype=dtype), expected, strict=True):
        assert float((found - value).norm() / value.norm()) < 0.01


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="torch has the kernel for Hopper"
)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("counts", [[128, 128, 128], [300, 0, 84], [1, 7, 376], [0, 0, 3]])
def test_the_kernel_of_experts_gives_the_numbers_of_the_emulation(counts: list[int], is_compiled: bool) -> None:
    def of(device: str, *, is_compiled: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes: tuple[tuple[int, ...], ...] = ((sum(counts) + 6, 256), (3, 512, 256), (sum(counts), 512))
        rows, weights, g = (torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
        held = torch.tensor(counts, device=device)
        compiled = torch.compile(float8_grouped_product, options=FLOAT8_EXPERTS)
        run = compiled if is_compiled else float8_grouped_product
        y = run(rows.requires_grad_(), weights.requires_grad_(), held)[: sum(counts)]
        of_rows, of_weights = torch.autograd.grad(y, (rows, weights), g)
        return [each.float().cpu() for each in (y, of_rows[: sum(counts)], of_weights)]

    for found, value in zip(of("cuda", is_compiled=is_compiled), of("cpu", is_compiled=False), strict=True):
        assert float((found - value).norm() / value.norm()) < 0.01


def test_compiled_scales_are_the_same_bits() -> None:
    largest = torch.tensor([0.0, 1e-45, 1e-30, 1.0, 1.75, 1.7500001, 448.0, 3e38, torch.inf, torch.nan], device="cuda")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        found = torch.compile(scales_of)(largest, dtype)
        for one, other in zip(found, scales_of(largest.cpu(), dtype), strict=True):
            assert torch.equal(one.cpu().view(torch.int32)[:8], other.view(torch.int32)[:8])
            assert torch.equal(one.cpu().isnan(), other.isnan())


@BOTH
def test_zeros_give_zeros(by_row: bool) -> None:
    zeros = torch.zeros(32, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = float8_linear(zeros, zeros, None, by_row=by_row)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert zeros.grad is not None
    assert not y.any()
    assert not zeros.grad.any()


def losses(comm: Communicator, strategy: Any, steps: int = 6, experts: int = 0, **options: Any) -> list[float]:
    torch.manual_seed(0)
    sizes: Any = {"experts": experts, "active": 2, "expert_width": 64} if experts else {}
    model = GPT(gpt_config(layers=2, heads=4, width=64, context=32, vocab_size=64, tied=False, **sizes))
    engine = parallelize(model, comm, strategy, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    first = [torch.randint(0, 64, (8, 1), generator=torch.Generator().manual_seed(step)) for step in range(steps)]
    tokens = [(each + 3 * torch.arange(33)) % 64 for each in first]
    return token_losses(engine, optimizer, comm, [(each[:, :-1], each[:, 1:]) for each in tokens])


@pytest.mark.parametrize("precision", ["fp8", "fp8_row"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_virtual_ranks_train_as_one_process_and_compiled_and_checkpointed_runs_too(
    strategy: str, precision: str
) -> None:
    expected = run_virtual(lambda comm: losses(comm, "ddp", precision=precision), 1, device="cuda")[0]
    plain = run_virtual(lambda comm: losses(comm, "ddp", precision="bf16_master"), 1, device="cuda")[0]
    assert expected == pytest.approx(plain, rel=0.02)
    for ranks, options in ((2, {}), (1, {"compile": True}), (1, {"checkpoint_activations": "full", "compile": True})):
        work: Any = lambda comm, options=options: losses(comm, strategy, precision=precision, **options)  # noqa: E731
        for found in run_virtual(work, ranks, device="cuda"):
            assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"checkpoint_activations": "matmuls"}], ids=str)
def test_experts_over_virtual_ranks_train_as_in_one_process(options: dict[str, Any]) -> None:
    def work(ranks: int, **options: Any) -> list[list[float]]:
        return run_virtual(lambda comm: losses(comm, "zero2", experts=4, **options), ranks, device="cuda")

    (expected,), (plain,) = work(1, precision="fp8"), work(1, precision="bf16_master")
    assert expected == pytest.approx(plain, rel=0.02)
    for found in work(2, precision="fp8", expert=2, **options):
        assert found == pytest.approx(expected, rel=0.01)
