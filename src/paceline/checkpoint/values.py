"""Plain values as JSON, exactly: numbers, texts, lists, tuples, dicts with any of these as keys, and small tensors.

Nothing else is taken, so that reading a checkpoint never runs code of whoever wrote it.

    7, "a", [1, 2]          themselves
    (1, 2)                  {"tuple": [1, 2]}
    nan, inf                {"float": "nan"}
    {"a": 1}, {3: 1}        {"dict": [["a", 1]]}, {"dict": [[3, 1]]}
    a tensor                {"tensor": "<base64>", "dtype": "F32", "shape": [2]}
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.tensors import dtype_code, dtype_of, host_bytes
from paceline.errors import CheckpointError


def encode(value: Any, where: str = "the state") -> Any:
    """Returns a value as JSON values. Raises CheckpointError, naming the place, for what cannot be saved."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [[encode(key, where), encode(each, f"{where}.{key}")] for key, each in value.items()]
        return {"dict": pairs}
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        text = base64.b64encode(host_bytes(flat)).decode("ascii") if flat.numel() else ""
        return {"tensor": text, "dtype": dtype_code(value.dtype), "shape": list(value.shape)}
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which cannot be saved\n"
        "  a checkpoint holds tensors, numbers, texts, lists, tuples and dicts\n  leave it out, or make it one of these"
    )


def decode(value: Any) -> Any:
    """Returns what ``encode`` was given."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        raw = bytearray(base64.b64decode(value["tensor"]))
        dtype = dtype_of(value["dtype"])
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    if "float" in value:
        return float(value["float"])
    return {decode(key): decode(each) for key, each in value["dict"]}
