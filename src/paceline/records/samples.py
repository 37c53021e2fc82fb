"""Samples of an evaluation for people to look at: texts and small images in one event of the records.

run.log_samples(["a prompt: what the model wrote"])           # a loop of one's own; a hook: trainer.log_samples(...)
run.log_samples(["7, taken for a 1"], images=x[:1])            # an image each, as a tensor or an array
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from paceline.errors import UsageError

MOST_SAMPLES, _MOST_CHARACTERS, _MOST_PIXELS = 12, 2000, 128  # of an event, a text and a side: a record has 1 MiB


def samples_of(texts: Sequence[str] = (), images: Any = ()) -> dict[str, Any]:
    """Returns the detail of an event ``samples``: the first texts and images, one beside the other.

    Images are [h, w], [1, h, w], [3, h, w] or [h, w, 3], floats from 0 to 1 or bytes. Raises UsageError for others.
    """
    pairs = list(zip_longest([str(text) for text in texts], images, fillvalue=None))[:MOST_SAMPLES]
    items = [["" if text is None else text[:_MOST_CHARACTERS], _encode(image)] for text, image in pairs]
    return {"note": "1 sample" if len(items) == 1 else f"{len(items)} samples", "items": items}


def _encode(image: Any) -> str:
    if image is None:
        return ""
    from PIL import Image  # comes with matplotlib

    if hasattr(image, "detach"):  # a tensor, of which numpy has not all types
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
    values = np.asarray(image)
    if values.ndim == 3 and values.shape[0] in (1, 3):
        values = np.moveaxis(values, 0, 2)
    values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3) or not values.size:
        shape = "an image has the shape [h, w], [1, h, w], [3, h, w] or [h, w, 3]"
        raise UsageError(f"a sample has an image of shape {list(values.shape)}\n  {shape}\n  give one image a sample")
    scale = 255.0 if values.dtype.kind in "fb" else 1.0
    shown = Image.fromarray(np.clip(np.nan_to_num(values.astype(np.float64)) * scale, 0, 255).astype(np.uint8))
    shown.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    shown.save(png := io.BytesIO(), "PNG")
    return base64.b64encode(png.getvalue()).decode()
