from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.errors import UsageError
from paceline.models.registry import model_blocks, num_parameters
from paceline.models.resnet import BottleneckBlock, Conv, GroupNorm, ResNet


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (50, 25_557_032)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_parameters_are_those_of_the_paper(depth: int, count: int, norm: Any) -> None:
    with torch.device("meta"):
        assert num_parameters(ResNet(depth, norm=norm)) == count


@pytest.mark.some(2)
@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_images_become_logits(depth: int, norm: Any, stem: Any) -> None:
    model = ResNet(depth, num_classes=7, in_channels=1, width=8, norm=norm, stem=stem)
    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 7)


@pytest.mark.parametrize(("stem", "sides"), [("imagenet", [16, 8, 4, 2]), ("small", [64, 32, 16, 8])])
def test_stem_and_stages_halve_the_image(stem: Any, sides: list[int]) -> None:
    with torch.device("meta"):
        model = ResNet(18, width=8, stem=stem)
        x = model.stem(torch.empty(1, 3, 64, 64))
        found = []
        for block in model.blocks():
            x = block(x)
            found.append(x.shape[-1])
    assert found == [side for side in sides for _ in range(2)]


def test_the_3x3_convolution_of_a_bottleneck_has_the_stride() -> None:
    convs = [module for module in BottleneckBlock(8, 4, 2, "batch").residual if isinstance(module, Conv)]
    assert [conv.kernel_size for conv in convs] == [(1, 1), (3, 3), (1, 1)]
    assert [conv.stride for conv in convs] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_block_with_a_plain_shortcut_starts_as_the_identity(depth: int, norm: Any) -> None:
    model = ResNet(depth, width=4, norm=norm)
    plain = [block for block in model.blocks() if isinstance(block.get_submodule("shortcut"), nn.Identity)]
    assert len(plain) == (5 if depth == 18 else 12)
    for block in plain:
        channels = block.out_channels
        assert isinstance(channels, int)
        x = torch.rand(2, channels, 4, 4)
        assert torch.equal(block(x), x)


@settings(deadline=None)  # the first call pays for torch
@given(st.integers(min_value=1, max_value=600))
def test_groups_divide_the_channels_and_hold_several(channels: int) -> None:
    num_groups = GroupNorm(channels, 1.0).num_groups
    assert channels % num_groups == 0
    assert channels // num_groups >= min(4, channels)
    assert num_groups == 32 or channels % 128


@pytest.mark.parametrize("depth", [18, 50])
def test_group_norm_lets_an_image_of_one_pixel_through(depth: int) -> None:
    torch.manual_seed(0)
    model = ResNet(depth, num_classes=3, in_channels=1, width=4, norm="group")
    one, other = model(torch.randn(1, 1, 8, 8)), model(torch.randn(1, 1, 8, 8))
    assert not torch.allclose(one, other)


def test_group_norm_makes_samples_independent_and_batch_norm_does_not() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    for norm, independent in (("group", True), ("batch", False)):
        model = ResNet(18, num_classes=5, width=4, norm=norm, stem="small").double()  # type: ignore[arg-type]
        whole, half = model(images)[:2], model(images[:2])
        assert torch.allclose(whole, half) is independent


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_every_parameter_has_a_gradient_in_float64(norm: Any) -> None:
    torch.manual_seed(0)
    model = ResNet(18, num_classes=3, width=4, norm=norm, stem="small").double()
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float64
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(("depth", "count"), [(18, 8), (50, 16)])
def test_blocks_hold_all_but_stem_and_head(depth: int, count: int) -> None:
    with torch.device("meta"):
        model = ResNet(depth)
    blocks = model_blocks(model)
    assert len(blocks) == count
    rest = num_parameters(model.stem) + num_parameters(model.head)
    assert sum(map(num_parameters, blocks)) + rest == num_parameters(model)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"depth": 34}, "depth = 34; it takes 18 or 50"),
        ({"norm": "layer"}, "norm = 'layer'; it takes 'batch' or 'group'"),
        ({"stem": "tiny"}, "stem = 'tiny'"),
        ({"width": 0}, "width = 0; it must be at least 1"),
    ],
)
def test_arguments_it_cannot_take_are_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ResNet(**arguments)
