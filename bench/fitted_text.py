"""The files of fitted constants as text: what ``predict/formulas`` reads, ``fit_constants.py`` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TypeAlias

from paceline.plan.workload import Workload
from paceline.predict.formulas.constants import (
    CONSTANT_NAMES,
    FRAMEWORKS,
    GENERATIONS,
    SHAPE_COLUMNS,
    ConstantSets,
    Domain,
    MeasuredBlocks,
    sizes_of,
)

DomainKey: TypeAlias = tuple[str, str, str]  # generation, framework, kind of model


def format_constants(sets: ConstantSets) -> str:
    """Writes sets as YAML that ``read_constants`` reads."""
    lines = []
    for generation in GENERATIONS:
        of_generation = [each for each in FRAMEWORKS if (generation, each) in sets]
        if of_generation:
            lines.append(f"{generation}:")
        for framework in of_generation:
            found = sets[generation, framework]
            values = ", ".join(f"{name}: {getattr(found, name):.4g}" for name in CONSTANT_NAMES)
            lines.append(f"  {framework}: {{{values}, rows: {found.rows}}}")
    return "\n".join(lines) + "\n"


def format_blocks(known: Mapping[tuple[str, str], MeasuredBlocks]) -> str:
    """Writes factors as CSV that ``parse_blocks`` reads, the same bytes for the same factors."""
    lines = [",".join(("generation", "framework", *SHAPE_COLUMNS, "block", "head"))]
    for key in sorted(known):
        rows = [([str(value) for value in shape], factors) for shape, factors in known[key].items()]
        for row, factors in sorted(rows, key=lambda each: [f"{text:>12}" for text in each[0]]):
            lines.append(",".join((*key, *row, f"{factors.block:.4g}", f"{factors.head:.4g}")))
    return "\n".join(lines) + "\n"


def domain_of(workloads: Mapping[DomainKey, list[Workload]]) -> dict[DomainKey, Domain]:
    """Returns what some workloads cover, by generation, framework and kind."""
    found = {}
    for key, those in workloads.items():
        sizes = [sizes_of(each) for each in those]
        found[key] = Domain(
            precisions=tuple(sorted({each.run.compute for each in those})),
            sizes={name: (min(each[name] for each in sizes), max(each[name] for each in sizes)) for name in sizes[0]},
        )
    return found


def domain_in(sets: ConstantSets) -> dict[DomainKey, Domain]:
    """Returns the domain of each set, by generation, framework and kind."""
    return {(*key, kind): each for key, found in sets.items() for kind, each in found.domain.items()}


def format_held_out(held_out: Mapping[str, ConstantSets]) -> str:
    """Writes sets that were fitted without a family, by its name, as YAML that ``scored/held_out.py`` reads."""
    parts = []
    for family, sets in sorted(held_out.items()):
        texts = {"constants": format_constants(sets), "domain": format_domain(domain_in(sets))}
        inner = "".join(f"{name}:\n{textwrap.indent(text, '  ')}" for name, text in texts.items())
        parts.append(f"{family}:\n{textwrap.indent(inner, '  ')}")
    return "".join(parts)


def format_domain(domain: Mapping[DomainKey, Domain]) -> str:
    """Writes a domain as YAML that ``read_constants`` reads: generation, framework, kind."""
    lines: list[str] = []
    before: tuple[str, ...] = ("", "")
    for generation, framework, kind in sorted(domain):
        if generation != before[0]:
            lines.append(f"{generation}:")
        if (generation, framework) != before:
            lines.append(f"  {framework}:")
        found = domain[generation, framework, kind]
        sizes = "".join(f", {name}: [{low:g}, {high:g}]" for name, (low, high) in found.sizes.items())
        lines.append(f"    {kind}: {{precisions: [{', '.join(found.precisions)}]{sizes}}}")
        before = (generation, framework)
    return "\n".join(lines) + "\n"
