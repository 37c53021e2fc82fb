"""How the weights and gradients of every parameter are distributed, exact over ranks under every strategy.

Bins are the same for all tensors, steps and ranks, so counts add up: their edges are 0 and plus and minus 2^(k/2), from
2^-40 to 2^16, two in each octave. A rank counts the elements of which it holds a copy that nobody else counts; one sum
and one minimum over all ranks make the counts of the whole tensors.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from paceline.engines.engine import Engine

_EXPONENTS = range(-80, 33)  # halves
_SIZES = [2.0 ** (exponent / 2) for exponent in _EXPONENTS]
EDGES = [*(-size for size in reversed(_SIZES)), 0.0, *_SIZES]  # each bin ends with its edge; one more is behind them
_AT_ONCE = 2**22  # elements: each takes about 40 bytes while it is counted
_NOT_FINITE, _SUM, _SQUARES, _COUNTS = 0, 1, 2, 3  # where they are in a row
_KINDS = ("weights", "gradients")


@torch.no_grad()
def measure_histograms(engine: Engine, weight: torch.Tensor | None = None) -> list[dict[str, Any]]:
    """Returns the histograms of all parameters, by name, as JSON values; the same on all ranks, which all call it.

    ``weight`` is a factor that the gradients still lack. A parameter without a gradient has None for it. Waits for the
    device.
    """
    engine.gradients()  # brings them to the parameters that are updated
    rows = {name: row for row, name in enumerate(sorted(engine.state_names()))}
    device = engine.device
    sums = torch.zeros(len(rows), len(_KINDS), _COUNTS + len(EDGES) + 1, dtype=torch.float64, device=device)
    limits = torch.full((len(rows), len(_KINDS), 2), math.inf, dtype=torch.float64, device=device)
    for shard in engine.shards():
        row, parameter = rows[shard.name], shard.tensor if shard.parameter is None else shard.parameter
        is_counted = shard.copy == row % shard.copies  # copies share the work
        if not is_counted or not isinstance(parameter, torch.nn.Parameter):
            continue
        _count(shard.tensor.detach(), None, sums[row, 0], limits[row, 0])
        if parameter.grad is not None:
            _count(parameter.grad, weight, sums[row, 1], limits[row, 1])
    engine.world.all_reduce(sums).wait()
    engine.world.all_reduce(limits, "min").wait()
    found, ends = sums.cpu(), limits.cpu()  # sync point
    made = [
        {"parameter": name, **{kind: _describe(found[row, i], ends[row, i]) for i, kind in enumerate(_KINDS)}}
        for name, row in rows.items()
    ]
    return [each for each in made if each["weights"] is not None]  # else a buffer


def _count(values: torch.Tensor, weight: torch.Tensor | None, sums: torch.Tensor, limits: torch.Tensor) -> None:
    """Adds what a rank holds of a tensor to its row."""
    for part in torch.split(values.reshape(-1), _AT_ONCE):
        each = part if part.dtype == torch.float64 else part.float()
        if weight is not None:
            each = each * weight.to(each)
        finite = each[each.isfinite()]
        places = torch.bucketize(finite, _edges(finite.device, finite.dtype), out_int32=True)
        exact = finite.double()
        head = torch.stack([exact.new_tensor(float(each.numel() - finite.numel())), exact.sum(), exact.square().sum()])
        sums += torch.cat([head, torch.bincount(places, minlength=len(EDGES) + 1).double()]).to(sums.device)
        if finite.numel():
            limits.copy_(torch.minimum(limits, torch.stack([exact.min(), -exact.max()]).to(limits.device)))


@functools.cache
def _edges(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(EDGES, dtype=dtype, device=device)


def _describe(row: torch.Tensor, limits: torch.Tensor) -> dict[str, Any] | None:
    """Returns a row as JSON values; None of no elements.

    Bins run from the first to the last that is not empty, and empty ones next to one another are one.
    """
    counts = [int(value) for value in row[_COUNTS:].tolist()]
    number, not_finite = sum(counts), int(row[_NOT_FINITE].item())
    if not number + not_finite:
        return None
    low, high = (limits[0].item(), -limits[1].item()) if number else (0.0, 0.0)
    starts, ends = [low, *EDGES], [*EDGES, high]  # what is behind the outermost edges goes as far as the values do
    kept: list[int] = []
    edges: list[float] = []
    for place in [place for place, count in enumerate(counts) if count]:
        if edges and edges[-1] != starts[place]:
            kept.append(0)
            edges.append(starts[place])
        edges += [ends[place]] if edges else [starts[place], ends[place]]
        kept.append(counts[place])
    return {
        "count": number,
        "not_finite": not_finite,
        "norm": math.sqrt(row[_SQUARES].item()),
        "min": low,
        "max": high,
        "mean": row[_SUM].item() / max(number, 1),
        "edges": edges,
        "counts": kept,
    }
