"""Rules of a model that is split itself: pipelines, their schedules and stages, and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.errors import Problem
from paceline.plan.rule_case import RuleCase, named_twice, nearest_divisor, text_of
from paceline.schedule.schedules import CHUNKS

_OF_A_PIPELINE = ("schedule", "chunks", "stages", "stage_layers")


def split_is_read(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    owners = dict.fromkeys(_OF_A_PIPELINE, "pipeline") if layout.pipeline == 1 else {}
    if layout.tensor == 1:
        owners["sequence_parallel"] = "tensor"
    if layout.data:  # filled in
        owners.pop("chunks", None)
    counts = layout.stage_layers or ()
    for name, owner in owners.items():
        degree = max(2, len(counts)) if name == "stage_layers" else 2
        more = " with a count for each stage" if name == "stage_layers" and len(counts) != degree else ""
        instead = f"{case.key(owner)} = {degree}{more}"
        yield from case.unread(name, f"{owner} parallelism", f"{case.key(owner)} = 1", instead)


def schedule_fits(case: RuleCase) -> Iterator[Problem]:
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


def weights_stay(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if layout.splits_backward and layout.is_fully_sharded:
        what = f"{case.key('schedule')} = {layout.schedule_name} with {case.said('strategy')}"
        rule = "it runs backward in two halves, and full sharding frees the weights between them"
        fix = f"set {case.key('strategy')} = zero2, or {case.key('schedule')} = 1f1b"
        yield Problem(what=what, rule=rule, fix=fix)


def stages_are_asked_once(case: RuleCase) -> Iterator[Problem]:
    layout = case.layout
    if layout.stages != "estimated" and layout.stage_layers is not None:
        what = f"{case.said('stages')} and {case.said('stage_layers')} are both given"
        rule = "a model is cut at the names of layers, or by counting its blocks"
        yield Problem(what=what, rule=rule, fix="remove one of them")


def stages_fit(case: RuleCase) -> Iterator[Problem]:
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
    yield Problem(
        what=case.said("pipeline")
        + (f" x {case.key('chunks')} = {chunks}" if chunks > 1 else "")
        + f" makes {stages} stages of a model with {layers} {noun}",
        rule="every stage runs at least one whole layer",
        fix=f"try {fewer}, or a deeper model",
    )


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


def tensor_fits(case: RuleCase) -> Iterator[Problem]:
    degree, model = case.layout.tensor, case.model
    if degree == 1:
        return
    if model.kind in ("mlp", "resnet"):
        yield Problem(
            what=f"{case.said('tensor')} with model.kind = {model.kind}",
            rule="layers are split by a plan, and there are plans for gpt and for transformers of your own code",
            fix=f"set {case.key('tensor')} = 1, and {case.key('pipeline')} = "
            f"{min(degree, 3 if model.kind == 'mlp' else 10)} to split it by layers",
        )
    for name, heads in (("heads", model.heads), ("kv_heads", model.kv_heads)):
        if heads and heads % degree and (name == "heads" or heads != model.heads):
            yield Problem(
                what=f"{case.said('tensor')} does not divide {case.key(name)} = {heads}",
                rule="every rank has the same number of whole heads",
                fix=f"try {case.key('tensor')} = {nearest_divisor(heads, degree)}, or a multiple of {degree} as "
                f"{case.key(name)}",
            )
    if case.layout.sequence_parallel and model.context and model.context % degree:
        yield Problem(
            what=f"{case.said('tensor')} does not divide the {model.context} tokens of a sample",
            rule="sequence parallelism gives every rank the same number of tokens",
            fix=f"try {case.key('context')} = {max(1, model.context // degree) * degree}, or "
            f"{case.key('sequence_parallel')} = false",
        )


def split_suits_the_rest(case: RuleCase) -> Iterator[Problem]:
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
    if layout.offload.is_any:
        what = f"{case.said('offload')} with {case.degrees}"
        rule = "gradients that stages or tensor ranks share are exchanged on the device"
        fix = f"remove {key('offload')}, and set {key('strategy')} = zero2 for more room"
        yield Problem(what=what, rule=rule, fix=fix)
