"""How a model itself is spread: pipeline and tensor degrees, what is left for the batch, and the rules of their keys.

    ranks = pipeline x data x tensor            data ranks share the batch; parallel.strategy is about them
    stages = pipeline x chunks                  chunks: stages of each rank

Pipeline microbatches are those of the batch algebra: ``train.accumulate`` of them flow through the stages in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.batch import BatchPlan, batch_plan
from paceline.config.gpt_sizes import gpt_shape
from paceline.config.known_data import known_shape
from paceline.config.sharding import FULLY_SHARDED, data_ranks, nearest_divisor
from paceline.config.suggest import near_files
from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.config.schema import Config, ParallelConfig

_CHUNKS = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (2, None), "zb-h1": (1, 1), "zb-v": (2, 2)}  # least, most
_SPLIT_BACKWARD = ("zb-h1", "zb-v")
_BLOCKS = {18: 8, 50: 16}  # of a residual network, by depth
_OF_A_PIPELINE = ("schedule", "chunks", "stages", "stage_layers", "schedule_file")


def is_split(parallel: ParallelConfig) -> bool:
    """Whether the model is spread over ranks, by layers or inside them."""
    return parallel.pipeline > 1 or parallel.tensor > 1


def num_chunks(parallel: ParallelConfig) -> int:
    """Returns how many stages each rank has: what was asked, or the fewest that the schedule takes."""
    return parallel.chunks or _CHUNKS[parallel.schedule][0]


def num_stages(parallel: ParallelConfig) -> int:
    """Returns how many stages the model is cut into; 1 where there is no pipeline."""
    return parallel.pipeline * num_chunks(parallel) if parallel.pipeline > 1 else 1


def config_batch(config: Config, ranks: int) -> BatchPlan:
    """Resolves the batch of a config on this many ranks, of which only the data ranks share it.

    Raises ConfigError where it cannot be divided.
    """
    return batch_plan(config.train, data_ranks(config.parallel, ranks), config.parallel.pipeline)


def check_split(config: Config, ranks: int) -> list[Problem]:
    """Lists what this number of ranks breaks about the degrees."""
    parallel = config.parallel
    parts = parallel.pipeline * parallel.tensor
    asked = _degrees(parallel)
    if ranks % parts:
        more = -(-ranks // parts) * parts
        fix = f"try parallel.ranks = {more}"
        if parallel.pipeline > 1 and parallel.tensor == 1:
            fix += f", or parallel.pipeline = {nearest_divisor(ranks, parallel.pipeline)}"
        elif parallel.tensor > 1 and parallel.pipeline == 1:
            fix += f", or parallel.tensor = {nearest_divisor(ranks, parallel.tensor)}"
        return [
            Problem(
                what=f"{asked} {'do' if ' x ' in asked else 'does'} not divide parallel.ranks = {ranks}",
                rule="ranks = pipeline x data x tensor, and data is a whole number",
                fix=fix,
            )
        ]
    if parallel.data is None or parallel.data * parts == ranks:
        return []
    return [
        Problem(
            what=f"parallel.data = {parallel.data} with {asked} on parallel.ranks = {ranks}",
            rule=f"ranks = pipeline x data x tensor, and here that is {parallel.data * parts}",
            fix=f"try parallel.data = {ranks // parts}, or parallel.ranks = {parallel.data * parts}; or leave data out",
        )
    ]


def split_fits(config: Config) -> list[Problem]:
    """The degrees fit the ranks, where their number is given."""
    return [] if config.parallel.ranks == "auto" else check_split(config, config.parallel.ranks)


def split_keys_apply(config: Config) -> list[Problem]:
    """No key of a pipeline is changed without one, and none of tensor parallelism."""
    parallel, defaults = config.parallel, type(config.parallel)()
    if parallel.sharding_strategy == "auto":
        return []  # said by ``mesh_is_asked_once``
    unread = dict.fromkeys(_OF_A_PIPELINE, "pipeline") if parallel.pipeline == 1 else {}
    if parallel.tensor == 1:
        unread["sequence_parallel"] = "tensor"
    return [
        Problem(
            what=f"parallel.{key} = {_text(getattr(parallel, key))} has no effect with parallel.{owner} = 1",
            rule=f"it belongs to {owner} parallelism",
            fix=f"remove parallel.{key}, or set parallel.{owner} = 2",
        )
        for key, owner in unread.items()
        if getattr(parallel, key) != getattr(defaults, key)
    ]


def mesh_is_asked_once(config: Config) -> list[Problem]:
    """What ``parallel.sharding_strategy = auto`` chooses is not given as well."""
    parallel = config.parallel
    if parallel.sharding_strategy == "manual":
        return []
    open_values = {name: field.default for name, field in type(parallel).model_fields.items()} | {"strategy": "auto"}
    return [
        Problem(
            what=f"parallel.sharding_strategy = auto with parallel.{key} = {_text(value)}",
            rule="auto chooses the strategy, the pipeline and tensor degrees, and how the pipeline runs",
            fix=f"{'set parallel.strategy = auto' if key == 'strategy' else f'remove parallel.{key}'}, or set "
            "parallel.sharding_strategy = manual",
        )
        for key in ("strategy", "pipeline", "tensor", "data", *_OF_A_PIPELINE, "sequence_parallel")
        if (value := getattr(parallel, key)) != open_values[key]
    ]


def schedule_fits(config: Config) -> list[Problem]:
    """The schedule takes the chunks, and the strategy leaves it the weights that it needs."""
    parallel, problems = config.parallel, list[Problem]()
    if parallel.pipeline == 1:
        return []
    least, most = _CHUNKS[parallel.schedule]
    chunks = num_chunks(parallel)
    if parallel.schedule_file is None and (chunks < least or (most is not None and chunks > most)):
        rule = f"it takes {'exactly' if least == most else 'at least'} {least}"
        other = f"parallel.schedule = {'interleaved' if chunks > 1 else '1f1b'}"
        problems.append(
            Problem(
                what=f"parallel.chunks = {chunks} with parallel.schedule = {parallel.schedule}",
                rule=f"{rule}: the stages that each rank has",
                fix=f"set parallel.chunks = {least}, or {other}",
            )
        )
    if parallel.schedule in _SPLIT_BACKWARD and parallel.strategy in FULLY_SHARDED:
        problems.append(
            Problem(
                what=f"parallel.schedule = {parallel.schedule} with parallel.strategy = {parallel.strategy}",
                rule="it runs backward in two halves, and full sharding frees the weights between them",
                fix="set parallel.strategy = zero2, or parallel.schedule = 1f1b",
            )
        )
    return problems


def schedule_file_fits(config: Config) -> list[Problem]:
    """A schedule of one's own is there, and no other one is asked for."""
    parallel = config.parallel
    if parallel.schedule_file is None:
        return []
    path, problems = Path(parallel.schedule_file), list[Problem]()
    other = {"schedule": "1f1b", "chunks": None}
    for key in (key for key, default in other.items() if getattr(parallel, key) != default):
        problems.append(
            Problem(
                what=f"parallel.schedule_file and parallel.{key} = {getattr(parallel, key)} are both given",
                rule="the file says what each rank does, and with which stages",
                fix=f"remove parallel.{key}, or parallel.schedule_file",
            )
        )
    if not path.is_file():
        near = near_files(path)
        problems.append(
            Problem(
                what=f"parallel.schedule_file = {parallel.schedule_file!r} does not exist",
                rule=f"it is a CSV file as paceline schedule --csv writes, and a relative path starts at {Path.cwd()}",
                fix=f"did you mean {' or '.join(near)}?" if near else "leave it out, and set parallel.schedule",
            )
        )
    return problems


