"""What a step without values is made of: the model on meta, the engine that would train it, its optimizer, a batch.

A model of a library that cannot be run without values has a GPT in its place: a rougher prediction, and said so. It has
the width, the layers, the heads and the vocabulary of the model's config.json, and an MLP so wide that both have as
many parameters: for P parameters, L layers of width h and a vocabulary of V (2 V where the ends are not tied)

    mlp_width = (P - V h - 4 L h^2) / (2 L h)

So weights, gradients, optimizer state and traffic are those of the model. A mixture computes with some of its experts
only, and its stand-in with all parameters: its time is an upper bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from paceline.checkpoint.write import own_shares
from paceline.cluster.costs import read_table
from paceline.comm.algorithms.rounds import from_names
from paceline.comm.base import Communicator
from paceline.comm.compress import Compressor
from paceline.comm.dry.communicator import META, DryAlgorithmCommunicator, DryCommunicator, DryWorld
from paceline.config import Config
from paceline.config.data_sections import may_ignore
from paceline.config.sections import GPTModelConfig, HFModelConfig
from paceline.data.loader import StepBatch
from paceline.data.registry import DataSplits, SyntheticConfig, data_of
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.engines.precision import precision_named
from paceline.errors import UntraceableError, UsageError
from paceline.models.hugging_face import text_settings
from paceline.models.measured import KnownValues
from paceline.models.registry import build_model
from paceline.plan.layout import Layout, Offload
from paceline.rehearse.dryrun.held import HeldMemory
from paceline.rehearse.dryrun.recorder import NoValues
from paceline.shards import Region
from paceline.train.assemble import build_compressor, build_policy, normalises_inside
from paceline.train.loss import Loss, build_loss, fuses_loss
from paceline.train.optim import build_optimizer
from paceline.train.run_state import WeightAverage
from paceline.train.step import LossScaler, StepPolicy, make_scaler

_FEW = 16  # samples of data whose values nobody looks at
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPieces:
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
    precision, dtype = precision_named(layout.precision), getattr(torch, config.train.dtype)
    if normalises_inside(config, layout):  # images of bytes become what the first layer of the graph reads
        dtype = precision.autocast_dtype or precision.param_dtype or dtype
    # Compiled blocks cannot be seen into; in the first plain steps gradients travel whole, and a later step is meant.
    layout = replace(layout, compile="none", compression=replace(layout.compression, plain_steps=0))
    if comm.device_kind == "cpu":  # which is the host: engines offload nothing there
        layout = replace(layout, offload=Offload())
    compressor = build_compressor(layout)
    is_fused = fuses_loss(config.train.loss, layout, model, comm.device_kind)
    talker: Communicator = comm
    if config.comm.algorithm != "native" and comm.size > 1:
        topology = from_names([rank // layout.node_ranks for rank in range(comm.size)])
        path = config.comm.algorithm_table
        table = None if path is None else read_table(Path(path), topology.placement)
        talker = DryAlgorithmCommunicator(comm, config.comm.algorithm, topology, table=table)
    engine = parallelize(model, talker, layout=layout, compressor=compressor)

    def without_values(value: Any) -> Any:
        value = value.to(META) if isinstance(value, torch.Tensor) else value
        return value.new_empty((layout.microbatch, *value.shape[1:])) if value.ndim else value

    microbatch = tree_map(without_values, default_collate([data.train[0]]))
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


def _optimizer(config: Config, engine: Engine, memory: HeldMemory) -> torch.optim.Optimizer:
    """Makes the optimizer as a device has it: fused, which torch refuses on meta tensors, and with its state."""
    is_muon = config.optim.kind == "muon"
    optimizer = build_optimizer(config.optim, engine.named_parameters(), engine if is_muon else None)
    if config.optim.kind not in ("adamw", "sgd"):
        return optimizer
    if config.optim.kind == "adamw" and engine.can_fuse_cast and config.parallel.device != "cpu":
        engine.fuse_cast()  # as the optimizer of masters does, which reads gradients where backward left them

        def collect(*_: Any) -> None:
            engine.gradients()

        optimizer.register_step_pre_hook(collect)
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


def with_stand_in(config: Config, work: Callable[[Config], _Found]) -> tuple[_Found, str]:
    """Returns ``work(config)`` and nothing more to say; or that of the stand-in, and in words what it stands for.

    Raises UntraceableError for code of the user's that cannot run without values, UsageError without a stand-in.
    """
    try:
        return work(config), ""
    except UntraceableError as error:
        if not isinstance(config.model, HFModelConfig):
            raise
        other = _stand_in(config, config.model, error)
        sizes = f"{other.layers} layers of width {other.width}"
        return work(config.model_copy(update={"model": other})), (
            f"a rough figure, of a GPT with {sizes} and as many parameters as the model (with all experts of a mixture "
            f"at work), since {error.headline}"
        )


def _stand_in(config: Config, model: HFModelConfig, error: UntraceableError) -> GPTModelConfig:
    data = few_data(config)
    settings: Any = text_settings(model) if data.shape.kind == "tokens" else None
    sizes: list[Any] = [getattr(settings, name, None) for name in _SIZES]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UsageError(
            f"{error.headline}\n  it is a model of transformers, and has no GPT of the same size to stand in for it\n"
            "  paceline simulate runs it with values, on virtual ranks"
        )
    width, layers, heads, vocabulary = sizes
    parameters = sum(each.numel() for each in empty_model(config, data).parameters())
    tied = bool(getattr(settings, "tie_word_embeddings", False))
    ends = vocabulary * width * (1 if tied else 2)
    return GPTModelConfig(
        kind="gpt",
        layers=layers,
        width=width,
        heads=math.gcd(heads, width),
        mlp_width=max(1, round((parameters - ends - 4 * layers * width**2) / (2 * layers * width))),
        vocab_size=vocabulary,
        context=data.shape.context,
        tied=tied,
        mlp="gelu",
        positions="learned",
        compile=model.compile,
    )


def cut_of_run(config: Config, layout: Layout) -> list[Mapping[str, Region]]:
    """Returns what the ranks of a layout would write into a checkpoint of the model that a config trains."""
    data = few_data(config)
    return cut_of_training(lambda: empty_model(config, data), layout)


def cut_of_training(make_model: Callable[[], nn.Module], layout: Layout) -> list[Mapping[str, Region]]:
    """Returns by rank the regions of parameters and buffers that it writes; ``make_model`` makes the model on meta."""
    world = DryWorld(layout.ranks)
    found: list[Mapping[str, Region]] = []
    for rank in range(layout.ranks):  # the first one tells the others where the model is cut
        engine = parallelize(make_model(), world.rank(rank), layout=layout)
        found.append({share.name: share.region for share in own_shares(engine.shards())})
    return found
