"""From a YAML file and overrides to a checked config, with every problem reported at once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.bounded_yaml import MOST_BYTES
from paceline.config.checks import Check, run_checks
from paceline.config.problems import MISSING, format_value, schema_problems, value_at
from paceline.config.schema import Config
from paceline.config.shipped import find_config, shipped_configs
from paceline.config.suggest import find_field, near_files, section_paths
from paceline.config.train_checks import known_length, shorter_warmup
from paceline.config.yaml_text import Document, dump_values, parse_document, parse_value
from paceline.errors import ConfigError, Problem, did_you_mean

# Stands in for a broken section while the others are checked; no rule that reads the section is run.
_PLACEHOLDER = {"kind": "factory", "factory": "nothing:here"}
# Two keys of one section for one thing: an override of the one takes the place of the other that stands in the file.
_OVERRIDE_RULE = "an override is section.key=value"
_EXCLUSIVE = {"train.steps": "train.epochs", "train.epochs": "train.steps"}
# What says how long a schedule is. A warmup of the file gives way where an override of these leaves no room for it.
_LENGTHS = {"train.steps", "train.global_batch", "optim.schedule.length", "optim.schedule.unit"}
_WARMUP = "optim.schedule.warmup"
# Values that had another word before.
_RENAMED = {("data", "tokens", "byte"): "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config, where each key came from (file and line, override, default, derived), and what of the file gave way."""

    config: Config
    sources: dict[str, str]
    notes: tuple[str, ...] = ()


def load_config(path: str | Path | None, overrides: str | Sequence[str] = ()) -> Config:
    """Reads a YAML file, or a config that ships by its name, with overrides. Raises ConfigError with all problems."""
    return load_config_with_sources(path, overrides).config


def load_config_with_sources(
    path: str | Path | None, overrides: str | Sequence[str] = (), *, check: Check = lambda _: ()
) -> LoadedConfig:
    """Reads a config as ``load_config`` does, and keeps where each key came from; ``check`` may find more problems."""
    file = None if path is None else find_config(path)
    source = "config" if file is None else str(file)
    document = Document(values={}) if file is None else parse_document(_read(file), source)
    asked = _AskedValues(values=copy.deepcopy(document.values), lines=document.lines, of_file=document.values)
    for text in [overrides] if isinstance(overrides, str) else overrides:
        asked.override(text)
    config = _validate(asked, source, check)
    sources = {key: asked.source(key, source) for key in leaf_values(config)}
    return LoadedConfig(config=config, sources=sources, notes=tuple(asked.notes))


def config_from_dict(values: Mapping[str, Any], source: str = "config", overrides: Sequence[str] = ()) -> Config:
    """Checks plain values, and overrides of them, as a YAML file would be. Raises ConfigError with all problems."""
    asked = _AskedValues(values=copy.deepcopy(dict(values)), of_file=values)
    for text in overrides:
        asked.override(text)
    return _validate(asked, source)


def read_values(path: str | Path) -> dict[str, Any]:
    """Reads the plain values of a YAML file, whatever they mean. Raises ConfigError if it cannot be read."""
    return parse_document(_read(find_config(path)), str(path)).values


def dump_yaml(config: Config) -> str:
    """Writes a config with every key, defaults included, as YAML that ``load_config`` reads back as equal."""
    return dump_values(config.model_dump(mode="json"))


def leaf_values(config: Config) -> dict[str, Any]:
    """Returns the value of each dotted key, in the order of a dump; ``args`` and lists count as one value."""
    return dotted_values(config.model_dump(mode="json"), sections=section_paths())


