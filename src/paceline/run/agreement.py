"""What hosts compare with the first one before a rank is started: versions, ranks, config and folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import UsageError
from paceline.imports import IMPORT_PATH
from paceline.run.stay import is_own
from paceline.run.whereami import host_name
from paceline.untrusted import parse_json_object, read_regular

REFUSED_WHY = "agreement/refused"
_FIRST, _MARKED = "agreement/first", "agreement/marked"
_MARK = ".hosts"  # in a folder that all hosts see: what the first one wrote there
_SEEN_S = 10.0  # until a file that another host has written is seen through a network's file system
_TOLD = 4  # keys of the config that differ


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host brings to a run on several."""

    host: str
    paceline: str
    torch: str
    ranks: int
    config: dict[str, Any]
    folders: tuple[str, ...]
    mark: str = ""
    code: dict[str, str] = field(default_factory=dict)  # a hash of each package or file of Python that ranks will run

    @classmethod
    def here(cls, config: Config, folder: Path, ranks: int) -> HostFacts:
        """Returns the facts of this host, which was asked for this config and keeps the run in ``folder``."""
        from paceline import __version__
        from paceline.checkpoint.storage import is_remote

        kept = config.checkpoint.folder
        folders = [folder, *([Path(kept)] if kept is not None and not is_remote(kept) else [])]
        where = tuple(str(each.absolute()) for each in folders)
        asked = config.model_dump(mode="json", exclude={"name", "monitor"})
        host, versions, mark = host_name(), {"paceline": __version__, "torch": version("torch")}, secrets.token_hex(16)
        code = {path.name: _hash(path) for path in [Path(__file__).parents[1], *_own_code(json.dumps(asked))]}
        return cls(host=host, ranks=ranks, config=asked, folders=where, mark=mark, code=code, **versions)


def _own_code(config: str) -> Iterator[Path]:
    """Yields the files and packages of the user's that a config in JSON names, by ``package.module:name``."""
    for spec in filter(IMPORT_PATH.fullmatch, re.findall(r'"([^"]+)"', config)):
        module = spec.partition(":")[0]
        name, inner = module.partition(".")[0], f"{module.replace('.', '/')}.py"
        found = (Path(folder, each).absolute() for folder in ("", *sys.path) for each in (name, f"{name}.py", inner))
        path = next((each for each in found if each.is_file() or (each / "__init__.py").is_file()), None)
        if path is not None and is_own(str(path)):
            yield path


def _hash(path: Path) -> str:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    told = [f"{file.relative_to(path)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def agree(store: Any, facts: HostFacts, *, may_go_without: bool) -> None:
    """Compares this host with the first one. Raises UsageError where they differ, also for others to read."""
    text = json.dumps(asdict(facts))
    first = parse_json_object(store.compare_set(_FIRST, "", text))
    if first.get("mark") == facts.mark:
        for folder in facts.folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / _MARK).write_text(facts.mark, encoding="ascii")
        store.set(_MARKED, "yes")
        return
    problems = list(differences(first, facts))
    if not problems:
        store.wait([_MARKED])
        problems = [
            f"host {facts.host} does not see {folder} of host {first['host']}\n  all hosts write to one folder: each "
            "would save a part of every checkpoint\n  mount the same file system there, or set monitor.folder and "
            "checkpoint.folder to one that all hosts have"
            for folder in _unseen(facts, str(first["mark"]))
        ]
    if problems:
        refusal = "\n".join(problems)
        if not may_go_without:
            store.set(REFUSED_WHY, refusal)
        raise UsageError(refusal)


def refusal_of(store: Any) -> str:
    """Returns why a host without which the run cannot go on has refused to take part; empty: none has."""
    return str(store.get(REFUSED_WHY).decode("utf-8", "replace")) if store.check([REFUSED_WHY]) else ""


def differences(first: Mapping[str, Any], own: HostFacts) -> Iterator[str]:
    """Yields in which facts this host differs from the first one, each with the rule and the fix."""
    other = str(first.get("host"))
    for name, said in (("paceline", "Paceline"), ("torch", "torch")):
        if first.get(name) != getattr(own, name):
            what = f"host {own.host} has {said} {getattr(own, name)}, and host {other} has {first.get(name)}"
            fix = f"install {said} {first.get(name)} on {own.host}"
            yield f"{what}\n  all hosts of a run have the same versions\n  {fix}"
    codes = first.get("code") or {}
    if others := sorted(name for name, found in own.code.items() if codes.get(name, found) != found):
        what = f"host {own.host} has another {', '.join(others)} than host {other}"
        yield f"{what}\n  all hosts of a run have the same code\n  give {own.host} the same files"
    if first.get("ranks") != own.ranks:
        what = f"host {own.host} has {own.ranks} ranks, and host {other} has {first.get('ranks')}"
        rule = "every host has as many ranks as the others: one per GPU, unless it is said"
        yield f"{what}\n  {rule}\n  give all of them --node-ranks N; paceline doctor shows the GPUs of {own.host}"
        return  # then the number of ranks in the config differs, too
    keys = [*_different("", first.get("config") or {}, own.config)]
    if keys:
        more = f" and {len(keys) - _TOLD} more" if len(keys) > _TOLD else ""
        what = f"host {own.host} has another config than host {other}: {', '.join(keys[:_TOLD])}{more}"
        yield f"{what}\n  all hosts start the same run\n  give {own.host} the same file and the same overrides"


def _different(prefix: str, first: Any, own: Any) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(own, dict):
        for name in sorted(first.keys() | own.keys()):
            yield from _different(f"{prefix}.{name}" if prefix else name, first.get(name), own.get(name))
    elif first != own and not any(each in ("auto", None) for each in (first, own)):  # each host decides these
        yield f"{prefix} = {own}, not {first}"


def _unseen(facts: HostFacts, mark: str) -> list[str]:
    def has_mark(folder: str) -> bool:
        with contextlib.suppress(OSError):
            return read_regular(Path(folder) / _MARK, 128).decode("ascii", "replace") == mark
        return False

    deadline = time.monotonic() + _SEEN_S
    left = list(facts.folders)
    while (left := [folder for folder in left if not has_mark(folder)]) and time.monotonic() <= deadline:
        time.sleep(0.2)
    return left
