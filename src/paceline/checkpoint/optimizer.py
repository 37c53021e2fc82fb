"""An optimizer's state, by the names of the parameters: as shards where it has their shape, as values where not.

    exp_avg of a piece       optimizer/layers.0.weight/exp_avg     in files, cut as the parameter is
    step, of every rank      found["optimizer/layers.0.weight"]    from the rank that has the parameter's first element
    settings of a group      found["group/<hash>"]                 once for each that differs

Names, not numbers, tie it together: other ranks, stages or orders of parameters find theirs all the same.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paceline.checkpoint.formats import GROUP, REST
from paceline.checkpoint.manifest import MODEL, OPTIMIZER, HasShards, prefixed
from paceline.checkpoint.read import Checkpoint, fill_model
from paceline.checkpoint.tensors import encode
from paceline.errors import CheckpointError, MisfitError, UsageError
from paceline.shards import Shard, load_own_state, own_optimizer_state, whole_region

_MEMBERS = ("params", "param_names")
_WHOLE = "step"  # one value for the parameter, also where that has one element itself
_SMALL = 64  # elements: fewer are kept as values


def optimizer_shards(optimizer: torch.optim.Optimizer, shards: Sequence[Shard]) -> tuple[list[Shard], dict[str, Any]]:
    """Returns this rank's state of an optimizer, and what it alone knows. Raises UsageError for odd shapes."""
    packed = own_optimizer_state(optimizer)
    by_id = _by_id(shards)
    tensors: list[Shard] = []
    found: dict[str, Any] = {}
    for saved, group in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        settings = {key: value for key, value in saved.items() if key not in _MEMBERS}
        label = f"{GROUP}{zlib.crc32(json.dumps(encode(settings, 'a parameter group')).encode()):08x}"
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            shard = _shard_of(by_id, parameter)
            own, whole = _split_state(shard, parameter, packed["state"].get(number, {}))
            tensors += own
            if shard.region.has_first and shard.copy == 0:
                found[label] = settings
                found[f"{OPTIMIZER}{shard.name}"] = {"group": label, "values": whole}
    # What an optimizer of the user's own keeps besides, in the packed state and beside it.
    numbers = {number for saved in packed["param_groups"] for number in saved["params"]}
    state = {key: value for key, value in packed["state"].items() if key not in numbers}
    beside = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return tensors, found | ({REST: {"state": state, "beside": beside}} if state or beside else {})


def held_by(engine: HasShards, optimizer: torch.optim.Optimizer | None) -> tuple[list[Shard], dict[str, Any]]:
    """Returns this rank's shards of a model and its optimizer, as a checkpoint names them, and what else there is."""
    held = list(engine.shards())
    tensors, found = ([], {}) if optimizer is None else optimizer_shards(optimizer, held)
    return [*prefixed(MODEL, held), *tensors], found


def restore(checkpoint: Checkpoint, engine: HasShards, optimizer: torch.optim.Optimizer | None, fix: str) -> None:
    """Fills a model and its optimizer. Raises CheckpointError, with ``fix``, where the checkpoint is of others."""
    if optimizer is not None and hasattr(engine, "check_optimizer"):
        engine.check_optimizer(optimizer)  # which settles whether it has parts of states, or whole ones
    try:
        fill_model(checkpoint, engine)
        if optimizer is not None:
            load_optimizer(checkpoint, optimizer, list(engine.shards()))
    except (MisfitError, RuntimeError, ValueError, KeyError) as error:
        what = f"{checkpoint.path}: the checkpoint of step {checkpoint.step} does not fit this model or optimizer"
        raise CheckpointError(f"{what}\n  {error}\n  {fix}") from error


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, shards: Sequence[Shard]) -> None:
    """Loads a rank's part of a saved state. Raises MisfitError, before any change, for another kind or other groups."""
    by_id, rows, state = _by_id(shards), [], dict[int, Any]()
    parts: list[tuple[Shard, str]] = []  # of states, that are still empty
    numbers = itertools.count()
    ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for identity, shard in by_id.items():
        if identity not in ours and f"{OPTIMIZER}{shard.name}" in checkpoint.found:
            raise MisfitError(f"its optimizer updates {shard.name}, which this one does not")
    tensors: dict[str, list[str]] = {}
    for name in checkpoint.shapes(OPTIMIZER):
        parameter, _, key = name.rpartition("/")
        tensors.setdefault(parameter, []).append(key)
    for group in optimizer.param_groups:
        members = [(_shard_of(by_id, parameter), parameter) for parameter in group["params"]]
        known = [shard for shard, _ in members if 0 not in shard.region.shape]
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        params = [next(numbers) for _ in members]
        rows.append({**_saved_settings(checkpoint, optimizer, group, known), **names, "params": params})
        is_whole = getattr(optimizer, "updates_whole", False)  # and on the rank with the first element alone
        for number, (shard, parameter) in zip(params, members, strict=True):
            if is_whole and not shard.region.has_first:
                continue
            values, empty = _saved_state(checkpoint, shard, parameter, tensors.get(shard.name, ()), is_whole)
            parts += empty
            if values:
                state[number] = values
    checkpoint.fill_all(parts)
    try:
        rest = checkpoint.found.get(REST, {"state": {}, "beside": {}})
        whole = {**rest["beside"], "state": {**rest["state"], **state}, "param_groups": rows}
        load_own_state(optimizer, whole)
    except (RuntimeError, ValueError, KeyError) as error:
        raise MisfitError(str(error)) from error


