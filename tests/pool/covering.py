"""Large matrices of cases: all of them exist, and the default run takes a part in which every value occurs.

    @covering(strategy=["ddp", "fsdp"], shares={"even": [4, 4], "ragged": [1, 7]})
    def test_training(strategy: str, shares: list[int]) -> None: ...

A matrix of sizes a, b, ... has a b ... cases, of which the default run takes max(a, b, ...) along the diagonal, those
with a value under ``always``, and leaves the others to the exhaustive one (``make test-all``).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def covering(
    *, always: Mapping[str, Collection[Any]] | None = None, **axes: Mapping[str, Any] | Iterable[Any]
) -> pytest.MarkDecorator:
    """Parametrises a test over all combinations; those that are neither on the diagonal nor always taken are marked.

    An axis is a list of values, or a dict from their names, which ``always`` then speaks of.
    """
    named = {axis: _named(values) for axis, values in axes.items()}
    sizes = [len(values) for values in named.values()]
    diagonal = {tuple(turn % size for size in sizes) for turn in range(max(sizes))}
    wanted = always or {}
    cases = []
    for place in itertools.product(*map(range, sizes)):
        chosen = {axis: values[number] for (axis, values), number in zip(named.items(), place, strict=True)}
        is_taken = place in diagonal or any(chosen[axis][0] in map(_name, wanted[axis]) for axis in wanted)
        found = [value for _, value in chosen.values()]
        label = "-".join(name for name, _ in chosen.values())
        cases.append(pytest.param(*found, id=label, marks=() if is_taken else pytest.mark.exhaustive))
    return pytest.mark.parametrize(tuple(axes), cases)


def _named(values: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    return list(values.items()) if isinstance(values, Mapping) else [(_name(value), value) for value in values]


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