def stages_are_asked_once(config: Config) -> list[Problem]:
    """Stages are found, named or counted."""
    parallel = config.parallel
    if parallel.stages == "auto" or parallel.stage_layers is None:
        return []
    return [
        Problem(
            what=f"parallel.stages = {_text(parallel.stages)} and parallel.stage_layers = "
            f"{_text(parallel.stage_layers)} are both given",
            rule="a model is cut at the names of layers, or by counting its blocks",
            fix="remove one of them",
        )
    ]


def stages_fit(config: Config) -> list[Problem]:
    """Every stage has a layer; counts and names are for as many stages as there are."""
    parallel = config.parallel
    if parallel.pipeline == 1 or parallel.schedule_file is not None:
        return []
    stages = num_stages(parallel)
    problems = list(_enough_layers(config, stages))
    if parallel.stage_layers is not None and not problems:
        problems += _counts_fit(config, parallel.stage_layers, stages)
    if parallel.stages not in ("auto", "measured"):
        assert isinstance(parallel.stages, tuple)
        problems += _names_fit(parallel.stages, stages)
    return problems


def tensor_fits(config: Config) -> list[Problem]:
    """The model has a plan of what is split, and its heads divide."""
    parallel, model = config.parallel, config.model
    if parallel.tensor == 1:
        return []
    if model.kind in ("mlp", "resnet"):
        return [
            Problem(
                what=f"parallel.tensor = {parallel.tensor} with model.kind = {model.kind}",
                rule="layers are split by a plan, and there are plans for gpt and for transformers of your own code",
                fix="set parallel.tensor = 1, or parallel.pipeline = "
                f"{min(parallel.tensor, 3 if model.kind == 'mlp' else 10)}",
            )
        ]
    return list(_heads_divide(config)) if model.kind == "gpt" else []