def dotted_values(
    values: Mapping[str, Any], prefix: str = "", sections: Collection[str] | None = None
) -> dict[str, Any]:
    """Returns the value of each dotted key of mappings inside one another: all of them, or ``sections`` alone."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        is_inner = isinstance(value, Mapping) and value if sections is None else path in sections
        found |= dotted_values(value, f"{path}.", sections) if is_inner else {path: value}
    return found


@dataclass(slots=True, kw_only=True)
class _AskedValues:
    """What was asked for, before it is validated: values, and where they were given."""

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    overridden: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    of_file: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    derived: dict[str, str] = field(default_factory=dict)

    def override(self, text: str) -> None:
        """Sets one key from ``section.key=value``, or notes why it cannot."""
        key, separator, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(part and part[0] not in "-+ " for part in parts):
            plain = ".".join(part.strip(" -+") for part in key.split(".") if part.strip(" -+"))
            fix = f"write {plain or 'section.key'}={value_text if separator else 'value'}"
            self.problems.append(Problem(what=f"override {text!r} is malformed", rule=_OVERRIDE_RULE, fix=fix))
            return
        if not value_text.strip():
            fix = f"write {key}=null for none, {key}='\"\"' for an empty text, or leave it out"
            self.problems.append(Problem(what=f"override {text!r} has no value", rule=_OVERRIDE_RULE, fix=fix))
            return
        try:
            value = parse_value(value_text)
        except ConfigError as error:
            rule = f"the value is read as YAML: {error.problems[0].rule}"
            fix = f"""put it in quotes: {key}='"{value_text}"'"""
            self.problems.append(Problem(what=f"override {text!r} has no readable value", rule=rule, fix=fix))
            return
        self._set(parts, value)

    def _set(self, parts: list[str], value: Any) -> None:
        content = self.values
        for depth, part in enumerate(parts[:-1], start=1):
            inner = content.get(part)
            if inner is None:
                inner = content[part] = {}
            if not isinstance(inner, dict):
                place = ".".join(parts[:depth])
                what = f"override {'.'.join(parts)} reaches into {place} = {format_value(inner)}"
                self.problems.append(Problem(what=what, rule=f"{place} is not a section", fix=f"set {place} itself"))
                return
            content = inner
        path = ".".join(parts)
        known = find_field(path, None)
        if value is None and known is not None and known.default is not None and "null" not in known.types:
            content.pop(parts[-1], None)  # undone: the default holds again
        else:
            content[parts[-1]] = value
        other = _EXCLUSIVE.get(path)
        if other is not None and value is not None and other not in self.overridden:
            content.pop(other.rpartition(".")[2], None)
        self.overridden.add(path)

    def make_way(self, config: Config, problems: list[Problem]) -> bool:
        """Drops keys that an override made idle, says if there were any. What the file alone has wrong is refused."""
        if not self.overridden:
            return False
        num_notes = len(self.notes)
        known = known_length(config) if self.overridden & _LENGTHS and self._nearest(_WARMUP) != "override" else None
        warmup, note = shorter_warmup(config.optim.schedule, *known) if known else (0.0, "")
        if note:
            self.values["optim"]["schedule"]["warmup"] = warmup
            self.derived[_WARMUP] = f"derived: {note}"
            self.notes.append(note)
        idle = [each for each in problems if each.idle_key and self._nearest(each.idle_key).startswith("line")]
        alone: set[str] = set()
        with contextlib.suppress(ValidationError):  # no config by itself
            alone = {each.what for each in run_checks(Config.model_validate(self.of_file))} if idle else set()
        for each in idle:
            place, _, key = each.idle_key.rpartition(".")
            content = value_at(self.values, place)
            is_asked = any(path.startswith(f"{each.idle_key}.") for path in self.overridden)
            if each.what not in alone and not is_asked and isinstance(content, dict) and key in content:
                del content[key]
                self.notes.append(f"{each.what}: left out, as an override has made it idle")
        return len(self.notes) > num_notes

    def rename(self) -> None:
        for (section, key, old), new in _RENAMED.items():
            content = self.values.get(section)
            if isinstance(content, dict) and content.get(key) == old:
                content[key] = new
                self.notes.append(f"{section}.{key} = {old}: the word is {new}")

    def locate(self, path: str) -> str:
        """Returns where a key was given, for messages: `` (override)``, `` (line 4)``, or nothing."""
        found = self._nearest(path)
        return f" ({found})" if found else ""

    def source(self, path: str, name: str) -> str:
        if path in self.derived:
            return self.derived[path]
        if value_at(self.values, path) is MISSING:
            return "default"
        found = self._nearest(path)
        return found if found == "override" else f"file {name}" + (f":{found.removeprefix('line ')}" if found else "")

    def _nearest(self, path: str) -> str:
        """Looks the key up, then the sections around it: an override or a YAML alias may have set them whole."""
        while path:
            if path in self.overridden:
                return "override"
            if path in self.lines:
                return f"line {self.lines[path]}"
            path = path.rpartition(".")[0]
        return ""


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4 * MOST_BYTES + 1).decode("utf-8")  # a device may never end; a longer text is refused
    except FileNotFoundError:
        where = f"a relative path starts at {Path.cwd()}"
        problem = Problem(what=f"{path} does not exist", rule=where, fix=_suggest_file(path))
    except IsADirectoryError:
        problem = Problem(what=f"{path} is a folder", rule="a config is a YAML file", fix="name a file in it")
    except UnicodeDecodeError as error:
        what = f"{path} is not text: byte {error.start} is {error.object[error.start]:#04x}"
        problem = Problem(what=what, rule="a config is a YAML file in UTF-8", fix="save it as UTF-8")
    except OSError as error:
        problem = Problem(what=f"{path} cannot be read: {error.strerror}", fix="check its permissions")
    raise ConfigError([problem], source=str(path))


def _suggest_file(path: Path) -> str:
    if near := near_files(path):
        return near
    if near_name := did_you_mean(path.stem, shipped_configs(), cutoff=0.7):
        return f"{near_name} It comes with Paceline: paceline config copy writes it out"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    for folder in (path.parent, path.parent / "configs"):
        if configs := sorted(each.name for each in folder.glob("*") if each.suffix in (".yaml", ".yml")):
            return f"the configs in {folder} are {', '.join(configs[:8])}"
    return f"no config is in {path.parent}"


def _validate(asked: _AskedValues, source: str, check: Check = lambda _: ()) -> Config:
    _open_empty_sections(asked.values)
    asked.rename()
    problems = list(asked.problems)
    try:
        config = Config.model_validate(asked.values)
        found = run_checks(config)
        while found and asked.make_way(config, found):
            config = Config.model_validate(asked.values)
            found = run_checks(config)
        problems += [*found, *check(config)]
    except ValidationError as error:
        problems += schema_problems(error, asked.values, asked.locate)
        # Rules that read only sections without a problem of their own are run as well.
        sound = Config.model_fields.keys() - {str(each["loc"][0]) for each in error.errors()}
        kept = {name: content for name, content in asked.values.items() if name in sound}
        filled = dict.fromkeys(("model", "data"), _PLACEHOLDER) | kept
        problems += run_checks(Config.model_validate(filled), sections=sound)
    if problems:
        raise ConfigError(problems, source=source)
    return config


def _open_empty_sections(values: dict[str, Any], place: str = "") -> None:
    """Reads a section without keys (``optim:`` with all lines below commented out) as one with defaults."""
    for key, value in values.items():
        if value is None and f"{place}{key}" in section_paths():
            values[key] = {}
        elif isinstance(value, dict):
            _open_empty_sections(value, f"{place}{key}.")
