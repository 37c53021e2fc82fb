"""What goes together in how each rank computes: what is computed again, what lives on the host, what runs in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from paceline.errors import Problem
from paceline.plan.rule_case import RuleCase


def _offload_has_shards(case: RuleCase) -> Iterator[Problem]:
    """What is offloaded are shards: ddp has none, and ZeRO 1 and 2 keep whole parameters where they compute."""
    strategy, offload, key = case.layout.strategy, case.layout.offload, case.key
    if not offload.moves_states or case.layout.is_fully_sharded:
        return
    if strategy == "ddp":
        rule = "what is offloaded are the shards of a rank, and ddp has none"
        fix = f"set {key('strategy')} = zero1 or fsdp (on one rank too), or remove {key('offload')}"
    elif offload.parameters or not offload.optimizer:
        rule = f"{strategy} keeps whole parameters on the device, and gradients where the optimizer updates"
        fix = f"set {key('offload')} = [optimizer], or {key('strategy')} = fsdp"
    else:
        return
    yield Problem(what=f"{case.said('offload')} with {case.said('strategy')}", rule=rule, fix=fix)


def _has_blocks(case: RuleCase) -> Iterator[Problem]:
    if case.layout.checkpoint_activations != "none" and case.model.kind == "mlp":
        what, fix = f"{case.said('checkpoint_activations')} with model.kind = mlp", case.key("checkpoint_activations")
        rule = "it works on the repeated blocks of a model, and an mlp has none"
        yield Problem(what=what, rule=rule, fix=f"remove {fix}")


def _offload_has_inputs(case: RuleCase) -> Iterator[Problem]:
    if case.layout.offload.activations and case.layout.checkpoint_activations == "none":
        key = case.key("checkpoint_activations")
        what = f"{case.said('offload')} with {case.said('checkpoint_activations')}"
        rule = "the activations that wait on the host are the inputs of checkpointed blocks"
        yield Problem(what=what, rule=rule, fix=f"set {key} = full, or remove activations from {case.key('offload')}")


def _tiles_suit_the_rest(case: RuleCase) -> Iterator[Problem]:
    layout, key = case.layout, case.key("mlp_tiles")
    if layout.mlp_tiles == 1:
        return
    asked = f"{key} = {layout.mlp_tiles or 'auto'}"
    if case.model.kind in ("mlp", "resnet"):
        rule = "it is for the MLPs inside the blocks of a transformer, which compute each token by itself"
        yield Problem(what=f"{asked} with model.kind = {case.model.kind}", rule=rule, fix=f"remove {key}")
    if layout.checkpoint_activations == "matmuls":
        rule = "matmuls keeps what the products of an MLP make for all tokens, and tiles are there to have less of it"
        fix = f"set {case.key('checkpoint_activations')} = full, or {key} = 1"
        yield Problem(what=f"{asked} with {case.said('checkpoint_activations')}", rule=rule, fix=fix)
    if layout.sequence_parallel and layout.tensor > 1:
        rule = "ranks add up what they computed, each for its part of the sequence, and a tile has no such parts"
        fix = f"set {case.key('sequence_parallel')} = false, or {key} = 1"
        yield Problem(what=f"{asked} with {case.said('sequence_parallel')}", rule=rule, fix=fix)


def _fused_loss_has_the_output_layer(case: RuleCase) -> Iterator[Problem]:
    if case.layout.fused_loss is not True:
        return
    what, fix = case.said("fused_loss"), f"leave {case.key('fused_loss')} out"
    if case.layout.tensor > 1:
        rule = "ranks that share the output layer have a cross entropy of their own, which gathers no logits either"
        yield Problem(what=f"{what} with {case.said('tensor')}", rule=rule, fix=fix)
    if case.layout.pipeline > 1:
        rule = "the last stage of a pipeline returns logits, and the loss is computed of them"
        yield Problem(what=f"{what} with {case.said('pipeline')}", rule=rule, fix=fix)
    if case.model.kind in ("mlp", "resnet"):
        rule = "it is for output layers over a large vocabulary, and that of a classifier is small"
        yield Problem(what=f"{what} with model.kind = {case.model.kind}", rule=rule, fix=fix)


def _has_linear_blocks(case: RuleCase) -> Iterator[Problem]:
    if case.layout.precision in ("fp8", "fp8_row") and case.model.kind in ("mlp", "resnet"):
        what = f"{case.said('precision')} with model.kind = {case.model.kind}"
        rule = "it is for the linear layers inside the repeated blocks of a model, and this one has none there"
        fix = f"set {case.key('precision')} = bf16_master"
        yield Problem(what=what, rule=rule, fix=fix)


COMPUTE_RULES: Mapping[Callable[[RuleCase], Iterator[Problem]], tuple[str, ...]] = {  # and the fields that each reads
    _offload_has_shards: ("strategy", "offload"),
    _has_blocks: ("heads", "checkpoint_activations"),
    _offload_has_inputs: ("offload", "checkpoint_activations"),
    _tiles_suit_the_rest: ("mlp_tiles", "checkpoint_activations", "sequence_parallel", "heads"),
    _fused_loss_has_the_output_layer: ("fused_loss", "pipeline", "tensor", "heads"),
    _has_linear_blocks: ("precision",),
}
