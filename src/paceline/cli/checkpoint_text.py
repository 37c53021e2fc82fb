"""What ``paceline checkpoint`` prints: tables for people, and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import print_json
from paceline.terminal import echo, table_lines
from paceline.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paceline.checkpoint.tools.audit import Audit
    from paceline.checkpoint.tools.listing import Difference, Listed, Summary

_FIRST = 20  # rows of a long table, of which JSON has all


def show_list(found: Sequence[Listed], *, as_json: bool) -> None:
    """Shows the checkpoints of a folder, the newest last."""
    if as_json:
        print_json([{**asdict(each), "path": str(each.path), "is_whole": not each.problem} for each in found])
        return
    rows = [
        (
            str(each.step),
            format_seconds(each.age_s) if each.age_s is not None else "-",
            format_bytes(each.num_bytes),
            _world(each.world, each.strategy, each.mesh or {}),
            f"NO: {each.problem}" if each.problem else "yes",
            ", ".join(f"{name} {value:.4g}" for name, value in (each.metrics or {}).items()) or "-",
            ", ".join(each.kept) or "-",
        )
        for each in found
    ]
    _print_table(("step", "age", "size", "written by", "whole", "metrics", "kept because"), rows)


def show_summary(found: Summary, *, lists_tensors: bool, as_json: bool) -> None:
    """Shows a manifest in words, and tensors if they were asked for."""
    manifest, about = found.manifest, found.manifest.about
    if as_json:
        of_manifest = ("step", "position", "world", "num_bytes", "metrics", "about")
        shown: dict[str, Any] = {"path": str(found.path), **{name: getattr(manifest, name) for name in of_manifest}}
        for name in ("num_parameters", "bytes_by_kind", "bytes_by_dtype", "optimizer"):
            shown[name] = getattr(found, name)
        shown["files"] = {name: asdict(file) for name, file in manifest.files.items()}
        print_json(shown | ({"tensors": [asdict(each) for each in found.tensors]} if lists_tensors else {}))
        return
    echo(f"{found.path}")
    reason = about.get("reason", "a call")
    echo(f"  step {manifest.step}, {manifest.position:,} samples consumed, saved because of: {reason}")
    echo(
        f"  written by {_world(manifest.world, str(about.get('strategy', '')), manifest.mesh)} into "
        f"{len(manifest.files)} files, {format_bytes(manifest.num_bytes)}"
    )
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in found.bytes_by_kind.items())
    dtypes = ", ".join(f"{code} {format_bytes(size)}" for code, size in found.bytes_by_dtype.items())
    echo(f"  {len(manifest.tensors)} tensors, {format_count(found.num_parameters)} elements in the model")
    echo(f"    by kind   {kinds}")
    echo(f"    by dtype  {dtypes}")
    for settings in found.optimizer.values():
        given = {key: value for key, value in settings.items() if value is not None and value is not False}
        words = [f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in given.items()]
        echo(f"  optimizer group: {', '.join(words)}")
    if manifest.metrics:
        echo("  metrics: " + ", ".join(f"{name} {value:.6g}" for name, value in manifest.metrics.items()))
    echo(f"  values: {', '.join(manifest.values) or 'none'}")
    if not lists_tensors:
        echo("  list tensors with --tensors '*'")
        return
    rows = [
        (each.name, each.dtype, "x".join(map(str, each.shape)) or "scalar", format_bytes(each.num_bytes), _cut(each))
        for each in found.tensors
    ]
    _print_table(("tensor", "dtype", "shape", "size", "pieces"), rows)


def show_audit(found: Audit, *, as_json: bool) -> None:
    """Shows what was checked, and what is wrong."""
    if as_json:
        checks = [{**asdict(check), "is_good": check.is_good} for check in found.checks]
        print_json({**asdict(found), "is_good": found.is_good, "checks": checks})
        return
    echo(f"{found.path}: {'good' if found.is_good else 'DAMAGED'}")
    for check in found.checks:
        word = ("good" if check.is_good else "WRONG") if check.is_done else "-"
        echo(f"  {check.what:<9}{word:<7}{check.finding}")
        _echo_first([f"{'':18}{problem}" for problem in check.problems], f"{'':18}and {{}} more: --json lists them")


def show_difference(found: Difference, left: str, right: str, *, as_json: bool) -> None:
    """Shows what differs, the tensors that are furthest apart first."""
    if as_json:
        print_json({"left": left, "right": right, "is_same_state": found.is_same_state, **asdict(found)})
        return
    echo(f"A  {left}\nB  {right}")
    for title, names in (("only in A", found.only_left), ("only in B", found.only_right), ("other", found.other_shape)):
        _echo_first([f"  {title}: {name}" for name in names], f"  {title}: and {{}} more")
    if found.tensors:
        ordered = sorted(found.tensors, key=lambda each: (-each.max_absolute, each.name))
        rows = [
            (
                each.name,
                f"{each.num_different:,} of {each.num_elements:,}",
                *map(_number, (each.max_absolute, each.max_relative)),
            )
            for each in ordered[:_FIRST]
        ]
        _print_table(("tensor", "elements that differ", "largest", "relative"), rows)
        if len(ordered) > _FIRST:
            echo(f"  and {len(ordered) - _FIRST} more tensors: --json lists them")
    for title, pairs in (("value", found.values), ("setting", found.settings)):
        lines = [f"  {title} {name}: {_short(ours)} -> {_short(theirs)}" for name, (ours, theirs) in pairs.items()]
        _echo_first(lines, f"  and {{}} more {title}s: --json lists them")
    same = found.num_compared - len(found.tensors)
    word = "the same state, to the last bit" if found.is_same_state else "other states"
    echo(f"{same} of {found.num_compared} tensors are alike: {word}")


def show_written(what: str, path: Path, *, as_json: bool) -> None:
    """Shows where something was written."""
    from paceline.checkpoint.storage import url_of

    if as_json:
        print_json({what: url_of(path)})
    else:
        echo(f"{what} to {url_of(path)}")


def _world(ranks: int, strategy: str, mesh: Any) -> str:
    if not ranks:
        return "-"
    axes = "".join(f", {name} {size}" for name, size in mesh.items() if isinstance(size, int) and size > 1)
    return f"{ranks} rank{'s' if ranks > 1 else ''}{f' {strategy}' if strategy else ''}{axes}"


def _cut(line: Any) -> str:
    count = len(line.files)
    return "whole" if count == 1 and line.cut == "whole" else f"{count} ({line.cut})"


def _number(value: float) -> str:
    return "not a number" if math.isinf(value) else f"{value:.3g}"


def _echo_first(lines: Sequence[str], rest: str) -> None:
    """Prints some lines, and of how many more there are."""
    for line in lines[:_FIRST]:
        echo(line)
    if len(lines) > _FIRST:
        echo(rest.format(len(lines) - _FIRST))


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for line in table_lines([titles, *rows]):
        echo(line)
