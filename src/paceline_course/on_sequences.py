"""Checks of lesson 10: attention over the keys of many ranks, and a sequence that is cut among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from paceline_course.exercise import RIGHT, Said, says
from paceline_course.watched import WatchedCommunicator, compare, run_with, shown_calls

_HEADS, _WIDTH = 2, 4
_MOST_WORK = 1.15  # of a rank, over the mean: a striped order of 32 tokens has 1.09


def check_one_query(function: Any) -> Said:
    """Runs the reader's function on two and four ranks, with small and large scores; then looks at what was sent."""
    for ranks, scale in ((2, 1.0), (4, 1.0), (4, 4000.0)):
        query = scale * torch.arange(_HEADS * _WIDTH, dtype=torch.float64).cos().view(_HEADS, _WIDTH)
        counts = [3 + 2 * rank for rank in range(ranks)]
        numbers = torch.arange(2 * sum(counts) * _HEADS * _WIDTH, dtype=torch.float64).mul(1.7).sin()
        keys, values = numbers.view(2, _HEADS, -1, _WIDTH).unbind(0)
        parts = list(zip(torch.split(keys, counts, 1), torch.split(values, counts, 1), strict=True))
        found = run_with(function, [[query, *own] for own in parts])
        expected = _attend(query, keys, values)
        said = compare(found.results, expected, _usual_mistakes(query, parts, counts)) or _sums_wrong(found.comms[0])
        if said is not None:
            return says("overflow") if scale > 1 else said
    return RIGHT


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query[:, None], keys, values)[:, 0]


def _usual_mistakes(query: torch.Tensor, parts: Sequence[Any], counts: Sequence[int]) -> dict[str, torch.Tensor]:
    outputs = torch.stack([_attend(query, *each) for each in parts])
    scores = [(keys @ query[:, :, None])[:, :, 0] / _WIDTH**0.5 for keys, _ in parts]
    sums = torch.stack([(each - each.amax(-1, keepdim=True)).exp().sum(-1) for each in scores])[:, :, None]
    share = torch.tensor(counts, dtype=torch.float64)[:, None, None]
    return {
        "unmerged": outputs.mean(0),
        "summed": outputs.sum(0),
        "by_tokens": (outputs * share).sum(0) / share.sum(),
        "own_largest": (outputs * sums).sum(0) / sums.sum(0),
    }


def _sums_wrong(comm: WatchedCommunicator) -> Said | None:
    """Says what is wrong with what a rank sent: for each head a largest score, a sum and an output are enough."""
    if comm.calls.keys() - {"all_reduce"}:
        return says("calls", called=shown_calls(comm.calls))
    sent, enough = sum(each.numel() for each in comm.brought["all_reduce"]), _HEADS * (_WIDTH + 2)
    return says("numbers", sent=sent, enough=enough) if sent > enough else None


def check_cut(function: Any) -> Said:
    """Cuts two samples of 32 tokens for two and four ranks, and puts the parts together again."""
    tokens = torch.arange(2 * 33).mul(7).remainder(71).view(2, 33)
    for ranks in (2, 4):
        shares = [function(tokens.clone(), rank, ranks) for rank in range(ranks)]
        if said := _shapes_wrong(shares, 32 // ranks) or _cut_wrong(shares, tokens):
            return says(said.name, ranks=ranks, **said.gaps)
    return RIGHT


def _shapes_wrong(shares: Sequence[Any], length: int) -> Said | None:
    wanted = [(2, length), (2, length), (length,)]
    for rank, share in enumerate(shares):
        is_three = isinstance(share, tuple | list) and all(isinstance(each, torch.Tensor) for each in share)
        given = [tuple(each.shape) for each in share] if is_three else type(share).__name__
        if given != wanted:
            return says("shape", rank=rank, given=given, wanted=wanted)
    return None


def _cut_wrong(shares: Sequence[Any], tokens: torch.Tensor) -> Said | None:
    length = tokens.shape[1] - 1
    places = torch.cat([share[2] for share in shares])
    if len(set(places.tolist())) == len(shares[0][2]) and not places.min():
        return says("local_positions", most=int(places.max()))
    if not torch.equal(places.sort().values, torch.arange(length)):
        return says("missing")
    for rank, (inputs, labels, mine) in enumerate(shares):
        if not torch.equal(inputs, tokens[:, mine]):
            return says("inputs", rank=rank)
        if not torch.equal(labels, tokens[:, mine + 1]):
            is_inside = torch.equal(labels[:, :-1], inputs[:, 1:])
            name = "shifted_inside" if is_inside else "not_shifted" if torch.equal(labels, inputs) else "labels"
            return says(name, rank=rank)
    works = [int((share[2] + 1).sum()) for share in shares]  # pairs of a query and a key that it sees
    if max(works) * len(works) > _MOST_WORK * sum(works):
        return says("unbalanced", most=max(works), least=min(works))
    return None


CHECKS = {"10.2": check_one_query, "10.3": check_cut}
