"""``parallelize``: from a plain module to an engine. The only place where wrap order is decided.

Order: synchronise batch norm, swap linear layers for those of 8 bits, run MLPs in tiles, checkpoint blocks, compile,
bring blocks' inputs to the host, agree on the values, replicate or shard. Where there are several ranks, blocks are
compiled one by one, not the model as a whole: gradients then arrive block by block, and communication overlaps with
backward.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast, get_args

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.comm.base import Communicator, GradientCompression
from paceline.comm.compress import Compressor
from paceline.comm.objects import broadcast_object, gather_objects
from paceline.engines.activations import HostActivations
from paceline.engines.batchnorm import synchronise_batchnorm
from paceline.engines.blocks import checkpoint_blocks, compile_model, compiled_inside, swap_pools
from paceline.engines.buckets.buckets import choose_for_link, probe_link
from paceline.engines.combined import combine
from paceline.engines.ddp import DataParallel
from paceline.engines.engine import Engine
from paceline.engines.experts import has_experts, spread_experts
from paceline.engines.flat.materialize import build_units, choose_units
from paceline.engines.float8 import check_float8, swap_linears
from paceline.engines.fsdp import FullySharded
from paceline.engines.groups import Groups, broadcast_tensors, check_same_model, expert_dim, make_groups
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.precision import Precision, check_precision, precision_named
from paceline.engines.sequences import share_sequences
from paceline.engines.tiles import tile_mlps
from paceline.engines.torch_helpers import adopt_optimizer, watch_engine
from paceline.engines.zero import ZeroParallel, parameters_to_bucket
from paceline.errors import ConfigError, UsageError, did_you_mean
from paceline.free_memory import measure_machine
from paceline.models.hugging_face import FILL, allocate_unfilled, is_unfilled
from paceline.models.registry import (
    block_parts,
    check_initialised,
    model_apart,
    model_blocks,
    model_ends,
    num_parameters,
)
from paceline.plan.layout import OFFLOAD_PARTS, Compression, Layout, Offload, StrategyName
from paceline.plan.rule_case import unknown_word
from paceline.plan.rules import check_layout
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import StateFacts
from paceline.search.automatic import Choice, take_first, whole_ladder
from paceline.units import GIB, MIB

STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)
M = TypeVar("M", bound=nn.Module)
_MARK = "_paceline_engine"
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")  # torch's own
_FOR_ACTIVATIONS = 0.5  # of a rank's memory, where a strategy is chosen
_LARGE_UNIT_MB = 64.0  # of a model without blocks: below that, one unit is as good as several
_LARGE_END = 2**23  # parameters of an embedding or a head that a GPU gathers by itself: it takes three collectives more
_LARGE_BLOCK = 2**27  # parameters: what is gathered first of a step, and reduced last, is then worth splitting


def parallelize(
    model: M,
    comm: Communicator,
    strategy: StrategyName | None = None,
    *,
    layout: Layout | None = None,
    precision: str | Precision | None = None,
    compressor: GradientCompression | None = None,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> Engine[M]:
    """Makes an engine that trains ``model`` on the ranks of ``comm``.

    ``ddp``, the default, replicates the model; ``zero1`` shards the optimizer's state, ``zero2`` the gradients too,
    ``fsdp`` (or ``zero3``) everything; ``hybrid`` shards within hosts, or groups of ``shard_ranks``, and replicates
    across. The module stays as it is, under its own names; its values become those of rank 0. Every rank passes a
    module of its own. Gradients are averaged over ranks as backward produces them. For ``fsdp`` and ``hybrid`` the
    model may be on the meta device. ``auto`` takes the cheapest of these that fits, judged by the parameters alone.

    All else is a ``Layout``, given whole or field by field: ``pipeline=2, tensor=2`` spreads the model itself, and the
    strategy is then that of the ranks that share the batch; ``compression=Compression(policy="topk")`` makes gradients
    smaller on their way; ``tunes_buckets=True`` finds the size of buckets by measuring (``engine.bucket_choice`` says
    what was found; virtual ranks, whose times mean nothing, keep the default). ``precision`` is a name, or a policy of
    your own; ``compressor`` one of your own in place of the layout's.

    ``optimizer`` is one that was built of ``model.parameters()``: it updates the engine's from now on, with its groups,
    its settings and its state, which every rank has alike. Without it, build one of ``engine.parameters()``. A model
    that is frozen (a teacher, a reference) has none: ``fsdp`` shards it, and its passes gather it.

    Raises UsageError for what cannot work: a model that cannot be split up so, options that exclude one another, and
    what is given twice.
    """
    _check_arguments(model, comm, layout, {"strategy": strategy, "precision": precision, **options})
    check_initialised(model)
    layout = layout or layout_from(options, None if strategy == "auto" else strategy)
    policy = precision_named(layout.precision if precision is None else precision, comm.device)
    layout = replace(layout, precision=policy.name)
    if compressor is not None:  # the rules of a layout's own compression hold for it too
        given = compressor.settings
        layout = replace(layout, compression=Compression(policy=given.policy, error_feedback=given.error_feedback))
    elif layout.compression.is_any:
        compressor = Compressor(layout.compression)
    if strategy == "auto":
        layout = _choose(model, comm, layout)
    layout = check_layout(layout, comm.size, _ranks_of_hosts(layout, comm))
    if compressor is not None:
        _check_compressor(layout)
    _check_parameters(model, layout.expert, policy)
    before = dict(model.named_parameters())
    state = None if optimizer is None else _state_to_adopt(optimizer, comm)
    engine: Engine[Any]
    groups = make_groups(comm, layout)
    if layout.context_ranks > 1:  # the model will ask those who share its sequences, too
        groups = replace(groups, sequences=share_sequences(model, groups.context, layout))
    if layout.is_split:
        _check_model(model, may_be_meta=comm.device.type == "meta")
        engine = combine(model, groups, layout, lambda part: _share(part, groups, layout, policy, None))
        object.__setattr__(model, _MARK, True)
    else:
        engine = _share(model, groups, layout, policy, compressor)
    if (fill := vars(model).pop(FILL, None)) is not None:
        fill(engine)
    if comm.trained is not None:
        comm.trained.add(engine.parameters())
    watch_engine(engine, before)
    if optimizer is not None and state is not None:
        adopt_optimizer(engine, optimizer, state)
    return cast("Engine[M]", engine)


def _state_to_adopt(optimizer: Optimizer, comm: Communicator) -> dict[str, Any]:
    """Returns an optimizer's state. Raises UsageError where it is no optimizer, or ranks have different states."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer = a {type(optimizer).__name__}\n  it is an optimizer of the model's parameters, to be adopted\n"
            "  give optimizer=torch.optim.AdamW(model.parameters(), ...)"
        )
    state = optimizer.state_dict()
    tensors = [leaf for leaf in tree_leaves(state["state"]) if isinstance(leaf, Tensor)]
    sums = [float(tensor.double().abs().sum()) for tensor in tensors]
    for rank, others in enumerate(gather_objects(comm, sums)):
        if others != sums:
            raise UsageError(
                f"the optimizer's state of rank {comm.rank} is not that of rank {rank}\n"
                "  every rank gives the whole state, as one process has it\n"
                "  load it on all ranks before parallelize(), or afterwards with paceline.load()"
            )
    return state


