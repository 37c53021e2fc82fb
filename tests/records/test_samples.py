"""Samples of an evaluation: what is kept of texts and images, and what is refused."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.errors import UsageError
from paceline.records.event_words import event_text
from paceline.records.records import EventRecord, parse_line, to_line
from paceline.records.samples import samples_of


def pixels_of(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


@pytest.mark.parametrize("shape", [(4, 6), (1, 4, 6), (3, 4, 6), (4, 6, 3)])
def test_an_image_is_kept_as_it_is(shape: tuple[int, ...]) -> None:
    image = torch.arange(float(np.prod(shape))).reshape(shape) / float(np.prod(shape))
    ((text, encoded),) = samples_of(["seven"], image[None])["items"]
    wanted = (image.numpy() * 255).astype(np.uint8)
    wanted = wanted[0] if shape[0] == 1 else np.moveaxis(wanted, 0, 2) if shape[0] == 3 else wanted
    assert text == "seven"
    assert (pixels_of(encoded) == wanted).all()


def test_many_and_large_samples_fit_into_a_record() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 300, 200, 3), dtype=np.uint8)
    detail = samples_of(["x" * 10_000] * 20, noise)
    record = EventRecord(name="samples", step=3, detail=detail, time=1.0)
    line = to_line(record)
    assert len(line) < 2**20
    assert parse_line(line) == record
    assert event_text(record) == "12 samples"
    assert pixels_of(detail["items"][0][1]).shape == (128, 85, 3)
    assert samples_of(["alone"])["items"] == [["alone", ""]]
    with pytest.raises(UsageError, match=r"shape \[2, 3, 4, 5\](.|\n)*\[3, h, w\](.|\n)*one image a sample"):
        samples_of(images=torch.zeros(1, 2, 3, 4, 5))
