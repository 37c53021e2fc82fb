"""What a step without values is made of: the model on meta, the engine that would train it, its optimizer, a batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from paceline.cluster.measured import read_table
from paceline.comm.algorithms.rounds import from_names
from paceline.comm.base import Communicator
from paceline.comm.compress import Compressor
from paceline.comm.dry.communicator import META, DryAlgorithmCommunicator, DryCommunicator
from paceline.config import Config
from paceline.config.data_sections import may_ignore
from paceline.data.loader import StepBatch
from paceline.data.registry import DataSplits, SyntheticConfig, data_of
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.engines.precision import precision_named
from paceline.models.known_values import KnownValues
from paceline.models.registry import build_model
from paceline.plan.layout import Layout, Offload
from paceline.rehearse.dryrun.functions import NoValues
from paceline.rehearse.dryrun.held import HeldMemory
from paceline.train.assemble import build_compressor, build_policy, normalises_inside
from paceline.train.loss import Loss, build_loss, fuses_loss
from paceline.train.optim import build_optimizer
from paceline.train.run_state import WeightAverage
from paceline.train.step import LossScaler, StepPolicy, make_scaler

_FEW = 16  # samples of data whose values nobody looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPieces:
    """What a step is made of."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    batch: StepBatch
    loss: Loss
    policy: StepPolicy
    scaler: LossScaler | None
    compressor: Compressor | None
    average: WeightAverage | None


def few_data(config: Config) -> DataSplits:
    """Makes the data; of random data only a few samples, since their shape is all that counts."""
    if isinstance(config.data, SyntheticConfig):
        config = config.with_values("data", samples=min(config.data.samples, _FEW), eval_fraction=0.0)
    return data_of(config)


def tell_inputs(values: KnownValues, parts: StepPieces, data: DataSplits) -> None:
    """Says which whole numbers a microbatch has, such as token ids: those of the first sample, again and again."""
    first = tree_leaves(default_collate([data.train[0]]))
    for leaf, real in zip(tree_leaves(parts.batch.microbatches[0]), first, strict=True):
        if isinstance(real, torch.Tensor) and real.ndim and not real.is_floating_point():
            values.tell(leaf, functools.partial(real.expand, leaf.shape))


def empty_model(config: Config, data: DataSplits) -> nn.Module:
    with torch.device(META), NoValues():
        model = build_model(config.model, data.shape)
    return model.to(device=META, dtype=getattr(torch, config.train.dtype))


def build_parts(
    config: Config, layout: Layout, model: nn.Module, data: DataSplits, comm: DryCommunicator, memory: HeldMemory
) -> StepPieces:
    """Hands a model to its engine and makes all else; ``memory`` knows what is on the host."""
    dtype = _image_dtype(config, layout)
    # Compiled blocks cannot be seen into; in the first plain steps gradients travel whole, and a later step is meant.
    layout = replace(layout, compile="none", compression=replace(layout.compression, plain_steps=0))
    if comm.device_kind == "cpu":  # which is the host: engines offload nothing there
        layout = replace(layout, offload=Offload())
    compressor = build_compressor(layout)
    is_fused = fuses_loss(config.train.loss, layout, model, comm.device_kind)
    engine = parallelize(model, _through(config, layout, comm), layout=layout, compressor=compressor)
    sample = tree_map(
        lambda value: value.to(META) if isinstance(value, torch.Tensor) else value, default_collate([data.train[0]])
    )
    microbatch = tree_map(
        lambda value: value.new_empty((layout.microbatch, *value.shape[1:])) if value.ndim else value, sample
    )
    samples = layout.microbatch * layout.accumulate * layout.data
    step = StepBatch(
        position=0,
        next_position=samples,
        epoch=0,
        global_samples=samples,
        microbatches=[microbatch] * layout.accumulate,
        local_samples=[layout.microbatch] * layout.accumulate,
    )
    return StepPieces(
        engine=engine,
        optimizer=_optimizer(config, engine, memory),
        batch=step,
        loss=build_loss(
            config.train.loss, data.shape, may_ignore=may_ignore(config.data), is_fused=is_fused, dtype=dtype
        ),
        policy=build_policy(config),
        scaler=make_scaler(engine.precision, META, config.train.loss_scale),
        compressor=compressor,
        average=None if config.train.ema_decay is None else WeightAverage(engine, config.train.ema_decay),
    )


def _image_dtype(config: Config, layout: Layout) -> torch.dtype:
    """Returns what images of bytes become: in a model that is one graph, what its first layer reads."""
    precision = precision_named(layout.precision)
    half = precision.autocast_dtype or precision.param_dtype
    built: torch.dtype = getattr(torch, config.train.dtype)
    return half if half is not None and normalises_inside(config, layout) else built


def _through(config: Config, layout: Layout, comm: DryCommunicator) -> Communicator:
    """Returns what the engine talks through: by the algorithm that the config asks for."""
    asked = config.comm.algorithm
    if asked == "native" or comm.size == 1:
        return comm
    topology = from_names([rank // layout.node_ranks for rank in range(comm.size)])
    path = config.comm.algorithm_table
    table = None if path is None else read_table(Path(path), topology.placement)
    return DryAlgorithmCommunicator(comm, asked, topology, table=table)


def _optimizer(config: Config, engine: Engine, memory: HeldMemory) -> torch.optim.Optimizer:
    """Makes the optimizer as a device has it: torch's own is fused there, and its state is made in the first step.

    On meta tensors torch refuses to fuse, and looks when it makes the state; so that is there before. One that updates
    parameters on the host leaves it to the host whether to step at all.
    """
    is_muon = config.optim.kind == "muon"
    optimizer = build_optimizer(config.optim, engine.named_parameters(), engine if is_muon else None)
    if config.optim.kind not in ("adamw", "sgd"):
        return optimizer
    is_hosted = any(memory.is_on_host(each) for each in engine.parameters())
    vars(optimizer).update(_step_supports_amp_scaling=not is_hosted, _need_device_dtype_check_for_fused=False)
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"] if config.optim.kind == "adamw" else ():
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=META),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer
