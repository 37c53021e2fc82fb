"""Compression at its limits: an element at the threshold, a piece that begins inside a row, a pass that is left."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.comm.base import BucketShape, Communicator
from paceline.comm.compress import Compressor
from paceline.comm.compress.policies import ExchangeContext, VectorPart, above_threshold, power_sgd
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.plan.layout import Compression
from paceline.shards import flat_layout


def exchange(policy: object, vector: torch.Tensor, comm: Communicator, context: ExchangeContext) -> torch.Tensor:
    rounds = policy(vector, context, comm)  # type: ignore[operator]
    try:
        while True:
            next(rounds).wait()
    except StopIteration as end:
        mean: torch.Tensor = end.value
        return mean


def test_an_element_at_the_threshold_is_sent() -> None:
    settings = Compression(policy="threshold", threshold=0.5, min_size=1)
    vector = torch.tensor([0.5, -0.5, 0.499, 2.0, -0.1])
    context = ExchangeContext(settings, (), 0, {}, {})
    mean = exchange(above_threshold, vector, SoloCommunicator(torch.device("cpu")), context)
    assert mean.tolist() == [0.5, -0.5, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(("lead", "size"), [(0, 12), (1, 11), (2, 7), (3, 6)])
def test_factors_of_a_piece_are_those_of_the_matrix_with_zeros_around_it(lead: int, size: int) -> None:
    rows, columns = 3, 4
    values = torch.randn(size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = torch.zeros(rows * columns, dtype=torch.float64)
    whole[lead : lead + size] = values
    settings = Compression(policy="powersgd", factor_rank=3, min_size=1)
    part = VectorPart(name="t", start=0, size=size, rows=rows, columns=columns, lead=lead)

    def work(comm: Communicator) -> torch.Tensor:
        return exchange(power_sgd, values.clone(), comm, ExchangeContext(settings, (part,), 0, {}, {}))

    for mean in run_virtual(work, 2):  # factors of full rank lose nothing
        torch.testing.assert_close(mean, whole[lead : lead + size])


def test_a_pass_that_was_left_leaves_nothing_in_the_next_one() -> None:
    settings = Compression(policy="topk", ratio=0.1, min_size=1)
    compressor, comm = Compressor(settings), SoloCommunicator(torch.device("cpu"))
    shape = BucketShape(names=("t",), layout=flat_layout([(8, 8)], align=4, tail=0), tail=0)
    (bucket,) = compressor.bind([shape])
    bucket.start(torch.full((64,), math.nan), comm).wait()
    compressor.abandon_pass()
    bucket.start(torch.linspace(1.0, 2.0, 64), comm).wait()
    compressor.end_pass()
    compressor.apply_ended_pass()
    assert compressor.step == 1
    assert compressor.residual_norm() > 0
