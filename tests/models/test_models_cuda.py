"""The models on a GPU: the values of the CPU in float64, and blocks that compile to real kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.models.gpt import GPT, gpt_config
from paceline.models.mlp import MLPClassifier
from paceline.models.registry import model_blocks
from paceline.models.resnet import ResNet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs = model(inputs)
    (outputs * torch.linspace(-1, 1, outputs.numel(), device=outputs.device).view_as(outputs)).sum().backward()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_on_cuda(model: nn.Module, inputs: torch.Tensor) -> None:
    expected = gradients(model, inputs)
    model.zero_grad(set_to_none=True)
    found = gradients(model.cuda(), inputs.cuda())
    assert list(found) == list(expected) == [name for name, _ in model.named_parameters()]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_gpt_gradients_in_float64(positions: Any, kv_heads: int) -> None:
    torch.manual_seed(0)
    model = GPT(gpt_config("gpt-nano", positions=positions, kv_heads=kv_heads)).double()
    assert_same_on_cuda(model, torch.randint(256, (2, 33)))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet_gradients_in_float64(norm: Any) -> None:
    torch.manual_seed(0)
    model = ResNet(50, num_classes=5, width=8, norm=norm, stem="small").double()
    assert_same_on_cuda(model, torch.randn(4, 3, 16, 16, dtype=torch.float64))


def test_mlp_gradients_in_float64() -> None:
    torch.manual_seed(0)
    assert_same_on_cuda(MLPClassifier(64, dropout=0.0).double(), torch.randn(8, 64, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_blocks_give_the_plain_result(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GPT(gpt_config("gpt-nano")).to("cuda", dtype)
    tokens = torch.randint(256, (2, 33), device="cuda")
    expected = model(tokens)
    for block in model_blocks(model):
        block.compile(fullgraph=True)
    torch.testing.assert_close(model(tokens), expected, rtol=2e-2, atol=2e-2)


def test_meta_construction_then_reset_on_cuda_fills_everything() -> None:
    with torch.device("meta"):
        model = GPT(gpt_config("gpt-nano", tied=False))
    model.to_empty(device="cuda")
    for module in model.modules():
        own: Any = getattr(module, "reset_parameters", None)
        if own is not None:
            own()
    direct = GPT(gpt_config("gpt-nano", tied=False))
    for (name, found), wanted in zip(model.named_buffers(), direct.buffers(), strict=True):
        assert torch.equal(found.cpu(), wanted), name
    assert model(torch.randint(256, (2, 8), device="cuda")).isfinite().all()