def _ranks_of_hosts(layout: Layout, comm: Communicator) -> int | None:
    """Returns how many ranks a host has, where the shard groups of ``hybrid`` follow the hosts; None: all."""
    if layout.strategy != "hybrid" or layout.shard_ranks or layout.node_ranks or comm.size == 1:
        return None
    hosts = gather_objects(comm, _host(comm))
    sizes = [len(list(same)) for _, same in itertools.groupby(hosts)]
    if len(set(sizes)) > 1 or len(sizes) != len(set(hosts)):
        raise UsageError(
            f"strategy = 'hybrid' on hosts with {', '.join(map(str, sizes))} ranks, in this order\n"
            "  hybrid shards inside a host and replicates across hosts: all have as many ranks, one after another\n"
            "  give shard_ranks=..., which divides the number of ranks, or strategy = 'fsdp'"
        )
    return sizes[0]


def _host(_: Communicator) -> str:
    """Returns a name that ranks of one host share, for a rank of a group."""
    return socket.gethostname()


def layout_from(options: Mapping[str, Any], strategy: str | None = None) -> Layout:
    """Makes a layout of its fields and the name of a strategy. Raises UsageError for names that it does not know."""
    for problem in () if strategy is None else unknown_word("strategy", strategy, STRATEGY_NAMES):
        raise UsageError(str(problem))
    known = [field.name for field in fields(Layout)]
    for name in [name for name in options if name not in known]:
        fix = did_you_mean(name, known, "leave it out")
        raise UsageError(f"{name!r} is no option\n  options are the fields of a Layout: {', '.join(known)}\n  {fix}")
    given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in options.items()}
    offload = given.get("offload")
    parts = (offload,) if isinstance(offload, str) else offload
    if isinstance(parts, tuple) and set(parts) <= set(OFFLOAD_PARTS):
        given["offload"] = Offload.of(parts)  # as a config has it
    if isinstance(given.get("compression"), str):
        given["compression"] = Compression(policy=given["compression"])
    if strategy is not None:
        given["strategy"] = "fsdp" if strategy == "zero3" else strategy
    return Layout(**given)


