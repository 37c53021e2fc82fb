"""Python objects between ranks: whatever pickles arrives whole, from every rank, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.errors import RankFailedError

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def value_of(rank: int) -> dict[str, Any]:
    """A value whose size differs between ranks."""
    return {"rank": rank, "text": "x" * 100 * rank, "shape": (rank, None), "losses": torch.arange(float(rank))}


def gather_and_broadcast(comm: Communicator) -> tuple[list[Any], Any]:
    gathered = gather_objects(comm, value_of(comm.rank))
    told = broadcast_object(comm, value_of(comm.rank), source=comm.size - 1)
    return [{**value, "losses": value["losses"].tolist()} for value in gathered], told["rank"]


@given(values=st.lists(PLAIN, min_size=1, max_size=4), source=st.integers(0, 3))
def test_what_pickles_arrives_whole(values: list[Any], source: int) -> None:
    source %= len(values)

    def work(comm: VirtualCommunicator) -> tuple[list[Any], Any]:
        return gather_objects(comm, values[comm.rank]), broadcast_object(comm, values[comm.rank], source)

    assert run_virtual(work, len(values)) == [(values, values[source])] * len(values)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sizes_may_differ_between_ranks(ranks: int) -> None:
    for gathered, told in run_virtual(gather_and_broadcast, ranks):
        assert [value["rank"] for value in gathered] == list(range(ranks))
        assert [len(value["text"]) for value in gathered] == [100 * rank for rank in range(ranks)]
        assert told == ranks - 1


def test_real_processes_exchange_the_same_objects(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(gather_and_broadcast, ranks=2) == run_virtual(gather_and_broadcast, 2)


def test_a_world_of_one_gets_a_copy_of_its_own_value() -> None:
    comm, value = SoloCommunicator(torch.device("cpu")), {"steps": [1, 2]}
    assert gather_objects(comm, value) == [value]
    told = broadcast_object(comm, value)
    assert told == value
    assert told is not value


def test_each_takes_two_collectives() -> None:
    def work(comm: VirtualCommunicator) -> dict[str, int]:
        wrapped = TracedCommunicator(comm, Trace(comm.device))
        gather_objects(wrapped, "value")
        broadcast_object(wrapped, "value")
        return dict(wrapped.trace.num_operations)

    assert run_virtual(work, 3) == [{"all_gather": 2, "broadcast": 2}] * 3


def test_what_does_not_pickle_fails_on_its_rank() -> None:
    def work(comm: VirtualCommunicator) -> None:
        gather_objects(comm, (lambda: None) if comm.rank == 1 else None)

    with pytest.raises(RankFailedError, match=r"rank 1 failed: .*pickle"):
        run_virtual(work, 2)
