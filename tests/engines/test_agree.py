"""What replicas agree on before they train: the same model, by name, shape and dtype, and then the same values."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines import groups as agree
from paceline.engines.groups import broadcast_tensors, check_same_model, tensors_in
from paceline.errors import RankFailedError, UsageError

Pair = namedtuple("Pair", ["first", "second"])


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def another_name() -> nn.Module:
    return nn.Sequential(OrderedDict([("0", nn.Linear(3, 4)), ("norm", nn.BatchNorm1d(4))]))


def another_buffer() -> nn.Module:
    model = plain()
    model.register_buffer("seen", torch.zeros(2))
    return model


def frozen() -> nn.Module:
    model = plain()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    return model


def test_replicas_of_one_model_agree_whatever_their_values() -> None:
    def work(comm: VirtualCommunicator) -> dict[str, int]:
        torch.manual_seed(comm.rank)
        wrapped = TracedCommunicator(comm, Trace(comm.device))
        check_same_model(plain(), wrapped)
        return dict(wrapped.trace.num_operations)

    assert run_virtual(work, 3) == [{"all_gather": 2}] * 3  # one digest a rank: nothing larger travels


@pytest.mark.parametrize(
    ("other", "ours", "theirs"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), "0.weight (4, 3)", "0.weight (5, 3)"),
        (lambda: plain().double(), "0.weight (4, 3) torch.float32", "0.weight (4, 3) torch.float64"),
        (lambda: nn.Sequential(nn.Linear(3, 4)), "1.weight (4,)", "nothing more"),
        (lambda: nn.Sequential(*plain(), nn.Linear(4, 1)), "1.running_mean (4,)", "2.weight (1, 4)"),
        (another_name, "1.weight (4,)", "norm.weight (4,)"),
        (frozen, "0.bias (4,) torch.float32 trainable=True", "0.bias (4,) torch.float32 trainable=False"),
        (another_buffer, "1.running_mean (4,)", "seen (2,)"),
    ],
    ids=["shape", "dtype", "fewer", "more", "name", "frozen", "buffer"],
)
def test_the_first_difference_is_named_on_every_rank(other: Callable[[], nn.Module], ours: str, theirs: str) -> None:
    def work(comm: VirtualCommunicator) -> str:
        with pytest.raises(UsageError) as caught:
            check_same_model(other() if comm.rank == 2 else plain(), comm)
        return str(caught.value)

    messages = run_virtual(work, 3)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"rank 0 and rank 2 built different models: rank 0 has {ours}")
    assert f"rank 2 has {theirs}" in messages[0]
    assert "build it from the same config on all ranks" in messages[0]


def test_a_world_of_one_agrees_with_itself() -> None:
    wrapped = TracedCommunicator(SoloCommunicator(torch.device("cpu")), Trace(torch.device("cpu")))
    check_same_model(plain(), wrapped)
    assert wrapped.trace.num_operations == {}


def tensors_of(rank: int) -> list[torch.Tensor]:
    """Small and large, of several dtypes, shapes and strides; none is the same on two ranks."""
    base = 10.0 * rank
    return [
        torch.full((3,), base + 1),
        torch.full((2, 2), base + 2, dtype=torch.bfloat16),
        torch.tensor(rank + 3),
        torch.empty(0),
        torch.tensor([rank == 0, rank == 1]),
        (torch.arange(6.0) + base).view(2, 3).t(),
        torch.full((64,), base + 4),
        (torch.arange(64.0) + base).view(8, 8).t(),
        nn.Parameter(torch.full((5,), base + 5)),
    ]


@pytest.mark.parametrize("source", [0, 2])
def test_tensors_become_those_of_the_source_in_place(monkeypatch: pytest.MonkeyPatch, source: int) -> None:
    monkeypatch.setattr(agree, "_SMALL_BYTES", 100)  # those of 64 elements are large

    def work(comm: VirtualCommunicator) -> list[torch.Tensor]:
        tensors = tensors_of(comm.rank)
        before = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
        broadcast_tensors(comm, tensors, source)
        assert [(tensor.data_ptr(), tensor.stride()) for tensor in tensors] == before
        return tensors

    for tensors in run_virtual(work, 3):
        for ours, expected in zip(tensors, tensors_of(source), strict=True):
            assert ours.dtype == expected.dtype
            assert torch.equal(ours, expected)


def test_small_tensors_travel_together_by_dtype_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "_SMALL_BYTES", 100)

    def work(comm: VirtualCommunicator) -> list[int]:
        wrapped = TracedCommunicator(comm, Trace(comm.device, keep=True))
        broadcast_tensors(wrapped, tensors_of(comm.rank))
        return sorted(operation.num_bytes for operation in wrapped.trace.operations)

    together = (3 + 6 + 64 + 5) * 4  # float32 ones, the large one of other strides among them
    assert run_virtual(work, 2) == [sorted([64 * 4, together, 4 * 2, 8, 2])] * 2


def test_nothing_to_tell_is_no_collective() -> None:
    def work(comm: VirtualCommunicator) -> int:
        wrapped = TracedCommunicator(comm, Trace(comm.device))
        broadcast_tensors(wrapped, [])
        return wrapped.trace.num_operations.total()

    assert run_virtual(work, 2) == [0, 0]


def test_lists_that_differ_between_ranks_are_told() -> None:
    def work(comm: VirtualCommunicator) -> None:
        broadcast_tensors(comm, [torch.ones(2 + comm.rank)])

    with pytest.raises(Exception, match="called different operations") as caught:
        run_virtual(work, 2)
    assert not isinstance(caught.value, RankFailedError)


@dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None
    losses: list[torch.Tensor] = field(default_factory=list)


@pytest.mark.parametrize(
    "shape",
    [
        lambda a, b, c: (a, [b, (c,)]),
        lambda a, b, c: {"logits": a, "hidden": [b, c]},
        lambda a, b, c: Output(a, b, [c]),
        lambda a, b, c: {"outputs": [Output(a, Output(b)), c]},
        lambda a, b, c: Pair(a, Pair(b, c)),
        lambda a, b, c: OrderedDict([("x", (a, None, "text")), ("y", 3), ("z", (b, c))]),
    ],
)
def test_tensors_are_found_in_any_output(shape: Callable[..., Any]) -> None:
    given = [torch.tensor(float(i)) for i in range(3)]
    found = list(tensors_in(shape(*given)))
    assert len(found) == 3
    assert all(ours is theirs for ours, theirs in zip(found, given, strict=True))


@pytest.mark.parametrize("output", [None, 3, "text", [], {}, Output])
def test_an_output_without_tensors_has_none(output: Any) -> None:
    assert list(tensors_in(output)) == []


def test_a_tensor_alone_is_an_output() -> None:
    tensor = torch.ones(2)
    assert next(tensors_in(tensor)) is tensor