def _check_arguments(model: Any, comm: Any, layout: Any, given: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"parallelize() of a {type(model).__name__}\n  it takes an nn.Module, once on each rank\n"
            f"  {'train it: an engine is called as its model is' if isinstance(model, Engine) else 'give the model'}"
        )
    if not isinstance(comm, Communicator):
        raise UsageError(
            f"the second argument is a {type(comm).__name__}\n  it is the communicator of the ranks\n"
            "  give what paceline.connect() returns, and the strategy after it"
        )
    if isinstance(given["strategy"], Layout) or not isinstance(layout, Layout | None):
        raise UsageError(
            "a layout is given as layout=paceline.Layout(...)\n  the third argument is the name of a strategy\n"
            "  give layout=..., or the fields one by one: pipeline=2, tensor=2"
        )
    twice = [f"{name} = {value!r}" for name, value in given.items() if value is not None]
    if layout is not None and twice:
        raise UsageError(
            f"{', '.join(twice)} beside layout=...\n  a layout says all of it, and one of the two would be ignored\n"
            f"  put it into the layout: dataclasses.replace(layout, {twice[0].partition(' ')[0]}=...)"
        )


def _check_compressor(layout: Layout) -> None:
    """Raises UsageError where a compressor of the user's own, of which the rules know nothing, has no place."""
    if layout.is_split:
        rule = "a tensor that several ranks or stages hold must get the same gradient on all of them"
        raise UsageError(f"compression with pipeline or tensor\n  {rule}\n  leave compression out")
    if layout.strategy not in ("ddp", "hybrid"):
        raise UsageError(
            f"compression with strategy = {layout.strategy!r}\n"
            "  it works where replicas average the same gradients, and here each rank gets a slice of its own\n"
            "  take strategy = 'ddp', or 'hybrid', which averages slices across groups; or leave compression out"
        )


def _choose(model: nn.Module, comm: Communicator, layout: Layout) -> Layout:
    """Decides ``strategy = "auto"``: the cheapest strategy that fits, and what is offloaded with it."""
    if layout.is_split or layout.expert > 1:
        raise UsageError(
            "strategy = 'auto' with pipeline, tensor or expert\n  it chooses how the batch is shared, for a model on "
            "one rank\n  give the strategy of the data axis: 'ddp', or 'zero1', which shards the optimizer"
        )
    _check_model(model, may_be_meta=False)
    chosen = choose_for_module(model, comm, model_blocks(model), layout.precision).chosen.layout
    offload = (
        replace(chosen.offload, activations=layout.offload.activations) if chosen.offload.is_any else layout.offload
    )
    return replace(layout, strategy=chosen.strategy, offload=offload)


