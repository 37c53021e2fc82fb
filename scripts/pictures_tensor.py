"""Pictures of lesson 6: how four ranks share the matrices of an MLP and of attention.

A GPT of the shape of gpt-7b with one block is split on virtual ranks by the engine's own rules
(``engines/tensor/apply.py``), on the meta device, which holds no values. Colours are where its layout cuts each weight,
and sizes are in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from paceline import run_virtual
from paceline.comm.base import Communicator
from paceline.engines.tensor.apply import apply_tensor_parallel
from paceline.engines.tensor.layout import Split
from paceline.models.gpt import GPT, gpt_config
from pictures_svg import MARGIN, Picture

RANKS = 4
COLOURS = "abcd"
TIMES = "\N{MULTIPLICATION SIGN}"
_UNIT = 58 / 4096  # of a weight's rows and columns
_TALL = 58.0  # of activations: their tokens
_CONFIG = gpt_config("gpt-7b", layers=1, vocab_size=1024)


@cache
def block_splits() -> dict[str, Split]:
    """Returns how the engine cuts the weights of a block, by their names in it."""

    def work(comm: Communicator) -> dict[str, Split]:
        with torch.device("meta"):
            model = GPT(_CONFIG)
        layout = apply_tensor_parallel(model, comm)
        return {
            name.removeprefix("layers.0.").removesuffix(".weight"): split
            for name, split in layout.splits.items()
            if name.startswith("layers.0.") and name.endswith(".weight")
        }

    return run_virtual(work, ranks=RANKS)[0]


def _draw_weight(picture: Picture, x: float, y: float, name: str) -> tuple[float, float]:
    """Draws a weight as the matrix that activations are multiplied with, inputs down and outputs across.

    torch keeps it the other way round, (outputs, inputs). Returns the width and the height.
    """
    split = block_splits()[name]
    outputs, inputs = split.shape
    width, height = outputs * _UNIT, inputs * _UNIT
    assert split.dim is not None, f"{name} is not split"
    for rank in range(RANKS):
        for first, last in split.spans(rank, RANKS):
            if split.dim == 0:
                picture.box(x + first * _UNIT, y, (last - first) * _UNIT - 0.5, height, COLOURS[rank])
            else:
                picture.box(x, y + first * _UNIT, width, (last - first) * _UNIT - 0.5, COLOURS[rank])
    return width, height


def _shape_words(names: Sequence[str]) -> str:
    """Says how large a rank's part is."""
    split = block_splits()[names[0]]
    outputs, inputs = split.shape
    own_outputs, own_inputs = split.local_shape(0, RANKS)
    return f"{inputs} {TIMES} {outputs}, of which a rank holds {own_inputs} {TIMES} {own_outputs}"


def _draw_whole(picture: Picture, x: float, y: float, name: str, words: str) -> None:
    picture.box(x, y, 58, _TALL, "g")
    picture.text(x + 29, y + 35, name, "name on mid")
    picture.text(x + 29, y + _TALL + 16, words, "tiny soft mid")


def _draw_stripes(picture: Picture, x: float, y: float, width: float) -> None:
    """Draws activations whose columns are split."""
    for rank in range(RANKS):
        picture.box(x + rank * width / RANKS, y, width / RANKS - 0.5, _TALL, COLOURS[rank])


def _draw_end(picture: Picture, x: float, middle: float) -> None:
    """Draws the parts of the sum that ranks have, the all-reduce, and the result."""
    for rank in range(RANKS):
        top = middle - 2 * 46 + 46 * rank
        picture.box(x, top, 58, 38, COLOURS[rank])
        picture.text(x + 29, top + 24, f"Y{rank}", "small bold on mid")
        picture.line(x + 62, top + 19, x + 76, middle)
    picture.text(x + 29, middle + 112, "a part of the sum", "tiny soft mid")
    picture.text(x + 29, middle + 125, "on each rank", "tiny soft mid")
    picture.arrow(x + 76, middle, x + 136, middle)
    picture.text(x + 106, middle - 8, "all-reduce", "tiny bold ink mid")
    _draw_whole(picture, x + 140, middle - _TALL / 2, "Y", "on all ranks")


def _legend(picture: Picture, y: float, words: str) -> str:
    entries = [(COLOURS[rank], f"rank {rank}") for rank in range(RANKS)]
    y = picture.legend(MARGIN, y, [*entries, ("g", "whole, the same on all ranks")])
    return picture.svg(picture.paragraph(MARGIN, y + 2, words) + 4)


