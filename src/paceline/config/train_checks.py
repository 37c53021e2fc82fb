"""Rules that tie several keys of training together."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.schema import Config, EarlyStopConfig, ScheduleConfig
from paceline.config.sections import CheckpointConfig, RecoveryConfig
from paceline.errors import Problem, did_you_mean
from paceline.imports import IMPORT_PATH
from paceline.plan.rule_case import no_effect

_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def check_warmup(config: Config) -> Iterator[Problem]:
    if known := known_length(config):
        yield from warmup_problems(config.optim.schedule, *known)


def known_length(config: Config) -> tuple[float, str] | None:
    """Returns how long the schedule of the rate is, and what says so; None where only the data can tell."""
    schedule, train = config.optim.schedule, config.train
    if schedule.length is not None:
        return schedule.length, "optim.schedule.length"
    if schedule.unit == "steps" and train.steps is not None:
        return train.steps, "train.steps"
    if train.steps is not None and train.global_batch is not None:
        return train.steps * train.global_batch, "train.steps x train.global_batch"
    return None


def shorter_warmup(schedule: ScheduleConfig, length: float, name: str) -> tuple[float, str]:
    """Returns a warmup for which a schedule of this length has room, and what to tell of it if that is another one."""
    if not any(warmup_problems(schedule, length, name)):
        return schedule.warmup, ""
    shorter = float(length // 10)
    problem = f"optim.schedule.warmup = {schedule.warmup:g} does not fit into {name} = {length:g} {schedule.unit}"
    return shorter, f"{problem}: it is {shorter:g} here"


def short_run(config: Config, steps: int) -> Config:
    """Returns the config of a short run to be measured: no evaluation on the way, no saves, no restarts."""
    short = config.with_values("train", steps=steps, epochs=None, eval_every=None, early_stop=EarlyStopConfig())
    recovery = RecoveryConfig(max_restarts=0, warm=config.recovery.warm)
    short = short.model_copy(update={"checkpoint": CheckpointConfig(at_end=False), "recovery": recovery})
    known = known_length(short)
    if known is None:  # the run itself shortens it, as it knows how long its data is
        return short
    warmup, _ = shorter_warmup(short.optim.schedule, *known)
    return short.with_values("optim", schedule=short.optim.schedule.model_copy(update={"warmup": warmup}))


def warmup_problems(schedule: ScheduleConfig, length: float, name: str) -> Iterator[Problem]:
    """Yields what is wrong with a warmup in a schedule of a ``length``, which is the value of ``name``."""
    must_come_down = schedule.kind == "one_cycle"  # after the warmup
    if schedule.warmup < length or (schedule.warmup == length and not must_come_down):
        return
    relation = "leaves nothing of" if schedule.warmup == length else "is longer than"
    second = ", and one_cycle comes down in the second" if must_come_down else ""
    what = f"optim.schedule.warmup = {schedule.warmup:g} {relation} {name} = {length:g} {schedule.unit}"
    rule = "the warmup is the first part of the schedule" + second
    yield Problem(what=what, rule=rule, fix=f"try optim.schedule.warmup = {length // 10:g}")


_OPTIMIZERS = ("adamw", "sgd", "muon")
# The kinds that read a key of optim, where not all do. Its description begins with them.
_READ_BY: dict[str, tuple[str, ...]] = {"muon": ("muon",), "args": ("an optimizer given by its path",)}
_READ_BY |= {"betas": ("adamw", "muon"), "eps": ("adamw", "muon"), "momentum": ("sgd",), "nesterov": ("sgd",)}


def check_optimizer_keys(config: Config) -> Iterator[Problem]:
    optim = config.optim
    for key, kinds in _READ_BY.items():
        is_read = optim.kind in kinds or (optim.kind not in _OPTIMIZERS and key != "muon")
        if not is_read and optim.is_changed(key):
            rule, where = f"it belongs to {kinds[0]}", f"with optim.kind = {optim.kind}"
            yield no_effect(f"optim.{key}", getattr(optim, key), where, rule, "change optim.kind")
    for pattern, group in optim.groups.items() if optim.kind == "muon" else ():
        given = {"lr": group.lr, "weight_decay": group.weight_decay}
        if unread_keys := [f"{key} = {value:g}" for key, value in given.items() if value is not None]:
            what = f"optim.groups.{pattern}: {', '.join(unread_keys)} with optim.kind = muon"
            rule = "muon has two groups of its own, hidden matrices and the rest for AdamW; a pattern may freeze"
            fix = "set optim.muon.adamw_for and adamw_lr_factor, remove them, or set optim.kind = adamw"
            yield Problem(what=what, rule=rule, fix=fix)


def check_precision(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.dtype == "float64" and train.precision not in ("fp32", "auto"):
        what = f"train.precision = {train.precision} with train.dtype = float64"
        fix = "set train.dtype = float32, or train.precision = fp32"
        yield Problem(what=what, rule="lower precision is for speed and memory, float64 for exactness", fix=fix)
    if train.precision != "fp16" and train.is_changed("loss_scale"):
        rule = "only fp16 scales the loss: its small gradients would vanish"
        where, instead = f"with train.precision = {train.precision}", "set train.precision = fp16"
        yield no_effect("train.loss_scale", f"{train.loss_scale:g}", where, rule, instead)


def check_recovery_keys(config: Config) -> Iterator[Problem]:
    given = config.recovery
    answers = {given.on_nan, given.on_spike}
    spikes = (given.on_spike != "ignore", "it belongs to spikes of the loss", "recovery.on_spike = note")
    goes_back = bool(answers & {"roll_back", "lower_rate"})
    readers = {
        **dict.fromkeys(("spike_by", "spike_threshold", "spike_window"), spikes),
        "rate_factor": ("lower_rate" in answers, "it belongs to lower_rate", "recovery.on_nan = lower_rate"),
        "max_roll_backs": (goes_back, "it belongs to runs that go back", "recovery.on_nan = roll_back"),
    }
    again = (given.max_restarts > 0, "it belongs to runs that are started again", "recovery.max_restarts = 3")
    readers["max_stalled_restarts"] = readers["restart_window"] = again
    wanted = {"recovery.warm = true": given.warm, "recovery.keep_processes = true": given.keep_processes}
    wanted |= {"recovery.max_restarts = 3": given.max_restarts > 0}
    wanted["monitor.hang_s = 60"] = config.monitor.hang_s is not None
    rule = "spares wait as processes do that stay for another attempt: with recovery.warm and monitor.hang_s"
    readers["spares"] = (all(wanted.values()), rule, ", ".join(fix for fix, is_so in wanted.items() if not is_so))
    for name, (is_read, rule, fix) in readers.items():
        if given.is_changed(name) and not is_read:
            yield no_effect(f"recovery.{name}", getattr(given, name), "here", rule, f"set {fix}")


def check_roll_back(config: Config) -> Iterator[Problem]:
    answers = {"recovery.on_nan": config.recovery.on_nan, "recovery.on_spike": config.recovery.on_spike}
    asked = [key for key, value in answers.items() if value in ("roll_back", "lower_rate")]
    times = (config.checkpoint.every_steps, config.checkpoint.every_epochs, config.checkpoint.every_minutes)
    if asked and not any(times):
        what = f"{' and '.join(asked)} without checkpoints during the run"
        rule = "a run goes back to its last checkpoint"
        yield Problem(what=what, rule=rule, fix="set checkpoint.every_steps or checkpoint.every_minutes")


def check_metric_names(config: Config) -> Iterator[Problem]:
    own = [f"eval_{name}" for name in config.train.metrics]
    has_tokens = config.model.kind not in ("mlp", "resnet") and config.train.loss == "auto"
    known = ["eval_loss", "eval_accuracy", *(["eval_perplexity"] if has_tokens else []), *own]
    asked = {"train.early_stop.metric": config.train.early_stop.metric}
    asked["checkpoint.best_metric"] = config.checkpoint.best_metric
    for key, name in asked.items():
        if name not in known:
            rule = f"it is one of {', '.join(known)}; train.metrics adds others"
            yield Problem(what=f"{key} = {name} is not evaluated", rule=rule, fix=did_you_mean(name, known, cutoff=0.5))
    if taken := sorted({"loss", "accuracy", "perplexity"} & config.train.metrics.keys()):
        yield Problem(what=f"train.metrics.{taken[0]} has the name of one that is there", fix="give it another name")


def check_trackers(config: Config) -> Iterator[Problem]:
    for name in config.monitor.trackers:
        if name not in _TRACKERS and IMPORT_PATH.fullmatch(name) is None:
            rule = f"the trackers are {', '.join(_TRACKERS)}, and sinks of your own as package.module:name"
            fix = did_you_mean(name, _TRACKERS, "for a class Curves in my_curves.py, write my_curves:Curves")
            yield Problem(what=f"monitor.trackers has {name!r}, which is no tracker", rule=rule, fix=fix)
