"""YAML as configs use it: text to plain values with their lines, and back, by the rules of ``bounded_yaml.py``."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from paceline.bounded_yaml import SCALARS, TAG, BoundedLoader, BoundError, load_yaml, yaml_errors
from paceline.errors import ConfigError, Problem

_MERGE = TAG + "merge"


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  a config is a tree: repeat rather than refer
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes keep every character: PyYAML folds some line breaks of Unicode in the other styles.
    return dumper.represent_scalar(TAG + "str", text, style=None if text.isprintable() else '"')


for _name, _pattern, _first in SCALARS:
    _Dumper.add_implicit_resolver(TAG + _name, re.compile(f"(?:{_pattern})$"), list(_first))
_Dumper.add_representer(list, lambda dumper, each: dumper.represent_sequence(TAG + "seq", each, flow_style=True))
_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The values of a YAML file, and the line of each dotted key."""

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


def parse_document(text: str, source: str) -> Document:
    """Reads a YAML file whose top is a section. Raises ConfigError, with line and column, for anything else."""
    known = _read_document(text, source)
    return Document(values=copy.deepcopy(known.values), lines={**known.lines})


@functools.lru_cache(maxsize=16)
def _read_document(text: str, source: str) -> Document:
    """Reads what a command may ask for several times; the loader takes milliseconds for a page."""
    survey = _Survey()
    try:
        with yaml_errors():
            loader = BoundedLoader(text)
            node = loader.get_single_node()
            if node is None:
                return Document(values={})
            survey.visit(node, "")
            if survey.problems:
                raise ConfigError(survey.problems, source=source)
            values = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error)], source=source) from error
    if values is None:
        return Document(values={})
    if not isinstance(values, dict):
        found = f"a list of {len(values)}" if isinstance(values, list) else f"the value {values!r}"
        rule = "a config is a section with the keys name, model, data, parallel, ..."
        fix = "write 'model:' at the start of a line, and its keys indented below it"
        raise ConfigError([Problem(what=f"the top of the file is {found}", rule=rule, fix=fix)], source=source)
    return Document(values=values, lines=survey.lines)


def parse_value(text: str) -> Any:
    """Reads the value of an override. Raises ConfigError with the problem."""
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error)], source="override") from error


def dump_values(values: dict[str, Any]) -> str:
    """Writes plain values as YAML that ``parse_document`` reads back as they are."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


class _Survey:
    """Walks the nodes of a document: notes the line of each key, and what a mapping would silently swallow."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._visited: set[int] = set()

    def visit(self, node: yaml.Node, path: str) -> None:
        """Visits a node once, however often the document refers to it."""
        if id(node) in self._visited:
            return
        self._visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for child in node.value:
                self.visit(child, path)
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path)

    def _visit_mapping(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == _MERGE:
                self.visit(value, path)
                continue
            if key.tag != TAG + "str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "of several values"
                fix = f"put it in quotes: '{shown}'" if isinstance(key, yaml.ScalarNode) else "use a word as the key"
                what = f"line {line}: the key {shown or 'null'} is not text"
                self.problems.append(Problem(what=what, rule="every key of a config is text", fix=fix))
                continue
            full = f"{path}.{key.value}" if path else key.value
            if key.value in seen:
                what = f"{full} is given twice, in lines {seen[key.value]} and {line}"
                rule = "YAML would keep the last one and say nothing"
                self.problems.append(Problem(what=what, rule=rule, fix="remove one of them"))
            seen.setdefault(key.value, line)
            self.lines.setdefault(full, line)
            self.visit(value, full)


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    if isinstance(error, BoundError):
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        return Problem(what=f"{place}{error.problem}", rule="YAML is read within bounds", fix="make it smaller")
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(what=f"this is not YAML: {error}", fix="save the file as UTF-8 text")
    mark = error.problem_mark
    hint = "write 'key: value', and indent with two spaces"
    if "\\t" in (error.problem or ""):
        hint = "YAML is indented with spaces: replace the tab"
    reason = " ".join(part for part in (error.context, error.problem) if part)
    return Problem(what=f"line {mark.line + 1}, column {mark.column + 1}: this is not YAML", rule=reason, fix=hint)
