"""What goes together in a layout, and what does not: this file and ``compute_rules.py`` alone know.

    problems = rules(RuleCase(layout, ranks=8, node_ranks=4, model=outline))

A rule is a pure function that yields problems: what is wrong, with the values; the rule; the fix. Messages name the
fields of the layout, or the keys of a config where ``keys`` gives them. A rule that needs the number of ranks is silent
while that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from paceline.errors import Problem, UsageError
from paceline.mesh import divisors
from paceline.plan.compute_rules import COMPUTE_RULES
from paceline.plan.layout import OF_FULL_SHARDING, Compression, Layout
from paceline.plan.rule_case import RuleCase, field_problems, named_twice, nearest_divisor, no_effect, text_of
from paceline.schedule.schedules import CHUNKS

_OF_A_PIPELINE = ("schedule", "chunks", "stages", "stage_layers")
_OF_COMPRESSION = {"ratio": ("topk", "randomk"), "factor_rank": ("powersgd",), "threshold": ("threshold",)}


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
            yield Problem(
                what=f"{case.said('chunks')} with {case.said('schedule')}",
                rule=f"it takes {'exactly' if least == most else 'at least'} {least}: the stages that each rank has",
                fix=f"set {case.key('chunks')} = {least}, or {case.key('schedule')} = "
                + ("interleaved" if chunks > 1 else "1f1b"),
            )
    elif layout.schedule.ranks != layout.pipeline:
        what = f"a schedule of {layout.schedule.ranks} ranks with {case.said('pipeline')}"
        rule = "every rank of the pipeline has its row"
        fix = f"set {case.key('pipeline')} = {layout.schedule.ranks}, or make another schedule"
        yield Problem(what=what, rule=rule, fix=fix)


def _weights_stay(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if layout.splits_backward and layout.is_fully_sharded:
        what = f"{case.key('schedule')} = {layout.schedule_name} with {case.said('strategy')}"
        rule = "it runs backward in two halves, and full sharding frees the weights between them"
        fix = f"set {case.key('strategy')} = zero2, or {case.key('schedule')} = 1f1b"
        yield Problem(what=what, rule=rule, fix=fix)


def _stages_are_asked_once(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if layout.stages != "estimated" and layout.stage_layers is not None:
        what = f"{case.said('stages')} and {case.said('stage_layers')} are both given"
        rule = "a model is cut at the names of layers, or by counting its blocks"
        yield Problem(what=what, rule=rule, fix="remove one of them")


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
        what = f"{case.said('stages')} {f'names {twice} twice' if twice else cuts}"
        rule = "a new stage begins at each layer that is named, such as layers.4"
        fix = f"name {stages - 1} layers, each once; or set {case.key('stages')} = auto"
        yield Problem(what=what, rule=rule, fix=fix)


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
    what = f"{case.said('pipeline')}{times} makes {stages} stages of a model with {layers} {noun}"
    rule = "every stage runs at least one whole layer"
    yield Problem(what=what, rule=rule, fix=f"try {fewer}, or a deeper model")


def _counts_fit(case: RuleCase, counts: tuple[int, ...]) -> Iterator[Problem]:
    stages, blocks, is_mlp = case.layout.num_stages, case.model.layers, case.model.kind == "mlp"
    noun = "linear layers" if is_mlp else "blocks"
    asked, good = case.said("stage_layers"), f"give {stages} counts"
    if blocks:
        even = tuple(blocks // stages + (stage < blocks % stages) for stage in range(stages))
        good = f"try {case.key('stage_layers')} = {text_of(even)}"
    if len(counts) != stages:
        what = f"{asked} is for {len(counts)} stages, and there are {stages}"
        yield Problem(what=what, rule="it has a count for each stage: pipeline x chunks", fix=good)
    elif blocks and sum(counts) != blocks:
        what = f"{asked} adds up to {sum(counts)}, and the model has {blocks} {noun}"
        yield Problem(what=what, rule="together the stages run all of them", fix=good)
    elif 0 in (counts if is_mlp else counts[1:-1]):
        rule = "only a first or last stage may have none, and run the embedding or the head alone"
        yield Problem(what=f"{asked} leaves a stage without {noun}", rule=rule, fix=good)


def _tensor_fits(case: RuleCase) -> Iterator[Problem]:
    degree, model, key = case.layout.tensor, case.model, case.key
    if degree == 1:
        return
    if model.kind in ("mlp", "resnet"):
        stages = min(degree, 3 if model.kind == "mlp" else 10)
        what = f"{case.said('tensor')} with model.kind = {model.kind}"
        rule = "layers are split by a plan, and there are plans for gpt and for transformers of your own code"
        fix = f"set {key('tensor')} = 1, and {key('pipeline')} = {stages} to split it by layers"
        yield Problem(what=what, rule=rule, fix=fix)
    for name, heads in (("heads", model.heads), ("kv_heads", model.kv_heads)):
        if heads and heads % degree and (name == "heads" or heads != model.heads):
            what = f"{case.said('tensor')} does not divide {key(name)} = {heads}"
            rule = "every rank has the same number of whole heads"
            fix = f"try {key('tensor')} = {nearest_divisor(heads, degree)}, or a multiple of {degree} as {key(name)}"
            yield Problem(what=what, rule=rule, fix=fix)
    parts = degree * (1 if case.layout.context_ranks == 1 else 2 * case.layout.context_ranks)
    if case.layout.sequence_parallel and model.context and model.context % parts:
        is_one = case.layout.context_ranks == 1
        asked = case.said("tensor") if is_one else f"{case.said('context_ranks', 'tensor')}, with two parts for each,"
        what = f"{asked} does not divide the {model.context} tokens of a sample"
        rule = "sequence parallelism gives every rank the same number of tokens"
        fix = f"try {key('context')} = {max(1, model.context // parts) * parts}, or {key('sequence_parallel')} = false"
        yield Problem(what=what, rule=rule, fix=fix)


def _split_suits_the_rest(case: RuleCase) -> Iterator[Problem]:
    layout, key = case.layout, case.key
    if not layout.is_split:
        return
    if layout.is_compiled and layout.splits_backward:
        what = f"{case.said('compile')} with {key('schedule')} = {layout.schedule_name}"
        rule = "it runs backward in two parts, which a compiled block does in one"
        fix = f"set {key('schedule')} = 1f1b or interleaved, or {key('compile')} = none"
        yield Problem(what=what, rule=rule, fix=fix)
    if layout.compression.is_any:
        yield Problem(
            what=f"{key('compression')}.policy = {layout.compression.policy} with {case.degrees}",
            rule="a tensor that several ranks or stages hold must get the same gradient on all of them, and each "
            "would leave out other parts of it",
            fix=f"set {key('compression')}.policy = none",
        )
    if layout.offload.moves_states:
        what = f"{case.said('offload')} with {case.degrees}"
        rule = "gradients that stages or tensor ranks share are exchanged on the device"
        fix = f"remove {key('offload')}, and set {key('strategy')} = zero2 for more room"
        yield Problem(what=what, rule=rule, fix=fix)


def _degrees_divide(case: RuleCase) -> Iterator[Problem]:
    layout, ranks, parts, key = case.layout, case.ranks, case.layout.degree, case.key
    if ranks is None:
        return
    if ranks % parts:
        fix = f"try {key('ranks')} = {-(-ranks // parts) * parts}"
        split = case.split_by
        if len(split) == 1:
            fix += f", or {key(split[0])} = {nearest_divisor(ranks, getattr(layout, split[0]))}"
        what = f"{case.degrees} {'do' if len(split) > 1 else 'does'} not divide {key('ranks')} = {ranks}"
        rule = "ranks = pipeline x data x context x tensor, and data is a whole number"
        yield Problem(what=what, rule=rule, fix=fix)
    elif layout.data and layout.data * parts != ranks:
        what = f"{case.said('data')} with {case.degrees} on {key('ranks')} = {ranks}"
        rule = f"ranks = pipeline x data x context x tensor, and here that is {layout.data * parts}"
        fix = f"try {key('data')} = {ranks // parts}, or {key('ranks')} = {layout.data * parts}; or leave data out"
        yield Problem(what=what, rule=rule, fix=fix)


def _groups_divide(case: RuleCase) -> Iterator[Problem]:
    ranks, layout = case.ranks, case.layout
    if ranks is None or not case.divides:
        return
    data = ranks // case.layout.degree * layout.context_ranks  # that average gradients
    for name, size, whole in (("shard_ranks", layout.shard_ranks, data), ("node_ranks", layout.node_ranks, ranks)):
        if not size or whole % size == 0:
            continue
        near, multiple = nearest_divisor(whole, size), size * (ranks // whole)
        left = f"the {whole} data ranks of " if whole < ranks else ""
        what = f"{case.key(name)} = {size} does not divide {left}{case.key('ranks')} = {ranks}"
        rule = "groups of ranks are of equal size" if name == "shard_ranks" else "every host runs as many ranks"
        fix = f"try {case.key(name)} = {near}, or a multiple of {multiple} as {case.key('ranks')}"
        yield Problem(what=what, rule=rule, fix=fix)


def _hybrid_has_groups(case: RuleCase) -> Iterator[Problem]:
    layout, ranks = case.layout, case.ranks
    if ranks is None or not case.divides or layout.strategy != "hybrid" or layout.shard_ranks:
        return
    if layout.node_ranks or case.node_ranks == 0 or ranks > (case.node_ranks or ranks):
        return
    half = next((size for size in range(ranks // 2, 1, -1) if ranks % size == 0), 1)
    what = f"{case.said('strategy')} on {ranks} ranks of one host, without {case.key('shard_ranks')}"
    rule = "hybrid shards inside a host and replicates across hosts, and here there is one host"
    fix = f"set {case.key('shard_ranks')} = {half}, or {case.key('strategy')} = fsdp"
    yield Problem(what=what, rule=rule, fix=fix)


def _smaller_group_divides(case: RuleCase) -> Iterator[Problem]:
    layout, ranks = case.layout, case.ranks
    reshard = layout.reshard_after_forward
    if ranks is None or not case.divides or isinstance(reshard, bool) or not layout.is_fully_sharded:
        return
    if layout.strategy == "hybrid" and case.node_ranks == 0 and not (layout.shard_ranks or layout.node_ranks):
        return
    group = layout.for_ranks(ranks, case.node_ranks).shards
    if reshard < 1 or group % reshard:
        key = case.key("reshard_after_forward")
        what = f"{key} = {reshard} does not divide the {group} ranks of a shard group"
        rule = "after forward, parameters are kept by equal parts of a group"
        fix = f"try {key} = {nearest_divisor(group, reshard)}, or true"
        yield Problem(what=what, rule=rule, fix=fix)


def _several_hosts(case: RuleCase) -> Iterator[Problem]:
    ranks, asked, key = case.ranks, case.layout.node_ranks, case.key
    if ranks is None or ranks == 1 or case.layout.algorithm != "hierarchical":
        return
    if (case.node_ranks == 0 and not asked) or (asked or case.node_ranks or ranks) < ranks:
        return
    half = next((size for size in range(ranks // 2, 0, -1) if ranks % size == 0), 1)
    there = f"{key('node_ranks')} = {asked}" if asked else "one host"
    what = f"{case.said('algorithm')} on {ranks} ranks with {there}"
    rule = "it reduces inside hosts and then across them, so that it takes two hosts at least"
    fix = f"set {key('node_ranks')} = {half} to treat the ranks as several hosts, or {key('algorithm')} = auto"
    yield Problem(what=what, rule=rule, fix=fix)


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
        what = f"{case.said('units')} and {case.key('unit_mb')} = {layout.unit_mb:g} are both given"
        yield Problem(what=what, rule="a model is cut into units by name or by size", fix="remove one of them")
    twice = named_twice(units)
    is_slip = not units and case.keys  # in code, () asks for one unit: the root
    if is_slip or twice:
        what = f"{case.said('units')} " + (f"names {twice} twice" if twice else "names no module")
        rule = "each unit is a module of the model, such as layers.0; what is left makes a unit of its own"
        fix = "name each once" if twice else "leave it out for the model's repeated blocks"
        yield Problem(what=what, rule=rule, fix=fix)


def _compression_has_replicas(case: RuleCase) -> Iterator[Problem]:
    strategy, policy = case.layout.strategy, case.layout.compression.policy
    if policy == "none" or strategy in ("ddp", "hybrid"):
        return
    key = f"{case.key('compression')}.policy"
    yield Problem(
        what=f"{key} = {policy} with {case.said('strategy')}",
        rule="compression works where replicas average the same gradients: in "
        f"{case.strategy or strategy} each rank gets a slice of its own, and what the others did not send is nobody's",
        fix=f"set {case.key('strategy')} = ddp or hybrid, or {key} = none",
    )


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
    given, place = case.layout.compression, case.key("compression")
    if given.is_any and given.error_feedback and case.layout.precision == "fp16":
        what = f"{place}.policy = {given.policy} with {case.said('precision')}"
        rule = "fp16 scales the loss by a factor that changes, and what a step did not send keeps its own factor"
        fix = f"set {case.key('precision')} = bf16, or {place}.error_feedback = false"
        yield Problem(what=what, rule=rule, fix=fix)


def _buckets_ordered(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    first, other = layout.first_bucket_mb, layout.bucket_mb
    if case.keys and not layout.tunes_buckets and first > other:  # in code, the smaller one holds
        what = f"{case.key('first_bucket_mb')} = {first:g} is larger than {case.key('bucket_mb')} = {other:g}"
        rule = "the first bucket is the smaller one, so that communication starts early"
        fix = f"set {case.key('first_bucket_mb')} = {other:g}, or {case.key('bucket_mb')} = {first:g}"
        yield Problem(what=what, rule=rule, fix=fix)


def _sequences_can_be_cut(case: RuleCase) -> Iterator[Problem]:
    """A rank has two parts of a sequence, one from its beginning and one from its end, so that all work alike."""
    layout, model, key = case.layout, case.model, case.key
    ranks = layout.context_ranks
    if ranks == 1:
        return
    asked, alone = case.said("context_ranks"), f"set {key('context_ranks')} = 1"
    if model.kind in ("mlp", "resnet"):
        rule = "ranks share the tokens of a sequence, and these samples have none"
        yield Problem(what=f"{asked} with model.kind = {model.kind}", rule=rule, fix=alone)
    elif model.context and model.context < 2 * ranks:
        fix = f"try {key('context_ranks')} = {max(1, model.context // 2)}, or {key('context')} = {2 * ranks} or more"
        rule = "every rank has two parts of each sequence, of at least one token"
        yield Problem(what=f"{asked} for sequences of {model.context} tokens", rule=rule, fix=fix)
    heads = model.heads // layout.tensor
    if layout.context_method == "ulysses" and heads and heads % ranks:
        split = "" if layout.tensor == 1 else f", of which each of {layout.tensor} tensor ranks has {heads}"
        what = f"{asked} with {case.said('context_method')} and {key('heads')} = {model.heads}{split}"
        rule = "ulysses gives every rank whole heads, as many to each"
        near = nearest_divisor(heads, ranks)
        fix = f"try {key('context_ranks')} = {near}, or {key('context_method')} = ring, which heads do not limit"
        yield Problem(what=what, rule=rule, fix=fix)


def _shards_follow_the_sequences(case: RuleCase) -> Iterator[Problem]:
    """Ranks of one shard group are neighbours: they share sequences as groups of context ranks do, or not at all."""
    if case.ranks is None or not case.divides or case.layout.context_ranks == 1 or case.node_ranks == 0:
        return
    held = case.layout.for_ranks(case.ranks, case.node_ranks)
    if held.data * held.context_ranks % held.shards or held.shards_over_context or held.data % held.shards == 0:
        return
    size = held.context_ranks
    what = f"{case.key('shard_ranks')} = {held.shards} with {case.said('context_ranks')} and {held.data} data ranks"
    rule = "a shard group is made of whole groups that share a sequence, or of ranks with other samples alone"
    yield Problem(what=what, rule=rule, fix=f"try {case.key('shard_ranks')} = {size}, or a multiple of it")


def _experts_fit(case: RuleCase) -> Iterator[Problem]:
    layout, expert, model, asked = case.layout, case.layout.expert, case.model, case.said("expert")
    if expert == 1:
        return
    if model.kind == "hf":
        rule = "ranks are dealt the experts of a gpt; those of transformers stay whole, or are split inside"
        fix = f"set {case.key('expert')} = 1, and {case.key('tensor')} = {expert} to split each expert"
        yield Problem(what=f"{asked} with model.kind = hf", rule=rule, fix=fix)
    elif model.kind in ("mlp", "resnet") or (model.kind == "gpt" and model.layers and not model.experts):
        rule = "ranks hold different experts of a block, and these blocks have none"
        fix = f"set {case.key('expert')} = 1" + (", or give the model model.experts" if model.kind == "gpt" else "")
        yield Problem(what=f"{asked} with model.kind = {model.kind} without experts", rule=rule, fix=fix)
    elif model.experts % expert:
        what = f"{asked} does not divide model.experts = {model.experts}"
        near = nearest_divisor(model.experts, expert)
        fix = f"try {case.key('expert')} = {near}, or a multiple of {expert} as model.experts"
        yield Problem(what=what, rule="every rank holds as many whole experts as the others", fix=fix)
    if layout.compression.is_any:
        fix = f"set {case.key('compression')}.policy = none"
        what = f"{asked} with {case.key('compression')}.policy = {layout.compression.policy}"
        yield Problem(what=what, rule="one group averages all that is compressed, and experts have another", fix=fix)
    if case.ranks is None or case.ranks % case.layout.degree:
        return
    held = layout.for_ranks(case.ranks, case.node_ranks)
    shared = held.data * held.context_ranks
    for name, size in (("data", shared), ("shard_ranks", held.shards)):
        if size % expert and (name == "data" or size > 1):
            more = f" x {case.said('context_ranks')}" if name == "data" and held.context_ranks > 1 else ""
            what = f"{asked} does not divide {case.key(name)}{more} = {size}"
            rule = "ranks that hold different experts are neighbours among those that share the batch and the shards"
            good = [each for each in divisors(size) if (model.experts or each) % each == 0]
            best = min(good, key=lambda each: (abs(each - expert), -each))
            fits = name == "data" and model.experts % expert == 0
            rest = f", or {case.ranks * math.lcm(size, expert) // size} ranks" if fits else ""
            yield Problem(what=what, rule=rule, fix=f"try {case.key('expert')} = {best}{rest}")


RULES: Mapping[Callable[[RuleCase], Iterator[Problem]], tuple[str, ...]] = {  # and the fields that each reads
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
    **COMPUTE_RULES,
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
