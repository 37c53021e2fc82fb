"""Memory of one rank by category, for a model of P parameters on N ranks that share it.

Bytes a parameter, for float32 (d = 4), and 2 for the parameters that bf16 masters compute with (m = 2; else m = d):

    strategy      parameters             gradients     optimizer (Adam: k = 2)
    ddp           d  (m + d: masters)    d             k d
    zero1         d  (m + d/N)           d             k d / N
    zero2         d  (m + d/N)           d / N         k d / N
    fsdp          d/N                    d / N         k d / N
    hybrid        as fsdp in a group of N

and as temporary for fsdp the root and two units gathered (m each), and the gradients of two units (d each); for zero1
and zero2 two buckets of gradients, each of a tensor at least. AdamW on masters of a rank that is alone reads gradients
of one microbatch where backward left them: these take m.

Compression with error feedback keeps what each rank owes, of this step and of the one before: 2 d for each parameter
that is averaged (of its slice, for hybrid), and PowerSGD of rank r the same two of its right factors: 2 d r a column.

Offload moves its part to the host: ``optimizer`` masters, gradients and state; ``parameters`` the slices as well. What
stays is a slice in the dtype of computation (m/N) that is gathered from, beside the whole parameters of ZeRO as well,
and the whole gradients of zero1, in the buckets that it reduces and keeps. On CPU ranks the host's memory is the
device's, and nothing moves.

Of a model that is split, all of this holds for the part of a rank (``facts.py``): P is what its stage and its share of
each layer come to, and N the data ranks that hold the same part. Activations count once for each microbatch in flight,
and the estimate is that of the rank that needs the most.

Checkpointing keeps the inputs of a block (and its matrix products, for ``matmuls``) and computes the rest again, one
block at a time. Offloaded activations are these inputs: all but two of them wait on the host.

The most is held at one of these moments of a backward; ``at_other_times`` is what categories add up to beyond that:

    head       activations of all blocks and of the ends     gradients of the head
    block i    activations of blocks up to i, i again        gradients of the head, and of blocks from i on
    end        none                                          all gradients

Known error. Parameters, gradients and optimizer state are exact but for padding (under 1 % for units above 100,000
parameters). Activations: see ``activations.py``. In all, from 3 % less to 7 % more than a dry run of the engine holds
(compiled under autocast 14 % more), which is within 1 % of what GPUs were measured to hold. What allocators lose
between tensors is left to the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.config import Config, OptimConfig, layout_of
from paceline.errors import ConfigError, UsageError
from paceline.plan.layout import WITH_MASTERS, Layout, Offload, loss_rows
from paceline.plan.plan import MemoryEstimate, Plan
from paceline.plan.workload import Workload, stage_layers
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import BlockFacts, ModelFacts, RankPart, as_laid_out, parts_of
from paceline.units import GIB, MIB

# What records of an H200 have beside the tensors (131 to 165 MiB, bench/results/gpu-h200*.json): cuBLAS and cuBLASLt
# take workspaces from torch's allocator, 32 MiB each, for each of the two threads.
WORKSPACE_BYTES = 128 * MIB
_ON_THEIR_WAY = 2  # inputs of blocks, to the host or back, with the one that is used
# And besides, where a step is recorded as a CUDA graph (gpu-h200-10m.json).
GRAPH_BYTES = 64 * MIB


def framework_bytes(device: str) -> int:
    """Returns what a process takes by itself on "cpu"; on "cuda" the context, libraries and workspaces."""
    return {"cpu": 350 * MIB, "cuda": 1000 * MIB}[device]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """What memory depends on besides model and layout: bytes of a parameter as it is built, and what is kept for it."""

    itemsize: int = 4
    optimizer_slots: int = 2  # numbers that the optimizer keeps for each parameter, and the average of weights
    fewer_in_blocks: int = 0  # of these, that it does not keep for a parameter of a block: Muon has one momentum there
    device: str = "cuda"
    spares: int = 0  # processes that wait on a device with a context of their own
    fuses_cast: bool = False  # the optimizer writes masters and copies: gradients may stay as backward left them

    @classmethod
    def of(cls, config: Config, device: str) -> StateFacts:
        return cls(
            itemsize=8 if config.train.dtype == "float64" else 4,
            optimizer_slots=optimizer_slots(config.optim) + (config.train.ema_decay is not None),
            fewer_in_blocks=int(config.optim.kind == "muon"),
            device=device,
            spares=int(
                device == "cuda" and config.recovery.spares > 0
            ),  # as many on one device, as they are shared out
            fuses_cast=config.optim.kind == "adamw" and device == "cuda",
        )


def optimizer_slots(optim: OptimConfig) -> int:
    """Returns how many numbers an optimizer keeps for each parameter; one of unknown code counts as Adam."""
    return int(bool(optim.momentum)) if optim.kind == "sgd" else 2


def is_known(model: ModelFacts, layout: Layout) -> bool:
    """Whether the facts say how a model is split so: not by a schedule of one's own, or for layers of other code."""
    return not layout.is_split or (bool(model.layers) and isinstance(layout.schedule, str))


