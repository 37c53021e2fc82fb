"""Lesson 10: right answers pass, and wrong ones get the words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from judged import words_of_right, words_of_wrong

from paceline import run_virtual
from paceline.comm.base import Communicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline_course.course import find, judge


def test_what_a_ring_sends_is_what_its_messages_have() -> None:
    """In a thousandth of the size: a ring of 8 ranks that passes on keys and values of 8 heads of 32."""

    def ring(comm: Communicator) -> int:
        trace = Trace(comm.device)
        traced = TracedCommunicator(comm, trace)
        block = torch.zeros(2, 16, 1024, dtype=torch.bfloat16)  # keys and values of 16 tokens
        for _ in range(comm.size - 1):
            arriving = torch.empty_like(block)
            sending = traced.send(block, to=(comm.rank + 1) % comm.size)
            traced.recv(arriving, source=(comm.rank - 1) % comm.size).wait()
            sending.wait()
            block = arriving
        return trace.num_bytes["send"]

    sent = set(run_virtual(ring, ranks=8))
    assert sent == {find("10.1").symbols()["truth"] / 1024}


def test_what_a_ring_sends() -> None:
    assert "get home" in words_of_right("10.1", 2 * 16384 * 1024 * 2 * 7)


def one_query(comm: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: str = "") -> torch.Tensor:
    """Merges the outputs of all ranks by lse. ``how`` plants one mistake."""
    scores = (k @ q[:, :, None])[:, :, 0] / (1.0 if how == "no root" else q.shape[-1] ** 0.5)
    lse = scores.logsumexp(-1, keepdim=True)
    output = ((scores - lse).exp()[:, None] @ v)[:, 0]
    if how == "alone":
        return output
    if how in ("unmerged", "summed"):
        comm.all_reduce(output, "avg" if how == "unmerged" else "sum").wait()
        return output
    largest = lse.clone()
    if how not in ("no largest", "own largest"):
        comm.all_reduce(largest, "max").wait()
    if how == "no largest":
        largest.zero_()
    if how == "own largest":
        largest = scores.amax(-1, keepdim=True)
    weight = torch.full_like(lse, k.shape[1]) if how == "by tokens" else (lse - largest).exp()
    sums = torch.cat([output * weight, weight], dim=-1)
    work = comm.all_reduce(sums)
    if how != "no wait":
        work.wait()
    return sums[:, :-1] / sums[:, -1:]


def one_query_by_gathering(comm: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    most = torch.tensor([k.shape[1]])
    comm.all_reduce(most, "max").wait()
    pad = int(most) - k.shape[1]
    whole = []
    for each, fill in ((k, 0.0), (v, 0.0), (torch.ones_like(k[..., :1]), 0.0)):
        padded = torch.cat([each, each.new_full((each.shape[0], pad, each.shape[2]), fill)], dim=1)
        gathered = padded.new_empty(comm.size, *padded.shape)
        comm.all_gather(gathered, padded).wait()
        whole.append(torch.cat(gathered.unbind(0), dim=1))
    scores = (whole[0] @ q[:, :, None])[:, :, 0] / q.shape[-1] ** 0.5
    scores = scores.masked_fill(whole[2][..., 0] == 0, -torch.inf)
    return (scores.softmax(-1)[:, None] @ whole[1])[:, 0]


def one_query_with_all_values(comm: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output = one_query(comm, q, k, v)
    comm.all_reduce(torch.zeros(20)).wait()
    return output


def test_one_query() -> None:
    assert "however long the context is" in words_of_right("10.2", one_query)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unmerged", "the mean of the ranks' outputs"),
        ("summed", "the sum of the ranks' outputs"),
        ("by tokens", "by the tokens of its rank"),
        ("own largest", "subtracted the largest score of its own"),
        ("no largest", "For large ones exp overflows"),
        ("no root", "sqrt(width)"),
        ("alone", "return different outputs"),
        ("no wait", "never waits for 1 x all_reduce"),
    ],
)
def test_wrong_merges_get_words_that_help(how: str, words: str) -> None:
    assert words in words_of_wrong("10.2", lambda *given: one_query(*given, how=how))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (one_query_by_gathering, "a rank called 3 x all_gather, 1 x all_reduce"),
        (one_query_with_all_values, "a rank sends 32 numbers, and 12 are enough"),
        (lambda *given: given[2], "return (heads, width)"),
        (lambda *_: None, "NoneType"),
    ],
)
def test_merges_that_send_too_much_get_words_that_help(function: Any, words: str) -> None:
    assert words in words_of_wrong("10.2", function)


def cut(tokens: torch.Tensor, rank: int, ranks: int, how: str = "") -> Any:
    """Cuts in zigzag order. ``how`` plants one mistake."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    chunks = torch.arange(inputs.shape[1]).chunk(2 * ranks)
    mine = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
    if how == "contiguous":
        mine = torch.cat([chunks[2 * rank], chunks[2 * rank + 1]])
    if how == "striped":
        mine = torch.arange(rank, inputs.shape[1], ranks)
    if how == "twice":
        mine = torch.cat([chunks[rank], chunks[2 * ranks - 1]])
    x, y = inputs[:, mine], labels[:, mine]
    match how:
        case "local positions":
            mine = torch.arange(len(mine))
        case "labels shifted inside":
            y = torch.nn.functional.pad(x[:, 1:], (0, 1), value=-100)
        case "labels rolled inside":
            y = x.roll(-1, dims=1)
        case "not shifted":
            y = x
        case "shifted twice":
            y = labels.roll(-1, dims=1)[:, mine]
        case "other inputs":
            x = inputs.chunk(ranks, dim=1)[rank]
        case "whole positions":
            mine = torch.arange(inputs.shape[1])
    return x, y, mine


@pytest.mark.parametrize("how", ["", "striped"])
def test_cuts_that_are_even(how: str) -> None:
    verdict = judge(find("10.3"), lambda *given: cut(*given, how=how))
    assert verdict.is_right, verdict.words


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("contiguous", "one has 392 pairs"),
        ("local positions", "they begin at 0 on every rank"),
        ("labels shifted inside", "shifted on the rank"),
        ("labels rolled inside", "shifted on the rank"),
        ("not shifted", "its inputs for labels"),
        ("shifted twice", "not the token after its input"),
        ("other inputs", "not the tokens at its positions"),
        ("twice", "each of them once"),
        ("whole positions", "have the shapes"),
    ],
)
def test_wrong_cuts_get_words_that_help(how: str, words: str) -> None:
    assert words in words_of_wrong("10.3", lambda *given: cut(*given, how=how))
