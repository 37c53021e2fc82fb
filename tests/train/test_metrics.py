"""Metrics and hooks of one's own, perplexity, early stopping, best checkpoints and groups of parameters in a run."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.checkpoint.read import open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, config_from_dict
from paceline.config.schema import EarlyStopConfig
from paceline.errors import ConfigError, RankFailedError, UsageError
from paceline.train.assemble import build_trainer
from paceline.train.evaluate import EarlyStop, load_hooks
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import EvaluateHook, Every, Trainer

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 8, "context": 4},
    "data": {"kind": "synthetic_tokens", "samples": 60, "vocab_size": 11, "context": 4, "eval_fraction": 0.2},
}
MLP: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden_dim": 8},
    "data": {"kind": "synthetic_classification", "samples": 64, "features": 6, "classes": 3, "eval_fraction": 0.2},
}


class Counter:
    """A hook with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, *_: object) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.fixture(autouse=True)
def own_module() -> Iterator[ModuleType]:
    module = ModuleType("own_parts")

    def right(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return (model(inputs).argmax(-1) == targets).sum(), targets.numel()

    def worse(*_: object) -> tuple[float, float]:
        module.level += 1.0  # type: ignore[attr-defined]
        return module.level, 1.0  # type: ignore[attr-defined]

    vars(module).update(right=right, mean=lambda *_: 0.5, worse=worse, level=0.0, Counter=Counter)
    sys.modules["own_parts"] = module
    yield module
    del sys.modules["own_parts"]


def run(comm: Communicator, values: dict[str, Any], folder: Path | None = None, resume: Path | None = None) -> Trainer:
    config = config_from_dict({**values, "parallel": {**values.get("parallel", {}), "ranks": comm.size}})
    own = load_hooks(config.train.hooks)
    hooks: list[Any] = [Every(config.train.eval_every, EvaluateHook()), *own.values()]
    if folder is not None:
        hooks.append(Saver(folder, config.checkpoint))
    trainer = build_trainer(config, comm, hooks=hooks)
    trainer.own_hooks = own
    if resume is not None:
        trainer.load_state(open_checkpoint(resume))
    trainer.run()
    return trainer


@pytest.mark.parametrize("parallel", [{}, {"strategy": "fsdp"}, {"pipeline": 2}], ids=str)
def test_metrics_of_ones_own_are_exact_and_language_models_have_a_perplexity(parallel: dict[str, Any]) -> None:
    values = {
        **GPT,
        "parallel": parallel,
        "train": {"steps": 2, "global_batch": 8, "metrics": {"same": "own_parts:right"}},
    }
    for trainer in run_virtual(functools.partial(run, values=values), 2):
        metrics = trainer.metrics
        assert metrics["eval_same"] == pytest.approx(metrics["eval_accuracy"])
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))


def test_a_metric_that_returns_a_mean_is_refused() -> None:
    values = {**MLP, "train": {"steps": 1, "metrics": {"mine": "own_parts:mean"}}}
    with pytest.raises(RankFailedError, match="mine returned float"):
        run_virtual(functools.partial(run, values=values), 1)


STOPPING: dict[str, Any] = {
    **MLP,
    "train": {
        "steps": 40,
        "global_batch": 16,
        "eval_every": 2,
        "metrics": {"worse": "own_parts:worse"},
        "hooks": ["own_parts:Counter"],
        "early_stop": {"patience": 3, "metric": "eval_worse", "mode": "min"},
    },
    "checkpoint": {"keep_best": 1, "keep": 1, "every_steps": 6, "best_metric": "eval_worse", "best_mode": "min"},
}


def test_a_run_that_does_not_get_better_ends_and_a_resume_continues_the_count(
    tmp_path: Path, own_module: ModuleType
) -> None:
    (trainer,) = run_virtual(functools.partial(run, values=STOPPING, folder=tmp_path), 1)
    assert trainer.step == 8  # the first evaluation is the best; three are not
    assert trainer.end_reason.startswith("stopped early: eval_worse has not become better than")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000008"]
    assert open_checkpoint(tmp_path / "step-00000008").values["best"]["step"] == 2
    assert trainer.own_hooks["own_parts:Counter"].seen == 8

    own_module.level = 0.0  # type: ignore[attr-defined]
    again = functools.partial(run, values=STOPPING, folder=tmp_path / "again")
    (short,) = run_virtual(functools.partial(again, values={**STOPPING, "train": {**STOPPING["train"], "steps": 6}}), 1)
    assert short.end_reason == ""
    (later,) = run_virtual(functools.partial(again, resume=tmp_path / "again" / "step-00000006"), 1)
    assert (later.step, later.early_stop.state_dict()) == (8, trainer.early_stop.state_dict())
    assert later.own_hooks["own_parts:Counter"].seen == 8
    (over,) = run_virtual(functools.partial(again, resume=tmp_path / "again" / "step-00000008"), 1)
    assert (over.step, over.end_reason != "") == (8, True)