def split_suits_the_rest(config: Config) -> list[Problem]:
    """What works on whole models only is not asked of a split one."""
    parallel, degrees, problems = config.parallel, _degrees(config.parallel), list[Problem]()
    if not is_split(parallel):
        return []
    if parallel.strategy == "auto" and parallel.sharding_strategy == "manual":
        problems.append(
            Problem(
                what=f"parallel.strategy = auto with {degrees}",
                rule="it chooses for models that each rank, or all ranks together, hold whole",
                fix="set parallel.strategy = zero1 or ddp; or leave all of it to parallel.sharding_strategy = auto",
            )
        )
    if config.model.compile and parallel.pipeline > 1 and parallel.schedule in _SPLIT_BACKWARD:
        problems.append(
            Problem(
                what=f"model.compile = true with parallel.schedule = {parallel.schedule}",
                rule="it runs backward in two parts, which a compiled block does in one",
                fix="set parallel.schedule = 1f1b or interleaved, or model.compile = false",
            )
        )
    policy = config.comm.compression.policy
    if policy != "none":
        problems.append(
            Problem(
                what=f"comm.compression.policy = {policy} with {degrees}",
                rule="a tensor that several ranks or stages hold must get the same gradient on all of them, and each "
                "would leave out other parts of it",
                fix="set comm.compression.policy = none",
            )
        )
    if config.memory.offload:
        problems.append(
            Problem(
                what=f"memory.offload = {_text(config.memory.offload)} with {degrees}",
                rule="gradients that stages or tensor ranks share are exchanged on the device",
                fix="remove memory.offload, and set parallel.strategy = zero2 for more room",
            )
        )
    return problems


def microbatch_is_known(config: Config) -> list[Problem]:
    """Trials of a microbatch are for a model that each rank runs by itself."""
    if not is_split(config.parallel) or config.train.microbatch != "auto":
        return []
    return [
        Problem(
            what=f"train.microbatch = auto with {_degrees(config.parallel)}",
            rule="a pass is one of several ranks together, so that one of them cannot try how much fits",
            fix=f"set train.accumulate = {4 * config.parallel.pipeline}, or train.microbatch",
        )
    ]


