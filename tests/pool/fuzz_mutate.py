"""Changes of input, drawn from a seed: values of JSON that are almost right, and texts that are no longer JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**99, 1e308, 0.5, -0.0),
    *("", "x", ".", "..", "../../etc/passwd", "/etc/passwd", "/dev/zero", "a/b", "a\\b", "\0", "\x1b[31m", "é" * 300),
    *([], {}, [[]], {"": {}}, [0], [1, 2], {"dict": []}, {"dict": [[[], 1]]}, {"tuple": 1}, {"float": "x"}),
    *({"tensor": "AAAA", "dtype": "F32", "shape": [2**60]}, {"tensor": "!", "dtype": "F32", "shape": [1]}),
    *("F64", "F32", "BOOL", "I4", "step-00000001", "manifest.json", "rank-00000.json", "nan", "1e999"),
)


_WORDS = (b"\0", b"\xff\xfe", b"\\ud800", b"NaN", b"Infinity", b"1e999", b"\n", b'"', b"&a *a", b"!!bool x")


def changed(value: Any, draw: random.Random) -> Any:
    """Returns JSON values with one to three changes."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _change(value, draw)
    return value


def _change(value: Any, draw: random.Random) -> Any:
    places: list[tuple[Any, Any]] = []
    _collect(value, places, draw)
    if not places:
        return draw.choice(_NASTY)
    holder, key = draw.choice(places)
    how = draw.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == 2:
        other = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[0][other[1]]))
    elif how == 3 and type(holder[key]) is int:
        holder[key] += draw.choice((-1, 1, 8, -8))
    elif how == 4 and isinstance(holder, dict):
        holder[str(draw.choice(_NASTY))[:300]] = holder.pop(key)
    elif how == 5 and draw.random() < 0.2:
        deep: Any = 1
        for _ in range(draw.choice((50, 190, 300))):
            deep = [deep] if draw.random() < 0.9 else {"dict": [["a", deep]]}
        holder[key] = deep
    else:
        holder[key] = json.loads(json.dumps(draw.choice(_NASTY)))
    return value


def _collect(value: Any, places: list[tuple[Any, Any]], draw: random.Random) -> None:
    """Collects where values are; of a large table a few rows, so that its head is not lost among them."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys if len(keys) <= 6 else draw.sample(keys, 6):
        places.append((value, key))
        _collect(value[key], places, draw)


def broken(text: bytes, draw: random.Random) -> bytes:
    """Returns bytes that are cut, flipped, doubled or filled with something."""
    found = bytearray(text)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(found) + 1)
        how = draw.randrange(7)
        if how == 0:
            del found[at:]
        elif how == 1 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif how == 2:
            found[at:at] = draw.choice((b"[", b"{", b'{"a":', b"- ", b"? ")) * draw.choice((3, 250, 10_000))
        elif how == 3:
            found[at:at] = b"9" * draw.choice((30, 101, 5_000))
        elif how == 4:
            found[at:at] = found[: draw.randrange(200)]
        elif how == 5:
            found[at:at] = draw.choice(
                (b"\0", b"\xff\xfe", b"\\ud800", b"NaN", b"Infinity", b"1e999", b"\n", b'"', b"&a *a")
            )
        else:
            del found[at : at + draw.randrange(20)]
    return bytes(found)


def parser_inputs(samples: list[bytes], make: Callable[[Any], bytes] | None = None) -> Callable[[random.Random], bytes]:
    """Returns what draws an input for a parser: a sample with other values (``make`` writes them), or no longer one."""

    def drawn(draw: random.Random) -> bytes:
        sample = draw.choice(samples)
        if make is None or draw.random() < 0.4:
            return broken(sample, draw)
        return make(changed(json.loads(sample), draw))

    return drawn
