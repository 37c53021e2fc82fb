"""The links of a pipeline: trees arrive as they were sent, and what cannot be sent or changes its shape is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.groups import tensors_in
from paceline.engines.stages.links import Links, TensorShape, describe, hand_over, map_tensors, shape_key
from paceline.errors import RankFailedError

TREE = {"a": (torch.arange(3.0, requires_grad=True), torch.arange(2)), "b": [1, "x", None], "c": 0.5}


def test_a_tree_arrives_as_it_was_sent() -> None:
    def work(comm: Communicator) -> Any:
        links = Links(comm, (0, 1))
        for factor in (1.0, 2.0):  # described once
            sent = map_tensors(
                lambda tensor, factor=factor: tensor * factor if tensor.is_floating_point() else tensor, TREE
            )
            if comm.rank == 0:
                for each in links.send_outputs(1, "key", sent):
                    each.wait()
            else:
                assert links.knows(1, "key") == (factor == 2.0)
                found = links.post_inputs(1, "key").take()
        return found if comm.rank else None

    found = run_virtual(work, 2)[1]
    torch.testing.assert_close(found["a"][0].detach(), torch.arange(3.0) * 2)
    assert found["a"][0].is_leaf
    assert [tensor.requires_grad for tensor in tensors_in(found)] == [True, False]
    assert (found["b"], found["c"]) == ([1, "x", None], 0.5)


def test_gradients_come_back_to_the_tensors_that_have_them() -> None:
    def work(comm: Communicator) -> Any:
        links = Links(comm, (0, 1))
        if comm.rank == 0:
            return links.post_gradients(0, [torch.zeros(3)]).take()
        for each in links.send_gradients(1, [torch.full((3,), 4.0)]):
            each.wait()
        return None

    torch.testing.assert_close(run_virtual(work, 2)[0], [torch.full((3,), 4.0)])


def test_a_channel_opens_from_both_ends() -> None:
    def work(comm: Communicator) -> None:
        links = Links(comm, (0, 1))
        links._channels["forward", 1].open(is_sender=comm.rank == 0)
        links._channels["backward", 1].open(is_sender=comm.rank == 1)

    assert run_virtual(work, 2) == [None, None]


def test_another_shape_for_the_same_microbatch_is_refused() -> None:
    def work(comm: Communicator) -> None:
        links = Links(comm, (0, 1))
        if comm.rank == 0:
            works = links.send_outputs(1, "key", torch.zeros(2))
            works += links.send_outputs(1, "key", torch.zeros(3))

    with pytest.raises(RankFailedError, match="tensors of one shape: the next stage waits for those"):
        run_virtual(work, 2)


def test_shapes_keys_and_cuts() -> None:
    assert describe(torch.zeros(2, 3), 0) == TensorShape((2, 3), torch.float32, requires_grad=False)
    assert shape_key((torch.zeros(2), 1), "training") == shape_key((torch.ones(2), 2), "training")
    assert shape_key((torch.zeros(2), 1), "training") != shape_key((torch.zeros(3), 1), "training")
    assert shape_key((torch.zeros(2), 1), "training") != shape_key((torch.zeros(2), 1), "evaluation")
    cut = hand_over((TREE["a"][0] * 2, 3))  # type: ignore[index]
    assert cut[0].is_leaf
    assert cut[0].requires_grad
    assert cut[1] == 3
