"""One rank of a world that is not there: what it notes, and what it answers to those who read values."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.base import Communicator, control_device
from paceline.comm.dry.communicator import DryWorld, KeptJournal
from paceline.comm.objects import broadcast_object, gather_objects, receive_object, send_object
from paceline.errors import UsageError


def test_it_is_a_communicator_without_values() -> None:
    comm = DryWorld(4096).rank(4095)
    assert isinstance(comm, Communicator)
    assert (comm.rank, comm.size, comm.device.type) == (4095, 4096, "meta")
    assert control_device(comm).type == "cpu"
    assert not comm.takes_real_time


def test_operations_and_waits_are_noted_with_bytes_group_and_lane() -> None:
    journal = KeptJournal()
    comm = DryWorld(8).rank(2, journal)
    whole, piece = torch.empty(64, device="meta"), torch.empty(8, device="meta")
    work = comm.all_gather(whole, piece)
    comm.reduce_scatter(piece, whole)
    pair = comm.split([2, 6])
    pair.all_reduce(torch.empty(3, dtype=torch.bfloat16, device="meta")).wait()
    work.wait()
    work.wait()
    comm.send(piece, 3, tag=5)
    comm.barrier()
    kinds = [(each.kind, each.num_bytes, each.ranks) for each in journal.operations]
    everyone = tuple(range(8))
    assert kinds == [
        ("all_gather", 256, everyone),
        ("reduce_scatter", 256, everyone),
        ("all_reduce", 6, (2, 6)),
        ("send", 32, (2, 3)),
        ("barrier", 0, everyone),
    ]
    assert journal.waits == [2, 0, 4]
    assert journal.operations[0].lane == journal.operations[1].lane != journal.operations[2].lane


def test_numbers_are_what_equal_ranks_would_give() -> None:
    comm = DryWorld(3).rank(1)
    number = torch.tensor([2.0])
    comm.all_reduce(number).wait()
    assert number.item() == 6.0
    comm.all_reduce(number, "max")
    comm.all_reduce(number, "avg")
    assert number.item() == 6.0
    gathered, piece = torch.empty(6), torch.tensor([1.0, 2.0])
    comm.all_gather(gathered, piece)
    assert gathered.tolist() == [1.0, 2.0] * 3
    comm.reduce_scatter(piece, gathered)
    assert piece.tolist() == [3.0, 6.0]
    assert gather_objects(comm, {"rank": "alike"}) == [{"rank": "alike"}] * 3
    assert broadcast_object(comm, "mine", source=1) == "mine"


def test_later_ranks_hear_what_earlier_ones_told() -> None:
    world = DryWorld(4)
    first, second = world.rank(0), world.rank(2)
    assert broadcast_object(first, ("costs", 7)) == ("costs", 7)
    assert broadcast_object(second, None) == ("costs", 7)
    send_object(first, "shapes", to=2, tag=9)
    assert receive_object(second, 0, tag=9) == "shapes"


def test_what_nobody_has_sent_is_as_what_this_rank_sent_last() -> None:
    comm = DryWorld(2).rank(0)
    send_object(comm, "as this", to=1, tag=1)
    assert receive_object(comm, 1, tag=2) == "as this"


def test_a_message_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rank 1 of a dry run waits for what rank 0 tells it"):
        receive_object(DryWorld(2).rank(1), 0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_beyond_the_world_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="its ranks are 0 to 3"):
        DryWorld(4).rank(rank)


def test_a_world_of_none_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        DryWorld(0)


def test_pieces_must_fit() -> None:
    comm = DryWorld(4).rank(0)
    with pytest.raises(UsageError, match="4 times the piece"):
        comm.all_gather(torch.empty(9, device="meta"), torch.empty(2, device="meta"))
