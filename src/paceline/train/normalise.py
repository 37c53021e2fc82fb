"""Images of bytes, normalised where they are trained on.

A byte is a quarter of what a float is to read, to pin and to copy. On the device, one pass over the images makes
(x - mean) / std of them, in the dtype of the run; a policy's cast follows as for any other input. It is
part of the loss, so that training, evaluation, verification and the dry run give the model the same inputs. A model
that is compiled whole does it itself (``normalise_inside``): the pass is then part of the first kernel that reads the
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from paceline.errors import DataError

_IMAGE_DIMS = 4  # samples, channels, height, width


class Normalise:
    """Makes (x - mean) / std of a batch's images of bytes: uint8 tensors of samples, channels, height and width."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # As x * scale + shift, which one operator computes in a pass that reads bytes.
        self._scale = [1.0 / each for each in std]
        self._shift = [-middle / each for middle, each in zip(mean, std, strict=True)]
        self._known: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Any, dtype: torch.dtype) -> Any:
        """Returns the batch with its images in ``dtype``, in the memory format that they had."""

        def change(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != _IMAGE_DIMS:
                return value
            self.check(value)
            scale, shift = self.factors(value.device, dtype)
            return torch.addcmul(shift, value, scale)

        return tree_map(change, batch)

    def check(self, images: torch.Tensor) -> None:
        """Raises DataError for images of other channels than there are numbers."""
        if len(self._scale) not in (1, images.shape[1]):
            raise DataError(
                f"images of {images.shape[1]} channels, and {len(self._scale)} numbers in shape.mean of the data\n"
                "  there is one for each channel, or one for all\n"
                "  images are (channels, height, width): check their order, and shape.mean and shape.std"
            )

    def factors(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scale and shift by channel on a device; made there once, as a copy would wait for it."""
        key = device, dtype
        if key not in self._known:
            made = [torch.tensor(each, dtype=dtype, device=device) for each in (self._scale, self._shift)]
            self._known[key] = made[0].view(1, -1, 1, 1), made[1].view(1, -1, 1, 1)
        return self._known[key]


def normalise_inside(
    model: nn.Module, normalise: Normalise, device: torch.device, dtype: torch.dtype, param_dtype: torch.dtype | None
) -> None:
    """Has a model normalise images of bytes in its ``forward``, which is to be compiled with it.

    ``param_dtype`` is what engines cast other inputs to, None where they do not.
    """
    forward = model.forward
    scale, shift = normalise.factors(device, dtype)

    def normalised_forward(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8 and inputs.ndim == _IMAGE_DIMS:
            normalise.check(inputs)
            inputs = torch.addcmul(shift, inputs, scale).to(param_dtype or dtype)
        return forward(inputs, *args, **kwargs)

    model.forward = normalised_forward
