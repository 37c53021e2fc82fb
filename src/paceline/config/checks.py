"""Rules that tie several keys together, as pure functions; those that read a broken section are left out."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from paceline.bounded_yaml import load_shipped
from paceline.config import data_sections as sections
from paceline.config import train_checks
from paceline.config.data_sections import known_shape, sources_of
from paceline.config.expert_rules import expert_problems
from paceline.config.hf_folder import check_folder_is_followed, check_hf_folder, check_shared_sequences
from paceline.config.layout import check_batch, layout_problems
from paceline.config.schema import Config
from paceline.config.sections import GPTModelConfig, ModelConfig, gpt_shape, head_problems
from paceline.config.settings import check_backend_settings
from paceline.config.suggest import near_files, nearest
from paceline.errors import Problem
from paceline.plan.rule_case import no_effect, text_of

Check: TypeAlias = Callable[[Config], Iterable[Problem]]

_LONGEST_NAME = 100
_OF_A_PIPELINE = ("schedule", "chunks", "stages", "stage_layers", "schedule_file")
_MOST_GROWTH = 4  # of a batch that is suggested


def run_checks(config: Config, sections: Collection[str] | None = None) -> list[Problem]:
    """Lists the problems of a config; with ``sections``, only by the rules that read no other section."""
    checks: list[Check] = [*CHECKS, *(partial(_check_row, row) for row in _rows_together())]
    if sections is None:
        found = [problem for check in checks for problem in check(config)]
    else:
        found, sound = [], cast(Config, SimpleNamespace(**{name: getattr(config, name) for name in sections}))
        for check in checks:
            with contextlib.suppress(AttributeError):  # it reads a section that is broken
                found += list(check(sound))
    ranks = None if config.parallel.ranks == "auto" else config.parallel.ranks
    return found + layout_problems(config, ranks, node_ranks=0, sections=sections)


def check_ranks(config: Config, ranks: int, node_ranks: int | None = None) -> list[Problem]:
    """Lists what this number of ranks, ``node_ranks`` of them on a host (None: all), breaks."""
    return [*layout_problems(config, ranks, node_ranks, only_of="ranks"), *_batch_problems(config, ranks)]


def check_hosts(config: Config, each: int, hosts: range) -> list[Problem]:
    """Lists what any of these numbers of hosts, with ``each`` ranks on every one, breaks: the batch stays."""
    found = {problem.what: problem for count in hosts for problem in check_ranks(config, each * count, each)}
    whole, batch = math.lcm(*(each * count for count in hosts)), config.train.global_batch
    if len(hosts) == 1 or batch is None or batch % whole == 0:
        return list(found.values())
    below = batch - batch % whole
    near = [str(number) for number in (below, below + whole) if 0 < number <= _MOST_GROWTH * batch]
    tried = f"try train.global_batch = {' or '.join(near)}, or " if near else ""
    fix = f"{hosts[0]} to {hosts[-1]} hosts divide multiples of {whole}: {tried}take one number of hosts"
    return [replace(one, fix=fix) if one.what.startswith("train.global_batch = ") else one for one in found.values()]


def check_name(config: Config) -> Iterator[Problem]:
    name = config.name
    is_plain = name.strip() == name and name not in ("", ".", "..") and len(name) <= _LONGEST_NAME
    if not is_plain or not name.isprintable() or re.search(r'[/\\:<>"|?*]', name):
        plain = re.sub(r"[^\w.=+-]+", "-", name).strip("-.")[:_LONGEST_NAME] or "run"
        what = f"name = {name!r} is not a plain folder name"
        rule = "the run is kept in monitor.folder/name, so a name has no path separators and is short"
        yield Problem(what=what, rule=rule, fix=f"try name = {plain}, and set monitor.folder for the place")


def _batch_problems(config: Config, ranks: int | None) -> list[Problem]:
    """Lists why the batch cannot be divided among the ranks; None: among any number of them."""
    train, parallel = config.train, config.parallel
    if train.microbatch == "auto" and train.accumulate is not None:
        what = f"train.microbatch = auto with train.accumulate = {train.accumulate}"
        rule = "global_batch = microbatch x accumulate x ranks: what is found decides accumulate"
        return [Problem(what=what, rule=rule, fix="remove train.accumulate, or give train.microbatch")]
    batch = (train.global_batch, None if train.microbatch == "auto" else train.microbatch, train.accumulate)
    if parallel.degree == 1:  # with auto, how many ranks share the batch is not decided yet
        return check_batch(*batch, None if parallel.strategy == "auto" else ranks)
    if ranks is not None and ranks % parallel.degree:
        return []  # the rules of the degrees report it
    data = parallel.data if ranks is None else ranks // parallel.degree
    return check_batch(*batch, data, ranks_key="parallel.data")


def check_gpt(config: Config) -> Iterator[Problem]:
    model = config.model
    if not isinstance(model, GPTModelConfig):
        return
    if shape := gpt_shape(model):
        yield from head_problems(shape)
        yield from expert_problems(shape)
        return
    missing = [f"model.{name}" for name in ("layers", "heads", "width") if getattr(model, name) is None]
    what = f"a gpt without model.size lacks {', '.join(missing)}"
    rule = "layers, heads and width are given, or come from the size"
    yield Problem(what=what, rule=rule, fix="try model.size = gpt-micro, or set them")


def check_auto_strategy(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.sharding_strategy == "auto":  # else it has been read as the strategy
        what = f"parallel.sharding_strategy = auto with parallel.strategy = {parallel.strategy}"
        yield Problem(what=what, rule="it is an older way to write parallel.strategy = auto", fix="remove one of them")
    if parallel.strategy != "auto":
        return
    needs = dict.fromkeys(_OF_A_PIPELINE, "pipeline") | {"sequence_parallel": "tensor", "context_method": "context"}
    for key in ("pipeline", "context", "tensor", "expert", *needs):
        if not parallel.is_changed(key):
            continue
        degree = needs.get(key, key)
        rest = f" and parallel.{degree} = 2" if getattr(parallel, degree) == 1 else ""
        is_older = "sharding_strategy" in parallel.model_fields_set
        rule = "auto chooses the strategy, the pipeline and tensor degrees, and how the pipeline runs"
        if degree == "context":
            rule = "auto chooses among layouts in which a rank has its samples whole"
        if key == "expert":
            rule = "auto chooses among layouts in which a rank has all experts"
        fix = f"remove parallel.{key}" + ("" if is_older else f", or set parallel.strategy = ddp{rest}")
        what = f"parallel.strategy = auto with parallel.{key} = {text_of(getattr(parallel, key))}"
        yield Problem(what=what, rule=rule, fix=fix)


def check_schedule_file(config: Config) -> Iterator[Problem]:
    parallel, file = config.parallel, config.parallel.schedule_file
    if file is None or parallel.strategy == "auto":
        return
    if parallel.pipeline == 1:
        rule, instead = "it belongs to pipeline parallelism", "set parallel.pipeline = 2"
        yield no_effect("parallel.schedule_file", file, "with parallel.pipeline = 1", rule, instead)
    for key in ("schedule", "chunks"):
        if parallel.is_changed(key):
            what = f"parallel.schedule_file and parallel.{key} = {getattr(parallel, key)} are both given"
            fix = f"remove parallel.{key}, or parallel.schedule_file"
            yield Problem(what=what, rule="the file says what each rank does, and with which stages", fix=fix)
    if not Path(file).is_file():
        kind = "a CSV file as paceline schedule --csv writes"
        yield no_file("parallel.schedule_file", file, kind, "leave it out, and set parallel.schedule")


def check_auto_microbatch(config: Config) -> Iterator[Problem]:
    together = config.parallel.degree * config.parallel.expert
    if together > 1 and config.train.microbatch == "auto":
        asked = {name: getattr(config.parallel, name) for name in ("pipeline", "context", "tensor", "expert")}
        degrees = " x ".join(f"parallel.{name} = {degree}" for name, degree in asked.items() if degree > 1)
        rule = "a pass is one of several ranks together, so that one of them cannot try how much fits"
        fix = f"remove train.microbatch and set train.accumulate = {4 * config.parallel.pipeline}, or give a number"
        yield Problem(what=f"train.microbatch = auto with {degrees}", rule=rule, fix=fix)


_WITH_CONTEXT = (
    *(sections.TextDataConfig, sections.TokensDataConfig),
    *(sections.SyntheticTokensDataConfig, sections.RowsDataConfig),
)
_ROWS = ("jsonl", "csv", "parquet", "hf_dataset")
_OWN = ("factory", "stream")
_FITTING_DATA = {
    "mlp": ("digits", "synthetic_classification", "synthetic_images", "images", *_ROWS, *_OWN),
    "resnet": ("synthetic_images", "images", *_OWN),
    "gpt": ("text", "tokens", "synthetic_tokens", *_ROWS, *_OWN),
}
_OF_THE_WHOLE = ("shuffle", "last_batch", "workers", "prefetch", "worker_start")


def check_model_reads_data(config: Config) -> Iterator[Problem]:
    model = config.model.kind
    for place, source in sources_of(config.data).items():
        data = source.kind
        fitting = _FITTING_DATA.get(model, (data,))
        if data not in fitting:
            models = [each for each, kinds in _FITTING_DATA.items() if data in kinds]
            written = [f"{{kind: {each}{', size: gpt-micro' if each == 'gpt' else ''}}}" for each in models]
            what = f"model.kind = {model} cannot read {place}.kind = {data}"
            fix = f"try {place} = {{kind: {fitting[0]}}}, or model = {' or '.join(written)}"
            yield Problem(what=what, rule=f"{model} reads {', '.join(fitting)}", fix=fix)


def check_mixture(config: Config) -> Iterator[Problem]:
    data = config.data
    if not isinstance(data, sections.MixtureDataConfig):
        return
    for name in data.weights.keys() - data.sources.keys():
        near = nearest(name, tuple(data.sources))
        what = f"data.weights.{name} is the weight of no source"
        fix = f"did you mean data.weights.{near}?" if near else "remove it, or add the source"
        yield Problem(what=what, rule=f"the sources are {', '.join(data.sources)}", fix=fix)
    for place, source in sources_of(data).items():
        for key in _OF_THE_WHOLE:
            if source.is_changed(key):
                where, rule = "in a source of a mixture", "batches of a mixture are read and ordered together"
                yield no_effect(f"{place}.{key}", getattr(source, key), where, rule, f"set data.{key}")


def check_documents(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    for place, source in sources_of(config.data).items():
        if not isinstance(source, sections.TokensDataConfig | sections.RowsDataConfig):
            continue
        yield from _packing_problems(place, source)
        if not sections.are_apart(source):
            continue
        with_what = ""
        if config.model.kind != "gpt":
            with_what = f"model.kind = {config.model.kind}"
        elif parallel.pipeline > 1 or parallel.tensor > 1:
            with_what = f"parallel.pipeline = {parallel.pipeline} and parallel.tensor = {parallel.tensor}"
        if with_what:
            key, other = "documents = apart", "documents = joined"
            if source.packing == "best_fit":
                key, other = "packing = best_fit", "packing = none, or stream with documents = joined"
            yield Problem(
                what=f"{place}.{key} with {with_what}",
                rule="the blocks of a gpt are handed the ends of documents; other models, stages of a pipeline and "
                "tensor ranks are handed nothing but the stream",
                fix=f"set {place}.{other}, or shard a gpt with parallel.strategy = fsdp",
            )


def _packing_problems(place: str, source: sections.TokensDataConfig | sections.RowsDataConfig) -> Iterator[Problem]:
    at, finds_ends = f"with {place}.packing = {source.packing}", sections.are_apart(source)
    if source.packing == "best_fit" and source.documents == "joined":
        what = f"{place}.documents = joined {at}: documents in a batch without boundaries"
        rule = "documents that best fit puts into one row have nothing to do with one another"
        yield Problem(what=what, rule=rule, fix=f"leave {place}.documents out, or set {place}.packing = stream")
    if isinstance(source, sections.TokensDataConfig):
        finds_ends |= source.packing == "none"
        if sections.is_packed(source) and source.windows != "random":
            rule, fix = "it says where windows of a stream begin", f"set {place}.packing = stream"
            yield no_effect(f"{place}.windows", source.windows, at, rule, fix)
    elif not sections.is_packed(source) and source.documents is not None:
        rule, fix = "a row holds one document", f"set {place}.packing = best_fit"
        yield no_effect(f"{place}.documents", source.documents, at, rule, fix)
    elif sections.is_packed(source) and (source.classes is not None or source.text_pair is not None):
        what = f"{place}.{'text_pair' if source.classes is None else 'classes'} {at}"
        rule = "rows are packed for language models; a class belongs to a text of its own"
        yield Problem(what=what, rule=rule, fix=f"remove it, or set {place}.packing = none")
    if source.end_token is not None and not finds_ends:
        where, fix = f"with {place}.documents = joined", f"set {place}.documents = apart"
        if source.packing == "none":
            where, fix = at, f"set {place}.packing = best_fit"
        yield no_effect(f"{place}.end_token", source.end_token, where, "it says where attention begins anew", fix)


def check_model_dimensions(config: Config) -> Iterator[Problem]:
    if not any(check_model_reads_data(config)):
        yield from dimension_problems(config.model, known_shape(config.data))


def dimension_problems(model: ModelConfig, shape: sections.DataShape) -> Iterator[Problem]:
    """Yields the dimensions of a model that do not fit the data, where both are known; outputs may be more."""
    exact = {"input_dim": (shape.features, "features of a sample")}
    exact["in_channels"] = shape.channels, "channels of an image"
    least = {"num_classes": (shape.classes, "classes"), "vocab_size": (shape.vocab_size, "tokens of the vocabulary")}
    for key, (known, meaning) in (exact | least).items():
        given, what, rule = getattr(model, key, None), "", ""
        if given is not None and known is not None and key in exact and given != known:
            what, rule = f"model.{key} = {given}, but the data has {known} {meaning}", "they are the same number"
        elif given is not None and known is not None and given < known:
            what, rule = f"model.{key} = {given} is fewer than the data's {known} {meaning}", "each needs an output"
        if what:
            yield Problem(what=what, rule=rule, fix=f"set model.{key} = {known}, or leave it out")


def check_context(config: Config) -> Iterator[Problem]:
    shape = gpt_shape(config.model) if isinstance(config.model, GPTModelConfig) else None
    for place, source in sources_of(config.data).items():
        if shape is None or not isinstance(source, _WITH_CONTEXT):
            continue
        context = source.context
        if not shape.context and context is None:
            what = f"neither model.context nor {place}.context is given"
            rule = "the length of a sample comes from one of them, or from model.size"
            yield Problem(what=what, rule=rule, fix="try model.context = 128")
        elif shape.context and context is not None and context > shape.context:
            what = f"model.context = {shape.context} is smaller than {place}.context = {context}"
            fix = f"set model.context = {context}, or {place}.context = {shape.context}"
            yield Problem(what=what, rule="a sample must fit into the model's context", fix=fix)


def check_text_file(config: Config) -> Iterator[Problem]:
    for place, source in sources_of(config.data).items():
        if source.kind == "text" and source.path is not None and not Path(source.path).expanduser().is_file():
            otherwise = "leave it out to train on Python's documentation"
            yield no_file(f"{place}.path", source.path, "a text file", otherwise)


def no_file(key: str, path: str, kind: str, otherwise: str) -> Problem:
    what = f"{key} = {path!r} {'is a folder' if Path(path).is_dir() else 'does not exist'}"
    rule = f"it is {kind}, and a relative path starts at {Path.cwd()}"
    return Problem(what=what, rule=rule, fix=near_files(Path(path), otherwise))


def check_best(config: Config) -> Iterator[Problem]:
    saved = config.checkpoint
    if saved.keep_best == 0 and (saved.best_metric, saved.best_mode) != ("eval_loss", None):
        what = "checkpoint.best_metric or best_mode with checkpoint.keep_best = 0"
        fix = "set checkpoint.keep_best = 1, or leave them out"
        yield Problem(what=what, rule="they say which are the best ones to keep", fix=fix)


@cache
def _rows_together() -> list[Mapping[str, Any]]:
    """Returns which values do not go together, and what is said then; read when the first config is checked."""
    found: list[Mapping[str, Any]] = load_shipped((Path(__file__).parent / "together.yaml").read_text(encoding="utf-8"))
    return found


def _check_row(row: Mapping[str, Any], config: Config) -> Iterator[Problem]:
    if all(_is_so(attrgetter(key)(config), wanted) for key, wanted in row["when"].items()):
        yield Problem(**{part: row[part].format(c=config) for part in ("what", "rule", "fix")})


def _is_so(value: object, wanted: object) -> bool:
    if isinstance(wanted, str) and wanted.startswith("not "):
        return str(value) != wanted.removeprefix("not ")
    return value is not None if wanted == "given" else value == wanted


CHECKS: tuple[Check, ...] = (
    *(train_checks.check_metric_names, check_name, train_checks.check_trackers, check_mixture, check_documents),
    *(check_model_reads_data, check_model_dimensions, check_gpt, check_context, check_text_file),
    *(check_backend_settings, train_checks.check_warmup, train_checks.check_optimizer_keys),
    *(train_checks.check_precision, check_auto_strategy, check_schedule_file, check_auto_microbatch, check_best),
    *(train_checks.check_recovery_keys, train_checks.check_roll_back),
    lambda c: _batch_problems(c, None if c.parallel.ranks == "auto" else c.parallel.ranks),
    *(check_hf_folder, check_folder_is_followed, check_shared_sequences),
)
