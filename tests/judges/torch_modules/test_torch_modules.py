"""torch's own catalogue of modules: each entry that has parameters, trained a step on virtual ranks, and evaluated.

In float64; ``module_cases.py`` says how, and what the oracle is. A lazy module is refused, with the way out; taken,
which is one call, it is trained as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from judging import outcome_of
from module_cases import (
    STRATEGIES,
    cases_of,
    catalogued_names,
    evaluated_alone,
    evaluated_on_a_rank,
    trained_alone,
    trained_on_a_rank,
)
from oracle import Numbers

from paceline.comm.virtual.communicator import run_virtual

pytestmark = [pytest.mark.judge, pytest.mark.filterwarnings("ignore")]
Choose = Callable[[Sequence[Any]], Sequence[Any]]
NUMBERS = Numbers()


def chosen_of(name: str, of_turn: Choose, *, training: bool) -> list[tuple[int, Any]]:
    cases = cases_of(name, NUMBERS, training=training)
    if not cases:
        pytest.skip("the module has no parameters")
    return list(of_turn(list(enumerate(cases))))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", catalogued_names())
def test_a_module_trains_as_in_one_process(name: str, strategy: str, ranks: int, of_turn: Choose) -> None:
    for number, case in chosen_of(name, of_turn, training=True):
        given = (name, [number], strategy, NUMBERS)
        found = outcome_of(lambda given=given: run_virtual(lambda comm: trained_on_a_rank(comm, *given), ranks))
        alone = trained_alone(name, case, ranks, NUMBERS)
        for (state,) in found:
            NUMBERS.assert_trained(state, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", catalogued_names())
def test_a_module_evaluates_as_in_one_process(name: str, strategy: str, of_turn: Choose) -> None:
    for number, case in chosen_of(name, of_turn, training=False):
        given = (name, [number], strategy, NUMBERS)
        found = outcome_of(lambda given=given: run_virtual(lambda comm: evaluated_on_a_rank(comm, *given), 2))
        for rank, (outputs,) in enumerate(found):
            NUMBERS.assert_outputs(outputs, evaluated_alone(name, case, rank, NUMBERS))
