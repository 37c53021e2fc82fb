"""``parallel.strategy: auto`` with models of the user's own code, and the same answer on every rank."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from own_model import Own
from torch import nn

from paceline.cluster.detect import Machine
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError, RankFailedError, UsageError
from paceline.plan.plan import RunMachine
from paceline.search.automatic import ENOUGH
from paceline.train.assemble import build_trainer
from paceline.train.resolve import measure_config, resolve_strategy, resolve_together
from paceline.units import MIB, format_seconds


@pytest.fixture
def own_module() -> Iterator[str]:
    module = types.ModuleType("own_models_of_this_test")
    module.make = Own  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield f"{module.__name__}:make"
    del sys.modules[module.__name__]


def make_config(factory: str, backend: str = "virtual", **train: Any) -> Config:
    """Virtual ranks are not priced: the order of candidates decides."""
    arguments = {"curious": train.pop("curious", False)}
    return config_from_dict(
        {
            "model": {"kind": "factory", "factory": factory, "args": arguments},
            "data": {"kind": "digits"},
            "parallel": {"strategy": "auto"},
            "comm": {"backend": backend},
            "train": {"global_batch": 8, **train},
        }
    )


def test_a_model_of_the_users_own_is_measured(own_module: str) -> None:
    facts = measure_config(make_config(own_module), "cpu")
    assert facts.parameters == sum(parameter.numel() for parameter in Own().parameters())
    assert [block.parameters for block in facts.blocks] == [1024 * 1024 + 1024] * 4
    row = 4 * 1024
    # A block saves its input; the ReLUs after the blocks save theirs outside, which are the next block's inputs.
    assert [block.saved_bytes for block in facts.blocks] == [row, 0, 0, 0]
    assert [block.input_bytes for block in facts.blocks] == [row] * 4
    lower = measure_config(make_config(own_module, precision="bf16_master"), "cpu")
    assert lower.blocks[0].saved_bytes == row / 2
    assert measure_config(make_config(own_module, precision="bf16"), "cpu").blocks[1].cast_bytes == 2 * 1024 * 1024


def room(mib: int, ranks: int = 4) -> RunMachine:
    return RunMachine(device="cpu", device_bytes=mib * MIB, host_bytes=ranks * mib * MIB, ranks=ranks, node_ranks=ranks)


def test_less_memory_takes_more_sharing(own_module: str) -> None:
    config = make_config(own_module)
    chosen = [resolve_strategy(config, room(mib))[0].parallel.strategy for mib in (600, 470, 445, 432)]
    assert chosen == ["ddp", "zero1", "zero2", "fsdp"]
    with pytest.raises(ConfigError, match="nothing fits"):
        resolve_strategy(config, room(380))
    assert "not by time: virtual ranks take turns" in resolve_strategy(config, room(600))[1].reason()


def test_of_what_fits_the_fastest_is_taken(own_module: str) -> None:
    machine = Machine(processor="any", cores=4, memory_bytes=16e9)
    config = make_config(own_module, backend="gloo")
    resolved, choice = resolve_strategy(config, room(600), machine)
    assert (resolved, choice) == resolve_strategy(config, room(600), machine)
    seconds = {each.label: each.seconds for each in choice.ladder}
    assert not any(value is None for value in seconds.values())
    fastest = min(value for value in seconds.values() if value is not None)
    assert choice.chosen.seconds is not None
    assert choice.chosen.seconds * ENOUGH <= fastest
    assert resolved.parallel.strategy == choice.chosen.layout.strategy
    assert f"predicted {format_seconds(choice.chosen.seconds)} a step on 4x" in choice.reason()
    # What does not fit is not taken, however fast it would be.
    _, smaller = resolve_strategy(config, room(432), machine)
    assert smaller.chosen.layout.strategy == "fsdp"
    assert {each.layout.strategy for each in smaller.ladder if each.seconds is not None} == {"fsdp"}


def test_an_open_microbatch_is_timed_with_what_has_room(own_module: str) -> None:
    machine = Machine(processor="any", cores=4, memory_bytes=16e9)
    config = make_config(own_module, backend="gloo", microbatch="auto", global_batch=256)
    open_one = resolve_strategy(config, room(600), machine)[1].chosen
    single = resolve_strategy(
        make_config(own_module, backend="gloo", microbatch=1, accumulate=64, global_batch=256), room(600), machine
    )[1].chosen
    assert open_one.seconds is not None
    assert single.seconds is not None
    assert open_one.seconds < single.seconds


def test_several_hosts_are_not_priced(own_module: str) -> None:
    machine = Machine(processor="any", cores=4, memory_bytes=16e9)
    two = dataclasses.replace(room(600), node_ranks=2)
    choice = resolve_strategy(make_config(own_module, backend="gloo"), two, machine)[1]
    assert choice.chosen.layout.strategy == "ddp"
    assert "the network between 2 hosts is not known" in choice.reason()
    assert choice.to_json()["untimed"]


def test_a_model_that_looks_at_values_cannot_be_measured(own_module: str) -> None:
    told = r"cannot measure the model: .*, at \w+\.py:\d+ in forward.*\n.*\n  set parallel.strategy yourself"
    with pytest.raises(UsageError, match=told):
        measure_config(make_config(own_module, curious=True), "cpu")


def test_a_model_that_its_data_do_not_fit_is_told_so_and_torch_prints_nothing(
    own_module: str, logged: list[logging.LogRecord]
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(63, 4))

    with pytest.raises(UsageError) as caught:
        measure_config(make_config(own_module), "cpu", make_model=make, asked="a plan")
    text = str(caught.value)
    assert text.startswith("a plan cannot measure the model: RuntimeError: ")
    assert re.search(r"where 0 is Linear\(in_features=63, .*; test_resolve.py:\d+ makes the model\n", text)
    assert "independent of values" not in text
    assert text.endswith("mend the model, or take the data that it is made for")
    assert not [each for each in logged if each.levelno >= logging.ERROR]
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def decide(comm: Communicator, config: Config) -> tuple[str, str]:
    resolved, choice = resolve_together(config, comm)
    return resolved.parallel.strategy, choice.chosen.label


def test_ranks_decide_together(own_module: str) -> None:
    found = run_virtual(functools.partial(decide, config=make_config(own_module)), ranks=2)
    assert found == [("ddp", "ddp")] * 2


def test_all_ranks_hear_of_a_problem(own_module: str) -> None:
    config = make_config(own_module, curious=True)
    with pytest.raises(RankFailedError) as caught:
        run_virtual(functools.partial(decide, config=config), ranks=2)
    assert isinstance(caught.value.error, UsageError)


def test_an_open_mesh_is_decided_and_trained() -> None:
    """One sample a step cannot be shared: both ranks hold parts of the model."""
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 16, "context": 8},
            "data": {"kind": "synthetic_tokens", "context": 8, "vocab_size": 32, "samples": 16},
            "parallel": {"strategy": "auto", "device": "cpu"},
            "train": {"global_batch": 1, "steps": 1},
        }
    )

    def train(comm: Communicator) -> tuple[dict[str, int], bool]:
        trainer = build_trainer(config, comm)
        trainer.run()
        return trainer.parts.plan.layout.axes, trainer.parts.plan.memory is not None

    assert run_virtual(train, ranks=2) == [({"replicate": 1, "tensor": 2}, True)] * 2
    decided, choice = resolve_strategy(config, room(600, ranks=2))
    parallel = decided.parallel
    assert (parallel.strategy, parallel.pipeline, parallel.tensor) == ("ddp", 1, 2)
    assert choice.left_out[0].startswith("data 2: parallel.ranks = 2 is more than train.global_batch = 1")


def test_a_model_of_the_users_own_stays_whole(own_module: str) -> None:
    config = make_config(own_module)
    decided, choice = resolve_strategy(config, room(470))
    assert (decided.parallel.strategy, decided.parallel.pipeline, decided.parallel.tensor) == ("zero1", 1, 1)
    assert "only the model's own code knows its layers" in choice.reason()