def draw_mlp() -> str:
    """Draws tensor-mlp.svg."""
    picture = Picture(
        "Tensor parallelism: four ranks share an MLP",
        "The first matrices are cut by columns, the second by rows. So what a rank computes in between fits its own "
        "rows of the second matrix, and no rank needs anything from another before the end: one all-reduce in forward, "
        "and one in backward.",
        "the split of engines/tensor/apply.py for gpt-7b on 4 virtual ranks",
    )
    y = picture.top + 20
    middle = y + 106
    _draw_whole(picture, MARGIN, middle - _TALL / 2, "X", f"b S {TIMES} d, whole")
    left = MARGIN + 78
    picture.text(left - 14, middle + 4, TIMES, "name ink mid")
    wide, tall = _draw_weight(picture, left, middle - 78, "mlp.gate")
    picture.text(left, middle - 84, "gate: by columns", "small ink")
    _draw_weight(picture, left, middle + 22, "mlp.up")
    picture.text(left, middle + 16, "up: by columns", "small ink")
    hidden = left + wide + 34
    picture.arrow(left + wide + 6, middle, hidden - 6, middle)
    _draw_stripes(picture, hidden, middle - _TALL / 2, wide)
    picture.text(hidden, middle - _TALL / 2 - 6, "silu(X gate) · (X up)", "small ink")
    down = hidden + wide + 26
    picture.text(down - 13, middle + 4, TIMES, "name ink mid")
    width, tall = _draw_weight(picture, down, middle - 11008 * _UNIT / 2, "mlp.down")
    picture.text(down + width / 2 - 4, middle - tall / 2 - 6, "down: by rows", "small ink mid")
    end = down + width + 32
    picture.arrow(down + width + 6, middle, end - 6, middle)
    _draw_end(picture, end, middle)
    words = f"gate and up: {_shape_words(['mlp.gate'])}. down: {_shape_words(['mlp.down'])}."
    return _legend(picture, middle + 150, words)


def draw_attention() -> str:
    """Draws tensor-attention.svg."""
    heads = _CONFIG.heads
    picture = Picture(
        "Tensor parallelism: four ranks share the heads of attention",
        "Queries, keys and values are cut by columns between heads, so that a rank has whole heads and computes their "
        "attention alone. The output matrix is cut by rows. One all-reduce in forward adds up what the heads gave, and "
        "there is one in backward.",
        "the split of engines/tensor/apply.py for gpt-7b on 4 virtual ranks",
    )
    middle = picture.top + 128
    _draw_whole(picture, MARGIN, middle - _TALL / 2, "X", f"b S {TIMES} d, whole")
    left = MARGIN + 84
    picture.text(left - 13, middle + 4, TIMES, "name ink mid")
    wide = 0.0
    for place, name in enumerate(("query", "key", "value")):
        top = middle - 29 + 84 * (place - 1)
        wide, _ = _draw_weight(picture, left, top, f"attention.{name}")
        picture.text(left, top - 6, f"{name}: by columns", "small ink")
    start = left + wide + 62
    picture.arrow(left + wide + 8, middle, start - 8, middle)
    _draw_heads(picture, start, middle, heads)
    joined = start + 8 * 17 + 34
    picture.arrow(start + 8 * 17 + 4, middle, joined - 6, middle)
    _draw_stripes(picture, joined, middle - _TALL / 2, 58)
    picture.text(joined + 29, middle - _TALL / 2 - 6, "heads joined", "small ink mid")
    output = joined + 58 + 26
    picture.text(output - 13, middle + 4, TIMES, "name ink mid")
    width, tall = _draw_weight(picture, output, middle - _TALL / 2, "attention.output")
    picture.text(output + 29, middle + tall / 2 + 16, "output: by rows", "small ink mid")
    end = output + width + 34
    picture.arrow(output + width + 6, middle, end - 6, middle)
    _draw_end(picture, end, middle)
    words = (
        f"query, key and value: {_shape_words(['attention.query'])}, which is {heads // RANKS} of {heads} heads. "
        f"output: {_shape_words(['attention.output'])}."
    )
    return _legend(picture, middle + 164, words)


def _draw_heads(picture: Picture, x: float, middle: float, heads: int) -> None:
    """Draws one square for each head, in the colour of the rank whose columns it lies in."""
    split = block_splits()["attention.query"]
    each = split.shape[0] // heads
    for rank in range(RANKS):
        ((first, last),) = split.spans(rank, RANKS)
        for place, head in enumerate(range(first // each, last // each)):
            picture.box(x + 17 * place, middle - 42 + 21 * rank, 14, 16, COLOURS[rank], rx=2, says=f"head {head}")
    picture.text(x + 68, middle - 50, f"attention of {heads} heads", "small ink mid")
    picture.text(x + 68, middle + 58, f"each S {TIMES} S scores", "tiny soft mid")
