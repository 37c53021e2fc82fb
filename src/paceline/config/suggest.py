"""Suggests the key or the file that was meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.config.fields import KnownField, fields_at, known_fields
from paceline.config.settings import NCCL_VARIABLES

# Keys, and the names that other frameworks have for them.
_OTHER_NAMES = {
    "train.global_batch": "batch_size global_batch_size train_batch_size",
    "train.microbatch": "micro_batch_size microbatch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "train.accumulate": "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "train.steps": "max_steps num_steps total_steps max_iters",
    "train.epochs": "max_epochs num_epochs num_train_epochs total_epochs training_epochs",
    "train.precision": "mixed_precision amp",
    "train.loss_scale": "initial_scale init_scale",
    "train.seed": "random_seed",
    "train.eval_every": "eval_steps evaluate_every",
    "train.early_stop": "early_stopping",
    "train.early_stop.patience": "early_stopping_patience early_stop_patience",
    "checkpoint.every_epochs": "save_every_n_epochs save_epochs save_frequency",
    "optim.lr": "learning_rate base_lr max_lr",
    "optim": "optimizer optimiser",
    "optim.clip_norm": "gradient_clip max_grad_norm grad_clip gradient_clip_val clip_grad_norm",
    "optim.schedule": "scheduler lr_scheduler",
    "optim.schedule.warmup": "warmup_steps num_warmup_steps",
    "optim.schedule.final_ratio": "min_lr",
    "parallel.ranks": "num_ranks world_size gpus num_gpus devices nproc nproc_per_node num_processes",
    "parallel.strategy": "zero_stage",
    "parallel.prefetch": "forward_prefetch",
    "parallel.node_ranks": "gpus_per_node",
    "parallel.sync_batchnorm": "sync_bn",
    "memory.checkpoint_activations": "activation_checkpointing gradient_checkpointing",
    "memory.offload": "cpu_offload offload_optimizer",
    "comm.bucket_mb": "bucket_cap_mb",
    "comm.timeout_s": "timeout",
    "data.workers": "num_workers",
    "data": "dataset",
    "data.last_batch": "drop_last",
    "data.eval_fraction": "val_fraction",
    "data.prefetch": "prefetch_factor",
    "model.context": "block_size seq_len sequence_length max_seq_len",
    "model.layers": "n_layer num_layers",
    "model.heads": "n_head num_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads",
    "model.width": "d_model n_embd hidden_size",
    "checkpoint.every_steps": "save_every save_steps",
    "checkpoint.folder": "checkpoint_dir save_dir checkpoint_path",
    "comm.backend": "distributed_backend dist_backend",
    "checkpoint.keep": "save_total_limit",
    "monitor.folder": "output output_dir log_dir",
    "monitor.log_every": "logging_steps",
    "name": "experiment run_name",
}
_ELSEWHERE = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}


def suggest_keys(place: str, key: str, kinds: Mapping[str, str | None]) -> list[str]:
    """Returns up to three keys that may have been meant, the likeliest first.

    In order: the same key here but for case, hyphens and a plural, the same key in another section, the name that other
    frameworks use, a like key here, a like key elsewhere. ``kinds`` tells the chosen kind of model and data.
    """
    wanted = key.lower().replace("-", "_")
    here = fields_at(place, kinds.get(place))
    elsewhere = [each for each in known_fields() if each not in here]
    found = [each.path for each in here if each.key in (wanted, f"{wanted}s")]
    # A field whose default is another one's value is the less likely.
    same = [each for each in elsewhere if each.key == wanted and each.key != "kind"]
    found += _texts(sorted(same, key=_is_derived), kinds)
    alias = _ELSEWHERE.get(wanted) or _key_of_variable(wanted)
    if alias is not None:
        found += _texts((each for each in known_fields() if each.path == alias), kinds)
    found += [f"{place}.{each}" if place else each for each in _near(wanted, [field.key for field in here], cutoff=0.6)]
    if not found:
        near = set(_near(wanted, [field.key for field in elsewhere], cutoff=0.7))
        found = _texts((each for each in elsewhere if each.key in near), kinds)
    return list(dict.fromkeys(found))[:3]


def same_key(word: str) -> str | None:
    """Returns the key that a word names: one of ours but for its section, or by the name that others have for it."""
    wanted = word.lower().replace("-", "_")
    same = sorted((each for each in known_fields() if each.key == wanted and wanted != "kind"), key=_is_derived)
    return _ELSEWHERE.get(wanted) or _key_of_variable(wanted) or (same[0].path if same else None)


def _is_derived(field: KnownField) -> bool:
    return field.default is None  # such as data.seed, which follows train.seed


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


def near_files(path: Path) -> list[str]:
    """Returns up to three files that may have been meant by a path that does not exist.

    They have a like name in the same folder or in its folder ``configs``; this name comes first.
    """
    found = []
    for folder in (path.parent, path.parent / "configs"):
        names = [each.name for each in folder.glob("*") if each.is_file()]
        found += [folder / name for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)]
    return [str(each) for each in sorted(found, key=lambda each: each.name != path.name)][:3]


def near_folders(path: Path) -> str:
    """Asks for the folder that may have been meant by a path that does not exist, in the words of a fix.

    Folders beside the first part that is missing are looked at, and those of ``runs``: a run may be named alone.
    Empty where the path exists, and where there is no folder.
    """
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    if path.exists():
        return ""
    places = [missing.parent, *([missing.parent / "runs"] if missing.parent == Path() else [])]
    near, others = [], []
    for place in places:
        names = sorted(each.name for each in place.glob("[!.]*") if each.is_dir())
        alike = difflib.get_close_matches(missing.name, names, n=3, cutoff=0.6)
        found = [place / name / path.relative_to(missing) for name in alike]
        near += [str(each if each.exists() else place / name) for each, name in zip(found, alike, strict=True)]
        others += [str(place / name) for name in names] if (place.name, missing) == ("runs", path) else []
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    return f"there are {', '.join(others[:8])}" if others else ""
