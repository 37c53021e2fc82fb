"""The weights of a Hugging Face folder, read into an engine: each rank reads the bytes that it holds, and no others.

Names of the folder and the model are matched first, and all that differ are reported at once, before anything is read.
Files have the names of the model; or those of its base model, without the prefix or with one more; of tied weights one
name is enough. Constants that older files have (masks, rotary frequencies) are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.header import TensorPlace, read_header
from paceline.checkpoint.manifest import HasShards, Manifest, SavedPiece, SavedTensor
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.storage import LocalFiles
from paceline.checkpoint.tools.incoming import safetensors_files
from paceline.errors import MisfitError
from paceline.models.hugging_face import renamed
from paceline.models.lora import A, B, fits
from paceline.shards import whole_region

_CONSTANTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq|\.attention\.(masked_)?bias|position_ids)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A folder's tensors, and the one of them that each tensor of a model gets its values from."""

    checkpoint: Checkpoint
    names: Mapping[str, str]

    def fill(self, holder: HasShards) -> None:
        """Fills what this rank holds; ranks need not wait for one another."""
        for shard in holder.shards():
            if shard.name in self.names:
                self.checkpoint.fill(shard, self.names[shard.name])
        holder.mark_loaded()


def open_pretrained(folder: Path, model: nn.Module, fresh: Iterable[str] = ()) -> Pretrained:
    """Matches a folder with a model that was built for it; reads no tensor.

    Raises MisfitError with all names and shapes that differ, but for names that fit a pattern of ``fresh``.
    """
    files, _ = safetensors_files(folder)
    places: dict[str, tuple[str, TensorPlace]] = {}
    for file in files:
        places |= {name: (file.name, place) for name, place in read_header(LocalFiles(), file).tensors.items()}
    patterns = list(fresh)
    by_model = {name: name for name in places}
    names, problems = _match(model, {name: place.shape for name, (_, place) in places.items()}, patterns)
    if problems:  # only then: to ask the library for its renamings takes about as long as to read a GiB
        by_model = {ours: theirs for theirs, ours in renamed(model, places).items()}
        names, problems = _match(model, {ours: places[theirs][1].shape for ours, theirs in by_model.items()}, patterns)
    if problems:
        raise MisfitError(
            f"the weights in {folder} are not those of {type(model).__name__}\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + "  name what begins with random values in model.fresh, or take the folder that this model was saved to"
        )
    tensors = {
        name: SavedTensor(
            shape=place.shape, dtype=place.dtype, pieces=(SavedPiece(file=file, region=whole_region(place.shape)),)
        )
        for name, (file, place) in places.items()
    }
    manifest = Manifest(step=0, position=0, world=1, tensors=tensors, files={})
    found = {name: by_model[source] for name, source in names.items()}
    return Pretrained(checkpoint=Checkpoint(folder, manifest, LocalFiles()), names=found)


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
        if name.endswith((f".{A}", f".{B}")) or any(fits(each, pattern) for each in group for pattern in fresh):
            used.update(known for each in group for known in _names(each, prefix))
            continue
        source = next((known for each in group for known in _names(each, prefix) if known in saved), None)
        used.update(known for each in group for known in _names(each, prefix))
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


def _names(name: str, prefix: str) -> Iterator[str]:
    """Yields what files may call a tensor."""
    yield name
    yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
