"""Python objects between ranks: plain data arrives whole, from every rank, on every rank."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gloo_pool import GlooPool
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object, from_bytes, gather_objects, reduce_number, to_bytes
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import load_config
from paceline.errors import CommunicationError, ConfigError, Problem, RankFailedError

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
def test_plain_data_arrives_whole(values: list[Any], source: int) -> None:
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


def test_what_is_no_plain_data_fails_on_its_rank() -> None:
    def work(comm: VirtualCommunicator) -> None:
        gather_objects(comm, (lambda: None) if comm.rank == 1 else None)

    with pytest.raises(RankFailedError, match=r"rank 1 failed: .*function cannot be sent"):
        run_virtual(work, 2)


# Bytes of another rank are data: nothing in them is run.


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    first: int
    second: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    text: str
    more: object = None

    def __post_init__(self) -> None:
        assert self.text != "never", "constructors are not called"


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Pair(1, (2, {3})),
        Note(text="a", more=[Note(text="b")]),
        OrderedDict(b=1, a=frozenset({2})),
        [Path("/a/b"), range(1, 9, 2), 1j, -0.0, float("inf"), 2**80],
        {torch.bfloat16: torch.device("cpu"), (1, "two"): torch.Size([3, 4])},
        np.float32(0.1),
        load_config(Path(__file__).parents[2] / "configs" / "digits.yaml"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_all_kinds_are_what_they_were(value: object) -> None:
    found = from_bytes(to_bytes(value))
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(math.prod(shape)).view(shape).to(dtype)
    found = from_bytes(to_bytes(value.t()))
    assert (found.dtype, found.shape) == (dtype, value.t().shape)
    assert (
        found.contiguous().view(-1).view(torch.uint8).tolist()
        == value.t().contiguous().view(-1).view(torch.uint8).tolist()
    )


def test_what_is_more_than_a_plain_kind_arrives_as_that_kind() -> None:
    class Version(str):
        pass

    found = from_bytes(to_bytes([Version("2.13"), Counter("aab")]))
    assert (found, type(found[0]), type(found[1])) == (["2.13", {"a": 2, "b": 1}], str, dict)


def test_errors_arrive_with_all_they_say() -> None:
    sent = ConfigError([Problem(what="lr = -1", rule="it is above 0")], source="tiny.yaml")
    found = from_bytes(to_bytes(sent))
    assert (str(found), found.problems, found.source) == (str(sent), sent.problems, "tiny.yaml")


def message(text: object) -> bytes:
    content = json.dumps(text).encode()
    return len(content).to_bytes(8, "big") + content


@pytest.mark.parametrize(
    "text",
    [
        {"record": ["subprocess:Popen", {"args": "touch ran"}]},
        {"record": [f"{__name__}:Note", {"text": "x", "other": 1}]},
        {"model": ["pydantic:BaseModel", {}]},
        {"error": ["builtins:SystemExit", [], {}]},
        {"enum": ["os:sep", "x"]},
        {"named": ["builtins:tuple", [1]]},
        {"tensor": ["load", [1], 0, 1]},
        {"tensor": ["float32", [2**60], 0, 0]},
        {"array": ["|O", [1], 0, 0]},
        {"bytes": [0, 2**40]},
        {"bytes": [-1, 1]},
        {"set": [[]]},
        {"dict": {}, "list": []},
        {"eval": "1"},
    ],
    ids=str,
)
def test_what_no_rank_would_send_is_refused(text: object) -> None:
    with pytest.raises(CommunicationError, match="what another rank sent is damaged"):
        from_bytes(message(text))


@given(st.binary())
def test_any_bytes_are_a_value_or_refused(content: bytes) -> None:
    with contextlib.suppress(CommunicationError):
        from_bytes(message("")[:7] + content)
    bomb = pickle.dumps(os.getpid)
    with pytest.raises(CommunicationError):
        from_bytes(bomb)


def test_one_number_is_reduced_over_all_ranks() -> None:
    def work(comm: Communicator) -> tuple[float, float, float]:
        number = comm.rank + 1
        return (
            reduce_number(comm, number, "sum"),
            reduce_number(comm, number, "min"),
            reduce_number(comm, number, "max"),
        )

    assert run_virtual(work, ranks=3) == [(6.0, 1.0, 3.0)] * 3
