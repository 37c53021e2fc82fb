"""Low-rank adapters in an export: their products are added to the weights, and they themselves are left out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from paceline.checkpoint.files import LORA, read_files
from paceline.checkpoint.manifest import MALFORMED, damaged
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tensors import Stream
from paceline.checkpoint.tools.stream import stream_made
from paceline.models.lora import A, B, merged
from paceline.untrusted import parse_json_object


def merged_streams(checkpoint: Checkpoint, streams: Mapping[str, Stream]) -> dict[str, Stream]:
    """Returns the tensors of a model without adapters; each merged weight is in memory while it is read."""
    text = read_files(checkpoint, LORA).get("")
    if text is None:
        return dict(streams)
    found = dict(streams)
    try:
        for name, adapter in parse_json_object(text).items():
            a, b, weight = found.pop(f"{name}.{A}"), found.pop(f"{name}.{B}"), found[f"{name}.weight"]
            make = partial(_merge, weight, a, b, dict(adapter))
            found[weight.name] = stream_made(weight.name, weight.shape, weight.dtype, make)
    except MALFORMED as error:
        raise damaged(f"the adapters of {checkpoint.path} are not those of its tensors: {error}") from error
    return found


def _merge(weight: Stream, a: Stream, b: Stream, adapter: Mapping[str, Any]) -> torch.Tensor:
    return merged(
        weight.whole(), a.whole(), b.whole(), float(adapter["scale"]), is_transposed=bool(adapter["is_transposed"])
    )
