"""Did you mean: the key that was meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.config.fields import KnownField, fields_at, known_fields
from paceline.config.settings import NCCL_VARIABLES

# Names that other frameworks use, and what they are called here.
_ELSEWHERE = {
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "train_batch_size": "train.global_batch",
    "micro_batch_size": "train.microbatch",
    "microbatch_size": "train.microbatch",
    "per_device_train_batch_size": "train.microbatch",
    "train_micro_batch_size_per_gpu": "train.microbatch",
    "gradient_accumulation": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "accumulate_grad_batches": "train.accumulate",
    "grad_accum": "train.accumulate",
    "max_steps": "train.steps",
    "max_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "mixed_precision": "train.precision",
    "amp": "train.precision",
    "initial_scale": "train.loss_scale",
    "init_scale": "train.loss_scale",
    "random_seed": "train.seed",
    "eval_steps": "train.eval_every",
    "learning_rate": "optim.lr",
    "base_lr": "optim.lr",
    "max_lr": "optim.lr",
    "optimizer": "optim",
    "optimiser": "optim",
    "max_grad_norm": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "gradient_clip_val": "optim.clip_norm",
    "clip_grad_norm": "optim.clip_norm",
    "scheduler": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "warmup_steps": "optim.schedule.warmup",
    "num_warmup_steps": "optim.schedule.warmup",
    "min_lr": "optim.schedule.final_ratio",
    "world_size": "parallel.ranks",
    "gpus": "parallel.ranks",
    "num_gpus": "parallel.ranks",
    "devices": "parallel.ranks",
    "nproc_per_node": "parallel.ranks",
    "num_processes": "parallel.ranks",
    "zero_stage": "parallel.strategy",
    "forward_prefetch": "parallel.prefetch",
    "gpus_per_node": "parallel.node_ranks",
    "sync_bn": "parallel.sync_batchnorm",
    "activation_checkpointing": "memory.checkpoint_activations",
    "gradient_checkpointing": "memory.checkpoint_activations",
    "cpu_offload": "memory.offload",
    "offload_optimizer": "memory.offload",
    "bucket_cap_mb": "comm.bucket_mb",
    "timeout": "comm.timeout_s",
    "num_workers": "data.workers",
    "dataset": "data",
    "drop_last": "data.last_batch",
    "val_fraction": "data.eval_fraction",
    "prefetch_factor": "data.prefetch",
    "block_size": "model.context",
    "seq_len": "model.context",
    "sequence_length": "model.context",
    "max_seq_len": "model.context",
    "n_layer": "model.layers",
    "num_layers": "model.layers",
    "n_head": "model.heads",
    "num_heads": "model.heads",
    "n_kv_heads": "model.kv_heads",
    "num_kv_heads": "model.kv_heads",
    "d_model": "model.width",
    "n_embd": "model.width",
    "hidden_size": "model.width",
    "save_every": "checkpoint.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "monitor.folder",
    "log_dir": "monitor.folder",
    "logging_steps": "monitor.log_every",
    "experiment": "name",
    "run_name": "name",
}


def suggest_keys(place: str, key: str, kinds: Mapping[str, str | None]) -> list[str]:
    """Returns up to three keys that may have been meant, the likeliest first.

    In order: the same key here but for case and hyphens, the same key in another section, the name that other
    frameworks use, a like key here, a like key elsewhere. ``kinds`` tells the chosen kind of model and data.
    """
    wanted = key.lower().replace("-", "_")
    here = fields_at(place, kinds.get(place))
    elsewhere = [each for each in known_fields() if each not in here]
    found = [each.path for each in here if each.key == wanted]
    # A field whose default is another one's value (data.seed, which follows train.seed) is the less likely.
    same = [each for each in elsewhere if each.key == wanted and each.key != "kind"]
    found += _texts(sorted(same, key=lambda each: each.default is None), kinds)
    alias = _ELSEWHERE.get(wanted) or _key_of_variable(wanted)
    if alias is not None:
        found += _texts((each for each in known_fields() if each.path == alias), kinds)
    found += [_join(place, each) for each in _near(wanted, [field.key for field in here], cutoff=0.6)]
    if not found:
        near = set(_near(wanted, [field.key for field in elsewhere], cutoff=0.7))
        found = _texts((each for each in elsewhere if each.key in near), kinds)
    return list(dict.fromkeys(found))[:3]


def _key_of_variable(word: str) -> str | None:
    """Returns the key that sets a variable of NCCL, named in full or without NCCL_: ``socket_ifname``."""
    names = {variable.lower().removeprefix("nccl_"): f"comm.nccl.{key}" for key, variable in NCCL_VARIABLES.items()}
    return names.get(word.removeprefix("nccl_"))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that is most like a word, or ``None`` when none is."""
    return next(iter(_near(word.lower().replace("-", "_"), choices, cutoff=0.5)), None)


def _near(word: str, choices: Iterable[str], cutoff: float) -> list[str]:
    plain = {choice.lower().replace("-", "_"): choice for choice in choices}
    return [plain[match] for match in difflib.get_close_matches(word, plain, n=1, cutoff=cutoff)]


def _texts(fields: Iterable[KnownField], kinds: Mapping[str, str | None]) -> list[str]:
    """Writes each field's path once; with the kind that has it, where the chosen kind has it not."""
    by_path: dict[str, list[str | None]] = {}
    for each in fields:
        by_path.setdefault(each.path, []).append(each.kind)
    return [_with_kind(path, owners, kinds.get(path.partition(".")[0])) for path, owners in by_path.items()]


def _with_kind(path: str, owners: list[str | None], chosen: str | None) -> str:
    if None in owners or chosen is None or chosen in owners:
        return path
    section = path.partition(".")[0]
    return f"{path} (of {section}.kind = {' or '.join(str(owner) for owner in owners)})"


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def near_files(path: Path) -> list[str]:
    """Returns up to three files that may have been meant by a path that does not exist.

    They have a like name in the same folder, or this name in its folder ``configs``.
    """
    folder = path.parent
    if not folder.is_dir():
        return []
    moved = [folder / "configs" / path.name]
    names = [each.name for each in folder.iterdir() if each.is_file()]
    near = [folder / name for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)]
    return [str(each) for each in [*(each for each in moved if each.is_file()), *near]][:3]