@pytest.mark.parametrize(("mode", "values", "bad"), [("min", [3, 2, 2, 1.95], 2), ("max", [1, 2, 2, 2.05], 2)])
def test_better_means_by_more_than_min_delta(mode: Any, values: list[float], bad: int) -> None:
    stop = EarlyStop(EarlyStopConfig(patience=5, mode=mode, min_delta=0.1))
    for value in [*values, math.nan]:
        stop.note({"eval_loss": value})
    assert stop.num_bad == bad + 1
    with pytest.raises(UsageError, match="which this run does not evaluate"):
        stop.note({"step": 1, "eval_accuracy": 0.5})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"early_stop": {"patience": 2}}, r"patience = 2 without train\.eval_every"),
        ("checkpoint", {"keep_best": 1, "best_metric": "eval_f1"}, "best_metric = eval_f1 is not evaluated"),
        ("train", {"metrics": {"loss": "a:b"}}, "has the name of one that is there"),
    ],
)
def test_keys_that_nothing_could_obey_are_refused(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict({**MLP, section: values})


def test_checkpoints_come_by_epochs(tmp_path: Path) -> None:
    values = {**MLP, "train": {"epochs": 4, "global_batch": 16, "eval_every": "epoch"}}
    values["checkpoint"] = {"every_epochs": 2, "keep": 9, "at_end": False}
    (trainer,) = run_virtual(functools.partial(run, values=values, folder=tmp_path), 1)
    steps = trainer.parts.plan.steps_per_epoch
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n * steps:08d}" for n in (2, 4)]
    assert CheckpointConfig(every_epochs=2).every_epochs == 2


def grouped(comm: Communicator, parallel: dict[str, Any]) -> tuple[dict[str, bool], dict[str, Any], list[float]]:
    """Trains with groups; returns which tensors stayed as they were, all of them, and the rates of the groups."""
    groups = {"layers.0.*": {"lr": 0.002, "weight_decay": 0.3}, "layers.1.mlp.*": {"frozen": True}}
    values = {**GPT, "train": {"steps": 2, "global_batch": 8}, "optim": {"lr": 0.01, "groups": groups}}
    trainer = build_trainer(config_from_dict({**values, "parallel": {**parallel, "ranks": comm.size}}), comm)
    first = {name: value.clone() for name, value in trainer.parts.engine.full_state_dict().items()}
    trainer.run()
    last = trainer.parts.engine.full_state_dict()
    rates = sorted({group["lr"] for group in trainer.parts.optimizer.param_groups})
    return {name: torch.equal(value, last[name]) for name, value in first.items()}, last, rates


@functools.cache
def grouped_alone() -> tuple[dict[str, bool], dict[str, Any], list[float]]:
    return run_virtual(lambda comm: grouped(comm, {}), 1)[0]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "parallel",
    [{"strategy": "zero2"}, {"strategy": "fsdp"}, {"pipeline": 2}, {"strategy": "zero1"}, {"tensor": 2}],
    ids=str,
)
def test_groups_of_parameters_are_those_of_one_process(parallel: dict[str, Any]) -> None:
    kept, alone, rates = grouped_alone()
    assert all(is_same == name.startswith("layers.1.mlp.") for name, is_same in kept.items())
    assert rates == [0.002, 0.01]
    for same, values, _ in run_virtual(lambda comm: grouped(comm, parallel), 2):
        assert same == kept
        for name, value in values.items():
            assert torch.allclose(value, alone[name], atol=1e-5), name


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    values = {**MLP, "optim": {"groups": {"embedding.*": {"lr": 0.1}}}, "train": {"steps": 1}}
    with pytest.raises(RankFailedError, match=r"'embedding\.\*' fits no parameter(.|\n)*some names are"):
        run_virtual(functools.partial(run, values=values), 1)
