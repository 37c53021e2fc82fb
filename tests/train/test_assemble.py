"""From a config to a trainer: every strategy trains the same model on the same samples, and options arrive."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import save_now

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.engines.ddp import DataParallel
from paceline.engines.fsdp import FullySharded
from paceline.plan.plan import Plan, RunMachine
from paceline.search.request import make_plan
from paceline.train.assemble import build_trainer, build_workload
from paceline.train.master_adamw import MasterAdamW
from paceline.train.trainer import NoteHook, Trainer

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 3, "heads": 2, "width": 16, "context": 8},
    "data": {"kind": "synthetic_tokens", "samples": 64, "context": 8, "vocab_size": 16},
    "optim": {"lr": 0.01, "clip_norm": 0.5},
}


def train(comm: Communicator, values: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Plan]:
    trainer = build_trainer(config_from_dict(values), comm)
    trainer.run()
    return trainer.parts.engine.full_state_dict(), trainer.parts.plan


def run(ranks: int, parallel: dict[str, Any], **train_options: Any) -> tuple[dict[str, torch.Tensor], Plan]:
    options = {"steps": 2, "global_batch": 8, "dtype": "float64", **train_options}
    memory = options.pop("memory", {})
    values = {**GPT, "parallel": parallel, "memory": memory, "train": options}
    return run_virtual(functools.partial(train, values=values), ranks=ranks)[0]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return run(1, {"strategy": "ddp"})[0]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("parallel", "options", "axes"),
    [
        ({"strategy": "zero1"}, {}, {"replicate": 1, "shard": 4}),
        ({"strategy": "zero2"}, {"microbatch": 1}, {"replicate": 1, "shard": 4}),
        ({"strategy": "zero3", "prefetch": 2}, {}, {"replicate": 1, "shard": 4}),
        ({"strategy": "fsdp", "reshard_after_forward": 2, "units": ["layers.0", "layers.2"]}, {}, None),
        ({"strategy": "fsdp", "unit_mb": 0.01}, {"memory": {"checkpoint_activations": "full"}}, None),
        ({"strategy": "hybrid", "shard_ranks": 2}, {"microbatch": 1}, {"replicate": 2, "shard": 2}),
        ({"strategy": "auto"}, {"microbatch": "auto"}, {"replicate": 4}),
        ({"strategy": "hybrid", "node_ranks": 2}, {}, {"replicate": 2, "shard": 2}),
        pytest.param(  # moves nothing on a CPU
            {"strategy": "zero1"}, {"memory": {"offload": ["optimizer"]}}, None, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_strategies_train_the_same(
    expected: dict[str, torch.Tensor], parallel: dict[str, Any], options: dict[str, Any], axes: dict[str, int] | None
) -> None:
    found, plan = run(4, parallel, **options)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)
    assert axes is None or plan.layout.axes == axes
    assert plan.memory is not None
    assert plan.memory.device_bytes > 0


ALONE = [
    {"strategy": "zero1"},
    {"strategy": "zero2"},
    {"strategy": "zero3", "prefetch": 2, "units": ["layers.1"], "reshard_after_forward": False},
    {"strategy": "hybrid", "shard_ranks": 1},
]


@pytest.mark.parametrize("parallel", ALONE, ids=lambda each: str(each["strategy"]))
def test_one_rank_that_is_asked_to_shard_computes_the_bits_of_ddp(
    expected: dict[str, torch.Tensor], parallel: dict[str, Any]
) -> None:
    found, plan = run(1, parallel)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert plan.to_json()["strategy"] == "ddp"
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("parallel", [{"strategy": "ddp"}, *ALONE], ids=lambda each: str(each["strategy"]))
def test_one_gpu_that_is_asked_to_shard_has_the_engine_of_ddp(parallel: dict[str, Any]) -> None:
    """The optimizer is the kernel over masters, and the model is compiled as a whole."""
    values = {**GPT, "model": {**GPT["model"], "compile": True}, "parallel": parallel}
    parts = build(SoloCommunicator(torch.device("cuda")), values).parts
    assert isinstance(parts.engine, DataParallel)
    assert isinstance(parts.optimizer, MasterAdamW)
    assert (parts.plan.layout.compile, parts.plan.layout.precision) == ("whole", "bf16_master")


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_what_one_rank_saved_in_shards_goes_on_without_them(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions did, and as a rank that offloads does."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    config = config_from_dict({**GPT, "parallel": {"strategy": strategy}, "train": {"steps": 4, "global_batch": 8}})
    comm = SoloCommunicator(torch.device("cpu"))
    plan = make_plan(config, RunMachine(device="cpu", ranks=1))
    layout = dataclasses.replace(plan.layout, strategy=strategy)
    sharded = build_trainer(config, comm, plan=dataclasses.replace(plan, layout=layout))
    assert not isinstance(sharded.parts.engine, DataParallel)
    steps = sharded.steps()
    for _ in range(2):
        next(steps)
    checkpoint = save_now(sharded, tmp_path)
    second = build_trainer(config, comm)
    assert isinstance(second.parts.engine, DataParallel)
    second.load_state(checkpoint)
    for trainer in (sharded, second):
        list(trainer.steps())
    ours, theirs = (trainer.parts.engine.full_state_dict() for trainer in (second, sharded))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)


def build(comm: Communicator, values: dict[str, Any]) -> Trainer:
    return build_trainer(config_from_dict(values), comm)


def first_state(comm: Communicator, strategy: str) -> dict[str, torch.Tensor]:
    trainer = build(comm, {**GPT, "parallel": {"strategy": strategy}})
    return trainer.parts.engine.full_state_dict()


def test_a_model_that_no_rank_holds_whole_starts_with_the_same_values() -> None:
    whole = run_virtual(functools.partial(first_state, strategy="ddp"), ranks=2)[0]
    sharded = run_virtual(functools.partial(first_state, strategy="fsdp"), ranks=2)[0]
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_it_is_built_without_memory() -> None:
    fsdp = build_workload(config_from_dict({**GPT, "parallel": {"strategy": "fsdp"}})).model
    assert all(parameter.is_meta for parameter in fsdp.parameters())
    assert not any(parameter.is_meta for parameter in build_workload(config_from_dict(GPT)).model.parameters())


def rates(comm: Communicator, values: dict[str, Any]) -> float:
    trainer = build(comm, values)
    next(trainer.steps())
    return float(trainer.parts.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_grows_with_the_global_batch(rule: str, factor: float) -> None:
    optim = {"lr": 0.01, "lr_scaling": rule, **({} if rule == "none" else {"lr_batch": 8})}
    values = {**GPT, "optim": optim, "train": {"steps": 1, "global_batch": 32}}
    for ranks in (1, 2):
        found = run_virtual(functools.partial(rates, values=values), ranks=ranks)
        assert found == pytest.approx([0.01 * factor] * ranks)


def test_a_warmup_longer_than_the_epochs_is_shortened_and_told() -> None:
    values = {**GPT, "optim": {"schedule": {"warmup": 9}}, "train": {"epochs": 1, "global_batch": 8}}
    (trainer,) = run_virtual(functools.partial(build, values=values), ranks=1)
    assert trainer.parts.schedule.warmup == 0.0
    told = [hook.detail["note"] for hook in trainer.hooks if isinstance(hook, NoteHook)]
    assert told == ["optim.schedule.warmup = 9 does not fit into train.epochs = 1 = 7 steps: it is 0 here"]


def test_policies_arrive() -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        values = {
            **GPT,
            "parallel": {"strategy": "fsdp", "prefetch": 2, "reshard_after_forward": False},
            "train": {"precision": "fp32", "max_bad_steps": 3, "loss_scale": 65536.0},
        }
        trainer = build(comm, values)
        engine = trainer.parts.engine
        assert isinstance(engine, FullySharded)
        return engine.layout.prefetch, engine.layout.reshard_after_forward, trainer.parts.policy.max_bad_steps

    assert run_virtual(work, ranks=2) == [(2, False, 3)] * 2


def test_evaluation_takes_no_more_at_once_than_training() -> None:
    def work(comm: Communicator) -> list[int]:
        values = {**GPT, "train": {"global_batch": 8, "microbatch": 1}}
        loader = build(comm, values).parts.eval_loader
        assert loader is not None
        return loader.local_samples()

    assert set(run_virtual(work, ranks=2)[0]) <= {0, 1}
