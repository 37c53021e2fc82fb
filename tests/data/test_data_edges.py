"""Data at its limits: parts of images, tokenizers of several sources, files that look wider, one sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.data.datasets import check_enough
from paceline.data.mixture import common_tokenizer
from paceline.data.rows import _middle_box, _random_box
from paceline.data.token_files import _FEWEST, _LOOKED_AT, _looks_wider
from paceline.data.tokenizers import ByteTokenizer, CharTokenizer
from paceline.errors import DataError


@pytest.mark.parametrize(("width", "height"), [(64, 64), (120, 40), (30, 200)])
def test_a_part_of_an_image_has_the_area_and_the_ratio_of_the_recipe(width: int, height: int) -> None:
    generator = np.random.default_rng(0)
    boxes = [_random_box(generator, width, height) for _ in range(300)]
    middle = _middle_box(width, height)
    drawn = [box for box in boxes if box != middle]
    assert len(drawn) > 100
    areas, ratios = set(), set()
    for left, top, right, bottom in drawn:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        across, down = right - left, bottom - top
        assert 0.08 - 1e-9 <= across * down / (width * height) <= 1 + 1e-9
        assert 3 / 4 - 1e-9 <= across / down <= 4 / 3 + 1e-9
        areas.add(round(across * down / (width * height), 1))
        ratios.add(across > down)
    assert ratios == {True, False}
    assert len(areas) > 1


def test_the_middle_of_an_image_is_its_largest_square() -> None:
    assert _middle_box(120, 40) == (40.0, 0.0, 80.0, 40.0)
    assert _middle_box(30, 200) == (0.0, 85.0, 30.0, 115.0)


def test_bytes_with_and_without_an_end_are_one_tokenizer_and_the_larger_counts() -> None:
    plain, ended = ByteTokenizer(), ByteTokenizer(has_end=True)
    assert common_tokenizer({"a": plain, "b": ended, "c": None}) is ended
    assert common_tokenizer({"a": ended, "b": plain}) is ended
    same = CharTokenizer("abc")
    assert common_tokenizer({"a": CharTokenizer("abc"), "b": same}) is not None
    assert common_tokenizer({"a": None}) is None


@pytest.mark.parametrize(("pairs", "is_wider"), [(_FEWEST, True), (_FEWEST - 1, False)])
def test_a_few_numbers_do_not_show_that_tokens_are_wider(pairs: int, is_wider: bool, tmp_path: Path) -> None:
    """Three looks at a short file read it three times."""
    count = -(-pairs // 3) if is_wider else (pairs // 3)
    path = tmp_path / "tokens.bin"
    np.full(count, 7, dtype="<u4").tofile(path)
    with path.open("rb") as file:
        assert _looks_wider(file, path.stat().st_size) == is_wider
    assert count * 4 < _LOOKED_AT


def test_one_sample_is_enough_for_one_rank_and_not_for_two() -> None:
    check_enough(1, 1)
    with pytest.raises(DataError, match="is more than the 1 samples"):
        check_enough(1, 2)
    with pytest.raises(DataError, match="the training set is empty"):
        check_enough(0, 1)
