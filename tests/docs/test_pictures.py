"""The pictures of the course are those that the code gives, and what they show is true of their data."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.schedule.ring import ring_schedule

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import draw_pictures  # noqa: E402
import pictures_messages  # noqa: E402
import pictures_plans  # noqa: E402
import pictures_ring  # noqa: E402

SLOW = {"overlap.svg", "fsdp-timeline.svg", "landscape.svg", "tensor-mlp.svg", "tensor-attention.svg"}  # seconds
SLOW |= {"memory-time.svg"}
NAMES = [pytest.param(name, marks=pytest.mark.exhaustive) if name in SLOW else name for name in draw_pictures.PICTURES]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_up_to_date(name: str) -> None:
    assert list(draw_pictures.problems([name])) == []


def test_a_picture_that_differs_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ring.svg").write_text("another")
    assert list(draw_pictures.problems(["ring.svg", "tree.svg"], tmp_path)) == [
        "ring.svg is out of date: run python scripts/draw_pictures.py ring.svg",
        "tree.svg is out of date: run python scripts/draw_pictures.py tree.svg",
    ]


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_a_picture_is_small_and_has_words_and_both_themes(name: str) -> None:
    text = (draw_pictures.FOLDER / name).read_text(encoding="utf-8")
    assert len(text.encode()) <= draw_pictures.MOST_BYTES
    tree = ElementTree.fromstring(text)
    assert tree.get("width") == "800"
    assert len(tree.findtext(f"{SVG}title") or "") > 10
    assert len(tree.findtext(f"{SVG}desc") or "") > 40
    assert "prefers-color-scheme:dark" in text
    assert re.findall(r"(?:href|src)=|<script|https?://(?!www\.w3\.org/2000/svg)", text) == []
    known = set(re.findall(r"\.([a-z][a-z0-9]*)\b(?=[^{}]*\{)", text))
    used = {kind for each in tree.iter() for kind in (each.get("class") or "").split()}
    assert used - known <= {"s4"}  # the strongest of five: the colour as it is


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_nothing_is_drawn_outside_of_the_sheet(name: str) -> None:
    tree = ElementTree.parse(draw_pictures.FOLDER / name).getroot()
    height = float(tree.get("height") or 0)
    boxes = [[float(box.get(key) or 0) for key in ("x", "y", "width", "height")] for box in tree.iter(f"{SVG}rect")]
    assert all(x >= 0 and y >= 0 and x + w <= 800 and y + h <= height for x, y, w, h in boxes)
    for text in tree.iter(f"{SVG}text"):
        places = [float(each) for each in (text.get("y") or "").split()]
        assert all(0 < each < height for each in places), text.text


def test_a_ring_that_loses_a_message_is_not_drawn() -> None:
    programs = pictures_messages.ring_programs(4)
    assert len(pictures_messages.carry_out(programs, 4)) == 1 + 2 * 3
    programs[2] = [*programs[2][:1], programs[2][0], *programs[2][2:]]
    with pytest.raises(AssertionError, match=r"added twice|not complete"):
        pictures_messages.carry_out(programs, 4)


def test_cells_of_collectives_are_what_ranks_end_with() -> None:
    found = {each.name: pictures_messages.run_collective(each)[1] for each in pictures_messages.COLLECTIVES}
    whole = [frozenset((rank, element) for rank in range(4)) for element in range(4)]
    assert found["all-reduce"] == [whole] * 4
    assert found["reduce-scatter"][2] == [frozenset(), frozenset(), whole[2], frozenset()]
    assert found["all-to-all"][3] == [frozenset({(rank, 3)}) for rank in range(4)]


def test_zigzag_is_even_in_every_turn() -> None:
    whole, late = (pictures_ring.turns(order) for order in ("contiguous", "zigzag"))
    assert [sum(rank) for rank in whole] == [2, 6, 10, 14]
    assert late == [[2, 2, 2, 2]] * 4 == [[step.work for step in row] for row in ring_schedule(4)]
    by_ring = [[4 * step.work for step in row] for row in ring_schedule(4, "contiguous")]  # chunks are twice as long
    assert whole == by_ring


def test_documents_one_by_one_are_more_even_than_a_row_in_zigzag() -> None:
    row, documents = (
        pictures_ring.work_and_keys(pictures_ring.token_ranks(shares)) for shares in pictures_ring.row_shares().values()
    )
    pairs = sum(tokens * (tokens + 1) // 2 for tokens in pictures_ring.DOCUMENTS)
    assert [sum(own + others for own, others, _ in way) for way in (row, documents)] == [pairs, pairs]
    slowest = [max(own + others for own, others, _ in way) / (pairs / pictures_ring.RANKS) for way in (row, documents)]
    assert slowest == [pytest.approx(1.69, abs=0.01), pytest.approx(1.08, abs=0.01)]
    assert sum(keys for *_, keys in documents) < sum(keys for *_, keys in row) / 2


def test_memory_bars_follow_the_strategies() -> None:
    """What a strategy shards is a share of what DDP holds, and the activations are the same."""
    rows = {name: priced.memory for name, priced in pictures_plans.memory_rows("8x dgx-h100").items()}
    whole = rows["DDP"]
    assert rows["FSDP"].optimizer == pytest.approx(whole.optimizer / 64, rel=0.01)
    assert rows["hybrid"].gradients == pytest.approx(whole.gradients / 8, rel=0.01)
    assert rows["ZeRO 1"].gradients == whole.gradients
    assert rows["ZeRO 2"].gradients == pytest.approx(whole.gradients / 64, rel=0.01)
    assert {row.activations for row in rows.values()} == {whole.activations}
