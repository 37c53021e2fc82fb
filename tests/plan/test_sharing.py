"""What a strategy keeps and sends: one table, which the layout, the memory estimate and the formulas agree with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.plan.layout import SHARING, STRATEGIES, Layout, Offload, Strategy
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory


@pytest.mark.parametrize(
    ("strategy", "sent", "share"), [("ddp", 2, 1.0), ("zero1", 2, 0.625), ("zero2", 5, 0.4375), ("fsdp", 12, 0.25)]
)
def test_a_strategy_says_what_it_sends_and_keeps(strategy: Strategy, sent: int, share: float) -> None:
    assert SHARING[strategy].copies_sent(4) == sent
    assert SHARING[strategy].share_of_states(4) == share
    assert SHARING[strategy].share_of_states(1) == 1.0


def test_a_step_of_one_microbatch_sends_what_its_collectives_send() -> None:
    assert tuple(SHARING) == STRATEGIES
    for sharing in SHARING.values():  # an all-reduce is a reduction and a gather
        assert sharing.copies_sent(1) == sum(2 if kind == "all_reduce" else 1 for kind in sharing.collectives)


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "hybrid"])
def test_the_estimate_of_memory_cuts_what_the_table_says(strategy: Strategy) -> None:
    model = ModelFacts(blocks=(), root=BlockFacts(parameters=1_000_000))
    layout = replace(Layout(strategy=strategy), precision="fp32").for_ranks(4)
    need = estimate_memory(model, layout, StateFacts())
    held = need.parameters + need.gradients + need.optimizer
    assert held == 16_000_000 * SHARING[strategy].share_of_states(4)


def test_what_is_offloaded_takes_so_many_bytes_of_the_host() -> None:
    asked = (Offload(), Offload(gradients=True), Offload(optimizer=True))
    assert [offload.host_bytes for offload in asked] == [0, 8, 18]
