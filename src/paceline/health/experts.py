"""Routers of experts that have gone wrong: by how often each expert was chosen, over the last windows of logged steps.

    dead        an expert took no token in any of the windows, where its fair share was at least 50
    collapsed   as many experts as a token has took nearly all tokens, or scores leave nothing to choose
    straggler   one rank's experts took 1.5 times the fair share of a rank or more, in each window the same one's

What the first windows of a run say is left alone: a router that has not learned yet changes its mind. The chance that
an expert of a balanced router takes none of 50 tokens that are its fair share is below e^-50.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

WINDOWS = 6  # of logged steps, of which the first of a run does not count
_FEWEST_TOKENS = 50
_NEARLY_ALL = 0.9
_NO_CHOICE = 0.02  # of the entropy that scores can have
_MUCH = 1.5


class Window(Protocol):
    """What a record of one layer says (``records/records.py``, ExpertsRecord)."""

    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def layer(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def choices(self) -> Sequence[int]: ...
    @property
    def entropy(self) -> float: ...
    @property
    def ranks(self) -> int: ...


_ADVICE = {
    "dead": "raise model.router.balance_weight, or set model.router.balance = bias; an expert that is never chosen has "
    "no gradient, and does not come back by itself",
    "collapsed": "raise model.router.balance_weight, give the router a z-loss (model.router.z_weight = 0.001), or "
    "lower optim.lr; go back to a checkpoint before it",
    "straggler": "the others wait for it: balance the experts (model.router.balance = bias), give them a capacity "
    "(model.router.capacity), or share them among fewer ranks (parallel.expert)",
}


@dataclass(frozen=True, slots=True)
class ExpertsVerdict:
    """What is wrong with a layer's router, what shows it, what helps. Of a straggler, ``rank`` is one of ``ranks``."""

    kind: str
    layer: str
    advice: str
    sentence: str
    evidence: str
    rank: int = 0
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.sentence}: {self.evidence}"


def judge_experts(layers: Sequence[Sequence[Window]]) -> list[ExpertsVerdict]:
    """Judges the routers of some layers by the last windows of each; nothing where there are too few."""
    found: list[ExpertsVerdict] = []
    for windows in layers:
        last = windows[1 - WINDOWS :]
        if len(windows) >= WINDOWS and all(sum(each.choices) for each in last):
            layer, first = last[-1].layer, last[0].step - last[0].steps + 1
            when = f"in steps {first:,} to {last[-1].step:,}"
            wrong: dict[str, tuple[Any, ...] | None]
            wrong = {"collapsed": _collapsed(last, layer, when), "straggler": _straggler(last, layer, when)}
            if wrong["collapsed"] is None:  # else others are dead: that is no second verdict
                wrong["dead"] = _dead(last, layer, when)
            found += [ExpertsVerdict(kind, layer, _ADVICE[kind], *told) for kind, told in wrong.items() if told]
    return found


def _dead(windows: Sequence[Window], layer: str, when: str) -> tuple[str, str] | None:
    total = _added(windows)
    fair = sum(total) / len(total)
    dead = [expert for expert, count in enumerate(total) if not count]
    if not dead or fair < _FEWEST_TOKENS:
        return None
    sentence = f"{_named(dead)} of {layer} {'takes' if len(dead) == 1 else 'take'} no token"
    return sentence, f"0 of {sum(total):,} choices {when}, where {fair:,.0f} are the fair share"


def _collapsed(windows: Sequence[Window], layer: str, when: str) -> tuple[str, str] | None:
    total, tokens = _added(windows), sum(each.tokens for each in windows)
    active = round(sum(total) / max(1, tokens))
    busiest = sorted(range(len(total)), key=lambda expert: -total[expert])[:active]
    share, fair = sum(total[expert] for expert in busiest) / sum(total), active / len(total)
    entropy = max(each.entropy for each in windows)
    if fair <= 0.5 and share >= _NEARLY_ALL:
        sentence = f"the router of {layer} sends nearly all tokens to {_named(sorted(busiest))}"
        return sentence, f"{100 * share:.0f} % of the choices {when}, where {100 * fair:.0f} % are the fair share"
    if entropy >= _NO_CHOICE:
        return None
    evidence = f"their entropy is at most {100 * entropy:.1f} % of what it can be {when}"
    return f"the scores of the router of {layer} leave nothing to choose", evidence


def _straggler(windows: Sequence[Window], layer: str, when: str) -> tuple[str, str, int, int] | None:
    ranks = windows[-1].ranks
    if ranks == 1 or any(each.ranks != ranks for each in windows):
        return None
    size, shares = len(windows[-1].choices) // ranks, []
    for each in windows:
        own = [sum(each.choices[rank * size : (rank + 1) * size]) for rank in range(ranks)]
        shares.append([ranks * count / sum(own) for count in own])
    least, rank = max((min(share[rank] for share in shares), rank) for rank in range(ranks))
    if least < _MUCH:
        return None
    evidence = f"its experts took at least {least:.2f} times the fair share of a rank {when}"
    return f"rank {rank} of the {ranks} that share the experts of {layer} has most of the work", evidence, rank, ranks


def _added(windows: Sequence[Window]) -> list[int]:
    return [sum(counts) for counts in zip(*(each.choices for each in windows), strict=True)]


def _named(experts: Sequence[int]) -> str:
    more = f" and {len(experts) - 6} more" if len(experts) > 6 else ""
    return f"expert{'' if len(experts) == 1 else 's'} {', '.join(map(str, experts[:6]))}{more}"
