"""A trainer's state: what a checkpoint of a run holds, and how a trainer goes on from one.

tensors       parameters, buffers, optimizer state, residuals of compression, the average of parameters
values        loss scale, bad steps, roll-backs, rates, metrics, early stopping, hooks, consumed samples: the same on
              every rank
each rank's   random states
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.checkpoint.files import file_shards
from paceline.checkpoint.find import spots_in
from paceline.checkpoint.manifest import COMPRESSION, MODEL, Line, State, line_from, prefixed
from paceline.checkpoint.optimizer import load_optimizer, optimizer_shards
from paceline.checkpoint.read import Checkpoint, fill_model
from paceline.comm.compress import Compressor
from paceline.config.schema import EarlyStopConfig
from paceline.data.consumed import ConsumedIds
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.engines.engine import Engine
from paceline.errors import CheckpointError, MisfitError
from paceline.plan.plan import Plan
from paceline.records.meter import StepMeter
from paceline.train.ema import WeightAverage
from paceline.train.evaluate import EarlyStop, Metric
from paceline.train.flops import SampleCost
from paceline.train.graphed_step import GraphedStep
from paceline.train.loss import Loss
from paceline.train.optim import RateSchedule
from paceline.train.randomness import capture_random_states, restore_random_states, seed_everything
from paceline.train.scaler import make_scaler
from paceline.train.step import StepPolicy
from paceline.train.survive.bad_steps import BadSteps
from paceline.train.survive.retry import Retry


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """What a trainer is made of; each part is usable alone."""

    plan: Plan
    engine: Engine
    optimizer: torch.optim.Optimizer
    loader: TrainLoader
    eval_loader: EvalLoader | None
    loss: Loss
    schedule: RateSchedule
    policy: StepPolicy
    meter: StepMeter
    seed: int
    passes: Retry | None = None
    compressor: Compressor | None = None
    average: WeightAverage | None = None
    evaluates_average: bool = False
    graphs: GraphedStep | None = None  # None: every step is run kernel by kernel
    sample: SampleCost = SampleCost()  # noqa: RUF009 (frozen)
    files: Mapping[str, bytes] = field(default_factory=dict)  # of the model: see ``train/kept_files.py``
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    has_perplexity: bool = False
    early_stop: EarlyStopConfig = EarlyStopConfig()  # noqa: RUF009 (frozen)


class RunState:
    """What a trainer keeps from step to step: what a checkpoint holds and restores."""

    def __init__(self, parts: TrainerParts) -> None:
        self.parts = parts
        self.step = 0
        self.position = 0
        self.scaler = make_scaler(parts.engine.precision, parts.engine.device, parts.policy.loss_scale)
        self.bad_steps = BadSteps()
        self.consumed = ConsumedIds(parts.loader.order)
        self.metrics: dict[str, float] = {}  # of the last evaluation, with its step
        self.best: dict[str, Any] | None = None
        self.early_stop = EarlyStop(parts.early_stop)
        self.own_hooks: dict[str, Any] = {}  # of train.hooks; what has a state_dict() is saved
        self.num_roll_backs = 0
        self.rate_scale = 1.0
        self.line: Line | None = None  # of rank 0, which knows what was saved before

    def collect_state(self) -> State:
        """Returns this rank's part of the state, without a copy of any tensor. Nothing is sent."""
        parts, comm = self.parts, self.parts.engine.world
        held = list(parts.engine.shards())
        optimizer, found = optimizer_shards(parts.optimizer, held)
        shards = [*prefixed(MODEL, held), *optimizer, *file_shards(parts.files, comm.rank)]
        values: dict[str, Any] = {
            "bad_steps": self.bad_steps.state_dict(),
            "schedule": {"lr": [float(group["lr"]) for group in parts.optimizer.param_groups]},
            "consumed": self.consumed.state_dict(),
            "data": {"length": parts.plan.train_samples, "global_batch": parts.plan.batch.global_batch},
            "metrics": self.metrics if self.metrics.get("step") == self.step else {},
            "best": self.best,
        }
        if parts.early_stop.patience is not None:
            values["early_stop"] = self.early_stop.state_dict()
        if states := {name: hook.state_dict() for name, hook in self.own_hooks.items() if hasattr(hook, "state_dict")}:
            values["hooks"] = states
        if self.num_roll_backs:
            values["recovery"] = {"rate_scale": self.rate_scale, "num_roll_backs": self.num_roll_backs}
        if self.scaler is not None:
            values["scaler"] = self.scaler.state_dict()
        if parts.compressor is not None:
            shards += prefixed(COMPRESSION, parts.compressor.shards(comm))
            values["compression"] = {"step": parts.compressor.step}
        if parts.average is not None:
            shards += parts.average.shards()
        return State(
            step=self.step,
            position=self.position,
            shards=shards,
            values=values,
            own={"random": capture_random_states(comm.device)},
            found=found,
            line=self.line,
        )

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint: the same samples and learning rates at any number of ranks and strategy.

        With the same number of ranks the random states continue too; with another one each rank gets a fresh stream.
        """
        parts, comm, values = self.parts, self.parts.engine.world, checkpoint.values
        try:
            _load_model_and_optimizer(parts, checkpoint)
        except (MisfitError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {checkpoint.step} does not fit this model or optimizer\n  {error}\n"
                "  resume with the config that the run was started with"
            ) from error
        self.step, self.position = checkpoint.step, checkpoint.position
        if comm.rank == 0:
            self.line = line_from(checkpoint.manifest.spot, list(spots_in(checkpoint.path.parent).values()))
        if self.scaler is not None and "scaler" in values:
            self.scaler.load_state_dict(values["scaler"])
        if parts.compressor is not None and "compression" in values:
            parts.compressor.load(checkpoint, values["compression"]["step"], comm, COMPRESSION)
        if parts.average is not None:
            parts.average.load(checkpoint)
        recovery = values.get("recovery", {})
        self.rate_scale = recovery.get("rate_scale", 1.0)
        self.num_roll_backs = recovery.get("num_roll_backs", 0)
        self.early_stop.load_state_dict(values.get("early_stop", {}))
        for name, state in values.get("hooks", {}).items():
            if hasattr(self.own_hooks.get(name), "load_state_dict"):
                self.own_hooks[name].load_state_dict(state)
        if "bad_steps" in values:
            self.bad_steps.load_state_dict(values["bad_steps"])
        if "consumed" in values:
            self.consumed.load_state_dict(values["consumed"])
        self.metrics, self.best = values.get("metrics") or {}, values.get("best")
        if checkpoint.manifest.world == comm.size and "random" in (own := checkpoint.own(comm.rank)):
            restore_random_states(own["random"], comm.device)
        else:
            seed_everything(parts.seed, parts.engine.random_stream, checkpoint.step)


def _load_model_and_optimizer(parts: TrainerParts, checkpoint: Checkpoint) -> None:
    """Fills parameters, buffers and optimizer state. Rates and decay stay what the config asks for now."""
    fill_model(checkpoint, parts.engine)
    if checkpoint.manifest.about.get("weights_only"):
        return  # somebody's weights: the optimizer begins anew
    groups = parts.optimizer.param_groups
    asked = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    load_optimizer(checkpoint, parts.optimizer, list(parts.engine.shards()))
    for group, settings in zip(parts.optimizer.param_groups, asked, strict=True):
        peak = settings.get("initial_lr", settings["lr"])
        group.update(settings, lr=peak, initial_lr=peak)
