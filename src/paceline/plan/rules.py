"""What goes together in a layout, and what does not: the only place that knows.

    problems = rules(layout, ranks=8, node_ranks=4, model=outline, keys=CONFIG_KEYS)

A rule is a pure function that yields problems: what is wrong, with the values; the rule; the fix. Messages name the
fields of the layout, or the keys of a config where ``keys`` gives them. A rule that needs the number of ranks is silent
while that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from paceline.errors import Problem, UsageError
from paceline.plan.layout import CHUNKS, Compression, Layout, Offload

CONFIG_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("units", "unit_mb", "prefetch", "reshard_after_forward", "sync_batchnorm"), "parallel."),
    **dict.fromkeys(("strategy", "ranks", "node_ranks", "shard_ranks", "data", "pipeline", "tensor"), "parallel."),
    **dict.fromkeys(("schedule", "chunks", "stages", "stage_layers", "sequence_parallel"), "parallel."),
    **dict.fromkeys(("bucket_mb", "first_bucket_mb", "overlap", "algorithm", "buffers", "compression"), "comm."),
    **dict.fromkeys(("checkpoint_activations", "offload"), "memory."),
    **dict.fromkeys(("precision", "microbatch", "accumulate"), "train."),
    **dict.fromkeys(("compile", "heads", "kv_heads"), "model."),
    **dict.fromkeys(("context",), "data."),
}
_OF_FULL_SHARDING = ("reshard_after_forward", "units", "unit_mb", "prefetch")
_OF_A_PIPELINE = ("schedule", "chunks", "stages", "stage_layers")
_OF_COMPRESSION = {"ratio": ("topk", "randomk"), "factor_rank": ("powersgd",), "threshold": ("threshold",)}
_DEFAULT = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """What rules know of a model; None: not known before it is built. ``noun``: what ``blocks`` counts."""

    kind: str = "factory"
    blocks: int | None = None
    noun: str = "blocks"
    layers: int | None = None  # blocks and both ends
    heads: int | None = None
    kv_heads: int | None = None
    context: int | None = None  # tokens of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What a rule looks at: a layout as it was asked for, the ranks if they are known, the model."""

    layout: Layout
    ranks: int | None
    node_ranks: int | None
    model: ModelOutline
    keys: Mapping[str, str]

    def key(self, name: str) -> str:
        """Returns what messages call a field."""
        return self.keys.get(name, "") + name

    def said(self, *names: str) -> str:
        """Writes fields with their values: ``parallel.pipeline = 2 x parallel.tensor = 4``."""
        return " x ".join(f"{self.key(name)} = {_text(getattr(self.layout, name))}" for name in names)

    @property
    def degrees(self) -> str:
        """The degrees by which the model itself is split."""
        split = [name for name in ("pipeline", "tensor") if getattr(self.layout, name) > 1]
        return self.said(*(split or ["pipeline"]))

    @property
    def parts(self) -> int:
        """Into how many parts a copy of the model is split."""
        return self.layout.pipeline * self.layout.tensor

    @property
    def divides(self) -> bool:
        """Whether the number of ranks is known, and is one that the degrees divide."""
        return self.ranks is not None and self.ranks % self.parts == 0


