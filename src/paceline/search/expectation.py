"""What a run was expected to take, kept beside its records, and how that compares with what it took.

prediction.json   written before the ranks start:  seconds a step, their range, bytes a rank, and what was assumed
  later           added when the run is done:       what was predicted while it ran; the earlier one stays as it was
Compared          that, and what was measured:      ratio = measured / predicted
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from paceline.units import format_bytes, format_seconds
from paceline.untrusted import parse_json, read_regular

FILE = "prediction.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A prediction of a run. ``reason`` says why there is none of its time, which is None then.

    ``fitted``: whether the run is like those that constants were fitted on; ``assumed`` says in what it is not.
    ``is_later``: made while the run went on, and not before its start. ``later`` is such a one beside an earlier one.
    """

    ranks: int = 0
    cluster: str = ""
    plan: str = ""
    step_s: float | None = None
    step_s_low: float | None = None
    step_s_high: float | None = None
    memory_bytes: float | None = None
    fitted: bool = False
    assumed: tuple[str, ...] = ()
    reason: str = ""
    is_later: bool = False
    later: Expectation | None = None

    def with_later(self, found: Expectation) -> Expectation:
        """Returns what to keep once a later prediction is known: what was said before the start is not replaced."""
        late = replace(found, is_later=True)
        if self.step_s is None or late.step_s is None:
            return late if self.step_s is None else self
        is_same = late.memory_bytes == self.memory_bytes
        return replace(self, later=replace(late, memory_bytes=None if is_same else late.memory_bytes))

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Reads the content of the file. Raises ValueError where it is not such a one."""
        return cls._of_values(parse_json(text))

    @classmethod
    def _of_values(cls, values: Any) -> Self:
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known:
            raise ValueError(f"it is not an object with the keys {', '.join(sorted(known))}")
        for name in ("step_s", "step_s_low", "step_s_high", "memory_bytes"):
            value = values.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < float("inf")):
                raise ValueError(f"{name} is {value!r}, and not a number above 0")
        assumed, reason = values.get("assumed", []), values.get("reason", "")
        is_text = isinstance(assumed, list) and all(isinstance(each, str) for each in (*assumed, reason))
        if not is_text or not all(isinstance(values.get(name, False), bool) for name in ("fitted", "is_later")):
            raise ValueError("assumed is a list of texts, fitted and is_later are true or false, and reason is text")
        later = values.get("later")
        if isinstance(later, dict) and later.get("later") is not None:
            raise ValueError("later has a later one of its own")
        return cls(**{**values, "assumed": tuple(assumed), "later": None if later is None else cls._of_values(later)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Predicted beside measured; the ratios are measured / predicted, None where one of the two is missing."""

    predicted: Expectation
    measured_step_s: float | None
    measured_memory_bytes: int | None
    step_ratio: float | None
    memory_ratio: float | None

    def lines(self) -> list[str]:
        told, found = [], self.predicted
        when = " while it ran" if found.is_later else ""
        if self.step_ratio is not None and found.step_s is not None and self.measured_step_s is not None:
            low, high, measured = found.step_s_low, found.step_s_high, self.measured_step_s
            band = "" if high is None else f" (band {100 * (high / found.step_s - 1):.0f} %)"
            is_inside = low is None or high is None or low <= measured <= high
            told.append(
                f"predicted {_seconds(found.step_s)} a step{when}{band}, measured {_seconds(measured)}: "
                f"{_difference(self.step_ratio)}{'' if is_inside else ', outside the band'}"
            )
        if self.memory_ratio is not None and found.memory_bytes and self.measured_memory_bytes:
            told.append(
                f"predicted {format_bytes(found.memory_bytes)} of memory a rank{when}, "
                f"measured {format_bytes(self.measured_memory_bytes)}: {_difference(self.memory_ratio)}"
            )
        return told + [line for each in self.later() for line in each.lines()]

    def later(self) -> list[Compared]:
        found = self.predicted.later
        return [] if found is None else [compare(found, self.measured_step_s, self.measured_memory_bytes)]


def compare(predicted: Expectation, step_s: float | None, memory_bytes: int | None) -> Compared:
    """Sets what was measured beside a prediction; a figure that is 0 was not measured."""
    return Compared(
        predicted=predicted,
        measured_step_s=step_s or None,
        measured_memory_bytes=memory_bytes or None,
        step_ratio=step_s / predicted.step_s if step_s and predicted.step_s else None,
        memory_ratio=memory_bytes / predicted.memory_bytes if memory_bytes and predicted.memory_bytes else None,
    )


def read_expectation(run_folder: Path) -> Expectation | None:
    """Returns what was expected of a run; None where nothing was. A file that cannot be read is a reason for none."""
    path = run_folder / FILE
    try:
        return Expectation.of_text(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return Expectation(reason=f"{path} cannot be read: {error}")


def _difference(ratio: float) -> str:
    if ratio >= 10:
        return f"{ratio:.0f} times as much"
    per_cent = round(100 * (ratio - 1))
    return "as predicted" if per_cent == 0 else f"{abs(per_cent)} % {'more' if per_cent > 0 else 'less'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if 1 <= seconds < 60 else format_seconds(seconds)