def choose_for_module(
    model: nn.Module, comm: Communicator, blocks: Sequence[nn.Module] = (), precision: str = "fp32"
) -> Choice:
    """Chooses a strategy for a module on the ranks of ``comm``, all on one host: rank 0 decides for all of them.

    It judges by the parameters alone, since nobody has seen a batch: half of a rank's memory is left to activations,
    which are not checkpointed. Raises UsageError on every rank where nothing fits.
    """
    decided: Choice | UsageError | None = None
    if comm.rank == 0:
        machine = measure_machine(comm.device.type, comm.size, comm.size)
        machine = replace(machine, device_bytes=round(machine.device_bytes * (1 - _FOR_ACTIVATIONS)))
        itemsize = max((p.element_size() for p in model.parameters()), default=4)
        states = StateFacts(itemsize=itemsize, device=comm.device.type)
        sizes = [num_parameters(block) for block in blocks]
        facts = ModelFacts(
            blocks=tuple(BlockFacts(parameters=size) for size in sizes),
            root=BlockFacts(parameters=num_parameters(model) - sum(sizes)),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        )
        keep = frozenset({"checkpoint_activations"})
        try:
            ladder = whole_ladder(facts, Layout(precision=precision), machine, states, keep)
            decided = take_first(ladder, facts, machine)
        except ConfigError as error:
            decided = UsageError(f"strategy = 'auto'\n  {error.problems[0]}")
    decided = broadcast_object(comm, decided)
    if not isinstance(decided, Choice):
        raise cast("UsageError", decided)
    return decided


def _share(
    model: nn.Module, groups: Groups, layout: Layout, precision: Precision, compressor: GradientCompression | None
) -> ModuleEngine:
    """Makes the engine of a model, or of a stage of one, over the ranks that share the batch."""
    comm = groups.gradients
    _check_model(model, may_be_meta=layout.is_fully_sharded or comm.device.type == "meta")
    check_precision(precision, comm.device)
    _check_host(layout.offload, comm.device, num_parameters(model) // comm.size)
    object.__setattr__(model, _MARK, True)  # before the first collective: virtual ranks may share the object by mistake
    check_same_model(model, comm)
    if layout.expert > 1:  # values of a split model are alike already
        spread_experts(model, groups.expert, None if layout.is_split else comm)
    asks_for_blocks = precision.float8 or layout.checkpoint_activations != "none" or layout.is_fully_sharded
    blocks = model_blocks(model) if asks_for_blocks else []
    if layout.sync_batchnorm and comm.size > 1:
        synchronise_batchnorm(model, comm)
    float8 = swap_linears(model, blocks, by_row=precision.float8 == "row") if precision.float8 else None
    if layout.mlp_tiles != 1:
        tile_mlps(model, layout.mlp_tiles, with_norms=not layout.is_compiled)
    repeated = checkpoint_blocks(blocks, layout.checkpoint_activations)
    parts = _first_parts(model, layout, precision) if comm.size > 1 else []
    units: Sequence[tuple[str, nn.Module]] = ()  # that full sharding gathers one by one
    if layout.is_fully_sharded:
        unit_mb = layout.unit_mb or (None if blocks or layout.units else _LARGE_UNIT_MB)
        least = 0 if comm.device_kind == "cpu" else _LARGE_END
        ends = [end for end in model_ends(model) if num_parameters(end) >= least]
        apart = model_apart(model)
        units = choose_units(model, blocks, ends, names=layout.units, unit_mb=unit_mb, apart=apart, parts=parts)
    if layout.is_compiled:
        swap_pools(model, comm.device)
        hooked = [module for _, module in units] or parts if comm.size > 1 else []
        compile_model(model, whole=layout.compile == "whole", units=hooked)
    if layout.offload.activations:
        HostActivations(comm.device).take_inputs(repeated)
    engine: ModuleEngine
    if layout.is_fully_sharded:
        built = build_units(model, units, groups, precision, layout.offload)
        engine = sharded = FullySharded(model, groups, built, layout, precision, compressor)
        sharded.watch([*(module for _, module in units), model])
    else:
        engine = _with_buckets(model, groups, layout, precision, compressor)
    engine.float8 = float8
    if comm.ledger is not None and comm.ledger.is_own_loop:
        engine.watch_replicas()
    return engine


def _first_parts(model: nn.Module, layout: Layout, precision: Precision) -> list[nn.Module]:
    """Returns the parts that take the place of the first block, if it is large and nothing else was asked for.

    Nothing is computed before its parameters are there, and little after its gradients are. Split, the first part's
    gather and reduction alone are exposed: those of the second run beside the first. One more graph is compiled, and
    what is between the two (norms and sums of the stream) runs eagerly, once in a step.
    """
    asked = layout.units is not None or layout.unit_mb or layout.is_split or precision.float8 or layout.mlp_tiles != 1
    if asked or layout.checkpoint_activations != "none" or layout.offload.activations or layout.compile == "whole":
        return []
    first = next(iter(model_blocks(model)), None)
    if first is None or num_parameters(first) < _LARGE_BLOCK or compiled_inside(first.forward) is not None:
        return []
    return block_parts(first)


def _with_buckets(
    model: nn.Module, groups: Groups, layout: Layout, precision: Precision, compressor: GradientCompression | None
) -> ModuleEngine:
    """Makes the engine of a model that every rank holds whole, with the values of rank 0."""
    comm = groups.gradients
    allocate_unfilled([model], comm.device)
    model.to(comm.device)
    for parameter in model.parameters():
        if expert_dim(parameter) is not None:
            broadcast_tensors(groups.of(parameter).gradients, [parameter])
    dense = [each for each in model.parameters() if expert_dim(each) is None]
    broadcast_tensors(comm, [each for each in (*dense, *model.buffers()) if not is_unfilled(each)])
    layout = replace(layout, tunes_buckets=layout.tunes_buckets and comm.size > 1 and comm.takes_real_time)
    if layout.strategy == "ddp":
        return DataParallel(model, groups, layout, precision, compressor)
    choice = None
    if layout.tunes_buckets:
        choice = choose_for_link(*parameters_to_bucket(model, precision.param_dtype), probe_link(comm))
        found = choice.policy
        layout = replace(layout, bucket_mb=found.bucket_bytes / MIB, first_bucket_mb=found.first_bucket_bytes / MIB)
    engine = ZeroParallel(model, groups, layout, precision)
    engine.bucket_choice = choice
    return engine


def _check_parameters(model: nn.Module, expert: int, precision: Precision) -> None:
    """Raises UsageError where ranks are to hold different experts or to compute in 8 bits, and the model cannot."""
    if precision.float8:
        check_float8(model, model_blocks(model), precision.name)
    if expert > 1 and not has_experts(model):
        raise UsageError(
            f"expert = {expert}, and no block of the model has experts of paceline.models.experts, and no parameter of "
            "the model is marked as one of which ranks hold different parts\n"
            "  ranks are dealt the experts of a mixture; of other models each builds its part, and says so\n"
            "  call mark_expert(parameter) of paceline.engines.groups, or set expert = 1"
        )


def _check_host(offload: Offload, device: torch.device, num_parameters: int) -> None:
    if not offload.moves_states or device.type in ("cpu", "meta"):  # what has no values takes no memory
        return
    needed = num_parameters * offload.host_bytes
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"offload needs {needed / GIB:.1f} GiB of host memory for each rank; {available / GIB:.1f} GiB are free\n"
            "  masters, gradients and two moments take 18 bytes for each parameter of a rank\n"
            "  use more ranks, offload less, or a smaller model"
        )


