"""What a rank holds at the peak of a step, in bytes by category.

    states        parameters, gradients and optimizer: bytes per parameter by framework and precision, cut by sharding
    activations   of the microbatches in flight in the first stage; with full recomputation a block's input for each
                  block, and one block in whole
    temporary     the logits and their gradient, unsharded blocks under FSDP. The logits are gone before a block is
                  computed again: with full recomputation the larger of the two counts
    framework     the device's context, and the allocator's cut pieces

Megatron's mixed precision keeps 18 bytes a parameter: 2 weights, 4 gradients, 12 for masters and moments. States of
experts are cut by the ranks that hold the same experts, which are fewer.
"""

from __future__ import annotations

from paceline.plan.plan import MemoryEstimate
from paceline.plan.workload import Workload, stage_layers
from paceline.units import GIB

_CONTEXT_BYTES = 1.5 * GIB
_CUT_PIECES = 0.05  # of what comes and goes: blocks of the allocator that nothing fits into


def footprint(workload: Workload) -> MemoryEstimate:
    """Returns what the first stage's rank holds."""
    model, layout = workload.model, workload.layout
    if model.is_sampled:
        return MemoryEstimate(
            parameters=model.params * 4,
            gradients=model.params * 4,
            optimizer=model.params * 8,
            activations=workload.micro_batch * model.activations * (4 if workload.run.is_wide else 2) * 2.5,
            framework=_CONTEXT_BYTES,
        )
    layers = stage_layers(model.layers, layout.pipeline)[0]
    dense = (layers * model.attention_params + model.end_params / min(layout.pipeline, 2)) / layout.tensor
    experts = layers * model.mlp_params / layout.expert / layout.tensor
    params = dense + experts
    cut = dense / layout.shards + layers * model.mlp_params / max(layout.expert, layout.shards) / layout.tensor
    weights, gradients, optimizer = _bytes_per_parameter(workload)
    logits = workload.tokens * model.vocab_size * _logit_bytes(workload) if layout.pipeline == 1 else 0.0
    units = (8 * model.layer_params + 2 * model.end_params) / layout.tensor if layout.is_fully_sharded else 0.0
    activations, temporary = _activations(workload, layers), max(0.0, logits - _recomputed_bytes(workload)) + units
    return MemoryEstimate(
        parameters=(cut if layout.sharing.parameters else params) * weights,
        gradients=(cut if layout.sharing.gradients else params) * gradients,
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
            return (2, 4, 4) if layout.is_fully_sharded else (2, 2, 4)
        case _:
            is_flat = run.is_flat and not run.autocast
            return (2, 2, 4) if run.pure else (2, 2, 20) if is_flat else (4, 4, 8)


def _activations(workload: Workload, layers: int) -> float:
    model, layout = workload.model, workload.layout
    # 1F1B holds as many microbatches in the first stage as there are stages; interleaving a little more.
    flight = min(workload.microbatches, layout.pipeline)
    more = 1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks) if layout.chunks > 1 else 1.0
    across = layout.tensor if layout.sequence_parallel else 1
    if workload.recompute == "full":
        return layers * flight * more * workload.tokens * model.width * 2 / across + _recomputed_bytes(workload)
    return layers * flight * more * _block_bytes(workload)


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
    # Queries and what goes into the output's product; keys and values.
    inner = (4 * model.query_width + 2 * model.kv_width) / tensor
    wide = (4 if not model.gated else 6) * model.mlp_width / tensor * (model.active_experts or 1)
    scores = 0.0
    if not run.fused_attention and workload.recompute in ("none", "full"):
        scores = 5 * model.heads * run.seq_len / tensor
    if workload.recompute == "selective":
        # Every second product's result is kept (queries, values, one of the MLP's wide ones, its last), the block's
        # input and attention's result.
        norms = 4 * hidden / across
        inner = (4 * model.query_width + model.kv_width) / tensor
        wide = 2 * model.mlp_width / tensor * (model.active_experts or 1)
    return workload.tokens * width * (norms + inner + wide + scores)


def _logit_bytes(workload: Workload) -> float:
    """Of one logit: itself and its gradient in bf16, both and the logarithms of the softmax in fp32: 16 in torch.

    Tensor-parallel ranks of torch gather a half of them (or none, where the loss is split), Megatron's keep them split.
    Fused losses, which Megatron has and the frameworks with flat parameters, keep one copy in fp32 and write the
    gradient over the logits.
    """
    tensor = workload.layout.tensor
    match workload.run.framework:
        case "megatron":
            return 6 / tensor
        case "compiled":
            return 16 / tensor if workload.run.split_loss else 8 + 8 / tensor
        case _:
            return (6 if workload.run.is_flat else 16) / tensor
