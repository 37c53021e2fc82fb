"""What a rehearsal says that memory is for, and which device its virtual ranks are on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import config_from_dict
from paceline.engines.flat.shard import HostShard
from paceline.errors import UsageError
from paceline.rehearse.dryrun.held import HOST, HeldMemory
from paceline.rehearse.dryrun.record import claim_states
from paceline.rehearse.simulate.run import prepare


class Group:
    """A flat group of an optimizer on the host: its slice comes to the device when its memory does."""

    comes_and_goes = True

    def __init__(self) -> None:
        self.full, self.master = torch.empty(8, device="meta"), torch.empty(4, device="meta")
        self.host = HostShard(torch.empty(4, device="meta"), torch.float32, stays_on_device=True)
        self.gradients = SimpleNamespace(slice=torch.empty(4, device="meta"))
        self.calls: list[str] = []

    def allocate(self) -> None:
        self.calls.append("allocate")
        self.full.untyped_storage().resize_(32)
        self.host.copy_to(self.full[:4], may_have_changed=True)

    def free(self) -> None:
        self.calls.append("free")
        self.full.untyped_storage().resize_(0)


def is_claimed(memory: HeldMemory, tensor: torch.Tensor) -> bool:
    """Who says first what a tensor is for is right."""
    memory.claim([tensor], HOST)
    return not memory.is_on_host(tensor)


def test_a_slice_that_comes_later_is_claimed_when_it_comes() -> None:
    memory, group = HeldMemory(), Group()
    module = nn.Linear(2, 2, device="meta")
    module.register_buffer("count", torch.empty(3, device="meta"))
    average, held, state = (torch.empty(2, device="meta") for _ in range(3))
    parameter = module.weight
    parts: Any = SimpleNamespace(
        engine=SimpleNamespace(flat_groups=[group], parameters=module.parameters, module=module),
        average=SimpleNamespace(pairs=lambda: [(parameter, average)]),
        compressor=SimpleNamespace(held=lambda: [held]),
        optimizer=SimpleNamespace(state={parameter: {"exp_avg": state, "step": 3}}),
    )
    claim_states(memory, parts)
    for tensor in (group.full, group.master, group.gradients.slice, *module.parameters(), *module.buffers()):
        assert is_claimed(memory, tensor)
    for tensor in (average, held, state):
        assert is_claimed(memory, tensor)
    assert not is_claimed(memory, torch.empty(1, device="meta"))
    assert group.host.resident is None
    for _ in range(2):  # another one after each update
        group.allocate()
        assert group.host.resident is not None
        assert is_claimed(memory, group.host.resident)
        group.free()
    assert group.calls == ["allocate", "free"] * 2
    claim_states(memory, parts)  # a second time changes nothing
    group.free()
    assert group.calls == ["allocate", "free", "allocate", "free", "free"]


def test_states_of_parameters_on_the_host_are_the_host_s() -> None:
    memory, parameter = HeldMemory(), torch.empty(2, device="meta")
    average, state = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    memory.claim([parameter], HOST)
    parts: Any = SimpleNamespace(
        engine=SimpleNamespace(flat_groups=[], parameters=list, module=nn.Module()),
        average=SimpleNamespace(pairs=lambda: [(parameter, average)]),
        compressor=None,
        optimizer=SimpleNamespace(state={parameter: {"exp_avg": state}}),
    )
    claim_states(memory, parts)
    assert (memory.is_on_host(average), memory.is_on_host(state)) == (True, True)


def config_of(**parallel: Any) -> Any:
    values: dict[str, Any] = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
    return config_from_dict({**values, "train": {"steps": 1, "global_batch": 24}, "parallel": parallel})


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [
        ({}, {}, (4, "cpu")),
        ({"device": "auto", "ranks": 3}, {}, (3, "cpu")),
        ({"device": "cpu", "ranks": 3}, {"ranks": 2}, (2, "cpu")),
        ({"device": "cuda"}, {"device": "cpu", "ranks": 1}, (1, "cpu")),
        ({"ranks": "auto"}, {}, (4, "cpu")),
    ],
)
def test_virtual_ranks_are_as_many_and_where_they_are_asked_for(
    asked: dict[str, Any], given: dict[str, Any], expected: tuple[int, str]
) -> None:
    found = prepare(config_of(**asked), **given)
    assert (found.parallel.ranks, found.parallel.device, found.comm.backend) == (*expected, "virtual")


@pytest.mark.parametrize(
    ("asked", "given", "words"),
    [
        ({}, {"ranks": 0}, "0 ranks\n  a run has one at least"),
        ({}, {"device": "tpu"}, "device = tpu\n  virtual ranks share a CPU, or one GPU"),
        ({"device": "cuda"}, {}, "device = cuda, and there is no CUDA device here"),
        ({}, {"device": "cuda"}, "device = cuda, and there is no CUDA device here"),
    ],
)
def test_what_virtual_ranks_cannot_be_on_is_refused(
    asked: dict[str, Any], given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError) as told:
        prepare(config_of(**asked), **given)
    assert str(told.value).startswith(words)