Find = Callable[[_Case], Iterator[Problem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule, and the fields that it reads; ``model`` stands for the facts of the model."""

    reads: tuple[str, ...]
    find: Find


def rules(
    layout: Layout,
    *,
    ranks: int | None = None,
    node_ranks: int | None = None,
    model: ModelOutline | None = None,
    keys: Mapping[str, str] | None = None,
    only: Callable[[Rule], bool] = lambda _: True,
) -> list[Problem]:
    """Lists what is wrong with a layout; ``only`` chooses rules.

    ``ranks``: how many there are, ``node_ranks`` of them on a host (None: all; 0: not known yet); None: not known yet.
    """
    case = _Case(
        layout=layout,
        ranks=ranks,
        node_ranks=node_ranks,
        model=model or ModelOutline(),
        keys=keys or {},
    )
    return [problem for rule in RULES if only(rule) for problem in rule.find(case)]


def check_layout(
    layout: Layout, ranks: int, node_ranks: int | None = None, model: ModelOutline | None = None
) -> Layout:
    """Returns the layout on so many ranks. Raises UsageError with everything that does not go together."""
    problems = rules(layout, ranks=ranks, node_ranks=node_ranks, model=model)
    if problems:
        raise UsageError("\n".join(map(str, problems)))
    return layout.for_ranks(ranks, node_ranks)


# The mesh.


def _degrees_divide(case: _Case) -> Iterator[Problem]:
    layout, ranks, parts = case.layout, case.ranks, case.parts
    if ranks is None:
        return
    if ranks % parts:
        fix = f"try {case.key('ranks')} = {-(-ranks // parts) * parts}"
        split = [name for name in ("pipeline", "tensor") if getattr(layout, name) > 1]
        if len(split) == 1:
            fix += f", or {case.key(split[0])} = {nearest_divisor(ranks, getattr(layout, split[0]))}"
        yield Problem(
            what=f"{case.degrees} {'do' if len(split) == 2 else 'does'} not divide {case.key('ranks')} = {ranks}",
            rule="ranks = pipeline x data x tensor, and data is a whole number",
            fix=fix,
        )
    elif layout.data and layout.data * parts != ranks:
        yield Problem(
            what=f"{case.said('data')} with {case.degrees} on {case.key('ranks')} = {ranks}",
            rule=f"ranks = pipeline x data x tensor, and here that is {layout.data * parts}",
            fix=f"try {case.key('data')} = {ranks // parts}, or {case.key('ranks')} = {layout.data * parts}; "
            "or leave data out",
        )


def _groups_divide(case: _Case) -> Iterator[Problem]:
    ranks, layout = case.ranks, case.layout
    if ranks is None or not case.divides:
        return
    data = ranks // case.parts
    for name, size, whole in (("shard_ranks", layout.shard_ranks, data), ("node_ranks", layout.node_ranks, ranks)):
        if not size or whole % size == 0:
            continue
        near, multiple = nearest_divisor(whole, size), max(round(whole / size), 1) * size * (ranks // whole)
        left = f"the {whole} data ranks of " if whole < ranks else ""
        yield Problem(
            what=f"{case.key(name)} = {size} does not divide {left}{case.key('ranks')} = {ranks}",
            rule="groups of ranks are of equal size" if name == "shard_ranks" else "every host runs as many ranks",
            fix=f"try {case.key(name)} = {near}, or {case.key('ranks')} = {multiple}",
        )


def _hybrid_has_groups(case: _Case) -> Iterator[Problem]:
    layout, ranks = case.layout, case.ranks
    if ranks is None or not case.divides or layout.strategy != "hybrid" or layout.shard_ranks:
        return
    if layout.node_ranks or case.node_ranks == 0 or ranks > (case.node_ranks or ranks):
        return
    half = next((size for size in range(ranks // 2, 1, -1) if ranks % size == 0), 1)
    yield Problem(
        what=f"{case.said('strategy')} on {ranks} ranks of one host, without {case.key('shard_ranks')}",
        rule="hybrid shards inside a host and replicates across hosts, and here there is one host",
        fix=f"set {case.key('shard_ranks')} = {half}, or {case.key('strategy')} = fsdp",
    )


def _smaller_group_divides(case: _Case) -> Iterator[Problem]:
    layout, ranks = case.layout, case.ranks
    reshard = layout.reshard_after_forward
    if ranks is None or not case.divides or isinstance(reshard, bool) or not layout.is_fully_sharded:
        return
    if layout.strategy == "hybrid" and case.node_ranks == 0 and not (layout.shard_ranks or layout.node_ranks):
        return
    group = layout.for_ranks(ranks, case.node_ranks).shards
    if reshard < 1 or group % reshard:
        key = case.key("reshard_after_forward")
        yield Problem(
            what=f"{key} = {reshard} does not divide the {group} ranks of a shard group",
            rule="after forward, parameters are kept by equal parts of a group",
            fix=f"try {key} = {nearest_divisor(group, reshard)}, or true",
        )


def _several_hosts(case: _Case) -> Iterator[Problem]:
    """The hierarchical algorithm has hosts to go between."""
    ranks, asked = case.ranks, case.layout.node_ranks
    if ranks is None or ranks == 1 or case.layout.algorithm != "hierarchical":
        return
    if (case.node_ranks == 0 and not asked) or (asked or case.node_ranks or ranks) < ranks:
        return
    half = next((size for size in range(ranks // 2, 0, -1) if ranks % size == 0), 1)
    yield Problem(
        what=f"{case.said('algorithm')} on {ranks} ranks with "
        + (f"{case.key('node_ranks')} = {asked}" if asked else "one host"),
        rule="it reduces inside hosts and then across them, so that it takes two hosts at least",
        fix=f"set {case.key('node_ranks')} = {half} to treat the ranks as several hosts, or "
        f"{case.key('algorithm')} = auto",
    )


# Sharding, and what is offloaded or compressed.


def _sharding_is_read(case: _Case) -> Iterator[Problem]:
    """No field of sharding is changed that the strategy does not read."""
    layout = case.layout
    owners = {} if layout.is_fully_sharded else dict.fromkeys(_OF_FULL_SHARDING, "fsdp and hybrid")
    if layout.strategy != "hybrid":
        owners["shard_ranks"] = "hybrid"
    for name, owner in owners.items():
        if getattr(layout, name) != getattr(_DEFAULT, name):
            yield Problem(
                what=f"{case.said(name)} has no effect with {case.said('strategy')}",
                rule=f"it belongs to {owner}",
                fix=f"remove {case.key(name)}, or set {case.key('strategy')} = {owner.partition(' ')[0]}",
            )


def _one_way_to_cut(case: _Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.units is not None and layout.unit_mb is not None:
        yield Problem(
            what=f"{case.said('units')} and {case.key('unit_mb')} = {layout.unit_mb:g} are both given",
            rule="a model is cut into units by name or by size",
            fix="remove one of them",
        )


def _units_are_names(case: _Case) -> Iterator[Problem]:
    units = case.layout.units
    if units is None:
        return
    twice = _twice(units)
    if not units or twice:
        yield Problem(
            what=f"{case.said('units')} " + (f"names {twice} twice" if twice else "names no module"),
            rule="each unit is a module of the model, such as layers.0; what is left makes a unit of its own",
            fix="name each once" if twice else "leave it out for the model's repeated blocks",
        )


def _offload_has_shards(case: _Case) -> Iterator[Problem]:
    """What is offloaded are shards: ddp has none, and ZeRO 1 and 2 keep whole parameters where they compute."""
    strategy, offload, key = case.layout.strategy, case.layout.offload, case.key
    if not offload.is_any or case.layout.is_fully_sharded:
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


def _compression_has_replicas(case: _Case) -> Iterator[Problem]:
    strategy, policy = case.layout.strategy, case.layout.compression.policy
    if policy == "none" or strategy in ("ddp", "hybrid"):
        return
    key = f"{case.key('compression')}.policy"
    yield Problem(
        what=f"{key} = {policy} with {case.said('strategy')}",
        rule="compression works where replicas average the same gradients: in "
        f"{strategy} each rank gets a slice of its own, and what the others did not send of it is nobody's",
        fix=f"set {case.key('strategy')} = ddp or hybrid, or {key} = none",
    )


def _compression_is_read(case: _Case) -> Iterator[Problem]:
    """No number of the compression is changed that its policy does not read."""
    given, default, place = case.layout.compression, Compression(), case.key("compression")
    for name in (each.name for each in fields(given) if each.name != "policy"):
        owners = _OF_COMPRESSION.get(name, (given.policy,))
        is_read = given.policy != "none" and given.policy in owners
        if not is_read and getattr(given, name) != getattr(default, name):
            yield Problem(
                what=f"{place}.{name} = {getattr(given, name)} has no effect with {place}.policy = {given.policy}",
                rule=f"it belongs to {' and '.join(_OF_COMPRESSION.get(name, ('a policy that compresses',)))}",
                fix=f"remove {place}.{name}, or set {place}.policy = {_OF_COMPRESSION.get(name, ('topk',))[0]}",
            )


def _residuals_have_one_unit(case: _Case) -> Iterator[Problem]:
    """What one step did not send is in the unit of the next."""
    given, place = case.layout.compression, case.key("compression")
    if given.is_any and given.error_feedback and case.layout.precision == "fp16":
        yield Problem(
            what=f"{place}.policy = {given.policy} with {case.said('precision')}",
            rule="fp16 scales the loss by a factor that changes, and what a step did not send keeps its own factor",
            fix=f"set {case.key('precision')} = bf16, or {place}.error_feedback = false",
        )


def _buckets_ordered(case: _Case) -> Iterator[Problem]:
    layout = case.layout
    first, other = layout.first_bucket_mb, layout.bucket_mb
    if not layout.tunes_buckets and first > other:
        yield Problem(
            what=f"{case.key('first_bucket_mb')} = {first:g} is larger than {case.key('bucket_mb')} = {other:g}",
            rule="the first bucket is the smaller one, so that communication starts early",
            fix=f"set {case.key('first_bucket_mb')} = {other:g}, or {case.key('bucket_mb')} = {first:g}",
        )


# A pipeline, and layers that several ranks share.


def _split_is_read(case: _Case) -> Iterator[Problem]:
    """No field of a pipeline is changed without one, and none of tensor parallelism."""
    layout = case.layout
    owners = dict.fromkeys(_OF_A_PIPELINE, "pipeline") if layout.pipeline == 1 else {}
    if layout.tensor == 1:
        owners["sequence_parallel"] = "tensor"
    for name, owner in owners.items():
        if getattr(layout, name) != getattr(_DEFAULT, name):
            yield Problem(
                what=f"{case.said(name)} has no effect with {case.key(owner)} = 1",
                rule=f"it belongs to {owner} parallelism",
                fix=f"remove {case.key(name)}, or set {case.key(owner)} = 2",
            )


def _schedule_fits(case: _Case) -> Iterator[Problem]:
    """The schedule takes the chunks, and has a row for each rank."""
    layout = case.layout
    if layout.pipeline == 1:
        return
    if isinstance(layout.schedule, str):
        least, most = CHUNKS[layout.schedule]
        chunks = layout.chunks or least
        if chunks < least or (most is not None and chunks > most):
            yield Problem(
                what=f"{case.said('chunks')} with {case.said('schedule')}",
                rule=f"it takes {'exactly' if least == most else 'at least'} {least}: the stages that each rank has",
                fix=f"set {case.key('chunks')} = {least}, or {case.key('schedule')} = "
                + ("interleaved" if chunks > 1 else "1f1b"),
            )
    elif layout.schedule.ranks != layout.pipeline:
        yield Problem(
            what=f"a schedule of {layout.schedule.ranks} ranks with {case.said('pipeline')}",
            rule="every rank of the pipeline has its row",
            fix=f"set {case.key('pipeline')} = {layout.schedule.ranks}, or make another schedule",
        )


def _weights_stay(case: _Case) -> Iterator[Problem]:
    """A schedule that runs backward in two parts finds the weights in the second."""
    layout = case.layout
    if layout.splits_backward and layout.is_fully_sharded:
        yield Problem(
            what=f"{case.key('schedule')} = {layout.schedule_name} with {case.said('strategy')}",
            rule="it runs backward in two halves, and full sharding frees the weights between them",
            fix=f"set {case.key('strategy')} = zero2, or {case.key('schedule')} = 1f1b",
        )


def _stages_are_asked_once(case: _Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.stages != "estimated" and layout.stage_layers is not None:
        yield Problem(
            what=f"{case.said('stages')} and {case.said('stage_layers')} are both given",
            rule="a model is cut at the names of layers, or by counting its blocks",
            fix="remove one of them",
        )


def _stages_fit(case: _Case) -> Iterator[Problem]:
    """Every stage has a layer; counts and names are for as many stages as there are."""
    layout = case.layout
    if layout.pipeline == 1 or not isinstance(layout.schedule, str):
        return
    problems = list(_enough_layers(case))
    yield from problems
    if layout.stage_layers is not None and not problems:
        yield from _counts_fit(case, layout.stage_layers)
    if isinstance(layout.stages, tuple):
        yield from _names_fit(case, layout.stages)


def _enough_layers(case: _Case) -> Iterator[Problem]:
    layout, model = case.layout, case.model
    stages = layout.num_stages
    if model.layers is None or stages <= model.layers:
        return
    chunks = stages // layout.pipeline
    noun = model.noun if model.layers == model.blocks else "layers, blocks and both ends"
    yield Problem(
        what=case.said("pipeline")
        + (f" x {case.key('chunks')} = {chunks}" if chunks > 1 else "")
        + f" makes {stages} stages of a model with {model.layers} {noun}",
        rule="every stage runs at least one whole layer",
        fix=f"try {case.key('pipeline')} = {max(1, model.layers // chunks)}, or a deeper model",
    )


def _counts_fit(case: _Case, counts: tuple[int, ...]) -> Iterator[Problem]:
    stages, blocks, noun = case.layout.num_stages, case.model.blocks, case.model.noun
    asked, good = case.said("stage_layers"), f"give {stages} counts"
    if blocks:
        even = tuple(blocks // stages + (stage < blocks % stages) for stage in range(stages))
        good = f"try {case.key('stage_layers')} = {_text(even)}"
    if len(counts) != stages:
        what = f"{asked} is for {len(counts)} stages, and there are {stages}"
        yield Problem(what=what, rule="it has a count for each stage: pipeline x chunks", fix=good)
    elif blocks is not None and sum(counts) != blocks:
        what = f"{asked} adds up to {sum(counts)}, and the model has {blocks} {noun}"
        yield Problem(what=what, rule="together the stages run all of them", fix=good)
    elif 0 in (counts if case.model.layers == blocks is not None else counts[1:-1]):
        rule = "only a first or last stage may have none, and run the embedding or the head alone"
        yield Problem(what=f"{asked} leaves a stage without {noun}", rule=rule, fix=good)


def _names_fit(case: _Case, names: tuple[str, ...]) -> Iterator[Problem]:
    stages, twice = case.layout.num_stages, _twice(names)
    if len(names) == stages - 1 and not twice:
        return
    what = f"names {twice} twice" if twice else f"cuts into {len(names) + 1} stages, and there are {stages}"
    yield Problem(
        what=f"{case.said('stages')} {what}",
        rule="a new stage begins at each layer that is named, such as layers.4",
        fix=f"name {stages - 1} layers, each once; or set {case.key('stages')} = auto",
    )


def _tensor_fits(case: _Case) -> Iterator[Problem]:
    """The model has a plan of what is split, and its heads and tokens divide."""
    degree, model = case.layout.tensor, case.model
    if degree == 1:
        return
    if model.kind in ("mlp", "resnet"):
        yield Problem(
            what=f"{case.said('tensor')} with model.kind = {model.kind}",
            rule="layers are split by a plan, and there are plans for gpt and for transformers of your own code",
            fix=f"set {case.key('tensor')} = 1, or {case.key('pipeline')} = "
            f"{min(degree, 3 if model.kind == 'mlp' else 10)}",
        )
    for name, heads in (("heads", model.heads), ("kv_heads", model.kv_heads)):
        if heads and heads % degree and (name == "heads" or heads != model.heads):
            yield Problem(
                what=f"{case.said('tensor')} does not divide {case.key(name)} = {heads}",
                rule="every rank has the same number of whole heads",
                fix=f"try {case.key('tensor')} = {nearest_divisor(heads, degree)}, or {case.key(name)} = "
                f"{max(1, round(heads / degree)) * degree}",
            )
    if case.layout.sequence_parallel and model.context and model.context % degree:
        yield Problem(
            what=f"{case.said('tensor')} does not divide the {model.context} tokens of a sample",
            rule="sequence parallelism gives every rank the same number of tokens",
            fix=f"try {case.key('context')} = {max(1, model.context // degree) * degree}, or "
            f"{case.key('sequence_parallel')} = false",
        )


def _split_suits_the_rest(case: _Case) -> Iterator[Problem]:
    """What works on whole models only is not asked of a split one."""
    layout, key = case.layout, case.key
    if not layout.is_split:
        return
    if layout.compile and layout.splits_backward:
        yield Problem(
            what=f"{case.said('compile')} with {key('schedule')} = {layout.schedule_name}",
            rule="it runs backward in two parts, which a compiled block does in one",
            fix=f"set {key('schedule')} = 1f1b or interleaved, or {key('compile')} = false",
        )
    if layout.compression.is_any:
        yield Problem(
            what=f"{key('compression')}.policy = {layout.compression.policy} with {case.degrees}",
            rule="a tensor that several ranks or stages hold must get the same gradient on all of them, and each "
            "would leave out other parts of it",
            fix=f"set {key('compression')}.policy = none",
        )
    if layout.offload.is_any:
        yield Problem(
            what=f"{case.said('offload')} with {case.degrees}",
            rule="gradients that stages or tensor ranks share are exchanged on the device",
            fix=f"remove {key('offload')}, and set {key('strategy')} = zero2 for more room",
        )


def _has_blocks(case: _Case) -> Iterator[Problem]:
    """Activations are checkpointed block by block, and a perceptron has no repeated blocks."""
    if case.layout.checkpoint_activations != "none" and case.model.kind == "mlp":
        yield Problem(
            what=f"{case.said('checkpoint_activations')} with model.kind = mlp",
            rule="it works on the repeated blocks of a model, and an mlp has none",
            fix=f"remove {case.key('checkpoint_activations')}",
        )


def _engines_have_the_axes(case: _Case) -> Iterator[Problem]:
    """Context and expert parallelism can be predicted, and not run."""
    for name in ("context", "expert"):
        if getattr(case.layout, name) > 1:
            yield Problem(
                what=f"{name} = {getattr(case.layout, name)}",
                rule="predictions know this axis of the mesh, and no engine runs it",
                fix=f"set {name} = 1",
            )


RULES: tuple[Rule, ...] = (
    Rule(reads=("first_bucket_mb", "bucket_mb"), find=_buckets_ordered),
    Rule(reads=("algorithm", "ranks"), find=_several_hosts),
    Rule(reads=("compression", "strategy"), find=_compression_has_replicas),
    Rule(reads=("compression",), find=_compression_is_read),
    Rule(reads=("compression", "precision"), find=_residuals_have_one_unit),
    Rule(reads=("ranks",), find=_groups_divide),
    Rule(reads=("ranks", "strategy"), find=_hybrid_has_groups),
    Rule(reads=("ranks", "strategy"), find=_smaller_group_divides),
    Rule(reads=("strategy",), find=_sharding_is_read),
    Rule(reads=("units",), find=_one_way_to_cut),
    Rule(reads=("units",), find=_units_are_names),
    Rule(reads=("strategy", "offload"), find=_offload_has_shards),
    Rule(reads=("ranks",), find=_degrees_divide),
    Rule(reads=("pipeline", "tensor"), find=_split_is_read),
    Rule(reads=("schedule",), find=_schedule_fits),
    Rule(reads=("schedule", "strategy"), find=_weights_stay),
    Rule(reads=("stages",), find=_stages_are_asked_once),
    Rule(reads=("stages", "heads"), find=_stages_fit),
    Rule(reads=("tensor", "heads", "context"), find=_tensor_fits),
    Rule(reads=("pipeline", "compression", "offload"), find=_split_suits_the_rest),
    Rule(reads=("heads", "checkpoint_activations"), find=_has_blocks),
    Rule(reads=(), find=_engines_have_the_axes),
)


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of ``number`` that is nearest to ``wanted``, the larger of two."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return min(divisors, key=lambda each: (abs(each - wanted), -each))


def _twice(names: tuple[str, ...]) -> str:
    return next((name for name in sorted(names) if names.count(name) > 1), "")


def _text(value: object) -> str:
    value = value.parts if isinstance(value, Offload) else value
    if isinstance(value, tuple):
        return "[" + ", ".join(str(each) for each in value) + "]"
    if value == "estimated":
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)