def estimate_memory(model: ModelFacts, layout: Layout, states: StateFacts) -> MemoryEstimate:
    """Estimates what one rank holds at the worst moment of a step; of a split model, the rank that holds the most."""
    return max(estimate_ranks(model, layout, states), key=lambda need: need.device_bytes)


def estimate_ranks(model: ModelFacts, layout: Layout, states: StateFacts) -> tuple[MemoryEstimate, ...]:
    """Estimates what the ranks of a pipeline hold, one after another; one estimate where there is no pipeline."""
    model = as_laid_out(model, layout)
    if not layout.is_split:
        return (_Estimate(RankPart(model=_with_loss(model, layout, states)), layout, states).total(),)
    return tuple(_Estimate(part, layout, states).total() for part in parts_of(model, layout))


def _with_loss(model: ModelFacts, layout: Layout, states: StateFacts) -> ModelFacts:
    """Returns the facts of a model that is whole, with what its loss keeps: fused with the output layer, no logits."""
    loss = model.loss
    if loss is None or not layout.fuses_loss(loss.vocabulary, states.device):
        return model
    # A chunk of logits is there at a time, and gradients that are made with it.
    rows = min(layout.microbatch * loss.tokens, loss_rows(loss.vocabulary, loss.element_bytes))
    chunk = loss.vocabulary * (rows * loss.element_bytes + loss.width * 4)  # the weight's gradient is in float32
    kept = model.root.saved_bytes - loss.kept_bytes + loss.tokens * loss.width * loss.element_bytes
    root = replace(model.root, saved_bytes=kept)
    return replace(model, root=root, temporary_bytes=chunk / layout.microbatch)


