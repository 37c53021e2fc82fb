"""A trainer's state: what a checkpoint of a run holds, and how a trainer goes on from one.

tensors       parameters, buffers, optimizer state, residuals of compression, the average of parameters
values        the same on every rank: loss scale, bad steps, roll-backs, rates, metrics, hooks, consumed samples
each rank's   random states
files         of the model and its tokenizer, so that a checkpoint alone is enough to write text, or to export

The average of the parameters, for evaluation, is exponential: decay * average + (1 - decay) * parameter after every
step, left out or not. Each rank averages its shards, in their dtype (masters, where there are some): one more copy of
them (4 P / N bytes under full sharding), and a pass over them. Nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.find import spots_in
from paceline.checkpoint.manifest import AVERAGE, COMPRESSION, Line, State, line_from, prefixed
from paceline.checkpoint.optimizer import held_by, restore
from paceline.checkpoint.read import HUGGING_FACE, LORA, TOKENIZER, Checkpoint, file_shards
from paceline.comm.compress import Compressor
from paceline.config.hf_folder import BYTE, PREPROCESSOR
from paceline.config.schema import EarlyStopConfig
from paceline.data.datasets import DataShape
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.order import ConsumedIds
from paceline.data.registry import DataSplits
from paceline.engines.engine import Engine
from paceline.models.hugging_face import folder_files
from paceline.models.lora import adapters
from paceline.plan.plan import Plan
from paceline.records.meter import StepMeter
from paceline.shards import Shard
from paceline.train.evaluate import EarlyStop, Metric
from paceline.train.graphed_step import GraphedStep
from paceline.train.loss import Loss
from paceline.train.optim import RateSchedule
from paceline.train.randomness import capture_random_states, restore_random_states, seed_everything
from paceline.train.resolve import SampleCost
from paceline.train.shown import ShownSamples
from paceline.train.step import StepPolicy, make_scaler
from paceline.train.survive.memory import Retry
from paceline.train.survive.recovery import BadSteps


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
    files: Mapping[str, bytes] = field(default_factory=dict)  # of the model: see ``kept_files``
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    has_perplexity: bool = False
    early_stop: EarlyStopConfig = EarlyStopConfig()  # noqa: RUF009 (frozen)
    shown: ShownSamples | None = None


class StepState:
    """What any trainer keeps from step to step: how far it is, its loss scale, the steps that it left out."""

    def __init__(self, engine: Engine, policy: StepPolicy) -> None:
        self.step = 0
        self.position = 0
        self.scaler = make_scaler(engine.precision, engine.device, policy.loss_scale)
        self.bad_steps = BadSteps()

    def collect(self, engine: Engine, optimizer: torch.optim.Optimizer) -> State:
        """Returns this rank's part of the state, without a copy of any tensor. Nothing is sent."""
        shards, found = held_by(engine, optimizer)
        values: dict[str, Any] = {"bad_steps": self.bad_steps.state_dict(), "streams": _num_streams(engine)}
        if self.scaler is not None:
            values["scaler"] = self.scaler.state_dict()
        own = {"random": capture_random_states(engine.world.device)}
        return State(step=self.step, position=self.position, shards=shards, values=values, own=own, found=found)

    def go_on_from(self, checkpoint: Checkpoint, engine: Engine) -> bool:
        """Takes over what ``collect`` gave, beside tensors. Says whether random states go on: of as many streams."""
        self.step, self.position = checkpoint.step, checkpoint.manifest.position
        if self.scaler is not None and "scaler" in checkpoint.values:
            self.scaler.load_state_dict(checkpoint.values["scaler"])
        if "bad_steps" in checkpoint.values:
            self.bad_steps.load_state_dict(checkpoint.values["bad_steps"])
        world, streams = checkpoint.manifest.world, _num_streams(engine)
        own: dict[str, Any] = {}
        if "streams" not in checkpoint.values and world == engine.world.size:  # of an earlier release
            own = checkpoint.own(engine.world.rank)
        elif checkpoint.values.get("streams") == streams:  # ranks with one stream are neighbours, and as many each
            own = checkpoint.own(engine.random_stream * (world // streams))
        if "random" in own:
            restore_random_states(own["random"], engine.device)
        return "random" in own


def _num_streams(engine: Engine) -> int:
    """Returns how many streams of random numbers the ranks draw from (``Engine.random_stream``)."""
    return engine.groups.pipeline.size * engine.batch_comm.size


class RunState(StepState):
    """What the trainer of a plan keeps: what a checkpoint of a run holds and restores."""

    def __init__(self, parts: TrainerParts) -> None:
        super().__init__(parts.engine, parts.policy)
        self.parts = parts
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
        state = self.collect(parts.engine, parts.optimizer)
        shards = [*state.shards, *file_shards(parts.files, comm.rank)]
        values = {
            **state.values,
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
        if parts.compressor is not None:
            shards += prefixed(COMPRESSION, parts.compressor.shards(comm))
            values["compression"] = {"step": parts.compressor.step}
        if parts.average is not None:
            shards += parts.average.shards()
        return replace(state, shards=shards, values=values, line=self.line)

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint at any number of ranks; random states, too, where as many read samples."""
        parts, comm, values = self.parts, self.parts.engine.world, checkpoint.values
        optimizer = None if checkpoint.manifest.about.get("weights_only") else parts.optimizer  # else it begins anew
        groups = parts.optimizer.param_groups
        asked = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        restore(checkpoint, parts.engine, optimizer, "resume with the config that the run was started with")
        if optimizer is not None:  # rates and decay stay what the config asks for now
            for group, settings in zip(optimizer.param_groups, asked, strict=True):
                peak = settings.get("initial_lr", settings["lr"])
                group.update(settings, lr=peak, initial_lr=peak)
        if comm.rank == 0:
            self.line = line_from(checkpoint.manifest.spot, list(spots_in(checkpoint.path.parent).values()))
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
        if "consumed" in values:
            self.consumed.load_state_dict(values["consumed"])
        self.metrics, self.best = values.get("metrics") or {}, values.get("best")
        if not self.go_on_from(checkpoint, parts.engine):
            seed_everything(parts.seed, parts.engine.random_stream, checkpoint.step)


def kept_files(model: nn.Module, data: DataSplits) -> dict[str, bytes]:
    """Returns the files of a model, before an engine has it."""
    files: dict[str, bytes] = {}
    if data.tokenizer is not None:
        files |= {TOKENIZER + name: content for name, content in sorted(data.tokenizer.files().items())}
    beside = folder_files(model)
    if beside and data.shape.mean is not None:
        beside.setdefault(PREPROCESSOR, _preprocessor(data.shape))
    files |= {HUGGING_FACE + name: content for name, content in beside.items()}
    if found := adapters([model], [name for name, each in model.named_parameters() if each.requires_grad]):
        files[LORA] = json.dumps(found).encode()
    return files


def _preprocessor(shape: DataShape) -> bytes:
    """Says how images of bytes became what the model was trained on, in the library's words."""
    mean, std = ([each / BYTE for each in values or ()] for values in (shape.mean, shape.std))
    cut: dict[str, Any] = {"do_resize": True, "size": {"shortest_edge": shape.size}, "do_center_crop": True}
    cut |= {"crop_size": {"height": shape.size, "width": shape.size}, "do_rescale": True, "rescale_factor": 1 / BYTE}
    return json.dumps({**cut, "do_normalize": True, "image_mean": mean, "image_std": std}, indent=2).encode()


class WeightAverage:
    """The average of an engine's parameters, as far as this rank has them. It starts as the parameters are."""

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        pairs = [(each, each.tensor if each.parameter is None else each.parameter) for each in engine.shards()]
        self._held = [shard for shard, parameter in pairs if parameter.requires_grad]
        self._parameters = [shard.tensor.detach() for shard in self._held]
        self._averages = [each.clone() for each in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._averages, self._parameters, 1.0 - self._decay)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self._parameters, self._averages, strict=True))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the place of the parameters, and back after it. All ranks do so together."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def shards(self) -> list[Shard]:
        pairs = zip(self._held, self._averages, strict=True)
        return prefixed(AVERAGE, (replace(shard, tensor=average, parameter=None) for shard, average in pairs))

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint; from the parameters just loaded, if that was saved without an average."""
        if not checkpoint.shapes(AVERAGE):
            torch._foreach_copy_(self._averages, self._parameters)
            return
        for shard in self.shards():
            checkpoint.fill(shard, shard.name)

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in self.pairs():
            kept = parameter.clone()  # one tensor at a time
            parameter.copy_(average)
            average.copy_(kept)
        self._engine.mark_loaded()
