"""Routers of experts that have gone wrong: by how often each expert was chosen, over the last windows of logged steps.

    dead        an expert took no token in any of the windows, where its fair share was at least 50
    collapsed   as many experts as a token has took nearly all tokens, or scores leave nothing to choose
    straggler   one rank's experts took 1.5 times the fair share of a rank or more, in each window the same one's

What the first windows of a run say is left alone: a router that has not learned yet changes its mind. The chance that
an expert of a balanced router takes none of 50 tokens that are its fair share is below e^-50.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsVerdict:
    """What is wrong with the router of one layer, what shows it, and what helps."""

    kind: Literal["dead", "collapsed", "straggler"]
    layer: str
    sentence: str
    evidence: str
    advice: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.sentence}: {self.evidence}"


def judge_experts(layers: Sequence[Sequence[Window]]) -> list[ExpertsVerdict]:
    """Judges the routers of some layers by the last windows of each; nothing where there are too few."""
    found: list[ExpertsVerdict] = []
    for windows in layers:
        last = windows[1 - WINDOWS :]
        if len(windows) >= WINDOWS and all(sum(each.choices) for each in last):
            collapsed = list(_collapsed(last))  # then others are dead: that is no second verdict
            found += [*(collapsed or _dead(last)), *_straggler(last)]
    return found


def _dead(windows: Sequence[Window]) -> Iterator[ExpertsVerdict]:
    total = _added(windows)
    fair = sum(total) / len(total)
    dead = [expert for expert, count in enumerate(total) if not count]
    if not dead or fair < _FEWEST_TOKENS:
        return
    names, verb = _named("expert", dead), "takes" if len(dead) == 1 else "take"
    yield ExpertsVerdict(
        kind="dead",
        layer=windows[-1].layer,
        sentence=f"{names} of {windows[-1].layer} {verb} no token",
        evidence=f"0 of {sum(total):,} choices {_when(windows)}, where {fair:,.0f} are the fair share",
        advice="raise model.router.balance_weight, or set model.router.balance = bias; an expert that is never chosen "
        "has no gradient, and does not come back by itself",
    )


def _collapsed(windows: Sequence[Window]) -> Iterator[ExpertsVerdict]:
    total, tokens = _added(windows), sum(each.tokens for each in windows)
    active = round(sum(total) / max(1, tokens))
    busiest = sorted(range(len(total)), key=lambda expert: -total[expert])[:active]
    share = sum(total[expert] for expert in busiest) / sum(total)
    entropy = max(each.entropy for each in windows)
    if 2 * active <= len(total) and share >= _NEARLY_ALL:
        sentence = f"the router of {windows[-1].layer} sends nearly all tokens to {_named('expert', sorted(busiest))}"
        fair = 100 * active / len(total)
        evidence = f"{100 * share:.0f} % of the choices {_when(windows)}, where {fair:.0f} % are the fair share"
    elif entropy < _NO_CHOICE:
        sentence = f"the scores of the router of {windows[-1].layer} leave nothing to choose"
        evidence = f"their entropy is at most {100 * entropy:.1f} % of what it can be {_when(windows)}"
    else:
        return
    yield ExpertsVerdict(
        kind="collapsed",
        layer=windows[-1].layer,
        sentence=sentence,
        evidence=evidence,
        advice="raise model.router.balance_weight, give the router a z-loss (model.router.z_weight = 0.001), or lower "
        "optim.lr; go back to a checkpoint before it",
    )


def _straggler(windows: Sequence[Window]) -> Iterator[ExpertsVerdict]:
    ranks = windows[-1].ranks
    if ranks == 1 or any(each.ranks != ranks for each in windows):
        return
    shares = []
    for each in windows:
        size = len(each.choices) // ranks
        own = [sum(each.choices[rank * size : (rank + 1) * size]) for rank in range(ranks)]
        shares.append([ranks * count / sum(own) for count in own])
    rank = max(range(ranks), key=lambda place: min(share[place] for share in shares))
    least = min(share[rank] for share in shares)
    if least < _MUCH:
        return
    yield ExpertsVerdict(
        kind="straggler",
        layer=windows[-1].layer,
        sentence=f"rank {rank} of the {ranks} that share the experts of {windows[-1].layer} has most of the work",
        evidence=f"its experts took at least {least:.2f} times the fair share of a rank {_when(windows)}",
        advice="the others wait for it: balance the experts (model.router.balance = bias), give them a capacity "
        "(model.router.capacity), or share them among fewer ranks (parallel.expert)",
    )


def _added(windows: Sequence[Window]) -> list[int]:
    return [sum(counts) for counts in zip(*(each.choices for each in windows), strict=True)]


def _when(windows: Sequence[Window]) -> str:
    return f"in steps {windows[0].step - windows[0].steps + 1:,} to {windows[-1].step:,}"


def _named(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")
    return f"{noun}{'' if len(numbers) == 1 else 's'} {shown}"
