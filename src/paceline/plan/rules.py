"""What goes together in a layout, and what does not: this file alone knows, and ``rules.json`` how it is said.

    problems = rules(RuleCase(layout, ranks=8, node_ranks=4, model=outline))

A rule is a pure function that yields problems. The sentences of each (what is wrong, with the values; the rule; the
fix) name the fields of the layout, or the keys of a config where ``keys`` gives them. A rule that needs the number of
ranks is silent while that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TypeAlias

from paceline.errors import Problem, UsageError
from paceline.mesh import divisors
from paceline.plan.layout import OF_FULL_SHARDING, Compression, Layout
from paceline.plan.rule_case import RuleCase, field_problems, named_twice, nearest_divisor, no_effect, text_of
from paceline.schedule.schedules import CHUNKS

Rule: TypeAlias = Callable[[RuleCase], Iterator[Problem]]
_OF_A_PIPELINE = ("schedule", "chunks", "stages", "stage_layers")
_OF_COMPRESSION = {"ratio": ("topk", "randomk"), "factor_rank": ("powersgd",), "threshold": ("threshold",)}
_NO_TRANSFORMERS = ("mlp", "resnet")


def rules(case: RuleCase, only: Callable[[tuple[str, ...]], bool] = lambda _: True) -> list[Problem]:
    """Lists what is wrong with a layout; ``only`` chooses rules by what they read."""
    return [problem for rule, reads in RULES.items() if only(reads) for problem in rule(case)]


def check_layout(layout: Layout, ranks: int, node_ranks: int | None = None) -> Layout:
    """Returns the layout on so many ranks. Raises UsageError with everything that does not go together."""
    if problems := field_problems(layout) or rules(RuleCase(layout, ranks=ranks, node_ranks=node_ranks)):
        raise UsageError("\n".join(map(str, problems)))
    return layout.for_ranks(ranks, node_ranks)


def _split_is_read(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    owners = dict.fromkeys(_OF_A_PIPELINE, "pipeline") if layout.pipeline == 1 else {}
    if layout.tensor == 1:
        owners["sequence_parallel"] = "tensor"
    if layout.context_ranks == 1:
        owners["context_method"] = "context_ranks"
    if layout.data:  # filled in
        owners.pop("chunks", None)
    counts = layout.stage_layers or ()
    for name, owner in owners.items():
        degree = max(2, len(counts)) if name == "stage_layers" else 2
        more = " with a count for each stage" if name == "stage_layers" and len(counts) != degree else ""
        instead = f"{case.key(owner)} = {degree}{more}"
        what = "ranks that share a sequence" if owner == "context_ranks" else f"{owner} parallelism"
        yield from case.unread(name, what, f"{case.key(owner)} = 1", instead)


def _schedule_fits(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if layout.pipeline == 1:
        return
    if isinstance(layout.schedule, str):
        least, most = CHUNKS.get(layout.schedule, (1, None))  # names are checked before
        chunks = layout.chunks or least
        if chunks < least or (most is not None and chunks > most):
            exactly, other = "exactly" if least == most else "at least", "interleaved" if chunks > 1 else "1f1b"
            yield case.problem("count of chunks", least=least, exactly=exactly, other=other)
    elif layout.schedule.ranks != layout.pipeline:
        yield case.problem("ranks of a schedule")


def _stages_fit(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if layout.pipeline == 1 or not isinstance(layout.schedule, str):
        return
    problems = list(_enough_layers(case))
    yield from problems
    if layout.stage_layers is not None and not problems:
        yield from _counts_fit(case, layout.stage_layers)
    if not isinstance(layout.stages, tuple):
        return
    stages, twice = layout.num_stages, named_twice(layout.stages)
    if twice or len(layout.stages) != stages - 1:
        cuts = f"cuts into {len(layout.stages) + 1} stages, and there are {stages}"
        yield case.problem("names of stages", wrong=f"names {twice} twice" if twice else cuts, wanted=stages - 1)


def _enough_layers(case: RuleCase) -> Iterator[Problem]:
    layout, layers, stages = case.layout, case.model.num_layers, case.layout.num_stages
    if not layers or stages <= layers:
        return
    chunks = stages // layout.pipeline
    fewer = f"{case.key('pipeline')} = {max(1, layers // chunks)}"
    if chunks > 1 and layers // chunks <= 1:  # a pipeline of one rank is none
        fewer = f"{case.key('chunks')} = {max(1, layers // layout.pipeline)}"
    noun = "linear layers" if case.model.kind == "mlp" else "layers, blocks and both ends"
    times = f" x {case.key('chunks')} = {chunks}" if chunks > 1 else ""
    yield case.problem("too many stages", times=times, stages=stages, noun=noun, fewer=fewer)


def _counts_fit(case: RuleCase, counts: tuple[int, ...]) -> Iterator[Problem]:
    stages, blocks, is_mlp = case.layout.num_stages, case.model.layers, case.model.kind == "mlp"
    noun, good = "linear layers" if is_mlp else "blocks", f"give {stages} counts"
    if blocks:
        even = tuple(blocks // stages + (stage < blocks % stages) for stage in range(stages))
        good = f"try {case.key('stage_layers')} = {text_of(even)}"
    if len(counts) != stages:
        yield case.problem("counts for other stages", given=len(counts), stages=stages, good=good)
    elif blocks and sum(counts) != blocks:
        yield case.problem("counts of other blocks", total=sum(counts), noun=noun, good=good)
    elif 0 in (counts if is_mlp else counts[1:-1]):
        yield case.problem("a count of none", noun=noun, good=good)


def _tensor_fits(case: RuleCase) -> Iterator[Problem]:
    degree, model = case.layout.tensor, case.model
    if degree == 1:
        return
    if model.kind in _NO_TRANSFORMERS:
        yield case.problem("no plan for tensors", stages=min(degree, 3 if model.kind == "mlp" else 10))
    for name, heads in (("heads", model.heads), ("kv_heads", model.kv_heads)):
        if heads and heads % degree and (name == "heads" or heads != model.heads):
            near = nearest_divisor(heads, degree)
            yield case.problem("heads among tensor ranks", name=case.key(name), heads=heads, near=near)
    is_one = case.layout.context_ranks == 1
    parts = degree * (1 if is_one else 2 * case.layout.context_ranks)
    if case.layout.sequence_parallel and model.context and model.context % parts:
        asked = case.said("tensor") if is_one else f"{case.said('context_ranks', 'tensor')}, with two parts for each,"
        yield case.problem("tokens among tensor ranks", asked=asked, near=max(1, model.context // parts) * parts)


def _split_suits_the_rest(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if not layout.is_split:
        return
    if layout.is_compiled and layout.splits_backward:
        yield case.problem("two parts of a compiled backward")
    if layout.compression.is_any:
        yield case.problem("compression of a split model")
    if layout.offload.moves_states:
        yield case.problem("offload of a split model")


def _degrees_divide(case: RuleCase) -> Iterator[Problem]:
    layout, ranks, parts, split = case.layout, case.ranks, case.layout.degree, case.split_by
    if ranks is None:
        return
    if ranks % parts:
        do, other = "do" if len(split) > 1 else "does", ""
        if len(split) == 1:
            other = f", or {case.key(split[0])} = {nearest_divisor(ranks, getattr(layout, split[0]))}"
        yield case.problem("degrees among ranks", do=do, enough=-(-ranks // parts) * parts, other=other)
    elif layout.data and layout.data * parts != ranks:
        yield case.problem("data among ranks", enough=layout.data * parts, data=ranks // parts)


def _groups_divide(case: RuleCase) -> Iterator[Problem]:
    ranks, layout = case.ranks, case.layout
    if ranks is None or not case.divides:
        return
    data = ranks // case.layout.degree * layout.context_ranks  # that average gradients
    for name, size, whole in (("shard_ranks", layout.shard_ranks, data), ("node_ranks", layout.node_ranks, ranks)):
        if size and whole % size:
            near, multiple = nearest_divisor(whole, size), size * (ranks // whole)
            left = f"the {whole} data ranks of " if whole < ranks else ""
            rule = "groups of ranks are of equal size" if name == "shard_ranks" else "every host runs as many ranks"
            values = {"name": case.key(name), "size": size, "left": left, "rule": rule}
            yield case.problem("groups among ranks", **values, near=near, multiple=multiple)


def _hybrid_has_groups(case: RuleCase) -> Iterator[Problem]:
    layout, ranks = case.layout, case.ranks
    if ranks is None or not case.divides or layout.strategy != "hybrid" or layout.shard_ranks:
        return
    if layout.node_ranks or case.node_ranks == 0 or ranks > (case.node_ranks or ranks):
        return
    half = next((size for size in range(ranks // 2, 1, -1) if ranks % size == 0), 1)
    yield case.problem("hybrid on one host", half=half)


def _smaller_group_divides(case: RuleCase) -> Iterator[Problem]:
    layout, ranks = case.layout, case.ranks
    reshard = layout.reshard_after_forward
    if ranks is None or not case.divides or isinstance(reshard, bool) or not layout.is_fully_sharded:
        return
    if layout.strategy == "hybrid" and case.node_ranks == 0 and not (layout.shard_ranks or layout.node_ranks):
        return
    group = layout.for_ranks(ranks, case.node_ranks).shards
    if reshard < 1 or group % reshard:
        yield case.problem("parts of a shard group", group=group, near=nearest_divisor(group, reshard))


def _several_hosts(case: RuleCase) -> Iterator[Problem]:
    ranks, asked = case.ranks, case.layout.node_ranks
    if ranks is None or ranks == 1 or case.layout.algorithm != "hierarchical":
        return
    if (case.node_ranks == 0 and not asked) or (asked or case.node_ranks or ranks) < ranks:
        return
    half = next((size for size in range(ranks // 2, 0, -1) if ranks % size == 0), 1)
    there = f"{case.key('node_ranks')} = {asked}" if asked else "one host"
    yield case.problem("hierarchical on one host", there=there, half=half)


def _sharding_is_read(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    owners = {} if layout.is_fully_sharded else dict.fromkeys(OF_FULL_SHARDING, "fsdp and hybrid")
    if layout.strategy != "hybrid":
        owners["shard_ranks"] = "hybrid"
    if layout.data:  # filled in
        owners.pop("shard_ranks", None)
    for name, owner in owners.items():
        other = f"{case.key('strategy')} = {owner.partition(' ')[0]}"
        yield from case.unread(name, owner, case.said("strategy"), other)


def _units_are_asked_once(case: RuleCase) -> Iterator[Problem]:
    layout, units = case.layout, case.layout.units
    if units is None:
        return
    if layout.unit_mb is not None:
        yield case.problem("units by two ways")
    twice = named_twice(units)
    if twice:
        yield case.problem("names of units", wrong=f"names {twice} twice", good="name each once")
    elif not units and case.keys:  # in code, () asks for one unit: the root
        good = "leave it out for the model's repeated blocks"
        yield case.problem("names of units", wrong="names no module", good=good)


def _compression_has_replicas(case: RuleCase) -> Iterator[Problem]:
    if case.layout.compression.is_any and case.layout.strategy not in ("ddp", "hybrid"):
        yield case.problem("compression without replicas", strategy=case.strategy or case.layout.strategy)


def _compression_is_read(case: RuleCase) -> Iterator[Problem]:
    given, default, place = case.layout.compression, Compression(), case.key("compression")
    for name in (each.name for each in fields(given) if each.name != "policy"):
        is_read = given.policy != "none" and given.policy in _OF_COMPRESSION.get(name, (given.policy,))
        if not is_read and getattr(given, name) != getattr(default, name):
            rule = f"it belongs to {' and '.join(_OF_COMPRESSION.get(name, ('a policy that compresses',)))}"
            other = f"set {place}.policy = {_OF_COMPRESSION.get(name, ('topk',))[0]}"
            where = f"with {place}.policy = {given.policy}"
            yield no_effect(f"{place}.{name}", getattr(given, name), where, rule, other)


def _residuals_have_one_unit(case: RuleCase) -> Iterator[Problem]:
    given = case.layout.compression
    if given.is_any and given.error_feedback and case.layout.precision == "fp16":
        yield case.problem("residuals of scaled losses")


def _buckets_ordered(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    is_wrong = not layout.tunes_buckets and layout.first_bucket_mb > layout.bucket_mb
    if case.keys and is_wrong:  # in code, the smaller one holds
        yield case.problem("a large first bucket")


def _sequences_can_be_cut(case: RuleCase) -> Iterator[Problem]:
    """A rank has two parts of a sequence, one from its beginning and one from its end, so that all work alike."""
    layout, model, ranks = case.layout, case.model, case.layout.context_ranks
    if ranks == 1:
        return
    if model.kind in _NO_TRANSFORMERS:
        yield case.problem("no sequences")
    elif model.context and model.context < 2 * ranks:
        most = max(each for each in divisors(ranks) if each <= max(1, model.context // 2))
        yield case.problem("short sequences", most=most, least=2 * ranks)
    heads = model.heads // layout.tensor
    if layout.context_method == "ulysses" and heads and heads % ranks:
        split = "" if layout.tensor == 1 else f", of which each of {layout.tensor} tensor ranks has {heads}"
        yield case.problem("heads among context ranks", split=split, near=math.gcd(heads, ranks))


def _shards_follow_the_sequences(case: RuleCase) -> Iterator[Problem]:
    """Ranks of one shard group are neighbours: they share sequences as groups of context ranks do, or not at all."""
    if case.ranks is None or not case.divides or case.layout.context_ranks == 1 or case.node_ranks == 0:
        return
    held = case.layout.for_ranks(case.ranks, case.node_ranks)
    is_whole = held.data * held.context_ranks % held.shards == 0
    if is_whole and not held.shards_over_context and held.data % held.shards:
        yield case.problem("shards across sequences", held=held)


def _experts_fit(case: RuleCase) -> Iterator[Problem]:
    layout, expert, model = case.layout, case.layout.expert, case.model
    if expert == 1:
        return
    if model.kind == "hf":
        yield case.problem("experts of transformers")
    elif model.kind in _NO_TRANSFORMERS or (model.kind == "gpt" and model.layers and not model.experts):
        yield case.problem("no experts", other=", or give the model model.experts" if model.kind == "gpt" else "")
    elif model.experts % expert:
        yield case.problem("experts among ranks", near=nearest_divisor(model.experts, expert))
    if layout.compression.is_any:
        yield case.problem("compression of experts")
    if case.ranks is None or case.ranks % case.layout.degree:
        return
    held = layout.for_ranks(case.ranks, case.node_ranks)
    shared = held.data * held.context_ranks
    for name, size in (("data", shared), ("shard_ranks", held.shards)):
        if size % expert and (name == "data" or size > 1):
            more = f" x {case.said('context_ranks')}" if name == "data" and held.context_ranks > 1 else ""
            good = [each for each in divisors(size) if (model.experts or each) % each == 0]
            best = min(good, key=lambda each: (abs(each - expert), -each))
            fits = name == "data" and model.experts % expert == 0
            other = f", or {case.ranks * math.lcm(size, expert) // size} ranks" if fits else ""
            values = {"name": f"{case.key(name)}{more}", "size": size, "best": best, "other": other}
            yield case.problem("expert ranks among others", **values)


def _offload_has_shards(case: RuleCase) -> Iterator[Problem]:
    """What is offloaded are shards: ddp has none, and ZeRO 1 and 2 keep whole parameters where they compute."""
    strategy, offload = case.layout.strategy, case.layout.offload
    if not offload.moves_states or case.layout.is_fully_sharded:
        return
    if strategy == "ddp":
        yield case.problem("offload without shards")
    elif offload.parameters or not offload.optimizer:
        yield case.problem("offload of whole parameters")


def _tiles_suit_the_rest(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if layout.mlp_tiles == 1:
        return
    tiles = f"{case.key('mlp_tiles')} = {layout.mlp_tiles or 'auto'}"
    if case.model.kind in _NO_TRANSFORMERS:
        yield case.problem("tiles of other models", tiles=tiles)
    if layout.checkpoint_activations == "matmuls":
        yield case.problem("tiles beside kept products", tiles=tiles)
    if layout.sequence_parallel and layout.tensor > 1:
        yield case.problem("tiles of parts of a sequence", tiles=tiles)


def _fused_loss_has_the_output_layer(case: RuleCase) -> Iterator[Problem]:
    if case.layout.fused_loss is not True:
        return
    if case.layout.tensor > 1:
        yield case.problem("fused loss of tensor ranks")
    if case.layout.pipeline > 1:
        yield case.problem("fused loss of a pipeline")
    if case.model.kind in _NO_TRANSFORMERS:
        yield case.problem("fused loss of a classifier")


def _has_blocks(case: RuleCase) -> Iterator[Problem]:
    if case.layout.checkpoint_activations != "none" and case.model.kind == "mlp":
        yield case.problem("checkpoints without blocks")


def _offload_has_inputs(case: RuleCase) -> Iterator[Problem]:
    if case.layout.offload.activations and case.layout.checkpoint_activations == "none":
        yield case.problem("offload without inputs")


def _has_linear_blocks(case: RuleCase) -> Iterator[Problem]:
    if case.layout.precision in ("fp8", "fp8_row") and case.model.kind in _NO_TRANSFORMERS:
        yield case.problem("8 bits without blocks")


def _weights_stay(case: RuleCase) -> Iterator[Problem]:
    if case.layout.splits_backward and case.layout.is_fully_sharded:
        yield case.problem("weights that are gone")


def _stages_are_asked_once(case: RuleCase) -> Iterator[Problem]:
    if case.layout.stages != "estimated" and case.layout.stage_layers is not None:
        yield case.problem("stages by two ways")


RULES: Mapping[Rule, tuple[str, ...]] = {  # and the fields that each reads
    _buckets_ordered: ("first_bucket_mb", "bucket_mb"),
    _several_hosts: ("algorithm", "ranks"),
    _compression_has_replicas: ("compression", "strategy"),
    _compression_is_read: ("compression",),
    _residuals_have_one_unit: ("compression", "precision"),
    _groups_divide: ("ranks",),
    _hybrid_has_groups: ("ranks", "strategy"),
    _smaller_group_divides: ("ranks", "strategy"),
    _sharding_is_read: ("strategy",),
    _units_are_asked_once: ("units",),
    _offload_has_shards: ("strategy", "offload"),
    _has_blocks: ("heads", "checkpoint_activations"),
    _offload_has_inputs: ("offload", "checkpoint_activations"),
    _tiles_suit_the_rest: ("mlp_tiles", "checkpoint_activations", "sequence_parallel", "heads"),
    _fused_loss_has_the_output_layer: ("fused_loss", "pipeline", "tensor", "heads"),
    _has_linear_blocks: ("precision",),
    _degrees_divide: ("ranks",),
    _split_is_read: ("pipeline", "tensor", "context_ranks"),
    _schedule_fits: ("schedule",),
    _weights_stay: ("schedule", "strategy"),
    _stages_are_asked_once: ("stages",),
    _stages_fit: ("stages", "heads"),
    _tensor_fits: ("tensor", "context_ranks", "heads", "context"),
    _split_suits_the_rest: ("pipeline", "compression", "offload"),
    _sequences_can_be_cut: ("context_ranks", "context_method", "tensor", "heads", "context"),
    _shards_follow_the_sequences: ("ranks", "strategy"),
    _experts_fit: ("expert", "ranks", "strategy", "compression", "heads"),
}
