"""Plain values as JSON, exactly: numbers, texts, lists, tuples, dicts with any of these as keys, small tensors.

Nothing else is taken, so that reading a checkpoint never runs code of whoever wrote it.

    7, "a", [1, 2]          themselves
    (1, 2)                  {"tuple": [1, 2]}
    nan, inf                {"float": "nan"}
    {"a": 1}, {3: 1}        {"dict": [["a", 1]]}, {"dict": [[3, 1]]}
    a tensor                {"tensor": "<base64>", "dtype": "F32", "shape": [2]}

No torch: who reads them says what becomes of a tensor's bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.checkpoint.manifest import ITEM_BYTES, MALFORMED, OPTIMIZER, damaged, parse_shape

GROUP = "group/"
REST = "optimizer"
MakeTensor = Callable[[bytearray, str, tuple[int, ...]], Any]


def decode_with(value: Any, make_tensor: MakeTensor) -> Any:
    """Returns what was saved as ``value``. Raises CheckpointError for what no checkpoint has."""
    try:
        return _decode(value, make_tensor)
    except (*MALFORMED, RecursionError) as error:
        raise damaged(f"a value of a checkpoint is damaged: {type(error).__name__}: {error}") from error


def check_values(value: Any) -> None:
    decode_with(value, lambda raw, dtype, shape: (len(raw), dtype, shape))


def check_found(found: Mapping[str, Any]) -> None:
    """Raises CheckpointError where decoded ``found`` is not what an optimizer's state is saved as."""
    for name, entry in found.items():
        is_right = True
        if name.startswith(GROUP):
            is_right = isinstance(entry, dict) and all(isinstance(key, str) for key in entry)
        elif name == REST:
            is_right = isinstance(entry, dict) and all(isinstance(entry.get(key), dict) for key in ("state", "beside"))
        elif name.startswith(OPTIMIZER):
            label = entry.get("group") if isinstance(entry, dict) else None
            is_right = isinstance(label, str) and label in found and isinstance(entry.get("values"), dict)
            is_right = is_right and all(isinstance(key, str) for key in entry["values"])
        if not is_right:
            raise damaged(f"what a checkpoint has of {name} is no state of an optimizer")


def _decode(value: Any, make_tensor: MakeTensor) -> Any:
    if isinstance(value, list):
        return [_decode(each, make_tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        raw, dtype, shape = bytearray(base64.b64decode(value["tensor"])), value["dtype"], parse_shape(value["shape"])
        if len(raw) != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{len(raw):,} bytes for {dtype} {list(shape)}")
        return make_tensor(raw, dtype, shape)
    if "tuple" in value:
        return tuple(_decode(each, make_tensor) for each in value["tuple"])
    if "float" in value:
        return float(value["float"])
    return {_decode(key, make_tensor): _decode(each, make_tensor) for key, each in value["dict"]}
