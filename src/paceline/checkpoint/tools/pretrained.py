"""Models of Hugging Face folders, whose weights are read straight into an engine; adapters of PEFT folders with them.

Each rank reads the bytes that it holds, and no others. The names of a folder and those of a model are matched first,
and all that differ are reported at once, before anything is read. Files have the names of the model, or those of its
base model, without the prefix or with one more; of tied weights one name is enough. Constants that older files have
(masks, rotary frequencies) are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from paceline.checkpoint.manifest import MANIFEST, HasShards
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tools.experts import with_stacks
from paceline.checkpoint.tools.incoming import open_files, safetensors_files
from paceline.config import peft_folder
from paceline.config.data_sections import DataShape
from paceline.config.load import config_from_dict
from paceline.config.sections import HFModelConfig
from paceline.errors import MisfitError, UsageError
from paceline.models.hugging_face import FILL, build_hugging_face, file_names
from paceline.models.lora import A, B, fits

_CONSTANTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq|\.attention\.(masked_)?bias|position_ids)$")


def load_model(folder: Path, classes: Sequence[str] | None = None, **keys: Any) -> nn.Module:
    """Builds the model of a folder without values; the engine that takes it over reads them, each rank what it holds.

    ``keys`` are those of ``model: {kind: hf}`` in a config, ``classes`` the names for a new head. Raises ConfigError.
    """
    if (folder / MANIFEST).is_file() or (folder / "checkpoints").is_dir():
        rule = "it is read into an engine of the model that was saved"
        raise UsageError(f"{folder} is a checkpoint of Paceline\n  {rule}\n  call paceline.load(path, engine)")
    data = {"kind": "factory", "factory": "no:data"}  # none are made
    values = {"model": {"kind": "hf", "path": str(folder), **keys}, "data": data, "train": {"steps": 1}}
    config = cast("HFModelConfig", config_from_dict(values, source="paceline.load").model)
    shape = DataShape(kind="custom")
    if classes is not None:
        shape = DataShape(kind="classes", classes=len(classes), class_names=tuple(classes))
    model = build_hugging_face(config, shape, is_unfilled=config.pretrained)
    if config.pretrained:
        read_later(model, config)
    return model


def read_later(model: nn.Module, config: HFModelConfig) -> None:
    """Has the engine that takes over a model without values read those of its folders. Raises MisfitError, at once."""
    found = [open_pretrained(Path(config.path), model, config.fresh)]
    if config.lora.path is not None:
        found.append(open_adapters(Path(config.lora.path), model, config.fresh))

    def fill(engine: HasShards) -> None:
        for each in found:
            each.fill(engine)

    vars(model)[FILL] = fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A folder's tensors, and the one of them that each tensor of a model gets its values from."""

    checkpoint: Checkpoint
    names: Mapping[str, str]

    def fill(self, holder: HasShards) -> None:
        for shard in holder.shards():
            if shard.name in self.names:
                self.checkpoint.fill(shard, self.names[shard.name])
        holder.mark_loaded()


def open_pretrained(folder: Path, model: nn.Module, fresh: Iterable[str] = ()) -> Pretrained:
    """Matches a folder with a model. Raises MisfitError with all that differs, but for names that fit ``fresh``."""
    checkpoint, patterns = open_files(folder, safetensors_files(folder)[0]), list(fresh)
    by_model = {name: name for name in checkpoint.shapes()}
    names, problems = _match(model, checkpoint.shapes(), patterns)
    if problems:  # only then: to ask the library for its renamings takes about as long as to read a GiB
        single, stacks = file_names(model, by_model)
        counts = {name: tensor.shape[0] for name, tensor in model.named_parameters() if tensor.ndim}
        checkpoint, problems = with_stacks(checkpoint, stacks, counts)
        by_model, shapes = {**single, **{name: name for name in stacks}}, checkpoint.shapes()
        known = {ours: shapes[theirs] for ours, theirs in by_model.items() if theirs in shapes}
        names, others = _match(model, known, patterns)
        problems += [each for each in others if not each.startswith("missing: ") or each.split()[1] not in stacks]
    if problems:
        lacking = [each.split()[1].rpartition(".")[0] for each in problems if each.startswith("missing: ")]
        fresh_layers = ", ".join(dict.fromkeys(lacking))
        raise MisfitError(
            f"the weights in {folder} are not those of {type(model).__name__}\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + "  name what begins with random values in model.fresh"
            + (f" (also: {fresh_layers})" if fresh_layers else "")
            + ", or take the folder that this model was saved to"
        )
    return Pretrained(checkpoint=checkpoint, names={name: by_model[source] for name, source in names.items()})


def open_adapters(folder: Path, model: nn.Module, fresh: Iterable[str] = ()) -> Pretrained:
    """Matches a folder of PEFT with the adapters of a model, and what was trained beside them with ``fresh``."""
    patterns, endings = list(fresh), (f".{A}", f".{B}")
    checkpoint = open_files(folder, [folder / peft_folder.WEIGHTS])
    shapes = checkpoint.shapes()
    names = {source.removeprefix(peft_folder.PREFIX): source for source in shapes}
    for theirs, ours in ((peft_folder.A, endings[0]), (peft_folder.B, endings[1])):
        names = {name.replace(theirs, ours): source for name, source in names.items()}
    has = {
        name: tuple(each.shape)
        for name, each in model.named_parameters()
        if name.endswith(endings) or any(fits(name, pattern) for pattern in patterns)
    }
    problems = [f"missing: {name}" for name in has if name.endswith(endings) and name not in names]
    for name, source in names.items():
        if shapes[source] != has.get(name):
            here = list(has[name]) if name in has else "none that trains: name it in model.fresh"
            problems.append(f"{source} is {list(shapes[source])}, and {name} of the model {here}")
    if problems:
        listed = "".join(f"  {problem}\n" for problem in problems)
        fix = "take the folder of the model that they were trained on"
        raise MisfitError(f"the adapters in {folder} are not those of {type(model).__name__}\n{listed}  {fix}")
    return Pretrained(checkpoint=checkpoint, names=names)


def _match(
    model: nn.Module, saved: Mapping[str, tuple[int, ...]], fresh: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Returns the tensor of the folder for each of the model, and what is missing, unexpected or of another shape."""
    aliases: dict[int, list[str]] = {}
    wanted: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    for name, tensor in wanted.items():
        aliases.setdefault(id(tensor), []).append(name)
    found: dict[str, str] = {}
    used: set[str] = set()
    problems: list[str] = []
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for group in aliases.values():
        name, tensor = group[0], wanted[group[0]]
        others = [each.removeprefix(prefix) if each.startswith(prefix) else prefix + each for each in group]
        known = [each for pair in zip(group, others, strict=True) for each in pair]  # what files may call it
        used.update(known)
        if name.endswith((f".{A}", f".{B}")) or any(fits(each, pattern) for each in group for pattern in fresh):
            continue
        source = next((each for each in known if each in saved), None)
        if source is None:
            problems.append(f"missing: {name} {list(tensor.shape)}")
        elif saved[source] != tuple(tensor.shape):
            problems.append(f"shape: {source} is {list(saved[source])}, and {name} of the model {list(tensor.shape)}")
        else:
            found |= dict.fromkeys(group, source)
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for name in saved:
        is_known = name in used or _CONSTANTS.search(name) or any(each.search(name) for each in ignored)
        if not is_known and not fresh:
            problems.append(f"unexpected: {name} {list(saved[name])}")
    return found, problems