def largest_microbatch(model: ModelFacts, layout: Layout, states: StateFacts, budget_bytes: int) -> int:
    """Returns the most samples that an estimate finds room for, and at least 1: memory grows along a line."""
    one, two = (estimate_memory(model, replace(layout, microbatch=samples), states).device_bytes for samples in (1, 2))
    return max(1, 1 + int((budget_bytes - one) // max(two - one, 1)))


class _Kept(NamedTuple):
    """What stays of a block until backward, on the device and on the host, and what backward makes again."""

    device: float
    again: float = 0.0
    host: float = 0.0


def _kept(block: BlockFacts, number: int, layout: Layout, *, offloads: bool) -> _Kept:
    everything = layout.microbatch * block.saved_bytes + block.cast_bytes
    policy = layout.checkpoint_activations
    if policy == "none" or (policy.startswith("every_") and number % int(policy[-1])):
        return _Kept(everything)
    inputs = layout.microbatch * block.input_bytes
    products = layout.microbatch * block.product_bytes if policy == "matmuls" else 0.0
    again = max(everything - inputs - products, 0.0)
    return _Kept(products, again, inputs) if offloads else _Kept(inputs + products, again)


class _Estimate:
    def __init__(self, part: RankPart, layout: Layout, states: StateFacts) -> None:
        self.part, self.model, self.layout, self.states = part, part.model, layout, states
        self.offload = layout.offload if states.device == "cuda" else Offload()
        self.itemsize = states.itemsize
        # All parameters in bytes: as they were built, a rank's slice of that, and as the module computes with them.
        self.full = self.model.parameters * self.itemsize
        self.slice = self._slice_of(self.full)
        self.param_bytes = 2 if layout.precision in WITH_MASTERS else self.itemsize
        self.computed = self.model.parameters * self.param_bytes
        self.computed_apart = self.param_bytes != self.itemsize  # in another dtype than that of the masters

    @property
    def has_copy(self) -> bool:
        """Whether parameters and what is updated are two things; where a rank that is alone has one, nothing moves."""
        return self.layout.shards > 1 or self.computed_apart or self.offload.updates_on_host

    @property
    def _is_alone(self) -> bool:
        return self.layout.strategy == "ddp" and self.layout.data * self.layout.context_ranks == 1

    def total(self) -> MemoryEstimate:
        layout, model, offload = self.layout, self.model, self.offload
        blocks = [_kept(each, n, layout, offloads=offload.activations) for n, each in enumerate(model.blocks)]
        # What stays of blocks until backward, and what is computed again, a block at a time. Inputs on their way to the
        # host, and back, are on the device.
        moving = _ON_THEIR_WAY * max((each.host for each in blocks), default=0.0)
        kept = layout.microbatch * model.root.saved_bytes + model.root.cast_bytes + sum(each.device for each in blocks)
        activations = round(self.part.in_flight * kept + moving + max((each.again for each in blocks), default=0.0))
        # What is received is posted early: the next input and the next gradient.
        worst = max((block.temporary_bytes for block in model.blocks), default=0.0)
        temporary = round(layout.microbatch * (max(worst, model.temporary_bytes) + 2 * self.part.edge_bytes))
        temporary += self._moving()
        owed, compression = 0, layout.compression
        if compression.is_any:  # norms and biases, which travel whole, are counted in
            numbers = 2 * model.parameters if compression.error_feedback else 0
            numbers += 2 * compression.factor_rank * model.columns if compression.policy == "powersgd" else 0
            owed = self._slice_of(numbers * self.itemsize)
            # The vectors that are compressed, where they are not kept as owed, and one bucket's average.
            temporary += min(layout.bucket_bytes, self.slice) + (0 if compression.error_feedback else self.slice)
        whole = 0 if layout.is_fully_sharded else self.computed
        # The parameters that are updated, where they are not those of the module; slices, where ranks share them.
        is_cut = layout.is_fully_sharded or (self.computed_apart and layout.sharing.optimizer)
        masters = self.slice if is_cut else self.full if self.computed_apart else 0
        host = round(self.part.in_flight * sum(each.host for each in blocks))
        # In the dtype of the module's parameters they are added to none, of none.
        stay_narrow = self.states.fuses_cast and self._is_alone and layout.accumulate == 1
        gradients = self.slice if layout.sharing.gradients else self.computed if stay_narrow else self.full
        # Of the optimizer's state, norms and biases of Muon's blocks count as matrices.
        spared = self.states.fewer_in_blocks * self.itemsize * sum(block.parameters for block in model.blocks)
        optimizer = self.states.optimizer_slots * (self.slice if layout.sharing.optimizer else self.full)
        optimizer -= spared // layout.shards if layout.sharing.optimizer else spared
        if offload.updates_on_host:
            low_slice = self._slice_of(self.computed)
            staged = low_slice if self.computed != self.full else 0
            host += 2 * self.slice + optimizer + staged  # masters and gradients, and what is copied from
            masters, optimizer = 0 if offload.parameters else low_slice, 0
            gradients = 0 if layout.sharing.gradients else gradients
        elif offload.gradients and self.has_copy:
            host += gradients
            # Those of the last microbatch come as the activations go, and the others are added to them.
            temporary += max(0, gradients - activations)
            gradients = 0
        return MemoryEstimate(
            parameters=whole + masters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            buffers=model.buffer_bytes,
            temporary=temporary,
            framework=framework_bytes(self.states.device) * (1 + self.states.spares),
            host=host,
            compression=owed,
            at_other_times=self._at_other_times(blocks, activations, gradients),
        )

    def _at_other_times(self, blocks: Sequence[_Kept], activations: float, gradients: float) -> float:
        """Returns, as 0 or less, what is not there when most is: as backward goes on, activations go, gradients come.

        Gradients of earlier microbatches are there all the time, and those that ranks reduce lie in buffers that stay.
        """
        layout, model, size = self.layout, self.model, self.layout.microbatch
        if layout.pipeline > 1:
            return 0
        comes = layout.accumulate == 1 and (self._is_alone or layout.is_fully_sharded)
        each = gradients / model.parameters if comes else 0.0  # bytes of a parameter's gradient
        there = gradients - each * sum(part.parameters for part in (*model.entry, *model.blocks))
        stays = model.root.cast_bytes + size * sum(part.saved_bytes for part in model.entry or (model.root,))
        waiting = activations - max((block.again for block in blocks), default=0.0)
        worst = max((block.temporary_bytes for block in model.blocks), default=0.0)
        most = max(gradients, waiting + there + size * model.temporary_bytes)
        waiting -= size * model.root.saved_bytes + model.root.cast_bytes
        for block, kept in zip(reversed(model.blocks), reversed(blocks), strict=True):
            there += each * block.parameters
            now = stays + waiting + kept.again + there
            most = max(most, now + size * (block.temporary_bytes or model.temporary_bytes))
            waiting -= kept.device
        return min(0, round(most - activations - gradients - size * max(worst, model.temporary_bytes)))

    def _moving(self) -> int:
        layout, model, full = self.layout, self.model, self.model.parameters
        if not layout.is_fully_sharded:
            return self._buckets() if self.has_copy or layout.strategy == "ddp" else 0
        if not self.has_copy:
            return 0
        gathered = model.root.parameters + min(1 + layout.prefetch, len(model.blocks)) * model.largest_block
        reshard = layout.reshard_after_forward
        if reshard is False:
            gathered = full
        elif not isinstance(reshard, bool):
            gathered += full // reshard
        largest = max(model.largest_block, model.root.parameters)
        return min(gathered, full) * self.param_bytes + min(2 * largest, full) * self.itemsize

    def _buckets(self) -> int:
        """Returns two buckets of gradients. Those of ZeRO hold a tensor at least; stage 2 sends slices to the host."""
        bucket, model = self.layout.bucket_bytes, self.model
        if self.layout.strategy == "ddp":
            return min(2 * bucket, self.full)
        block = max([bucket, *(self.itemsize * each.largest_parameter for each in model.blocks)])
        root = max(bucket, self.itemsize * model.root.largest_parameter)
        both = min(block + max(block, root), self.full)  # the root's tensors are at the two ends
        is_cut = self.layout.strategy == "zero2" and self.offload.updates_on_host
        return both + (both // self.layout.shards if is_cut else 0)

    def _slice_of(self, num_bytes: int) -> int:
        """Returns a rank's slice; of experts, those that hold the same ones share the states, which may be fewer."""
        shards, model = self.layout.shards, self.model
        experts = num_bytes * model.expert_parameters // max(1, model.parameters)
        return -(-(num_bytes - experts) // shards) - (-experts // max(1, shards // self.layout.expert))


def rank_estimates(config: Config, hosts: int = 1, facts: ModelFacts | None = None) -> tuple[MemoryEstimate, ...]:
    """Estimates what ranks of each stage hold, for a config whose ranks are settled; () where that is not known."""
    parallel, ranks = config.parallel, config.parallel.decided_ranks
    if "auto" in (config.train.microbatch, parallel.strategy):
        return ()
    try:
        layout = layout_of(config, ranks, ranks // hosts)
        model = facts or describe_model(config, parallel.device)
        if model is None or not is_known(model, layout):
            return ()
        return estimate_ranks(model, layout, StateFacts.of(config, parallel.device))
    except (UsageError, ConfigError):
        return ()


def with_memory(plan: Plan, config: Config, model: ModelFacts | None, device: str) -> Plan:
    """Returns the plan with an estimate of what a rank will hold, if the model is known: the rank with the most."""
    if model is None or not is_known(model, plan.layout):
        return plan
    return replace(plan, memory=estimate_memory(model, plan.layout, StateFacts.of(config, device)))


@dataclass(slots=True, kw_only=True)
class EngineMemory:
    """Bytes of a rank by layout, for the model, dtype and optimizer of one config; each layout is estimated once."""

    facts: ModelFacts
    states: StateFacts
    _known: dict[Layout, MemoryEstimate | None] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, device: str = "cuda") -> EngineMemory | None:
        facts = describe_model(config, device)
        return None if facts is None else cls(facts=facts, states=StateFacts.of(config, device))

    def estimate(self, layout: Layout) -> MemoryEstimate | None:
        """Returns bytes by category; None where the model cannot be cut so."""
        flight = min(layout.accumulate, 2 * layout.pipeline * layout.chunks)  # more are never in flight
        layout = replace(layout, accumulate=flight)
        if layout not in self._known:
            try:
                self._known[layout] = estimate_memory(self.facts, layout, self.states)
            except UsageError:
                self._known[layout] = None
        return self._known[layout]


# The same by coarser formulas, for frameworks of published runs and for models that this package does not build.
#
#     activations   of the microbatches in flight in the first stage; with full recomputation a block's input for each
#                   block, and one block in whole
#     temporary     the root and, whichever is larger, the logits and their gradient or what backward of a block needs:
#                   gathered blocks under FSDP, the block that is computed again. Or what an optimizer that is not fused
#                   works in
#     whole         under FSDP2 gradients of all parameters in fp32, from the first of several microbatches to the last,
#                   and in a pipeline the parameters too (torch/distributed: fsdp/_fully_shard/_fsdp_param.py,
#                   pipelining/stage.py)
#     framework     the device's context, and the allocator's cut pieces
#
# Megatron's mixed precision keeps 18 bytes a parameter: 2 weights, 4 gradients, 12 for masters and moments. States of
# experts are cut by the ranks that hold the same experts, which are fewer.

_CONTEXT_BYTES = 1.5 * GIB
# Of a parameter that a rank updates: the root of its second moment, and in torch of 2023 the denominator beside it
# (torch/optim/adamw.py: _multi_tensor_adamw). Fused optimizers, which the other frameworks have, write neither down.
UPDATE_BYTES, _UPDATE_BYTES_2023 = 4, 8
_CUT_PIECES = 0.05  # of what comes and goes: blocks of the allocator that nothing fits into


def footprint(workload: Workload, update_bytes: int = _UPDATE_BYTES_2023) -> MemoryEstimate:
    model, layout, run = workload.model, workload.layout, workload.run
    if model.is_sampled:
        return MemoryEstimate(
            parameters=model.params * 4,
            gradients=model.params * 4,
            optimizer=model.params * 8,
            activations=workload.micro_batch * model.activations * (4 if workload.run.is_wide else 2) * 2.5,
            framework=_CONTEXT_BYTES,
        )
    layers = stage_layers(model.layers, layout.pipeline)[0]
    dense = (layers * model.other_params + model.end_params / min(layout.pipeline, 2)) / layout.tensor
    experts = layers * model.routed_params / layout.tensor
    params = dense + experts / layout.expert
    cut = dense / layout.shards + experts / max(layout.expert, layout.shards)
    weights, gradients, optimizer = _bytes_per_parameter(workload)
    logits = workload.tokens * model.vocab_size * _logit_bytes(workload)
    block = model.other_params + model.routed_params / layout.expert
    units = ends = 0.0  # blocks that are gathered and reduced, while there are no logits; the root
    if layout.is_fully_sharded and layout.pipeline > 1 and run.keeps_gradients:
        ends = 2 * params  # which a pipeline of torch gathers once a step
    elif layout.is_fully_sharded:
        units = (4 if workload.reduces_once else 8) * block / layout.tensor
        ends = 2 * model.end_params / layout.tensor
    # 1F1B holds as many microbatches in the first stage as there are stages; interleaving a little more.
    flight = min(workload.microbatches, layout.pipeline)
    more = 1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks) if layout.chunks > 1 else 1.0
    activations = layers * flight * more
    if workload.recompute == "full":
        across = layout.tensor if layout.sequence_parallel else 1
        activations = activations * workload.tokens * model.width * 2 / across + _recomputed_bytes(workload)
    else:
        activations *= _block_bytes(workload)
    # Where there are stages, the logits are in the last one, which holds a microbatch at a time.
    elsewhere = activations * (1 - 1 / (flight * more)) if layout.pipeline > 1 else 0.0
    temporary = max(units, logits - _recomputed_bytes(workload) - elsewhere) + ends
    if run.framework == "eager":  # the update comes when activations are gone
        temporary = max(temporary, cut * update_bytes - activations)
    return MemoryEstimate(
        parameters=(cut if layout.sharing.parameters else params) * weights,
        gradients=4 * params if workload.reduces_once else (cut if layout.sharing.gradients else params) * gradients,
        optimizer=cut * optimizer,
        activations=activations,
        temporary=temporary,
        framework=_CONTEXT_BYTES + _CUT_PIECES * (activations + temporary),
    )


def _bytes_per_parameter(workload: Workload) -> tuple[float, float, float]:
    """Weights, gradients, optimizer.

    Megatron: masters and moments in fp32, gradients summed in fp32. Eager: fp32 throughout under autocast; else
    low-precision weights and gradients, and of the rank's share of them flat copies (4), gradients in fp32 (4), masters
    and moments (12). Compiled: bf16 throughout, with gradients in fp32 where they are reduced so.
    """
    run, layout = workload.run, workload.layout
    if run.is_wide:
        return 4, 4, 8
    match run.framework:
        case "megatron":
            return 2, 4, 12
        case "compiled":
            return (2, 4, 4) if layout.is_fully_sharded or workload.microbatches > 1 else (2, 2, 4)
        case _:
            is_flat = run.is_flat and not run.autocast
            return (2, 2, 4) if run.pure else (2, 2, 20) if is_flat else (4, 4, 8)


def _recomputed_bytes(workload: Workload) -> float:
    """A block that is computed again. torch holds its gradients beside it; Megatron frees one as it makes the other."""
    if workload.recompute != "full":
        return 0.0
    return _block_bytes(workload) * (1 if workload.run.framework == "megatron" else 2)


def _block_bytes(workload: Workload) -> float:
    """Of one block: the count of Korthikanti and others (arXiv 2205.05198), 34 h + 5 a s bytes a token for a GPT."""
    model, layout, run = workload.model, workload.layout, workload.run
    tensor = layout.tensor
    across = tensor if layout.sequence_parallel else 1
    hidden = model.width
    width = 2 if run.is_wide else 1
    # Two inputs of norms, two of products; Megatron's GPTs keep two masks of dropout as well, others have none.
    norms = (10 if run.framework == "megatron" else 8) * hidden / across
    if run.framework != "megatron":  # which gathers the two inputs of products again in backward
        norms += 4 * hidden * (1 - 1 / across)
    # Queries and what goes into the output's product; keys and values.
    inner = (4 * model.query_width + 2 * model.kv_width) / tensor
    wide = (4 if not model.gated else 6) * model.hidden_width / tensor
    scores = 0.0
    if not run.fused_attention and workload.recompute in ("none", "full"):
        scores = 5 * model.heads * run.seq_len / tensor
    if workload.recompute == "selective":
        # Every second product's result is kept (queries, values, one of the MLP's wide ones, its last), the block's
        # input and attention's result.
        norms = 4 * hidden / across
        inner = (4 * model.query_width + model.kv_width) / tensor
        wide = 2 * model.hidden_width / tensor
    # Of experts: the rows that their first products read. Megatron weighs before the last ones, which keep no more.
    wide += 2 * model.sparse_share * model.active * model.width / across
    return workload.tokens * width * (norms + inner + wide + scores)


def _logit_bytes(workload: Workload) -> float:
    """Of one logit. torch converts it to fp32: 16 with the logarithms of the softmax, both gradients and its own two.

    Runs that accumulate gradients, and tensor-parallel ranks that gather logits, are taken to keep it in bf16: four
    copies. Where the loss is split (torch/distributed/tensor/parallel/loss.py), five in fp32 and its own two. Fused
    losses, which Megatron has and the frameworks with flat parameters, keep one in fp32 and write the gradient over the
    logits.
    """
    tensor = workload.layout.tensor
    match workload.run.framework:
        case "megatron":
            return 6 / tensor
        case "compiled":
            if workload.run.split_loss:
                return 22 / tensor
            if tensor > 1:
                return 8 + 2 / tensor
            return 8 if workload.microbatches > 1 else 16
        case _:
            return (6 if workload.run.is_flat else 16) / tensor
