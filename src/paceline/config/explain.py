"""Where each value of a config comes from: the file, an override, a default, or a formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.data_sections import IMAGE_SIZE, ImagesDataConfig, TextDataConfig, TokensDataConfig, known_shape
from paceline.config.hf_folder import image_size, tokenizer_file
from paceline.config.layout import DEFAULT_GLOBAL_BATCH, config_batch, layout_of, peak_learning_rate, why_not_sharded
from paceline.config.load import LoadedConfig, leaf_values
from paceline.config.problems import MISSING, value_at
from paceline.config.schema import Config
from paceline.config.sections import GPT_DIMENSIONS, GPTModelConfig, HFModelConfig, gpt_shape
from paceline.config.settings import config_settings
from paceline.config.suggest import known_fields
from paceline.plan.plan import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRow:
    """One value of a config and its origin: ``file``, ``override``, ``default`` or ``derived`` and more.

    ``value`` is ``None`` where the run decides it at its start. ``derived.`` keys are consequences, and cannot be set.
    """

    key: str
    value: Any
    origin: str


def explain(config: Config | LoadedConfig, ranks: int | None = None) -> list[ExplainRow]:
    """Lists every key of a config with its value and origin, derived ones with their formula.

    ``ranks`` is their number, if open, or another to look at. Keys of a plain Config are ``given`` or ``default``.
    Raises ConfigError when the batch does not fit these ranks.
    """
    if isinstance(config, LoadedConfig):
        sources, config = config.sources, config.config
    else:
        given = config.model_dump(mode="json", exclude_unset=True)
        sources = {path: "default" if value_at(given, path) is MISSING else "given" for path in leaf_values(config)}
    asked = config.parallel.ranks
    known = ranks if ranks is not None or asked == "auto" else asked
    found = [*_model(config), *_data(config)]
    if ranks is not None and ranks != asked:
        found.append(_row("parallel.ranks", ranks, f"asked for here, where the config says {asked}"))
    found += [*_ranks(config, known), *_batch(config, known), *_length_and_precision(config)]
    found += [*_learning_rate(config, known), *_offload_and_comm(config)]
    derived = {row.key: row for row in found}
    plain = (ExplainRow(key=key, value=value, origin=sources[key]) for key, value in leaf_values(config).items())
    rows = [derived.pop(row.key, row) for row in plain]
    return rows + list(derived.values())


def _row(key: str, value: Any, formula: str) -> ExplainRow:
    return ExplainRow(key=key, value=value, origin=f"derived: {formula}")


def _model(config: Config) -> Iterator[ExplainRow]:
    model, shape = config.model, known_shape(config.data)
    from_data = {"input_dim": shape.features, "num_classes": shape.classes}
    from_data |= {"in_channels": shape.channels, "vocab_size": shape.vocab_size}
    for key, value in from_data.items():
        if getattr(model, key, 0) is None:
            formula = f"from data.kind = {config.data.kind}" + ("" if value is not None else ", when it is read")
            yield _row(f"model.{key}", value, formula)
    if not isinstance(model, GPTModelConfig) or (gpt := gpt_shape(model)) is None:
        return
    formula = f"model.size = {model.size}" if model.size else "the current family, as model.size is null"
    for key in (*(each for each in GPT_DIMENSIONS if each not in ("context", "vocab_size")), "context"):
        if getattr(model, key) is None and (key != "context" or gpt.context):
            yield _row(f"model.{key}", getattr(gpt, key), formula)
        elif getattr(model, key) is None:
            yield _row("model.context", shape.context, "data.context")


def _data(config: Config) -> Iterator[ExplainRow]:
    if config.data.seed is None:
        yield _row("data.seed", config.train.seed, "train.seed")
    folder = Path(config.model.path) if isinstance(config.model, HFModelConfig) else None
    if isinstance(config.data, TextDataConfig) and config.data.tokens is None:
        own = None if folder is None else tokenizer_file(folder)
        text = "no tokenizer is in model.path" if folder else "no model.path with a tokenizer"
        yield _row("data.tokens", "char" if own is None else str(own), text if own is None else "of model.path")
    if isinstance(config.data, ImagesDataConfig) and config.data.size is None:
        size = None if folder is None else image_size(folder)
        yield _row("data.size", size or IMAGE_SIZE, "the usual size" if size is None else "of model.path")
    if isinstance(config.data, TextDataConfig | TokensDataConfig) and config.data.context is None:
        gpt = gpt_shape(config.model) if isinstance(config.model, GPTModelConfig) else None
        yield _row("data.context", gpt.context or None if gpt else None, "model.context")


def _ranks(config: Config, ranks: int | None) -> Iterator[ExplainRow]:
    parallel = config.parallel
    if parallel.strategy == "hybrid" and parallel.shard_ranks is None:
        known = parallel.node_ranks or None
        yield _row("parallel.shard_ranks", known, "parallel.node_ranks" + ("" if known else ", when the run starts"))
    layout = layout_of(config)
    if ranks is not None and parallel.strategy not in ("ddp", "auto"):
        if reason := why_not_sharded(config, ranks):
            yield _row("derived.strategy", "ddp", reason)
        spread = layout.for_ranks(ranks)
        name = "parallel.data" if parallel.degree > 1 else "parallel.ranks"
        text = f"{name} / ranks of a shard group = {spread.data} / {spread.shards}"
        if parallel.context > 1:
            text = f"{name} x parallel.context / ranks of a shard group = "
            text += f"{spread.data} x {parallel.context} / {spread.shards}"
        yield _row("derived.copies_of_the_model", spread.replicas, text)
    if parallel.degree > 1 and parallel.data is None:
        formula = "parallel.ranks / (parallel.pipeline x parallel.context x parallel.tensor)"
        if ranks is None:
            yield _row("parallel.data", None, formula + "; give the ranks to see it")
        else:
            formula += f" = {ranks} / ({parallel.pipeline} x {parallel.context} x {parallel.tensor})"
            yield _row("parallel.data", layout.for_ranks(ranks).data, formula)
    if parallel.pipeline > 1 and parallel.schedule_file is None:
        chunks = layout.num_stages // layout.pipeline
        if parallel.chunks is None:
            yield _row("parallel.chunks", chunks, f"parallel.schedule = {parallel.schedule}")
        formula = f"parallel.pipeline x parallel.chunks = {parallel.pipeline} x {chunks}"
        yield _row("derived.stages", layout.num_stages, formula)


def _batch(config: Config, ranks: int | None) -> Iterator[ExplainRow]:
    train = config.train
    plan = None if ranks is None else config_batch(config, ranks)
    if train.microbatch == "auto":
        if train.global_batch is None:
            yield _row("train.global_batch", DEFAULT_GLOBAL_BATCH, f"{DEFAULT_GLOBAL_BATCH}, as nothing else says it")
        most = f", at most {plan.samples_per_rank}" if plan else ""
        yield _row("train.microbatch", None, f"the most samples that fit into memory{most}; found when the run starts")
        yield _row("train.accumulate", None, "train.global_batch / (train.microbatch x parallel.ranks)")
        return
    for key, formula in _batch_formulas(config, plan).items():
        if getattr(train, key) is None:
            pending = "" if plan else "; give the ranks to see it"
            yield _row(f"train.{key}", getattr(plan, key) if plan else None, formula + pending)
    if plan:
        formula = f"train.microbatch x train.accumulate = {plan.microbatch} x {plan.accumulate}"
        yield _row("derived.samples_per_rank_and_step", plan.samples_per_rank, formula)
        if train.steps is not None:
            formula = f"train.steps x train.global_batch = {train.steps} x {plan.global_batch}"
            yield _row("derived.samples_of_the_run", train.steps * plan.global_batch, formula)


def _batch_formulas(config: Config, plan: BatchPlan | None) -> dict[str, str]:
    train, sharing = config.train, "parallel.data" if config.parallel.degree > 1 else "parallel.ranks"
    product = f"train.microbatch x train.accumulate x {sharing}"
    micro = f"train.global_batch / (train.accumulate x {sharing})"
    steps = f"train.global_batch / (train.microbatch x {sharing})"
    if plan:
        product += f" = {plan.microbatch} x {plan.accumulate} x {plan.ranks}"
        micro += f" = {plan.global_batch} / ({plan.accumulate} x {plan.ranks})"
        steps += f" = {plan.global_batch} / ({plan.microbatch} x {plan.ranks})"
    is_free = train.microbatch is None
    alone = "1, as nothing asks for more"
    if is_free and config.parallel.pipeline > 1:
        alone = f"at least parallel.pipeline = {config.parallel.pipeline}, if the samples of a rank can be cut so"
    return {
        "global_batch": f"{DEFAULT_GLOBAL_BATCH}, as train.microbatch is not given either" if is_free else product,
        "microbatch": micro,
        "accumulate": steps if None not in (train.global_batch, train.microbatch) else alone,
    }


def _length_and_precision(config: Config) -> Iterator[ExplainRow]:
    train, schedule, device = config.train, config.optim.schedule, config.parallel.device
    if train.precision == "auto" and device == "auto" and train.dtype == "float32":
        formula = "bf16_master on GPUs that compute in bf16, else fp32; known with the device"
        yield _row("derived.precision", None, formula)
    elif train.precision == "auto":
        yield _row("derived.precision", train.precision_on(device), train.precision_reason(device))
    if train.steps is None and train.epochs is None:
        yield _row("train.epochs", train.epochs_to_run, "1, as neither train.steps nor train.epochs is given")
    if schedule.length is None and schedule.kind != "constant":
        known = train.steps if schedule.unit == "steps" else None
        yield _row("optim.schedule.length", known, "the whole run")


def _learning_rate(config: Config, ranks: int | None) -> Iterator[ExplainRow]:
    optim, schedule = config.optim, config.optim.schedule
    lr, formula = optim.lr, "optim.lr"
    if optim.lr_scaling != "none" and optim.lr_batch is not None:
        batch = config.train.global_batch if ranks is None else config_batch(config, ranks).global_batch
        ratio = f"{batch} / {optim.lr_batch}" if batch else f"train.global_batch / {optim.lr_batch}"
        formula = f"optim.lr x {'sqrt' if optim.lr_scaling == 'sqrt' else ''}({ratio})"
        if batch is None:
            yield _row("derived.peak_lr", None, formula + "; give the ranks to see it")
            return
        lr = peak_learning_rate(optim, batch)
    warmup = f" after {schedule.warmup:g} {schedule.unit} of warmup" if schedule.warmup else ""
    yield _row("derived.peak_lr", lr, formula + warmup)
    if schedule.kind != "constant":
        peak = "optim.lr" if formula == "optim.lr" else "derived.peak_lr"
        formula = f"{peak} x optim.schedule.final_ratio = {lr:g} x {schedule.final_ratio:g}"
        yield _row("derived.final_lr", lr * schedule.final_ratio, formula)


def _offload_and_comm(config: Config) -> Iterator[ExplainRow]:
    if config.memory.offload and config.parallel.device == "cpu":
        formula = "on CPU ranks the host's memory is the device's: memory.offload saves nothing"
        yield _row("derived.offload", [], formula)
    if config.comm.bucket_mb == "auto" and not layout_of(config).is_fully_sharded:
        by_link = "latency is a tenth of a bucket's time on the link, which is tried when the run starts"
        by_steps = "what waits least by the times of the first steps; 25 until then, and where that is as good"
        yield _row("comm.bucket_mb", None, by_link if config.parallel.strategy in ("zero1", "zero2") else by_steps)
    known = {each.path: each.description for each in known_fields()}
    for variable, setting in config_settings(config.comm).items():
        yield _row(f"derived.{variable}", setting.value, f"{setting}; {known[setting.name]}")
