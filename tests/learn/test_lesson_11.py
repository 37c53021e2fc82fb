"""Lesson 11: right answers pass, and wrong ones get the words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from judged import words_of_right, words_of_wrong

from paceline import run_virtual
from paceline.comm.base import Communicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline_course.course import find, judge
from paceline_course.exercise import calculate


def test_what_an_exchange_sends_is_what_its_messages_have() -> None:
    """In a thousandth of the size: four all-to-alls of 8 ranks, of which each keeps an eighth."""

    def travel(comm: Communicator) -> int:
        trace = Trace(comm.device)
        rows = torch.zeros(8, 64, dtype=torch.bfloat16)  # of 4 tokens with two experts each
        for _ in range(4):
            TracedCommunicator(comm, trace).all_to_all(torch.empty_like(rows), rows).wait()
        return trace.num_bytes["all_to_all"] * (comm.size - 1) // comm.size

    exercise = find("11.1")
    small = calculate(exercise.truth, {**exercise.symbols(), "n": 4, "d": 64})
    assert set(run_virtual(travel, ranks=8)) == {small}


@pytest.mark.parametrize("answer", [234_881_024, "234,881,024", 4 * 4096 * 2 * 4096 * 2 * 7 / 8])
def test_what_an_exchange_sends(answer: Any) -> None:
    assert judge(find("11.1"), answer).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (117_440_512, "forward and backward send alike"),
        (58_720_256, "one all-to-all. Rows go there and back"),
        (67_108_864, "with the rows that stay"),
        (268_435_456, "own experts stay where they are"),
        (469_762_048, "bf16 has 2 bytes"),
        (1_879_048_192, "all ranks send together"),
        (33_554_432, "what one other rank gets"),
        (7_516_192_768, "tokens to all experts"),
        (234.881, "look at the unit"),
        (224, "look at the unit"),
        (0, "above 0"),
        (300e6, "too large"),
    ],
)
def test_wrong_bytes_get_words_that_help(answer: float, words: str) -> None:
    assert words in words_of_wrong("11.1", answer)


def dispatch(scores: torch.Tensor, active: int, most: int, how: str = "") -> Any:
    """Gives tokens to experts. ``how`` plants one mistake."""
    values, chosen = scores.topk(active, largest=how != "worst")
    if how not in ("not divided", "divided late"):
        values = torch.full_like(values, 1 / active) if how == "equal" else values / values.sum(-1, keepdim=True)
    weights = torch.zeros_like(scores).scatter(-1, chosen, values)
    if how == "all experts":
        weights = scores
    is_chosen = weights > 0
    places = is_chosen.cumsum(0)
    if how == "later first":
        places = is_chosen.flip(0).cumsum(0).flip(0)
    if how == "best first":
        places = weights.argsort(0, descending=True).argsort(0) + 1
    if how == "by choice":  # the first choices of all tokens, then the second ones
        places = torch.zeros_like(places)
        for nth in chosen.T:
            taken = torch.zeros_like(places).scatter(-1, nth[:, None], 1)
            places = torch.where(taken > 0, taken.cumsum(0) + places.max(0).values, places)
    limit = {"one less": most - 1, "one more": most + 1, "no capacity": len(scores)}.get(how, most)
    weights = torch.where(places <= limit, weights, 0.0)
    match how:
        case "divided late":
            return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        case "experts alone":
            return chosen
        case "nothing":
            return None
    return weights


def test_a_dispatch() -> None:
    assert "residual stream" in words_of_right("11.2", dispatch)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("not divided", "divide them by their sum"),
        ("divided late", "after tokens were dropped (most = 3)"),
        ("no capacity", "takes all tokens that chose it"),
        ("later first", "takes the later tokens"),
        ("best first", "with the highest weights"),
        ("one less", "Compare a token by hand"),
        ("one more", "one token too many"),
        ("equal", "the router would learn nothing"),
        ("all experts", "Compare a token by hand"),
        ("worst", "Compare a token by hand"),
        ("by choice", "Compare a token by hand"),
        ("experts alone", "returned (10, 2)"),
        ("nothing", "returned NoneType"),
    ],
)
def test_wrong_dispatches_get_words_that_help(how: str, words: str) -> None:
    assert words in words_of_wrong("11.2", lambda *given: dispatch(*given, how=how))


class Exchange(torch.autograd.Function):
    """That of the page; ``how`` plants one mistake."""

    @staticmethod
    def forward(ctx: Any, comm: Any, rows: torch.Tensor, sent: Any, taken: Any, how: str) -> torch.Tensor:  # type: ignore[override]
        ctx.way, ctx.how = (comm, taken, sent), how
        arrived = rows.new_empty(sum(taken), rows.shape[1])
        work = comm.all_to_all(arrived, rows.contiguous(), taken, sent)
        if how != "no wait for rows":
            work.wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        comm, sent, taken = ctx.way
        gradient = gradients[0] / comm.size if ctx.how == "averaged gradients" else gradients[0]
        return None, Exchange.apply(comm, gradient, sent, taken, ctx.how), None, None, None


def exchange(comm: Any, rows: torch.Tensor, counts: torch.Tensor, experts: torch.Tensor, how: str = "") -> Any:
    """Sends rows to their experts. ``how`` plants one mistake."""
    local = len(experts)
    if how == "own experts":
        kinds = torch.arange(local).repeat(comm.size).repeat_interleave(counts)
        return (experts[kinds] @ rows[:, :, None])[:, :, 0]
    arriving = torch.empty_like(counts)
    work = comm.all_to_all(arriving, counts)
    if how != "no wait for counts":
        work.wait()
    sent, taken = (each.view(comm.size, -1).sum(1).tolist() for each in (counts, arriving))
    if how == "same sizes":
        taken = sent
    if how == "asks twice":
        comm.all_to_all(torch.empty_like(counts), counts).wait()
    if how in ("no autograd", "detached"):
        arrived = rows.new_empty(sum(taken), rows.shape[1])
        comm.all_to_all(arrived, rows.detach(), taken, sent).wait()
    else:
        arrived = Exchange.apply(comm, rows, sent, taken, how)  # type: ignore[no-untyped-call]
    kinds = torch.arange(local).repeat(comm.size).repeat_interleave(arriving)
    if how == "as if by expert":  # takes what lies by rank for sorted
        kinds = kinds.sort().values
    order = kinds.argsort(stable=True)
    matrices = experts.mT if how == "transposed" else experts.detach() if how == "experts detached" else experts
    made = (matrices[kinds[order]] @ arrived[order][:, :, None])[:, :, 0]
    if how == "not multiplied":
        made = arrived[order] + 0 * made
    back = made if how == "wrong order" else torch.empty_like(made).index_copy(0, order, made)
    if how == "detached":
        found = rows.new_empty(rows.shape)
        comm.all_to_all(found, back.detach(), sent, taken).wait()
        return found
    home = Exchange.apply(comm, back, taken, sent, how)  # type: ignore[no-untyped-call]
    return home[:-1] if how == "one lost" else home


def exchange_by_gathering(comm: Any, rows: torch.Tensor, counts: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    whole = experts.new_empty(comm.size * len(experts), *experts.shape[1:])
    comm.all_gather(whole, experts.detach()).wait()
    kinds = torch.arange(len(whole)).repeat_interleave(counts)
    return (whole[kinds] @ rows[:, :, None])[:, :, 0]


def test_an_exchange() -> None:
    assert "waits for the counts" in words_of_right("11.3", exchange)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no wait for counts", "reads what an operation is still filling"),
        ("no wait for rows", "never waits for"),
        ("own experts", "with the experts of their own rank"),
        ("same sizes", "The ranks that ran your function exchange stopped"),
        ("wrong order", "must lie by rank again before"),
        ("as if by expert", "Which expert takes a row that arrives?"),
        ("transposed", "the wrong way round"),
        ("not multiplied", "nobody multiplied them"),
        ("one lost", "none may be lost"),
        ("no autograd", "no gradient reaches rows"),
        ("detached", "no gradient reaches rows"),
        ("experts detached", "no gradient reaches experts"),
        ("averaged gradients", "the gradients of rows are not those of one process"),
        ("asks twice", "a rank called 4 x all_to_all in forward"),
    ],
)
def test_wrong_exchanges_get_words_that_help(how: str, words: str) -> None:
    assert words in words_of_wrong("11.3", lambda *given: exchange(*given, how=how))


def test_an_exchange_that_gathers_experts_gets_words_that_help() -> None:
    assert "no gradient reaches experts" in words_of_wrong("11.3", exchange_by_gathering)


def global_norm(comm: Any, shared: torch.Tensor, own: torch.Tensor, expert_ranks: int, how: str) -> Any:
    """Adds up squares. ``how`` plants one mistake."""
    common, experts = shared.square().sum(), own.square().sum()
    both = common + experts
    match how:
        case "averaged" | "summed" | "largest":
            norm = both.sqrt()
            comm.all_reduce(norm, {"averaged": "avg", "summed": "sum", "largest": "max"}[how]).wait()
            return norm
        case "own":
            return both.sqrt()
        case "every square" | "mean square":
            comm.all_reduce(both, "avg" if how == "mean square" else "sum").wait()
            return both.sqrt()
        case "shared alone":
            return common.sqrt()
    work = comm.all_reduce(experts)
    if how != "no wait":
        work.wait()
    if how != "experts twice":
        experts = experts * expert_ranks / comm.size
    if how == "shared often":
        common = common * comm.size
    if how == "experts alone":
        return experts.sqrt()
    if how == "norms added":
        return common.sqrt() + experts.sqrt()
    squares = common + experts
    return squares if how == "squared" else float(squares) ** 0.5 if how == "no tensor" else squares.sqrt()


def test_a_norm() -> None:
    verdict = judge(find("11.4"), lambda *given: global_norm(*given, how=""))
    assert verdict.is_right, verdict.words


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("averaged", "the mean of the ranks' norms"),
        ("summed", "Which squares count"),
        ("largest", "Which squares count"),
        ("own", "return different norms"),
        ("every square", "all squares of all 4 ranks"),
        ("mean square", "Which squares count"),
        ("shared alone", "Which squares count"),
        ("no wait", "never waits for 1 x all_reduce"),
        ("experts twice", "as often as ranks hold it"),
        ("shared often", "is counted 4 times"),
        ("experts alone", "Which squares count"),
        ("norms added", "Which squares count"),
        ("squared", "the square of the norm"),
        ("no tensor", "returned float"),
    ],
)
def test_wrong_norms_get_words_that_help(how: str, words: str) -> None:
    assert words in words_of_wrong("11.4", lambda *given: global_norm(*given, how=how))
