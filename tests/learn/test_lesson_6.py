"""Lesson 6: right answers pass, and wrong ones get the words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from judged import words_of_right, words_of_wrong

from paceline.comm.base import Communicator
from paceline_course.course import find, judge
from paceline_course.on_paper import block_seconds

STREAM = 2 * 2048 * 4096 * 2


def test_what_a_block_sends() -> None:
    assert "hardly changes" in words_of_right("6.1", 8 * STREAM * 3 // 4)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (3 * STREAM, "forward alone"),
        (1.5 * STREAM, "one all-reduce"),
        (STREAM, "the stream itself"),
        (8 * STREAM, "(N-1)/N"),
        (4 * STREAM, "M for each all-reduce"),
        (12 * STREAM, "bf16 has 2 bytes"),
        (24 * STREAM, "all ranks together"),
        (6 * STREAM / 2**20, "MiB"),
        (6 * STREAM / 1e6, "in MB"),
        (1, "more than a million"),
    ],
)
def test_wrong_bytes_get_words_that_help(answer: float, words: str) -> None:
    verdict = judge(find("6.1"), answer)
    assert not verdict.is_right
    assert words in verdict.words
    assert str(6 * STREAM) not in verdict.words


def split_mlp(
    comm: Communicator, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    y = part_of_mlp(comm, x, up, down)
    comm.all_reduce(y).wait()
    return y + bias


def part_of_mlp(comm: Communicator, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ up.chunk(comm.size, 0)[comm.rank].T) @ down.chunk(comm.size, 1)[comm.rank].T


def bias_before_the_sum(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    y = part_of_mlp(comm, x, up, down) + bias
    comm.all_reduce(y).wait()
    return y


def whole_and_summed(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = F.gelu(x @ up.T) @ down.T
    comm.all_reduce(y).wait()
    return y + bias


def whole_and_averaged(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = F.gelu(x @ up.T) @ down.T
    comm.all_reduce(y, "avg").wait()
    return y + bias


def parts_averaged(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    y = part_of_mlp(comm, x, up, down)
    comm.all_reduce(y, "avg").wait()
    return y + bias


def share_of_the_bias(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    return bias_before_the_sum(comm, x, up, down, bias / comm.size)


def whole_alone(_: Communicator, x: Any, up: Any, down: Any, bias: Any) -> Any:
    return F.gelu(x @ up.T) @ down.T + bias


def row_before_column(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    """Applies GELU to parts of sums."""
    hidden = F.gelu(x.chunk(comm.size, 1)[comm.rank] @ up.chunk(comm.size, 1)[comm.rank].T)
    y: torch.Tensor = hidden @ down.T
    comm.all_reduce(y).wait()
    return y + bias


def gathered(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    part = part_of_mlp(comm, x, up, down)
    parts = part.new_empty(comm.size, *part.shape)
    comm.all_gather(parts, part).wait()
    return parts.sum(0) + bias


def summed_with_padding(comm: Communicator, x: Any, up: Any, down: Any, bias: torch.Tensor) -> torch.Tensor:
    part = torch.cat([part_of_mlp(comm, x, up, down), torch.zeros_like(x)])
    comm.all_reduce(part).wait()
    return part[: len(x)] + bias


@pytest.mark.parametrize("function", [split_mlp, share_of_the_bias])
def test_an_mlp_with_a_bias(function: Any) -> None:
    assert "bias is added once" in words_of_right("6.2", function)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (bias_before_the_sum, "the bias is added 2 times"),
        (lambda *given: split_mlp(*given[:4], 0 * given[4]), "bias is missing"),
        (whole_and_summed, "whole matrices"),
        (whole_and_averaged, "the same tensor"),
        (parts_averaged, "not averaged"),
        (row_before_column, "not parts of sums"),
        (lambda *given: part_of_mlp(*given[:4]) + given[4], "different values"),
        (gathered, "1 x all_gather"),
        (summed_with_padding, "carried 192 bytes"),
        (whole_alone, "exchanged nothing"),
        (lambda *given: given[2], "returned (8, 4)"),
        (lambda *_: None, "NoneType"),
    ],
)
def test_wrong_mlps_get_words_that_help(function: Any, words: str) -> None:
    assert words in words_of_wrong("6.2", function)


def test_waiting_grows_and_computing_shrinks_with_the_ranks() -> None:
    times = [block_seconds("1x dgx-a100", "gpt-1.1b", ranks, 512) for ranks in (1, 2, 4, 8)]
    assert [device for device, _ in times] == sorted((device for device, _ in times), reverse=True)
    assert [wait for _, wait in times] == sorted(wait for _, wait in times)


def test_where_it_stops_paying() -> None:
    assert "N_t = 4" in words_of_right("6.3", 4)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(8, "Too many"), (2, "A larger one pays"), (1, "A larger one pays"), (3, "none of 1, 2, 4, 8"), (4.5, "none of")],
)
def test_wrong_degrees_get_words_that_help(answer: Any, words: str) -> None:
    assert words in words_of_wrong("6.3", answer)
