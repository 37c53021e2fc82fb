"""Draws the pictures of the course from data: docs/images/learn/*.svg.

    python scripts/draw_pictures.py                      # draw all of them anew
    python scripts/draw_pictures.py ring.svg tree.svg    # some
    python scripts/draw_pictures.py --check              # exit 1 where a committed picture is out of date

No picture holds numbers of its own: collectives run on virtual ranks, rings and trees are the rounds of the algorithms,
schedules are measured, time lines come from dry runs of the engines, restarts are asked of the function that decides
about them, and memory, step times and the landscape come from the functions behind ``paceline plan``. The same code
gives the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "learn"
MOST_BYTES = 60_000

# The module and the function that draws each.
PICTURES: Mapping[str, tuple[str, str]] = {
    "collectives.svg": ("pictures_messages", "draw_collectives"),
    "ring.svg": ("pictures_messages", "draw_ring"),
    "tree.svg": ("pictures_messages", "draw_tree"),
    "topology.svg": ("pictures_network", "draw_topology"),
    "cards.svg": ("pictures_cards", "draw_cards"),
    "overlap.svg": ("pictures_traces", "draw_overlap"),
    "memory-bars.svg": ("pictures_plans", "draw_memory_bars"),
    "memory-time.svg": ("pictures_memory", "draw_memory_over_time"),
    "fsdp-timeline.svg": ("pictures_traces", "draw_fsdp_timeline"),
    "tensor-mlp.svg": ("pictures_tensor", "draw_mlp"),
    "tensor-attention.svg": ("pictures_tensor", "draw_attention"),
    "schedules.svg": ("pictures_schedules", "draw_schedules"),
    "precision.svg": ("pictures_plans", "draw_precision"),
    "roofline.svg": ("pictures_limits", "draw_roofline"),
    "read-timeline.svg": ("pictures_traces", "draw_read_timeline"),
    "placement.svg": ("pictures_network", "draw_placement"),
    "landscape.svg": ("pictures_plans", "draw_landscape"),
    "ring-attention.svg": ("pictures_ring", "draw_ring_attention"),
    "document-deal.svg": ("pictures_ring", "draw_document_deal"),
    "experts.svg": ("pictures_experts", "draw_experts"),
    "at-scale.svg": ("pictures_limits", "draw_at_scale"),
    "play-curves.svg": ("pictures_curves", "draw_play_curves"),
    "restarts.svg": ("pictures_restarts", "draw_restarts"),
    "survive.svg": ("pictures_survive", "draw_survive"),
}


def draw(name: str) -> str:
    """Draws one picture."""
    module, function = PICTURES[name]
    make: Callable[[], str] = getattr(import_module(module), function)
    return make()


def problems(names: Sequence[str], folder: Path = FOLDER) -> Iterator[str]:
    """Draws pictures, and iterates over what is wrong with the files that are there."""
    for name in names:
        drawn, path = draw(name), folder / name
        if len(drawn.encode()) > MOST_BYTES:
            yield f"{name} has {len(drawn.encode()):,} bytes: at most {MOST_BYTES:,}"
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            yield f"{name} is out of date: run python scripts/draw_pictures.py {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws the pictures of the course: docs/images/learn/*.svg.")
    parser.add_argument("names", nargs="*", metavar="NAME.svg", help="which; else all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a picture is out of date")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - PICTURES.keys()):
        parser.error(f"there is no {', '.join(unknown)}: the pictures are {', '.join(PICTURES)}")
    names = asked.names or list(PICTURES)
    if asked.check:
        found = list(problems(names))
        for problem in found:
            print(problem, file=sys.stderr)
        return 1 if found else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        (FOLDER / name).write_text(draw(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