def _check_model(model: nn.Module, *, may_be_meta: bool) -> None:
    if getattr(model, _MARK, False):
        raise UsageError(
            "this module is parallelized already\n  each rank needs a module of its own, wrapped once\n"
            "  build the model inside the function that each rank runs"
        )
    for name, module in model.named_modules():
        kinds = [each for each in type(module).__mro__ if each.__module__.startswith("torch.")]
        wrapper = next((each.__name__ for each in kinds if each.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            inside = "fully_shard(...) is called on it" if wrapper == "FSDPModule" else "it is wrapped: model.module"
            raise UsageError(
                f"{name or 'the model'} is wrapped in torch's {wrapper} already\n"
                "  parallelize() shares gradients and parameters between the ranks itself: once is enough\n"
                f"  give the model as it is before {inside}"
            )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [name for name, tensor in tensors.items() if tensor.is_meta and not is_unfilled(tensor)]
    if meta and not may_be_meta:
        raise UsageError(
            f"{meta[0]} and {len(meta) - 1} more are on the meta device and hold no values\n"
            "  this strategy keeps the whole model on every rank\n"
            "  build it on a real device, or take strategy = 'fsdp'"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UsageError(
                f"{name or 'the model'} is an embedding with sparse=True\n"
                "  its sparse gradient cannot join a dense bucket\n  build it with sparse=False, or freeze it"
            )
