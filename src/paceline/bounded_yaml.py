"""YAML within bounds: one reader for configs, catalogs and all other files.

The scalars follow YAML 1.2, so that what looks like a number is one: ``3e-4`` is a number (YAML 1.1 reads text),
``010`` is 10 (not 8), ``12:30`` and ``2024-01-01`` are text, and only ``true`` and ``false`` are booleans.

The bounds are 128 KiB, 64 levels, 20,000 values with every alias counted in full, and integers of 100 digits. Whatever
is beyond, and whatever a tag makes of a value that does not fit it, is a ``yaml.YAMLError`` as any other mistake.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from paceline.untrusted import MOST_DIGITS

_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_BYTES = 2**17
MOST_LEVELS = 64
MOST_VALUES = 20_000
TAG = "tag:yaml.org,2002:"
# Tag, pattern, first characters; the first that matches wins. An empty value has the first character "".
SCALARS: tuple[tuple[str, str, Iterable[str]], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("merge", r"<<", "<"),
)


class BoundError(yaml.MarkedYAMLError):
    """YAML that is beyond the bounds."""

    def __init__(self, problem: str, mark: yaml.Mark | None = None) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds: a document that is beyond them is never built."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  the base declares it as a plain class attribute

    def __init__(self, text: str) -> None:
        if len(text) > MOST_BYTES:
            raise BoundError(f"it has {len(text):,} characters, and YAML is read up to {MOST_BYTES:,}")
        super().__init__(text)
        self._level = self._num_values = 0
        self._extents: dict[int, tuple[int, int]] = {}  # of a node: how many values it has, and how many levels

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node as the base does, and counts: what an alias refers to counts as if it stood there."""
        is_alias = self.check_event(yaml.AliasEvent)
        before, self._level = self._num_values, self._level + 1
        self._check(self._level)
        node = super().compose_node(parent, index)
        key = id(node)
        if is_alias:
            if key not in self._extents:
                raise self._beyond("an alias refers to itself: values are a tree")
            values, levels = self._extents[key]
            self._num_values += values
            self._check(self._level + levels)
        else:
            self._num_values += 1
            if isinstance(node, yaml.ScalarNode) and any("\ud800" <= each <= "\udfff" for each in node.value):
                # Half of a pair, which an escape can name, cannot be printed or written.
                raise BoundError("a text holds half of a character", node.start_mark)
            children = node.value if isinstance(node, yaml.CollectionNode) else []
            inner = [each for child in children for each in (child if isinstance(child, tuple) else (child,))]
            levels = 1 + max((self._extents.get(id(each), (1, 1))[1] for each in inner), default=0)
            self._extents[key] = (self._num_values - before, levels)
            self._check(self._level)
        self._level -= 1
        return node

    def _check(self, levels: int) -> None:
        if levels > MOST_LEVELS:
            raise self._beyond(f"it is nested more than {MOST_LEVELS} levels deep")
        if self._num_values > MOST_VALUES:
            raise self._beyond(f"it has more than {MOST_VALUES:,} values, aliases counted in full")

    def _beyond(self, problem: str) -> BoundError:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        return BoundError(problem, None if event is None else event.start_mark)


def _integer(_: yaml.SafeLoader, node: yaml.Node) -> int:
    digits = str(node.value).replace("_", "")
    if len(digits) > MOST_DIGITS:
        raise BoundError(f"a number has {len(digits):,} digits, and {MOST_DIGITS} are the most", node.start_mark)
    return int(digits)


for _name, _pattern, _first in SCALARS:
    BoundedLoader.add_implicit_resolver(TAG + _name, re.compile(f"(?:{_pattern})$"), list(_first))
BoundedLoader.add_constructor(TAG + "int", _integer)


@contextlib.contextmanager
def yaml_errors() -> Iterator[None]:
    """Turns what a tag on the wrong value raises (``!!bool maybe``, ``!!timestamp 2024-99-99``) into a YAMLError."""
    try:
        yield
    except yaml.YAMLError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise yaml.YAMLError(f"a value does not fit its tag: {type(error).__name__}: {error}") from error


def load_yaml(text: str) -> Any:
    """Returns the values of a YAML text. Raises yaml.YAMLError for what is none, or beyond the bounds."""
    with yaml_errors():
        return yaml.load(text, Loader=BoundedLoader)  # nosec B506  # a safe loader


def load_shipped(text: str) -> Any:
    """Returns the values of YAML that ships with the package. In C, where PyYAML has that: ten times as fast."""
    return yaml.load(text, Loader=_FAST)  # nosec B506  # a safe loader