def _by_id(shards: Iterable[Shard]) -> dict[int, Shard]:
    return {id(shard.tensor if shard.parameter is None else shard.parameter): shard for shard in shards}


def _shard_of(by_id: Mapping[int, Shard], parameter: torch.Tensor) -> Shard:
    shard = by_id.get(id(parameter))
    if shard is None:
        what = f"the optimizer updates a tensor {list(parameter.shape)} that is no parameter of the engine"
        raise UsageError(f"{what}\n  state is saved under parameters' names\n  build it with engine.parameters()")
    return shard


def _split_state(shard: Shard, parameter: torch.Tensor, state: Mapping[str, Any]) -> tuple[list[Shard], dict[str, Any]]:
    """Splits a parameter's state into what is cut as the parameter is, and what is one value for all of it."""
    own: list[Shard] = []
    whole: dict[str, Any] = {}
    owner = 0 if shard.region.has_first and shard.copy == 0 else None
    for key, value in state.items():
        name = f"{OPTIMIZER}{shard.name}/{key}"
        if not isinstance(value, torch.Tensor):
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if any(leaf.shape == parameter.shape and leaf.numel() > 1 for leaf in leaves):
                what = f"the optimizer's state of {shard.name} has {key} (a {type(value).__name__} of tensors)"
                rule = "a state is one tensor of the parameter's shape, or one value for the whole parameter"
                raise UsageError(f"{what}\n  {rule}\n  keep each tensor under a name of its own")
            whole[key] = value
        elif value.shape == parameter.shape and key != _WHOLE:
            own.append(replace(shard, name=name, tensor=value, parameter=None))
        elif value.numel() <= _SMALL:
            whole[key] = value
        else:
            own.append(Shard(name=name, region=whole_region(tuple(value.shape)), tensor=value, copy=owner))
    return own, whole


def _saved_settings(
    checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], members: Sequence[Shard]
) -> dict[str, Any]:
    """Returns the settings that a group's parameters were saved with."""
    if not members:
        return {key: value for key, value in group.items() if key not in _MEMBERS}
    missing = [shard.name for shard in members if f"{OPTIMIZER}{shard.name}" not in checkpoint.found]
    if missing:
        raise MisfitError(f"its optimizer does not update {missing[0]}, which this one does")
    labels = sorted({checkpoint.found[f"{OPTIMIZER}{shard.name}"]["group"] for shard in members})
    if len(labels) > 1:
        raise MisfitError(f"the members of one parameter group here were in {len(labels)} when it was saved")
    settings: dict[str, Any] = checkpoint.found[labels[0]]
    lacking = sorted(optimizer.defaults.keys() - settings.keys())
    if lacking:
        raise MisfitError(f"its optimizer is not {type(optimizer).__name__}, which needs {', '.join(lacking)}")
    return dict(settings)


def _saved_state(
    checkpoint: Checkpoint, shard: Shard, parameter: torch.Tensor, keys: Iterable[str], is_whole: bool
) -> tuple[dict[str, Any], list[tuple[Shard, str]]]:
    """Returns one parameter's state, and the pieces of it, in memory of their own, that are to be filled by name."""
    empty: list[tuple[Shard, str]] = []
    entry = checkpoint.found.get(f"{OPTIMIZER}{shard.name}", {"values": {}})
    state = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry["values"].items()}
    for key in keys:
        name = f"{OPTIMIZER}{shard.name}/{key}"
        if is_whole or checkpoint.manifest.tensors[name].shape != shard.region.shape:
            state[key] = checkpoint.read(name)
        else:
            state[key] = torch.empty_like(parameter, dtype=checkpoint.dtype(name), requires_grad=False)
            empty.append((replace(shard, tensor=state[key]), name))
    return state, empty