def _enough_layers(config: Config, stages: int) -> Iterator[Problem]:
    parallel, blocks = config.parallel, _num_blocks(config)
    if blocks is None:
        return
    layers, noun = (
        (blocks, "linear layers") if config.model.kind == "mlp" else (blocks + 2, "layers, blocks and both ends")
    )
    if stages <= layers:
        return
    chunks = f" x parallel.chunks = {num_chunks(parallel)}" if num_chunks(parallel) > 1 else ""
    yield Problem(
        what=f"parallel.pipeline = {parallel.pipeline}{chunks} makes {stages} stages of a model with {layers} {noun}",
        rule="every stage runs at least one whole layer",
        fix=f"try parallel.pipeline = {max(1, layers // num_chunks(parallel))}, or a deeper model",
    )


def _counts_fit(config: Config, counts: tuple[int, ...], stages: int) -> Iterator[Problem]:
    blocks, asked = _num_blocks(config), f"parallel.stage_layers = {_text(counts)}"
    good = f"try parallel.stage_layers = {_text(_even(blocks, stages))}" if blocks else f"give {stages} counts"
    noun = "linear layers" if config.model.kind == "mlp" else "blocks"
    if len(counts) != stages:
        what = f"{asked} is for {len(counts)} stages, and there are {stages}"
        yield Problem(what=what, rule="it has a count for each stage: pipeline x chunks", fix=good)
    elif blocks is not None and sum(counts) != blocks:
        what = f"{asked} adds up to {sum(counts)}, and the model has {blocks} {noun}"
        yield Problem(what=what, rule="together the stages run all of them", fix=good)
    elif 0 in (counts if config.model.kind == "mlp" else counts[1:-1]):
        rule = "only a first or last stage may have none, and run the embedding or the head alone"
        yield Problem(what=f"{asked} leaves a stage without {noun}", rule=rule, fix=good)


def _names_fit(names: tuple[str, ...], stages: int) -> Iterator[Problem]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if len(names) == stages - 1 and not twice:
        return
    what = f"names {twice[0]} twice" if twice else f"cuts into {len(names) + 1} stages, and there are {stages}"
    yield Problem(
        what=f"parallel.stages = {_text(names)} {what}",
        rule="a new stage begins at each layer that is named, such as layers.4",
        fix=f"name {stages - 1} layers, each once; or set parallel.stages = auto",
    )


def _heads_divide(config: Config) -> Iterator[Problem]:
    shape, degree = gpt_shape(config.model), config.parallel.tensor  # type: ignore[arg-type]
    if shape is None:
        return
    for key in ("heads", "kv_heads"):
        heads = getattr(shape, key)
        if heads % degree and (key == "heads" or shape.kv_heads != shape.heads):
            yield Problem(
                what=f"parallel.tensor = {degree} does not divide model.{key} = {heads}",
                rule="every rank has the same number of whole heads",
                fix=f"try parallel.tensor = {nearest_divisor(heads, degree)}, or model.{key} = "
                f"{max(1, round(heads / degree)) * degree}",
            )
    context = getattr(config.data, "context", None) or shape.context or known_shape(config.data).context
    if config.parallel.sequence_parallel and context is not None and context % degree:
        yield Problem(
            what=f"parallel.tensor = {degree} does not divide the {context} tokens of a sample",
            rule="sequence parallelism gives every rank the same number of tokens",
            fix=f"try data.context = {max(1, context // degree) * degree}, or parallel.sequence_parallel = false",
        )


def _num_blocks(config: Config) -> int | None:
    """Returns what stage_layers counts: blocks, or the layers of an mlp; None for models of other people's code."""
    model = config.model
    if model.kind == "gpt":
        shape = gpt_shape(model)
        return None if shape is None else shape.layers
    if model.kind == "resnet":
        return _BLOCKS[model.depth]
    return 3 if model.kind == "mlp" else None


def _degrees(parallel: ParallelConfig) -> str:
    asked = {"pipeline": parallel.pipeline, "tensor": parallel.tensor}
    given = [f"parallel.{name} = {degree}" for name, degree in asked.items() if degree > 1]
    return " x ".join(given) or "parallel.pipeline = 1"


def _even(num_blocks: int, stages: int) -> tuple[int, ...]:
    return tuple(num_blocks // stages + (stage < num_blocks % stages) for stage in range(stages))


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(str(each) for each in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
