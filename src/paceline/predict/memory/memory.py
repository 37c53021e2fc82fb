"""Memory of one rank by category, for a model of P parameters on N ranks that share it.

Bytes a parameter, for float32 (d = 4), and 2 for the parameters that bf16 masters compute with (m = 2; else m = d):

    strategy      parameters             gradients     optimizer (Adam: k = 2)
    ddp           d  (m + d: masters)    d             k d
    zero1         d  (m + d/N)           d             k d / N
    zero2         d  (m + d/N)           d / N         k d / N
    fsdp          d/N                    d / N         k d / N
    hybrid        as fsdp in a group of N

and as temporary for fsdp the root and two units gathered (m each), and the gradients of two units (d each); for zero1
and zero2 two buckets of gradients, each of a tensor at least.

Compression with error feedback keeps what each rank owes, of this step and of the one before: 2 d for each parameter
that is averaged (of its slice, for hybrid), and PowerSGD of rank r the same two of its right factors: 2 d r a column.

Offload moves its part to the host: ``optimizer`` masters, gradients and state; ``parameters`` the slices as well. What
stays is a slice in the dtype of computation (m/N) that is gathered from, beside the whole parameters of ZeRO as well,
and the whole gradients of zero1, in the buckets that it reduces and keeps. On CPU ranks the host's memory is the
device's, and nothing moves.

Of a model that is split, all of this holds for the part of a rank (``parts.py``): P is what its stage and its share of
each layer come to, and N the data ranks that hold the same part. Activations count once for each microbatch in flight,
and the estimate is that of the rank that needs the most.

Activations come from the model's facts. Checkpointing keeps the inputs of a block (and its matrix products, for
``matmuls``) and computes the rest again, one block at a time.

Known error. Parameters, gradients and optimizer state are exact but for padding (under 1 % for units above 100,000
parameters). Activations: see ``activations.py``. What an allocator loses between tensors is not counted: the margin of
``choice.py`` is for that.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline.config import FULLY_SHARDED, Config, OptimConfig, num_chunks
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.parts import Part, Spread, bounds_asked, parts_of
from paceline.units import MIB

_LARGEST_BUCKET = 25 * MIB  # the default, and the most that ZeRO takes where buckets are chosen from what is measured
_FRAMEWORK_BYTES = {"cpu": 350 * MIB, "cuda": 1000 * MIB}  # the process itself; the context, libraries and workspaces


def framework_bytes(device: str) -> int:
    """Returns what a process takes by itself, on "cpu" or "cuda"."""
    return _FRAMEWORK_BYTES[device]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a model is trained, as far as memory is concerned. ``group``: the ranks that share one copy of it."""

    strategy: str
    group: int = 1
    precision: str = "fp32"
    itemsize: int = 4
    microbatch: int = 1
    optimizer_slots: int = 2  # numbers that the optimizer keeps for each parameter, and the average of weights
    checkpoint: str = "none"
    offload: tuple[str, ...] = ()
    reshard: bool | int = True
    prefetch: int = 1
    bucket_bytes: int = _LARGEST_BUCKET
    device: str = "cuda"
    compression: str = "none"
    error_feedback: bool = True
    factor_rank: int = 0  # of PowerSGD
    spread: Spread = dataclasses.field(default_factory=Spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, on its device by category, and on its host where something is offloaded."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    temporary: int
    framework: int
    host: int = 0
    compression: int = 0  # what ranks owe one another

    @property
    def device_bytes(self) -> int:
        """All of the device's."""
        states = self.parameters + self.gradients + self.optimizer + self.buffers + self.compression
        return states + self.activations + self.temporary + self.framework

    def to_json(self) -> dict[str, Any]:
        """Returns the estimate as plain data."""
        return dataclasses.asdict(self) | {"device_bytes": self.device_bytes}


def spread_of(config: Config, model: ModelFacts, microbatches: int) -> Spread | None:
    """Reads from a config how a model is spread; None where that takes more than the config and the facts.

    ``microbatches`` are those of a step. A schedule of the user's own, and layers of models of other code, are read
    only when the run starts.
    """
    parallel = config.parallel
    if parallel.pipeline * parallel.tensor == 1:
        return Spread()
    if not model.layers or parallel.schedule_file is not None:
        return None
    return Spread(
        pipeline=parallel.pipeline,
        tensor=parallel.tensor,
        is_sequence=parallel.sequence_parallel,
        schedule=parallel.schedule,
        chunks=num_chunks(parallel) if parallel.pipeline > 1 else 1,
        microbatches=microbatches,
        bounds=bounds_asked(config, model) if parallel.pipeline > 1 else None,
    )


def setting_of(config: Config, *, group: int, microbatch: int, device: str, spread: Spread | None = None) -> Setting:
    """Reads from a config how its model is trained; ``parallel.strategy`` is decided already."""
    parallel, memory, compression = config.parallel, config.memory, config.comm.compression
    return Setting(
        strategy="fsdp" if parallel.strategy == "zero3" else parallel.strategy,
        group=group,
        precision=config.train.precision,
        itemsize=8 if config.train.dtype == "float64" else 4,
        microbatch=microbatch,
        optimizer_slots=optimizer_slots(config.optim) + (config.train.ema_decay is not None),
        checkpoint=memory.checkpoint_activations,
        offload=tuple(memory.offload),
        reshard=parallel.reshard_after_forward,
        prefetch=parallel.prefetch,
        bucket_bytes=_LARGEST_BUCKET if config.comm.bucket_mb == "auto" else int(config.comm.bucket_mb * MIB),
        device=device,
        compression=compression.policy,
        error_feedback=compression.error_feedback,
        factor_rank=compression.factor_rank if compression.policy == "powersgd" else 0,
        spread=spread or Spread(),
    )


def optimizer_slots(optim: OptimConfig) -> int:
    """Returns how many numbers an optimizer keeps for each parameter; one of unknown code counts as Adam."""
    if optim.kind == "sgd":
        return 1 if optim.momentum else 0
    return 2


def estimate_memory(model: ModelFacts, setting: Setting) -> MemoryEstimate:
    """Estimates what one rank holds at the worst moment of a step; of a split model, the rank that holds the most."""
    if not setting.spread.is_any:
        return _estimate_part(Part(model=model), setting)
    return max(estimate_ranks(model, setting), key=lambda need: need.device_bytes)


def estimate_ranks(model: ModelFacts, setting: Setting) -> tuple[MemoryEstimate, ...]:
    """Estimates what the ranks of a pipeline hold, one after another; one estimate where there is no pipeline."""
    return tuple(_estimate_part(part, setting) for part in parts_of(model, setting.spread))


def _estimate_part(part: Part, setting: Setting) -> MemoryEstimate:
    model = part.model
    setting = setting if setting.device == "cuda" else dataclasses.replace(setting, offload=())
    states = _States.of(model.parameters, setting)
    kept, again = _activations(model, setting)
    activations = round(part.in_flight * kept + again)
    # What is received is posted early: the next input and the next gradient.
    temporary = round(setting.microbatch * (model.temporary_bytes + 2 * part.edge_bytes)) + _in_flight(model, setting)
    host = 0
    if _is_on_host(setting):
        slice_bytes, low_slice = states.slice_bytes, -(-states.low_precision // setting.group)
        staged = low_slice if states.low_precision != setting.itemsize * model.parameters else 0
        host = (2 + setting.optimizer_slots) * slice_bytes + staged  # masters and gradients, and what is copied from
        resident = 0 if "parameters" in setting.offload else low_slice
        gradients = states.gradients if setting.strategy == "zero1" else 0
        states = dataclasses.replace(states, masters=resident, optimizer=0, gradients=gradients)
    elif "gradients" in setting.offload and _has_copy(setting):
        host = states.gradients
        # Those of the last microbatch come as the activations go, and the others are added to them.
        temporary += max(0, states.gradients - activations)
        states = dataclasses.replace(states, gradients=0)
    return MemoryEstimate(
        parameters=states.whole + states.masters,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations,
        buffers=model.buffer_bytes,
        temporary=temporary,
        framework=_FRAMEWORK_BYTES[setting.device],
        host=host,
        compression=_owed(model, setting),
    )


def largest_microbatch(model: ModelFacts, setting: Setting, budget_bytes: int) -> int:
    """Returns the most samples that an estimate finds room for, and at least 1: memory grows along a line."""
    one, two = (
        estimate_memory(model, dataclasses.replace(setting, microbatch=samples)).device_bytes for samples in (1, 2)
    )
    return max(1, 1 + (budget_bytes - one) // max(two - one, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """What lasts from step to step: whole parameters, masters (or slices), gradients, optimizer state."""

    whole: int
    masters: int
    gradients: int
    optimizer: int
    low_precision: int  # all parameters in the dtype that the module computes with
    slice_bytes: int  # a rank's share of the parameters as they were built

    @classmethod
    def of(cls, parameters: int, setting: Setting) -> _States:
        strategy, group, full = setting.strategy, setting.group, parameters * setting.itemsize
        computed = parameters * _param_bytes(setting)
        has_masters = computed != full
        slice_bytes = -(-full // group)
        is_sharded = strategy in FULLY_SHARDED
        keeps_whole = not is_sharded
        masters = slice_bytes if is_sharded or (has_masters and strategy != "ddp") else full if has_masters else 0
        return cls(
            whole=computed if keeps_whole else 0,
            masters=masters,
            gradients=full if strategy in ("ddp", "zero1") else slice_bytes,
            optimizer=setting.optimizer_slots * (full if strategy == "ddp" else slice_bytes),
            low_precision=computed,
            slice_bytes=slice_bytes,
        )


def activation_bytes(model: ModelFacts, setting: Setting) -> float:
    """Returns what forward leaves for backward, and what is computed again beside it, for one microbatch."""
    return sum(_activations(model, setting))


def _activations(model: ModelFacts, setting: Setting) -> tuple[float, float]:
    """Returns what stays of a microbatch until backward, and what is computed again beside it, a block at a time."""
    kept = recomputed = 0.0
    for number, block in enumerate(model.blocks):
        part_kept, part_again = _kept(block, number, setting)
        kept += part_kept
        recomputed = max(recomputed, part_again)
    return setting.microbatch * model.root.saved_bytes + model.root.cast_bytes + kept, recomputed


def _kept(block: BlockFacts, number: int, setting: Setting) -> tuple[float, float]:
    """Returns what stays of a block until backward, and what backward makes again when it comes to it."""
    everything = setting.microbatch * block.saved_bytes + block.cast_bytes
    policy = setting.checkpoint
    if policy == "none" or (policy.startswith("every_") and number % int(policy[-1])):
        return everything, 0.0
    kept = setting.microbatch * block.input_bytes
    if policy == "matmuls":
        kept += setting.microbatch * block.product_bytes
    return kept, max(everything - kept, 0.0)


def _owed(model: ModelFacts, setting: Setting) -> int:
    """Returns what compression keeps between steps. Norms and biases, which travel whole, are counted in."""
    if setting.compression == "none":
        return 0
    numbers = 2 * model.parameters if setting.error_feedback else 0
    numbers += 2 * setting.factor_rank * model.columns
    return -(-numbers * setting.itemsize // setting.group)


def _in_flight(model: ModelFacts, setting: Setting) -> int:
    """Returns what communication holds for a while: units that are gathered, gradients on their way."""
    return _moving(model, setting) + _compressed(model, setting)


def _compressed(model: ModelFacts, setting: Setting) -> int:
    """Returns the vectors that are compressed, where they are not kept as what is owed, and one bucket's average."""
    if setting.compression == "none":
        return 0
    whole = -(-model.parameters * setting.itemsize // setting.group)
    return min(setting.bucket_bytes, whole) + (0 if setting.error_feedback else whole)


def _moving(model: ModelFacts, setting: Setting) -> int:
    param_bytes, full = _param_bytes(setting), model.parameters
    has_copy = _has_copy(setting)
    if setting.strategy not in FULLY_SHARDED:
        return _buckets(model, setting) if has_copy or setting.strategy == "ddp" else 0
    if not has_copy:
        return 0
    gathered = model.root.parameters + min(1 + setting.prefetch, len(model.blocks)) * model.largest_block
    if setting.reshard is False:
        gathered = full
    elif not isinstance(setting.reshard, bool):
        gathered += full // setting.reshard
    largest = max(model.largest_block, model.root.parameters)
    return min(gathered, full) * param_bytes + min(2 * largest, full) * setting.itemsize


def _buckets(model: ModelFacts, setting: Setting) -> int:
    """Returns two buckets of gradients. Those of ZeRO hold a tensor at least, and stage 2 sends slices to the host."""
    whole = model.parameters * setting.itemsize
    if setting.strategy == "ddp":
        return min(2 * setting.bucket_bytes, whole)
    block, root = (
        max(setting.bucket_bytes, setting.itemsize * largest)
        for largest in (max((b.largest_parameter for b in model.blocks), default=0), model.root.largest_parameter)
    )
    both = min(block + max(block, root), whole)  # the root's tensors are at the two ends
    is_cut = setting.strategy == "zero2" and _is_on_host(setting)
    return both + (both // setting.group if is_cut else 0)


def _is_on_host(setting: Setting) -> bool:
    """Whether the host holds the masters, and updates them."""
    return "optimizer" in setting.offload or "parameters" in setting.offload


def _has_copy(setting: Setting) -> bool:
    """Whether parameters and what is updated are two things; where a rank that is alone has one, nothing moves."""
    return setting.group > 1 or _param_bytes(setting) != setting.itemsize or _is_on_host(setting)


def _param_bytes(setting: Setting) -> int:
    return 2 if setting.precision == "bf16_master" else setting.itemsize
