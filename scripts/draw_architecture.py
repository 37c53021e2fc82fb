"""Draws the rooms of src/paceline and the imports between them: docs/images/architecture.svg.

    python scripts/draw_architecture.py            # draw it anew
    python scripts/draw_architecture.py --check    # exit 1 where the committed picture is out of date

A room is a folder of the package. An arrow means "imports"; arrows to one room share a trunk. Imports that follow from
others have no arrow: where A imports B, B imports C and A imports C, the picture shows the first two. Types that rooms
of one level take from each other have none either. Imports that run up against LEVELS of tests/test_architecture.py are
listed instead of drawn, and the script exits with 1.

`--check` ignores the numbers of lines: the picture is out of date when a room or an arrow is.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from architecture_ways import BOX_HEIGHT, GUTTER, MARGIN, ROOMS, TOP, WIDTH, Arrow, Room, Turn, lanes_of, ways_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "paceline"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
RULES = ROOT / "tests" / "test_architecture.py"

# The way of a run, which the picture emphasises. From plan to run it goes up, beside the boxes.
WAY = {
    "config": "reads the YAML and its overrides: what was asked for",
    "plan": "says what was decided: a Layout, batch sizes, steps",
    "run": "starts a process for each rank, watches and restarts them",
    "train": "makes the steps: batches, losses, updates, records",
    "engines": "spread the model over ranks and average its gradients",
    "comm": "moves the bytes: NCCL, Gloo, shared memory, virtual ranks",
}

STYLE = """
  .page { fill: #fbfbfa } .ink { fill: #1f2430 } .soft { fill: #6b7280 } .ground { fill: #f0f0ee }
  .box { fill: #ffffff; stroke: #c3c8d1 } .free { fill: #f1f6ef; stroke: #b5c9ac }
  .title { font-size: 22px; font-weight: 600 } .name { font-size: 15px; font-weight: 600 } .small { font-size: 11.5px }
  .wire { fill: none; stroke: #9aa1ae; stroke-width: 1.2 } .tip { fill: #9aa1ae } .end { text-anchor: end }
  .flow { fill: none; stroke: #2563eb; stroke-width: 3 } .main { stroke: #2563eb; stroke-width: 2 }
  .flowtip, .badge { fill: #2563eb } .count { fill: #ffffff; font-size: 11px; font-weight: 700; text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14171d } .ink { fill: #e6e8ec } .soft { fill: #98a1b0 } .ground { fill: #1b1f26 }
    .box { fill: #1e232c; stroke: #444c5a } .free { fill: #1c2a22; stroke: #44604c }
    .wire { stroke: #6a7382 } .tip { fill: #6a7382 }
    .main, .flow { stroke: #60a5fa } .flowtip, .badge { fill: #60a5fa } .count { fill: #0b1220 }
  }
"""


# What the code says.


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The rooms as the source has them: lines in each, imports between them, and the modules beside the folders."""

    lines: dict[str, int]
    imports: set[Arrow]
    root_modules: list[str]


@functools.cache
def statements_of_the_rules() -> list[ast.stmt]:
    return ast.parse(RULES.read_text()).body


def rule(name: str) -> Any:
    """The value of a constant of the architecture test."""
    for node in statements_of_the_rules():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise SystemExit(f"{RULES} has no {name}")


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements of a block and of the blocks in it, without their expressions, where most of the nodes are."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, part, ()))


def imported_modules(text: str) -> list[str]:
    found: list[str] = []
    for node in statements(ast.parse(text).body):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def read_code() -> Code:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    if differ := sorted(rooms ^ ROOMS.keys()):
        raise SystemExit(
            f"ROWS of scripts/architecture_ways.py and the folders of {PACKAGE} differ in {', '.join(differ)}"
        )
    lines: dict[str, int] = defaultdict(int)
    imports, used = set(), set()
    for path in sorted(PACKAGE.rglob("*.py")):
        room, text = path.relative_to(PACKAGE).parts[0], path.read_text()
        lines[room] += text.count("\n")
        for module in imported_modules(text):
            package, target = [*module.split("."), ""][:2]
            if package != "paceline" or room not in rooms:
                continue
            used.add(target)
            if target in rooms and room != target:
                imports.add((room, target))
    root_modules = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem in used)
    return Code(lines=lines, imports=imports, root_modules=root_modules)


def without_implied(imports: set[Arrow]) -> set[Arrow]:
    """Leaves out every import that a longer way through other rooms implies."""

    @functools.cache
    def below(room: str) -> frozenset[str]:
        direct = {target for source, target in imports if source == room}
        return frozenset(direct.union(*map(below, direct)))

    return {
        (source, target)
        for source, target in imports
        if not any(target in below(other) for start, other in imports if start == source)
    }


# The picture.


def draw_arrow(turns: list[Turn], lanes: dict[tuple[int, str], float], *, is_flow: bool) -> str:
    """A line down through the turns with round corners, and its tip."""
    path = [f"M{turns[0].start:.1f} {TOP + turns[0].row * (BOX_HEIGHT + GUTTER) + BOX_HEIGHT}"]
    for turn in [turn for turn in turns if turn.start != turn.end]:
        y = lanes[turn.row, turn.target]
        radius = min(6.0, abs(turn.end - turn.start) / 2)
        side = radius if turn.end > turn.start else -radius
        path.append(f"V{y - radius:.1f}q0 {radius:.1f} {side:.1f} {radius:.1f}")
        path.append(f"H{turn.end - side:.1f}q{side:.1f} 0 {side:.1f} {radius:.1f}")
    end, size = ROOMS[turns[-1].target], 6 if is_flow else 4
    line, tip = ("flow", "flowtip") if is_flow else ("wire", "tip")
    return (
        f'<path class="{line}" d="{"".join(path)}V{end.top - 2 * size + 2}"/>'
        f'<path class="{tip}" d="M{end.middle - size} {end.top - 2 * size}h{2 * size}l{-size} {2 * size}z"/>'
    )


def draw_arrows(arrows: set[Arrow]) -> list[str]:
    ways = ways_of(arrows)
    lanes = lanes_of([turn for turns in ways.values() for turn in turns])
    flow = set(pairwise(WAY))
    drawn = [draw_arrow(ways[arrow], lanes, is_flow=arrow in flow) for arrow in sorted(ways, key=flow.__contains__)]
    start, end = ROOMS["plan"], ROOMS["run"]
    low, high = start.top + BOX_HEIGHT // 2, end.top + BOX_HEIGHT // 2
    return [
        *drawn,
        f'<path class="flow" d="M{start.left} {low}h-16q-12 0 -12 -12V{high + 12}q0 -12 12 -12H{end.left - 9}"/>'
        f'<path class="flowtip" d="M{end.left - 12} {high - 6}v12l12 -6z"/>',
    ]


def text(x: float, y: float, words: str, kinds: str) -> str:
    return f'<text class="{kinds}" x="{x}" y="{y}">{words}</text>'


def badge(x: float, y: float, room: str) -> str:
    return f'<circle class="badge" cx="{x}" cy="{y}" r="10"/>{text(x, y + 4, str(list(WAY).index(room) + 1), "count")}'


def draw_room(room: Room, code: Code, torch_free: set[str]) -> list[str]:
    above = ", ".join(sorted(a for a, b in code.imports if b == room.name)) or "no room"
    below = ", ".join(sorted(b for a, b in code.imports if a == room.name)) or "no room"
    kinds = "box" + " free" * (room.name in torch_free) + " main" * (room.name in WAY)
    x, y, count = room.left, room.top, f"{code.lines[room.name] / 1000:.1f}k lines"
    return [
        f"<g><title>{room.name} imports {below}; imported by {above}</title>",
        f'<rect class="{kinds}" x="{x}" y="{y}" width="{room.width}" height="{BOX_HEIGHT}" rx="8"/>',
        text(x + 14, y + 24, room.name, "name ink") + text(x + 14, y + 43, room.words, "small soft"),
        text(x + room.width - 14, y + 24, count, "small soft end")
        + (badge(x, y, room.name) if room.name in WAY else ""),
        "</g>",
    ]


def draw_legend(left: int, top: int) -> list[str]:
    drawn = [text(left, top, "The way of a run", "name ink")]
    for number, (room, words) in enumerate(WAY.items(), 1):
        y = top + 27 * number
        drawn.append(badge(left + 10, y - 4, room) + text(left + 30, y, f"{room} {words}", "small ink"))
    y = top + 27 * (len(WAY) + 1)
    box = f'<rect class="box free" x="{left}" y="{y - 12}" width="20" height="15" rx="3"/>'
    return [*drawn, box + text(left + 30, y, "a room that does not import torch", "small ink")]


def draw(code: Code) -> str:
    ground = TOP + (max(room.row for room in ROOMS.values()) + 1) * (BOX_HEIGHT + GUTTER) - 8
    height = ground + BOX_HEIGHT + 28
    down = {(a, b) for a, b in code.imports if ROOMS[a].row != ROOMS[b].row}
    about = (
        "A room imports the rooms that its arrows lead to, and may import what these import. "
        "Imports that follow from others have no arrow."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<!-- Drawn by scripts/draw_architecture.py from the imports of src/paceline. -->",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="12"/>',
        text(MARGIN, 46, "The rooms of Paceline", "title ink") + text(MARGIN, 68, about, "small soft"),
        *draw_arrows(without_implied(down) | (down & set(pairwise(WAY)))),
        *(line for room in ROOMS.values() for line in draw_room(room, code, set(rule("TORCH_FREE")))),
        *draw_legend(654, ROOMS["config"].top + 22),
        f'<rect class="ground" x="{MARGIN}" y="{ground}" width="{WIDTH - 2 * MARGIN}" height="{BOX_HEIGHT}" rx="8"/>',
        text(MARGIN + 14, ground + 24, ", ".join(code.root_modules), "name ink"),
        text(MARGIN + 14, ground + 43, "single modules below the rooms that use them", "small soft"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def without_counts(picture: str) -> str:
    return re.sub(r"[\d.]+k lines", "lines", picture)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws docs/images/architecture.svg from the imports of src/paceline.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the picture is out of date")
    check = parser.parse_args().check
    code = read_code()
    levels = {name: level for level, names in enumerate(rule("LEVELS")) for name in names}
    upward = {(a, b) for a, b in code.imports if levels[b] > levels[a]}
    problems = [f"{a} imports {b}, which is above it" for a, b in sorted(upward)]
    problems += [
        f"ROWS has {a} below {b}, which it imports" for a, b in code.imports - upward if ROOMS[a].row > ROOMS[b].row
    ]
    code.imports.difference_update(upward)
    picture = draw(code)
    if not check:
        PICTURE.write_text(picture)
    elif not PICTURE.exists() or without_counts(PICTURE.read_text()) != without_counts(picture):
        problems.append(f"{PICTURE.relative_to(ROOT)} is out of date: run python scripts/draw_architecture.py")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
